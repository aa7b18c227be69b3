# SPDX-License-Identifier: Apache-2.0
"""Speed, memory and cost of models side by side.

Models take turns in one process, so that a busy machine is busy for all of them; a speed is told by
the median of the rounds and their quartiles, and a ratio is formed within each round. Times are
wall-clock, never counted.

Peak memory on a GPU is what torch allocated, exact, so it is read in the same process. On a CPU it
is resident memory, of which the system keeps one high-water mark per process: each model is
measured in a process of its own. Beside it stands what
:func:`effvit_mm.analysis.cost.peak_memory` counts, which is the same on every machine.
"""

import contextlib
import ctypes
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import timm
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..engine.faults import SetupError
from ..version import __version__
from .cost import analytical_macs, counted_macs
from .cost import peak_memory as counted_memory
from .networks import Network, build_network, families, first_line

DTYPES = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        size: Height and width of the images in pixels.
        batch_size: Images at once.
        backbone: Backbones with all feature maps, instead of classifiers.
        training: A forward and a backward pass in train mode, instead of a forward in eval mode.
        device: ``'cpu'`` or ``'cuda'``.
        dtype: ``'float32'``, or ``'bfloat16'`` or ``'float16'`` by autocast with float32 weights,
            as the frameworks train with ``--amp``.
        compile: ``'no'``; ``'static'``, torch.compile for these shapes; ``'dynamic'``, for all.
    """

    size: tuple[int, int] = (224, 224)
    batch_size: int = 16
    backbone: bool = False
    training: bool = False
    device: str = 'cpu'
    dtype: str = 'float32'
    compile: str = 'no'

    def check(self) -> None:
        """Refuse what this machine or torch does not have.

        Raises:
            SetupError: Says what.
        """
        if self.device.startswith('cuda') and not torch.cuda.is_available():
            raise SetupError('There is no GPU that PyTorch can use; take --device cpu.')
        if self.batch_size < 1 or min(self.size) < 32:
            raise SetupError('A batch has at least one image, and an image at least 32×32 pixels.')


@dataclass
class Timing:
    """Seconds per call in every round, and how many calls a round's value is the mean of."""

    seconds: list[float]
    calls: int = 1

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile."""
        return _quartiles(self.seconds)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method='inclusive')
    return low, high


def time_interleaved(
    steps: dict[str, Callable[[], object]],
    rounds: int = 25,
    seconds: float = math.inf,
    min_rounds: int = 3,
    turn_seconds: float = 0.1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time several functions in turn: one round is a turn of each.

    Two calls of each come first: one that does not count, which loads code, chooses kernels or
    compiles, and one that tells how many calls fill a turn.

    Args:
        steps: What to call, by name; returns when its work is done.
        rounds: Rounds at most.
        seconds: Time for each function, from which the number of rounds follows.
        min_rounds: Rounds at least, whatever time they take.
        turn_seconds: Calls of less than this are repeated within a turn, which counts their mean.
        progress: Called with the number of finished turns and of all turns.

    Returns:
        The timing of each.
    """
    start = time.perf_counter()
    calls, expected = {}, 0.0
    for name, step in steps.items():
        step()
        once = _time(step, 1)
        calls[name] = max(1, math.ceil(turn_seconds / max(once, 1e-9)))
        expected += once * calls[name]
    deadline = start + seconds * len(steps)
    left = deadline - time.perf_counter()
    planned = rounds if math.isinf(left) else min(rounds, int(left / expected))
    planned = max(min_rounds, planned)
    measured: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(planned):
        if i >= min_rounds and time.perf_counter() > deadline:
            break
        for j, (name, step) in enumerate(steps.items()):
            measured[name].append(_time(step, calls[name]))
            if progress is not None:
                progress(i * len(steps) + j + 1, planned * len(steps))
    return {name: Timing(values, calls[name]) for name, values in measured.items()}


