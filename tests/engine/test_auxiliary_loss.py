# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses reach the training of every framework, exactly.

Over 500 lines: one small model goes through three frameworks, two processes and a runner.
"""

import copy
import os
import pickle
import socket
import traceback
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS, DefaultScope
from mmengine.runner import Runner
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from versions import need_cpu_autocast, needs_compile

from effvit_mm import AuxiliaryLossHook, LaViT
from effvit_mm.models.auxiliary import AuxiliaryLossSource
from effvit_mm.models.layers.less_attention import LessAttention, attention_between_cells

NAME = 'loss_diagonality'
WEIGHT = 0.7
SMALL = dict(
    dims=(8, 8, 16, 16), depths=(2, 1, 2, 2), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2)
)


def backbone_config(**kwargs):
    return dict(type='LaViT', arch=SMALL, diagonality_loss=dict(loss_weight=WEIGHT), **kwargs)


def build(**kwargs):
    """A small backbone whose scores are far from zero."""
    torch.manual_seed(0)
    model = MODELS.build(backbone_config(**kwargs))
    awaken(model)
    return model


def awaken(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for name, p in model.named_parameters():
        if any(key in name for key in LaViT.no_decay_keys):
            nn.init.normal_(p, std=0.1)


class Classifier(BaseModel):
    """The least model that mmengine trains."""

    def __init__(self, out_indices=(3,), **kwargs):
        super().__init__()
        self.backbone = build(out_indices=out_indices, **kwargs)
        self.head = nn.Linear(self.backbone.out_channels[0], 2)

    def forward(self, inputs, labels, mode='tensor'):
        logits = self.head(self.backbone(inputs)[0].mean((2, 3)))
        if mode == 'predict':
            return [logits]
        return {'loss': F.cross_entropy(logits, labels)} if mode == 'loss' else logits


def batch(size=64, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, 3, size, size + 32, generator=generator, dtype=dtype)
    return dict(inputs=inputs, labels=torch.tensor([0, 1]))


def explicit_sum(backbone, run):
    """Run a model, and add the loss up as the paper writes it from what its LA layers return."""
    outputs, hooks = [], []
    for module in backbone.modules():
        if isinstance(module, LessAttention):
            hooks.append(
                module.register_forward_hook(
                    lambda module, args, out: outputs.append((out[1], args[2]))
                )
            )
    result = run()
    for hook in hooks:
        hook.remove()
    total = 0
    for scores, grid in outputs:
        a = attention_between_cells(scores, grid, 7)
        n = a.shape[-1]
        sums = sum((a[..., i, j] - a[..., j, i]).abs() for i in range(n) for j in range(n))
        for i in range(n):
            rest = sum(a[..., i, j] for j in range(n) if j != i)
            sums = sums + (rest - (n - 1) * a[..., i, i]).relu()
        total = total + sums.mean() / (n * (n - 1))
    return result, WEIGHT * total / len(outputs)


def total_of(losses):
    """The sum that the frameworks' ``parse_losses`` makes."""
    values = [v if isinstance(v, list) else [v] for k, v in losses.items() if 'loss' in k]
    return sum(v.mean() for value in values for v in value)


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], msg=lambda m, n=name: f'{n}: {m}', **tolerance
        )


def expected_gradients(model, call):
    """Gradients of task loss plus explicit sum, without a hook."""
    model.zero_grad()
    losses, auxiliary = explicit_sum(model.backbone, call)
    assert NAME not in losses
    (total_of(losses) + auxiliary).backward()
    return auxiliary.detach(), gradients(copy_grads(model))


