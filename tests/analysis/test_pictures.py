# SPDX-License-Identifier: Apache-2.0
"""The pictures show what the network did, at the right place."""

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement, InstanceData
from torch import nn

from effvit_mm import PartialFormer
from effvit_mm.analysis.pictures import (
    draw_detections,
    draw_foreground,
    foreground_maps,
    to_pixels,
)
from effvit_mm.models.backbones import partialformer

pytest.importorskip('matplotlib')

ROOT = Path(__file__).resolve().parents[2]
ARCH = dict(base='b0', base_channels=8, depths=(1, 2, 1, 1), num_heads=(1, 1, 2, 2))


@pytest.fixture(scope='module')
def model():
    torch.manual_seed(0)
    return PartialFormer(ARCH)


def shown_image(axes):
    return np.asarray(axes.get_images()[0].get_array())


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_maps_are_the_splits_the_blocks_made(model, monkeypatch):
    used = []

    def record(x, ratio):
        used.append(split(x, ratio))
        return used[-1]

    split = partialformer.split_tokens
    monkeypatch.setattr(partialformer, 'split_tokens', record)
    maps = foreground_maps(nn.ModuleDict(dict(backbone=model)), torch.randn(2, 3, 70, 99))
    assert [len(stage) for stage in maps] == [1, 2, 1, 1]
    shapes = [(2, 18, 25), (2, 9, 13), (2, 5, 7), (2, 3, 4)]
    assert [stage[-1].shape for stage in maps] == shapes
    flat = [mask for stage in maps for mask in stage]
    for mask, index in zip(flat, used, strict=True):
        for i in range(2):
            assert mask[i].flatten().nonzero().flatten().tolist() == index[i].sort()[0].tolist()


