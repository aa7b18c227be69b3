# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from timm.layers import DropPath, Mlp
from torch import nn

from effvit_mm.models.layers import partial_attention, utils
from effvit_mm.models.layers.partial_attention import MixedMultiHeadAttention
from effvit_mm.models.layers.utils import (
    ConvPatchEmbed,
    feed_forward,
    map_to_tokens,
    tokens_to_map,
)


class Counting(Mlp):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize('batch_tokens', [(1, 700), (3, 333), (2, 5)], ids=str)
@torch.no_grad()
def test_ffn_block_by_block_equals_ffn_at_once(batch_tokens, monkeypatch):
    monkeypatch.setattr(utils, 'CACHE_BLOCK', 32 * 40)
    norm, mlp = nn.LayerNorm(8).double(), Counting(8, 32).double()
    x = torch.randn(*batch_tokens, 8, dtype=torch.float64)
    before = x.clone()
    out = feed_forward(x, norm, mlp, nn.Identity().eval())
    blocks, mlp.calls = mlp.calls, 0
    torch.testing.assert_close(out, x + mlp(norm(x)), rtol=1e-13, atol=1e-13)
    assert torch.equal(x, before)
    assert blocks == -(-batch_tokens[0] * batch_tokens[1] // (40 * torch.get_num_threads()))


def test_ffn_is_not_cut_where_gradients_are_needed(monkeypatch):
    monkeypatch.setattr(utils, 'CACHE_BLOCK', 32 * 40)
    mlp = Counting(8, 32)
    feed_forward(torch.randn(1, 500, 8), nn.LayerNorm(8), mlp, DropPath(0.1).eval())
    assert mlp.calls == 1


@pytest.mark.parametrize('expansion', [1, 2])
@torch.no_grad()
def test_attention_by_blocks_of_queries_equals_attention_at_once(expansion, monkeypatch):
    attention = MixedMultiHeadAttention(8, 2, expansion).double()
    x = torch.randn(2, 300, 8, dtype=torch.float64)
    blocked = attention(x)
    monkeypatch.setattr(partial_attention, 'MANY_QUERIES', 10**9)
    torch.testing.assert_close(blocked, attention(x), rtol=1e-13, atol=1e-13)


def test_tokens_and_maps_are_two_views_of_the_same_memory():
    x = torch.randn(2, 15, 4)
    image = tokens_to_map(x, 3, 5)
    assert image.shape == (2, 4, 3, 5)
    assert torch.equal(image[1, :, 2, 3], x[1, 2 * 5 + 3])
    assert map_to_tokens(image).data_ptr() == x.data_ptr()


@pytest.mark.parametrize('stride', [2, 4])
@pytest.mark.parametrize('size', [(1, 1), (31, 32), (33, 64), (17, 100)], ids=str)
def test_patch_embedding_gives_the_ceiling_of_size_over_stride(stride, size):
    tokens, height, width = ConvPatchEmbed(3, 8, stride)(torch.randn(1, 3, *size))
    assert (height, width) == (-(-size[0] // stride), -(-size[1] // stride))
    assert tokens.shape == (1, height * width, 8)
