# SPDX-License-Identifier: Apache-2.0
"""Training in two processes on the CPU (gloo), as MMEngine's launcher would set it up."""

import os
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel
from torch import distributed, multiprocessing
from torch.optim import SGD

from .families import Family, image, random_loss

SCENARIOS: dict[str, dict[str, Any]] = {
    'all outputs': dict(),
    'some outputs': dict(out_indices=(0, 2)),
    'frozen stages': dict(frozen_stages=1, out_indices=(1, 3)),
    'checkpointing and drop path': dict(with_cp=True, drop_path_rate=0.2),
}


def _train(family: Family, rank: int, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = family.build(**kwargs).train()
    parallel = MMDistributedDataParallel(
        model, device_ids=None, broadcast_buffers=False, find_unused_parameters=False
    )
    optimizer = SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    torch.manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        random_loss(parallel(image(64, 64 + 32 * step, seed=10 * step + rank))).backward()
        optimizer.step()
    return model.state_dict()


def _worker(rank: int, port: int, families: Sequence[Family], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    distributed.init_process_group('gloo', rank=rank, world_size=2)
    results: dict[tuple[str, str], Any] = {}
    for family in families:
        for scenario, kwargs in SCENARIOS.items():
            try:
                results[family.name, scenario] = _train(family, rank, kwargs)
            except Exception:
                results[family.name, scenario] = traceback.format_exc()
    torch.save(results, folder / f'{rank}.pt')
    distributed.destroy_process_group()


def train_in_two_processes(
    families: Sequence[Family], folder: Path
) -> list[dict[tuple[str, str], Any]]:
    """Train every family in every scenario.

    Returns:
        For each rank, by family name and scenario, the trained weights, or a traceback.
    """
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    names = [family.name for family in families]
    multiprocessing.spawn(_named_worker, (port, names, folder), nprocs=2)
    return [torch.load(folder / f'{rank}.pt', weights_only=True) for rank in range(2)]


def _named_worker(rank: int, port: int, names: Sequence[str], folder: Path) -> None:
    """Families hold functions, which cannot be sent to another process: their names can."""
    from .families import FAMILIES

    _worker(rank, port, [family for family in FAMILIES if family.name in names], folder)
