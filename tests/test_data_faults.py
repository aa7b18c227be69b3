# SPDX-License-Identifier: Apache-2.0
"""Data as it comes: odd image files, and scenes in which nothing is annotated."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from PIL import Image

from effvit_mm.engine.launch import import_framework

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """A folder with a few digits in ``data/digits``."""
    folder = tmp_path_factory.mktemp('root')
    counts = ['--num-train', '4', '--num-val', '2']
    counts += ['--num-classification-train', '20', '--num-classification-val', '10']
    subprocess.run(
        [sys.executable, ROOT / 'tools' / 'prepare_digits.py', *counts], cwd=folder, check=True
    )
    return folder


def train_two_steps(name, root, tmp_path, monkeypatch, change):
    """Two steps of a digits config after a change; its losses."""
    monkeypatch.chdir(root)
    cfg = Config.fromfile(ROOT / 'configs' / f'{name}.py')
    pytest.importorskip(cfg.default_scope)
    import_framework(cfg.default_scope)
    cfg.update(work_dir=str(tmp_path), experiment_name=tmp_path.name, launcher='none')
    cfg.train_cfg.update(max_iters=2, val_interval=10)
    cfg.train_dataloader.batch_size = 2
    cfg.default_hooks.logger.interval = 1
    change(cfg)
    runner = Runner.from_cfg(cfg)
    before = runner.model.backbone.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    runner.train()
    after = runner.model.backbone.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in after)
    return runner.message_hub.get_scalar('train/loss').data[0]


@pytest.mark.parametrize('name', ['mask_rcnn_partialformer_b0_digits', 'retinanet_lavit_digits'])
def test_scenes_without_an_object_are_trained_on(name, root, tmp_path, monkeypatch):
    path = root / 'data' / 'digits' / 'annotations' / 'instances_train.json'
    scenes = json.loads(path.read_text())
    scenes['annotations'] = []
    (tmp_path / 'none.json').write_text(json.dumps(scenes))

    def change(cfg):
        cfg.train_dataloader.dataset.update(
            data_root='', ann_file=str(tmp_path / 'none.json'), filter_cfg=None
        )
        cfg.train_dataloader.dataset.data_prefix.img = 'data/digits/scenes/train/'

    losses = train_two_steps(name, root, tmp_path, monkeypatch, change)
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_masks_without_a_label_are_trained_on(root, tmp_path, monkeypatch):
    for path in (root / 'data' / 'digits' / 'semantic' / 'train').glob('*.png'):
        (tmp_path / 'masks').mkdir(exist_ok=True)
        unlabelled = np.full(np.array(Image.open(path)).shape, 255, np.uint8)
        Image.fromarray(unlabelled).save(tmp_path / 'masks' / path.name)

    def change(cfg):
        cfg.train_dataloader.dataset.update(
            data_root='',
            data_prefix=dict(
                img_path='data/digits/scenes/train', seg_map_path=str(tmp_path / 'masks')
            ),
        )
        if import_module('mmseg').__version__ == '1.2.2':  # with weights, it takes 255 for a class
            cfg.model.decode_head.loss_decode.class_weight = None

    losses = train_two_steps('semantic_fpn_lavit_digits', root, tmp_path, monkeypatch, change)
    assert losses[0] == pytest.approx(losses[-1], abs=0.2) and np.isfinite(losses).all()


KINDS = {
    'gray': np.uint8(np.arange(64 * 64).reshape(64, 64) % 251),
    'RGBA': np.uint8(np.arange(64 * 64 * 4).reshape(64, 64, 4) % 251),
    '16 bits': np.uint16(np.arange(64 * 64).reshape(64, 64) * 15),
    'one pixel': np.uint8([[[9, 8, 7]]]),
}


@pytest.mark.parametrize('kind', KINDS)
def test_odd_image_files_become_colour_images(kind, tmp_path):
    pytest.importorskip('mmpretrain')
    import_framework('mmpretrain')
    from mmpretrain.registry import TRANSFORMS

    Image.fromarray(KINDS[kind]).save(tmp_path / 'image.png')
    cfg = Config.fromfile(ROOT / 'configs' / 'classifier_lavit_digits.py')
    data = dict(img_path=str(tmp_path / 'image.png'), gt_label=3)
    for step in cfg.val_dataloader.dataset.pipeline:
        data = TRANSFORMS.build(step)(data)
    assert data['inputs'].dtype == torch.uint8
    assert data['inputs'].shape == (3, *KINDS[kind].shape[:2])
