# SPDX-License-Identifier: Apache-2.0
"""What ``tools/train.py`` and ``tools/test.py`` do before they hand over to mmengine's Runner.

The frameworks' own tools differ in a few lines each; here the config's ``default_scope`` chooses
them. What a user can get wrong before a run is checked here and said in one sentence
(:class:`SetupError`); ``import effvit_mm`` does not import this module.
"""

import argparse
import copy
import importlib
import importlib.metadata
import os
import os.path as osp
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.model import is_model_wrapper
from mmengine.registry import MODELS, RUNNERS
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor, nn

from ..models.backbones import PyramidBackbone
from ..models.checkpoint import CheckpointError, find_weights, read_checkpoint, read_state_dict
from .faults import SetupError

FRAMEWORKS = {'mmdet': 'MMDetection', 'mmseg': 'MMSegmentation', 'mmpretrain': 'MMPretrain'}

DATA_SOURCES = {
    'CocoDataset': 'download the 2017 images and annotations from https://cocodataset.org and '
    'unpack them there as train2017/, val2017/ and annotations/',
    'ImageNet': 'put the ILSVRC 2012 images from https://image-net.org there as one folder per '
    'class in train/ and val/',
    'ADE20KDataset': 'unpack ADEChallengeData2016.zip from '
    'https://sceneparsing.csail.mit.edu there, with images/ and annotations/',
}

#: datasets of MMPretrain that fetch what is not there
DOWNLOADED = ('CIFAR10', 'CIFAR100', 'FashionMNIST', 'MNIST')


class SettingsAction(DictAction):
    """mmengine's ``KEY=VALUE`` pairs; what is none is an error of the command line."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *args: Any
    ) -> None:
        for value in values:
            if not value.partition('=')[1]:
                raise argparse.ArgumentError(self, f'{value!r} is not of the form KEY=VALUE')
        super().__call__(parser, namespace, values, *args)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that training and testing share, named as in the frameworks' own tools."""
    parser.add_argument(
        '--work-dir', help='where logs and checkpoints go; default: work_dirs/<config name>'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=SettingsAction,
        metavar='KEY=VALUE',
        help='settings of the config to override, such as train_dataloader.batch_size=4 '
        "or key='[a,b]' for lists",
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='what started the processes of a distributed run',
    )
    # which of the two spellings the launcher of torch passes depends on its version
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and tell mmengine the local rank."""
    args = parser.parse_args()
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def load_config(args: argparse.Namespace) -> Config:
    """Read the config, merge the common arguments into it, and import its framework.

    Raises:
        SetupError: No such config, it cannot be read, or its framework is not installed or not one
            of the three.
    """
    cfg = read_config(args.config)
    cfg.launcher = args.launcher
    if args.cfg_options is not None:
        try:
            cfg.merge_from_dict(args.cfg_options)
        except (KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
            raise SetupError(f'--cfg-options does not fit {args.config}: {error}') from error
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = osp.join('work_dirs', osp.splitext(osp.basename(args.config))[0])
    scope = cfg.get('default_scope')
    import_framework(scope)
    if 'model' not in cfg:
        raise SetupError(f'{args.config} has no model: it is a part for the _base_ of configs.')
    if scope == 'mmdet':
        check_operators()
    elif scope == 'mmpretrain':
        _set_mmpretrain_loader_defaults(cfg)
    if args.launcher != 'none' and not torch.cuda.is_available():
        _distribute_on_cpu(cfg)
    return cfg


def read_config(path: str) -> Config:
    """A config as its file has it.

    Raises:
        SetupError: There is no such file, it is no config, or what it imports is not installed.
    """
    if not osp.isfile(path):
        raise SetupError(f'There is no config {path}.')
    try:
        return Config.fromfile(path)
    except ImportError as error:
        root: BaseException = error
        while root.__cause__ or root.__context__:
            root = root.__cause__ or root.__context__
        if not isinstance(root, ModuleNotFoundError):
            raise  # something is wrong in the imported module
        missing = [scope for scope in FRAMEWORKS if scope in str(root)]
        if missing:
            raise SetupError(_not_installed(missing[0])) from error
        raise SetupError(
            f'{path} imports {root.name}, which is not installed: install it, or put the folder '
            'that has it into PYTHONPATH.'
        ) from error
    except Exception as error:  # a config is a program
        frames = traceback.walk_tb(error.__traceback__)
        if any('importlib._bootstrap' in frame.f_code.co_filename for frame, _ in frames):
            raise  # something is wrong in an imported module
        if isinstance(error, FileNotFoundError) and error.filename:
            raise SetupError(
                f'The _base_ of {path} names {error.filename}, which is not there.'
            ) from error
        reason = ' '.join(str(error).split())
        raise SetupError(f'{path} is no config: {type(error).__name__}: {reason}') from error


def build_runner(cfg: Config) -> Runner:
    """mmengine's Runner, or the one the config names with ``runner_type``."""
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def build_model(cfg: Config, checkpoint: str | None, device: str = 'cpu') -> nn.Module:
    """The config's model with the checkpoint's weights, in eval mode; without a Runner.

    Without a checkpoint the weights are initialised as the config says. The default scope must be
    the config's.

    Raises:
        SetupError: There is no such checkpoint, it is damaged, or it is of another model; or the
            config names weights that are not there.
    """
    try:
        state = None if checkpoint is None else read_state_dict(checkpoint)
        model_cfg = copy.deepcopy(cfg.model)
        if (
            cfg.get('data_preprocessor') is not None
        ):  # beside the model, as MMPretrain's configs have it
            model_cfg.setdefault('data_preprocessor', cfg.data_preprocessor)
        model = MODELS.build(model_cfg)
        if state is None:
            model.init_weights()
        else:
            load_all(model, state, checkpoint, surplus=False)
    except (FileNotFoundError, CheckpointError) as error:
        raise SetupError(str(error)) from error
    return model.to(device).eval()


