# SPDX-License-Identifier: Apache-2.0
"""Less attention against the paper's formulas with one plain matrix per sample and head."""

import pytest
import torch
from torch import nn
from versions import need_cpu_autocast, need_cpu_type

from effvit_mm.models.layers import less_attention
from effvit_mm.models.layers.grid import Tiling
from effvit_mm.models.layers.less_attention import (
    AttentionDownsample,
    LessAttention,
    ScoreTransformation,
    SpatialReduction,
    VanillaAttention,
    attend,
    attention_between_cells,
    make_stage_grid,
)

DIM, HEADS, KEYS = 12, 3, 49


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_weights(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def grid_of(x, image_size, stride, reduction, query_grid=None):
    height, width = (-(-s // stride) for s in image_size)
    return make_stage_grid(x, height, width, image_size, stride, reduction, 7, query_grid)


# (stride, reduction, side of the map and of Ψ's tile) of the stages at 224 pixels that have Ψ
PRETRAINING = [(16, 2, 14), (32, 1, 7)]


@pytest.mark.parametrize('stage', PRETRAINING, ids=str)
def test_la_layer_equals_the_formula_at_the_pretraining_size(stage):
    stride, reduction, side = stage
    layer = random_weights(LessAttention(DIM, HEADS, reduction, KEYS, side**2))
    x, scores = double(2, side**2, DIM), double(2, side**2, HEADS, KEYS, seed=1)
    out, new_scores = layer(x, scores, grid_of(x, (224, 224), stride, reduction, side))
    theta = torch.eye(KEYS) + layer.transform.theta_delta
    psi = torch.eye(side**2) + layer.transform.psi_delta
    for b in range(2):
        if reduction > 1:
            image = x[b].T.reshape(1, DIM, side, side)
            reduced = layer.reduction.norm(layer.reduction.conv(image)[0].flatten(1).T)
        else:
            reduced = x[b]
        values, heads = reduced @ layer.v.weight.T, []
        for h in range(HEADS):
            a = ((scores[b, :, h] @ theta.T).T @ psi.T).T  # Ψ(Θ(A)ᵀ)ᵀ
            torch.testing.assert_close(new_scores[b, :, h], a, rtol=1e-10, atol=1e-10)
            heads.append(a.softmax(1) @ values[:, h * 4 : h * 4 + 4])
        expected = torch.cat(heads, dim=1) @ layer.proj.weight.T + layer.proj.bias
        torch.testing.assert_close(out[b], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('residual', [False, True])
def test_va_layer_equals_the_formula(residual):
    layer = random_weights(VanillaAttention(DIM, HEADS, 2))
    x = double(2, 196, DIM)
    added = double(2, 196, HEADS, KEYS, seed=1) if residual else None
    out, scores = layer(x, added, grid_of(x, (224, 224), 16, 2))
    for b in range(2):
        reduced = layer.reduction.conv(x[b].T.reshape(1, DIM, 14, 14))[0].flatten(1).T
        reduced = layer.reduction.norm(reduced)
        q, heads = x[b] @ layer.q.weight.T, []
        k, v = reduced @ layer.k.weight.T, reduced @ layer.v.weight.T
        for h in range(HEADS):
            part = slice(h * 4, h * 4 + 4)
            a = q[:, part] @ k[:, part].T / 4**0.5
            a = a + added[b, :, h] if residual else a
            # what is handed on is neither scaled again nor softmaxed
            torch.testing.assert_close(scores[b, :, h], a, rtol=1e-10, atol=1e-10)
            heads.append(a.softmax(1) @ v[:, part])
        expected = torch.cat(heads, dim=1) @ layer.proj.weight.T + layer.proj.bias
        torch.testing.assert_close(out[b], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('side', [7, 10, 14])
@pytest.mark.parametrize('query_grid', [None, 7])
def test_an_untrained_la_layer_repeats_the_scores_of_the_layer_before(side, query_grid):
    transform = ScoreTransformation(KEYS, query_grid and query_grid**2)
    scores = 100 * torch.randn(2, side**2, 2, KEYS)
    tiling = Tiling(2, side, side, (7, 7))
    assert torch.equal(transform(scores, tiling), scores)


@pytest.mark.parametrize('captured', [False, True], ids=['eager', 'captured'])
@pytest.mark.parametrize('size', [(3, 2), (4, 4), (5, 9), (8, 4)], ids=str)
def test_rows_that_a_tile_adds_never_change_a_real_one(size, captured, monkeypatch):
    """Each tile is Ψ's rows and columns of the queries that exist, and nothing else."""
    monkeypatch.setattr('effvit_mm.models.layers.grid.is_captured', lambda: captured)
    (height, width), tile = size, 4
    transform = random_weights(ScoreTransformation(9, tile**2))
    scores = double(2, height * width, 3, 9)
    out = transform(scores, Tiling(2, height, width, (tile, tile)))
    theta = torch.eye(9) + transform.theta_delta
    psi = torch.eye(tile**2) + transform.psi_delta
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            places = [(y, x) for y in range(tile) for x in range(tile)
                      if top + y < height and left + x < width]  # fmt: skip
            tokens = [(top + y) * width + left + x for y, x in places]
            cells = [y * tile + x for y, x in places]
            rows = torch.einsum('bqhk,lk->bqhl', scores[:, tokens], theta)
            expected = torch.einsum('pq,bqhl->bphl', psi[cells][:, cells], rows)
            torch.testing.assert_close(out[:, tokens], expected, rtol=1e-10, atol=1e-10)


def test_padding_makes_no_nan_of_the_largest_scores():
    transform = ScoreTransformation(9, 16)
    nn.init.normal_(transform.psi_delta, std=0.1)
    out = transform(torch.full((1, 15, 1, 9), 1e30), Tiling(1, 3, 5, (4, 4)))
    assert out.isfinite().all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_scores_are_float32_in_mixed_precision(dtype):
    need_cpu_autocast(dtype)
    va, la = VanillaAttention(DIM, HEADS, 2), LessAttention(DIM, HEADS, 2, KEYS, 196)
    down = AttentionDownsample(HEADS, 4, KEYS)
    nn.init.ones_(down.head_mix)
    x = 1000 * torch.randn(1, 196, DIM)
    grid = grid_of(x, (224, 224), 16, 2, 14)
    with torch.no_grad():
        exact = [va(x, None, grid)]
        exact.append(la(x, exact[0][1], grid))
        with torch.autocast('cpu', dtype=dtype):
            lowered = [va(x, None, grid)]
            lowered.append(la(x, lowered[0][1], grid))
            assert down(lowered[1][1], 14, 14).dtype == torch.float32
    for (out, scores), (_, expected_scores) in zip(lowered, exact, strict=True):
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert scores.dtype == torch.float32
        error = (scores - expected_scores).abs().max() / expected_scores.abs().max()
        assert error < 0.02


def test_softmax_is_of_float32_scores_whatever_the_values_are():
    need_cpu_type(torch.float16)
    proj = nn.Linear(8, 8).half()
    scores = torch.randn(1, 6, 2, 5) * 1e5
    values = torch.randn(1, 5, 8).half()
    out = attend(scores, values, proj)
    assert out.dtype == torch.float16
    assert out.isfinite().all()


def slow_downsample(module, scores, height, width):
    """One key's map at a time."""
    batch, _, heads, m = scores.shape
    maps = []
    for key in range(m):
        x = scores[..., key].transpose(1, 2).reshape(batch, heads, height, width)
        maps.append(module.conv(x).flatten(2).transpose(1, 2))
    rows = module.norm(torch.stack(maps, dim=3))
    return torch.stack([sum(w * rows[:, :, h] for h, w in enumerate(mix))
                        for mix in module.head_mix], dim=2)  # fmt: skip


@pytest.mark.parametrize('size', [(6, 8), (5, 7), (1, 2)], ids=str)
def test_attention_downsampling_equals_convolutions_of_each_key_s_map(size):
    module = random_weights(AttentionDownsample(2, 5, 9))
    scores = double(2, size[0] * size[1], 2, 9)
    out = module(scores, *size)
    assert out.shape == (2, -(-size[0] // 2) * -(-size[1] // 2), 5, 9)
    torch.testing.assert_close(out, slow_downsample(module, scores, *size), rtol=1e-9, atol=1e-9)


def test_an_untrained_attention_residual_is_exactly_zero():
    out = AttentionDownsample(1, 2, 9)(torch.randn(2, 16, 1, 9), 4, 4)
    assert not out.any()


def test_one_head_is_not_normalised_away():
    module = AttentionDownsample(1, 2, 9)
    nn.init.ones_(module.head_mix)
    out = module(torch.randn(2, 16, 1, 9), 4, 4)
    assert out.std() > 0.5


STAGES = [(4, 8), (8, 4), (16, 2), (32, 1)]


@pytest.mark.parametrize('captured', [False, True], ids=['eager', 'captured'])
@pytest.mark.parametrize('size', [(100, 100), (224, 224), (333, 333), (32, 500)], ids=str)
def test_keys_of_all_stages_cover_the_same_cells_of_the_image(size, captured, monkeypatch):
    monkeypatch.setattr(less_attention, 'is_captured', lambda: captured)
    covers = []
    for stride, reduction in STAGES:
        height, width = (-(-s // stride) for s in size)
        x = torch.zeros(1, height * width, 1)
        grid = grid_of(x, size, stride, reduction)
        # which pixels a key averages, if each map's cells are averages of their pixels
        cover = torch.eye(49) if grid.key_cover is None else grid.key_cover
        reduced = tuple(-(-s // reduction) for s in (height, width))
        pixels = cover.view(49, *reduced)
        for axis, length in ((1, size[0]), (2, size[1])):
            cells = pixels.shape[axis]
            counts = torch.tensor([min(32, length - 32 * c) for c in range(cells)])
            pixels = pixels / counts.view([-1 if a == axis else 1 for a in range(3)])
            pixels = pixels.repeat_interleave(counts, axis)
        covers.append(pixels)
    assert covers[0].shape == (49, *size)
    assert all(torch.equal(cover, covers[0]) for cover in covers)
    torch.testing.assert_close(covers[0].mean(0), torch.full(size, 1 / (size[0] * size[1])))


@pytest.mark.parametrize(('stride', 'reduction'), STAGES)
@pytest.mark.parametrize('size', [(32, 32), (100, 133), (224, 224), (240, 333)], ids=str)
def test_keys_are_made_of_every_cell_at_any_size(size, stride, reduction):
    module = random_weights(SpatialReduction(4, reduction))
    height, width = (-(-s // stride) for s in size)
    x = double(1, height * width, 4).requires_grad_()
    keys = module(x, grid_of(x, size, stride, reduction))
    assert keys.shape == (1, 49, 4)
    keys.square().sum().backward()
    assert (x.grad.abs().sum(2) > 0).all()


def test_reduction_is_pvt_s_at_the_pretraining_size():
    module = random_weights(SpatialReduction(4, 8))
    x = double(2, 56 * 56, 4)
    expected = module.conv(x.transpose(1, 2).reshape(2, 4, 56, 56)).flatten(2).transpose(1, 2)
    expected = module.norm(expected)
    torch.testing.assert_close(module(x, grid_of(x, (224, 224), 4, 8)), expected)


def test_attention_between_cells_averages_the_queries_of_each_cell():
    scores = double(2, 28 * 28, 3, 49)
    grid = grid_of(scores.flatten(2), (224, 224), 8, 4)
    cells = attention_between_cells(scores, grid, 7)
    assert cells.shape == (2, 3, 49, 49)
    for cell in (0, 6, 23, 48):
        y, x = divmod(cell, 7)
        queries = [(4 * y + i) * 28 + 4 * x + j for i in range(4) for j in range(4)]
        expected = sum(scores[:, q] for q in queries) / 16
        torch.testing.assert_close(cells[:, :, cell], expected, rtol=1e-6, atol=1e-7)


def test_attention_between_cells_is_itself_where_queries_are_cells():
    scores = double(2, 49, 3, 49)
    grid = grid_of(scores.flatten(2), (224, 224), 32, 1)
    assert torch.equal(attention_between_cells(scores, grid, 7), scores.transpose(1, 2))


def test_heads_that_do_not_divide_the_channels_are_refused():
    for build in (lambda: VanillaAttention(10, 3, 1), lambda: LessAttention(10, 3, 1, 49)):
        with pytest.raises(ValueError, match='10 channels cannot be divided among 3 heads'):
            build()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_small_differences_from_the_identity_count_in_low_precision(dtype):
    transform = ScoreTransformation(4)
    with torch.no_grad():
        transform.theta_delta.fill_diagonal_(2**-12)
    scores = torch.randn(2, 3, 1, 4)
    torch.testing.assert_close(
        transform.to(dtype)(scores), scores * (1 + 2**-12), rtol=1e-6, atol=0
    )
