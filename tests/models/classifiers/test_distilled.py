# SPDX-License-Identifier: Apache-2.0
"""Distillation in MMPretrain's own model, Runner, optimizer wrapper and DDP."""

import copy
import os
import socket

import pytest
import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from torch import distributed, multiprocessing
from torch.utils.data import Dataset

pytest.importorskip('mmpretrain')

from mmpretrain.structures import DataSample

from effvit_mm.engine.launch import import_framework
from effvit_mm.models.classifiers import DistilledImageClassifier

VIT = dict(embed_dims=24, num_layers=5, num_heads=2, feedforward_channels=96)
TEACHER = dict(
    type='ImageClassifier',
    backbone=dict(type='VisionTransformer', arch=VIT, img_size=64, patch_size=16),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=24),
)
ARCH = dict(
    embed_dims=24,
    depth=5,
    num_heads=2,
    image_size=64,
    static_layers=(1,),
    pyramid=((2, 11), (3, 7)),
)


def config(**changes):
    backbone = dict(type='IntegratedDeiT', arch=copy.deepcopy(ARCH), out_type='cls_token')
    head = dict(type='LinearClsHead', num_classes=10, in_channels=24)
    model = dict(backbone=backbone, head=head, teacher=copy.deepcopy(TEACHER))
    return dict(type='DistilledImageClassifier', **{**model, **changes})


def build(**changes) -> DistilledImageClassifier:
    import_framework('mmpretrain')
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config(**changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in (*model.parameters(), *model.teacher.parameters()):
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.train()


def batch(start: int = 0, count: int = 4):
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(8, 3, 64, 64, generator=generator)[start : start + count]
    return images, [DataSample().set_gt_label(i % 10) for i in range(start, start + count)]


def total(losses):
    return sum(value for name, value in losses.items() if name.startswith('loss'))


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        (image,), (sample,) = batch(i, 1)
        return dict(inputs=image, data_samples=sample)


def run(folder, epochs, resume=None, accumulative_counts=1, batch_size=4, hooks=()):
    runner = Runner(
        build(),
        str(folder),
        train_dataloader=dict(
            batch_size=batch_size,
            dataset=Images(),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.01), accumulative_counts=accumulative_counts
        ),
        custom_hooks=list(hooks),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
        load_from=None if resume is None else str(resume),
        resume=resume is not None,
        log_level='WARNING',
        experiment_name=f'distilled_{folder.name}',
        randomness=dict(seed=0),
        default_scope='mmpretrain',
    )
    runner.train()
    return runner


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_losses_are_the_formulas():
    model = build(temperature=2.0, distillation_weight=0.7, hard_weight=0.3)
    model = model.double()
    images, samples = batch()
    images = images.double()
    losses = model.loss(images, samples)
    own_teacher = copy.deepcopy(model.teacher).double()
    teacher = own_teacher(images, mode='tensor')
    student = model.head(model.backbone(images))
    probs, log_probs = (teacher / 2).softmax(1), (student / 2).log_softmax(1)
    soft = -(probs * log_probs).sum() / len(images)
    torch.testing.assert_close(losses['loss_distillation'], 0.7 * 4 * soft)
    hard = -sum(student.log_softmax(1)[i, s.gt_label] for i, s in enumerate(samples)) / len(images)
    torch.testing.assert_close(losses['loss_hard'], 0.3 * hard.squeeze())

    tokens = {}
    for layer in (2, 3):
        own_teacher.backbone.layers[layer].register_forward_pre_hook(
            lambda _, args, layer=layer: tokens.update({layer: args[0]})
        )
    own_teacher(images, mode='tensor')
    _, ours = model.backbone.forward_tokens(images)
    expected = sum(
        (ours[layer] - model.teacher_glads[str(layer)].project(tokens[layer])).square().mean()
        for layer in (2, 3)
    )
    torch.testing.assert_close(losses['loss_token'], expected)


def test_labels_are_not_needed_without_a_hard_loss():
    images, _ = batch()
    assert build().loss(images, None).keys() == {
        'loss_distillation',
        'loss_token',
        'token_variance',
    }


