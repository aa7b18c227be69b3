# SPDX-License-Identifier: Apache-2.0
"""The figures show the numbers they are made of."""

import argparse
import json

import pytest
import torch

from effvit_mm.compression import Statistics, search_architecture
from effvit_mm.compression.report import (
    draw_attention,
    draw_difference,
    draw_pyramid,
    draw_singular_values,
    glad_sources,
    run_report,
)
from effvit_mm.engine.launch import SetupError

pytest.importorskip('matplotlib')


@pytest.fixture(scope='module')
def stats():
    torch.manual_seed(0)
    tensors = {}
    for layer in range(4):
        tensors[f'attention_mean.{layer}'] = torch.rand(2, 17, 17).softmax(-1)
        tensors[f'difference.{layer}'] = torch.rand(2)
        tensors[f'singular_values.{layer}'] = torch.rand(17).sort(descending=True)[0]
    return Statistics(tensors, dict(depth=4, kind='deit'))


@pytest.fixture(scope='module')
def found(stats):
    return search_architecture(stats.singular_values(), 24, 1, 2, 0.8).as_dict()


@pytest.fixture(scope='module')
def glads():
    return {3: torch.randn(5, 9), 2: torch.randn(9, 17)}


def test_bars_are_the_mean_difference_of_heads(stats):
    axes = draw_difference(stats, [1]).axes[0]
    heights = [bar.get_height() for bar in axes.patches[:4]]
    assert heights == pytest.approx([d.mean().item() for d in stats.layers('difference')])
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()


def test_curves_rise_from_none_to_all_singular_values(stats):
    for line in draw_singular_values(stats).axes[0].lines:
        assert line.get_ydata()[0] == 0 and line.get_ydata()[-1] == pytest.approx(1)


def test_pyramid_shows_tokens_and_glads(found):
    axes = draw_pyramid(found).axes[0]
    assert [text.get_text() for text in axes.texts] == [str(m) for m in found['tokens']]
    lines = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())]
    assert lines == [layer - 0.5 for layer, _ in found['arch']['pyramid']]


def test_attention_has_a_picture_of_every_head(stats):
    pictures = [image for axes in draw_attention(stats, [1, 2]).axes for image in axes.images]
    assert len(pictures) == 4


def test_sources_of_a_glad_go_back_to_the_original_tokens(glads):
    state = {f'backbone.aggregations.{k}.weight': v for k, v in glads.items()}
    state['backbone.aggregations.2.norm.weight'] = torch.ones(24)
    sources = glad_sources(state)
    assert list(sources) == [2, 3]
    torch.testing.assert_close(sources[3], (glads[3].double() @ glads[2].double()).abs())
    with pytest.raises(ValueError, match='no GLAD'):
        glad_sources({})


def test_report_writes_all_pictures_without_a_display(stats, found, glads, tmp_path):
    stats.save(str(tmp_path / 'stats'))
    (tmp_path / 'search').write_text(json.dumps(found))
    state = {f'backbone.aggregations.{k}.weight': v for k, v in glads.items()}
    torch.save(dict(state_dict=state), tmp_path / 'weights.pth')
    args = argparse.Namespace(
        stats=str(tmp_path / 'stats'),
        search=str(tmp_path / 'search'),
        checkpoint=str(tmp_path / 'weights.pth'),
        out_dir=str(tmp_path / 'out'),
    )
    run_report(args)
    names = {'attention', 'difference', 'glad_sources', 'pyramid', 'singular_values'}
    assert {path.stem for path in (tmp_path / 'out').iterdir()} == names
    (tmp_path / 'search').write_text('{}')
    with pytest.raises(SetupError, match='no result of a search'):
        run_report(args)
