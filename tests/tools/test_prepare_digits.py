# SPDX-License-Identifier: Apache-2.0
"""tools/prepare_digits.py: what the frameworks read, and what a user may do wrong."""

import json

import numpy as np
import pytest
from PIL import Image

COCO = pytest.importorskip('pycocotools.coco').COCO
pytest.importorskip('sklearn')

TINY = dict(num_train=12, num_val=6, num_classification_train=20, num_classification_val=10)
TINY_ARGUMENTS = [
    part for key, value in TINY.items() for part in ('--' + key.replace('_', '-'), str(value))
]


@pytest.fixture(scope='module')
def tool(load_tool):
    return load_tool('prepare_digits')


@pytest.fixture(scope='module')
def data(tool, tmp_path_factory):
    return tool.prepare_digits(tmp_path_factory.mktemp('data') / 'digits', **TINY)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def coco(data, split):
    return COCO(str(data / 'annotations' / f'instances_{split}.json'))


def test_same_seed_gives_the_same_bytes(tool, data, tmp_path):
    assert contents(tool.prepare_digits(tmp_path / 'again', **TINY)) == contents(data)


def test_other_seed_gives_other_pictures_and_another_split(tool, data, tmp_path):
    other = tool.prepare_digits(tmp_path / 'other', seed=1, **TINY)
    name = 'scenes/train/00000.png'
    assert (other / name).read_bytes() != (data / name).read_bytes()
    assert (
        tool.DigitPictures(1).sources['val'].tolist()
        != tool.DigitPictures(0).sources['val'].tolist()
    )


def test_a_larger_data_set_continues_a_smaller_one(tool, data, tmp_path):
    larger = contents(tool.prepare_digits(tmp_path / 'larger', **{**TINY, 'num_train': 13}))
    images = {path: content for path, content in contents(data).items() if path.suffix == '.png'}
    assert images.items() <= larger.items()


def test_digits_of_the_validation_scenes_never_occur_in_training(tool, data):
    used = {}
    for split in ('train', 'val'):
        scenes = {a['source_id'] for a in coco(data, split).dataset['annotations']}
        singles = (data / 'classification' / split).rglob('*.png')
        used[split] = scenes | {int(path.stem.split('_')[1]) for path in singles}
    recorded = json.loads((data / 'digits.json').read_text())['source_ids']
    assert used['train'] <= set(recorded['train'])
    assert used['val'] <= set(recorded['val'])
    assert not set(recorded['train']) & set(recorded['val'])
    assert len(recorded['train']) + len(recorded['val']) == 1797


@pytest.mark.parametrize('split', ['train', 'val'])
def test_annotations_hold_what_the_coco_api_computes_from_the_masks(tool, data, split):
    api = coco(data, split)
    assert len(api.imgs) == TINY[f'num_{split}']
    assert [c['name'] for c in api.loadCats(api.getCatIds())] == [str(d) for d in range(10)]
    assert min(api.anns) == 1
    labels = tool.DigitPictures().labels
    for annotation in api.anns.values():
        mask = api.annToMask(annotation).astype(bool)
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = [cols[0], rows[0], cols[-1] - cols[0] + 1, rows[-1] - rows[0] + 1]
        assert annotation['bbox'] == box
        assert annotation['area'] == mask.sum() > 0
        assert annotation['iscrowd'] == 0
        assert annotation['category_id'] == labels[annotation['source_id']] + 1


@pytest.mark.parametrize('split', ['train', 'val'])
def test_semantic_masks_are_the_instances_and_instances_do_not_overlap(data, split):
    api = coco(data, split)
    for image in api.imgs.values():
        annotations = api.imgToAnns[image['id']]
        assert 1 <= len(annotations) <= 5
        masks = np.stack([api.annToMask(a) for a in annotations])
        assert masks.sum(0).max() == 1
        expected = sum(m * a['category_id'] for m, a in zip(masks, annotations, strict=True))
        scene = Image.open(data / 'scenes' / split / image['file_name'])
        semantic = Image.open(data / 'semantic' / split / image['file_name'])
        assert (scene.mode, semantic.mode) == ('RGB', 'L')
        assert scene.size == semantic.size == (image['width'], image['height']) == (128, 128)
        np.testing.assert_array_equal(np.asarray(semantic), expected)