def test_the_teacher_is_frozen_in_eval_and_no_part_of_the_student():
    model = build()
    teacher = {k: v.clone() for k, v in model.teacher.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total(model.loss(*batch())).backward()
    optimizer.step()
    assert not any(m.training for m in model.teacher.modules())
    assert all(p.grad is None for p in model.teacher.parameters())
    assert all(torch.equal(v, teacher[k]) for k, v in model.teacher.state_dict().items())
    own = {id(p) for p in model.parameters()}
    assert not own & {id(p) for p in model.teacher.parameters()}
    assert not any('teacher.' in name for name in model.state_dict())
    # the teacher's side of the token distillation is trained with the student, all but its norm
    for glad in model.teacher_glads.values():
        assert glad.weight.grad.abs().sum() > 0
        assert glad.norm.weight.grad is None and glad.norm.bias.grad is None


@torch.no_grad()
def test_the_teacher_s_glads_start_as_all_of_the_student_s_up_to_the_same_layer():
    model = build().double()
    images, samples = batch()
    assert not model.teacher_glads_started
    model.loss(images.double(), samples)
    first, second = (model.backbone.aggregations[layer] for layer in ('2', '3'))
    x = torch.randn(3, 17, 24, dtype=torch.float64)
    expected = {'2': first.weight @ x, '3': second.weight @ (first.weight @ x)}
    for layer, norm in (('2', first.norm), ('3', second.norm)):
        y = torch.nn.functional.gelu(norm(expected[layer]))
        torch.testing.assert_close(model.teacher_glads[layer].project(x), y)
        assert model.teacher_glads[layer].pos_embed is None
    # once: what training makes of them stays
    weight = model.teacher_glads['3'].weight
    weight.mul_(2)
    before = weight.clone()
    model.loss(images.double(), samples)
    assert torch.equal(weight, before)


def test_the_logged_variance_is_that_of_the_teacher_s_tokens():
    model = build().double()
    images, samples = batch()
    variance = model.loss(images.double(), samples)['token_variance']
    _, tokens = model.teach(images.double())
    sides = [model.teacher_glads[str(layer)].project(x) for layer, x in tokens.items()]
    torch.testing.assert_close(variance, sum(y.var() for y in sides) / 2)


def test_every_parameter_that_is_trained_gets_a_gradient():
    model = build().double()
    images, samples = batch()
    total(model.loss(images.double(), samples)).backward()
    for name, p in model.named_parameters():
        assert not p.requires_grad or p.grad.abs().max() > 1e-12, name


def test_gradient_accumulation_is_the_large_batch(tmp_path):
    whole = run(tmp_path / 'whole', 2, batch_size=8)
    parts = run(tmp_path / 'parts', 2, batch_size=4, accumulative_counts=2)
    assert_close(parts.model.state_dict(), whole.model.state_dict())


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole = run(tmp_path / 'whole', 3)
    saved = tmp_path / 'whole' / 'epoch_1.pth'
    state = torch.load(saved, weights_only=False)['state_dict']
    assert any(name.startswith('teacher_glads.') for name in state)
    assert not any(name.startswith(('teacher.', '_teacher')) for name in state)
    resumed = run(tmp_path / 'resumed', 3, resume=saved)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_moving_average_of_the_student_shares_its_teacher(tmp_path):
    runner = run(tmp_path / 'ema', 1, hooks=[dict(type='EMAHook', momentum=0.5)])
    state = torch.load(tmp_path / 'ema' / 'epoch_1.pth', weights_only=False)
    assert {'state_dict', 'ema_state_dict'} <= state.keys()
    twin = copy.deepcopy(runner.model)
    assert twin.teacher is runner.model.teacher
    for a, b in zip(twin.parameters(), runner.model.parameters(), strict=True):
        assert torch.equal(a, b) and a is not b


def _train_rank(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    distributed.init_process_group('gloo', rank=rank, world_size=2)
    model = MMDistributedDataParallel(build(), device_ids=None, broadcast_buffers=False)
    _steps(model, rank * 4, 4)
    torch.save(model.module.state_dict(), f'{folder}/{rank}.pt')
    distributed.destroy_process_group()


def _steps(model, start, count):
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.01))
    images, samples = batch(start, count)
    for _ in range(3):
        wrapper.update_params(total(model(images, samples, mode='loss')))