def _time(step: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


@contextlib.contextmanager
def _precision(settings: Settings) -> Iterator[None]:
    dtype = DTYPES[settings.dtype]
    device = settings.device.partition(':')[0]
    with torch.autocast(device, dtype) if dtype is not None else contextlib.nullcontext():
        yield


def make_step(network: Network, settings: Settings) -> Callable[[], None]:
    """A function that runs a model once on random images, and waits until it is done.

    The network is moved to the device and set to the mode; the images are made once.

    Args:
        network: The model.
        settings: What is measured.
    """
    network.to(settings.device).train(settings.training)
    image = torch.rand(settings.batch_size, 3, *settings.size, device=settings.device)
    run: Callable[[Tensor], Any] = network
    if settings.compile != 'no':
        _let_dynamo_compile_many()
        run = torch.compile(network, dynamic=settings.compile == 'dynamic')

    def forward() -> None:
        with torch.inference_mode(), _precision(settings):
            run(image)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        with _precision(settings):
            out = run(image)
        sum(o.float().mean() for o in tree_flatten(out)[0]).backward()

    step = train if settings.training else forward

    def finished() -> None:
        step()
        if settings.device.startswith('cuda'):
            torch.cuda.synchronize(settings.device)

    return finished


def _let_dynamo_compile_many() -> None:
    """Every compiled model counts as another compilation of :meth:`Network.forward`, of which
    dynamo keeps 8 by default; those after them would run uncompiled."""
    from torch._dynamo import config

    config.cache_size_limit = max(config.cache_size_limit, 256)
    if hasattr(config, 'fail_on_recompile_limit_hit'):  # torch 2.6
        config.fail_on_recompile_limit_hit = True


def _resident(field: str) -> int:
    """Bytes of resident memory: ``'VmRSS'`` now, ``'VmHWM'`` at most since the last reset."""
    with open('/proc/self/status') as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def _warm_up(text: str, settings: Settings) -> Callable[[], None]:
    """The model's step, after what is done only once (loading code, creating handles) is done."""
    network = build_network(text, settings.size, settings.backbone)
    make_step(network, replace(settings, batch_size=1))()
    network.zero_grad(set_to_none=True)
    return make_step(network, settings)


def _peak_on_cuda(text: str, settings: Settings) -> int:
    step = _warm_up(text, settings)
    torch.cuda.synchronize(settings.device)
    torch.cuda.reset_peak_memory_stats(settings.device)
    before = torch.cuda.memory_allocated(settings.device)
    step()
    return torch.cuda.max_memory_allocated(settings.device) - before


def _peak_on_cpu(text: str, settings: Settings, threads: int, queue: Any) -> None:
    torch.set_num_threads(threads)
    step = _warm_up(text, settings)
    with contextlib.suppress(AttributeError, OSError):  # musl has no such function
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still resident would hide a peak
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')
    before = _resident('VmRSS')
    step()
    queue.put(_resident('VmHWM') - before)


def peak_memory(text: str, settings: Settings) -> int:
    """Most bytes that one step needs beyond weights and images: activations, and gradients.

    On a GPU they are those that torch allocated; on a CPU (Linux only) those by which resident
    memory grew in a process of its own.

    Args:
        text: The model's name.
        settings: What is measured; compiled models are measured as they are, without compiling.

    Raises:
        SetupError: It failed, for example for want of memory.
    """
    settings = replace(settings, compile='no')
    if settings.device.startswith('cuda'):
        return _peak_on_cuda(text, settings)
    if not sys.platform.startswith('linux'):
        raise SetupError('Peak memory on a CPU is read from /proc, which only Linux has.')
    context = multiprocessing.get_context('spawn')
    queue = context.SimpleQueue()
    arguments = (text, settings, torch.get_num_threads(), queue)
    process = context.Process(target=_peak_on_cpu, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SetupError(
            f'Measuring the memory of {text} ended with {process.exitcode}: see above; a process '
            'that is killed (-9) had too little of it.'
        )
    return queue.get()


def count(text: str, settings: Settings) -> dict[str, Any]:
    """What can be said of a model without running it on data, for one image.

    Args:
        text: The model's name.
        settings: Size, task and mode.

    Returns:
        ``params``; ``macs`` of a forward by torch's operator counter; ``analytical_macs`` by the
        paper's formulas, None where there are none; ``counted_memory``, bytes of weights,
        activations and gradients alive at once in float32.
    """
    network = build_network(text, settings.size, settings.backbone)
    height, width = settings.size
    analytical = None
    if type(network.backbone) in families().values():
        with contextlib.suppress(TypeError):  # a family without formulas
            analytical = analytical_macs(network.backbone, height, width)
            if network.fc is not None:
                analytical += network.fc.weight.numel()
    return dict(
        params=sum(p.numel() for p in network.parameters()),
        macs=counted_macs(network, height, width),
        analytical_macs=analytical,
        counted_memory=counted_memory(network, height, width, settings.training),
    )


def compare(
    models: dict[str, str],
    settings: Settings,
    reference: str | None = None,
    seconds: Callable[[], float] | float = math.inf,
    rounds: int = 25,
    memory: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure models side by side.

    Args:
        models: Of each model its name by the label it has in tables.
        settings: What is measured.
        reference: Label of the model that speeds are ratios to; None: the last.
        seconds: Time for each model in each of the measurements, of which there are two for a
            forward of more than one image (the batch, and the latency of one image). A function is
            asked when they begin.
        rounds: Rounds at most.
        memory: Whether to measure peak memory.
        progress: Called with what is done and how much of how much.

    Returns:
        A dictionary for JSON: ``settings``, ``reference``, ``rounds``, and by label in ``models``
        what :func:`count` returns and

        - ``seconds``, ``median``, ``quartiles``: of a batch, in seconds; ``calls`` per round;
        - ``images_per_second``; ``speed``: the median of its ratios to the reference's, one for
          each round, and their ``speed_quartiles``;
        - ``latency``: seconds, median and quartiles for one image (inference only);
        - ``peak_memory``: see :func:`peak_memory`; None: not measured.

    Raises:
        SetupError: A model cannot be built, or does not run with these settings.
    """
    settings.check()
    reference = list(models)[-1] if reference is None else reference
    if reference not in models:
        raise SetupError(f'The reference {reference!r} is none of {", ".join(models)}.')
    report = progress or (lambda *_: None)
    rows, networks = {}, {}
    for i, (label, text) in enumerate(models.items()):
        report('counting', i, len(models))
        rows[label] = dict(
            model=text, **_explained(text, settings, lambda t=text: count(t, settings))
        )
        networks[label] = build_network(text, settings.size, settings.backbone)
    for i, (label, text) in enumerate(models.items()):
        report('peak memory', i, len(models))
        measure = lambda t=text: peak_memory(t, settings)  # noqa: E731
        rows[label]['peak_memory'] = _explained(text, settings, measure) if memory else None
    budget = seconds() if callable(seconds) else seconds
    passes = [settings]
    if not settings.training and settings.batch_size > 1:
        passes.append(replace(settings, batch_size=1))
    timings = []
    for each in passes:
        steps = {}
        for label, network in networks.items():
            step = make_step(network, each)
            steps[label] = lambda s=step, t=models[label], e=each: _explained(t, e, s)
        what = 'timing batches' if each is settings else 'timing single images'
        timings.append(
            time_interleaved(steps, rounds, budget, progress=lambda i, n, w=what: report(w, i, n))
        )
    for label, row in rows.items():
        timing, base = timings[0][label], timings[0][reference]
        row.update(_times(timing), calls=timing.calls)
        row['images_per_second'] = settings.batch_size / timing.median
        ratios = [b / t for b, t in zip(base.seconds, timing.seconds, strict=True)]
        row['speed'], row['speed_quartiles'] = statistics.median(ratios), _quartiles(ratios)
        row['latency'] = None if settings.training else _times(timings[-1][label])
    return dict(
        settings=asdict(settings),
        reference=reference,
        rounds=[len(next(iter(timing.values())).seconds) for timing in timings],
        models=rows,
    )


def _times(timing: Timing) -> dict[str, Any]:
    return dict(seconds=timing.seconds, median=timing.median, quartiles=timing.quartiles)


def _explained(text: str, settings: Settings, function: Callable[[], Any]) -> Any:
    """Call a function; what a model cannot do is said in one sentence."""
    try:
        return function()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        height, width = settings.size
        how = f'{"training" if settings.training else "inference"}, {settings.dtype}'
        raise SetupError(
            f'{text} does not run on {settings.batch_size}×3×{height}×{width} ({how}, '
            f'{settings.device}, compile: {settings.compile}): {first_line(error)}'
        ) from error


def growth_exponents(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How costs grow with an image's pixels: the slope of a line through them on log axes.

    Args:
        results: Of :func:`compare`, the same models at several sizes.

    Returns:
        For every label the exponents of ``MACs``, ``time`` (of a batch) and ``memory`` (counted),
        1 being linear.
    """
    pixels = [math.prod(result['settings']['size']) for result in results]
    keys = dict(MACs='macs', time='median', memory='counted_memory')
    return {
        label: {
            cost: fitted_exponent(pixels, [result['models'][label][key] for result in results])
            for cost, key in keys.items()
        }
        for label in results[0]['models']
    }


def fitted_exponent(pixels: Sequence[float], costs: Sequence[float]) -> float:
    """``p`` of the least-squares fit ``cost = c * pixels**p`` in logarithms."""
    x, y = ([math.log(value) for value in values] for values in (pixels, costs))
    return statistics.linear_regression(x, y).slope


def machine(device: str = 'cpu') -> dict[str, Any]:
    """What the numbers depend on: processor, threads, versions."""
    facts: dict[str, Any] = dict(
        processor=_processor(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        timm=timm.__version__,
        effvit_mm=__version__,
    )
    if 'mmdet' in sys.modules:
        facts['mmdet'] = sys.modules['mmdet'].__version__
    if device.startswith('cuda'):
        facts['gpu'] = torch.cuda.get_device_name(device)
        facts['cuda'] = torch.version.cuda
    return facts


def _processor() -> str:
    try:
        with open('/proc/cpuinfo') as file:
            return next(
                line.partition(':')[2].strip() for line in file if line.startswith('model name')
            )
    except (OSError, StopIteration):  # not Linux, or not x86
        return platform.processor() or platform.machine()
