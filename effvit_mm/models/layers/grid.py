# SPDX-License-Identifier: Apache-2.0
"""Fixed grids on maps of any size: the one place that knows about image size.

Matrices that are learned over token positions need a fixed number of tokens. Two ways lead there:

- :class:`Tiling` cuts a map ``(B, H*W, C)`` into tiles of a fixed size, optionally shifted as
  Swin's windows are, and puts it back. Where a tile reaches beyond the map its cells are 0.
- :func:`cover_matrix` averages a map to a fixed number of bins. Bins and cells are compared in
  image pixels, so bins of maps with different strides cover the same content.

Both cost a number of operations linear in the map. In eager mode maps are cut by padding and
views, and not touched at all where one tile is the whole map; compiled, exported and traced graphs,
which serve all sizes, gather by computed indices instead. Those are computed on flat vectors:
dimensions that are 1 for some sizes, and views that split one of unknown size, tie a graph to the
size at hand.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .utils import is_captured


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` in integers, also for the symbolic sizes of exporters."""
    return (a + b - 1) // b


def divide(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of what is not negative; ONNX has no ``%`` by a size that is not known
    yet."""
    quotient = index // n
    return quotient, index - quotient * n


def _shares(bins: Tensor, cells: Tensor, cell: int, num_bins: int, length: int) -> Tensor:
    """How much of each bin ``(n, 1)`` lies in each cell ``(N,)`` along a side of the image."""
    # in units of 1/num_bins pixel all of these are integers
    start = torch.maximum(bins * length, cells * (cell * num_bins))
    end = torch.minimum((bins + 1) * length, (cells + 1) * (cell * num_bins))
    return (end - start).clamp(min=0) / length


def cover_matrix(
    image_size: tuple[int, int],
    width: int,
    num_cells: int,
    cell: int,
    num_bins: int,
    device: torch.device | None = None,
) -> Tensor:
    """How much of each of ``num_bins**2`` equal parts of an image lies in each cell of a map.

    ``cover_matrix(…) @ x`` averages a map ``x (B, num_cells, C)`` to ``(B, num_bins**2, C)``.

    Args:
        image_size: Height and width of the image in pixels.
        width: Width of the map.
        num_cells: Number of the map's cells.
        cell: Side of a cell in pixels. The last ones may reach beyond the image, which counts only
            where they lie on it.
        num_bins: Number of bins along each side.
        device: Where to compute.

    Returns:
        Shares ``(num_bins**2, num_cells)``, float32; each row sums to 1. Where bins and cells
        coincide, exactly the identity.
    """
    bin_y, bin_x = divide(torch.arange(num_bins**2, device=device)[:, None], num_bins)
    cell_y, cell_x = divide(torch.arange(num_cells, device=device), width)
    rows = _shares(bin_y.float(), cell_y.float(), cell, num_bins, image_size[0])
    return rows * _shares(bin_x.float(), cell_x.float(), cell, num_bins, image_size[1])


def _shift_along(shift: int, num_tiles: int, device: torch.device | None) -> int | Tensor:
    """The shift along one side: none where a single tile covers it."""
    if not shift:
        return 0
    if not is_captured():
        return shift if num_tiles > 1 else 0
    return shift * (torch.arange(2, device=device) * (num_tiles - 1)).clamp(max=1)[1]


def roll_index(index: Tensor, shift: int | Tensor, side: int) -> Tensor:
    """Positions along a side, shifted around its end by at most its length."""
    if isinstance(shift, int) and shift == 0:
        return index
    # not negative: there ONNX's division rounds the other way
    return divide(index + shift + side, side)[1]


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

    def _cells(self, num_samples: int) -> tuple[Tensor, ...]:
        """All cells of all tiles, one after the other.

        Returns:
            For each the sample and its place (y, x) on the map or beyond it.
        """
        (nh, nw), (th, tw) = self.tiles, self.tile
        index = torch.arange(num_samples * (nh * nw) * (th * tw), device=self.device)
        tile, cell = divide(index, th * tw)
        sample, tile = divide(tile, nh * nw)
        (tile_y, tile_x), (cell_y, cell_x) = divide(tile, nw), divide(cell, tw)
        y, x = tile_y * th + cell_y, tile_x * tw + cell_x
        y, x = roll_index(y, self.shift[0], nh * th), roll_index(x, self.shift[1], nw * tw)
        return sample, y, x

    def _compute_indices(self) -> None:
        """Row indices of the tiles' cells among the tokens, and of the tokens in the tiles."""
        (nh, nw), (th, tw) = self.tiles, self.tile
        sample, y, x = self._cells(self.batch)
        inside = (y < self.height) & (x < self.width)
        token = (sample * self.height + y) * self.width + x
        self._source = torch.where(inside, token, 0)
        self._beyond = ~inside[:, None]
        index = torch.arange(self.batch * (self.height * self.width), device=self.device)
        row, x = divide(index, self.width)
        sample, y = divide(row, self.height)
        y, x = roll_index(y, -self.shift[0], nh * th), roll_index(x, -self.shift[1], nw * tw)
        (tile_y, cell_y), (tile_x, cell_x) = divide(y, th), divide(x, tw)
        tile = (sample * nh + tile_y) * nw + tile_x
        self._target = tile * (th * tw) + cell_y * tw + cell_x

    def inside(self, num_samples: int = 1) -> Tensor:
        """Which cells ``(num_samples*T, A)`` of the ``T`` tiles of a sample lie on the map."""
        _, y, x = self._cells(num_samples)
        return ((y < self.height) & (x < self.width)).view(-1, self.tile[0] * self.tile[1])

    def cut(self, x: Tensor) -> Tensor:
        """Tokens ``(B, H*W, C)`` to tiles ``(B*T, A, C)``; cells beyond the map are 0."""
        (nh, nw), (th, tw) = self.tiles, self.tile
        channels = x.shape[2]
        if self.by_index:
            rows = x.flatten(0, 1).index_select(0, self._source)
            return rows.masked_fill(self._beyond, 0).view(-1, th * tw, channels)
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
