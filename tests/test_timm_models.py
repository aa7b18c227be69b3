# SPDX-License-Identifier: Apache-2.0
"""timm's interface, checked as timm checks its own models."""

import re
from pickle import UnpicklingError

import pytest
import timm
import torch
from attacks import attacks
from timm.data import resolve_model_data_config
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from versions import needs_compile, needs_export

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
    model.double().reset_classifier(4)
    assert model.head.weight.dtype is torch.float64
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
    modules = dict(model.model.named_modules())
    assert all(name in modules for name in model.feature_info.module_name())


@pytest.mark.parametrize(
    'asked, given', [((1, 2), (1, 2)), (2, (2, 3)), ((-1,), (3,)), ((2, 0, 2), (0, 2))]
)
@torch.no_grad()
def test_stages_are_chosen_as_timm_does_it_and_described_as_they_come(asked, given):
    model = create('partialformer_b0', features_only=True, out_indices=asked)
    maps, channels = model(image()), CHANNELS['partialformer_b0']
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert model.feature_info.channels() == [channels[i] for i in given]
    assert model.feature_info.reduction() == [96 // m.shape[2] for m in maps]


maps_of_classifiers = pytest.mark.parametrize('name', [n for n in SMALL if 'deit' not in n])


@maps_of_classifiers
@torch.no_grad()
def test_intermediates_of_a_classifier_end_with_its_features(name):
    model, x = create(name), image()
    last, maps = model.forward_intermediates(x)
    norm = model.backbone.norm3
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(norm(maps[-1].permute(0, 2, 3, 1)).permute(0, 3, 1, 2), last)
    assert torch.equal(model.forward_intermediates(x, norm=True)[1][-1], last)
    assert [m.shape[1] for m in maps] == CHANNELS[name]
    only = model.forward_intermediates(x, indices=(0, 2), intermediates_only=True)
    assert torch.equal(only[0], maps[0]) and torch.equal(only[1], maps[2])
    assert torch.equal(model.forward_features(x), last)


@maps_of_classifiers
@torch.no_grad()
def test_stages_that_are_not_asked_for_do_not_run_or_are_dropped(name):
    model, x = create(name), image()
    maps = model.forward_intermediates(x, intermediates_only=True)
    ran = []
    for i, stage in enumerate(model.backbone.stages):
        stage.blocks[0].register_forward_hook(lambda *_, i=i: ran.append(i))
    last, _ = model.forward_intermediates(x, indices=[1], stop_early=True)
    model.forward_intermediates(x, indices=[0], intermediates_only=True)
    assert ran == [0, 1, 0] and torch.equal(last, maps[1])
    assert model.prune_intermediate_layers([0, -3]) == [0, 1]
    assert not [n for n, _ in model.named_parameters() if 'stages.2' in n or 'norm3' in n]
    assert torch.equal(model(x), maps[1]) and model.num_features == maps[1].shape[1]
    assert model.backbone.out_channels == [maps[1].shape[1]] and model.backbone.out_strides == [8]
    assert [m.shape for m in model.forward_intermediates(x)[1]] == [m.shape for m in maps[:2]]
    assert torch.equal(model.forward_intermediates(x, 1)[1][0], maps[1])
    with pytest.raises(ValueError, match=r'stages 0, 1; \[2\] does not choose'):
        model.forward_intermediates(x, [2])


@maps_of_classifiers
@torch.no_grad()
def test_looking_at_intermediates_changes_nothing_for_others_who_use_the_model(name):
    model, x = create(name), image()
    expected, during = model(x), []
    hook = (
        model.backbone.stages[0]
        .blocks[0]
        .register_forward_hook(lambda *_: hook.remove() or during.append(model(x)))
    )
    model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    assert torch.equal(during[0], expected)


@small
@torch.no_grad()
def test_some_of_the_maps_are_those_among_all(name):
    model, x = create(name, features_only=True, out_indices=(0, 1, 3)), image()
    maps = model(x)
    last, some = model.model.forward_intermediates(x, [-1, 0])
    assert torch.equal(some[0], maps[0]) and torch.equal(some[1], maps[2])
    assert torch.equal(last, maps[2])
    some = model.model.forward_intermediates(x, 2, intermediates_only=True)
    assert torch.equal(some[0], maps[1]) and torch.equal(some[1], maps[2])
    assert len(model.model.forward_intermediates(x)[1]) == 3
    with pytest.raises(ValueError, match=r'stages 0, 1, 3; \(2,\) does not choose'):
        model.model.forward_intermediates(x, (2,))


def assert_computes_the_same(run, model, *images):
    for x in images:
        for a, b in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@needs_compile
@pytest.mark.slow
@small
@pytest.mark.parametrize('features_only', [False, True], ids=['classifier', 'maps'])
@torch.no_grad()
def test_a_model_compiles_as_one_graph_for_all_sizes(name, features_only):
    torch._dynamo.reset()
    model = create(name, features_only=features_only)
    graphs = CompileCounterWithBackend('eager')
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    assert_computes_the_same(compiled, model, image(), image(101, 157))
    assert graphs.frame_count == 1


@needs_export
@pytest.mark.slow
@small
@pytest.mark.parametrize('features_only', [False, True], ids=['classifier', 'maps'])
@torch.no_grad()
def test_a_model_is_exported_for_all_sizes(name, features_only):
    model = create(name, features_only=features_only)
    dim = torch.export.Dim
    shapes = {0: dim('batch', min=1), 2: dim('height', min=33), 3: dim('width', min=33)}
    program = torch.export.export(model, (image(),), dynamic_shapes=(shapes,)).module()
    assert_computes_the_same(program, model, image(), image(101, 157)[:1])


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


@small
@torch.no_grad()
def test_a_classifier_s_weights_make_maps(name, tmp_path):
    classifier = create(name, num_classes=4)
    for p in classifier.parameters():
        p.add_(0.05 * torch.randn_like(p))
    path = tmp_path / 'classifier.pth'
    torch.save(classifier.state_dict(), path)
    kwargs = dict(features_only=True, out_indices=(0, 2))
    loaded = create(name, **kwargs, checkpoint_path=str(path))
    other = create(name, **kwargs, pretrained=True, pretrained_cfg_overlay=dict(file=str(path)))
    torch.manual_seed(0)
    backbone = type(classifier.backbone)(name.split('_')[-1], out_indices=(0, 2)).eval()
    backbone.load_pretrained(str(path), 'backbone.')
    x = image()
    for a, b, c in zip(loaded(x), other(x), backbone(x), strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
    again = create(name, **kwargs)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(again(x)[1], loaded(x)[1])


def test_a_checkpoint_of_another_architecture_is_refused():
    state = create('partialformer_b1').state_dict()
    with pytest.raises(ValueError, match='the checkpoint is of another architecture'):
        create('partialformer_b0', features_only=True).load_state_dict(state)


@pytest.mark.parametrize('features_only', [False, True])
@pytest.mark.parametrize(
    ('fault', 'words'),
    [
        ('code', 'weights_only|eights only load failed'),
        ('truncated', 'failed reading zip archive'),
        ('another size', 'size mismatch for backbone|of another architecture'),
        ('another model', 'Missing key|of another architecture'),
        ('missing', 'No checkpoint found'),
    ],
)
def test_timm_s_checkpoint_path_refuses_what_does_not_fit(
    fault, words, features_only, tmp_path, caplog
):
    """In timm's and torch's own words; and no code runs."""
    path, marker = tmp_path / 'c.pth', tmp_path / 'marker'
    if fault == 'code':
        state = create('partialformer_b0').state_dict()
        torch.save(dict(state_dict=state, x=attacks(marker)['mkdir']), path)
    elif fault == 'another size':
        torch.save(create('partialformer_b1').state_dict(), path)
    elif fault == 'another model':
        torch.save(create('lavit_tiny').state_dict(), path)
    elif fault == 'truncated':
        torch.save(create('partialformer_b0').state_dict(), path)
        path.write_bytes(path.read_bytes()[:100_000])
    else:
        path = tmp_path / 'nowhere.pth'
    with pytest.raises((ValueError, RuntimeError, OSError, UnpicklingError)) as error:
        create('partialformer_b0', features_only=features_only, checkpoint_path=str(path))
    assert re.search(words, f'{error.value} {caplog.text}')
    assert not marker.exists()


@torch.no_grad()
def test_timm_s_checkpoint_path_prefers_an_average_and_takes_data_parallel_s_names(tmp_path):
    model = create('partialformer_b0', num_classes=2)
    state = {f'module.{key}': value for key, value in model.state_dict().items()}
    other = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save(dict(state_dict=other, state_dict_ema=state), tmp_path / 'c.pth')
    loaded = create('partialformer_b0', num_classes=2, checkpoint_path=str(tmp_path / 'c.pth'))
    assert torch.equal(loaded(image()), model(image()))


@torch.no_grad()
def test_own_weights_serve_as_pretrained_ones(tmp_path):
    model, x = create('partialformer_b0', num_classes=4), image()
    save_for_hf(model, tmp_path, safe_serialization='both')
    loaded = create(f'local-dir:{tmp_path}', pretrained=True)
    assert torch.equal(loaded(x), model(x))
    state = {k.replace('head.', 'head.fc.'): v for k, v in model.state_dict().items()}
    grey = create(
        'partialformer_b0',
        num_classes=2,
        in_chans=1,
        pretrained=True,
        pretrained_cfg_overlay=dict(state_dict=state, num_classes=4),
    )
    stem = 'backbone.stages.0.patch_embed.proj.weight'
    torch.testing.assert_close(grey.state_dict()[stem], state[stem].sum(1, keepdim=True))
    assert grey(image(channels=1)).shape == (2, 2)


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
    blocks = model.backbone.all_blocks()
    assert len(set(scales.values())) == len(blocks) + 2
    assert scales[id(blocks[-1].norm1.weight)] == 0.5


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


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(pretrained=True), 'No weights of partialformer_b0 have been published'),
        (dict(pretrained=True, features_only=True), 'published'),
        (dict(window_size=7), "no argument 'window_size'; there are .*drop_rate"),
        (dict(arch='b1'), "no argument 'arch'"),
        (dict(img_size=384), 'takes images of any size'),
        (dict(init_cfg=dict(type='Pretrained')), "no argument 'init_cfg'"),
        (dict(out_indices=(1,)), 'features_only=True'),
        (dict(features_only=True, out_indices=(0, 4)), r'\(0, 4\) does not choose'),
        (dict(features_only=True, out_indices=()), r'\(\) does not choose'),
        (dict(features_only=True, feature_cls='hook'), 'getter'),
        (dict(global_pool='max'), "'avg' or '' here, not 'max'"),
        (dict(global_pool=''), 'A head needs pooled features'),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        timm.create_model('partialformer_b0', **kwargs)


def test_what_the_head_is_given_can_be_chosen():
    model, x = create('partialformer_b0', num_classes=0, global_pool=''), image()
    assert model(x).shape == (2, 256, 3, 4)
    with pytest.raises(ValueError, match='A head needs pooled features'):
        model.reset_classifier(3)
    model.reset_classifier(3, 'avg')
    assert model(x).shape == (2, 3)
    assert create('integrated_deit_tiny', num_classes=3, global_pool='token')(x).shape == (2, 3)


def test_device_and_type_can_be_chosen():
    model = create('partialformer_b0', dtype=torch.float64, device='meta')
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float64, 'meta')}


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


@pytest.mark.parametrize('indices', [(0, 1, 2, 3), (1, 3), (2,)])
@small
@torch.no_grad()
def test_maps_of_any_stages_load_from_a_classifier_s_file(name, indices, tmp_path):
    classifier = create(name, num_classes=4)
    state = {key: value + 0.01 for key, value in classifier.state_dict().items()}
    torch.save(state, tmp_path / 'c.pth')
    kwargs = dict(features_only=True, out_indices=indices)
    maps = create(name, checkpoint_path=str(tmp_path / 'c.pth'), **kwargs)
    blocks = {key: value for key, value in state.items() if 'blocks.' in key}
    loaded = {key.removeprefix('model.'): value for key, value in maps.state_dict().items()}
    assert any(key in loaded for key in blocks)
    assert all(torch.equal(loaded[key], blocks[key]) for key in blocks if key in loaded)
    again = create(name, **kwargs)
    again.load_state_dict(maps.state_dict())
    for a, b in zip(again(image()), maps(image()), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def test_stages_that_were_frozen_and_pruned_do_not_hinder_training():
    model = create('partialformer_b0', frozen_stages=3)
    model.prune_intermediate_layers([1])
    assert model.train().backbone.stages[1].training is False
