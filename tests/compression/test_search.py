# SPDX-License-Identifier: Apache-2.0
"""The search is exact, keeps its constraints, and its costs are the published ones."""

import itertools
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.config import Config
from torch.utils.flop_counter import FlopCounterMode

from effvit_mm.analysis.cost import counted_macs
from effvit_mm.compression.costs import (
    PUBLISHED_PYRAMID,
    Costs,
    cost_ratio,
    scale_pyramid,
    swin_cost_ratio,
)
from effvit_mm.compression.search import evaluate_pyramid, search_architecture
from effvit_mm.models.backbones import IntegratedDeiT
from effvit_mm.models.layers.token_aggregation import GLAD


def spectra(depth, tokens, seed=0):
    """Singular values that fall from the first on, faster in later layers."""
    rng = np.random.default_rng(seed)
    rank = np.linspace(tokens / 2, tokens / 12, depth)[:, None] * rng.uniform(0.7, 1.3, (depth, 1))
    sigma = np.exp(-np.arange(tokens) / rank) * rng.uniform(0.9, 1.1, (depth, tokens))
    return -np.sort(-sigma, axis=1)


def brute_force(sigma, dim, num_static, num_glads, eta, objective, m_min, step):
    """The most that any pyramid retains, by trying all."""
    depth, tokens = sigma.shape
    best = None
    for layers in itertools.combinations(range(num_static + 1, depth), num_glads):
        for counts in itertools.combinations(range(m_min, tokens, step), num_glads):
            pyramid = tuple(zip(layers, reversed(counts), strict=True))
            found = evaluate_pyramid(sigma, dim, num_static, pyramid, objective)
            if found.cost_ratio <= eta and (best is None or found.metric > best):
                best = found.metric
    return best


@pytest.mark.parametrize('objective', ['raw', 'normalised'])
def test_the_metric_is_the_sum_of_the_singular_values_that_later_layers_retain(objective):
    sigma, pyramid = spectra(6, 20), ((3, 12), (5, 7))
    tokens = [20, 20, 20, 12, 12, 7]
    found = evaluate_pyramid(sigma, 64, 1, pyramid, objective)
    assert found.tokens == tuple(tokens)
    metric = full = 0.0
    for layer in range(2, 6):  # after layer P = 1
        total = sum(sigma[layer]) if objective == 'normalised' else 1.0
        metric += sum(sigma[layer, i] for i in range(tokens[layer])) / total
        full += sum(sigma[layer]) / total
    assert found.metric == pytest.approx(metric, rel=1e-12)
    assert found.retained == pytest.approx(metric / full, rel=1e-12)


def test_s_row_of_the_paper_costs_0_457_of_deit_s():
    ratio = cost_ratio(Costs(12, 197, 384), (1, 2), PUBLISHED_PYRAMID)
    assert ratio == pytest.approx(0.457, abs=5e-4)


def test_layers_and_glads_cost_what_the_paper_says_by_formula_and_counted():
    n, d, m = 17, 24, 9
    costs = Costs(6, n, d)
    assert costs.dynamic_layer(n) == 4 * n * d**2 + 2 * n**2 * d + 8 * n * d**2
    assert costs.static_layer(n) == 2 * n * d**2 + n**2 * d + 8 * n * d**2
    assert costs.glad(n, m) == m * n * d

    def counted(depth, static_layers):
        fields = dict(depth=depth, static_layers=static_layers, pyramid=())
        sizes = dict(embed_dims=d, num_heads=2, image_size=64)
        return counted_macs(IntegratedDeiT({**sizes, **fields}), 64, 64)

    assert counted(7, ()) - counted(6, ()) == costs.dynamic_layer(n)
    saved = costs.dynamic_layer(n) - costs.static_layer(n)
    assert counted(6, ()) - counted(6, (1, 2)) == 2 * saved
    counter = FlopCounterMode(display=False)
    with counter:
        GLAD(d, n, m)(torch.zeros(1, n, d))
    assert counter.get_total_flops() // 2 == costs.glad(n, m)


def test_s_row_costs_0_464_with_embedding_and_head():
    costs = Costs(12, 197, 384)
    rest = 196 * 768 * 384 + 384 * 1000
    ratio = (costs.compressed((1, 2), PUBLISHED_PYRAMID) + rest) / (costs.original() + rest)
    assert ratio == pytest.approx(0.464, abs=5e-4)


