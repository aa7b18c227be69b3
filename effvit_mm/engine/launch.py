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
import pickle
import sys
from collections.abc import Callable, Iterator

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS, RUNNERS
from mmengine.runner import Runner, load_checkpoint
from torch import nn

FRAMEWORKS = {'mmdet': 'MMDetection', 'mmseg': 'MMSegmentation', 'mmpretrain': 'MMPretrain'}

DATA_SOURCES = {
    'CocoDataset': 'download the 2017 images and annotations from https://cocodataset.org and '
    'unpack them there as train2017/, val2017/ and annotations/',
    'ImageNet': 'put the ILSVRC 2012 images from https://image-net.org there as one folder per '
    'class in train/ and val/',
    'ADE20KDataset': 'unpack ADEChallengeData2016.zip from '
    'https://sceneparsing.csail.mit.edu there, with images/ and annotations/',
}


class SetupError(Exception):
    """Something to be set right before a run can start; the tools print it without a traceback."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that training and testing share, named as in the frameworks' own tools."""
    parser.add_argument(
        '--work-dir', help='where logs and checkpoints go; default: work_dirs/<config name>'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
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


def run_or_explain(main: Callable[[], None]) -> None:
    """Call ``main``; a :class:`SetupError` ends the process with its sentence."""
    try:
        main()
    except SetupError as error:
        sys.exit(f'error: {error}')


def load_config(args: argparse.Namespace) -> Config:
    """Read the config, merge the common arguments into it, and import its framework.

    Raises:
        SetupError: No such config, or its framework is not installed or not one of the three.
    """
    if not osp.isfile(args.config):
        raise SetupError(f'There is no config {args.config}.')
    try:
        cfg = Config.fromfile(args.config)
    except ModuleNotFoundError as error:
        missing = [scope for scope in FRAMEWORKS if scope in str(error)]
        if not missing:
            raise
        raise SetupError(_not_installed(missing[0])) from error
    cfg.launcher = args.launcher
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = osp.join('work_dirs', osp.splitext(osp.basename(args.config))[0])
    scope = cfg.get('default_scope')
    import_framework(scope)
    if scope == 'mmdet':
        check_operators()
    elif scope == 'mmpretrain':
        _set_mmpretrain_loader_defaults(cfg)
    if args.launcher != 'none' and not torch.cuda.is_available():
        _distribute_on_cpu(cfg)
    return cfg


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
    if checkpoint is not None and '://' not in checkpoint and not osp.isfile(checkpoint):
        raise SetupError(f'There is no checkpoint {checkpoint}.')
    model_cfg = copy.deepcopy(cfg.model)
    if (
        cfg.get('data_preprocessor') is not None
    ):  # beside the model, as MMPretrain's configs have it
        model_cfg.setdefault('data_preprocessor', cfg.data_preprocessor)
    try:
        model = MODELS.build(model_cfg)
        if checkpoint is None:
            model.init_weights()
    except FileNotFoundError as error:  # weights that the config names
        raise SetupError(str(error)) from error
    if checkpoint is None:
        return model.to(device).eval()
    try:
        load_checkpoint(model, checkpoint, map_location='cpu', strict=True)
    except (pickle.UnpicklingError, EOFError, UnicodeDecodeError) as error:
        raise SetupError(f'{checkpoint} is not a complete checkpoint file.') from error
    except RuntimeError as error:
        reason = ' '.join(str(error).split())[:200] + ' …'
        raise SetupError(f'{checkpoint} does not fit the config: {reason}') from error
    return model.to(device).eval()


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
        'pip install "effvit_mm[onedl]"'
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
        name = f'{"onedl-" if onedl else ""}mmcv=={mmcv.__version__}'
        raise SetupError(
            "A GPU is there, but mmcv's operators were compiled for the CPU only: get operators "
            f'with CUDA by `pip install {"onedl-mim" if onedl else "openmim"} && mim install '
            f'{name}` (prebuilt), or with nvcc by `MMCV_WITH_OPS=1 FORCE_CUDA=1 pip install '
            f'--no-build-isolation --no-cache-dir --no-deps --force-reinstall {name}`, or hide the '
            'GPU with CUDA_VISIBLE_DEVICES=-1.'
        )


def _is_distributed_as(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _datasets(dataset: dict) -> Iterator[dict]:
    """The datasets that hold data, below RepeatDataset, ConcatDataset and the like."""
    if 'dataset' in dataset:
        yield from _datasets(dataset['dataset'])
    for inner in dataset.get('datasets', []):
        yield from _datasets(inner)
    if 'dataset' not in dataset and 'datasets' not in dataset:
        yield dataset


def _expected_paths(dataset: dict) -> Iterator[str]:
    """Files and folders that a dataset of a config will read."""
    root = dataset.get('data_root') or ''
    prefixes = dataset.get('data_prefix') or dataset.get('split') or ''
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
        datasets = list(_datasets(loader['dataset'])) if 'dataset' in loader else []
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
    kind = str(dataset.get('type', '')).split('.')[-1]
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
