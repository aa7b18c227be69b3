# SPDX-License-Identifier: Apache-2.0
"""LaViT's attention as the pictures and the saturation measure take it."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from effvit_mm import LaViT, PartialFormer
from effvit_mm.analysis.attention import (
    attention_of,
    layer_similarity,
    mean_cosine,
    query_similarity,
)
from effvit_mm.models.layers.partial_attention import split_tokens

SMALL = dict(dims=(16, 16, 32, 32), depths=(1, 2, 3, 2), num_heads=(1, 2, 4, 4))


def lavit(**fields):
    torch.manual_seed(0)
    return LaViT(arch={**SMALL, **fields})


def test_every_layer_of_every_stage_gives_rows_that_are_distributions_over_the_keys():
    model = lavit().train()
    layers = attention_of(nn.ModuleDict(dict(backbone=model)), torch.randn(2, 3, 70, 99))
    assert [(layer.stage, layer.layer) for layer in layers] == [
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)
    ]  # fmt: skip
    assert [layer.less for layer in layers] == [0, 0, 1, 0, 1, 1, 0, 1]
    assert [(layer.height, layer.width) for layer in layers[:2]] == [(18, 25), (9, 13)]
    for layer in layers:
        heads = SMALL['num_heads'][layer.stage]
        assert layer.weights.shape == (2, layer.height * layer.width, heads, 49)
        torch.testing.assert_close(layer.weights.sum(3), torch.ones(layer.weights.shape[:3]))
    assert model.training


def test_the_weights_are_those_the_layer_mixes_its_values_with():
    model = lavit(attention_residual=False).eval()
    seen = {}
    attention = model.stages[3].blocks[0].attn
    attention.register_forward_hook(lambda m, args, output: seen.update(x=args[0]))
    image = torch.randn(1, 3, 224, 224)
    last = next(layer for layer in attention_of(model, image) if layer.stage == 3)
    q, k = attention.q(seen['x']), attention.k(seen['x'])
    q, k = (x.view(49, 4, 8).transpose(0, 1) for x in (q, k))
    expected = (q @ k.transpose(1, 2) / 8**0.5).softmax(dim=2)
    torch.testing.assert_close(last.weights[0].transpose(0, 1), expected)


def test_untrained_less_attention_is_saturated_and_vanilla_attention_is_not():
    image = torch.randn(1, 3, 224, 224)
    less = layer_similarity(attention_of(lavit().eval(), image))
    assert [(stage, layer) for stage, layer, _ in less] == [(1, 1), (2, 1), (2, 2), (3, 1)]
    assert all(value == pytest.approx(1, abs=1e-5) for *_, value in less)
    model = lavit(vanilla_layers=SMALL['depths']).eval()
    for name, p in model.named_parameters():
        if name.endswith(('attn.q.weight', 'attn.k.weight')):
            p.data.mul_(40)
    vanilla = layer_similarity(attention_of(model, image))
    assert all(value < 0.9 for *_, value in vanilla)


def test_similarity_is_the_mean_cosine_of_the_rows():
    layers = attention_of(lavit(vanilla_layers=(1, 1, 2, 1)).eval(), torch.randn(2, 3, 64, 64))
    before, after = (layer.weights for layer in layers if layer.stage == 2 and layer.layer < 2)
    rows = [
        F.cosine_similarity(a, b, dim=0).item()
        for a, b in zip(before.flatten(0, 2), after.flatten(0, 2), strict=True)
    ]
    value = next(v for s, j, v in layer_similarity(layers) if (s, j) == (2, 1))
    assert value == pytest.approx(np.mean(rows), abs=1e-5)


def test_a_model_without_lavit_is_named():
    with pytest.raises(ValueError, match='it has no LaViT'):
        attention_of(PartialFormer('b0'), torch.zeros(1, 3, 32, 32))


@pytest.mark.skipif(importlib.util.find_spec('matplotlib') is None, reason='needs matplotlib')
def test_pictures_show_each_query_on_its_cell_and_weights_where_the_keys_lie():
    from effvit_mm.analysis.pictures import draw_attention, draw_similarity

    layers = attention_of(lavit().eval(), torch.randn(1, 3, 96, 64))
    stage = [layer for layer in layers if layer.stage == 2]
    figure = draw_attention(np.zeros((96, 64, 3), np.uint8), stage, [(0.5, 0.5), (0.99, 0)])
    axes = figure.axes
    assert len(axes) == 2 * 4
    assert [ax.get_title().split('\n')[0] for ax in axes[:4]] == [
        'query at row 3, column 2', 'layer 1, VA', 'layer 2, LA', 'layer 3, LA'
    ]  # fmt: skip
    picture = axes[5].get_images()[-1]
    assert list(picture.get_extent()) == [-0.5, 63.5, 95.5, -0.5]
    expected = stage[0].weights[0, 5 * 4].mean(dim=0).view(7, 7)
    np.testing.assert_allclose(picture.get_array(), expected, rtol=1e-6)
    assert axes[5].patches[0].get_xy() == (-8, 72)

    curves = dict(LA=layer_similarity(layers))
    (chart,) = draw_similarity(curves).axes
    assert [line.get_label() for line in chart.lines if line.get_label()[0] != '_'] == ['LA']
    assert sum(len(line.get_xdata()) for line in chart.lines) == len(curves['LA'])


def test_mean_cosine_is_that_of_all_pairs():
    rows = torch.rand(2, 3, 7, 5, dtype=torch.float64)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for i in range(7):
        for j in range(7):
            if i != j:
                expected += F.cosine_similarity(rows[..., i, :], rows[..., j, :], dim=-1) / 42
    torch.testing.assert_close(mean_cosine(rows), expected)


def test_similarity_of_queries_is_that_of_a_loop_over_pairs():
    torch.manual_seed(0)
    model = PartialFormer('b0').train()
    for name, p in model.named_parameters():
        if name.endswith('qkv.weight'):
            p.data.mul_(20)
    seen = {}
    block = model.stages[2].blocks[1]
    block.pos_embed.register_forward_hook(lambda m, args, x: seen.update(x=x))
    image = torch.randn(2, 3, 64, 96)
    found = query_similarity(nn.ModuleDict(dict(backbone=model)), image)
    assert [(s.stage, s.block) for s in found] == [
        (i, j) for i, depth in enumerate((2, 2, 5, 2)) for j in range(depth)
    ]
    assert model.training
    x, h, d = seen['x'], 4, 32
    index = split_tokens(x, block.foreground_ratio)
    q, k, _ = block.mmsa.qkv(block.norm1(x)).double().view(2, 24, 3, h, d).unbind(2)
    sums, pairs = dict(foreground=0.0, background=0.0), dict(foreground=0, background=0)
    for b in range(2):
        for head in range(h):
            weights = (q[b, :, head] @ k[b, :, head].T / d**0.5).softmax(dim=1)
            for i in range(24):
                for j in range(24):
                    inside = {i in index[b], j in index[b]}
                    if i != j and len(inside) == 1:
                        group = 'foreground' if inside.pop() else 'background'
                        sums[group] += F.cosine_similarity(weights[i], weights[j], dim=0).item()
                        pairs[group] += 1
    actual = next(s for s in found if (s.stage, s.block) == (2, 1))
    for group, total in sums.items():
        assert getattr(actual, group) == pytest.approx(total / pairs[group], abs=1e-5)
    # the last stage of so small an image has six tokens, three of them foreground
    assert all(0 <= s.background <= 1 + 1e-6 for s in found)
