# SPDX-License-Identifier: Apache-2.0
"""Grids against references that handle one cell, and one pixel, at a time."""

import itertools
from fractions import Fraction

import pytest
import torch

from effvit_mm.models.layers import grid
from effvit_mm.models.layers.grid import Tiling, cover_matrix

MAPS = [(1, 1), (3, 4), (4, 6), (8, 6), (7, 13), (2, 17)]
TILES = [(4, 3), (2, 2)]
SHIFTS = [(0, 0), (2, 1), (1, 0)]


@pytest.fixture(params=[False, True], ids=['eager', 'captured'])
def captured(request, monkeypatch):
    """Both ways of cutting: by views, and by the indices of graphs that serve all sizes."""
    monkeypatch.setattr(grid, 'is_captured', lambda: request.param)


def sources(size, tile, shift):
    """For each tile, each of its cells: the cell (y, x) of the padded map that it shows."""
    sides = []
    for length, cells, offset in zip(size, tile, shift, strict=True):
        count = -(-length // cells)
        offset = offset if count > 1 else 0
        sides.append([[(t * cells + c + offset) % (count * cells) for c in range(cells)]
                      for t in range(count)])  # fmt: skip
    return [[(y, x) for y in rows for x in cols] for rows in sides[0] for cols in sides[1]]


@pytest.mark.parametrize('shift', SHIFTS, ids=str)
@pytest.mark.parametrize('tile', TILES, ids=str)
@pytest.mark.parametrize('size', MAPS, ids=str)
def test_every_cell_comes_from_its_place_and_returns_to_it(size, tile, shift, captured):
    (height, width), batch = size, 3
    x = torch.randn(batch, height * width, 2)
    tiling = Tiling(batch, height, width, tile, shift)
    tiles = tiling.cut(x)
    expected = sources(size, tile, shift)
    assert tiles.shape == (batch * len(expected), tile[0] * tile[1], 2)
    for b, (t, cells) in itertools.product(range(batch), enumerate(expected)):
        for a, (row, col) in enumerate(cells):
            shown = tiles[b * len(expected) + t, a]
            if row < height and col < width:
                assert torch.equal(shown, x[b, row * width + col])
            else:
                assert not shown.any()
    assert torch.equal(tiling.join(tiles), x)


@pytest.mark.parametrize('shift', SHIFTS, ids=str)
@pytest.mark.parametrize('size', MAPS, ids=str)
def test_what_the_cells_beyond_the_map_hold_is_dropped(size, shift, captured):
    tiling = Tiling(2, *size, (4, 3), shift)
    x = torch.randn(2, size[0] * size[1], 5)
    beyond = ~tiling.inside().repeat(2, 1)[..., None]
    assert torch.equal(tiling.join(tiling.cut(x).masked_fill(beyond, torch.nan)), x)


def test_a_tile_that_is_the_map_is_not_copied():
    x = torch.randn(2, 196, 8)
    tiling = Tiling(2, 14, 14, (14, 14))
    assert tiling.cut(x).data_ptr() == x.data_ptr() == tiling.join(x).data_ptr()


@pytest.mark.parametrize('size', [(8, 6), (7, 13)], ids=str)
def test_gradients_return_to_their_places(size, captured):
    x = torch.randn(2, size[0] * size[1], 3, requires_grad=True)
    weight = torch.randn_like(x)
    tiling = Tiling(2, *size, (4, 3), (2, 1))
    (tiling.join(3 * tiling.cut(x)) * weight).sum().backward()
    torch.testing.assert_close(x.grad, 3 * weight)


def slow_cover(length, cell, bins):
    """Exact shares of the bins' pixels, cell by cell."""
    rows = []
    for i in range(bins):
        start, end = Fraction(i * length, bins), Fraction((i + 1) * length, bins)
        row = []
        for j in range(-(-length // cell)):
            overlap = min(end, (j + 1) * cell) - max(start, j * cell)
            row.append(max(overlap, Fraction(0)) / (end - start))
        rows.append(row)
    return rows


@pytest.mark.parametrize('cell', [4, 32])
@pytest.mark.parametrize('size', [(32, 33), (100, 224), (224, 224), (333, 1000)], ids=str)
def test_shares_are_overlaps_of_bins_and_cells_in_pixels(size, cell):
    height, width = (-(-s // cell) for s in size)
    cover = cover_matrix(size, width, height * width, cell, 7)
    rows, cols = (
        torch.tensor([[float(v) for v in row] for row in slow_cover(s, cell, 7)]) for s in size
    )
    expected = torch.einsum('iy,jx->ijyx', rows, cols).reshape(49, -1)
    torch.testing.assert_close(cover, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cover.sum(1), torch.ones(49))


def test_where_cells_are_bins_nothing_changes():
    assert torch.equal(cover_matrix((224, 224), 7, 49, 32, 7), torch.eye(49))


def test_every_pixel_counts_the_same():
    """Averaging all bins is averaging all pixels, cells at the border counting what exists."""
    cover = cover_matrix((100, 40), 2, 8, 32, 7).view(49, 4, 2)
    rows, cols = torch.tensor([32.0, 32, 32, 4]), torch.tensor([32.0, 8])
    torch.testing.assert_close(cover.mean(0), torch.outer(rows, cols) / 4000)
