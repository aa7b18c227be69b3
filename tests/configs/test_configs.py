# SPDX-License-Identifier: Apache-2.0
"""Every config: what it builds, and for those on the digits that the real Runner trains it."""

import subprocess
import sys
from copy import deepcopy
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.utils import import_modules_from_strings

from effvit_mm.engine.launch import FRAMEWORKS, import_framework

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.stem for path in (ROOT / 'configs').glob('*.py'))
SCOPES = dict(
    mask_rcnn='mmdet',
    retinanet='mmdet',
    semantic_fpn='mmseg',
    upernet='mmseg',
    classifier='mmpretrain',
)
# what the compression starts from on the digits: backbones of MMPretrain
ORIGINALS = ['classifier_deit_digits', 'classifier_swin_digits']
OURS = [name for name in CONFIGS if name not in ORIGINALS]
DIGITS = [name for name in CONFIGS if name.endswith('_digits')]


@cache
def parsed(name):
    return Config.fromfile(ROOT / 'configs' / f'{name}.py')


def load(name):
    """A config, its framework imported; skipped where that is not installed."""
    scope = next(scope for head, scope in SCOPES.items() if name.startswith(head))
    if find_spec(scope) is None:
        pytest.skip(f'{FRAMEWORKS[scope]} is not installed')
    import_framework(scope)
    cfg = deepcopy(parsed(name))
    if 'teacher' in cfg.model:
        import_modules_from_strings(**cfg.custom_imports)
        # what compressing and training them would have written
        cfg.load_from = None
        cfg.model.pop('teacher_checkpoint', None)
        if 'pretrained' in cfg.model.teacher:
            cfg.model.teacher.pretrained = False
    return cfg


def large(name):
    """Whether building and running the model takes more than a second or two."""
    name = name.removesuffix('_fsdp')
    return not name.startswith('classifier') and name.endswith(('_base', '_b3', '_b4'))


@pytest.fixture(
    scope='module',
    params=[pytest.param(n, marks=pytest.mark.slow if large(n) else ()) for n in OURS],
)
def built(request):
    """A config and its model in the config's scope."""
    cfg = load(request.param)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = import_module(f'{cfg.default_scope}.registry').MODELS.build(
            {**cfg.model, **preprocessor_beside_the_model(cfg)}
        )
        model.init_weights()
        yield cfg, model


def preprocessor_beside_the_model(cfg):
    """The Runner puts a `data_preprocessor` of the config into the model."""
    return dict(data_preprocessor=cfg.data_preprocessor) if 'data_preprocessor' in cfg else {}


def test_there_is_a_config_for_each_task_and_size_and_one_on_the_digits():
    sizes = dict(
        partialformer=('b0', 'b1', 'b2', 'b3', 'b4', 'b0_digits'),
        lavit=('tiny', 'small', 'base', 'digits'),
        integrated_deit=('tiny', 'small', 'base', 'digits'),
        dgssa_swin=('tiny', 'small', 'base', 'digits'),
    )
    expected = {
        f'{head}_{family}_{size}'
        for head in SCOPES
        for family, names in sizes.items()
        for size in names
    }
    assert expected == {name for name in OURS if not name.endswith('_fsdp')}


def test_there_is_a_sharded_config_for_each_task():
    sharded = [name for name in CONFIGS if name.endswith('_fsdp')]
    tasks = {SCOPES[head] for head in SCOPES for name in sharded if name.startswith(head)}
    assert tasks == {'mmpretrain', 'mmdet', 'mmseg'}
    for name in sharded:
        cfg = load(name)
        assert cfg.runner_type == 'FlexibleRunner'
        assert cfg.strategy == dict(type='BackboneFSDPStrategy', state_dict_cfg='full')
        assert cfg.model == load(name.removesuffix('_fsdp')).model


@pytest.mark.parametrize('name', [name for name in CONFIGS if 'lavit' in name])
def test_the_losses_of_lavit_are_collected(name):
    assert dict(type='AuxiliaryLossHook') in load(name).custom_hooks


@pytest.mark.parametrize('name', CONFIGS)
def test_configs_need_one_import_of_ours_and_write_checkpoints_that_load_safely(name):
    cfg = load(name)
    imports = ['effvit_mm']
    if 'teacher' in cfg.model:
        imports.append('effvit_mm.models.classifiers')
    if name.endswith('_fsdp'):
        imports.append('effvit_mm.engine.fsdp')
    assert cfg.custom_imports == dict(imports=imports, allow_failed_imports=False)
    assert cfg.default_hooks.checkpoint.published_keys == ['meta', 'state_dict']
    assert cfg.auto_scale_lr.base_batch_size in (8, 16, 32, 64, 1024, 4096)


