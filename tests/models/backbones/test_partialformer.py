# SPDX-License-Identifier: Apache-2.0
"""What is PartialFormer's own; what it shares with the other families is in tests/contract."""

from fractions import Fraction

import pytest
import torch

from effvit_mm import PartialFormer
from effvit_mm.models.layers.partial_attention import context_score, foreground_mask, split_tokens

SMALL = dict(base_channels=16, depths=(2, 1, 2, 1), num_heads=(1, 2, 4, 8))


def small(**fields):
    torch.manual_seed(0)
    return PartialFormer({**SMALL, **fields})


def blocks_of(model):
    return [block for stage in model.stages for block in stage.blocks]


def tokens_before_split(model, image):
    """What each block's split looks at: the output of its position encoding."""
    seen = []
    hooks = [
        block.pos_embed.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
        for block in blocks_of(model)
    ]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    return seen


def test_context_scores_vary_between_tokens_in_every_block_of_a_new_model():
    for x in tokens_before_split(PartialFormer('b0').eval(), torch.randn(2, 3, 224, 224)):
        spread = context_score(x).std(dim=1)
        scale = x.float().std(dim=(1, 2))
        assert (spread > 1e-3 * scale).all()  # rounding noise would be at 1e-7


def test_the_split_follows_the_content_of_the_image():
    """Moving the content by whole cells moves the foreground with it."""
    model = small(foreground_ratios=('1/16',) * 4).eval()
    image = torch.zeros(1, 3, 128, 128)
    image[:, :, 16:48, 16:48] = torch.randn(1, 3, 32, 32)
    masks = []
    for shift in (0, 64):
        x = tokens_before_split(model, image.roll((shift, shift), (2, 3)))[0]
        mask = foreground_mask(split_tokens(x, Fraction(1, 16)), x.shape[1])
        masks.append(mask.view(32, 32).float())
    moved = masks[0].roll((16, 16), (0, 1))
    assert (moved * masks[1]).sum() / masks[1].sum() > 0.9
    assert (masks[0] * masks[1]).sum() / masks[1].sum() < 0.5


def test_the_residual_stream_of_a_new_model_keeps_its_scale():
    x = tokens_before_split(PartialFormer('b4').eval(), torch.randn(1, 3, 64, 64))
    scales = [float(tokens.std()) for tokens in x]
    assert max(scales) < 10 and min(scales) > 0.1


def test_default_ratios_shrink_with_the_stride():
    ratios = [block.foreground_ratio for block in blocks_of(PartialFormer('b0'))]
    assert ratios == sorted(ratios)
    assert ratios[0] == Fraction(1, 64) and ratios[-1] == Fraction(1, 2)


@pytest.mark.parametrize(
    ('fields', 'absent'),
    [
        (dict(head_expansion=0), 'head_mlp'),
        (dict(sqa='none'), 'sqa'),
        (dict(sqa='linear'), 'fc1.*sqa'),
        (dict(foreground_ratios=(1, 1, 1, 1)), 'sqa'),
        (dict(abstract_token=False), 'abstract'),
        (dict(abstract_token=False, sqa='none'), 'query'),
    ],
    ids=str,
)
def test_an_ablation_costs_nothing_when_unused_and_trains(fields, absent):
    model = small(**fields)
    assert not [
        name for name, _ in [*model.named_parameters(), *model.named_buffers()] if absent in name
    ]
    features = model(torch.randn(2, 3, 64, 96))
    sum(f.square().mean() for f in features).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_ratios_may_be_fractions_strings_or_pairs():
    models = [
        small(foreground_ratios=ratios)
        for ratios in [
            ('1/64', '1/16', '1/4', '1/2'),
            ((1, 64), (1, 16), (1, 4), (1, 2)),
            (1 / 64, 1 / 16, 0.25, 0.5),
        ]
    ]
    ratios = [[block.foreground_ratio for block in blocks_of(model)] for model in models]
    assert ratios[0] == ratios[1] == ratios[2]


@pytest.mark.parametrize('ratio', [0, -0.5, 1.5, 'half', '1/0'])
def test_a_bad_ratio_is_named(ratio):
    with pytest.raises(ValueError, match='foreground_ratios'):
        small(foreground_ratios=(ratio, 1, 1, 1))


def test_an_unknown_sqa_is_named():
    with pytest.raises(ValueError, match="sqa must be one of .*'mean'"):
        small(sqa='mean')


@pytest.mark.parametrize('size', [(32, 32), (33, 32), (32, 256)], ids=str)
@torch.no_grad()
def test_a_last_stage_of_one_or_few_tokens_works(size):
    for ratios in (('1/64', '1/16', '1/4', '1/2'), (1, 1, 1, 1)):
        features = small(foreground_ratios=ratios).eval()(torch.randn(1, 3, *size))
        assert all(f.isfinite().all() for f in features)


@pytest.mark.parametrize('value', [0.0, 1.0, 255.0])
@torch.no_grad()
def test_constant_images_give_finite_features(value):
    features = small().eval()(torch.full((2, 3, 64, 64), value))
    assert all(f.isfinite().all() for f in features)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_a_model_in_half_precision_is_close_to_float32(dtype):
    model, image = small(foreground_ratios=(1, 1, 1, 1)).eval(), torch.randn(2, 3, 64, 64)
    exact = model(image)
    half = model.to(dtype)(image.to(dtype))
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == dtype
        assert (a.float() - b).abs().mean() < 0.05 * b.abs().mean()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_the_split_of_a_model_in_half_precision_is_finite(dtype):
    features = small().eval().to(dtype)(30 * torch.randn(2, 3, 64, 64, dtype=dtype))
    assert all(f.isfinite().all() for f in features)
