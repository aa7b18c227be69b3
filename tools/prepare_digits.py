# SPDX-License-Identifier: Apache-2.0
"""Write a small real data set for all three frameworks, without a download.

scikit-learn ships 1,797 handwritten digits (UCI, 8x8 pixels). They are split once into training
and validation digits; no digit of one is ever drawn in the other. From them and a seed come

    OUT/classification/{train,val}/{0..9}/*.png     MMPretrain's CustomDataset
    OUT/scenes/{train,val}/*.png                    scenes of 1 to 5 digits, and for these
    OUT/annotations/instances_{train,val}.json      COCO instances, for MMDetection
    OUT/semantic/{train,val}/*.png                  0 background, digit + 1; for MMSegmentation
    OUT/digits.json                                 how it was made, which digits are in which split

The same arguments give the same bytes, and picture i does not depend on how many there are.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

try:
    import cv2
    from PIL import Image
    from pycocotools import mask as coco_mask
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f'prepare_digits.py needs the module {error.name}: '
        'pip install scikit-learn opencv-python pycocotools pillow tqdm'
    ) from error

SPLITS = ('train', 'val')
CLASSES = tuple(str(digit) for digit in range(10))
VAL_SHARE = 0.2  # of the source digits
INK = 0.45  # of full blackness: what is darker belongs to the digit
MAX_DIGITS = 5
SCENE_SIDES = (20 / 128, 56 / 128)  # height of a digit over the side of its picture
CLASSIFICATION_SIDES = (0.55, 0.85)
MAX_OVERLAP = 0.08  # of the smaller digit's mask
MIN_CONTRAST = 90.0  # in luminance (0…255), of a digit to what is behind it; hues are free
LUMINANCE = np.array([0.299, 0.587, 0.114])
MARKER = 'digits.json'


class DigitPictures:
    """Draws pictures of source digits.

    Args:
        seed: Seed of everything: the split, and every picture.

    Attributes:
        sources (dict[str, ndarray]): Of each split the source digits, as indices of
            ``sklearn.datasets.load_digits()``, ordered 0…9, 0…9, … as long as all ten last.
        labels (ndarray): The digit 0…9 of every index.
    """

    def __init__(self, seed: int = 0) -> None:
        digits = load_digits()
        self.seed = seed
        self.glyphs = (digits.images / 16.0).astype(np.float32)
        self.labels = digits.target
        parts = train_test_split(
            np.arange(len(self.labels)),
            test_size=VAL_SHARE,
            stratify=self.labels,
            random_state=seed,
        )
        self.sources = {
            split: self._alternate(part) for split, part in zip(SPLITS, parts, strict=True)
        }

    def _alternate(self, sources: np.ndarray) -> np.ndarray:
        by_digit = [sources[self.labels[sources] == digit] for digit in range(10)]
        longest = max(len(part) for part in by_digit)
        return np.array([part[i] for i in range(longest) for part in by_digit if i < len(part)])

    def _rng(self, kind: str, split: str, index: int) -> np.random.Generator:
        key = (('classification', 'scenes').index(kind), SPLITS.index(split), index)
        return np.random.default_rng([self.seed, *key])

    def scene(self, split: str, index: int, size: int) -> tuple[np.ndarray, list[int], list]:
        """Scene ``index`` of a split: one to five of its digits; see :meth:`draw`."""
        rng = self._rng('scenes', split, index)
        count = rng.integers(1, MAX_DIGITS + 1)
        sources = rng.choice(self.sources[split], count, replace=False)
        return self.draw(rng, sources, size, SCENE_SIDES)

    def single(self, split: str, index: int, size: int) -> tuple[np.ndarray, int]:
        """Classification picture ``index`` of a split: the image and its source digit.

        A light digit on a dark ground with some noise; scenes have colours and textures. The
        sources are taken in turn; later rounds draw them again, differently.
        """
        source = int(self.sources[split][index % len(self.sources[split])])
        rng = self._rng('classification', split, index)
        height = size * rng.uniform(*CLASSIFICATION_SIDES)
        alpha = warp_glyph(rng, self.glyphs[source], height, size)
        top, left = rng.integers(0, size + 1 - np.array(alpha.shape))
        canvas = np.zeros((size, size, 1), np.float32)
        canvas[top : top + alpha.shape[0], left : left + alpha.shape[1], 0] = alpha
        canvas = 255 * (rng.uniform(0.5, 1) * canvas + 0.1 * rng.random(canvas.shape, np.float32))
        return canvas.clip(0, 255).round().astype(np.uint8).repeat(3, axis=2), source

    def draw(
        self,
        rng: np.random.Generator,
        sources: Sequence[int],
        size: int,
        sides: tuple[float, float],
    ) -> tuple[np.ndarray, list[int], list[np.ndarray]]:
        """Draw digits of varied size, slant and colour on a textured background.

        Digits may touch; what overlaps more than ``MAX_OVERLAP`` is placed again, and left out if
        there is no room (the first always has room). Where two overlap the later one is in front.

        Args:
            rng: Source of randomness.
            sources: Indices of the digits to draw.
            size: Side of the square picture in pixels.
            sides: Smallest and largest height of a digit, as a share of ``size``.

        Returns:
            The RGB image ``(size, size, 3)`` uint8, and of each digit that was drawn its source
            and its visible mask, boolean ``(size, size)``.
        """
        canvas = draw_background(rng, size)
        drawn, masks = [], []
        heights = np.sort(size * np.exp(rng.uniform(*np.log(sides), len(sources))))[::-1]
        for source, height in zip(sources, heights, strict=True):
            alpha = warp_glyph(rng, self.glyphs[source], height, size)
            for _ in range(50):
                top, left = rng.integers(0, size + 1 - np.array(alpha.shape))
                place = np.s_[top : top + alpha.shape[0], left : left + alpha.shape[1]]
                mask = np.zeros((size, size), bool)
                mask[place] = alpha >= 0.5
                if all((mask & m).sum() <= MAX_OVERLAP * min(mask.sum(), m.sum()) for m in masks):
                    break
            else:
                continue
            paint(rng, canvas[place], alpha)
            masks = [*(m & ~mask for m in masks), mask]
            drawn.append(int(source))
        canvas += rng.uniform(3, 10) * rng.standard_normal(canvas.shape, np.float32)
        return canvas.clip(0, 255).round().astype(np.uint8), drawn, masks


def draw_background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Colour gradient, blotches and a few thin strokes: ``(size, size, 3)`` float32."""
    canvas = np.empty((size, size, 3), np.float32)
    canvas[:] = rng.uniform(50, 205) + rng.uniform(-55, 55, 3)
    for cells, strength in ((2, 40), (5, 20), (14, 15)):
        noise = rng.uniform(-strength, strength, (cells, cells, 3)).astype(np.float32)
        canvas += cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(rng.integers(0, 4)):
        start, end = (tuple(map(int, rng.integers(0, size, 2))) for _ in range(2))
        colour = (canvas[start[1], start[0]] + rng.uniform(-60, 60, 3)).tolist()
        cv2.line(canvas, start, end, colour, int(rng.integers(1, 3)), cv2.LINE_AA)
    return canvas


