# SPDX-License-Identifier: Apache-2.0
"""Speed and peak memory of backbones and classifiers, side by side in one process."""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

import effvit_mm.models

MIB = 2**20


class Classifier(nn.Module):
    """A backbone with global average pooling and a linear layer, as ImageNet models have.

    Args:
        backbone: A backbone whose last feature map is the deepest.
        num_classes: Outputs of the linear layer.
    """

    def __init__(self, backbone: nn.Module, num_classes: int = 1000) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(backbone.out_channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to logits ``(B, num_classes)``."""
        return self.fc(self.backbone(x)[-1].mean(dim=(2, 3)))


def build_backbone(name: str) -> nn.Module:
    """A backbone by name, untrained, in eval mode.

    Args:
        name: ``'PartialFormer:b3'``, a family of ours and an architecture;
            ``'timm:swin_tiny_patch4_window7_224'``, the features of a model of timm; or a config of
            a framework, a path or such as ``'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'``,
            whose backbone is taken.
    """
    if name.endswith('.py'):
        config = Config.fromfile(name) if '::' not in name else _framework_config(name)
        scope = config.get('default_scope', 'mmengine')
        backbone = config.model.backbone
        backbone.pop('init_cfg', None)
        with DefaultScope.overwrite_default_scope(scope):
            model = MODELS.build(backbone)
    elif name.startswith('timm:'):
        import timm

        model = timm.create_model(name.removeprefix('timm:'), features_only=True)
    else:
        family, _, arch = name.partition(':')
        model = getattr(effvit_mm.models.backbones, family)(arch)
    model.eval()  # MMDetection's Swin returns None here
    return model


def _framework_config(name: str) -> Config:
    from mmengine.hub import get_config

    scope = name.partition('::')[0]
    __import__(scope)
    return get_config(name)


def build_classifier(name: str) -> nn.Module:
    """A 1000-way classifier by name, untrained, in eval mode; names as in :func:`build_backbone`,
    but ``timm:`` gives timm's own classifier."""
    if name.startswith('timm:'):
        import timm

        return timm.create_model(name.removeprefix('timm:')).eval()
    family, _, arch = name.partition(':')
    backbone = getattr(effvit_mm.models.backbones, family)(arch, out_indices=(3,))
    return Classifier(backbone).eval()


@dataclass
class Timing:
    """Seconds per forward: median, lowest and highest over the rounds."""

    median: float
    low: float
    high: float


def _synchronise(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


@torch.inference_mode()
def time_interleaved(
    models: dict[str, Callable[[Tensor], object]],
    image: Tensor,
    rounds: int = 15,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Time the forwards of several models in turn, so that a busy machine is busy for all of them.

    Args:
        models: What to call, by name.
        image: What to call it with.
        rounds: Calls per model that count; one more before them does not.
        on_round: Called with the number of finished rounds.

    Returns:
        The timing of each model.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds + 1):
        for name, model in models.items():
            _synchronise(image.device)
            start = time.perf_counter()
            model(image)
            _synchronise(image.device)
            if i:
                seconds[name].append(time.perf_counter() - start)
        if on_round is not None:
            on_round(i)
    return {k: Timing(statistics.median(v), min(v), max(v)) for k, v in seconds.items()}


def _resident() -> float:
    with open('/proc/self/statm') as file:
        import resource

        return int(file.read().split()[1]) * resource.getpagesize()


@torch.inference_mode()
def _measure_peak(build: Callable, name: str, shape: Sequence[int], device: str, queue) -> None:
    import resource

    model = build(name).to(device)
    image = torch.rand(shape, device=device)
    model(image[:, :, :64, :64] if build is build_backbone else image[:1])  # load code and kernels
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(image)
        queue.put(torch.cuda.max_memory_allocated() - before)
        return
    before = _resident()
    model(image)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def peak_memory(
    name: str, shape: Sequence[int], device: str = 'cpu', build: Callable = build_backbone
) -> float:
    """Peak memory of one forward in MiB, beyond weights and image, in a process of its own.

    On a CPU this is resident memory as the system sees it (Linux), on a GPU what torch allocated.

    Args:
        name: A model by name.
        shape: ``(B, 3, H, W)``.
        device: ``'cpu'`` or ``'cuda'``.
        build: :func:`build_backbone` or :func:`build_classifier`.
    """
    if device == 'cpu' and not sys.platform.startswith('linux'):
        raise NotImplementedError('Peak memory on a CPU is read from /proc, which only Linux has.')
    context = multiprocessing.get_context('spawn')
    queue = context.Queue()
    process = context.Process(target=_measure_peak, args=(build, name, shape, device, queue))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f'Measuring the memory of {name} failed with {process.exitcode}.')
    return queue.get() / MIB
