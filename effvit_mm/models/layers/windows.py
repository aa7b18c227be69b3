# SPDX-License-Identifier: Apache-2.0
"""Swin's windows on maps of any size, and which of their cells may see each other."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .grid import Tiling, divide, roll_index
from .utils import is_captured

#: Added to the logits of pairs that may not see each other: more than any logit, but finite. (In
#: half precision it becomes -inf, which is no danger: every cell sees itself.)
MASKED = -1e30


class Windows:
    """Square windows over a map, shifted by rolling it, with masks for what that brings together.

    What is beyond the map, rolled by the shift, lies in the last two rows and columns of windows.
    So there are three kinds of windows along a side, nine in all, whatever the map's size.

    Args:
        batch: Number of samples ``B``.
        height: Height ``H`` of the map.
        width: Width ``W`` of the map.
        side: Side of a window, which has ``n = side²`` cells.
        shift: By how many cells to roll, less than ``side``; a side of the map with a single
            window is not shifted.
        device: The map's device.

    Attributes:
        mask: What is added to the logits of a window of each kind, ``(9, n, n)``: 0 or
            :data:`MASKED`. None where all cells see each other.
        kind: Of each window its kind, ``(B*T,)``, or None without mask.
    """

    def __init__(
        self,
        batch: int,
        height: int,
        width: int,
        side: int,
        shift: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.tiling = Tiling(batch, height, width, (side, side), (shift, shift), device)
        self.mask = self.kind = None
        whole = not is_captured() and not (height % side or width % side)
        if not (whole and not any(self.tiling.shift)):
            self.mask, self.kind = self._masks(), self._kinds()

    def _kinds(self) -> Tensor:
        nh, nw = self.tiling.tiles
        window = torch.arange(self.tiling.batch * (nh * nw), device=self.tiling.device)
        _, window = divide(window, nh * nw)
        y, x = divide(window, nw)
        return 3 * (y - (nh - 3)).clamp(0, 2) + (x - (nw - 3)).clamp(0, 2)

    def _masks(self) -> Tensor:
        t = self.tiling
        down = self._apart(t.height, t.tiles[0], t.shift[0])[:, None, :, None, :, None]
        along = self._apart(t.width, t.tiles[1], t.shift[1])[None, :, None, :, None, :]
        n = t.tile[0] ** 2
        return (down | along).reshape(9, n, n).to(torch.float32) * MASKED

    def _apart(self, length: int, tiles: int, shift: int | Tensor) -> Tensor:
        """Along one side of the map, which cells of the three kinds of windows may not see each
        other, ``(3, side, side)``: computed in one window of each kind (where there are fewer than
        three along the side, some kinds stand for a window that is also of another, or is none)."""
        side, device = self.tiling.tile[0], self.tiling.device
        window = (torch.arange(3, device=device) + (tiles - 3)).clamp(min=0)
        rolled = window[:, None] * side + torch.arange(side, device=device)
        from_start = (rolled >= tiles * side - shift).to(torch.int64)
        beyond = roll_index(rolled, shift, tiles * side) >= length
        region = from_start.masked_fill(beyond, 2)
        return region[:, :, None] != region[:, None, :]

    def cut(self, x: Tensor) -> Tensor:
        """Tokens ``(B, H*W, C)`` to windows ``(B*T, n, C)``; cells beyond the map are 0."""
        return self.tiling.cut(x)

    def join(self, windows: Tensor) -> Tensor:
        """Windows ``(B*T, n, C)`` to tokens ``(B, H*W, C)``: undoes :meth:`cut`."""
        return self.tiling.join(windows)


class PaddedWindows(Windows):
    """Windows shifted by zeros before the map instead of a roll, as in Swin-MLP: nothing is brought
    together that is not neighbouring, so layers serve that cannot mask. There may be one more row
    and column of windows.

    Args:
        batch: See :class:`Windows`, also for the arguments not listed here.
        shift: By how many cells; 0: none.
    """

    def __init__(
        self,
        batch: int,
        height: int,
        width: int,
        side: int,
        shift: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.height, self.width, self.before = height, width, (side - shift) % side
        size = height + self.before, width + self.before
        self.tiling = Tiling(batch, *size, (side, side), device=device)
        self.mask = self.kind = None

    def cut(self, x: Tensor) -> Tensor:
        """See :meth:`Windows.cut`."""
        if self.before:
            x = x.view(x.shape[0], self.height, self.width, x.shape[2])
            x = F.pad(x, (0, 0, self.before, 0, self.before, 0)).flatten(1, 2)
        return self.tiling.cut(x)

    def join(self, windows: Tensor) -> Tensor:
        """See :meth:`Windows.join`."""
        x = self.tiling.join(windows)
        if self.before:
            x = x.view(x.shape[0], self.tiling.height, self.tiling.width, x.shape[2])
            x = x[:, self.before :, self.before :].flatten(1, 2)
        return x
