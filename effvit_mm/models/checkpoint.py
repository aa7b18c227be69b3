# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: from anywhere, in any wrapping we know, never running code from them."""

import os
import os.path as osp
import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging import HistoryBuffer
from torch import Tensor
from torch.hub import download_url_to_file, get_dir

WRAPPINGS = ('state_dict', 'model', 'module')


def _history_method(owner: type, name: str) -> Any:
    """Stands in for ``getattr`` in checkpoints: mmengine's message hub refers to the statistics of
    its history buffers that way, and with the real one a checkpoint could reach arbitrary code."""
    if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError(f'getattr of {name!r} is not allowed')
    return getattr(owner, name)


def _safe_globals():
    """Let torch's restricted unpickler read what mmengine writes beside the weights."""
    try:
        from mmengine.runner.checkpoint import get_torch_safe_globals
        from torch.serialization import safe_globals
    except ImportError:  # mmengine 0.10.7, torch 2.1: there is no list to extend
        return nullcontext()
    allowed = [g for g in get_torch_safe_globals() if g is not getattr]
    return safe_globals([*allowed, (_history_method, 'builtins.getattr')])


def _local_path(path: str) -> str:
    """The path itself; of a URL its copy in torch's cache, downloaded by the main process."""
    if not path.startswith(('http://', 'https://')):
        path = osp.expanduser(path)
        if not osp.isfile(path):
            raise FileNotFoundError(f'There is no checkpoint {path}.')
        return path
    local = osp.join(get_dir(), 'checkpoints', osp.basename(path.split('?')[0]))
    if is_main_process() and not osp.isfile(local):
        os.makedirs(osp.dirname(local), exist_ok=True)
        download_url_to_file(path, local)
    barrier()
    return local


def read_state_dict(path: str) -> dict[str, Tensor]:
    """Read the weights of a checkpoint file or URL without ever running code from it.

    Bare state dicts and those under ``state_dict``, ``model`` or ``module`` are recognised, and the
    prefix ``module.`` that DataParallel leaves is taken off.

    Args:
        path: Local path or http(s) URL of a file written by :func:`torch.save`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, holds more than weights, or holds none.
    """
    local = _local_path(path)
    try:
        with _safe_globals():
            content = torch.load(local, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f'{path} was refused: it is damaged, or holds objects other than weights, and loading '
            'those could run code. If it is a training checkpoint of mmengine, write it with '
            "CheckpointHook(published_keys=['meta', 'state_dict']) and load the published file."
        ) from error
    except Exception as error:  # whatever torch stumbles over in a damaged file
        raise ValueError(f'{path} is not a complete checkpoint file: {error}') from error
    for key in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise ValueError(f'{path} holds no state dict.')
    state = {k: v for k, v in content.items() if isinstance(v, Tensor)}
    if not state:
        raise ValueError(f'{path} holds no weights.')
    if all(key.startswith('module.') for key in state):
        state = {key.removeprefix('module.'): value for key, value in state.items()}
    return state


def select_prefix(state: dict[str, Tensor], prefix: str | None, path: str) -> dict[str, Tensor]:
    """The part of a state dict under ``prefix``, without it.

    Raises:
        ValueError: Nothing is under the prefix.
    """
    if not prefix:
        return state
    prefix = prefix.rstrip('.') + '.'
    selected = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if not selected:
        raise ValueError(
            f"{path} has no weights under the prefix '{prefix}'; "
            f"its first key is '{next(iter(state))}'."
        )
    return selected