def test_model_is_left_as_it_was(model):
    model.train()
    x = torch.randn(1, 3, 64, 64)
    before = [f.clone() for f in model(x)]
    foreground_maps(model, x)
    assert model.training and all(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    for a, b in zip(before, model(x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    model.eval()


def test_a_model_without_partialformer_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match='Linear has no foreground tokens to show'):
        foreground_maps(nn.Linear(2, 2), torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize('stage', range(4))
def test_pixels_belong_to_the_token_that_looks_at_them(model, stage):
    x = torch.zeros(1, 1, 128, 128, dtype=torch.double, requires_grad=True)
    tokens = x
    for i in range(stage + 1):
        proj = model.stages[i].patch_embed.proj
        ones = torch.ones(1, 1, *proj.kernel_size, dtype=torch.double)
        tokens = nn.functional.conv2d(tokens, ones, None, proj.stride, proj.padding)
    row, col = tokens.shape[2] // 2, tokens.shape[3] // 2
    weight = torch.autograd.grad(tokens[0, 0, row, col], x)[0][0, 0]
    pixel = [
        round(float((weight.sum(1 - d) * torch.arange(128)).sum() / weight.sum())) for d in range(2)
    ]
    one_hot = np.zeros(tokens.shape[2:], bool)
    one_hot[row, col] = True
    region = np.argwhere(to_pixels(one_hot, 4 << stage, 128, 128))
    assert np.abs(region.mean(0) - pixel).max() <= 0.5
    assert len(region) == (4 << stage) ** 2


def test_every_pixel_gets_a_token_at_sizes_that_do_not_divide():
    tokens = np.arange(3 * 4).reshape(3, 4)
    pixels = to_pixels(tokens, 32, 70, 99)
    assert pixels.shape == (70, 99)
    assert np.unique(pixels).tolist() == list(range(12))


def test_foreground_keeps_its_colours_and_background_is_dark(model, tmp_path):
    image = np.random.default_rng(0).integers(100, 256, (64, 96, 3), np.uint8)
    maps = foreground_maps(model, torch.randn(1, 3, 64, 96))
    maps = [[mask[0] for mask in stage] for stage in maps]
    figure = draw_foreground(image, maps)
    assert titles(figure)[:2] == [
        'image, 96×64 pixels',
        'stage 1, stride 4\n6 of 384 tokens',
    ]
    for axes, stride, stage in zip(figure.axes[1:], (4, 8, 16, 32), maps, strict=True):
        inside = to_pixels(stage[-1].numpy(), stride, 64, 96)
        np.testing.assert_array_equal(shown_image(axes)[inside], image[inside])
        assert shown_image(axes)[~inside].max() <= 128
    figure.savefig(tmp_path / 'picture.png')
    assert (tmp_path / 'picture.png').stat().st_size > 1000


def test_every_block_gets_a_panel_on_demand(model):
    maps = foreground_maps(model, torch.randn(1, 3, 64, 64))
    maps = [[mask[0] for mask in stage] for stage in maps]
    figure = draw_foreground(np.zeros((64, 64, 3), np.uint8), maps, every_block=True)
    assert len(titles(figure)) == 1 + 5
    assert titles(figure)[3].startswith('stage 2, stride 8, block 2\n')


def instances(boxes, labels, scores=None):
    masks = torch.zeros(len(boxes), 40, 50, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    fields = dict(bboxes=torch.tensor(boxes).float(), labels=torch.tensor(labels), masks=masks)
    if scores is not None:
        fields['scores'] = torch.tensor(scores)
    return InstanceData(**fields)


def test_predictions_stand_beside_the_ground_truth():
    image = np.zeros((40, 50, 3), np.uint8)
    boxes = [[5, 10, 20, 30], [30, 12, 45, 28]]

    sample = BaseDataElement(
        gt_instances=instances(boxes, [3, 1]),
        pred_instances=instances(boxes, [3, 0], [0.9, 0.2]),
    )
    figure = draw_detections([image], [sample], tuple('0123456789'), 0.3)
    assert titles(figure) == ['image 1: ground truth', 'image 1: predicted, score ≥ 0.3']
    truth, predicted = figure.axes
    assert [text.get_text() for text in truth.texts] == ['3', '1']
    assert [text.get_text() for text in predicted.texts] == ['3 0.90']
    box = truth.patches[0].get_bbox()
    # the box of pixels 5 to 19 reaches from the left edge of the first to the right of the last
    assert (box.x0, box.y0, box.x1, box.y1) == (4.5, 9.5, 19.5, 29.5)


def test_without_ground_truth_the_image_stands_alone():
    sample = BaseDataElement(pred_instances=instances([[5, 10, 20, 30]], [3], [0.9]))
    figure = draw_detections([np.zeros((40, 50, 3), np.uint8)] * 3, [sample] * 3, ['a'] * 4)
    assert titles(figure)[-2:] == ['image 3', 'image 3: predicted, score ≥ 0.3']


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    """The tool, and its arguments for an untrained detector on tiny digit scenes."""
    pytest.importorskip('mmdet')
    pytest.importorskip('mmcv.ops')
    pytest.importorskip('sklearn')
    folder = tmp_path_factory.mktemp('visualize')
    data = load_tool('prepare_digits').prepare_digits(
        folder / 'digits', 1, 2, num_classification_train=10, num_classification_val=10
    )
    config = folder / 'tiny.py'
    config.write_text(
        f"_base_ = ['{ROOT}/configs/mask_rcnn_partialformer_b0_digits.py']\n"
        f'test_dataloader = dict(dataset=dict(data_root={str(data)!r}))\n'
        f'arch = dict(_delete_=True, **{ARCH})\n'
        'model = dict(backbone=dict(arch=arch), neck=dict(in_channels=[8, 16, 32, 64]))\n'
        "model['test_cfg'] = dict(rcnn=dict(score_thr=0.0, max_per_img=3))\n"
    )
    tool = load_tool('visualize')
    arguments = argparse.Namespace(
        config=str(config), cfg_options=None, work_dir=None, launcher='none'
    )
    cfg = tool.load_config(arguments)
    tool.init_default_scope('mmdet')
    torch.save(MODELS.build(cfg.model).state_dict(), folder / 'untrained.pth')
    return tool, [str(config), str(folder / 'untrained.pth'), '--device', 'cpu'], data


def test_tool_draws_test_data_and_images_of_the_users_own(detector, tmp_path, capsys):
    tool, arguments, data = detector
    out = ['--out-dir', str(tmp_path)]
    own = data / 'classification/val/7'
    images = ['--images', *map(str, own.iterdir())]
    tool.main(['foreground', *arguments, *out, '--num', '1'])
    tool.main(['foreground', *arguments, *out, '--every-block', *images])
    tool.main(['predictions', *arguments, *out, '--score-threshold', '0'])
    written = sorted(p.name for p in tmp_path.iterdir())
    assert written == [
        'foreground_0_00000.png',
        f'foreground_0_{next(own.iterdir()).stem}.png',
        'predictions.png',
    ]
    assert all(f'Wrote {tmp_path / name}\n' in capsys.readouterr().out for name in written[:1])


@pytest.mark.parametrize(
    'command, changed, complaint',
    [
        ('foreground', {1: 'no.pth'}, 'There is no checkpoint no.pth.'),
        ('predictions', {4: '--images', 5: 'no.jpg'}, 'There is no image no.jpg.'),
        ('predictions', {4: '--num', 5: '0'}, '--num must be at least 1, not 0.'),
    ],
)
def test_tool_says_what_is_missing(detector, tmp_path, command, changed, complaint):
    tool, arguments, _ = detector
    arguments = [changed.get(i, part) for i, part in enumerate([*arguments, None, None])]
    arguments = [part for part in arguments if part is not None]
    with pytest.raises(tool.SetupError, match=complaint):
        tool.main([command, *arguments, '--out-dir', str(tmp_path)])
