# SPDX-License-Identifier: Apache-2.0
"""Processes that stay, and train one case after another: starting them takes longer than a case.

Each group of processes is a world of its own (gloo); a world of one is an ordinary run, without a
launcher.
"""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed, multiprocessing

#: seconds after which a case that has not answered has failed
PATIENCE = 300


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def _serve(rank: int, size: int, connection: Connection) -> None:
    """Call what is sent, as a process of a group; ends with the connection."""
    torch.set_num_threads(1)
    while True:
        try:
            port, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()


class Group:
    """``size`` processes that call the same function at the same time.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: list[tuple[multiprocessing.Process, Connection]] = []

    def _start(self) -> None:
        context = multiprocessing.get_context('spawn')
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, mine))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a module in every process; returns what each rank returned."""
        if not self._members:
            self._start()
        port = free_port()
        for _, connection in self._members:
            connection.send((port, function, args))
        answers = []
        for rank, (_, connection) in enumerate(self._members):
            if not connection.poll(PATIENCE):
                self.close()
                raise TimeoutError(f'rank {rank} of {self.size} did not answer')
            answers.append(connection.recv())
        errors = [f'rank {i}: {text}' for i, (ok, text) in enumerate(answers) if not ok]
        if errors:
            self.close()  # a rank that failed leaves the others in the middle of something
            raise AssertionError('\n'.join(errors))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._members:
            connection.close()
            process.terminate()
            process.join()
        self._members = []
