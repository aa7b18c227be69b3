# SPDX-License-Identifier: Apache-2.0
"""The projection to queries, keys and values, as DeiT and Swin have it."""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F


class QKV(nn.Linear):
    """``X W^T + (b_q, 0, b_v)``: queries, keys and values side by side.

    A key bias would add the same to all logits of a row, which the softmax does not see: such a
    parameter has no gradient, so there is none. The ``qkv.bias`` of a DeiT or Swin is loaded
    without its third for the keys, which does not change what the model computes.

    Args:
        dim: Channels ``C``.
        bias: Whether queries and values have a bias.
    """

    def __init__(self, dim: int, bias: bool = True) -> None:
        super().__init__(dim, 3 * dim, bias=False)
        trunc_normal_(self.weight, std=0.02)
        self.q_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.register_buffer('k_bias', torch.zeros(dim) if bias else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, C)`` to ``(…, 3C)``."""
        if self.q_bias is None:
            return F.linear(x, self.weight)
        return F.linear(x, self.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f'{prefix}bias' in state_dict and self.q_bias is not None:
            q_bias, _, v_bias = state_dict.pop(f'{prefix}bias').chunk(3)
            state_dict[f'{prefix}q_bias'], state_dict[f'{prefix}v_bias'] = q_bias, v_bias
        super()._load_from_state_dict(state_dict, prefix, *args)
