# SPDX-License-Identifier: Apache-2.0
"""Sum statistics over a data set: in several processes, and over interruptions.

Images come in an order that a seed fixes, so what has been seen is always the beginning of that
order, and a fair sample of the data set. The state of an unfinished run is a file with the sums so
far and the number of images in them; a run with another number of processes, another batch size or
another number of images can go on from it.
"""

import math
import os
import os.path as osp
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..engine.faults import SetupError
from .statistics import StatisticsSums, read_tensors, write_tensors

STATE_FORMAT = 'effvit_mm.statistics.unfinished.1'


class Interrupted(Exception):
    """The user or the machine asked to stop; the state is saved.

    Args:
        done: Images in the saved state.
        total: Images there should have been.
    """

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f'interrupted after {done} of {total} images')
        self.done, self.total = done, total


@dataclass(frozen=True)
class StateFile:
    """Where the state of an unfinished run is kept.

    Attributes:
        path: Its path.
        identity: What must be the same for a run to go on from it, by name.
        period: Seconds between two times of saving.
    """

    path: str
    identity: Mapping[str, Any]
    period: float = 60.0

    def read(self, sums: StatisticsSums) -> int:
        """Put the saved sums into ``sums``; returns how many images they are of, 0 without a file.

        Raises:
            ValueError: The file is of another run.
        """
        if not osp.exists(self.path):
            return 0
        tensors, metadata = read_tensors(self.path)
        if metadata.get('format') != STATE_FORMAT:
            raise ValueError(f'{self.path} is no unfinished run of this version of effvit_mm.')
        for name, value in self.identity.items():
            if metadata.get(name) != value:
                raise ValueError(
                    f'{self.path} is the unfinished run of another {name} '
                    f'({metadata.get(name)}, not {value}): remove it, or write to another file.'
                )
        for name, value in tensors.items():
            sums.sums[name] = value.to(sums.device)
        return sums.image_count

    def write(self, sums: Mapping[str, Tensor]) -> None:
        """Save sums.

        Raises:
            OSError: They cannot be written; what was saved before still is.
        """
        write_tensors(self.path, sums, {**self.identity, 'format': STATE_FORMAT})

    def remove(self) -> None:
        """The run is finished."""
        if osp.exists(self.path):
            os.remove(self.path)


def image_order(total: int, max_images: int | None, seed: int) -> list[int]:
    """Which images of a data set are seen, in which order.

    Data sets are sorted by class, so their first images would be no sample of them.
    """
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    return order if max_images is None else order[:max_images]


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed or the process was asked to end; a second Ctrl-C ends it."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in caught:
            raise KeyboardInterrupt
        caught.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end_later(number: int, frame: Any) -> None:
    signal.alarm(60)  # which ends a process that has no handler for it


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal, and torchrun, ``timeout`` and Slurm end all of a
    group; the loader's wait for the main one, which saves and then ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


class _Guarded(Dataset):
    """Hands a loader's errors over as items: raised there, they would come with a traceback."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Tensor | SetupError:
        try:
            return self.dataset[index]
        except SetupError as error:
            return error


def _stack(items: list[Tensor | SetupError]) -> Tensor | SetupError:
    """A batch, or the first error."""
    errors = [item for item in items if isinstance(item, SetupError)]
    return errors[0] if errors else torch.stack(items)


def _next_batch(batches: Iterator[Tensor | SetupError], device: torch.device) -> Tensor:
    batch = next(batches)
    if isinstance(batch, SetupError):
        raise batch
    return batch.to(device, non_blocking=True)


def _process() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    if distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _total(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of all processes together, right in process 0 only."""
    total = {name: value.clone() for name, value in sums.items()}
    if _process()[1] > 1:
        for value in total.values():
            distributed.reduce(value, 0)
    return total


def _any(flags: list[bool], device: torch.device) -> list[bool]:
    """Flags that are set in any process."""
    if _process()[1] == 1:
        return flags
    value = torch.tensor([int(flag) for flag in flags], device=device)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return [bool(flag) for flag in value.tolist()]


def _resume(sums: StatisticsSums, state: StateFile) -> int:
    """Take up an unfinished run in process 0; all know how many images it has seen."""
    done = torch.zeros((), dtype=torch.int64, device=sums.device)
    if _process()[0] == 0:
        done += state.read(sums)
    if _process()[1] > 1:
        distributed.broadcast(done, 0)
    return int(done)


def sum_over_images(
    sums: StatisticsSums,
    dataset: Dataset,
    order: list[int],
    normalise: Callable[[Tensor], Tensor],
    state: StateFile,
    batch_size: int = 32,
    num_workers: int = 0,
) -> None:
    """Add all images to the sums, those of an earlier, unfinished run first.

    With an initialised process group every process calls this and takes its share; afterwards
    process 0 has the sums over all images. The state file remains: the caller removes it when the
    statistics are saved.

    Args:
        sums: New sums.
        dataset: Images ``(3, H, W)`` by index.
        order: Which images, from :func:`image_order`.
        normalise: From a batch of the data set's images to what the model takes.
        state: The state file.
        batch_size: Images at once, in every process.
        num_workers: Processes that load images, beside every process.

    Raises:
        Interrupted: A signal came, and the state is saved.
        OSError: The state cannot be written.
        SetupError: An image cannot be loaded.
        ValueError: The state is of another run, or of more images.
    """
    rank, world = _process()
    done = _resume(sums, state)
    if done > len(order):
        raise ValueError(
            f'{state.path} has {done} images already, more than the {len(order)} asked for: ask '
            'for at least as many, or remove it.'
        )
    left = order[done:]
    batches = [left[i : i + batch_size] for i in range(0, len(left), batch_size)]
    loader = DataLoader(
        _Guarded(dataset),
        collate_fn=_stack,
        batch_sampler=batches[rank::world],
        num_workers=num_workers,
        worker_init_fn=_ignore_interrupts,
        pin_memory=sums.device.type == 'cuda',
    )
    bar = tqdm(total=len(order), initial=done, unit='image', disable=rank > 0)
    with bar, stop_signals() as stopped:
        loaded, saved = iter(loader), time.monotonic()
        for i in range(math.ceil(len(batches) / world)):
            if i * world + rank < len(batches):
                sums.add(normalise(_next_batch(loaded, sums.device)))
            together = sum(map(len, batches[i * world : (i + 1) * world]))
            done += together
            bar.update(together)
            due = time.monotonic() - saved > state.period
            stop, save = _any([stopped(), due], sums.device)
            if stop or save:
                total = _total(sums.sums)
                if rank == 0:
                    state.write(total)
                saved = time.monotonic()
            if stop:
                raise Interrupted(done, len(order))
    sums.sums = _total(sums.sums)
