# SPDX-License-Identifier: Apache-2.0
"""200 steps in bfloat16 follow those in float32. The numbers of docs/benchmarks.md:

pytest -s tests/precision/test_bf16_training.py
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract.frameworks import need
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner

from effvit_mm.engine.launch import import_framework

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ['partialformer_b0', 'lavit', 'integrated_deit', 'dgssa_swin']
STEPS, WINDOW, BATCH = 200, 50, 32


@OPTIM_WRAPPERS.register_module()
class CPUBFloat16OptimWrapper(OptimWrapper):
    """``AmpOptimWrapper(dtype='bfloat16')``, which mmengine refuses to build on a CPU."""

    def optim_context(self, model):
        return torch.autocast('cpu', dtype=torch.bfloat16)


class Losses(Hook):
    """The loss of every step."""

    def __init__(self):
        self.values = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.values.append(torch.as_tensor(outputs['loss']).item())


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """1600 pictures of single digits, as tools/prepare_digits.py writes them."""
    root = tmp_path_factory.mktemp('root')
    counts = ['--num-train', '1', '--num-val', '1', '--num-classification-train', '1600']
    subprocess.run(
        [sys.executable, ROOT / 'tools' / 'prepare_digits.py', *counts], cwd=root, check=True
    )
    return root


def train(name, wrapper, work_dir):
    """Losses of 200 steps of a digits config, without its teacher if it has one."""
    import_framework('mmpretrain')
    cfg = Config.fromfile(ROOT / 'configs' / f'classifier_{name}_digits.py')
    cfg.model.type = 'ImageClassifier'
    for key in ('teacher', 'teacher_checkpoint', 'token_loss'):
        cfg.model.pop(key, None)
    cfg.load_from = None
    cfg.work_dir, cfg.experiment_name = str(work_dir), f'{name}_{wrapper}'
    cfg.optim_wrapper.type = wrapper
    cfg.param_scheduler = [dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50)]
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=STEPS)
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    cfg.test_dataloader = cfg.test_evaluator = cfg.test_cfg = None
    cfg.default_hooks.checkpoint = None
    cfg.train_dataloader.update(batch_size=BATCH, collate_fn=dict(type='default_collate'))
    cfg.randomness, cfg.log_level, cfg.launcher = dict(seed=0), 'WARNING', 'none'
    runner = Runner.from_cfg(cfg)
    losses = Losses()
    runner.register_hook(losses)
    runner.train()
    assert all(p.dtype == torch.float32 for p in runner.model.parameters())
    return torch.tensor(losses.values, dtype=torch.float64)


def smooth(losses):
    """Means of ``WINDOW`` losses, one for each step from the ``WINDOW``-th."""
    return losses.unfold(0, WINDOW, 1).mean(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize('name', CONFIGS)
def test_200_steps_in_bfloat16_follow_those_in_float32(name, digits, tmp_path, monkeypatch):
    need('mmpretrain')
    monkeypatch.chdir(digits)
    full = train(name, 'OptimWrapper', tmp_path / 'float32')
    lowered = train(name, 'CPUBFloat16OptimWrapper', tmp_path / 'bfloat16')
    assert len(full) == len(lowered) == STEPS
    assert not torch.equal(full, lowered)
    deviation = (smooth(lowered) / smooth(full) - 1).abs()
    print(
        f'\n{name}: loss {smooth(full)[0]:.3f} -> {smooth(full)[-1]:.3f} in float32, '
        f'{smooth(lowered)[0]:.3f} -> {smooth(lowered)[-1]:.3f} in bfloat16; '
        f'largest deviation {100 * deviation.max():.2f} %, last {100 * deviation[-1]:.2f} %'
    )
    # what was learned is more than what the precisions differ by
    difference = (smooth(lowered) - smooth(full)).abs().max()
    assert smooth(full)[0] - smooth(full)[-1] > 2 * difference
    assert deviation.max() < 0.05
