# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from effvit_mm.models.layers.qkv import QKV


def attend(qkv: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv(x).chunk(3, dim=-1)
    return (q @ k.mT).softmax(dim=-1) @ v


def test_the_bias_of_a_linear_layer_is_loaded_without_the_keys_and_attention_stays_the_same():
    torch.manual_seed(0)
    linear, qkv = nn.Linear(8, 24).double(), QKV(8).double()
    nn.init.normal_(linear.bias)
    assert not any(qkv.load_state_dict(linear.state_dict()))
    x = torch.randn(2, 5, 8).double()
    torch.testing.assert_close(attend(qkv, x), attend(linear, x), rtol=0, atol=1e-12)
    assert torch.equal(qkv(x).chunk(3, dim=-1)[0], linear(x).chunk(3, dim=-1)[0])


def test_every_parameter_gets_a_gradient():
    torch.manual_seed(0)
    qkv = QKV(8).double()
    (attend(qkv, torch.randn(2, 5, 8).double()) * torch.randn(2, 5, 8)).sum().backward()
    parts = [*qkv.weight.grad.chunk(3), qkv.q_bias.grad, qkv.v_bias.grad]
    assert all(part.abs().max() > 1e-6 for part in parts)


@pytest.mark.parametrize('bias', [True, False])
def test_loading_after_saving_is_strict_and_exact(bias):
    a, b = QKV(8, bias), QKV(8, bias)
    for p in a.parameters():
        nn.init.normal_(p)
    assert set(a.state_dict()) == {'weight', *(('q_bias', 'v_bias') if bias else ())}
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(a(x), b(x))