def copy_grads(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()
    return model


def hooked_gradients(model, call):
    hook = AuxiliaryLossHook()
    hook.attach(model)
    model.zero_grad()
    losses = call()
    total_of(losses).backward()
    hook.detach(model)
    return losses[NAME].detach(), gradients(model)


EXACT = dict(rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('kwargs', [dict(), dict(with_cp=True)], ids=['plain', 'with_cp'])
def test_value_and_gradient_equal_the_explicit_sum(kwargs):
    model = Classifier(**kwargs).double().train()
    call = lambda: model(**batch(), mode='loss')  # noqa: E731
    expected, gradient = expected_gradients(model, call)
    loss, actual = hooked_gradients(model, call)
    assert loss > 1e-3
    torch.testing.assert_close(loss, expected, **EXACT)
    assert_same_gradients(actual, gradient, **EXACT)


def need(framework):
    if find_spec(framework) is None:
        pytest.skip(f'{framework} is not installed')
    import_module(f'{framework}.models')
    return import_module(f'{framework}.registry').MODELS


def framework_model(framework):
    """A small top model, and a function that runs it with ``mode='loss'``, in float64."""
    registry = need(framework)
    image = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    if framework == 'mmpretrain':
        from mmpretrain.structures import DataSample

        config = dict(
            type='ImageClassifier',
            backbone=backbone_config(out_indices=(3,)),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=3, in_channels=16),
        )
        samples = [DataSample().set_gt_label(i) for i in range(2)]
    elif framework == 'mmseg':
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        config = dict(
            type='EncoderDecoder',
            backbone=backbone_config(),
            decode_head=dict(
                type='FCNHead', in_channels=16, in_index=3, channels=8, num_convs=1, num_classes=3
            ),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
        )
        samples = []
        for i in range(2):
            truth = PixelData(data=torch.full((1, 64, 64), i))
            samples.append(SegDataSample(gt_sem_seg=truth, metainfo=dict(img_shape=(64, 64))))
    else:
        from mmdet.structures import DetDataSample
        from mmengine.structures import InstanceData

        config = dict(
            type='FCOS',
            backbone=backbone_config(),
            neck=dict(type='FPN', in_channels=[8, 8, 16, 16], out_channels=8, num_outs=5),
            bbox_head=dict(
                type='FCOSHead',
                num_classes=2,
                in_channels=8,
                feat_channels=8,
                stacked_convs=1,
                norm_cfg=None,
            ),
        )
        samples = []
        for i in range(2):
            truth = InstanceData(
                bboxes=torch.tensor([[8.0, 8, 40, 40 + i]]).double(), labels=torch.tensor([i])
            )
            info = dict(img_shape=(64, 64), batch_input_shape=(64, 64))
            samples.append(DetDataSample(gt_instances=truth, metainfo=info))
    with DefaultScope.overwrite_default_scope(framework):
        torch.manual_seed(0)
        model = registry.build(config).double().train()
    awaken(model.backbone)

    def call():
        torch.manual_seed(0)  # heads may have dropout
        return model(image, samples, mode='loss')

    return model, call


@pytest.mark.parametrize('framework', ['mmpretrain', 'mmdet', 'mmseg'])
def test_the_models_of_every_framework_are_trained_with_exactly_the_explicit_sum(framework):
    model, call = framework_model(framework)
    expected, gradient = expected_gradients(model, call)
    loss, actual = hooked_gradients(model, call)
    torch.testing.assert_close(loss, expected, **EXACT)
    assert_same_gradients(actual, gradient, **EXACT)
    assert NAME not in call()  # detached


def test_accumulated_gradients_are_those_of_the_explicit_sum():
    batches = [batch(seed=0), batch(seed=1)]
    model = Classifier().double().train()
    reference = copy.deepcopy(model)
    for data in batches:
        losses, auxiliary = explicit_sum(
            reference.backbone, lambda d=data: reference(**d, mode='loss')
        )
        ((total_of(losses) + auxiliary) / 2).backward()
    seen = {}

    class Recording(torch.optim.SGD):
        def step(self, *args, **kwargs):
            seen.update(gradients(copy_grads(model)))

    wrapper = OptimWrapper(Recording(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 2)
    AuxiliaryLossHook().attach(model)
    for data in batches:
        log = model.train_step(data, wrapper)
        assert NAME in log
    assert_same_gradients(seen, gradients(reference), **EXACT)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_under_autocast_it_is_float32_and_the_explicit_sum(dtype):
    need_cpu_autocast(dtype)
    model = Classifier().train()
    data = batch(dtype=torch.float32)

    def call():
        with torch.autocast('cpu', dtype=dtype):
            return model(**data, mode='loss')

    expected, gradient = expected_gradients(model, call)
    loss, actual = hooked_gradients(model, call)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    for name, value in gradient.items():
        assert (actual[name] - value).norm() <= 0.03 * value.norm() + 1e-6, name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_fp16_amp_optim_wrapper_scales_it_like_every_other_loss():
    from mmengine.optim import AmpOptimWrapper

    steps = []
    for hooked in (False, True):
        model = Classifier().cuda().train()
        if hooked:
            AuxiliaryLossHook().attach(model)
        wrapper = AmpOptimWrapper(
            loss_scale=1024.0, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)
        )
        data = {k: v.cuda() for k, v in batch(dtype=torch.float32).items()}
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        if hooked:
            log = model.train_step(data, wrapper)
            assert log[NAME].isfinite()
        else:
            with wrapper.optim_context(model):
                losses, auxiliary = explicit_sum(
                    model.backbone, lambda m=model, d=data: m(**d, mode='loss')
                )
            wrapper.update_params(total_of(losses) + auxiliary)
        steps.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    for name in steps[0]:
        a, b = steps[0][name], steps[1][name]
        assert (a - b).norm() <= 0.03 * a.norm() + 1e-7, name


# two processes


def _ddp_gradients(rank):
    model = Classifier().double().train()
    parallel = MMDistributedDataParallel(
        model, device_ids=None, broadcast_buffers=False, find_unused_parameters=False
    )
    AuxiliaryLossHook().attach(parallel)
    losses = parallel(**batch(seed=rank), mode='loss')
    total_of(losses).backward()
    return gradients(model)


def _fsdp_gradients(rank):
    """A unit around the backbone, which the loss leaves by another way than the features.

    The head reads stage 1 only, so the gradient of the later stages is that of the loss alone, and
    is due before the feature's.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = Classifier(out_indices=(0, 3)).double().train()
    kwargs = dict(
        device_id=torch.device('cpu'),
        use_orig_params=True,
        backward_prefetch=None,  # it would gather the backbone's parameters early, by luck
    )
    model.backbone = FSDP(model.backbone, **kwargs)
    model = FSDP(model, **kwargs)
    AuxiliaryLossHook().attach(model.module)
    losses = model(**batch(seed=rank), mode='loss')
    total_of(losses).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return {
            n.replace('_fsdp_wrapped_module.', ''): p.grad.clone()
            for n, p in model.named_parameters()
            if p.grad is not None
        }


def _worker(rank, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    distributed.init_process_group('gloo', rank=rank, world_size=2)
    results = {}
    for name, function in (('ddp', _ddp_gradients), ('fsdp', _fsdp_gradients)):
        try:
            results[name] = function(rank)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, folder / f'{rank}.pt')
    distributed.destroy_process_group()


@pytest.fixture(scope='module')
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp('gloo')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    multiprocessing.spawn(_worker, (port, folder), nprocs=2)
    return [torch.load(folder / f'{rank}.pt', weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(('how', 'out_indices'), [('ddp', (3,)), ('fsdp', (0, 3))])
def test_two_processes_average_its_gradient_like_every_other(how, out_indices, two_processes):
    if how == 'fsdp' and torch.__version__ < '2.2':
        pytest.skip('this torch has no FSDP on CPUs')
    model = Classifier(out_indices=out_indices).double().train()
    for rank in range(2):
        losses, auxiliary = explicit_sum(
            model.backbone, lambda r=rank: model(**batch(seed=r), mode='loss')
        )
        ((total_of(losses) + auxiliary) / 2).backward()
    for rank in two_processes:
        assert not isinstance(rank[how], str), rank[how]
        expected = gradients(model)
        for name, gradient in rank[how].items():  # FSDP gives zeros to what has no gradient
            wanted = expected.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, wanted, msg=lambda m, n=name: f'{n}: {m}', **EXACT)
        assert expected.keys() <= rank[how].keys()


# the runner


def test_a_run_logs_it_and_lets_go_of_the_model(tmp_path):
    seen = []

    class Log(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append({k: float(v.detach()) for k, v in outputs.items()})

    model = Classifier()
    data = [dict(inputs=x, labels=i) for i, x in enumerate(batch(dtype=torch.float32)['inputs'])]
    runner = Runner(
        model,
        str(tmp_path),
        train_dataloader=dict(
            batch_size=2,
            dataset=data,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
        custom_hooks=[dict(type='AuxiliaryLossHook'), Log()],
        log_level='WARNING',
        experiment_name=f'auxiliary_{tmp_path.name}',
    )
    runner.train()
    history = runner.message_hub.get_scalar(f'train/{NAME}')
    assert history.current() == pytest.approx(seen[-1][NAME])
    assert len(seen) == 2 and seen[0][NAME] > 0
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert NAME not in model(**batch(dtype=torch.float32), mode='loss')


def test_the_hook_is_in_the_root_registry():
    assert isinstance(HOOKS.build(dict(type='AuxiliaryLossHook')), AuxiliaryLossHook)


# what it does not do


def test_only_the_losses_of_a_training_forward_are_added():
    model = Classifier().double().train()
    AuxiliaryLossHook().attach(model)
    data = batch()
    assert isinstance(model(**data, mode='tensor'), torch.Tensor)
    assert isinstance(model(**data, mode='predict'), list)
    model.backbone(data['inputs'])  # past the top model: not a part of the next forward
    losses = model(data['inputs'], data['labels'], 'loss')
    assert set(losses) == {'loss', NAME}
    alone, _ = explicit_sum(model.backbone, lambda: model(**data, mode='loss'))
    torch.testing.assert_close(losses[NAME], alone[NAME])
    with torch.no_grad():
        assert set(model(**data, mode='loss')) == {'loss'}
    assert set(model.eval()(**data, mode='loss')) == {'loss'}


def test_a_backbone_that_runs_twice_in_a_forward_adds_both():
    class Siamese(Classifier):
        def forward(self, inputs, labels, mode='tensor'):
            super().forward(inputs + 1, labels)
            return super().forward(inputs, labels, mode)

    model, single = Siamese().double().train(), Classifier().double().train()
    data = batch()
    for m in (model, single):
        AuxiliaryLossHook().attach(m)
    parts = [single(data['inputs'] + k, data['labels'], mode='loss')[NAME] for k in (0, 1)]
    torch.testing.assert_close(model(**data, mode='loss')[NAME], sum(parts))


def test_a_name_that_the_model_already_has_is_an_error():
    class Colliding(Classifier):
        def forward(self, *args, mode='tensor', **kwargs):
            out = super().forward(*args, mode=mode, **kwargs)
            return {**out, NAME: out['loss']} if mode == 'loss' else out

    model = Colliding().double().train()
    AuxiliaryLossHook().attach(model)
    with pytest.raises(KeyError, match=f'LaViT adds the loss .*{NAME}.*Colliding'):
        model(**batch(), mode='loss')


def test_a_model_without_auxiliary_losses_is_an_error():
    with pytest.raises(ValueError, match='no part of this Linear has losses'):
        AuxiliaryLossHook().attach(nn.Linear(2, 2))


@pytest.fixture
def logged(monkeypatch):
    messages = []
    monkeypatch.setattr(
        'effvit_mm.models.auxiliary.print_log', lambda message, **kwargs: messages.append(message)
    )
    return messages


def test_without_the_hook_the_backbone_trains_and_warns_once(logged):
    model = Classifier().double().train()
    for _ in range(3):
        losses = model(**batch(), mode='loss')
        losses['loss'].backward()
    assert set(losses) == {'loss'}
    assert model.backbone.stages[0].blocks[1].attn.transform.theta_delta.grad.any()
    assert len(logged) == 1 and 'AuxiliaryLossHook' in logged[0]


def test_it_does_not_warn_in_evaluation_nor_with_the_hook_nor_without_a_loss(logged):
    model = Classifier().double()
    model.eval()(**batch())
    AuxiliaryLossHook().attach(model.train())
    model(**batch(), mode='loss')
    arch = {**SMALL, 'vanilla_layers': SMALL['depths']}
    for backbone in (LaViT(SMALL, diagonality_loss=None), LaViT(arch)):
        backbone.train()(torch.randn(1, 3, 64, 64))
    assert logged == []


@pytest.mark.parametrize('how', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_made_between_forward_and_backward_are_free_of_the_graph(how):
    top = Classifier().double().train()
    AuxiliaryLossHook().attach(top)
    model = top.backbone
    model(batch()['inputs'])
    assert model._losses
    twin = how(model)
    assert not twin._losses and not twin._collected
    assert set(twin.state_dict()) == set(model.state_dict())
    twin(batch()['inputs'])
    assert not twin._losses


def test_the_loss_survives_a_copy_of_the_trained_model_as_ema_makes_it():
    model = Classifier().double().train()
    AuxiliaryLossHook().attach(model)
    twin = copy.deepcopy(model)
    assert NAME in model(**batch(), mode='loss')
    assert set(twin(**batch(), mode='loss')) == {'loss'}


@needs_compile
def test_it_compiles_as_one_graph_in_training():
    model = Classifier().train()
    data = batch(dtype=torch.float32)
    AuxiliaryLossHook().attach(model)
    losses = []
    for compiles in (False, True):
        if compiles:
            model.forward = torch.compile(model.forward, fullgraph=True, backend='eager')
        model.zero_grad()
        out = model(**data, mode='loss')
        total_of(out).backward()
        losses.append((out[NAME].detach(), gradients(copy_grads(model))))
    torch.testing.assert_close(losses[0][0], losses[1][0])
    assert_same_gradients(losses[1][1], losses[0][1], rtol=1e-4, atol=1e-6)


def test_sources_are_found_by_their_type():
    assert isinstance(build(), AuxiliaryLossSource)
