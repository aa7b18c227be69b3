# SPDX-License-Identifier: Apache-2.0
"""Sharded training by mmengine's FlexibleRunner, in two processes on the CPU."""

import pytest
import torch
from contract.families import FAMILIES
from contract.frameworks import FRAMEWORKS, build_in_scope, need
from mmengine.config import Config

from .digits import CONFIGS, Case, train
from .test_equal_weights import distance

if torch.__version__ < '2.2':
    pytest.skip('this torch has no FSDP on CPUs', allow_module_level=True)


def cases():
    """LaViT, whose loss leaves the backbone beside its features, in every framework."""
    for framework in FRAMEWORKS:
        for family in FAMILIES:
            fast = family.name == 'LaViT' and framework == 'mmpretrain'
            values = framework, family.name
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(*values, marks=marks, id='-'.join(values))


@pytest.mark.parametrize(('framework', 'family'), cases())
def test_two_shards_are_trained_to_the_weights_of_one_process(
    framework, family, one, two, digits_root, tmp_path
):
    """With gradients clipped in every step, which FSDP can in float32 only, and a frozen stage."""
    need(framework)
    kwargs = dict(
        backbone=dict(frozen_stages=1),
        hook=family == 'LaViT',
        double=False,
        settings={'optim_wrapper.clip_grad': dict(max_norm=0.1)},
    )
    (alone,) = one.call(train, Case(family, framework, **kwargs), 1, digits_root, str(tmp_path))
    case = Case(family, framework, fsdp=True, **kwargs)
    first, second = two.call(train, case, 2, digits_root, str(tmp_path / 'fsdp'))
    assert distance(first['after'], second['after']) == 0
    assert distance(alone['before'], first['before']) == 0
    moved = distance(alone['before'], alone['after'])
    assert distance(alone['after'], first['after']) < 1e-3 * moved
    assert ('loss_diagonality' in first['losses'][0]) == (family == 'LaViT')


OPTIMIZER = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    constructor='LayerDecayOptimWrapperConstructor',
)


def test_sharded_parameters_have_the_decay_and_learning_rate_of_whole_ones(
    one, two, digits_root, tmp_path
):
    need('mmpretrain')
    no_decay = Config.fromfile(CONFIGS / '_base_' / 'common.py').no_decay.to_dict()
    whole = dict(OPTIMIZER, paramwise_cfg=dict(no_decay, layer_decay_rate=0.5))
    sharded = dict(
        OPTIMIZER,
        paramwise_cfg=dict(no_decay, layer_decay_rate=0.5, flat_decay_mult=None),
    )
    groups = []
    for group, optim_wrapper, fsdp in ((one, whole, False), (two, sharded, True)):
        settings = {'optim_wrapper': optim_wrapper}
        case = Case('DGSSASwin', 'mmpretrain', settings=settings, fsdp=fsdp, double=False)
        first, *_ = group.call(train, case, group.size, digits_root, str(tmp_path / str(fsdp)))
        groups.append(first['groups'])
    assert groups[0] == groups[1]
    assert len(set(groups[0].values())) > 10


@pytest.mark.slow
def test_deciding_by_the_number_of_dimensions_is_an_error(two, digits_root, tmp_path):
    need('mmpretrain')
    settings = {'optim_wrapper.paramwise_cfg': dict(flat_decay_mult=0.0)}
    case = Case('DGSSASwin', 'mmpretrain', settings=settings, fsdp=True)
    with pytest.raises(AssertionError, match='set paramwise_cfg.flat_decay_mult=None'):
        two.call(train, case, 2, digits_root, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize('resumed_by', [2, 1])
def test_a_sharded_run_goes_on_as_if_never_stopped(resumed_by, one, two, digits_root, tmp_path):
    """Also in another number of processes; the images of a step are the same."""
    need('mmseg')

    def settings(steps, **more):
        hook = dict(type='CheckpointHook', by_epoch=False, interval=5, published_keys=None)
        optim_wrapper = dict(
            type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05, eps=1e-3)
        )
        return {
            'train_cfg.max_iters': steps,
            'default_hooks.checkpoint': hook,
            'optim_wrapper': dict(optim_wrapper, _delete_=True),
            **more,
        }

    folder = str(tmp_path / 'run')
    case = Case('PartialFormer', 'mmseg', fsdp=True, settings=settings(10))
    whole, _ = two.call(train, case, 2, digits_root, str(tmp_path / 'whole'))
    case = Case('PartialFormer', 'mmseg', fsdp=True, settings=settings(5))
    half, _ = two.call(train, case, 2, digits_root, folder)

    saved = torch.load(tmp_path / 'run' / 'iter_5.pth', weights_only=False)
    weights = saved['state_dict']
    assert all(torch.equal(weights[name], p) for name, p in half['after'].items())
    assert all(torch.as_tensor(weights[n]).shape == p.shape for n, p in half['after'].items())

    case = Case('PartialFormer', 'mmseg', fsdp=True, settings=settings(10, resume=True))
    group = two if resumed_by == 2 else one
    resumed, *_ = group.call(train, case, resumed_by, digits_root, folder)
    assert distance(resumed['before'], half['after']) == 0
    assert len(resumed['losses']) == 5
    moved = distance(whole['before'], whole['after'])
    assert distance(resumed['after'], whole['after']) < 1e-6 * moved


def test_a_distilled_model_is_refused():
    """Its teacher, hidden from it, would stay whole and on the CPU."""
    need('mmpretrain')
    from effvit_mm.engine.fsdp import BackboneFSDPStrategy

    cfg = Config.fromfile(CONFIGS / 'classifier_integrated_deit_digits.py')
    cfg.model.update(teacher_checkpoint=None)
    model = build_in_scope('mmpretrain', cfg.model)
    with pytest.raises(ValueError, match='is not trained with FSDP'):
        BackboneFSDPStrategy()._wrap_model(model)
