# SPDX-License-Identifier: Apache-2.0
"""A backbone of this project: one of effvit_mm with something of its own."""

from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor

from effvit_mm import PartialFormer


@MODELS.register_module()
class CoordPartialFormer(PartialFormer):
    """PartialFormer that sees where a pixel is: two more channels with its row and column, from -1
    to 1 (CoordConv, Liu et al. 2018)."""

    def __init__(self, *args: Any, in_channels: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, in_channels=in_channels + 2, **kwargs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to the maps of PartialFormer."""
        rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, device=x.device)
        columns = torch.linspace(-1, 1, x.shape[3], dtype=x.dtype, device=x.device)
        places = torch.stack(torch.meshgrid(rows, columns, indexing='ij'))
        return super().forward(torch.cat((x, places.expand(len(x), -1, -1, -1)), dim=1))
