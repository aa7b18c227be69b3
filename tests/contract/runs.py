# SPDX-License-Identifier: Apache-2.0
"""Short runs of mmengine's Runner, with a model that needs none of the frameworks."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import Dataset

from .families import Family, image


class TinyClassifier(BaseModel):
    """A backbone, global pooling, two classes; its keys are named as MMPretrain names them."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.backbone = family.build(out_indices=(3,))
        self.head = nn.Linear(self.backbone.out_channels[0], 2)

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = 'tensor') -> Any:
        logits = self.head(self.backbone(inputs)[0].mean((2, 3)))
        return {'loss': nn.functional.cross_entropy(logits, labels)} if mode == 'loss' else logits


class Noise(Dataset):
    """Four labelled noise images, always the same."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(inputs=image(48, 64, batch=1, seed=i)[0], labels=i % 2)


@dataclass
class Record(Hook):
    """The state a run started and ended with."""

    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    start_epoch: int = 0

    @staticmethod
    def _state(runner: Runner) -> dict[str, Any]:
        return copy.deepcopy(
            dict(
                model=runner.model.state_dict(),
                optimizer=runner.optim_wrapper.state_dict(),
                schedulers=[scheduler.state_dict() for scheduler in runner.param_schedulers],
            )
        )

    def before_train_epoch(self, runner: Runner) -> None:
        if not self.start:
            self.start, self.start_epoch = self._state(runner), runner.epoch

    def after_train(self, runner: Runner) -> None:
        self.end = self._state(runner)


def train(family: Family, folder: Path, epochs: int, resume: Path | None = None) -> Record:
    """Train and write ``folder/epoch_N.pth`` after every epoch, as mmengine's hook writes it."""
    record = Record()
    runner = Runner(
        TinyClassifier(family),
        str(folder),
        train_dataloader=dict(
            batch_size=2,
            dataset=Noise(),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
        param_scheduler=dict(type='CosineAnnealingLR', T_max=4, by_epoch=True),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
        custom_hooks=[record],
        load_from=None if resume is None else str(resume),
        resume=resume is not None,
        log_level='WARNING',
        experiment_name=f'{family.name}_{folder.name}_{id(record)}',
    )
    runner.train()
    torch.manual_seed(0)
    return record
