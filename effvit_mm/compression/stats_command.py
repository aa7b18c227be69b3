# SPDX-License-Identifier: Apache-2.0
"""``tools/compress.py stats`` and ``search``: from a pretrained model to an architecture."""

import argparse
import json
import os
import os.path as osp
import sys
from typing import Any

import torch
from torch import distributed

from ..engine.faults import SetupError, check_device, check_writable
from ..engine.launch import SettingsAction
from .build_command import write_json
from .collection import Interrupted, StateFile, image_order, sum_over_images
from .costs import swin_cost_ratio
from .search import OBJECTIVES, evaluate_pyramid, search_architecture
from .sources import config_images, folder_images, load_original
from .statistics import Statistics, StatisticsSums, load_statistics, weights_fingerprint

#: what `search` chooses a pyramid by, unless told otherwise
PYRAMID_OPTIONS = dict(glads=3, eta=0.5, objective='raw', m_min=2, grid_step=1, compare=None)


def add_parsers(commands: Any) -> None:
    """Add the two commands to what ``ArgumentParser.add_subparsers`` returned.

    Each sets ``run``, a function that takes the parsed arguments.
    """
    _add_stats(commands)
    _add_search(commands)


def _add_stats(commands: Any) -> None:
    stats = commands.add_parser(
        'stats',
        help='collect statistics of a pretrained model over images',
        description='Mean attention, singular values and what else the search and the build need. '
        'An interrupted run goes on when the same command is given again.',
    )
    stats.add_argument(
        'model', help='a model of timm such as deit_small_patch16_224, or an MMPretrain config'
    )
    stats.add_argument(
        'checkpoint',
        nargs='?',
        help='its weights (of timm, the authors, MMPretrain or MMDetection); without, the '
        'pretrained ones of timm',
    )
    stats.add_argument(
        '--data',
        help='a folder of images, or an MMPretrain config; by default the config given as model',
    )
    stats.add_argument(
        '--split',
        choices=['train', 'val', 'test'],
        default='train',
        help='which data of a config (default: train); always with its test pipeline',
    )
    stats.add_argument('--out', required=True, metavar='FILE.safetensors', help='file to write')
    stats.add_argument(
        '--max-images', type=int, metavar='N', help='a sample of N images (default: all)'
    )
    stats.add_argument('--seed', type=int, default=0, help='of the sample (default: 0)')
    stats.add_argument('--batch-size', type=int, default=32, help='per process (default: 32)')
    stats.add_argument('--workers', type=int, default=2, help='loading processes (default: 2)')
    stats.add_argument(
        '--model-kwargs', nargs='+', action=SettingsAction, metavar='KEY=VALUE', help='for timm'
    )
    stats.add_argument(
        '--cfg-options',
        nargs='+',
        action=SettingsAction,
        metavar='KEY=VALUE',
        help='settings of the config to override',
    )
    stats.add_argument(
        '--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cpu, cuda, …'
    )
    stats.add_argument(
        '--launcher',
        choices=['none', 'pytorch'],
        default='none',
        help='pytorch: one of several processes that torchrun started',
    )
    stats.set_defaults(run=run_stats)


def _add_search(commands: Any) -> None:
    search = commands.add_parser(
        'search',
        help='choose where tokens are aggregated, and to how many',
        description='The pyramid that retains most of the singular values within a cost. Of a '
        'Swin, which is a pyramid already, the cost of static attention.',
    )
    search.add_argument('stats', help='what `compress.py stats` wrote')
    search.add_argument('--static', type=int, default=2, metavar='P', help='layers 1…P are static')
    search.add_argument(
        '--glads', type=int, metavar='Q', help='number of aggregations (default: 3)'
    )
    search.add_argument(
        '--eta', type=float, help="the most it may cost, of the original's blocks (default: 0.5)"
    )
    search.add_argument('--objective', choices=OBJECTIVES, help='(default: raw)')
    search.add_argument('--m-min', type=int, help='the fewest tokens (default: 2)')
    search.add_argument('--grid-step', type=int, help='only every n-th token count (default: 1)')
    search.add_argument(
        '--compare',
        nargs='+',
        metavar='LAYER:TOKENS',
        help='also what another pyramid costs and retains, such as 3:127 5:77 7:35',
    )
    search.add_argument('--out', metavar='FILE.json', help='also write the result as JSON')
    search.set_defaults(run=run_search)


def _start_process(args: argparse.Namespace) -> bool:
    """Join the other processes; whether this is the one that writes and prints."""
    if args.launcher == 'none':
        return True
    if 'RANK' not in os.environ:
        raise SetupError('--launcher pytorch is for processes that torchrun starts.')
    if args.device.startswith('cuda'):
        args.device = f'cuda:{os.environ["LOCAL_RANK"]}'
        torch.cuda.set_device(args.device)
    distributed.init_process_group('nccl' if args.device.startswith('cuda') else 'gloo')
    return distributed.get_rank() == 0