def test_two_processes_train_as_one_with_their_images(tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    multiprocessing.spawn(_train_rank, (port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f'{rank}.pt', weights_only=True) for rank in range(2)]
    model = build()
    _steps(model, 0, 8)
    for name, value in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_teacher_of_timm_and_other_normalisations():
    teacher = dict(
        type='TimmClassifier',
        model_name='test_vit',
        num_classes=10,
        data_preprocessor=dict(mean=[100.0] * 3, std=[50.0] * 3),
    )
    model = build(
        teacher=teacher, token_loss=None, data_preprocessor=dict(mean=[127.5] * 3, std=[64.0] * 3)
    )
    pixels = 255 * torch.rand(2, 3, 160, 160)
    expected = model.teacher((pixels - 100) / 50, mode='tensor')
    actual, _ = model.teach((pixels - 127.5) / 64)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_without_a_teacher_it_predicts_the_same_and_does_not_train():
    model = build().eval()
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        alone = MODELS.build(config(teacher=None))
    alone.load_state_dict(model.state_dict())  # strict: the GLADs of the teacher's side as well
    images, samples = batch()
    with torch.no_grad():
        torch.testing.assert_close(alone.eval()(images), model(images), rtol=0, atol=0)
    alone.train().double()
    with pytest.raises(ValueError, match='without a teacher: it only predicts'):
        alone.loss(images.double(), samples)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(temperature=0.0), 'temperature'),
        (dict(head=None), 'head'),
        (
            dict(
                teacher=dict(
                    type='ImageClassifier',
                    backbone=dict(type='ResNet', depth=18),
                    neck=dict(type='GlobalAveragePooling'),
                    head=dict(type='LinearClsHead', num_classes=10, in_channels=512),
                )
            ),
            'token_loss=None',
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_a_teacher_of_other_classes_is_named():
    teacher = copy.deepcopy(TEACHER)
    teacher['head']['num_classes'] = 7
    with pytest.raises(ValueError, match='10 classes, the teacher 7'):
        build(teacher=teacher).loss(*batch())


@pytest.mark.parametrize('where', ['pretrained', 'init_cfg', 'backbone'])
def test_a_teacher_whose_weights_would_not_be_loaded_is_refused(where):
    teacher = copy.deepcopy(TEACHER)
    weights = dict(type='Pretrained', checkpoint='deit.pth')
    if where == 'pretrained':
        teacher['pretrained'] = 'deit.pth'
    else:
        (teacher['backbone'] if where == 'backbone' else teacher)['init_cfg'] = weights
    with pytest.raises(ValueError, match='give the file as teacher_checkpoint'):
        build(teacher=teacher)


def test_a_copy_in_another_precision_leaves_the_original_s_teacher_usable():
    model = build()
    before = total(model.loss(*batch()))
    twin = copy.deepcopy(model).double()
    images, samples = batch()
    precise = total(twin.loss(images.double(), samples))
    torch.testing.assert_close(precise.float(), before, rtol=1e-4, atol=1e-5)
    copy.deepcopy(model).bfloat16().loss(images.bfloat16(), samples)
    assert torch.equal(total(model.loss(*batch())), before)


def test_without_a_teacher_weights_that_only_training_needs_may_be_missing():
    state = build().state_dict()
    built = {name: value for name, value in state.items() if not name.startswith('teacher_glads')}
    assert built.keys() < state.keys()
    with pytest.raises(RuntimeError, match='teacher_glads'):
        build().load_state_dict(built)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config(teacher=None))
    model.load_state_dict(built)
    with pytest.raises(RuntimeError, match='cls_token'):
        model.load_state_dict({k: v for k, v in built.items() if 'cls_token' not in k})
