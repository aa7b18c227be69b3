# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: from anywhere, in any wrapping we know, never running code from them."""

import os
import os.path as osp
import pickle
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmengine.dist import barrier
from mmengine.logging import HistoryBuffer
from mmengine.model.weight_init import PretrainedInit
from mmengine.optim.scheduler import OneCycleParamScheduler
from safetensors.torch import load_file
from torch import Tensor
from torch.hub import download_url_to_file, get_dir

try:
    from numpy._core import multiarray
except ImportError:  # NumPy 1
    from numpy.core import multiarray

#: where weights lie in the files that are about, those of a moving average last
WRAPPINGS = ('state_dict', 'model', 'module', 'state_dict_ema', 'model_ema', 'ema_state_dict')
#: what moving averages count beside the weights
COUNTERS = ('steps', 'n_averaged')


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; its message is a sentence for the user."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such file."""


#: what mmengine refers to by ``getattr``: statistics of its message hub's history buffers, and how
#: OneCycleLR goes from one value to the next
_ATTRIBUTES = {
    HistoryBuffer: ('min', 'max', 'current', 'mean'),
    OneCycleParamScheduler: ('_annealing_cos', '_annealing_linear'),
}


def _listed_attribute(owner: type, name: str) -> Any:
    """Stands in for ``getattr`` in checkpoints: with the real one a checkpoint could reach
    arbitrary code."""
    if name not in _ATTRIBUTES.get(owner, ()):
        raise pickle.UnpicklingError(f'getattr of {name!r} is not allowed')
    return getattr(owner, name)


def _load_listed(path: str, map_location: Any) -> Any:
    """Load with torch's restricted unpickler, and what mmengine writes beside the weights."""
    from mmengine.runner.checkpoint import get_torch_safe_globals
    from torch.serialization import safe_globals

    allowed = [g for g in get_torch_safe_globals() if g is not getattr]
    allowed += [OneCycleParamScheduler, (_listed_attribute, 'builtins.getattr')]
    with safe_globals(allowed):
        return torch.load(path, map_location=map_location, weights_only=True)


#: what :class:`_Unpickler` finds, by module and name
_FOUND = {
    ('builtins', 'getattr'): _listed_attribute,
    ('builtins', 'set'): set,
    ('builtins', 'slice'): slice,
    ('collections', 'Counter'): Counter,  # the milestones of MultiStepLR
    ('collections', 'OrderedDict'): OrderedDict,
    ('collections', 'deque'): deque,
    ('mmengine.logging.history_buffer', 'HistoryBuffer'): HistoryBuffer,
    ('mmengine.optim.scheduler.param_scheduler', 'OneCycleParamScheduler'): OneCycleParamScheduler,
    ('torch', 'Size'): torch.Size,
    ('torch', 'device'): torch.device,
    **{
        ('torch._utils', name): getattr(torch._utils, name)
        for name in ('_rebuild_tensor_v2', '_rebuild_parameter')
    },
    ('_codecs', 'encode'): lambda text, encoding: text.encode('latin1'),
    ('numpy', 'dtype'): np.dtype,
    ('numpy', 'ndarray'): np.ndarray,
    **{
        (f'numpy.{core}.multiarray', name): getattr(multiarray, name)
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    },
}


class _Unpickler(pickle.Unpickler):
    """Finds nothing but what is in ``_FOUND``."""

    def find_class(self, module: str, name: str) -> Any:
        module = {'__builtin__': 'builtins'}.get(module, module)  # its name in Python 2's pickles
        found = _FOUND.get((module, name))
        if found is None and module == 'torch' and isinstance(getattr(torch, name, 0), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f'{module}.{name} is not allowed')
        return found


def _load_found(path: str, map_location: Any) -> Any:
    """The same where there is no list to extend: mmengine 0.10.7, torch 2.1."""
    module = types.SimpleNamespace(
        __name__='pickle',
        Unpickler=_Unpickler,
        UnpicklingError=pickle.UnpicklingError,
        load=lambda file, **kwargs: _Unpickler(file, **kwargs).load(),
    )
    return torch.load(path, map_location=map_location, pickle_module=module, weights_only=False)


def _load_safetensors(path: str, map_location: Any) -> dict[str, Tensor]:
    return load_file(path)


def _can_extend_list() -> bool:
    import mmengine.runner.checkpoint as theirs

    return hasattr(theirs, 'get_torch_safe_globals') and hasattr(
        torch.serialization, 'safe_globals'
    )


