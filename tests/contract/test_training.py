# SPDX-License-Identifier: Apache-2.0
"""Contract: training. Freezing, gradients, precision, learning rates, processes, resuming."""

import itertools

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from torch import nn
from versions import need_cpu_autocast

from effvit_mm.models.backbones.base import NORMS

from .ddp import SCENARIOS, train_in_two_processes
from .families import FAMILIES, awaken, image, random_loss
from .frameworks import FRAMEWORKS, top_model
from .runs import train

MATRICES = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]


@pytest.mark.parametrize('frozen_stages', range(-1, 5))
def test_frozen_stages_are_frozen_at_construction(family, frozen_stages):
    model = family.build(frozen_stages=frozen_stages)
    for name, p in model.named_parameters():
        assert p.requires_grad != family.is_frozen(name, frozen_stages), name


@pytest.mark.parametrize('frozen_stages', range(-1, 5))
def test_frozen_stages_stay_in_eval_after_train(family, frozen_stages):
    model = family.build(frozen_stages=frozen_stages, drop_path_rate=0.5).train()
    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            assert module.training != family.is_frozen(name, frozen_stages), name


@torch.no_grad()
def test_frozen_stages_are_deterministic_in_training(family):
    model = family.build(frozen_stages=4, drop_path_rate=0.9).train()
    x = image(64, 64)
    for a, b in zip(model(x), model(x), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_drop_path_drops_in_training(family):
    model = family.build(drop_path_rate=0.9).train()
    x = image(64, 64)
    assert any(not torch.equal(a, b) for a, b in zip(model(x), model(x), strict=True))


@pytest.mark.parametrize('norm_eval', [False, True])
def test_norm_eval_keeps_norms_in_eval(family, norm_eval):
    model = family.build(norm_eval=norm_eval).train()
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    assert norms
    assert all(module.training != norm_eval for module in norms)
    assert all(block.training for block in model.all_blocks())


@pytest.mark.parametrize('drop_path_rate', [0.0, 0.5])
def test_checkpointing_changes_neither_outputs_nor_gradients(family, drop_path_rate):
    outputs, gradients = [], []
    for with_cp in (False, True):
        model = family.build(with_cp=with_cp, drop_path_rate=drop_path_rate).double().train()
        x = image(70, 61).double().requires_grad_()
        torch.manual_seed(3)
        outputs.append(model(x))
        random_loss(outputs[-1]).backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_checkpointing_runs_blocks_again_instead_of_keeping_their_activations(family):
    calls = {False: 0, True: 0}
    for with_cp in calls:
        model = family.build(with_cp=with_cp).train()

        def count(*_, with_cp=with_cp):
            calls[with_cp] += 1

        for block in model.all_blocks():
            next(block.children()).register_forward_hook(count)
        random_loss(model(image(64, 64))).backward()
    assert calls[True] == 2 * calls[False] > 0


@pytest.mark.parametrize('out_indices', SUBSETS, ids=str)
def test_every_parameter_gets_a_gradient(family, out_indices):
    model = family.build(out_indices=out_indices).double().train()
    random_loss(model(image(64, 96).double())).backward()
    assert not without_gradient(model)


def test_every_parameter_gets_a_gradient_in_every_ablation(family):
    for fields in family.ablations:
        torch.manual_seed(0)
        model = awaken(family.cls(arch={**family.small, **fields})).double()
        random_loss(model(image(64, 96).double())).backward()
        assert not without_gradient(model), fields


def without_gradient(model: nn.Module) -> list[str]:
    """Parameters without a gradient, given in double precision: what softmax cannot see then has a
    gradient of 1e-17, not of 0. Queries, keys and values count as three parameters."""
    size = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts = grad.chunk(3) if 'qkv' in name else [grad]
        size.update({f'{name}[{i}]': float(part.abs().max()) for i, part in enumerate(parts)})
    return [name for name, value in size.items() if value <= 1e-10 * max(size.values())]


def with_large_activations(family) -> nn.Module:
    """A backbone whose normed activations are 30 times what training makes, about 4: attention
    logits then have a standard deviation of 14,400, and half precision ends at 65,504."""
    model = family.build()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.mul_(30 * 4)
                module.bias.mul_(30 * 4)
    return model


@pytest.mark.parametrize('build', ['usual norms', 'large norms'])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_large_activations_stay_finite_in_mixed_precision(family, dtype, build):
    need_cpu_autocast(dtype)
    model = family.build() if build == 'usual norms' else with_large_activations(family)
    model.train()
    with torch.autocast('cpu', dtype=dtype):
        outputs = model(30 * image(96, 96))
    loss = sum(o.float().tanh().mean() for o in outputs)
    loss.backward()
    assert all(o.isfinite().all() for o in outputs)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_mixed_precision_stays_close_to_full_precision(family):
    model = family.build(awake=False)
    x = image(96, 96)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        lowered = model(x)
    for a, b in zip(lowered, model(x), strict=True):
        assert (a - b).square().mean() < 0.01 * b.square().mean()


def test_parameters_are_contiguous_in_every_ablation(family):
    """FSDP does not save the optimizer's state of others correctly."""
    for fields in ({}, *family.ablations):
        model = family.cls(arch={**family.small, **fields})
        assert all(p.is_contiguous() for p in model.parameters()), fields


# layer-wise decay and weight decay


def test_layer_depths_rise_from_the_stem_to_the_last_block(family):
    model = family.build()
    depths = [(n, *model.get_layer_depth(f'backbone.{n}')) for n, _ in model.named_parameters()]
    num_depths = len(model.all_blocks()) + 2
    assert {n for *_, n in depths} == {num_depths}
    assert {d for _, d, _ in depths} == set(range(num_depths))
    in_blocks = [d for name, d, _ in depths if 'blocks.' in name]
    assert in_blocks == sorted(in_blocks)
    assert all(d == 0 for name, d, _ in depths if f'{name}.'.startswith(family.stem))
    assert all(d == num_depths - 1 for name, d, _ in depths if name.startswith('norm'))
    assert model.get_layer_depth('head.fc.weight') == (num_depths - 1, num_depths)


@pytest.mark.parametrize('framework', FRAMEWORKS)
def test_layer_wise_decay_works_in_every_framework(family, framework):
    model = top_model(framework, family, frozen_stages=0)
    config = dict(
        type='OptimWrapper',
        constructor='LayerDecayOptimWrapperConstructor',
        optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05),
        paramwise_cfg=dict(layer_decay_rate=0.5),
    )
    with DefaultScope.overwrite_default_scope(framework):
        groups = build_optim_wrapper(model, config).optimizer.param_groups
    rates = {id(p): g['lr'] for g in groups for p in g['params']}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum(len(g['params']) for g in groups) == len(rates) == len(trained)
    for name, p in trained.items():
        depth, num_depths = model.backbone.get_layer_depth(name, 'backbone.')
        assert rates[id(p)] == pytest.approx(0.5 ** (num_depths - 1 - depth)), name
        assert name.startswith('backbone.') or rates[id(p)] == 1.0


