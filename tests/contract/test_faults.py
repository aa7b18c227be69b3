# SPDX-License-Identifier: Apache-2.0
"""Images that no data set should hold, and some do."""

import pytest
import torch

from .families import STRIDES, image


@pytest.mark.parametrize('size', [(1, 1), (2, 3), (1, 40), (31, 31), (1, 4000), (4000, 1)])
@torch.no_grad()
def test_images_below_32_pixels_give_maps_of_at_least_one_cell(family, size):
    features = family.build()(image(*size))
    for x, stride in zip(features, STRIDES, strict=True):
        assert x.shape[2:] == (-(-size[0] // stride), -(-size[1] // stride))
        assert x.isfinite().all()


@torch.no_grad()
def test_an_image_of_4000_x_4000_pixels_is_served(family):
    features = family.build()(image(4000, 4000, batch=1))
    assert [x.shape[2:] for x in features] == [(4000 // s, 4000 // s) for s in STRIDES]
    assert all(x.isfinite().all() for x in features)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@torch.no_grad()
def test_a_broken_image_spoils_its_own_features_only(family, value):
    model, images = family.build(), image(75, 90, batch=3)
    expected = model(images)
    images[1, :, 10:12, 20:30] = value
    for x, clean in zip(model(images), expected, strict=True):
        assert torch.equal(x[[0, 2]], clean[[0, 2]])
        assert not x[1].isfinite().all()


def test_a_broken_image_in_training_spoils_no_neighbour_s_gradient(family):
    model, images = family.build(), image(64, 64, batch=2).requires_grad_()
    sum(x[0].square().mean() for x in model(images)).backward()
    expected, images.grad = images.grad[0].clone(), None
    broken = images.detach().clone()
    broken[1, 0, 5, 5] = float('nan')
    broken.requires_grad_()
    sum(x[0].square().mean() for x in model(broken)).backward()
    torch.testing.assert_close(broken.grad[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ('x', 'sentence'),
    [
        (torch.zeros(3, 64, 64), r'takes images \(B, 3, H, W\), not \(3, 64, 64\)\.'),
        (torch.zeros(2, 1, 64, 64), r'takes images \(B, 3, H, W\), not \(2, 1, 64, 64\)\.'),
        (torch.zeros(2, 4, 64, 64), r'takes images \(B, 3, H, W\), not \(2, 4, 64, 64\)\.'),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), 'in floating point, .* not torch.uint8'),
        (torch.zeros(0, 3, 64, 64), 'takes at least one image and pixel'),
        (torch.zeros(2, 3, 0, 64), 'takes at least one image and pixel'),
    ],
    ids=['no batch', 'gray', 'RGBA', 'uint8', 'no image', 'no pixel'],
)
def test_what_is_no_batch_of_images_is_said_in_a_sentence(family, x, sentence):
    with pytest.raises(
        ValueError, match=f'{family.name} {sentence}' if sentence[0] == 't' else sentence
    ):
        family.build()(x)
