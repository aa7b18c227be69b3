# SPDX-License-Identifier: Apache-2.0
"""Contract: output. The right shapes at every size, and every feature where it belongs."""

import pytest
import torch
from torch import nn

from .families import STRIDES, image

# the least, odd, prime, of other proportions, smaller and larger than the pretraining size
SIZES = [(32, 32), (33, 33), (37, 61), (100, 133), (224, 224), (301, 256), (32, 480)]
OUT_INDICES = [(0, 1, 2, 3), (3,), (1, 3), (0,), (0, 1, 2)]


def assert_same(actual, expected, tolerance=1e-9):
    """Two tuples of double precision feature maps are equal up to rounding."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize('size', SIZES, ids=str)
@torch.no_grad()
def test_features_have_the_promised_shapes_at_any_image_size(family, size):
    model = family.build()
    outputs = model(image(*size))
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(model.out_channels) == len(STRIDES)
    for output, channels, s in zip(outputs, model.out_channels, STRIDES, strict=True):
        assert output.shape == (2, channels, -(-size[0] // s), -(-size[1] // s))
        assert output.is_contiguous()
        assert output.isfinite().all()


@pytest.mark.parametrize('out_indices', OUT_INDICES, ids=str)
@torch.no_grad()
def test_out_indices_choose_among_the_same_features(family, out_indices):
    whole, part = family.build().double(), family.build(out_indices=out_indices).double()
    part.load_state_dict({k: v for k, v in whole.state_dict().items() if k in part.state_dict()})
    x = image(70, 101).double()
    expected = whole(x)
    assert_same(part(x), tuple(expected[i] for i in out_indices))
    assert part.out_channels == [whole.out_channels[i] for i in out_indices]
    assert list(part.out_strides) == [STRIDES[i] for i in out_indices]


@pytest.mark.parametrize('train', [False, True], ids=['eval', 'train'])
@torch.no_grad()
def test_a_sample_s_features_do_not_depend_on_the_rest_of_its_batch(family, train):
    model = family.build().double().train(train)
    x = image(75, 110, batch=3).double()
    together = model(x)
    for i in range(3):
        assert_same(model(x[i : i + 1]), tuple(o[i : i + 1] for o in together))


@torch.no_grad()
def test_features_do_not_depend_on_the_sizes_of_earlier_calls(family):
    model = family.build().double()
    sizes = [(96, 64), (50, 131), (33, 33)]
    first = [model(image(*size).double()) for size in sizes]
    for size, expected in zip(reversed(sizes), reversed(first), strict=True):
        assert_same(model(image(*size).double()), expected, tolerance=0)


@torch.no_grad()
def test_a_forward_gives_the_maps_that_it_is_asked_for(family):
    model, x = family.build(out_indices=(0, 1, 3)), image(64, 96)
    first, second, last = model(x)
    assert torch.equal(model(x, (1,))[0], second)
    some = model(x, out_indices=[0, 3])
    assert torch.equal(some[0], first) and torch.equal(some[1], last) and len(some) == 2
    for wrong in ((), (3, 1), (1, 1), (2,), (5,)):
        with pytest.raises(ValueError, match=r'rise and be among \(0, 1, 3\), not'):
            model(x, wrong)


@torch.no_grad()
def test_evaluation_is_deterministic(family):
    model = family.build(drop_path_rate=0.5)
    x = image(64, 96)
    for a, b in zip(model(x), model(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize('place', [(0, 0), (32, 128), (96, 32), (128, 192)], ids=str)
@torch.no_grad()
def test_features_change_where_the_image_content_changes(family, place):
    model = family.build(awake=False)  # what attention spreads over the map is still small
    # no stronger than the image: norms of tokens that are mixed from all over it would shrink the
    # rest, which is a change elsewhere
    base = image(160, 224, batch=1)
    changed = base.clone()
    top, left = place
    changed[..., top : top + 32, left : left + 32] += image(32, 32, batch=1, seed=1)
    for a, b, s in zip(model(base), model(changed), STRIDES, strict=True):
        energy = (a - b).square().mean(1)[0]
        cells = energy[top // s : (top + 32) // s, left // s : (left + 32) // s]
        elsewhere = (energy.sum() - cells.sum()) / (energy.numel() - cells.numel())
        assert cells.mean() > 2 * elsewhere, f'stride {s}'
        # the strongest change lies in the content or touches it
        y, x = divmod(int(energy.argmax()), energy.shape[1])
        assert top // s - 1 <= y <= (top + 32) // s, f'stride {s}'
        assert left // s - 1 <= x <= (left + 32) // s, f'stride {s}'


@pytest.mark.parametrize('axes', [(3,), (2,), (2, 3)], ids=str)
@torch.no_grad()
def test_a_mirrored_image_gives_exactly_mirrored_features(family, axes):
    """With symmetric kernels a block may depend on places only through what it was given: tokens
    that return to other places than their own break the symmetry. At 32 k + 1 pixels strided
    convolutions are symmetric, too."""
    if family.mirror is None:
        pytest.skip('the mechanism is not mirror-symmetric')
    model = family.build().double()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            w = module.weight
            w.copy_((w + w.flip(2) + w.flip(3) + w.flip(2, 3)) / 4)
    family.mirror(model)
    x = image(161, 129).double()
    assert_same(model(x.flip(axes)), tuple(o.flip(axes) for o in model(x)))


@pytest.mark.parametrize('size', [(33, 33), (37, 61), (100, 260)], ids=str)
@torch.no_grad()
def test_what_tile_padding_holds_changes_nothing_inside_the_map(family, size):
    if family.poison_padding is None:
        pytest.skip('no cells beyond the map, or they are 0')
    model = family.build().double()
    x = image(*size).double()
    expected = model(x)
    with family.poison_padding(model):
        assert_same(model(x), expected)