def recommended_paramwise_cfg(family) -> dict:
    keys = {key: dict(decay_mult=0.0) for key in family.cls.no_decay_keys}
    return dict(norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys=keys)


@pytest.mark.parametrize('constructor', ['Default', 'LayerDecay'])
def test_weight_decay_spares_norms_biases_tokens_and_stored_differences(family, constructor):
    model = nn.ModuleDict(dict(backbone=family.build()))
    paramwise_cfg = recommended_paramwise_cfg(family)
    if constructor == 'LayerDecay':
        paramwise_cfg['layer_decay_rate'] = 0.9
        model = nn.Sequential()
        model.backbone = family.build()
    config = dict(
        type='OptimWrapper',
        constructor=f'{constructor}OptimWrapperConstructor',
        optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05),
        paramwise_cfg=paramwise_cfg,
    )
    groups = build_optim_wrapper(model, config).optimizer.param_groups
    decay = {id(p): g['weight_decay'] for g in groups for p in g['params']}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            is_matrix = isinstance(module, MATRICES) and name == 'weight'
            assert decay[id(p)] == (0.05 if is_matrix else 0.0), f'{prefix}.{name}'


def test_every_no_decay_key_names_a_parameter(family):
    names = [
        name
        for fields in ({}, *family.ablations)
        for name, _ in family.cls(arch={**family.small, **fields}).named_parameters()
    ]
    for key in family.cls.no_decay_keys:
        assert any(key in f'backbone.{name}' for name in names), key


# several processes


@pytest.fixture(scope='session')
def two_processes(tmp_path_factory):
    return train_in_two_processes(FAMILIES, tmp_path_factory.mktemp('ddp'))


@pytest.mark.parametrize('scenario', SCENARIOS)
def test_two_processes_train_without_unused_parameters_and_end_equal(
    family, scenario, two_processes
):
    ranks = [rank[family.name, scenario] for rank in two_processes]
    assert not any(isinstance(rank, str) for rank in ranks), '\n'.join(map(str, ranks))
    initial = family.build(**SCENARIOS[scenario])
    for name, p in initial.named_parameters():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert torch.equal(ranks[0][name], p) != p.requires_grad, name


# resuming


def test_a_resumed_run_starts_from_exactly_the_saved_state(family, tmp_path):
    whole = train(family, tmp_path / 'whole', epochs=4)
    saved = torch.load(tmp_path / 'whole' / 'epoch_2.pth', weights_only=False)
    resumed = train(family, tmp_path / 'resumed', epochs=4, resume=tmp_path / 'whole/epoch_2.pth')
    assert resumed.start_epoch == 2
    assert_equal(resumed.start['model'], saved['state_dict'])
    assert_equal(resumed.start['optimizer'], saved['optimizer'])
    assert_equal(resumed.start['schedulers'], saved['param_schedulers'])
    # and goes on as if it had never stopped
    assert_equal(resumed.end, whole.end)


def assert_equal(a, b):
    """Nested state is equal, bit by bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b
