# SPDX-License-Identifier: Apache-2.0
"""What somebody could put into a checkpoint to run code where it is read."""

import os
from pathlib import Path
from typing import Any

import torch


class Calls:
    """Unpickling this calls ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def attacks(marker: Path) -> dict[str, Calls]:
    """By name; those that would make the folder ``marker`` do so where code may run."""
    return {
        'mkdir': Calls(os.mkdir, str(marker)),
        'eval': Calls(eval, f'__import__("os").mkdir({str(marker)!r})'),
        # a bridge from what mmengine allows to everything else
        'getattr': Calls(getattr, Calls(getattr, torch.Tensor, '__init__'), '__globals__'),
        'globals': Calls(torch.load, str(marker)),
    }