def run_stats(args: argparse.Namespace) -> None:
    """Collect and save."""
    for name in ('max_images', 'batch_size'):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise SetupError(f'--{name.replace("_", "-")} must be at least 1.')
    data = args.data or (args.model if args.model.endswith('.py') else None)
    if data is None:
        raise SetupError('--data is needed: a folder of images, or an MMPretrain config.')
    check_device(args.device)
    check_writable(osp.dirname(osp.abspath(args.out)))
    writes = _start_process(args)
    try:
        _collect(args, data, writes)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _collect(args: argparse.Namespace, data: str, writes: bool) -> None:
    original = load_original(args.model, args.checkpoint, args.model_kwargs, args.cfg_options)
    try:
        sums = StatisticsSums(original.model.to(args.device))
    except ValueError as error:
        raise SetupError(str(error)) from error
    if data.endswith('.py'):
        images = config_images(data, args.split, original, args.cfg_options)
    else:
        images = folder_images(data, original)
    state = StateFile(
        f'{args.out}.unfinished',
        dict(
            weights=weights_fingerprint(original.model.state_dict()),
            data=images.name,
            number_of_images=len(images),
            seed=args.seed,
            image_size=list(images.size),
        ),
    )
    order = image_order(len(images), args.max_images, args.seed)
    try:
        sum_over_images(
            sums, images, order, original.normalise, state, args.batch_size, args.workers
        )
        if not writes:
            return
        stats = sums.finish(model=original.name, dataset=images.name, seed=args.seed)
        stats.save(args.out)
        state.remove()
    except Interrupted as stop:
        if writes:
            print(
                f'\nInterrupted after {stop.done} of {stop.total} images, which are kept in '
                f'{state.path}: the same command goes on from there, and with --max-images '
                f'{stop.done} it finishes at once.',
                file=sys.stderr,
            )
        sys.exit(130)
    except OSError as error:
        kept = f'; {state.path} has what was saved last' if osp.exists(state.path) else ''
        raise SetupError(
            f'{args.out} could not be written: {error}{kept}. Make room, or choose another --out, '
            'and give the command again.'
        ) from error
    except ValueError as error:
        raise SetupError(str(error)) from error
    print(_summary(stats))
    print(f'Wrote {args.out}')


def _summary(stats: Statistics) -> str:
    """How alike images are and how much of the singular values a quarter of them holds."""
    lines = ['| layer | difference between images | first quarter of singular values |']
    lines.append('|---|---|---|')
    for layer, (difference, sigma) in enumerate(
        zip(stats.layers('difference'), stats.layers('singular_values'), strict=True)
    ):
        share = sigma[: len(sigma) // 4].sum() / sigma.sum()
        lines.append(f'| {layer} | {difference.mean():.3f} | {share:.1%} |')
    return '\n'.join(lines)


def read_statistics(path: str) -> Statistics:
    """Statistics from a file.

    Raises:
        SetupError: It is not there, damaged, or something else.
    """
    try:
        return load_statistics(path)
    except (OSError, ValueError) as error:
        raise SetupError(str(error)) from error


def parse_pyramid(pairs: list[str]) -> list[tuple[int, int]]:
    """Pairs such as ``3:127``.

    Raises:
        SetupError: They are something else.
    """
    try:
        return [(int(layer), int(m)) for layer, m in (pair.split(':') for pair in pairs)]
    except ValueError as error:
        raise SetupError(
            f'A pyramid is written as pairs of layer and tokens such as 3:127, not {pairs}.'
        ) from error


def run_search(args: argparse.Namespace) -> None:
    """Search, print and save."""
    stats = read_statistics(args.stats)
    meta = stats.metadata
    if meta['kind'] == 'swin':
        _search_swin(args, meta)
        return
    for name, default in PYRAMID_OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    sigma, dim, ratio = stats.singular_values(), meta['dims'][0], meta['mlp_ratio']
    try:
        found = search_architecture(
            sigma,
            dim,
            args.static,
            args.glads,
            args.eta,
            args.objective,
            args.m_min,
            args.grid_step,
            ratio,
        )
        other = None
        if args.compare:
            pyramid = parse_pyramid(args.compare)
            other = evaluate_pyramid(sigma, dim, args.static, pyramid, args.objective, ratio)
    except ValueError as error:
        raise SetupError(str(error)) from error
    print(found.table())
    if other is not None:
        print(
            f'compared: {" ".join(args.compare)} costs {other.cost_ratio:.1%} and retains', end=''
        )
        print(f' {other.retained:.1%}, {other.metric / found.metric - 1:+.2%} of the found one')
    _print_and_write(found.as_dict(), args.out)


def _print_and_write(result: dict[str, Any], path: str | None) -> None:
    print(json.dumps(result, indent=1))
    if path:
        write_json(path, result)


def _search_swin(args: argparse.Namespace, meta: dict[str, Any]) -> None:
    """There is nothing to search in a Swin: say what its static layers save."""
    useless = [name for name in PYRAMID_OPTIONS if getattr(args, name) is not None]
    if useless:
        options = ', '.join(f'--{name.replace("_", "-")}' for name in useless)
        raise SetupError(f'A Swin is a pyramid already: {options} can choose nothing of it.')
    ratio = _swin_cost_ratio(meta, args.static)
    print(
        f'A Swin is a pyramid already: with static attention in blocks 1…{args.static} its blocks '
        f'and patch mergings cost {ratio:.1%} of the original, {1 - ratio:.1%} less.'
    )
    arch = dict(static_layers=list(range(1, args.static + 1)))
    _print_and_write(dict(arch=arch, cost_ratio=ratio), args.out)


def _swin_cost_ratio(meta: dict[str, Any], num_static: int) -> float:
    dims = sorted(set(meta['dims']))
    depths = [meta['dims'].count(dim) for dim in dims]
    window = round(meta['tokens'][0] ** 0.5)
    try:
        return swin_cost_ratio(
            dims[0], depths, num_static, window, meta['image_size'][0], meta['mlp_ratio']
        )
    except ValueError as error:
        raise SetupError(str(error)) from error
