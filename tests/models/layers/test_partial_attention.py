# SPDX-License-Identifier: Apache-2.0
"""Partial attention against slow, obvious references that handle one token at a time."""

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from effvit_mm.models.backbones.partialformer import PartialBlock
from effvit_mm.models.layers.partial_attention import (
    ChannelMLP,
    HeadMLP,
    MixedMultiHeadAttention,
    SingleQueryAttention,
    context_score,
    foreground_mask,
    gather_tokens,
    merge_tokens,
    num_foreground,
    single_query_attention,
    split_tokens,
)

RATIOS = [Fraction(1, 64), Fraction(1, 16), Fraction(1, 4), Fraction(1, 2), Fraction(1, 1)]


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('ratio', RATIOS, ids=str)
@pytest.mark.parametrize('n', [1, 2, 3, 49, 196, 3136, 66800])
def test_number_of_foreground_tokens_is_the_ceiling_of_the_ratio(n, ratio):
    count = num_foreground(n, ratio)
    assert count == -(-n * ratio.numerator // ratio.denominator)
    assert 1 <= count <= n


def test_foreground_has_the_highest_context_scores():
    x = double(3, 50, 8)
    index = split_tokens(x, Fraction(1, 4))
    for sample, chosen in zip(x, index, strict=True):
        scores = [float(token.sum()) / 8 for token in sample]
        best = sorted(range(50), key=lambda i: -scores[i])[:13]
        assert sorted(chosen.tolist()) == sorted(best)


def test_scores_are_float32_where_half_would_overflow_or_tie():
    x = torch.full((1, 4, 512), 300.0, dtype=torch.float16)
    x[0, 2, 0] += 0.25
    scores = context_score(x)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert split_tokens(x, Fraction(1, 4)).tolist() == [[2]]


@pytest.mark.parametrize('value', [0.0, 1.0, -7.5])
def test_ties_give_exactly_the_wanted_number_of_different_tokens(value):
    index = split_tokens(torch.full((2, 49, 8), value), Fraction(1, 2))
    assert index.shape == (2, 25)
    assert all(len(set(row)) == 25 for row in index.tolist())


def test_gather_and_merge_put_every_update_at_its_own_place():
    x, background, foreground = double(2, 20, 6), double(2, 1, 6, seed=1), double(2, 5, 6, seed=2)
    index = torch.stack([torch.randperm(20)[:5], torch.randperm(20)[:5]])
    merged = merge_tokens(x, background, foreground, index)
    for b in range(2):
        for token in range(20):
            update = background[b, 0]
            if token in index[b].tolist():
                update = foreground[b, index[b].tolist().index(token)]
            assert torch.equal(merged[b, token], x[b, token] + update)
    collected = gather_tokens(x, index)
    assert all(torch.equal(collected[b, i], x[b, index[b, i]]) for b in range(2) for i in range(5))


def test_merge_without_background_update_leaves_the_background_alone():
    x, foreground = double(1, 9, 4), double(1, 2, 4, seed=1)
    merged = merge_tokens(x, None, foreground, torch.tensor([[7, 3]]))
    kept = [i for i in range(9) if i not in (3, 7)]
    assert torch.equal(merged[0, kept], x[0, kept])
    assert torch.equal(merged[0, [7, 3]], x[0, [7, 3]] + foreground[0])


def test_merge_does_not_change_its_input():
    x = double(1, 9, 4)
    before = x.clone()
    merge_tokens(x, None, double(1, 2, 4, seed=1), torch.tensor([[7, 3]]))
    assert torch.equal(x, before)


def slow_sqa(query, tokens, foreground, weight, heads):
    """SQA with K and V computed for one background token at a time."""
    batch, n, dim = tokens.shape
    d = dim // heads
    w_q, w_k, w_v = weight.chunk(3)
    out = torch.zeros(batch, 1, dim, dtype=tokens.dtype)
    for b in range(batch):
        q = w_q @ query[b, 0]
        keys = [w_k @ tokens[b, i] for i in range(n) if not foreground[b, i]]
        values = [w_v @ tokens[b, i] for i in range(n) if not foreground[b, i]]
        for h in range(heads):
            part = slice(h * d, (h + 1) * d)
            logits = torch.stack([q[part] @ k[part] / d**0.5 for k in keys])
            weights = logits.softmax(0)
            out[b, 0, part] = sum(w * v[part] for w, v in zip(weights, values, strict=True))
    return out


@pytest.mark.parametrize('heads', [1, 3, 6])
def test_sqa_equals_attention_with_explicit_keys_and_values(heads):
    query, tokens, weight = double(2, 1, 12), double(2, 30, 12, seed=1), double(36, 12, seed=2)
    mask = foreground_mask(split_tokens(tokens, Fraction(1, 4)), 30)
    fast = single_query_attention(query, tokens, mask, weight, heads)
    torch.testing.assert_close(
        fast, slow_sqa(query, tokens, mask, weight, heads), rtol=1e-12, atol=1e-12
    )


def test_sqa_gradients_equal_those_of_explicit_keys_and_values():
    inputs = [double(1, 1, 8), double(1, 12, 8, seed=1), double(24, 8, seed=2)]
    mask = foreground_mask(torch.tensor([[2, 5, 11]]), 12)
    grads = []
    for function in (single_query_attention, slow_sqa):
        q, x, w = (t.clone().requires_grad_() for t in inputs)
        function(q, x, mask, w, 2).sin().sum().backward()
        grads.append((q.grad, x.grad, w.grad))
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)


