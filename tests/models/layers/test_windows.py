# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import timm
import torch

from effvit_mm.models.layers import grid, windows
from effvit_mm.models.layers.windows import PaddedWindows, Windows

MAPS = [(1, 1), (3, 4), (4, 6), (8, 7), (7, 13), (2, 17), (10, 10)]


@pytest.fixture(params=[False, True], ids=['eager', 'captured'], autouse=True)
def captured(request, monkeypatch):
    """Both ways of cutting: by views, and by the indices of graphs that serve all sizes."""
    for module in (grid, windows):
        monkeypatch.setattr(module, 'is_captured', lambda: request.param)
    return request.param


def places(height, width):
    """A map whose two channels are the cells' rows and columns, counted from 1."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
    return 1.0 + torch.stack((y, x), dim=2).flatten(0, 1)[None]


@pytest.mark.parametrize('side,shift', [(3, 1), (4, 2), (4, 0), (1, 0)])
@pytest.mark.parametrize('size', MAPS, ids=str)
def test_cells_see_each_other_if_they_exist_and_are_nearer_than_a_window(size, side, shift):
    x = places(*size).repeat(2, 1, 1)
    w = Windows(2, *size, side, shift)
    cells = w.cut(x)
    assert torch.equal(w.join(cells), x)
    masks = torch.zeros(len(cells), side**2, side**2) if w.mask is None else w.mask[w.kind]
    for cell, mask in zip(cells.tolist(), masks, strict=True):
        for (i, a), (j, b) in itertools.product(enumerate(cell), repeat=2):
            if a != [0, 0]:
                near = abs(a[0] - b[0]) < side and abs(a[1] - b[1]) < side
                assert bool(mask[i, j] == 0) == (b != [0, 0] and near)
        assert not mask.diagonal().any()


@pytest.mark.parametrize('stage,side', enumerate((56, 28, 14)))
def test_masks_of_whole_windows_are_timm_s(stage, side):
    swin = timm.create_model('swin_tiny_patch4_window7_224', embed_dim=8, num_heads=(1, 2, 4, 8))
    expected = swin.layers[stage].blocks[1].attn_mask
    w = Windows(1, side, side, 7, 3)
    assert torch.equal(w.mask[w.kind] == 0, expected == 0)


def test_maps_of_whole_windows_need_no_mask_where_sizes_are_known(captured):
    assert (Windows(1, 14, 7, 7).mask is None) == (not captured)
    assert (Windows(1, 7, 7, 7, shift=3).mask is None) == (not captured)


@pytest.mark.parametrize('side,shift', [(3, 1), (4, 2), (4, 0), (1, 0)])
@pytest.mark.parametrize('size', MAPS, ids=str)
def test_padding_shifts_windows_and_brings_nothing_together(size, side, shift):
    x = places(*size)
    w = PaddedWindows(1, *size, side, shift)
    cells = w.cut(x)
    assert torch.equal(w.join(cells), x)
    seen = 0
    for window in cells.view(-1, side, side, 2).tolist():
        for row, col in itertools.product(range(side), repeat=2):
            if window[row][col] != [0, 0]:
                y, x = (int(c) - 1 for c in window[row][col])
                assert ((y - shift) % side, (x - shift) % side) == (row, col)
                seen += 1
        exist = [cell for cells in window for cell in cells if cell != [0, 0]]
        assert all(abs(a[i] - b[i]) < side for a in exist for b in exist for i in (0, 1))
    assert seen == size[0] * size[1]


@pytest.mark.parametrize('cls', [Windows, PaddedWindows])
def test_what_is_not_a_number_in_one_sample_stays_there(cls):
    x = torch.full((2, 20, 3), torch.nan)
    x[1] = 1
    cells = cls(2, 4, 5, 3, 1).cut(x)
    assert cells[len(cells) // 2 :].isfinite().all()
