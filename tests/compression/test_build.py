# SPDX-License-Identifier: Apache-2.0
"""Compressed models out of pretrained weights."""

import pytest
import timm
import torch

from effvit_mm import DGSSASwin, IntegratedDeiT
from effvit_mm.compression import (
    build_dgssa_swin,
    build_integrated_deit,
    calibrate_unprojections,
    collect_statistics,
    token_survival,
)

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


def test_a_static_layer_after_a_glad_has_the_mean_attention_between_aggregated_tokens(deit):
    statistics = collect(deit, smooth_images(8))
    arch = dict(PLAIN, static_layers=(2,), pyramid=((1, 40),))
    state, report = build_integrated_deit(deit.state_dict(), statistics, arch)
    weight = state['backbone.aggregations.1.weight']
    matrix = state['backbone.blocks.2.attn.matrix']
    # the rows of W are orthonormal
    expected = weight @ statistics['attention_mean.2'] @ weight.t()
    torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-5)
    assert 'backbone.blocks.2.attn.matrix' in report.names('derived')
    arch = dict(arch, aggregation='downsample')
    with pytest.raises(ValueError, match='static layer 2 .* after a local aggregation'):
        build_integrated_deit(deit.state_dict(), statistics, arch)


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


def test_the_linear_start_lets_class_token_and_patch_tokens_through(deit):
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
    for layer, linear in survival['linear'].items():
        random = survival['random'][layer]
        assert linear['class_cosine'] > 0.99 > 0.9 > random['class_cosine']
        assert linear['patch_floor'] <= linear['patch_error'] < random['patch_error']


@pytest.mark.parametrize('aggregation', ['concat', 'downsample'])
def test_local_aggregations_let_the_class_token_pass(deit, aggregation):
    arch = dict(ARCH, aggregation=aggregation, pyramid=((3, 17), (5, 5)))
    images = smooth_images(4)
    state, _ = build_integrated_deit(
        deit.state_dict(), collect(deit, images), arch, out_type='cls_token'
    )
    survival = token_survival(loaded(state, arch, out_type='cls_token'), [images])
    assert [values['class_cosine'] for values in survival.values()] == pytest.approx([1, 1])


def test_the_classes_are_inherited_and_what_a_backbone_has_not_is_dropped(deit):
    source = deit.state_dict()
    state, report = build_integrated_deit(source, None, PLAIN, out_type='cls_token')
    assert torch.equal(state['head.fc.weight'], source['head.weight'])
    keys = report.names('dropped')
    assert keys == [f'blocks.{layer}.attn.qkv.bias[keys]' for layer in range(6)]
    backbone = {key: value for key, value in source.items() if not key.startswith('head.')}
    state, _ = build_integrated_deit(backbone, None, PLAIN, out_type='cls_token')
    assert not any(key.startswith('head.') for key in state)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(arch=dict(ARCH, depth=7)), 'has 6 blocks in blocks, the architecture 7'),
        (dict(arch=dict(ARCH, embed_dims=64)), r'would be .* from the original.*different models'),
        (dict(arch=dict(PLAIN, image_size=32)), 'pos_embed would be 1 x 65 x 32'),
        (dict(statistics=None), 'no statistics: gram.3 is needed'),
        (dict(statistics={}), 'statistics lack gram.3'),
        (dict(glad_init='linaer'), "'linear' or 'random', not 'linaer'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(deit, change, message):
    arguments = dict(statistics=collect(deit, smooth_images(2)), arch=ARCH)
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        build_integrated_deit(deit.state_dict(), out_type='cls_token', **arguments)


def test_calibration_finds_the_way_back_to_the_grid(deit):
    images = smooth_images(64)
    state, _ = build_integrated_deit(deit.state_dict(), collect(deit, images), ARCH)
    model = loaded(state, ARCH)
    state, _ = build_integrated_deit(deit.state_dict(), None, PLAIN)
    original = loaded(state, PLAIN)
    # before layer 3 nothing is aggregated, so three of four maps have an un-projection
    assert sorted(model.unprojections) == ['1', '2', '3']
    errors = calibrate_unprojections(model, original, images.split(16))
    assert all(error['after'] < error['before'] for error in errors.values())
    again = calibrate_unprojections(model, original, images.split(32))
    assert [again[i]['before'] for i in again] == pytest.approx(
        [errors[i]['after'] for i in errors], rel=1e-3
    )


def test_on_four_windows_the_calibrated_maps_stay_those_of_each_window(deit):
    state, _ = build_integrated_deit(deit.state_dict(), collect(deit, smooth_images(8)), ARCH)
    model = loaded(state, ARCH)
    image = smooth_images(1, size=128)
    with torch.no_grad():
        whole, part = model(image)[1], model(image[:, :, 64:, :64].contiguous())[1]
    torch.testing.assert_close(whole[:, :, 8:, :8], part)


def timm_swin():
    torch.manual_seed(0)
    sizes = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4)
    name = 'swin_tiny_patch4_window7_224'
    return awake(timm.create_model(name, img_size=128, num_classes=5, **sizes))