def load_all(model: nn.Module, state: dict[str, Tensor], path: str, surplus: bool = True) -> None:
    """Load a checkpoint that must have all of a model's weights.

    Args:
        model: The model.
        state: The weights.
        path: What to call them.
        surplus: Whether weights that the model lacks are allowed.

    Raises:
        CheckpointError: It is of another model.
    """
    known = model.state_dict().keys() & state.keys()
    try:
        missing, extra = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        found = re.search(
            r'size mismatch for (\S+): .*?Size\((.*?)\) from .*?Size\((.*?)\)',
            str(error),
            re.DOTALL,
        )
        if found is None:
            raise
        raise CheckpointError(
            f'{path} does not fit the config: {found[1]} is {found[2]} in the checkpoint and '
            f'{found[3]} in the model.'
        ) from error
    missing = [key for key in missing if 'num_batches_tracked' not in key]
    if not known and len(extra) == len(state):
        backbone = getattr(model, 'backbone', nn.Identity())
        bare = not backbone.state_dict().keys().isdisjoint(state)
        hint = (
            "; these are the weights of a backbone alone, which go into the config's "
            "model.backbone.init_cfg=dict(type='Pretrained', checkpoint=…)"
            if bare
            else ''
        )
        raise CheckpointError(
            f'{path} does not fit the config: none of its weights is one of the model, the first '
            f'is {extra[0]}{hint}.'
        )
    if missing:
        raise CheckpointError(
            f'{path} does not fit the config: it lacks {missing[0]} and {len(missing) - 1} more.'
        )
    if extra and not surplus:
        raise CheckpointError(
            f'{path} does not fit the config: it also has {extra[0]} and {len(extra) - 1} more.'
        )


def check_weights(
    runner: Runner, path: str | None, resume: bool = False, test: bool = False
) -> None:
    """Refuse, before a run, weights that mmengine would pass over with a warning.

    To be tested or resumed, a model must have all its weights in the checkpoint. A training that
    starts from others needs those of the backbone; a head of another size is a new one.

    Args:
        runner: The Runner, its model built. Where its model is built later, as FlexibleRunner does,
            only the file is checked.
        path: What ``load_from`` or ``--resume`` says; None: nothing is loaded.
        resume: Whether the run goes on from there.
        test: Whether the model is to be tested.

    Raises:
        CheckpointError: The checkpoint cannot be read or does not fit.
        SetupError: It has no state to resume from.
    """
    if path is None or ('://' in path and not path.startswith('http')) or osp.isdir(path):
        return  # other backends, and the folders of sharded checkpoints, are mmengine's
    content = read_checkpoint(path)
    state = find_weights(content, path)
    lacking = [key for key in ('meta', 'message_hub', 'optimizer') if key not in content]
    if resume and lacking:
        raise SetupError(
            f'{path} has weights but no {lacking[0]}, so that a run cannot go on from it: resume '
            'from an epoch_*.pth or iter_*.pth of the run, or start a new run with --cfg-options '
            f'load_from={path}.'
        )
    model = runner.model
    if not isinstance(model, nn.Module):
        return
    while is_model_wrapper(model):
        model = model.module
    if test or resume:
        load_all(model, state, path)
        return
    backbone = getattr(model, 'backbone', None)
    prefix = 'backbone.'
    part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if part and isinstance(backbone, PyramidBackbone):
        own = copy.deepcopy(backbone)
        if part.keys() & own.state_dict().keys():
            part = {
                **{k: v for k, v in own.state_dict().items() if re.match(own.may_lack, k)},
                **part,
            }
        load_all(own, part, path)
        own.refuse_surplus(part, path)
    elif not state.keys() & model.state_dict().keys():
        load_all(model, state, path)