def warp_glyph(
    rng: np.random.Generator, glyph: np.ndarray, height: float, limit: int
) -> np.ndarray:
    """Enlarge a glyph smoothly, with a random slant and turn.

    Args:
        rng: Source of randomness.
        glyph: Ink ``(8, 8)`` in 0…1.
        height: Wanted height in pixels.
        limit: Largest height and width of the result.

    Returns:
        Opacity in 0…1, cropped to where it is at least ½ (the digit's mask) and 1 pixel around.
    """
    scale = height / 8
    turn, slant = rng.uniform(-0.2, 0.2), rng.uniform(-0.25, 0.25)
    stretch = rng.uniform(0.85, 1.2)
    cos, sin = np.cos(turn), np.sin(turn)
    matrix = np.array([[cos, -sin], [sin, cos]]) @ np.array([[stretch, slant], [0, 1]]) * scale
    side = int(np.ceil(2 * height))
    offset = (side - 1) / 2 - matrix @ [3.5, 3.5]
    ink = cv2.warpAffine(
        glyph, np.column_stack([matrix, offset]), (side, side), flags=cv2.INTER_CUBIC
    )
    ink = cv2.GaussianBlur(ink, (0, 0), 0.2 * scale)
    # an edge about two pixels wide, through 1/2 where the ink is at its threshold
    alpha = np.clip((ink - INK) * scale / 1.2 + 0.5, 0, 1)
    rows, cols = (np.flatnonzero((alpha >= 0.5).any(axis)) for axis in (1, 0))
    alpha = alpha[rows[0] - 1 : rows[-1] + 2, cols[0] - 1 : cols[-1] + 2]
    return alpha[:limit, :limit]


