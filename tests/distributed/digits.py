# SPDX-License-Identifier: Apache-2.0
"""Ten steps of the digits configs with small backbones, in which a step depends on the images of
all processes together and not on how they are shared out.

The frameworks' losses are means over the images of a process, which DDP averages over processes.
That is the mean over all images where every process has the same number of images and every image
the same weight. Where a loss weights them otherwise (by class, by the number of objects found) or
draws at random, the settings here give images equal weights and take the first instead.
"""

import os
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contract.families import FAMILIES
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from effvit_mm.engine.launch import build_runner, load_config

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
BASES = dict(
    mmpretrain='classifier_partialformer_b0_digits.py',
    mmdet='mask_rcnn_partialformer_b0_digits.py',
    mmseg='semantic_fpn_partialformer_b0_digits.py',
)
STEPS = 10
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        family: Name of the backbone's class.
        framework: Scope of the framework.
        backbone: Further arguments of the backbone.
        hook: Whether auxiliary losses are collected.
        fsdp: Whether the config also has ``_base_/fsdp.py``.
        double: Whether to compute in float64.
        settings: Options of the config, which come last.
    """

    family: str
    framework: str
    backbone: dict[str, Any] = field(default_factory=dict)
    hook: bool = False
    fsdp: bool = False
    double: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def _options(case: Case) -> dict[str, Any]:
    """What a case changes in the digits config of its framework."""
    family = next(family for family in FAMILIES if family.name == case.family)
    kwargs = dict(case.backbone)
    if case.framework == 'mmpretrain':
        kwargs.setdefault('out_indices', (3,))
    channels = family.build(awake=False, **kwargs).out_channels
    options = {
        'model.backbone': dict(family.config(**kwargs), _delete_=True),
        # plain gradient descent: Adam's steps do not depend on the scale of the gradients, and
        # make much of the rounding of small ones
        'optim_wrapper': dict(
            _delete_=True, type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9)
        ),
        'param_scheduler': [],
        'randomness': dict(seed=0),
        'log_level': 'WARNING',
        'val_dataloader': None,
        'val_evaluator': None,
        'val_cfg': None,
        'default_hooks.logger.interval': 1,
        'default_hooks.checkpoint': None,
        'train_dataloader.sampler.seed': 0,
    }
    if case.hook:
        options['custom_hooks'] = [dict(type='AuxiliaryLossHook')]
    if case.framework == 'mmpretrain':
        options |= {'model.head.in_channels': channels[-1], 'train_cfg.max_epochs': 1}
    else:
        options |= {
            'model.neck.in_channels': channels,
            'train_cfg.max_iters': STEPS,
            'train_cfg.val_interval': STEPS,
        }
    if case.framework == 'mmseg':
        options |= {
            'model.decode_head.dropout_ratio': 0.0,
            # a mean over pixels weighted by class depends on a process's own pixels
            'model.decode_head.loss_decode.class_weight': None,
            'model.data_preprocessor.size': (64, 64),
        }
    elif case.framework == 'mmdet':
        options |= {
            'model.train_cfg.rpn.sampler.type': 'FirstSampler',
            'model.train_cfg.rcnn.sampler.type': 'FirstSampler',
            # as many anchors from every image, whatever is in it
            'model.train_cfg.rpn.sampler.num': 16,
            'model.train_cfg.rpn.assigner.min_pos_iou': 0.01,
            # one region with an object in every image: the loss of masks is a mean over them
            'model.train_cfg.rcnn.sampler.num': 16,
            'model.train_cfg.rcnn.sampler.pos_fraction': 1 / 16,
        }
    return {**options, **case.settings}


def _adapt_detection() -> None:
    """A sampler of regions that takes the first ones instead of random ones, and NMS in float64,
    whose operator in mmcv has float32 only on a CPU."""
    from mmdet.models.dense_heads import rpn_head
    from mmdet.models.task_modules.samplers import RandomSampler
    from mmdet.registry import TASK_UTILS

    if 'FirstSampler' in TASK_UTILS.module_dict:
        return

    @TASK_UTILS.register_module()
    class FirstSampler(RandomSampler):
        def random_choice(self, gallery: Tensor, num: int) -> Tensor:
            return gallery[:num]

    original = rpn_head.batched_nms

    def batched_nms(boxes: Tensor, scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        # equally spaced scores in the same order, which float32 can tell apart
        order = scores.argsort().argsort()
        _, keep = original(boxes.float(), order.float() + 1, *args)
        return torch.cat((boxes[keep], scores[keep, None]), dim=1), keep

    rpn_head.batched_nms = batched_nms


class _Record(Hook):
    """The weights before the first step, and the losses of each step in this process."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.losses: list[dict[str, float]] = []

    def before_train(self, runner: Any) -> None:
        self.before = _weights(runner.model)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(
            {k: torch.as_tensor(v).item() for k, v in outputs.items() if 'loss' in k}
        )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights, in every process of a sharded model."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {
                name.replace('_fsdp_wrapped_module.', ''): p.detach().clone()
                for name, p in model.named_parameters()
            }
    if is_model_wrapper(model):
        model = model.module
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _with_fsdp(config: Path, folder: Path) -> Path:
    """A config like those that end with ``_fsdp``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'fsdp_{os.getpid()}.py'
    bases = [str(config), str(CONFIGS / '_base_' / 'fsdp.py')]
    path.write_text(
        f'_base_ = {bases}\n'
        'custom_imports = _base_.fsdp_imports\n'
        'optim_wrapper = dict(paramwise_cfg=_base_.fsdp_paramwise_cfg)\n'
    )
    return path


def make_config(case: Case, size: int, folder: str) -> Config:
    """The config as ``tools/train.py`` would make it."""
    path = CONFIGS / BASES[case.framework]
    if case.fsdp:
        path = _with_fsdp(path, Path(folder))
    args = Namespace(
        config=str(path),
        launcher='pytorch' if size > 1 or case.fsdp else 'none',
        cfg_options={**_options(case), 'train_dataloader.batch_size': GLOBAL_BATCH // size},
        work_dir=folder,
    )
    cfg = load_config(args)
    if case.framework == 'mmdet':
        _adapt_detection()
    return cfg


def train(case: Case, size: int, root: str, folder: str) -> dict[str, Any]:
    """Train a case in this process, which is one of ``size``; by default in float64, so that what
    differs is not rounding, which a detector's discrete choices would turn into something else.

    Returns:
        ``before`` and ``after``: the weights; ``losses``: those of each step; ``groups``: learning
        rate and weight decay of each parameter.
    """
    os.chdir(root)
    torch.set_default_dtype(torch.float64 if case.double else torch.float32)
    cfg = make_config(case, size, folder)
    runner = build_runner(cfg)
    record = _Record()
    runner.register_hook(record)
    runner.train()
    # of each parameter, from which optimizer group it is; sharded or not
    names = {
        id(p): name.replace('_fsdp_wrapped_module.', '').removeprefix('module.')
        for name, p in runner.model.named_parameters()
    }
    groups = {
        names[id(p)]: (group['lr'], group['weight_decay'])
        for group in runner.optim_wrapper.optimizer.param_groups
        for p in group['params']
    }
    return dict(
        before=record.before, after=_weights(runner.model), losses=record.losses, groups=groups
    )