SWIN = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4)


def classify_swin(state, arch, images):
    model = DGSSASwin(arch, out_indices=(3,)).eval()
    model.load_state_dict(
        {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}
    )
    with torch.no_grad():
        features = model(images)[0].mean(dim=(2, 3))
    return torch.nn.functional.linear(features, state['head.fc.weight'], state['head.fc.bias'])


def test_without_static_layers_the_build_computes_what_timms_swin_does():
    swin, images = timm_swin(), smooth_images(2, size=128)
    arch = dict(SWIN, static_layers=())
    state, report = build_dgssa_swin(swin.state_dict(), None, arch, out_indices=(3,))
    with torch.no_grad():
        expected = swin(images)
    torch.testing.assert_close(classify_swin(state, arch, images), expected, rtol=1e-4, atol=1e-5)
    assert not report.names('new') and not report.names('derived')


def test_static_windows_start_from_the_mean_attention_and_every_tensor_is_accounted_for():
    swin, images = timm_swin(), smooth_images(6, size=128)
    statistics = collect_statistics(swin, images.split(3)).tensors
    arch = dict(SWIN, static_layers=(1, 2, 3))
    state, report = build_dgssa_swin(swin.state_dict(), statistics, arch)
    names = [f'stages.{name}.attn.logits' for name in ('0.blocks.1', '1.blocks.0', '1.blocks.1')]
    assert report.names('derived') == [f'backbone.{name}' for name in names]
    for layer, name in enumerate(names, start=1):
        mean = statistics[f'attention_mean.{layer}'].float()
        # with a shift, pairs are seen in different numbers of windows: rows do not sum to 1
        mean = mean / mean.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(state[f'backbone.{name}'].softmax(dim=-1), mean)
    # output norms of the first three stages, which a classifier has not
    assert report.names('new') == [
        f'backbone.norm{i}.{kind}' for i in range(3) for kind in ('weight', 'bias')
    ]
    sizes = {
        status: sum(torch.Size(r.shape).numel() for r in report.records if r.status == status)
        for status in ('inherited', 'dropped')
    }
    assert sum(sizes.values()) == sum(value.numel() for value in swin.state_dict().values())


def test_static_windows_are_closer_to_the_original_than_random_ones():
    swin, images = timm_swin(), smooth_images(16, size=128)
    statistics = collect_statistics(swin, images.split(4)).tensors
    with torch.no_grad():
        expected = swin(images)
    error = {}
    for init in ('dynamic', 'random'):
        arch = dict(SWIN, static_layers=(1, 2, 3, 4), static_init=init)
        state, _ = build_dgssa_swin(swin.state_dict(), statistics, arch, out_indices=(3,))
        error[init] = (classify_swin(state, arch, images) - expected).norm()
    assert error['dynamic'] < error['random']


def test_token_mixing_in_windows_inherits_all_but_the_attention_of_its_layers():
    source = timm_swin().state_dict()
    arch = dict(SWIN, static_layers=(1, 2), static_block='mlp')
    state, report = build_dgssa_swin(source, None, arch, out_indices=(3,))
    mixing = [f'backbone.stages.{i}.attn.fc' for i in ('0.blocks.1', '1.blocks.0')]
    assert report.names('new') == [
        f'{name}{k}.{kind}' for name in mixing for k in (1, 2) for kind in ('weight', 'bias')
    ]
    DGSSASwin(arch, out_indices=(3,)).load_state_dict(
        {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}
    )
