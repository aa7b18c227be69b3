# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from effvit_mm.models.backbones.dgssa_swin import WindowAttention
from effvit_mm.models.layers.qkv import QKV
from effvit_mm.models.layers.static_attention import (
    INITS,
    MlpMixing,
    StaticAttention,
    StaticWindowAttention,
    local_logits,
    nearest_offsets,
)
from effvit_mm.models.layers.windows import Windows

DIM, HEADS, SIDE = 8, 2, 3


@pytest.fixture
def layer():
    """Static attention in windows of 3 x 3 cells with random weights, for inference."""
    torch.manual_seed(0)
    layer = StaticWindowAttention(DIM, HEADS, SIDE**2).double().eval()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


def shifted(height=7, width=10):
    """Windows (their masks) and their tokens, of two samples."""
    w = Windows(2, height, width, SIDE, 1)
    return w, w.cut(torch.randn(2, height * width, DIM).double())


def reference(layer, x, masks):
    """One window, one head, one row at a time."""
    out = torch.zeros_like(x)
    values, d = layer.v(x), DIM // HEADS
    for w, head, row in torch.cartesian_prod(*map(torch.arange, (len(x), HEADS, SIDE**2))):
        seen = torch.nonzero(masks[w, row] == 0).flatten()
        a = layer.logits[head, row, seen].exp()
        part = slice(head * d, (head + 1) * d)
        out[w, row, part] = (a / a.sum()) @ values[w, seen, part]
    return layer.proj(out)


@pytest.mark.parametrize('masked', [False, True])
def test_a_layer_equals_its_definition_cell_by_cell(layer, masked):
    w, x = shifted()
    masks = w.mask[w.kind] if masked else torch.zeros(len(x), SIDE**2, SIDE**2)
    with torch.no_grad():
        actual = layer(x, w.mask, w.kind) if masked else layer(x)
        torch.testing.assert_close(actual, reference(layer, x, masks), rtol=0, atol=1e-12)


def test_rows_of_masked_attention_are_distributions_over_what_may_be_seen(layer):
    w, _ = shifted()
    a = layer.attention(w.mask)
    assert a.shape == (9, HEADS, SIDE**2, SIDE**2)
    assert (a >= 0).all()
    torch.testing.assert_close(a.sum(-1), torch.ones_like(a.sum(-1)))
    assert not a.masked_select(w.mask[:, None] != 0).any()
    assert (a.masked_select(w.mask[:, None] == 0) > 0).all()


@pytest.mark.parametrize('masked', [False, True])
def test_gradients_reach_the_logits(layer, masked):
    w, x = shifted()
    out = layer(x, w.mask, w.kind) if masked else layer(x)
    out.square().sum().backward()
    assert (layer.logits.grad.abs() > 1e-9).all()


def test_with_the_attention_of_one_window_it_computes_what_the_dynamic_layer_did(layer):
    dynamic = WindowAttention(DIM, HEADS, SIDE).double()
    for p in dynamic.parameters():
        nn.init.normal_(p)
    x = torch.randn(1, SIDE**2, DIM).double()
    with torch.no_grad():
        q, k, v = dynamic.qkv(x).view(SIDE**2, 3, HEADS, -1).permute(1, 2, 0, 3)
        bias = dynamic.relative_position_bias_table[dynamic.relative_position_index]
        a = (q @ k.mT / q.shape[2] ** 0.5 + bias.permute(2, 0, 1)).softmax(dim=-1)
        layer.logits.copy_(a.log())
        layer.v.weight.copy_(dynamic.qkv.weight[-DIM:])
        layer.v.bias.copy_(dynamic.qkv.v_bias)
        layer.proj.load_state_dict(dynamic.proj.state_dict())
        torch.testing.assert_close(layer(x), dynamic(x), rtol=0, atol=1e-10)


# attention that is kept


def fresh(layer, w):
    """The attention, computed anew."""
    return (layer.logits + w.mask[:, None]).softmax(dim=-1)


@torch.no_grad()
def test_in_inference_masked_attention_is_computed_once_also_for_new_masks_of_equal_value(layer):
    first = layer.attention(shifted()[0].mask)
    assert layer.attention(shifted()[0].mask) is first
    assert torch.equal(first, fresh(layer, shifted()[0]))


@pytest.mark.parametrize('how', ['in place', 'data', 'replaced', 'loaded', 'average'])
@torch.no_grad()
def test_changed_weights_change_the_attention_at_once(layer, how):
    w, _ = shifted()
    average = ExponentialMovingAverage(layer, momentum=0.5)
    average.update_parameters(layer)
    changed = average.module.eval() if how == 'average' else layer
    before, new = changed.attention(w.mask), torch.randn_like(layer.logits)
    if how == 'in place':
        layer.logits.copy_(new)
    elif how == 'data':
        layer.logits.data.copy_(new)
    elif how == 'replaced':
        layer.logits = nn.Parameter(new)
    elif how == 'loaded':
        layer.load_state_dict({**layer.state_dict(), 'logits': new})
    else:
        layer.logits.copy_(new)
        average.update_parameters(layer)
    after = changed.attention(w.mask)
    assert not torch.allclose(after, before)
    assert torch.equal(after, fresh(changed, w))


@torch.no_grad()
def test_other_masks_sizes_and_types_change_the_attention_at_once(layer):
    for w in (shifted()[0], shifted(9, 8)[0], shifted(5, 4)[0], shifted()[0]):
        assert torch.equal(layer.attention(w.mask), fresh(layer, w))
    assert layer.attention(w.mask, torch.float32).dtype == torch.float32
    assert layer.attention(w.mask).dtype == torch.float64
    layer.float()
    assert torch.equal(layer.attention(w.mask), fresh(layer, w))