def test_every_source_digit_can_be_drawn_and_digits_stand_out(tool):
    pictures = tool.DigitPictures()
    for source in range(len(pictures.labels)):
        rng = np.random.default_rng(source)
        alpha = tool.warp_glyph(rng, pictures.glyphs[source], 20, 128)
        assert (alpha >= 0.5).sum() > 40
    _, _, masks = pictures.scene('val', 0, 128)
    image = pictures.scene('val', 0, 128)[0].astype(float)
    background = ~np.any(masks, axis=0)
    for mask in masks:
        assert np.linalg.norm(image[mask].mean(0) - image[background].mean(0)) > 20


def test_sizes_of_digits_grow_with_the_scene(tool):
    pictures = tool.DigitPictures()
    heights = []
    for i in range(40):
        for mask in pictures.scene('train', i, 256)[2]:
            heights.append(mask.any(1).sum())
    assert 35 <= min(heights) < 60 and 80 < max(heights) <= 128


def test_classification_folders_hold_every_class_in_turn(data):
    for split, count in (('train', 2), ('val', 1)):
        folders = sorted((data / 'classification' / split).iterdir())
        assert [f.name for f in folders] == [str(d) for d in range(10)]
        for folder in folders:
            images = [Image.open(p) for p in folder.iterdir()]
            assert [(i.size, i.mode) for i in images] == [((64, 64), 'RGB')] * count


@pytest.mark.slow
def test_mmpretrain_reads_the_classification_folder(data):
    custom = pytest.importorskip('mmpretrain.datasets').CustomDataset
    dataset = custom(data_root=str(data / 'classification'), data_prefix='train', pipeline=[])
    assert len(dataset) == 20
    assert dataset.metainfo['classes'] == tuple(str(d) for d in range(10))


def test_existing_folder_is_refused_and_left_alone(tool, data, tmp_path, capsys):
    out = tmp_path / 'digits'
    assert tool.main(['--out', str(out), *TINY_ARGUMENTS]) == 0
    (out / 'mine.txt').write_text('keep')
    before = contents(out)
    capsys.readouterr()
    assert tool.main(['--out', str(out), '--seed', '3', *TINY_ARGUMENTS]) == 1
    assert capsys.readouterr().err == f'error: {out} exists; --force replaces it.\n'
    assert contents(out) == before
    assert tool.main(['--out', str(out), '--force', *TINY_ARGUMENTS]) == 0
    assert contents(out) == contents(data)
    assert list(tmp_path.iterdir()) == [out]


def test_force_does_not_replace_a_folder_of_something_else(tool, tmp_path, capsys):
    (tmp_path / 'thesis.txt').write_text('keep')
    assert tool.main(['--out', str(tmp_path), '--force', *TINY_ARGUMENTS]) == 1
    assert 'no data set of this tool' in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ['thesis.txt']


def test_an_interrupted_run_leaves_nothing(tool, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, 'write_classification', interrupt)
    with pytest.raises(KeyboardInterrupt):
        tool.prepare_digits(tmp_path / 'digits', **TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'arguments, complaint',
    [
        (['--num-val', '0'], 'num_val must be at least 1, not 0.'),
        (['--num-classification-val', '9'], 'num_classification_val must be at least 10, not 9.'),
        (['--scene-size', '16'], 'scene_size must be at least 32, not 16.'),
        (['--seed', '-1'], 'seed must be at least 0, not -1.'),
    ],
)
def test_bad_numbers_are_refused_with_a_sentence(tool, tmp_path, capsys, arguments, complaint):
    assert tool.main(['--out', str(tmp_path / 'digits'), *arguments]) == 1
    assert capsys.readouterr().err == f'error: {complaint}\n'
    assert not (tmp_path / 'digits').exists()