def latest_checkpoint(cfg: Config) -> str | None:
    """What ``--resume`` without a file goes on from, None: nothing yet.

    Raises:
        SetupError: It is no longer there.
    """
    path = find_latest_checkpoint(cfg.work_dir)
    if path and not osp.exists(path):
        raise SetupError(
            f'last_checkpoint in {cfg.work_dir} names {path}, which is not there: give the '
            'checkpoint with --resume CHECKPOINT.'
        )
    return path


def drop_teacher(cfg: Config) -> None:
    """Let a distilled model be built without its teacher, which predictions do not need and whose
    weights may not be there."""
    if cfg.model.get('teacher') is not None:
        cfg.model.update(teacher=None, teacher_checkpoint=None)


def import_framework(scope: str | None) -> None:
    """Import the framework of a scope and register its modules.

    Raises:
        SetupError: The framework or the mmcv below it is not installed.
    """
    if scope not in FRAMEWORKS:
        raise SetupError(
            f'The config has default_scope={scope!r}; it must be one of {", ".join(FRAMEWORKS)}.'
        )
    try:
        utils = importlib.import_module(f'{scope}.utils')
        # the Runner switches the default scope itself
        utils.register_all_modules(init_default_scope=False)
    except ModuleNotFoundError as error:
        missing = (error.name or '').split('.')[0]
        if error.name == 'mmcv._ext':
            raise SetupError(
                'The installed mmcv has no compiled operators, which MMDetection needs: '
                '"Installation" in the README says how to compile them.'
            ) from error
        if missing in (scope, 'mmcv'):
            raise SetupError(_not_installed(scope)) from error
        raise
    if scope == 'mmdet':
        utils.setup_cache_size_limit_of_dynamo()


def _not_installed(scope: str) -> str:
    return (
        f'The config needs {FRAMEWORKS[scope]} ({scope} and mmcv), which is not installed: '
        'follow "Installation" in the README of effvit_mm.'
    )


def check_operators() -> None:
    """Refuse a detector on a GPU whose mmcv has operators for the CPU only.

    Raises:
        SetupError: Says how to get operators with CUDA.
    """
    import mmcv
    from mmcv.ops import get_compiling_cuda_version

    if torch.cuda.is_available() and get_compiling_cuda_version() == 'not available':
        onedl = _is_distributed_as('onedl-mmcv')
        name = 'onedl-mmcv' if onedl else 'mmcv'
        pinned = f'{name}=={mmcv.__version__}'
        raise SetupError(
            "A GPU is there, but mmcv's operators were compiled for the CPU only: get operators "
            f'with CUDA by `pip uninstall --yes {name} && pip install '
            f'{"onedl-mim" if onedl else "openmim"} && mim install {pinned}` (prebuilt), or with '
            'nvcc by `MMCV_WITH_OPS=1 FORCE_CUDA=1 pip install --no-build-isolation '
            f'--no-cache-dir --no-deps --force-reinstall {pinned}`, or hide the GPU with '
            'CUDA_VISIBLE_DEVICES=-1.'
        )