def test_sqa_costs_2_h_c_for_each_token_and_is_linear_in_their_number():
    def macs(n, heads, dim):
        counter = FlopCounterMode(display=False)
        mask = torch.zeros(1, n, dtype=torch.bool)
        with counter:
            single_query_attention(
                double(1, 1, dim), double(1, n, dim), mask, double(3 * dim, dim), heads
            )
        return counter.get_total_flops() // 2

    for heads, dim in ((1, 8), (3, 12), (4, 32)):
        for n in (10, 100, 1000):
            assert macs(2 * n, heads, dim) - macs(n, heads, dim) == n * 2 * heads * dim


def test_sqa_does_not_see_the_foreground():
    query, tokens, weight = double(1, 1, 8), double(1, 12, 8, seed=1), double(24, 8, seed=2)
    mask = foreground_mask(torch.tensor([[4, 9]]), 12)
    before = single_query_attention(query, tokens, mask, weight, 2)
    tokens[0, [4, 9]] += 100
    assert torch.equal(single_query_attention(query, tokens, mask, weight, 2), before)


def test_sqa_without_background_contributes_exactly_zero():
    sqa = SingleQueryAttention(8, 2).double()
    nn.init.ones_(sqa.proj.fc2.bias)
    tokens = double(2, 5, 8)
    index = torch.arange(5).expand(2, -1)
    assert torch.equal(sqa(double(2, 1, 8), tokens, index, double(24, 8)), torch.zeros(2, 1, 8))


def test_channel_mlp_is_fc_norm_relu_fc():
    mlp = ChannelMLP(16, 4).double()
    names = [(name, type(m).__name__) for name, m in mlp.named_children()]
    assert [t for _, t in names] == ['Linear', 'LayerNorm', 'ReLU', 'Linear']
    assert mlp.fc1.out_features == 4
    x = double(2, 1, 16)
    assert torch.equal(mlp(x), mlp.fc2(torch.relu(mlp.norm(mlp.fc1(x)))))


def slow_mmsa(mmsa, x):
    """MMSA with loops over batch, heads, queries."""
    batch, n, dim = x.shape
    h, d = mmsa.num_heads, mmsa.head_dim
    e = mmsa.head_mlp
    w1 = e.expand_identity + e.expand_delta
    w2 = e.reduce_identity + e.reduce_delta
    w_q, w_k, w_v = mmsa.qkv.weight.chunk(3)
    out = torch.zeros_like(x)
    for b in range(batch):
        q, k, v = x[b] @ w_q.T, x[b] @ w_k.T, x[b] @ w_v.T
        for i in range(n):
            logits = torch.stack(
                [
                    torch.stack([q[i, s] @ k[j, s] / d**0.5 for j in range(n)])
                    for s in (slice(a * d, (a + 1) * d) for a in range(h))
                ]
            )
            mixed = torch.stack([row.softmax(0) for row in w1 @ logits])
            weights = w2 @ mixed
            for a in range(h):
                out[b, i, a * d : (a + 1) * d] = weights[a] @ v[:, a * d : (a + 1) * d]
    return mmsa.proj(out)


@pytest.mark.parametrize('expansion', [1, 2, 3])
def test_mmsa_equals_the_formula_query_by_query(expansion):
    mmsa = MixedMultiHeadAttention(12, 3, expansion).double()
    nn.init.normal_(mmsa.head_mlp.expand_delta)
    nn.init.normal_(mmsa.head_mlp.reduce_delta)
    x = double(2, 7, 12)
    torch.testing.assert_close(mmsa(x), slow_mmsa(mmsa, x), rtol=1e-11, atol=1e-12)


def test_mmsa_with_zero_differences_is_plain_attention():
    mixed, plain = MixedMultiHeadAttention(12, 3, 2), MixedMultiHeadAttention(12, 3, 0)
    plain.load_state_dict(mixed.state_dict(), strict=False)
    nn.init.zeros_(mixed.head_mlp.expand_delta)
    nn.init.zeros_(mixed.head_mlp.reduce_delta)
    x = double(2, 9, 12)
    torch.testing.assert_close(mixed.double()(x), plain.double()(x), rtol=1e-12, atol=1e-13)
    assert not [name for name, _ in plain.named_parameters() if 'head_mlp' in name]


def test_heads_of_an_expansion_start_apart():
    mlp = HeadMLP(4, 2)
    expand = mlp.expand_identity + mlp.expand_delta
    assert not torch.allclose(expand[0], expand[1])


def test_heads_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match='10 channels cannot be divided among 3 heads'):
        MixedMultiHeadAttention(10, 3)


