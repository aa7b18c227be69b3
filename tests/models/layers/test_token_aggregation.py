# SPDX-License-Identifier: Apache-2.0
"""Aggregations and the way back, against loops and plain matrices in double precision."""

import pytest
import torch
from torch.nn import functional as F

from effvit_mm.models.layers.token_aggregation import (
    GLAD,
    ConcatAggregation,
    DownsampleAggregation,
    Unprojection,
    balanced_rotation,
    linear_start,
    ridge_unprojection,
)
from effvit_mm.models.layers.utils import mix_tokens


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def awake(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(0.3 * noise(*p.shape, seed=i + 1))
    return module.double()


def smooth_tokens(batch: int, side: int, dim: int) -> torch.Tensor:
    """Tokens of which neighbours are alike, the class token first: ``(batch, 1 + side², dim)``."""
    coarse = noise(batch, dim, 4, 4)
    grid = F.interpolate(coarse, (side, side), mode='bicubic') + 0.1 * noise(batch, dim, side, side)
    return torch.cat((noise(batch, 1, dim, seed=9), grid.flatten(2).transpose(1, 2)), dim=1)


@pytest.mark.parametrize('norm', [True, False])
@pytest.mark.parametrize('pos_embed', [True, False])
@torch.no_grad()
def test_glad_equals_the_paper_s_formula_token_by_token(norm, pos_embed):
    glad, x = awake(GLAD(6, 10, 4, norm, pos_embed)), noise(3, 10, 6)
    for image, actual in zip(x, glad(x), strict=True):
        for k in range(4):
            y = sum(glad.weight[k, j] * image[j] for j in range(10))
            if norm:
                y = (y - y.mean()) / (y.var(correction=0) + 1e-6).sqrt()
                y = F.gelu(y * glad.norm.weight + glad.norm.bias)
            if pos_embed:
                y = y + glad.pos_embed[k]
            torch.testing.assert_close(actual[k], y)


def test_mixing_tokens_is_a_matrix_product_with_its_gradients():
    x, weight = noise(2, 5, 3).requires_grad_(), noise(4, 5).requires_grad_()
    assert torch.autograd.gradcheck(mix_tokens, (weight, x))
    torch.testing.assert_close(mix_tokens(weight, x), torch.einsum('mn,bnc->bmc', weight, x))


@pytest.mark.parametrize('num_out', [1, 10, 11])
def test_glad_refuses_numbers_of_tokens_that_are_no_aggregation(num_out):
    with pytest.raises(ValueError, match=f'not {num_out} of 10'):
        GLAD(6, 10, num_out)


@pytest.mark.parametrize('side', [4, 5])
@torch.no_grad()
def test_local_aggregations_see_2_x_2_neighbours_and_pass_the_class_token(side):
    x, half = noise(2, 1 + side**2, 3), -(-side // 2)
    concat = awake(ConcatAggregation(3, 1 + side**2))
    mean = DownsampleAggregation(1 + side**2).double()
    assert concat.num_out == mean.num_out == 1 + half**2
    for aggregation in (concat, mean):
        y = aggregation(x)
        assert y.shape == (2, 1 + half**2, 3)
        assert torch.equal(y[:, 0], x[:, 0])
    grid = x[:, 1:].unflatten(1, (side, side))
    for i in range(half):
        for j in range(half):
            cells = grid[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            k = 1 + i * half + j
            torch.testing.assert_close(mean(x)[:, k], cells.mean(dim=(1, 2)))
            full = x.new_zeros(2, 2, 2, 3)
            full[:, : cells.shape[1], : cells.shape[2]] = cells
            columns_first = full.transpose(1, 2).flatten(1)  # the order of Swin's merging
            expected = concat.reduction(concat.norm(columns_first))
            torch.testing.assert_close(concat(x)[:, k], expected)


@pytest.mark.parametrize('build', [lambda n: ConcatAggregation(3, n), DownsampleAggregation])
def test_local_aggregations_of_a_deit_leave_49_and_16_patch_tokens(build):
    assert [build(n).num_out for n in (1 + 196, 1 + 49)] == [1 + 49, 1 + 16]


@pytest.mark.parametrize('build', [lambda n: ConcatAggregation(3, n), DownsampleAggregation])
def test_local_aggregations_refuse_what_is_no_grid(build):
    with pytest.raises(ValueError, match='square grid'):
        build(15)


@torch.no_grad()
def test_the_way_back_without_images_undoes_what_can_be_undone():
    glad = awake(GLAD(6, 10, 4))
    y = noise(2, 4, 6)
    x = mix_tokens(glad.inverse(), y)
    torch.testing.assert_close(mix_tokens(glad.weight, x), y)
    mean = DownsampleAggregation(26)
    flat = mix_tokens(mean.inverse().double(), noise(2, 10, 6))
    torch.testing.assert_close(mix_tokens(mean.inverse().double(), mean(flat)), flat)


def test_the_ridge_regression_is_the_least_squares_solution():
    x, y = noise(5, 9, 7), noise(5, 4, 7, seed=1)
    xy = torch.einsum('bnc,bmc->nm', x, y)
    yy = torch.einsum('bnc,bmc->nm', y, y)
    flat_x, flat_y = x.transpose(1, 2).reshape(-1, 9), y.transpose(1, 2).reshape(-1, 4)
    expected = torch.linalg.lstsq(flat_y, flat_x).solution.t()
    torch.testing.assert_close(ridge_unprojection(xy, yy, strength=0.0), expected)
    strength = 0.1
    ridge = (strength * yy.diagonal().mean()).sqrt() * torch.eye(4, dtype=x.dtype)
    rows = torch.cat((flat_y, ridge)), torch.cat((flat_x, torch.zeros(4, 9, dtype=x.dtype)))
    expected = torch.linalg.lstsq(*rows).solution.t()
    torch.testing.assert_close(ridge_unprojection(xy, yy, strength), expected)


@torch.no_grad()
def test_the_linear_start_keeps_class_and_patch_tokens_where_a_random_one_loses_them():
    x = smooth_tokens(64, 14, 96)
    gram = torch.einsum('bnc,bmc->nm', x, x) / (len(x) * x.shape[2])
    glad = GLAD(96, 197, 77)
    std = x.std(dim=2, correction=0).mean().item()
    generator = torch.Generator().manual_seed(0)
    glad.load_state_dict(linear_start(gram, std, 77, 96, generator))
    glad = glad.double()

    def lost(glad):
        y = glad(x)
        back = ridge_unprojection(
            torch.einsum('bnc,bmc->nm', x, y), torch.einsum('bnc,bmc->nm', y, y)
        )
        error = (mix_tokens(back, y) - x)[:, 1:].norm() / x[:, 1:].norm()
        return error.item(), torch.cosine_similarity(x[:, 0], y[:, 0], dim=1).mean().item()

    error, cosine = lost(glad)
    assert error < 0.3 and cosine > 0.99
    random_error, random_cosine = lost(GLAD(96, 197, 77).double())
    assert random_error > 2 * error and random_cosine < 0.9


def test_the_linear_start_passes_the_class_token_and_spans_the_leading_eigenvectors():
    x = smooth_tokens(8, 6, 24)
    gram = torch.einsum('bnc,bmc->nm', x, x) / (len(x) * x.shape[2])
    start = {k: v.double() for k, v in linear_start(gram, 1.5, 11, 24).items()}
    weight = start['weight']
    assert weight[0].tolist() == [1.0] + 36 * [0.0] and not weight[1:, 0].any()
    rows = weight[1:, 1:]
    torch.testing.assert_close(rows @ rows.t(), torch.eye(10).double(), rtol=0, atol=1e-5)
    leading = torch.linalg.eigh(gram[1:, 1:])[1][:, -10:]
    torch.testing.assert_close(rows.t() @ rows, leading @ leading.t(), rtol=0, atol=1e-5)
    energies = (rows @ gram[1:, 1:] @ rows.t()).diagonal()
    torch.testing.assert_close(energies, energies.mean().expand(10), rtol=1e-4, atol=0)
    # the norm gives back the scale of the new tokens, four times which holds the GELU open
    before, after = (g.diagonal().sqrt().mean() for g in (gram, weight @ gram @ weight.t()))
    scale = (1.5 * after / before).expand(24)
    torch.testing.assert_close(start['norm.weight'], scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(start['norm.bias'], 4 * scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(start['pos_embed'], -4 * scale.expand(11, 24), rtol=1e-5, atol=0)


def test_the_linear_start_refuses_more_tokens_than_there_are():
    with pytest.raises(ValueError, match='cannot be made'):
        linear_start(torch.eye(5), 1.0, 5, 8)


@torch.no_grad()
def test_an_unprojection_copies_its_start():
    start = noise(9, 4)
    module = Unprojection(start)
    start.zero_()
    assert module.weight.abs().sum() > 0
    torch.testing.assert_close(module(noise(2, 4, 3)), mix_tokens(module.weight, noise(2, 4, 3)))


def test_a_balanced_rotation_is_orthogonal_and_gives_every_token_the_same_energy():
    energies = torch.logspace(0, -6, 30, dtype=torch.float64)
    rotation = balanced_rotation(energies, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotation @ rotation.t(), torch.eye(30, dtype=torch.float64))
    diagonal = ((rotation * energies) @ rotation.t()).diagonal()
    torch.testing.assert_close(diagonal, energies.mean().expand(30))