def test_nothing_is_kept_where_gradients_are_wanted(layer):
    w, _ = shifted()
    with torch.no_grad():
        layer.attention(w.mask)
    assert layer.attention(w.mask).requires_grad
    layer.train()
    with torch.no_grad():
        assert layer.attention(w.mask) is not layer.attention(w.mask)


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@torch.no_grad()
def test_what_is_kept_is_neither_saved_nor_copied(layer, copied):
    w, _ = shifted()
    names, size = set(layer.state_dict()), len(pickle.dumps(layer))
    layer.attention(w.mask)
    assert set(layer.state_dict()) == names
    assert len(pickle.dumps(layer)) == size
    twin = copied(layer)
    twin.logits.mul_(2)
    assert torch.equal(twin.attention(w.mask), fresh(twin, w))
    assert torch.equal(layer.attention(w.mask), fresh(layer, w))


@torch.no_grad()
def test_fake_tensors_and_replaced_parameters_leave_nothing_behind(layer):
    w, x = shifted()
    expected = layer(x, w.mask, w.kind)
    layer.logits.add_(0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(mode.from_tensor(x), mode.from_tensor(w.mask), mode.from_tensor(w.kind))
        assert fake.shape == x.shape
    assert torch.equal(layer(x, w.mask, w.kind), expected)
    other = {name: p * 2 for name, p in layer.named_parameters()}
    changed = torch.func.functional_call(layer, other, (x, w.mask, w.kind))
    assert not torch.allclose(changed, expected)
    assert torch.equal(layer(x, w.mask, w.kind), expected)


# how it starts


def test_offsets_are_the_nearest_ones_and_all_different():
    for heads in (3, 6, 12, 24):
        offsets = nearest_offsets(heads)
        assert offsets[0] == (0, 0)
        assert len(set(offsets)) == heads
    assert set(nearest_offsets(5)) == {(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)}


def test_a_local_start_looks_at_the_neighbour_of_each_head():
    logits = local_logits(5, 25)
    middle = 2 * 5 + 2
    for head, (dy, dx) in enumerate(nearest_offsets(5)):
        assert logits[head, middle].argmax() == middle + 5 * dy + dx
        for a, b in ((0, 0), (3, 21), (12, 8), (24, 1)):
            down, right = b // 5 - a // 5 - dy, b % 5 - a % 5 - dx
            assert logits[head, a, b] == -(down**2 + right**2)
    with pytest.raises(ValueError, match='square grid'):
        local_logits(5, 23)


@pytest.mark.parametrize('init', INITS)
def test_every_start_is_a_distribution_but_the_random_matrix(init):
    torch.manual_seed(0)
    windows = StaticWindowAttention(DIM, HEADS, 9, init=init)
    torch.testing.assert_close(windows.attention().sum(-1), torch.ones(HEADS, 9))
    matrix = StaticAttention(DIM, HEADS, 10, init=init).matrix
    if init != 'random':
        torch.testing.assert_close(matrix.sum(-1), torch.ones(HEADS, 10))
    else:
        assert matrix.std().item() == pytest.approx(0.1, rel=0.2)
        wide = StaticWindowAttention(DIM, HEADS, 49, init=init)
        assert wide.logits.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="'other'"):
        StaticAttention(DIM, HEADS, 10, init='other')


# a whole sequence


def test_a_sequence_is_mixed_by_one_matrix_per_head_and_what_is_not_there_counts_as_0():
    torch.manual_seed(0)
    layer = StaticAttention(DIM, HEADS, 5).double()
    nn.init.normal_(layer.matrix)
    x, inside = torch.randn(2, 5, DIM).double(), torch.ones(2, 5, dtype=torch.bool)
    inside[1, 3:] = False
    v, d = layer.v(x), DIM // HEADS
    expected = torch.zeros_like(x)
    for b, head, n, m in torch.cartesian_prod(*map(torch.arange, (2, HEADS, 5, 5))):
        part = slice(head * d, (head + 1) * d)
        if inside[b, m]:
            expected[b, n, part] += layer.matrix[head, n, m] * v[b, m, part]
    torch.testing.assert_close(layer(x, inside), layer.proj(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x)[0], layer(x, inside)[0])


def test_token_mixing_is_an_mlp_over_tokens_channel_by_channel():
    torch.manual_seed(0)
    layer, x = MlpMixing(DIM, 5), torch.randn(2, 5, DIM)
    expected = torch.stack(
        [layer.fc2(nn.functional.gelu(layer.fc1(x[..., c]))) for c in range(DIM)], dim=-1
    )
    torch.testing.assert_close(layer(x), expected)
    inside = torch.tensor([[True] * 3 + [False] * 2] * 2)
    changed = x.masked_fill(~inside[..., None], 7.0)
    assert torch.equal(layer(changed, inside), layer(x, inside))
    assert sum(p.numel() for p in layer.parameters()) == 2 * (5 * 5 + 5)


def test_queries_and_keys_are_gone():
    static = sum(p.numel() for p in StaticAttention(DIM, HEADS, 5).parameters())
    assert static == 2 * (DIM * DIM + DIM) + HEADS * 25
    assert sum(p.numel() for p in QKV(DIM).parameters()) == 3 * DIM * DIM + 2 * DIM
