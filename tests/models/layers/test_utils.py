# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def residual_and_ffn(dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    modules = nn.LayerNorm(8).to(dtype), Mlp(8, 32, **kwargs).to(dtype).eval()
    return torch.randn(2, 30, 8, dtype=dtype), *modules


def no_path():
    return nn.Identity().eval()


@pytest.mark.parametrize('block', [32 * 40, 2**19])
@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(bias=False),
        dict(act_layer=lambda: nn.GELU(approximate='tanh')),
        dict(act_layer=nn.ReLU),
        dict(norm_layer=nn.LayerNorm),
    ],
    ids=['plain', 'no bias', 'tanh', 'ReLU', 'norm'],
)
@torch.no_grad()
def test_ffn_with_its_residual_equals_its_parts(kwargs, block, monkeypatch):
    monkeypatch.setattr(utils, 'CACHE_BLOCK', block)
    x, norm, mlp = residual_and_ffn(**kwargs)
    before, expected = x.clone(), x + mlp(norm(x))
    out = feed_forward(x, norm, mlp, no_path())
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(x, before)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    out = feed_forward(strided, norm, mlp, no_path())
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_ffn_in_autocast_and_low_precision_keeps_the_type_of_the_tokens(dtype):
    x, norm, mlp = residual_and_ffn(dtype)
    expected = (x.double() + mlp.double()(norm.double()(x.double()))).to(dtype)
    mlp, norm = mlp.to(dtype), norm.to(dtype)
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            out = feed_forward(x, norm, mlp, no_path())
        assert out.dtype == dtype
        rough = enabled or dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=0, atol=0.05 if rough else 1e-5)


@pytest.mark.parametrize('part', ['fc1', 'act', 'fc2', ''], ids=lambda p: p or 'the whole')
@torch.no_grad()
def test_who_hooks_a_part_of_an_ffn_sees_it_unchanged(part):
    x, norm, mlp = residual_and_ffn()
    seen, steps = [], {'fc1': mlp.fc1(norm(x))}
    steps['act'] = nn.functional.gelu(steps['fc1'])
    steps['fc2'] = steps[''] = mlp.fc2(steps['act'])
    hook = mlp.get_submodule(part).register_forward_hook(lambda m, args, out: seen.append(out))
    feed_forward(x, norm, mlp, no_path())
    hook.remove()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], steps[part], rtol=1e-13, atol=1e-13)
    doubled = nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: (2 * args[0],) if m is mlp.get_submodule(part) else None
    )
    out = feed_forward(x, norm, mlp, no_path())
    expected = x + mlp(norm(x))
    doubled.remove()
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(out, feed_forward(x, norm, mlp, no_path()))


@pytest.mark.parametrize('part', ['fc1', 'fc2', ''], ids=lambda p: p or 'the whole')
@torch.no_grad()
def test_a_forward_that_replaces_an_ffn_s_own_is_called(part):
    x, norm, mlp = residual_and_ffn()
    module = mlp.get_submodule(part)
    module.forward = lambda x, forward=module.forward: 3 * forward(x)
    out = feed_forward(x, norm, mlp, no_path())
    torch.testing.assert_close(out, x + mlp(norm(x)), rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_dropout_inside_an_ffn_may_be_left_on():
    x, norm, mlp = residual_and_ffn(drop=0.5)
    mlp.drop1.train()
    first, second = (feed_forward(x, norm, mlp, no_path()) for _ in range(2))
    assert not torch.equal(first, second)


@torch.no_grad()
def test_who_counts_operations_knows_both_products_of_an_ffn():
    x, norm, mlp = residual_and_ffn()
    counted = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._overloadpacket is torch.ops.aten.addmm:
                counted.append(func)
            return func(*args, **(kwargs or {}))

    with Counter():
        feed_forward(x, norm, mlp, no_path())
    assert len(counted) == 2


@torch.no_grad()
def test_a_part_of_an_ffn_may_be_another_module():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    x, norm, mlp = residual_and_ffn()
    mlp.fc2 = Scaled(32, 8).double()
    out = feed_forward(x, norm, mlp, no_path())
    torch.testing.assert_close(out, x + mlp(norm(x)), rtol=1e-13, atol=1e-13)


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