def test_original_costs_what_deit_s_costs():
    assert Costs(12, 197, 384).original() == 12 * (12 * 197 * 384**2 + 2 * 197**2 * 384)


@pytest.mark.parametrize(
    'dim, depths, num_static',
    [(96, (2, 2, 6, 2), 6), (96, (2, 2, 18, 2), 12), (128, (2, 2, 18, 2), 12)],
)
def test_static_attention_saves_8_5_to_8_7_percent_of_swin(dim, depths, num_static):
    assert 0.085 <= 1 - swin_cost_ratio(dim, depths, num_static) <= 0.0875


def test_a_swin_s_map_smaller_than_a_window_is_one_window():
    # a map of 8 x 8 and one of 4 x 4: windows of 8 x 8 are as good as whole maps
    expected = 1 - (64 * 8 * (2 * 8 + 64)) / (
        64 * 8 * (4 * 8 + 2 * 64 + 8 * 8) * 2
        + 16 * 16 * (4 * 16 + 2 * 16 + 8 * 16)
        + 2 * 16 * 16 * 16
    )
    assert swin_cost_ratio(8, (2, 1), 1, 8, 32) == pytest.approx(expected)


@given(
    depth=st.integers(3, 6),
    tokens=st.integers(5, 9),
    dim=st.sampled_from([4, 16, 64]),
    num_static=st.integers(0, 2),
    num_glads=st.integers(0, 3),
    eta=st.floats(0.2, 1.2),
    objective=st.sampled_from(['raw', 'normalised']),
    m_min=st.integers(2, 4),
    step=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_search_equals_brute_force(
    depth, tokens, dim, num_static, num_glads, eta, objective, m_min, step, seed
):
    sigma = spectra(depth, tokens, seed)
    expected = brute_force(sigma, dim, num_static, num_glads, eta, objective, m_min, step)
    arguments = (sigma, dim, num_static, num_glads, eta, objective, m_min, step)
    if expected is None:
        with pytest.raises(ValueError, match='bind'):
            search_architecture(*arguments)
        return
    found = search_architecture(*arguments)
    assert found.metric == pytest.approx(expected, rel=1e-12)
    assert found.cost_ratio <= eta


@pytest.mark.parametrize('num_static, num_glads', [(0, 1), (2, 3), (4, 2), (1, 4)])
@pytest.mark.parametrize('m_min, step', [(2, 4), (17, 3)])
def test_every_constraint_is_respected(num_static, num_glads, m_min, step):
    sigma = spectra(12, 65)
    arguments = dict(m_min=m_min, grid_step=step)
    found = search_architecture(sigma, 192, num_static, num_glads, 0.6, **arguments)
    layers, counts = zip(*found.pyramid, strict=True)
    assert found.static_layers == tuple(range(1, num_static + 1))
    assert len(layers) == num_glads and list(layers) == sorted(set(layers))
    assert num_static < layers[0] and layers[-1] < 12
    assert list(counts) == sorted(set(counts), reverse=True)
    assert m_min <= counts[-1] and counts[0] < 65
    assert all((m - m_min) % step == 0 for m in counts)
    assert found.cost_ratio <= 0.6
    assert found.cost_ratio == cost_ratio(Costs(12, 65, 192), found.static_layers, found.pyramid)


@pytest.mark.parametrize('objective', ['raw', 'normalised'])
def test_larger_eta_never_retains_less(objective):
    sigma = spectra(12, 50)
    etas = np.linspace(0.4, 1, 25)
    retained = [search_architecture(sigma, 96, 2, 3, eta, objective).retained for eta in etas]
    assert all(a <= b for a, b in itertools.pairwise(retained))
    assert retained[0] < retained[-1]


def test_twelve_layers_of_197_tokens_take_seconds():
    start = time.perf_counter()
    found = search_architecture(spectra(12, 197), 384, 2, 3, 0.5)
    assert time.perf_counter() - start < 15
    assert 0.495 < found.cost_ratio <= 0.5


def test_search_retains_at_least_what_the_published_pyramid_does_at_its_cost():
    sigma = spectra(12, 197)
    published = evaluate_pyramid(sigma, 384, 2, PUBLISHED_PYRAMID)
    found = search_architecture(sigma, 384, 2, 3, published.cost_ratio)
    assert found.retained >= published.retained


def test_normalised_objective_does_not_see_a_layers_scale():
    sigma = spectra(8, 30)
    scaled = sigma * np.geomspace(1, 1e3, 8)[:, None]
    found = [search_architecture(s, 64, 1, 2, 0.5, 'normalised') for s in (sigma, scaled)]
    assert found[0].pyramid == found[1].pyramid
    raw = [search_architecture(s, 64, 1, 2, 0.5, 'raw') for s in (sigma, scaled)]
    assert raw[0].pyramid != raw[1].pyramid


def test_result_is_json_that_a_config_can_read(tmp_path):
    found = search_architecture(spectra(6, 20), 64, 1, 2, 0.6)
    (tmp_path / 's.json').write_text(json.dumps(found.as_dict()))
    config = "_base_ = ['./s.json']\nmodel = dict(arch=dict(base='small', **_base_.arch))"
    (tmp_path / 'config.py').write_text(config)
    cfg = Config.fromfile(tmp_path / 'config.py')
    assert cfg.model.arch.base == 'small' and cfg.model.arch.static_layers == [1]
    assert tuple(map(tuple, cfg.model.arch.pyramid)) == found.pyramid
    assert cfg.cost_ratio <= 0.6 and 0 < cfg.retained < 1


def test_table_has_a_row_for_every_layer():
    found = search_architecture(spectra(6, 20), 64, 1, 2, 0.6)
    rows = [line for line in found.table().splitlines() if line.startswith('| ')]
    assert len(rows) == 1 + 6
    layer, m = found.pyramid[0]
    assert f'| {layer} | dynamic | {m} | 20 → {m} |' in rows


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(num_static=6), 'P binds: .* with 6 layers P must be between 0 and 5, not 6'),
        (dict(num_glads=5), 'Q binds: there are 4 layers after layer 1 .* 5 GLADs have no place'),
        (dict(m_min=19), 'm_min and grid_step bind: they leave 1 token counts below 20'),
        (dict(grid_step=30), 'm_min and grid_step bind'),
        (dict(m_min=15, eta=0.6), 'm_min or grid_step binds: .* more than eta=0.6; .* from 2'),
        (dict(eta=0.2), 'eta binds: .* the first 2 layers keep all 20 tokens'),
        (dict(num_glads=0, eta=0.5), 'eta binds: .* without GLADs only P changes the cost'),
        (dict(eta=0), 'eta must be positive'),
        (dict(m_min=1), 'm_min at least 2'),
        (dict(objective='sum'), "objective must be 'raw' or 'normalised', not 'sum'"),
        (dict(singular_values=np.full((6, 20), np.nan)), 'finite, non-negative'),
        (dict(singular_values=np.ones(20)), r'shape \(20,\)'),
    ],
)
def test_infeasible_constraints_say_which_one_binds(changes, message):
    arguments = dict(singular_values=spectra(6, 20), dim=64, num_static=1, num_glads=2, eta=0.6)
    with pytest.raises(ValueError, match=message):
        search_architecture(**{**arguments, **changes})