def _local_path(path: str) -> str:
    """The path itself; of a URL its copy in torch's cache, downloaded by one process of each
    machine."""
    if not path.startswith(('http://', 'https://')):
        path = osp.expanduser(path)
        if osp.isdir(path):
            raise MissingCheckpointError(f'{path} is a folder, not a checkpoint file.')
        if not osp.isfile(path):
            raise MissingCheckpointError(f'There is no checkpoint {path}.')
        return path
    local = osp.join(get_dir(), 'checkpoints', osp.basename(path.split('?')[0]))
    # the number of a process on its machine, by MPI or else by torchrun and Slurm
    rank = os.environ.get('OMPI_COMM_WORLD_LOCAL_RANK') or os.environ.get('LOCAL_RANK', '0')
    if rank == '0' and not osp.isfile(local):
        os.makedirs(osp.dirname(local), exist_ok=True)
        try:
            download_url_to_file(path, local)
        except OSError as error:
            raise CheckpointError(f'{path} cannot be downloaded: {error}') from error
    barrier()
    return local


def read_checkpoint(path: str, map_location: Any = 'cpu') -> Any:
    """Read a checkpoint file or URL, all that is in it, without ever running code from it.

    Args:
        path: Local path or http(s) URL of a file written by :func:`torch.save`, or of a
            ``.safetensors`` file.
        map_location: See :func:`torch.load`; the latter's tensors are on the CPU.

    Raises:
        MissingCheckpointError: There is no such file.
        CheckpointError: The file is damaged, or holds more than weights and what mmengine writes
            beside them.
    """
    local = _local_path(path)
    load = _load_listed if _can_extend_list() else _load_found
    if local.endswith('.safetensors'):
        load = _load_safetensors
    try:
        return load(local, map_location)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f'{path} was refused: it is damaged, or holds objects other than weights, and loading '
            'those could run code. If you trust it, save its weights alone: '
            'torch.save(dict(state_dict=model.state_dict()), FILE).'
        ) from error
    except Exception as error:  # whatever torch stumbles over in a damaged file
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f'{path} is not a complete checkpoint file: copy or download it again ({reason}).'
        ) from error


def find_weights(content: Any, path: str) -> dict[str, Tensor]:
    """The weights in what :func:`read_checkpoint` returned.

    Bare state dicts and those under one of ``WRAPPINGS`` are recognised; where there are weights
    and their moving average under two names, the weights are taken. mmengine's ``EMAHook`` saves
    the average as the weights. The prefix ``module.`` that DataParallel leaves is taken off.

    Raises:
        CheckpointError: There are none.
    """
    for key in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise CheckpointError(f'{path} holds no state dict.')
    state = {k: v for k, v in content.items() if isinstance(v, Tensor)}
    named = {k: v for k, v in state.items() if k not in COUNTERS}
    if not named:
        raise CheckpointError(f'{path} holds no weights.')
    if all(key.startswith('module.') for key in named):
        state = {key.removeprefix('module.'): value for key, value in named.items()}
    return state


def read_state_dict(path: str) -> dict[str, Tensor]:
    """Read the weights of a checkpoint file or URL without ever running code from it.

    Args:
        path: See :func:`read_checkpoint`.

    Raises:
        MissingCheckpointError: There is no such file.
        CheckpointError: The file is damaged, holds more than weights, or holds none.
    """
    return find_weights(read_checkpoint(path), path)


def split_init_cfg(init_cfg: dict | list[dict] | None) -> tuple[list[dict], list[dict]]:
    """What of an ``init_cfg`` names checkpoints, and the rest."""
    configs = [init_cfg] if isinstance(init_cfg, dict) else init_cfg or []
    named = [c for c in configs if c['type'] in ('Pretrained', PretrainedInit)]
    return named, [c for c in configs if c not in named]


def select_prefix(state: dict[str, Tensor], prefix: str | None, path: str) -> dict[str, Tensor]:
    """The part of a state dict under ``prefix``, without it.

    Raises:
        CheckpointError: Nothing is under the prefix.
    """
    if not prefix:
        return state
    prefix = prefix.rstrip('.') + '.'
    selected = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if not selected:
        raise CheckpointError(
            f"{path} has no weights under the prefix '{prefix}'; "
            f"its first key is '{next(iter(state))}'."
        )
    return selected
