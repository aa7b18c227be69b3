# SPDX-License-Identifier: Apache-2.0
"""A PartialFormer whose feature maps are gated by squeeze and excitation (Hu et al., "Squeeze-and-
Excitation Networks", CVPR 2018)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from effvit_mm import PartialFormer


class ChannelGate(nn.Module):
    """Scales each channel by a factor in (0, 2) that is computed from the map's means.

    Args:
        channels: Channels ``C``.
        reduction: ``C`` over the channels in between.
    """

    def __init__(self, channels: int, reduction: int = 8) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // reduction)
        self.excite = nn.Linear(channels // reduction, channels)

    def reset_to_identity(self) -> None:
        """Factors of 1 for whatever comes in."""
        nn.init.zeros_(self.excite.weight)
        nn.init.zeros_(self.excite.bias)

    def forward(self, x: Tensor) -> Tensor:
        """A map ``(B, C, H, W)`` to the same shape."""
        factors = 2 * torch.sigmoid(self.excite(self.squeeze(x.mean(dim=(2, 3))).relu()))
        return x * factors[:, :, None, None]


@MODELS.register_module()
class GatedPartialFormer(PartialFormer):
    """PartialFormer with a :class:`ChannelGate` on every map that it returns.

    The gates start as identities, so weights of a PartialFormer give the same maps at first. The
    arguments are those of PartialFormer.
    """

    # a PartialFormer's checkpoint loads although it has no gates
    may_lack: ClassVar[str] = rf'{PartialFormer.may_lack}|gates\.'

    def finish(self, channels: Sequence[int], *args) -> None:
        """Add the gates before the weights are initialised."""
        self.gates = nn.ModuleDict({str(i): ChannelGate(channels[i]) for i in self.out_indices})
        super().finish(channels, *args)
        for gate in self.gates.values():
            gate.reset_to_identity()

    def output(self, i: int, tokens: Tensor, height: int, width: int) -> Tensor:
        """Gate the map ``(B, C, H, W)`` of stage ``i``."""
        return self.gates[str(i)](super().output(i, tokens, height, width))
