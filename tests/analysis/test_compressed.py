# SPDX-License-Identifier: Apache-2.0
"""Static attention and token assignment as the pictures show them."""

import numpy as np
import pytest
import torch
from torch import nn

from effvit_mm import DGSSASwin, IntegratedDeiT, LaViT
from effvit_mm.analysis.compressed import (
    assigned_tokens,
    draw_static,
    draw_tokens,
    layers_after_glads,
    query_map,
    static_matrices,
)
from effvit_mm.compression.report import glad_sources

DEIT = dict(
    embed_dims=24,
    depth=5,
    num_heads=2,
    image_size=64,
    static_layers=(1, 2),
    pyramid=((3, 7), (4, 4)),
)
SWIN = dict(
    embed_dims=16,
    depths=(2, 2, 2, 2),
    num_heads=(1, 2, 4, 8),
    window_size=4,
    static_layers=(1, 2),
)


def test_static_matrices_are_those_that_the_layers_use():
    model = nn.ModuleDict(dict(backbone=IntegratedDeiT(arch=DEIT)))
    found = static_matrices(model)
    assert list(found) == [1, 2]
    for layer, matrix in found.items():
        assert torch.equal(matrix, model['backbone'].blocks[layer].attn.matrix)
    swin = DGSSASwin(arch=SWIN)
    swin.stages[0].blocks[1].attn.logits.data.normal_()
    found = static_matrices(swin)
    assert [tuple(m.shape) for m in found.values()] == [(1, 16, 16), (2, 16, 16)]
    expected = swin.stages[0].blocks[1].attn.logits.softmax(dim=2)
    torch.testing.assert_close(found[1], expected)


def test_a_cell_s_map_is_its_row_on_the_grid():
    matrix = torch.rand(2, 17, 17)
    maps, y, x = query_map(matrix, 0.9, 0.3)
    assert (y, x) == (3, 1)
    for row in range(4):
        for column in range(4):
            assert torch.equal(maps[:, row, column], matrix[:, 1 + 13, 1 + 4 * row + column])


def test_a_patch_belongs_to_the_token_that_it_feeds_most():
    sources = torch.zeros(3, 5)  # class token and two tokens; class token and 2 x 2 patches
    sources[1, 1:] = torch.tensor([4.0, 1.0, 0.5, 3.0])
    sources[2, 1:] = torch.tensor([0.1, 0.2, 0.4, 0.1])
    # relative to the largest: 1, .25, .125, .75 against .25, .5, 1, .25
    assert assigned_tokens(sources).tolist() == [[1, 2], [2, 1]]


def test_pictures_of_any_size_have_every_layer_and_every_aggregation():
    model = IntegratedDeiT(arch=DEIT)
    figure = draw_static(static_matrices(model), 'small', max_heads=1)
    titles = [axes.get_title() for axes in figure.axes[::2]]
    assert titles == ['layer 1, head 0, 17²', 'layer 2, head 0, 17²']
    image = np.random.default_rng(0).integers(0, 255, (100, 150, 3), np.uint8)
    figure = draw_tokens(image, glad_sources(model.state_dict()), patch=16, shown=2)
    titles = [axes.get_title() for axes in figure.axes]
    assert 'GLAD before layer 3' in titles[0] and 'GLAD before layer 4' in titles[4]
    assert titles[1].startswith('7 tokens') and titles[5].startswith('4 tokens')
    # windows repeat over the image, cut at its border
    pixels = figure.axes[2].images[1].get_array()
    assert pixels.shape == (100, 150)
    np.testing.assert_array_equal(pixels[:36, :64], pixels[64:, 64:128])


def test_tokens_of_a_glad_are_not_drawn_on_the_grid():
    model = IntegratedDeiT(arch={**DEIT, 'static_layers': (2, 3)})
    assert layers_after_glads(model) == {3, 4}
    assert layers_after_glads(DGSSASwin(arch=SWIN)) == set()
    figure = draw_static(static_matrices(model), 'small', 1, layers_after_glads(model))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[2] == 'layer 3, head 0, 7²' and not titles[3]
    assert titles[1].startswith('largest') and not figure.axes[3].images
    assert 'no grid' in figure.axes[3].texts[0].get_text()


@pytest.mark.parametrize(
    ('model', 'sentence'),
    [
        (LaViT('tiny', diagonality_loss=None), 'it has no IntegratedDeiT or DGSSASwin'),
        (DGSSASwin(arch={**SWIN, 'static_layers': ()}), 'no layer is static'),
    ],
)
def test_models_without_static_attention_are_named(model, sentence):
    with pytest.raises(ValueError, match=sentence):
        static_matrices(model)