@pytest.mark.parametrize('pyramid', [((1, 9),), ((3, 9), (2, 5)), ((2, 9), (3, 9)), ((9, 3),)])
def test_what_is_no_pyramid_is_refused(pyramid):
    with pytest.raises(ValueError, match='token counts that fall from below 20'):
        evaluate_pyramid(spectra(6, 20), 64, 1, pyramid)


@pytest.mark.parametrize('dim, eta', [(192, 0.54), (768, 0.5)])
def test_scaled_pyramid_is_the_largest_of_its_shape_within_eta(dim, eta):
    costs = Costs(12, 197, dim)
    pyramid = scale_pyramid(costs, 2, eta, PUBLISHED_PYRAMID)
    assert [layer for layer, _ in pyramid] == [3, 5, 7]
    assert eta - 0.005 < cost_ratio(costs, (1, 2), pyramid) <= eta
    shape = [(m - 1) / 126 for _, m in PUBLISHED_PYRAMID]
    assert [(m - 1) / (pyramid[0][1] - 1) for _, m in pyramid] == pytest.approx(shape, abs=0.01)


def test_scaling_refuses_what_cannot_be_paid():
    with pytest.raises(ValueError, match='eta binds'):
        scale_pyramid(Costs(12, 197, 192), 2, 0.1, PUBLISHED_PYRAMID)
