# SPDX-License-Identifier: Apache-2.0
"""Fixed grids on maps of any size: the one place that knows about image size.

Matrices that are learned over token positions need a fixed number of tokens. Two ways lead there:

- :class:`Tiling` cuts a map ``(B, H*W, C)`` into tiles of a fixed size, optionally shifted as
  Swin's windows are, and puts it back. Where a tile reaches beyond the map its cells are 0.
- :func:`cover_matrix` and :func:`pool_cells` average a map to a fixed number of bins. Bins and
  cells are compared in image pixels, so bins of maps with different strides cover the same content.

Both cost a number of operations linear in the map. In eager mode maps are cut by padding and
views, and not touched at all where one tile is the whole map; compiled, exported and traced graphs,
which serve all sizes, gather by computed indices instead.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def is_captured() -> bool:
    """Whether a graph is being made that must not depend on the size at hand."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` in integers, also for the symbolic sizes of exporters."""
    return (a + b - 1) // b


def cover_matrix(
    length: int, num_cells: int, cell: int, num_bins: int, device: torch.device | None = None
) -> Tensor:
    """How much of each of ``num_bins`` equal parts of a line lies in each cell.

    Args:
        length: Length of the line in pixels.
        num_cells: Number of cells; cell ``j`` covers the pixels from ``j*cell`` to ``(j+1)*cell``.
        cell: Length of a cell in pixels.
        num_bins: Number of bins; bin ``i`` covers ``[i, i+1) * length / num_bins``.
        device: Where to compute.

    Returns:
        Shares ``(num_bins, num_cells)``, float32; each row sums to 1. Where bins and cells
        coincide, exactly the identity.
    """
    # in units of 1/num_bins pixel everything is an integer
    bins = (torch.arange(num_bins, device=device, dtype=torch.float32) * length)[:, None]
    cells = torch.arange(num_cells, device=device, dtype=torch.float32) * (cell * num_bins)
    end = torch.minimum(bins + length, cells + cell * num_bins)
    return (end - torch.maximum(bins, cells)).clamp(min=0) / length


