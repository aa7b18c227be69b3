# SPDX-License-Identifier: Apache-2.0
"""Pictures of what a model looks at and of what it finds.

Every ``draw_*`` function returns a matplotlib figure: ``figure.savefig(path)`` writes it, without a
display. matplotlib is imported only when something is drawn.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ..models.backbones.base import STRIDES
from ..models.backbones.partialformer import PartialFormer
from ..models.layers.partial_attention import foreground_mask, split_tokens
from .attention import LayerAttention, layer_similarity
from .observe import find_backbone, run_observed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTLINE = '#ffb000'


def foreground_maps(model: nn.Module, images: Tensor) -> list[list[Tensor]]:
    """Which tokens PartialFormer takes for foreground, in every block.

    The backbone runs unchanged, in eval mode; the split is repeated on what it saw.

    Args:
        model: A PartialFormer, or a model with one in it.
        images: Preprocessed images ``(B, in_channels, H, W)``.

    Returns:
        Of each stage a list with, for each block, a boolean ``(B, ceil(H/s), ceil(W/s))``, ``s``
        being the stage's stride; true is foreground.

    Raises:
        ValueError: There is no PartialFormer in the model.
    """
    backbone = find_backbone(model, PartialFormer, 'foreground tokens to show')
    maps: list[list[Tensor]] = [[] for _ in backbone.stages]
    handles = []
    for stage_maps, stage in zip(maps, backbone.stages, strict=True):
        for block in stage.blocks:

            def record(_, args, x, ratio=block.foreground_ratio, into=stage_maps):
                _, height, width = args
                mask = foreground_mask(split_tokens(x, ratio), x.shape[1])
                into.append(mask.view(-1, height, width))

            # what the position encoding returns is what the block splits
            handles.append(block.pos_embed.register_forward_hook(record))
    run_observed(backbone, images, handles)
    return maps


def to_pixels(tokens: np.ndarray, stride: int, height: int, width: int) -> np.ndarray:
    """Enlarge a map of tokens ``(h, w)`` to the ``(height, width)`` pixels of the image.

    Token ``i`` looks at a region centred at pixel ``i * stride`` (patch embeddings have odd
    kernels), so each pixel belongs to the token with the nearest centre.
    """
    rows, cols = (
        np.minimum((np.arange(length) + stride // 2) // stride, count - 1)
        for length, count in zip((height, width), tokens.shape, strict=True)
    )
    return tokens[rows][:, cols]


def draw_foreground(
    image: np.ndarray, maps: Sequence[Sequence[Tensor]], every_block: bool = False
) -> 'Figure':
    """Draw an image beside its foreground tokens in each stage.

    Foreground keeps its colours and is outlined, background is dark and grey.

    Args:
        image: The image that the network saw, RGB ``(H, W, 3)`` uint8.
        maps: Of each stage, and in it of each block, a boolean ``(h, w)`` map of one image; from
            :func:`foreground_maps`.
        every_block: A row for each stage with all its blocks, instead of one row with the last
            block of each stage.
    """
    if every_block:
        rows = [list(enumerate(stage)) for stage in maps]
    else:
        rows = [[(len(stage) - 1, stage[-1]) for stage in maps]]
    columns = 1 + max(len(row) for row in rows)
    figure, axes = empty_grid(len(rows), columns, image.shape[0] / image.shape[1], 2.6, header=0.35)
    where = 'every block' if every_block else 'the last block of each stage'
    figure.suptitle(
        f'PartialFormer in {where}: foreground tokens in colour, background in grey', fontsize=11
    )
    show(axes[0, 0], image, f'image, {image.shape[1]}×{image.shape[0]} pixels')
    for r, row in enumerate(rows):
        for c, (block, tokens) in enumerate(row):
            stage = r if every_block else c
            title = f'stage {stage + 1}, stride {STRIDES[stage]}'
            title += f', block {block + 1}' if every_block else ''
            _show_tokens(axes[r, c + 1], image, tokens.cpu().numpy(), STRIDES[stage], title)
    return figure


def _show_tokens(
    axes: 'Axes', image: np.ndarray, tokens: np.ndarray, stride: int, title: str
) -> None:
    height, width = image.shape[:2]
    foreground = to_pixels(tokens, stride, height, width)
    grey = np.repeat(image.mean(axis=2, keepdims=True) * 0.5, 3, axis=2)
    picture = np.where(foreground[..., None], image, grey.astype(np.uint8))
    show(axes, picture, f'{title}\n{tokens.sum()} of {tokens.size} tokens')
    if not foreground.all():
        axes.contour(foreground, levels=[0.5], colors=OUTLINE, linewidths=0.7)


def draw_attention(
    image: np.ndarray, layers: Sequence[LayerAttention], queries: Sequence[tuple[float, float]]
) -> 'Figure':
    """Draw what chosen places of an image attend to, layer by layer.

    Args:
        image: The image that the network saw, RGB ``(H, W, 3)`` uint8.
        layers: The layers to draw, of a single stage and of a batch of one image; from
            :func:`effvit_mm.analysis.attention.attention_of`.
        queries: Places as shares of the image's height and width, such as ``(0.5, 0.5)``. A row of
            the figure for each, a column for each layer; weights are averaged over heads, and the
            brightest is the largest of a picture.
    """
    height, width = image.shape[:2]
    first = layers[0]
    stride = STRIDES[first.stage]
    similarity = {layer: value for _, layer, value in layer_similarity(list(layers))}
    figure, axes = empty_grid(len(queries), 1 + len(layers), height / width, 2.2, header=0.35)
    figure.suptitle(
        f'LaViT, stage {first.stage + 1} (stride {stride}): weights of one query (outlined) on the '
        'keys, mean of the heads',
        fontsize=11,
    )
    for r, (y, x) in enumerate(queries):
        row, col = min(int(y * first.height), first.height - 1), int(x * first.width)
        col = min(col, first.width - 1)
        show(axes[r, 0], image, f'query at row {row}, column {col}')
        _mark_cell(axes[r, 0], row, col, stride)
        for c, layer in enumerate(layers):
            weights = layer.weights[0, row * layer.width + col].mean(dim=0).cpu().numpy()
            side = round(len(weights) ** 0.5)
            title = f'layer {layer.layer + 1}, {"LA" if layer.less else "VA"}'
            if layer.layer in similarity:
                title += f'\nsimilar to the one before: {similarity[layer.layer]:.2f}'
            axes[r, c + 1].imshow(image.mean(axis=2), cmap='gray', vmin=0, vmax=500)
            axes[r, c + 1].imshow(
                weights.reshape(side, side),
                cmap='inferno',
                alpha=0.65,
                # a key is an equal part of the image
                extent=(-0.5, width - 0.5, height - 0.5, -0.5),
                interpolation='nearest',
                vmin=0,
            )
            axes[r, c + 1].set_title(f'{title}\nlargest weight {weights.max():.2f}', fontsize=8)
            _mark_cell(axes[r, c + 1], row, col, stride)
    return figure


def _mark_cell(axes: 'Axes', row: int, col: int, stride: int) -> None:
    """Outline the cell of a token; its centre is at ``(col, row) * stride``."""
    from matplotlib.patches import Rectangle

    corner = (col - 0.5) * stride, (row - 0.5) * stride
    axes.add_patch(Rectangle(corner, stride, stride, fill=False, edgecolor=OUTLINE, lw=1.5))


def draw_similarity(
    curves: dict[str, Sequence[tuple[int, int, float]]],
    label: str = 'cosine similarity with\nthe layer before',
) -> 'Figure':
    """Draw a similarity layer by layer, such as that of a layer's attention to the layer before.

    Args:
        curves: By name, for each layer its stage, its number and a value, as
            :func:`effvit_mm.analysis.attention.layer_similarity` returns them.
        label: What the values are.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=150, layout='constrained')
    axes = figure.subplots()
    places = list(dict.fromkeys((s, j) for curve in curves.values() for s, j, _ in curve))
    places.sort()
    for i, (name, curve) in enumerate(curves.items()):
        for k, stage in enumerate(sorted({s for s, _, _ in curve})):
            at, values = zip(
                *((places.index((s, j)), v) for s, j, v in curve if s == stage), strict=True
            )
            entry = None if k else name  # one entry of the legend for all stages
            axes.plot(at, values, color=f'C{i}', marker='osD^v'[i % 5], label=entry)
    axes.set_xticks(range(len(places)), [f'{s + 1}.{j + 1}' for s, j in places])
    axes.set_xlabel('stage.layer')
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def draw_detections(
    images: Sequence[np.ndarray],
    samples: Sequence[Any],
    classes: Sequence[str],
    score_threshold: float = 0.3,
    pairs_per_row: int = 2,
) -> 'Figure':
    """Draw predictions beside the ground truth, image by image.

    Args:
        images: RGB images ``(H, W, 3)`` uint8, in the coordinates of the boxes.
        samples: Of each image a ``DetDataSample`` as MMDetection's ``test_step`` returns it, with
            ``pred_instances`` and, if known, ``gt_instances``. Without, an image stands alone.
        classes: Names of the classes.
        score_threshold: Predictions with a lower score are not drawn.
        pairs_per_row: Images in a row.
    """
    panels = []
    for i, (image, sample) in enumerate(zip(images, samples, strict=True)):
        if 'gt_instances' in sample and len(sample.gt_instances):
            panels.append((image, sample.gt_instances, f'image {i + 1}: ground truth'))
        else:
            panels.append((image, None, f'image {i + 1}'))
        found = sample.pred_instances
        found = found[found.scores >= score_threshold]
        title = f'image {i + 1}: predicted, score ≥ {score_threshold:g}'
        panels.append((image, found, title))
    columns = 2 * min(pairs_per_row, len(images))
    aspect = max(image.shape[0] / image.shape[1] for image in images)
    figure, axes = empty_grid(-(-len(panels) // columns), columns, aspect, 3.2)
    for ax, (image, instances, title) in zip(axes.flat, panels, strict=False):
        show(ax, image, title)
        if instances is not None:
            _show_instances(ax, instances, classes)
    return figure


def _show_instances(axes: 'Axes', instances: Any, classes: Sequence[str]) -> None:
    import matplotlib
    from matplotlib.patches import Rectangle

    boxes = getattr(instances.bboxes, 'tensor', instances.bboxes).cpu().numpy()
    labels = instances.labels.tolist()
    texts = [classes[label] for label in labels]
    if 'scores' in instances:
        scores = instances.scores.tolist()
        texts = [f'{text} {score:.2f}' for text, score in zip(texts, scores, strict=True)]
    masks = instances.get('masks')
    if masks is not None:
        masks = masks.cpu().numpy() if isinstance(masks, Tensor) else masks.to_ndarray()
    palette = matplotlib.colormaps['tab10' if len(classes) <= 10 else 'tab20'].colors
    for i, (left, top, right, bottom) in enumerate(boxes):
        colour = palette[labels[i] % len(palette)]
        if masks is not None and masks[i].any():
            axes.contour(masks[i].astype(float), levels=[0.5], colors='white', linewidths=1.8)
            axes.contour(masks[i].astype(float), levels=[0.5], colors=[colour], linewidths=1.0)
        # pixel centres are at whole numbers in the picture, pixel corners are in the box
        corner, width, height = (left - 0.5, top - 0.5), right - left, bottom - top
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, lw=1.5))
        axes.text(
            *corner,
            texts[i],
            fontsize=7,
            color='white',
            va='bottom' if top > 8 else 'top',
            bbox=dict(facecolor=colour, edgecolor='none', pad=1),
            clip_on=True,
        )


def empty_grid(
    rows: int, columns: int, aspect: float, width: float, header: float = 0.0
) -> tuple['Figure', np.ndarray]:
    """Figure and ``(rows, columns)`` empty axes for images of ``aspect`` height over width.

    ``width`` is that of an image and ``header`` the room above all of them, in inches.
    """
    from matplotlib.figure import Figure

    title = 0.45
    figure = Figure(
        figsize=(columns * width, rows * (width * aspect + title) + header),
        dpi=150,
        layout='compressed',
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    return figure, axes


def show(axes: 'Axes', image: np.ndarray, title: str) -> None:
    axes.imshow(image, interpolation='nearest')
    axes.set_title(title, fontsize=9)