def slow_block(block, x, abstract, height, width):
    """A block in eval mode, with the tokens physically separated and put back one by one."""
    batch, n, dim = x.shape
    conv = block.pos_embed.proj
    x = x + conv(x.transpose(1, 2).reshape(batch, dim, height, width)).flatten(2).transpose(1, 2)
    out, new_abstract = x.clone(), abstract.clone()
    count = num_foreground(n, block.foreground_ratio)
    for b in range(batch):
        order = sorted(range(n), key=lambda i: -float(x[b, i].mean()))
        fore, back = order[:count], order[count:]
        tokens = block.norm1(x[b])
        sequence = torch.cat([block.norm1(abstract[b]), tokens[fore]])
        mixed = slow_mmsa(block.mmsa, sequence[None])[0]
        new_abstract[b, 0] = abstract[b, 0] + mixed[0]
        for place, token in enumerate(fore):
            out[b, token] = x[b, token] + mixed[1 + place]
        if back:
            nothing = torch.zeros(1, len(back), dtype=torch.bool)
            z = slow_sqa(
                block.norm1(new_abstract[b])[None],
                tokens[back][None],
                nothing,
                block.mmsa.qkv.weight,
                block.mmsa.num_heads,
            )
            update = block.sqa.proj(z)[0, 0]
            for token in back:
                out[b, token] = x[b, token] + update
            new_abstract[b, 0] += update
    ffn = lambda t: t + block.mlp(block.norm2(t))  # noqa: E731
    return ffn(out), ffn(new_abstract)


@pytest.mark.parametrize('ratio', RATIOS, ids=str)
@pytest.mark.parametrize('grid', [(1, 1), (1, 2), (5, 7)], ids=str)
@torch.no_grad()
def test_a_block_equals_a_loop_over_single_tokens(ratio, grid):
    torch.manual_seed(0)
    block = PartialBlock(12, 3, ratio).double().eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, abstract = double(2, grid[0] * grid[1], 12), double(2, 1, 12, seed=1)
    fast = block(x, abstract, *grid)
    slow = slow_block(block, x, abstract, *grid)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fast[1], slow[1], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_stochastic_depth_drops_both_attentions_of_a_sample_or_none():
    torch.manual_seed(0)
    block = PartialBlock(12, 3, Fraction(1, 4), drop_path=0.5).double().train()
    for parameter in (*block.pos_embed.parameters(), *block.mlp.fc2.parameters()):
        nn.init.zeros_(parameter)
    x, abstract = double(40, 16, 12), double(40, 1, 12, seed=1)
    nn.init.normal_(block.sqa.proj.fc2.bias)
    mask = foreground_mask(split_tokens(x, block.foreground_ratio), 16)
    out, token = block(x, abstract, 4, 4)
    changed = (out != x).any(dim=2)
    whole = [float(changed[sample].float().mean()) for sample in range(40)]
    assert set(whole) == {0.0, 1.0}
    assert ((token != abstract).any(dim=2)[:, 0] == changed[:, 0]).all()
    # what is kept makes up for what is dropped
    exact = block.eval()(x, abstract, 4, 4)[0] - x
    kept = changed[:, 0]
    for group in (mask[kept], ~mask[kept]):
        expected = 2 * exact[kept][group]
        torch.testing.assert_close((out - x)[kept][group], expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_information_crosses_between_the_groups_through_the_abstract_token():
    torch.manual_seed(0)
    block = PartialBlock(12, 3, Fraction(1, 4)).double().eval()
    nn.init.zeros_(block.pos_embed.proj.weight)
    nn.init.zeros_(block.pos_embed.proj.bias)
    for parameter in (block.mmsa.qkv.weight, block.mmsa.proj.weight, block.sqa.proj.fc2.weight):
        nn.init.normal_(parameter, std=0.5)
    x, abstract = double(1, 16, 12), double(1, 1, 12, seed=1)
    index = split_tokens(x, block.foreground_ratio)[0]
    mask = foreground_mask(index[None], 16)[0]
    before, token_before = block(x, abstract, 4, 4)
    changed = x.clone()
    changed[0, index[0]] += torch.linspace(-1, 1, 12, dtype=torch.float64)  # keeps its score
    after, _ = block(changed, abstract, 4, 4)
    assert (after - before)[0, ~mask].abs().max() > 1e-6  # foreground reaches background
    changed = x.clone()
    changed[0, (~mask).nonzero()[0, 0]] += torch.linspace(-1, 1, 12, dtype=torch.float64)
    after, token_after = block(changed, abstract, 4, 4)
    assert (token_after - token_before).abs().max() > 1e-6  # background reaches the next block
    assert torch.equal(after[0, mask], before[0, mask])  # and not this block's foreground


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_small_differences_between_heads_count_in_low_precision(dtype):
    mlp = HeadMLP(2).to(dtype)
    logits = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    expected = copy.deepcopy(mlp).double()(logits)
    torch.testing.assert_close(mlp(logits.float()).double(), expected, rtol=1e-5, atol=1e-6)