def pool_cells(x: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Weighted averages over the cells of a map.

    Args:
        x: Map ``(B, H, W, C)``.
        rows: Weights ``(h, H)`` of the rows.
        cols: Weights ``(w, W)`` of the columns.

    Returns:
        ``(B, h, w, C)``.
    """
    batch, _, width, channels = x.shape
    x = (rows.to(x.dtype) @ x.flatten(2)).view(batch, rows.shape[0], width, channels)
    return cols.to(x.dtype) @ x


def _shift_along(shift: int, num_tiles: int, device: torch.device | None) -> int | Tensor:
    """The shift along one side: none where a single tile covers it."""
    if not shift:
        return 0
    if not is_captured():
        return shift if num_tiles > 1 else 0
    return shift * (torch.arange(2, device=device) * (num_tiles - 1)).clamp(max=1)[1]


class Tiling:
    """Tiles of a fixed size over a map, in row-major order.

    Along a side that does not divide, the last tile reaches beyond the map. With a shift, the map
    (with what is beyond it) is first rolled up and left; a side with a single tile is not shifted.

    Args:
        batch: Number of samples ``B``.
        height: Height ``H`` of the map.
        width: Width ``W`` of the map.
        tile: Height and width of a tile, of ``A = height * width`` cells.
        shift: By how many cells to roll, down the height and along the width.
        device: The map's device.
    """

    def __init__(
        self,
        batch: int,
        height: int,
        width: int,
        tile: tuple[int, int],
        shift: tuple[int, int] = (0, 0),
        device: torch.device | None = None,
    ) -> None:
        self.batch, self.height, self.width, self.tile = batch, height, width, tile
        self.tiles = ceil_div(height, tile[0]), ceil_div(width, tile[1])
        self.shift = (
            _shift_along(shift[0], self.tiles[0], device),
            _shift_along(shift[1], self.tiles[1], device),
        )
        self.device = device
        self.by_index = is_captured()
        if self.by_index:
            self._compute_indices()

    def _place(self, axis: int) -> Tensor:
        """Where on the padded side, before the roll, the tiles' cells lie: ``(tiles, cells)``."""
        tiles, cells = self.tiles[axis], self.tile[axis]
        rolled = (
            torch.arange(tiles, device=self.device)[:, None] * cells
            + torch.arange(cells, device=self.device)[None]
        )
        return (rolled + self.shift[axis]) % (tiles * cells)

    def _compute_indices(self) -> None:
        """Row indices of tokens in tiles, and of the tiles' cells on the map."""
        (nh, nw), (th, tw) = self.tiles, self.tile
        y = self._place(0)[None, :, None, :, None]
        x = self._place(1)[None, None, :, None, :]
        samples = torch.arange(self.batch, device=self.device)
        inside = (y < self.height) & (x < self.width)
        source = y.clamp(max=self.height - 1) * self.width + x.clamp(max=self.width - 1)
        first = (samples * (self.height * self.width)).view(-1, 1, 1, 1, 1)
        self._source = (first + source).flatten()
        self._inside = inside.expand(self.batch, -1, -1, -1, -1).reshape(-1, 1)
        y = (torch.arange(self.height, device=self.device) - self.shift[0]) % (nh * th)
        x = (torch.arange(self.width, device=self.device) - self.shift[1]) % (nw * tw)
        tile = (y // th)[:, None] * nw + x // tw
        cell = (y % th)[:, None] * tw + x % tw
        first = (samples * (nh * nw * th * tw)).view(-1, 1, 1)
        self._target = (first + tile * (th * tw) + cell).flatten()

    def inside(self) -> Tensor:
        """Which cells ``(T, A)`` of the ``T`` tiles of one sample lie on the map."""
        y, x = self._place(0) < self.height, self._place(1) < self.width
        return (y[:, None, :, None] & x[None, :, None, :]).flatten(2).flatten(0, 1)

    def regions(self) -> Tensor:
        """Numbers ``(T, A)`` of what was neighbouring before the roll; -1 beyond the map.

        Cells of a tile that have the same number may see each other, others were brought together
        from opposite sides of the map.
        """
        wrapped = []
        for axis in (0, 1):
            side = self.tiles[axis] * self.tile[axis]
            rolled = torch.arange(side, device=self.device).view(-1, self.tile[axis])
            wrapped.append((rolled >= side - self.shift[axis]).long())
        number = 2 * wrapped[0][:, None, :, None] + wrapped[1][None, :, None, :]
        number = number.flatten(2).flatten(0, 1)
        return torch.where(self.inside(), number, -1)

    def cut(self, x: Tensor) -> Tensor:
        """Tokens ``(B, H*W, C)`` to tiles ``(B*T, A, C)``; cells beyond the map are 0."""
        (nh, nw), (th, tw) = self.tiles, self.tile
        channels = x.shape[2]
        if self.by_index:
            rows = x.flatten(0, 1).index_select(0, self._source)
            return (rows * self._inside).view(-1, th * tw, channels)
        below, right = nh * th - self.height, nw * tw - self.width
        x = x.view(self.batch, self.height, self.width, channels)
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        x = x.view(self.batch, nh, th, nw, tw, channels).transpose(2, 3)
        return x.reshape(-1, th * tw, channels)

    def join(self, tiles: Tensor) -> Tensor:
        """Tiles ``(B*T, A, C)`` to tokens ``(B, H*W, C)``: undoes :meth:`cut`."""
        (nh, nw), (th, tw) = self.tiles, self.tile
        channels = tiles.shape[2]
        if self.by_index:
            rows = tiles.flatten(0, 1).index_select(0, self._target)
            return rows.view(self.batch, -1, channels)
        x = tiles.view(self.batch, nh, nw, th, tw, channels).transpose(2, 3)
        x = x.reshape(self.batch, nh * th, nw * tw, channels)
        if any(self.shift):
            x = x.roll(self.shift, (1, 2))
        return x[:, : self.height, : self.width].reshape(self.batch, -1, channels)
