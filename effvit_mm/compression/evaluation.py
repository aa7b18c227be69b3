# SPDX-License-Identifier: Apache-2.0
"""What a compressed classifier reaches beside the original it was distilled from: measures for
``tools/study.py``, each called with a trained ``DistilledImageClassifier`` and its config."""

import copy
from collections.abc import Callable

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner, load_checkpoint
from torch import Tensor, nn

from ..analysis.benchmark import time_interleaved
from .sources import build_preprocessor

Classifier = Callable[[Tensor], Tensor]


@torch.inference_mode()
def top1(classifier: Classifier, cfg: Config) -> float:
    """Percent of the validation images of a config that a classifier names right."""
    loader = copy.deepcopy(cfg.val_dataloader)
    loader.setdefault('collate_fn', dict(type='default_collate'))
    preprocessor = build_preprocessor(cfg)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        batches = Runner.build_dataloader(loader)
    right = total = 0
    for batch in batches:
        data = preprocessor(batch)
        scores = classifier(data['inputs'])
        labels = torch.cat([sample.gt_label for sample in data['data_samples']])
        right += (scores.argmax(dim=1) == labels).sum().item()
        total += len(labels)
    return 100 * right / total


def student_of(model: nn.Module) -> Classifier:
    """From preprocessed images to the scores of the compressed model."""
    return lambda images: model.head(model.extract_feat(images))


def teacher_of(model: nn.Module) -> Classifier:
    """From images as the compressed model sees them to the scores of the original."""
    return lambda images: model.teach(images)[0]


def top1_of_teacher(model: nn.Module, cfg: Config) -> float:
    """Percent of the validation images that the original names right."""
    return top1(teacher_of(model.eval()), cfg)


def top1_before_training(model: nn.Module, cfg: Config) -> float:
    """Percent of the validation images that the compressed model names right as it was built;
    without a ``load_from`` what it starts from is random."""
    start = copy.deepcopy(model)
    if cfg.get('load_from') is None:
        start.init_weights()
    else:
        load_checkpoint(start, cfg.load_from, map_location='cpu')
    return top1(student_of(start.eval()), cfg)


def speed(model: nn.Module, cfg: Config, batch_size: int = 16, rounds: int = 31) -> float:
    """Images per second over those of the original, eval mode, interleaved, median of rounds."""
    teacher = model.eval().teacher
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        first = Runner.build_dataloader(cfg.val_dataloader).dataset[0]['inputs']
    images = torch.rand(batch_size, *first.shape)
    student = student_of(model)
    steps = dict(student=lambda: student(images), teacher=lambda: teacher(images, mode='tensor'))
    with torch.inference_mode():
        timings = time_interleaved(steps, rounds)
    return timings['teacher'].median / timings['student'].median
