# SPDX-License-Identifier: Apache-2.0
"""timm's interface, checked as timm checks its own models."""

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn

import effvit_mm.timm_models as ours
from effvit_mm import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer

NAMES = sorted(
    f'{family}_{arch}' for family, (cls, _) in ours.FAMILIES.items() for arch in cls.arch_zoo
)
SMALL = ['partialformer_b0', 'lavit_tiny', 'integrated_deit_tiny', 'dgssa_swin_tiny']
CHANNELS = {
    'partialformer_b0': PartialFormer('b0').out_channels,
    'lavit_tiny': LaViT('tiny').out_channels,
    'integrated_deit_tiny': IntegratedDeiT('tiny').out_channels,
    'dgssa_swin_tiny': DGSSASwin('tiny').out_channels,
}
small = pytest.mark.parametrize('name', SMALL)


def image(height=96, width=128, channels=3):
    return torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(0))


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval()


def test_every_architecture_is_registered_with_a_config_of_its_own():
    for name in NAMES:
        assert timm.is_model(name)
        cfg = timm.get_pretrained_cfg(name)
        assert cfg.input_size == (3, 224, 224) and cfg.classifier == 'head' and not cfg.url
    assert timm.list_models('partialformer*') == [n for n in NAMES if n.startswith('partial')]


@small
@torch.no_grad()
def test_the_parts_of_a_classifier_make_the_whole(name):
    model, x = create(name, num_classes=7), image()
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    assert model(x).shape == (2, 7) and model(x).isfinite().all()
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    assert model.get_classifier().out_features == 7
    model.reset_classifier(0)
    assert model(x).shape == (2, model.head_hidden_size)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    modules = dict(model.named_modules())
    assert {
        model.pretrained_cfg['first_conv'],
        model.pretrained_cfg['classifier'],
    } <= modules.keys()


@small
def test_every_parameter_gets_a_gradient(name):
    model = create(name, num_classes=7).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model(image()).square().sum().backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name


@small
@torch.no_grad()
def test_features_only_gives_the_maps_of_the_backbone(name):
    model, x = create(name, features_only=True), image(97, 130)
    backbone = model.model.backbone
    for a, b in zip(model(x), backbone(x), strict=True):
        assert torch.equal(a, b)
    assert model.feature_info.channels() == CHANNELS[name]
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    part = create(name, features_only=True, out_indices=(1, 2))
    assert [o.shape[1] for o in part(x)] == CHANNELS[name][1:3] == part.feature_info.channels()


@pytest.mark.parametrize('name', [name for name in SMALL if 'deit' not in name])
@torch.no_grad()
def test_intermediates_of_a_classifier_end_with_its_features(name):
    model, x = create(name), image()
    last, maps = model.forward_intermediates(x)
    assert torch.equal(last, model.forward_features(x)) and torch.equal(maps[-1], last)
    assert [m.shape[1] for m in maps] == CHANNELS[name]
    only = model.forward_intermediates(x, indices=(0, 2), intermediates_only=True)
    assert torch.equal(only[0], maps[0]) and torch.equal(only[1], maps[2])
    assert model.backbone.out_indices == (3,)


def test_a_class_token_is_no_map():
    with pytest.raises(ValueError, match='features_only=True'):
        create('integrated_deit_tiny').forward_intermediates(image())


@small
@torch.no_grad()
def test_other_channels_and_sizes(name):
    model = create(name, in_chans=1, num_classes=2)
    for size in ((32, 32), (100, 70)):
        assert model(image(*size, channels=1)).shape == (2, 2)


@small
@torch.no_grad()
def test_a_checkpoint_of_mmpretrain_loads_with_timm_s_checkpoint_path(name, tmp_path):
    model = create(name, num_classes=4)
    state = {k.replace('head.', 'head.fc.'): v + 0.01 for k, v in model.state_dict().items()}
    torch.save(dict(meta={}, state_dict=state), tmp_path / 'classifier.pth')
    loaded = create(name, num_classes=4, checkpoint_path=str(tmp_path / 'classifier.pth'))
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[key] + 0.01)


