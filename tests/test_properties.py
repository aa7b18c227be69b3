# SPDX-License-Identifier: Apache-2.0
"""Properties of what is cut, split and renamed, for any sizes. Those of the search: test_search."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effvit_mm.compression.keys import WRAPPINGS, to_timm_keys
from effvit_mm.models.layers.grid import Tiling, cover_matrix
from effvit_mm.models.layers.partial_attention import (
    foreground_mask,
    gather_tokens,
    merge_tokens,
    num_foreground,
    split_tokens,
)

sides = st.integers(1, 23)
tiles = st.integers(1, 9)
always_the_same = settings(max_examples=60, deadline=None, derandomize=True, database=None)
few = settings(always_the_same, max_examples=12)


@always_the_same
@given(sides, sides, tiles, tiles, st.data(), st.integers(1, 3))
def test_a_map_cut_and_joined_is_the_map(height, width, tile_h, tile_w, data, batch):
    shift = (data.draw(st.integers(0, tile_h - 1)), data.draw(st.integers(0, tile_w - 1)))
    x = torch.arange(1.0, batch * height * width * 2 + 1).view(batch, height * width, 2)
    tiling = Tiling(batch, height, width, (tile_h, tile_w), shift)
    cut, inside = tiling.cut(x), tiling.inside(batch)
    assert cut.shape[1:] == (tile_h * tile_w, 2) and inside.shape == cut.shape[:2]
    # every cell is in exactly one place, and what is beyond the map is 0
    assert inside.sum() == batch * height * width
    assert torch.equal(cut[inside].sort(dim=0).values, x.flatten(0, 1))
    assert (cut[~inside] == 0).all()
    assert torch.equal(tiling.join(cut), x)
    # cells beyond the map are dropped, whatever they hold
    assert torch.equal(tiling.join(cut.masked_fill(~inside[..., None], -7)), x)


@always_the_same
@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from([4, 8, 16, 32]), tiles)
def test_bins_average_the_whole_image_once(height, width, cell, bins):
    rows, columns = -(-height // cell), -(-width // cell)
    cover = cover_matrix((height, width), columns, rows * columns, cell, bins)
    torch.testing.assert_close(cover.sum(dim=1), torch.ones(bins**2))
    # together the bins see each cell as far as it lies on the image
    y = (torch.arange(rows) * cell + cell).clamp(max=height) - torch.arange(rows) * cell
    x = (torch.arange(columns) * cell + cell).clamp(max=width) - torch.arange(columns) * cell
    share = (y[:, None] * x).flatten() / (height * width)
    torch.testing.assert_close(cover.mean(dim=0), share)


@always_the_same
@given(
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 16).flatmap(lambda d: st.tuples(st.integers(1, d), st.just(d))),
    st.integers(0, 5),
)
def test_tokens_split_and_merged_are_in_their_places(batch, count, ratio, seed):
    ratio = Fraction(*ratio)
    x = torch.randn(batch, count, 3, generator=torch.Generator().manual_seed(seed))
    index = split_tokens(x, ratio)
    chosen = num_foreground(count, ratio)
    assert index.shape == (batch, chosen) and 1 <= chosen <= count
    assert chosen - 1 < count * ratio <= chosen
    mask = foreground_mask(index, count)
    assert (mask.sum(dim=1) == chosen).all()
    scores = x.double().mean(dim=2)
    lowest = scores.masked_fill(~mask, torch.inf).min(dim=1).values
    highest = scores.masked_fill(mask, -torch.inf).max(dim=1).values
    assert (lowest >= highest - 1e-6).all()
    gathered = gather_tokens(x, index)
    for sample in range(batch):
        assert torch.equal(gathered[sample], x[sample, index[sample]])
    # what is merged is added where the tokens came from, the background's everywhere else
    change = torch.ones(batch, chosen, 3)
    background = torch.full((batch, 1, 3), 5.0)
    merged = merge_tokens(x, background, change, index)
    expected = x + torch.where(mask[..., None], torch.tensor(1.0), torch.tensor(5.0))
    torch.testing.assert_close(merged, expected)


def weights(kind, depths, convention):
    """State dict of a small model under the names of timm or MMPretrain; for both the shapes."""
    if convention == 'timm':
        import timm

        if kind == 'deit':
            model = timm.create_model(
                'deit_tiny_patch16_224', img_size=32, embed_dim=8, depth=sum(depths), num_heads=2
            )
        else:
            model = timm.create_model(
                'swin_tiny_patch4_window7_224',
                **dict(img_size=64, embed_dim=4, depths=depths, num_heads=(1, 1, 2, 2)),
                window_size=2,
            )
        return model.state_dict()
    models = pytest.importorskip('mmpretrain.models')
    if kind == 'deit':
        arch = dict(embed_dims=8, num_layers=sum(depths), num_heads=2, feedforward_channels=32)
        model = models.VisionTransformer(arch=arch, img_size=32)
    else:
        arch = dict(embed_dims=4, depths=depths, num_heads=(1, 1, 2, 2))
        model = models.SwinTransformer(arch=arch, img_size=64, window_size=2)
    return model.state_dict()


@few
@given(
    st.sampled_from(['deit', 'swin']),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.sampled_from(['timm', 'mmpretrain']),
    st.lists(st.sampled_from(WRAPPINGS), max_size=2),
    st.sampled_from(['', 'module.', 'module.model.']),
)
def test_names_map_one_to_one_to_timm_s_in_any_wrapping(kind, depths, names, wrappings, prefix):
    state = weights(kind, depths, names)
    wrapped = {prefix + key: value for key, value in state.items()}
    for key in wrappings:
        wrapped = {key: wrapped, 'epoch': 3}
    mapped = to_timm_keys(wrapped, kind)
    expected = {k: v.shape for k, v in weights(kind, depths, 'timm').items()}
    head = {key for key in expected if key.startswith('head')}
    lacking = set() if names == 'timm' else head
    expected = {k: s for k, s in expected.items() if k not in lacking and 'attn_mask' not in k}
    expected = {k: s for k, s in expected.items() if 'relative_position_index' not in k}
    assert {key: value.shape for key, value in mapped.items()} == expected
    # no tensor twice, none lost
    trained = [v for k, v in state.items() if 'position_index' not in k and 'attn_mask' not in k]
    assert len(mapped) == len(trained)
    assert sum(v.double().sum() for v in mapped.values()) == pytest.approx(
        sum(v.double().sum() for v in trained).item()
    )
    again = to_timm_keys(mapped, kind)
    assert again.keys() == mapped.keys()
    assert all(torch.equal(again[key], mapped[key]) for key in again)
