# SPDX-License-Identifier: Apache-2.0
"""Names of weights: the same outputs as timm, whoever named them."""

import re

import pytest
import timm
import torch

from effvit_mm.compression.keys import architecture_kind, to_timm_keys, unwrap

# 2 of Swin's windows (4 x 4) in the last stage: where there is one, MMDetection's still shifts it
SIDE = 256


@pytest.fixture
def image():
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def awake(model):
    """Every weight different from every other, so that an exchange would show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 / p.shape[-1] ** 0.5))
            if p.ndim == 1:
                p.add_(1)
    model.eval()  # some of OpenMMLab's return None
    return model


def timm_deit(**kwargs):
    sizes = dict(img_size=SIDE, embed_dim=32, depth=3, num_heads=4, num_classes=5)
    return timm.create_model('deit_tiny_patch16_224', **{**sizes, **kwargs}).eval()


def timm_swin(**kwargs):
    sizes = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), window_size=4)
    fields = dict(img_size=SIDE, num_classes=5, drop_path_rate=0)
    return timm.create_model('swin_tiny_patch4_window7_224', **{**sizes, **fields, **kwargs}).eval()


def mmpretrain_deit():
    models = pytest.importorskip('mmpretrain.models')
    arch = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=128)
    return models.VisionTransformer(arch=arch, img_size=SIDE)


SWIN = dict(depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))


def mmpretrain_swin():
    models = pytest.importorskip('mmpretrain.models')
    return models.SwinTransformer(arch=dict(embed_dims=16, **SWIN), img_size=SIDE, window_size=4)


def mmdet_swin():
    backbones = pytest.importorskip('mmdet.models.backbones')
    return backbones.SwinTransformer(embed_dims=16, window_size=4, **SWIN)


def test_mmpretrains_deit_computes_the_same_under_timms_names(image):
    model, other = awake(mmpretrain_deit()), timm_deit()
    result = other.load_state_dict(to_timm_keys(model.state_dict(), 'deit'), strict=False)
    assert set(result.missing_keys) == {'head.weight', 'head.bias'} and not result.unexpected_keys
    with torch.no_grad():
        torch.testing.assert_close(other.forward_features(image)[:, 0], model(image)[0])


@pytest.mark.parametrize('build', [mmpretrain_swin, mmdet_swin])
def test_openmmlabs_swins_compute_the_same_under_timms_names(build, image):
    model, other = awake(build()), timm_swin()
    result = other.load_state_dict(to_timm_keys(model.state_dict(), 'swin'), strict=False)
    assert set(result.missing_keys) == {'head.fc.weight', 'head.fc.bias'}
    assert not result.unexpected_keys
    with torch.no_grad():
        features = other.forward_features(image).permute(0, 3, 1, 2)
        torch.testing.assert_close(features, model(image)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('backbone', ['VisionTransformer', 'SwinTransformer'])
def test_mmpretrains_classifiers_keep_their_linear_layer(backbone, image):
    models = pytest.importorskip('mmpretrain.models')
    deit = backbone == 'VisionTransformer'
    model = mmpretrain_deit() if deit else mmpretrain_swin()
    channels = 32 if deit else 128
    head = 'VisionTransformerClsHead' if deit else 'LinearClsHead'
    classifier = models.ImageClassifier(
        backbone=model,
        neck=None if deit else dict(type='GlobalAveragePooling'),
        head=dict(type=head, num_classes=5, in_channels=channels),
    )
    awake(classifier)
    checkpoint = dict(meta=dict(epoch=3), state_dict=classifier.state_dict())
    other = timm_deit() if deit else timm_swin()
    other.load_state_dict(to_timm_keys(checkpoint))
    with torch.no_grad():
        expected = classifier.head(classifier.extract_feat(image))
        torch.testing.assert_close(other(image), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('build', [timm_deit, timm_swin])
@pytest.mark.parametrize('wrap', ['bare', 'model', 'module', 'both', 'ema', 'features'])
def test_timms_own_names_pass_through_in_every_wrapping(build, wrap):
    state = awake(build()).state_dict()
    wrapped = dict(
        bare=state,
        model=dict(model=state, epoch=3),
        module=dict(state_dict={f'module.{key}': value for key, value in state.items()}),
        both=dict(state_dict=state, state_dict_ema={'x': torch.zeros(1)}),
        ema=dict(epoch=3, state_dict_ema=state),
        features={re.sub(r'^layers\.', 'layers_', key): value for key, value in state.items()},
    )[wrap]
    converted = to_timm_keys(wrapped)
    assert converted.keys() == state.keys()
    assert all(converted[key] is state[key] for key in state)


def test_the_original_authors_swin_is_told_by_the_stage_that_its_patch_merging_belongs_to():
    state = awake(timm_swin()).state_dict()
    original = {
        re.sub(r'layers\.(\d)\.down', lambda m: f'layers.{int(m[1]) - 1}.down', k): v
        for k, v in state.items()
    }
    original = {k.replace('head.fc.', 'head.'): v for k, v in original.items()}
    original['layers.0.blocks.1.attn_mask'] = torch.zeros(4, 16, 16)
    original['layers.0.blocks.0.attn.relative_position_index'] = torch.zeros(16, 16)
    converted = to_timm_keys(dict(model=original))
    assert converted.keys() == state.keys()
    assert all(converted[key] is state[key] for key in state)


def test_backbones_are_taken_out_of_detectors():
    swin = mmdet_swin().state_dict()
    detector = {f'backbone.{key}': value for key, value in swin.items()}
    detector['neck.lateral_convs.0.conv.weight'] = torch.zeros(1)
    assert to_timm_keys(detector).keys() == to_timm_keys(swin).keys()


def test_kinds_are_told_apart_and_other_models_are_refused():
    deit, swin = timm_deit().state_dict(), timm_swin().state_dict()
    assert architecture_kind(deit) == 'deit' and architecture_kind(swin) == 'swin'
    with pytest.raises(ValueError, match='of a Swin transformer, not of a vision transformer'):
        to_timm_keys(swin, 'deit')
    with pytest.raises(ValueError, match="not the weights of a DeiT or a Swin.*'conv1.weight'"):
        to_timm_keys({'conv1.weight': torch.zeros(1)})
    with pytest.raises(ValueError, match='not the weights'):
        to_timm_keys({})
    with pytest.raises(ValueError, match='distillation token'):
        to_timm_keys(dict(deit, dist_token=torch.zeros(1, 1, 32)))


def test_unwrapping_leaves_what_is_no_tensor_behind():
    assert unwrap(dict(model=dict(a=torch.zeros(1), step=3))) == dict(a=torch.zeros(1))
