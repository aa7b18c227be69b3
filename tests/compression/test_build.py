# SPDX-License-Identifier: Apache-2.0
"""Compressed models out of pretrained weights."""

import pytest
import timm
import torch

from effvit_mm import IntegratedDeiT
from effvit_mm.compression.build import build_integrated_deit
from effvit_mm.compression.calibration import token_survival

SIZES = dict(embed_dims=32, depth=6, num_heads=4, image_size=64, patch_size=8)
ARCH = dict(SIZES, static_layers=(1, 2), pyramid=((3, 40), (4, 24), (5, 12)))
PLAIN = dict(SIZES, static_layers=(), pyramid=())


def awake(model):
    """Weights of a size that training would give them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.add_(noise * (0.1 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5))
    return model.eval()


def smooth_images(count, size=64, seed=0):
    """Images whose neighbouring patches are alike, as photographs' are."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 5, 5, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=size, mode='bicubic')


@pytest.fixture(scope='module')
def deit():
    """timm's DeiT in the size of ARCH."""
    torch.manual_seed(0)
    return awake(
        timm.create_model(
            'deit_tiny_patch16_224',
            img_size=64,
            patch_size=8,
            embed_dim=32,
            depth=6,
            num_heads=4,
            num_classes=5,
        )
    )


@torch.no_grad()
def collect(deit, images):
    """The statistics of a few images, written down as the paper defines them."""
    attention, gram, std = {}, {}, {}

    def hook(layer):
        def keep(block, args):
            x = args[0]
            gram[f'gram.{layer}'] = torch.einsum('bnc,bmc->nm', x, x) / (len(x) * x.shape[2])
            std[f'token_std.{layer}'] = x.std(dim=2, correction=0).mean()
            q, k, _ = block.attn.qkv(block.norm1(x)).view(*x.shape[:2], 3, 4, -1).unbind(2)
            logits = torch.einsum('bnhd,bmhd->bhnm', q, k) / q.shape[3] ** 0.5
            attention[f'attention_mean.{layer}'] = logits.softmax(dim=3).mean(dim=0)

        return keep

    handles = [b.register_forward_pre_hook(hook(i)) for i, b in enumerate(deit.blocks)]
    deit(images)
    for handle in handles:
        handle.remove()
    return {**attention, **gram, **std}


def loaded(state, arch, **kwargs):
    """The backbone with what was built for it."""
    model = IntegratedDeiT(arch, **kwargs).eval()
    model.load_state_dict(
        {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}
    )
    return model


def classify(state, arch, images):
    """Scores of what was built."""
    with torch.no_grad():
        (features,) = loaded(state, arch, out_type='cls_token')(images)
    return torch.nn.functional.linear(features, state['head.fc.weight'], state['head.fc.bias'])


def test_without_static_layers_and_aggregations_the_build_computes_what_timm_does(deit):
    state, report = build_integrated_deit(deit.state_dict(), None, PLAIN, out_type='cls_token')
    images = smooth_images(3)
    with torch.no_grad():
        torch.testing.assert_close(classify(state, PLAIN, images), deit(images))
    assert not report.names('new') and not report.names('derived')


def test_static_layers_with_the_attention_of_one_image_reproduce_it_on_that_image(deit):
    image = smooth_images(1)
    arch = dict(PLAIN, static_layers=(1, 2, 3))
    state, report = build_integrated_deit(
        deit.state_dict(), collect(deit, image), arch, out_type='cls_token'
    )
    with torch.no_grad():
        torch.testing.assert_close(classify(state, arch, image), deit(image))
    assert report.names('derived') == [f'backbone.blocks.{i}.attn.matrix' for i in (1, 2, 3)]


@pytest.mark.parametrize('out_type', ['cls_token', 'pyramid'])
@pytest.mark.parametrize(
    'fields',
    [
        {},
        dict(static_init='local'),
        dict(static_block='mlp'),
        dict(glad_norm=False),
        dict(glad_pos_embed=False),
        dict(aggregation='concat'),
        dict(aggregation='downsample'),
        dict(pyramid=()),
        dict(static_layers=()),
    ],
)
def test_the_report_accounts_for_every_tensor_and_every_value(deit, out_type, fields):
    source = deit.state_dict()
    arch = {**ARCH, **fields}
    statistics = collect(deit, smooth_images(8))
    state, report = build_integrated_deit(source, statistics, arch, out_type=out_type)
    loaded(state, arch, out_type=out_type)
    kept = [r for r in report.records if r.status != 'dropped']
    assert sorted(r.name for r in kept) == sorted(state)
    assert all(r.shape == state[r.name].shape for r in kept)
    # what is not inherited was dropped
    sizes = {
        status: sum(torch.Size(r.shape).numel() for r in report.records if r.status == status)
        for status in ('inherited', 'dropped')
    }
    assert sum(sizes.values()) == sum(value.numel() for value in source.values())
    assert ('backbone.blocks.1.attn.v.weight' in state) == (
        'static_layers' not in fields and 'static_block' not in fields
    )
    assert not any('.num_batches' in name for name in report.names('new'))


def test_what_is_random_depends_on_the_seed_alone(deit):
    arch = dict(ARCH, static_init='random')
    states = [
        build_integrated_deit(deit.state_dict(), None, arch, glad_init='random', seed=seed)[0]
        for seed in (0, 0, 1)
    ]
    differing = [
        [key for key in states[0] if not torch.equal(states[0][key], other[key])]
        for other in states[1:]
    ]
    assert not differing[0]
    assert 'backbone.aggregations.3.weight' in differing[1]
    assert 'backbone.blocks.1.attn.matrix' in differing[1]
    assert 'backbone.blocks.0.attn.qkv.weight' not in differing[1]


def test_the_linear_start_lets_class_token_and_low_rank_patch_tokens_through(deit):
    images = smooth_images(32)
    statistics = collect(deit, images)
    survival = {}
    for start in ('linear', 'random'):
        state, _ = build_integrated_deit(
            deit.state_dict(), statistics, ARCH, glad_init=start, out_type='cls_token'
        )
        model = loaded(state, ARCH, out_type='cls_token')
        survival[start] = token_survival(model, images.split(8))
    assert list(survival['linear']) == ['3', '4', '5']
    print(survival)
    for layer, linear in survival['linear'].items():
        assert linear['class_cosine'] > 0.99
        assert linear['patch_floor'] <= linear['patch_error'] < survival['random'][layer][
            'patch_error'
        ]