def paint(rng: np.random.Generator, canvas: np.ndarray, alpha: np.ndarray) -> None:
    """Blend a shaded random colour that stands out from what is behind it into ``canvas``.

    Args:
        rng: Source of randomness.
        canvas: RGB values ``(h, w, 3)``, changed in place.
        alpha: Opacity ``(h, w)`` in 0…1.
    """
    behind = canvas[alpha >= 0.5].mean(axis=0)
    colour = behind
    while abs((colour - behind) @ LUMINANCE) < MIN_CONTRAST:
        colour = rng.uniform(0, 255, 3)
    shade = rng.uniform(-25, 25, (2, 2, 1)).astype(np.float32)
    shade = cv2.resize(shade, canvas.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    canvas += alpha[..., None] * (colour + shade[..., None] - canvas)


def coco_instance(mask: np.ndarray, digit: int, **fields: int) -> dict:
    """COCO annotation of a mask ``(H, W)``, as compressed RLE: exact, holes included."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return dict(
        **fields,
        category_id=digit + 1,
        bbox=coco_mask.toBbox(rle).tolist(),
        area=int(coco_mask.area(rle)),
        iscrowd=0,
        segmentation=dict(size=list(mask.shape), counts=rle['counts'].decode('ascii')),
    )


def write_scenes(pictures: DigitPictures, root: Path, split: str, count: int, size: int) -> None:
    """Write scenes, semantic masks and the COCO file of a split under ``root``."""
    for kind in ('scenes', 'semantic'):
        (root / kind / split).mkdir(parents=True)
    images, annotations = [], []
    for i in tqdm(range(count), desc=f'scenes/{split}', disable=None):
        image, sources, masks = pictures.scene(split, i, size)
        name = f'{i:05d}.png'
        semantic = np.zeros((size, size), np.uint8)
        images.append(dict(id=i + 1, file_name=name, width=size, height=size))
        for source, mask in zip(sources, masks, strict=True):
            digit = int(pictures.labels[source])
            semantic[mask] = digit + 1
            # COCO's evaluation takes annotation 0 for "no match", so ids start at 1
            fields = dict(id=len(annotations) + 1, image_id=i + 1, source_id=source)
            annotations.append(coco_instance(mask, digit, **fields))
        Image.fromarray(image).save(root / 'scenes' / split / name)
        Image.fromarray(semantic).save(root / 'semantic' / split / name)
    content = dict(
        info=dict(description='Scenes of the handwritten digits of scikit-learn'),
        images=images,
        annotations=annotations,
        categories=[dict(id=i + 1, name=name) for i, name in enumerate(CLASSES)],
    )
    path = root / 'annotations' / f'instances_{split}.json'
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_classification(
    pictures: DigitPictures, root: Path, split: str, count: int, size: int
) -> None:
    """Write ``classification/{split}/{digit}/{picture}_{source digit}.png`` under ``root``."""
    for name in CLASSES:
        (root / 'classification' / split / name).mkdir(parents=True)
    for i in tqdm(range(count), desc=f'classification/{split}', disable=None):
        image, source = pictures.single(split, i, size)
        folder = root / 'classification' / split / CLASSES[pictures.labels[source]]
        Image.fromarray(image).save(folder / f'{i:05d}_{source:04d}.png')


def prepare_digits(
    out: str | Path,
    num_train: int = 1600,
    num_val: int = 200,
    num_classification_train: int = 4311,
    num_classification_val: int = 360,
    scene_size: int = 128,
    classification_size: int = 64,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Write the data set.

    Args:
        out: Folder to create.
        num_train: Training scenes.
        num_val: Validation scenes.
        num_classification_train: Training pictures of single digits; 4311 is three of each digit.
        num_classification_val: Validation pictures of single digits; 360 is one of each digit.
        scene_size: Side of a scene in pixels.
        classification_size: Side of a classification picture in pixels.
        seed: Seed of the split and of every picture.
        force: Replace ``out`` if it holds an earlier data set of this function.

    Returns:
        The absolute path of ``out``.

    Raises:
        ValueError: A count is below 1 (for classification below 10, one per class), a size is
            below 32 pixels, or the seed is negative.
        FileExistsError: ``out`` exists and ``force`` is not set, or it is something else than an
            earlier data set. Nothing is changed then.
    """
    options = {key: value for key, value in locals().items() if key not in ('out', 'force')}
    for key, value in options.items():
        lowest = 10 if 'num_classification' in key else 32 if 'size' in key else 'num' in key
        if value < lowest:
            raise ValueError(f'{key} must be at least {int(lowest)}, not {value}.')
    out = Path(out).resolve()
    if out.exists() and not force:
        raise FileExistsError(f'{out} exists; --force replaces it.')
    if out.exists() and not (out / MARKER).is_file():
        raise FileExistsError(f'{out} is no data set of this tool, so it is not replaced.')
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = DigitPictures(seed)
    with tempfile.TemporaryDirectory(prefix=f'.{out.name}-', dir=out.parent) as temporary:
        root, old = Path(temporary, 'new'), Path(temporary, 'old')
        for split in SPLITS:
            write_scenes(pictures, root, split, options[f'num_{split}'], scene_size)
            count = options[f'num_classification_{split}']
            write_classification(pictures, root, split, count, classification_size)
        sources = {split: sorted(ids.tolist()) for split, ids in pictures.sources.items()}
        (root / MARKER).write_text(json.dumps(dict(options=options, source_ids=sources)))
        if out.exists():
            out.rename(old)
        root.rename(out)
    return out


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; every option is an argument of :func:`prepare_digits`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar='N', help=f'{text} (default {default})'
        )

    parser.add_argument(
        '--out', default='data/digits', help='folder to create (default data/digits)'
    )
    option('--num-train', 1600, 'training scenes')
    option('--num-val', 200, 'validation scenes')
    option('--num-classification-train', 4311, 'training pictures of single digits')
    option('--num-classification-val', 360, 'validation pictures of single digits')
    option('--scene-size', 128, 'side of a scene in pixels; digits grow with it')
    option('--classification-size', 64, 'side of a classification picture in pixels')
    option('--seed', 0, 'of the split and of every picture')
    parser.add_argument('--force', action='store_true', help='replace an earlier data set in OUT')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; 0 if the data set was written, 1 (and a sentence on stderr) if not."""
    try:
        out = prepare_digits(**vars(parse_args(argv)))
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(f'Wrote {out}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