@pytest.mark.parametrize('name', [name for name in CONFIGS if not name.endswith('_digits')])
def test_the_benchmark_recipes_are_those_of_the_literature(name):
    cfg = load(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert optimizer.type == 'AdamW'
    if name.startswith('mask_rcnn'):
        expected = (1e-4, 0.05, 16)
        assert cfg.train_cfg.max_epochs == 12 and cfg.train_dataloader.batch_size == 2
        assert cfg.train_dataloader.dataset.pipeline[2].scale == (1333, 800)
    elif name.startswith('retinanet'):
        expected = (1e-4, 1e-4, 16)
        assert cfg.train_cfg.max_epochs == 12 and cfg.train_dataloader.batch_size == 2
    elif name.startswith('classifier'):
        expected = (1e-3, 0.05, 4096 if 'integrated_deit' in name else 1024)
        assert cfg.train_cfg.max_epochs == 300
        if name.startswith(('classifier_integrated_deit', 'classifier_dgssa_swin')):
            # of the file: `load` takes the pretrained weights away
            assert parsed(name).model.teacher.pretrained and not cfg.model.get('hard_weight')
            assert cfg.model.get('temperature', 1) == cfg.model.get('distillation_weight', 1) == 1
            assert 8 * cfg.train_dataloader.batch_size == expected[2]
            warm_up, cosine = cfg.param_scheduler
            assert (warm_up.type, cosine.type) == ('LinearLR', 'CosineAnnealingLR')
            assert warm_up.by_epoch and cosine.by_epoch
            assert optimizer.lr * warm_up.start_factor == pytest.approx(1e-6)
            assert (warm_up.end, cosine.begin, cosine.end) == (5, 5, 300)
            assert cosine.eta_min == 1e-5
    elif name.startswith('upernet'):
        expected = (6e-5, 0.01, 16)
        assert cfg.train_cfg.max_iters == 160000
        assert cfg.model.data_preprocessor.size == (512, 512)
    else:
        expected = (1e-4, 1e-4, 16)
        assert cfg.train_cfg.max_iters == 80000
        assert cfg.model.data_preprocessor.size == (512, 512)
    assert (optimizer.lr, optimizer.weight_decay) == pytest.approx(expected[:2])
    assert cfg.auto_scale_lr.base_batch_size == expected[2]


@pytest.mark.parametrize(
    'name', [n for n in OURS if n.startswith('classifier') and not n.endswith('_digits')]
)
def test_classifiers_are_trained_with_deit_s_augmentation(name):
    cfg = load(name)
    steps = {step['type']: step for step in cfg.train_dataloader.dataset.pipeline}
    assert {'RandomResizedCrop', 'RandomFlip', 'RandAugment', 'RandomErasing'} <= steps.keys()
    augment = steps['RandAugment']
    assert (augment.magnitude_level, augment.magnitude_std, augment.num_policies) == (9, 0.5, 2)
    assert steps['RandomErasing'].erase_prob == 0.25
    augments = {augment['type']: augment['alpha'] for augment in cfg.model.train_cfg.augments}
    assert augments == dict(Mixup=0.8, CutMix=1.0)


@pytest.mark.parametrize(
    ('family', 'rates'), [('integrated_deit', (0.1, 0.1, 0.1)), ('dgssa_swin', (0.2, 0.3, 0.5))]
)
def test_compressed_classifiers_have_their_originals_stochastic_depth(family, rates):
    configs = [load(f'classifier_{family}_{size}') for size in ('tiny', 'small', 'base')]
    assert tuple(cfg.model.backbone.drop_path_rate for cfg in configs) == rates


@pytest.mark.parametrize('name', [n for n in OURS if n.startswith('classifier_')])
def test_classifiers_average_the_last_map_or_take_the_class_token(name):
    cfg = load(name)
    if 'integrated_deit' in name:
        assert cfg.model.neck is None and cfg.model.backbone.out_type == 'cls_token'
    else:
        assert cfg.model.neck.type == 'GlobalAveragePooling'
        assert tuple(cfg.model.backbone.out_indices) == (3,)
    assert cfg.model.head.type == 'LinearClsHead'


def test_what_follows_the_backbone_has_its_channels(built):
    cfg, model = built
    if cfg.default_scope == 'mmpretrain':
        assert cfg.model.head.in_channels == model.backbone.out_channels[-1]
    elif 'auxiliary_head' in cfg.model:
        assert list(cfg.model.decode_head.in_channels) == model.backbone.out_channels
        index = cfg.model.auxiliary_head.in_index
        assert cfg.model.auxiliary_head.in_channels == model.backbone.out_channels[index]
    else:
        assert list(cfg.model.neck.in_channels) == model.backbone.out_channels


def test_the_built_model_predicts_on_a_small_image(built):
    cfg, model = built
    sample = dict(
        mmdet='mmdet.structures:DetDataSample',
        mmseg='mmseg.structures:SegDataSample',
        mmpretrain='mmpretrain.structures:DataSample',
    )[cfg.default_scope]
    module, name = sample.split(':')
    size = (96, 64)
    meta = dict(
        ori_shape=size, img_shape=size, batch_input_shape=size, pad_shape=size, scale_factor=(1, 1)
    )
    data = dict(
        inputs=[torch.randint(0, 256, (3, *size), dtype=torch.uint8)],
        data_samples=[getattr(import_module(module), name)(metainfo=meta)],
    )
    if cfg.default_scope == 'mmpretrain':
        data['inputs'] = torch.stack(data['inputs'])
    model.eval()
    with torch.no_grad():
        (prediction,) = model.test_step(data)
    if cfg.default_scope == 'mmdet':
        found = prediction.pred_instances
        assert found.bboxes.shape == (len(found.labels), 4)
        if model.with_mask:
            assert found.masks.shape == (len(found.labels), *size)
    elif cfg.default_scope == 'mmseg':
        assert prediction.seg_logits.data.shape == (cfg.model.decode_head.num_classes, *size)
    else:
        assert prediction.pred_score.shape == (cfg.model.head.num_classes,)


def test_norms_biases_tokens_and_differences_are_not_decayed(built):
    cfg, model = built
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decay = {
        id(p): group['weight_decay'] for group in wrapper.param_groups for p in group['params']
    }
    keys = model.backbone.no_decay_keys
    found = dict.fromkeys(keys, False)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kept = [key for key in keys if key in name and name.startswith('backbone.')]
        found.update(dict.fromkeys(kept, True))
        kept = kept or name.startswith('teacher_glads.')
        expected = 0 if kept or parameter.ndim <= 1 else cfg.optim_wrapper.optimizer.weight_decay
        assert decay[id(parameter)] == expected, name
    # the query of a background without an abstract token is an ablation; a classifier has no maps
    optional = {'.query'}
    if cfg.default_scope == 'mmpretrain':
        optional |= {'unprojections', 'window_mixing'}
    assert all(found[key] for key in keys if key not in optional)


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """A few of the embedded pictures, as tools/prepare_digits.py writes them."""
    root = tmp_path_factory.mktemp('root') / 'data' / 'digits'
    counts = ['--num-train', '4', '--num-val', '2']
    counts += ['--num-classification-train', '20', '--num-classification-val', '10']
    subprocess.run(
        [sys.executable, ROOT / 'tools' / 'prepare_digits.py', '--out', root, *counts], check=True
    )
    return root


@pytest.mark.parametrize('name', DIGITS)
def test_a_digits_config_trains_two_steps_and_is_evaluated(name, digits, tmp_path, monkeypatch):
    # paths in the digits configs are relative
    monkeypatch.chdir(digits.parent.parent)
    cfg = load(name)
    cfg.work_dir = str(tmp_path)
    cfg.experiment_name = name
    cfg.launcher = 'none'
    if 'max_iters' in cfg.train_cfg:
        cfg.train_cfg.update(max_iters=2, val_interval=2)
        cfg.train_dataloader.batch_size = 2
    else:
        cfg.train_cfg.max_epochs = 1
        cfg.train_dataloader.batch_size = 10
    if name.startswith('retinanet'):
        # after two steps no score is above the threshold, and nothing found has no metric
        cfg.model.test_cfg.score_thr = 0.0
    if cfg.default_scope == 'mmpretrain':
        for split in ('train', 'val', 'test'):
            cfg[f'{split}_dataloader'].collate_fn = dict(type='default_collate')
    runner = Runner.from_cfg(cfg)
    before = {key: value.clone() for key, value in runner.model.backbone.state_dict().items()}
    runner.train()
    assert runner.iter == 2
    after = runner.model.backbone.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[key], value) for key, value in after.items())
    metrics = runner.val_loop.run()
    expected = dict(mmdet='coco/bbox_mAP', mmseg='mIoU', mmpretrain='accuracy/top1')
    assert expected[cfg.default_scope] in metrics
    assert ('coco/segm_mAP' in metrics) == name.startswith('mask_rcnn')