@pytest.mark.parametrize('indices', [(0, 1, 2, 3), (1, 3), (2,)])
@small
@torch.no_grad()
def test_maps_load_from_a_classifier(name, indices, tmp_path):
    classifier = create(name, num_classes=4)
    state = {key: value + 0.01 for key, value in classifier.state_dict().items()}
    classifier.load_state_dict(state)
    torch.save(state, tmp_path / 'c.pth')
    kwargs = dict(features_only=True, out_indices=indices)
    maps = create(name, checkpoint_path=str(tmp_path / 'c.pth'), **kwargs)
    blocks = {key: value for key, value in state.items() if 'blocks.' in key}
    loaded = {key.removeprefix('model.'): value for key, value in maps.state_dict().items()}
    assert any(key in loaded for key in blocks)
    assert all(torch.equal(loaded[key], blocks[key]) for key in blocks if key in loaded)
    assert all(x.isfinite().all() for x in maps(image()))
    again = create(name, **kwargs)
    again.load_state_dict(maps.state_dict())
    for a, b in zip(again(image()), maps(image()), strict=True):
        assert torch.equal(a, b)


@small
@torch.no_grad()
def test_a_new_head_has_the_type_of_the_model(name):
    model = create(name).to(torch.float64)
    model.reset_classifier(3)
    assert model(image().double()).dtype == torch.float64


@small
def test_pooling_other_than_the_mean_is_refused(name):
    with pytest.raises(ValueError, match="global_pool must be 'avg' or ''"):
        create(name, global_pool='max')


@pytest.mark.parametrize('name', [n for n in SMALL if 'deit' not in n])
@torch.no_grad()
def test_pruned_layers_are_gone_and_the_others_compute_the_same(name):
    model, x = create(name), image()
    expected = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert len(model.backbone.stages) == 2 and isinstance(model.head, nn.Identity)
    actual = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    with pytest.raises(ValueError, match='pruned'):
        model.forward_intermediates(x)


@small
def test_features_are_those_of_the_modules_that_the_info_names(name):
    model = create(name)
    modules = dict(model.named_modules())
    assert all(info['module'] in modules for info in model.feature_info)


@small
def test_optimizers_spare_what_decay_would_harm_and_decay_rates_by_layer(name):
    model = create(name)
    optimizer = create_optimizer_v2(model, 'adamw', lr=1.0, weight_decay=0.05)
    decayed = {id(p) for g in optimizer.param_groups if g['weight_decay'] for p in g['params']}
    for parameter_name, p in model.named_parameters():
        kept = any(key in parameter_name for key in model.backbone.no_decay_keys) or p.ndim < 2
        assert (id(p) not in decayed) == kept, parameter_name
    groups = param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=())
    scales = {id(p): g['lr_scale'] for g in groups for p in g['params']}
    stem = next(p for n, p in model.named_parameters() if 'patch_embed.proj.weight' in n)
    assert scales[id(stem)] == min(scales.values())
    assert scales[id(model.head.weight)] == max(scales.values()) == 1.0
    depths = len(model.backbone.all_blocks())
    assert len(set(scales.values())) >= depths + 1


@small
@torch.no_grad()
def test_timm_s_moving_average_and_data_config(name):
    model = create(name, num_classes=2)
    average, x = ModelEmaV3(model), image()
    assert torch.equal(average.module(x), model(x))
    config = resolve_model_data_config(model)
    assert config['input_size'] == (3, 224, 224) and config['interpolation'] == 'bicubic'


def test_checkpointing_is_switched_on():
    model = create('partialformer_b0')
    model.set_grad_checkpointing()
    assert model.backbone.with_cp


def test_pretrained_weights_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match='published'):
        timm.create_model('partialformer_b3', pretrained=True)


def test_the_backbone_is_the_one_of_openmmlab():
    torch.manual_seed(0)
    model = create('partialformer_b0', num_classes=5)
    backbone = PartialFormer('b0', out_indices=(3,)).eval()
    prefix = 'backbone.'
    state = {
        k.removeprefix(prefix): v for k, v in model.state_dict().items() if k.startswith(prefix)
    }
    backbone.load_state_dict(state, strict=True)
    x = image()
    with torch.no_grad():
        assert torch.equal(backbone(x)[0], model.forward_features(x))
    assert isinstance(model.head, nn.Linear)
