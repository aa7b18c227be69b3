# SPDX-License-Identifier: Apache-2.0
"""What a trained model's backbone costs on its data: measures for ``tools/study.py``, each called
with a model and its config."""

import copy

from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from .cost import counted_macs, peak_memory


def image_size(cfg: Config) -> tuple[int, int]:
    """Height and width of the first validation image as the model gets it."""
    loader = copy.deepcopy(cfg.val_dataloader)
    loader.update(batch_size=1, num_workers=0, persistent_workers=False)
    image = Runner.build_dataloader(loader).dataset[0]['inputs']
    return image.shape[-2], image.shape[-1]


def backbone_mmacs(model: nn.Module, cfg: Config) -> float:
    """Millions of multiply-accumulates of the backbone on one image, counted."""
    return counted_macs(model.backbone, *image_size(cfg)) / 1e6


def backbone_training_memory(model: nn.Module, cfg: Config) -> float:
    """MiB that the backbone needs for a training step on one image, counted."""
    return peak_memory(model.backbone, *image_size(cfg), training=True) / 2**20