def _is_distributed_as(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def datasets_in(dataset: dict) -> Iterator[dict]:
    """The datasets that hold data, below RepeatDataset, ConcatDataset and the like."""
    if 'dataset' in dataset:
        yield from datasets_in(dataset['dataset'])
    for inner in dataset.get('datasets', []):
        yield from datasets_in(inner)
    if 'dataset' not in dataset and 'datasets' not in dataset:
        yield dataset


def _kind(dataset: dict) -> str:
    return str(dataset.get('type', '')).split('.')[-1]


def _expected_paths(dataset: dict) -> Iterator[str]:
    """Files and folders that a dataset of a config will read."""
    if _kind(dataset) in DOWNLOADED and dataset.get('download', True):
        return
    root = dataset.get('data_root') or ''
    prefixes = dataset.get('data_prefix') or ''
    if not prefixes and _kind(dataset) in ('ImageNet', 'ImageNet21k'):
        prefixes = dataset.get('split') or ''  # of others it is a list of samples in a file
    prefixes = prefixes.values() if isinstance(prefixes, dict) else [prefixes]
    for path in [dataset.get('ann_file') or '', *prefixes]:
        if path or root:
            yield osp.join(root, path)


def check_data(cfg: Config, *splits: str) -> None:
    """Refuse to start when a data set or an evaluator's annotation file is not there.

    Args:
        cfg: The config.
        *splits: Whose dataloader and evaluator are looked at: ``'train'``, ``'val'``, ``'test'``.

    Raises:
        SetupError: Names the first missing path and says where the data come from.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        evaluators = cfg.get(f'{split}_evaluator') or []
        datasets = list(datasets_in(loader['dataset'])) if 'dataset' in loader else []
        for dataset in datasets:
            for path in _expected_paths(dataset):
                _check_path(path, dataset, f'{split}_dataloader')
        for evaluator in [evaluators] if isinstance(evaluators, dict) else evaluators:
            if evaluator.get('ann_file') and datasets:
                _check_path(evaluator['ann_file'], datasets[0], f'{split}_evaluator')


def _check_path(path: str, dataset: dict, where: str) -> None:
    if '://' in path or osp.exists(path):
        return
    root = dataset.get('data_root') or '.'
    kind = _kind(dataset)
    if 'digits' in path.split('/'):
        advice = 'run `python tools/prepare_digits.py`'
    elif kind in DATA_SOURCES:
        advice = f'the data are expected in {root}: {DATA_SOURCES[kind]}'
    else:
        advice = f'set the data_root of the {kind}'
    raise SetupError(
        f'{where} needs {path}, which is not there; {advice}, or give your own paths with '
        '--cfg-options.'
    )


def check_checkpoints(cfg: Config) -> None:
    """Refuse to start when a checkpoint that the config names is not there.

    Raises:
        SetupError: Names the first missing one and says where it comes from.
    """
    compressed = 'compression' in cfg
    advice = {
        'load_from': '`python tools/compress.py build` writes it' if compressed else '',
        'teacher_checkpoint': 'train the teacher first',
    }
    paths = dict(load_from=cfg.get('load_from'))
    paths['teacher_checkpoint'] = cfg.model.get('teacher_checkpoint')
    for name, path in paths.items():
        if path and '://' not in path and not osp.isfile(path):
            hint = f'; {advice[name]} (docs/compression.md)' if advice[name] else ''
            raise SetupError(f'{name} of the config is {path}, which is not there{hint}.')


def _set_mmpretrain_loader_defaults(cfg: Config) -> None:
    """Dataloader settings that MMPretrain's tools, not its configs, give."""
    for split in ('train', 'val', 'test'):
        loader = cfg.get(f'{split}_dataloader')
        if loader is not None:
            loader.setdefault('pin_memory', True)
            loader.setdefault('persistent_workers', loader.get('num_workers', 0) > 0)
            loader.setdefault('collate_fn', dict(type='default_collate'))


def _distribute_on_cpu(cfg: Config) -> None:
    """Distributed runs without a GPU: the gloo backend, and no device for DDP to move to."""
    if cfg.launcher != 'pytorch':
        raise SetupError(f'Without a GPU, --launcher {cfg.launcher} does not work; use pytorch.')
    cfg.merge_from_dict({'env_cfg.dist_cfg.backend': 'gloo'})
    cfg.setdefault(
        'model_wrapper_cfg',
        dict(
            type='MMDistributedDataParallel',
            device_ids=None,
            broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False),
        ),
    )
    # mmengine would select a CUDA device first; it leaves an initialised group alone
    torch.distributed.init_process_group('gloo')
