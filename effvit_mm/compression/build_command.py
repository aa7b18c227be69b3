# SPDX-License-Identifier: Apache-2.0
"""``tools/compress.py build`` and ``calibrate``: the compressed model of a config, from files."""

import argparse
import json
import os
import os.path as osp
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from torch import Tensor

from ..engine.faults import SetupError
from ..engine.launch import SettingsAction, check_data, load_config, read_config
from ..models.backbones import DGSSASwin, IntegratedDeiT
from ..models.checkpoint import read_state_dict
from .build import BuildReport, build_dgssa_swin, build_integrated_deit
from .calibration import calibrate_unprojections, token_survival
from .keys import to_timm_keys
from .sources import build_preprocessor, evaluation_pipeline, set_pipeline
from .statistics import Statistics, load_statistics, weights_fingerprint

BUILDERS = {IntegratedDeiT.__name__: build_integrated_deit, DGSSASwin.__name__: build_dgssa_swin}


def add_parsers(commands: Any) -> None:
    """Add the commands to what ``ArgumentParser.add_subparsers`` returned.

    Each sets ``run``, a function that takes the parsed arguments.
    """
    build = commands.add_parser(
        'build',
        help='make the weights of the compressed model from those of the original',
        description='Write the checkpoint that a config of MMPretrain names with `load_from`, and '
        'say of every tensor whether it is inherited, derived, new or dropped. What the config '
        'has under `compression` (original, statistics, glad_init, seed) are the defaults.',
    )
    _add_common(build)
    build.add_argument('--stats', metavar='FILE', help='what `compress.py stats` wrote')
    build.add_argument('--out', metavar='FILE.pth', help="instead of the config's load_from")
    build.add_argument('--report', metavar='FILE.json', help='also write the report as JSON')
    build.add_argument('--table', action='store_true', help='print a line for every tensor')
    build.add_argument(
        '--images',
        type=int,
        default=0,
        metavar='N',
        help='measure on N validation images how much of the tokens the aggregations let through',
    )
    build.set_defaults(run=run_build)
    study = commands.add_parser(
        'build-study',
        help='build what each variant of a study of tools/study.py starts from',
        description='Like build, for the config of each variant that has a `load_from`.',
    )
    study.add_argument('study', help='path of the study')
    study.set_defaults(run=run_build_study)
    calibrate = commands.add_parser(
        'calibrate',
        help="fit a compressed DeiT's way back to the grid, for detection and segmentation",
        description='Fit the un-projections of a compressed DeiT on training images of an '
        "MMPretrain config, and write its weights with out_type='pyramid', ready for the "
        "init_cfg (with prefix='backbone.') of a detector or segmentor.",
    )
    _add_common(calibrate)
    calibrate.add_argument('checkpoint', help='weights of the compressed classifier')
    calibrate.add_argument('--out', required=True, metavar='FILE.pth', help='checkpoint to write')
    calibrate.add_argument(
        '--images', type=int, default=1000, metavar='N', help='training images (default: 1000)'
    )
    calibrate.set_defaults(run=run_calibrate)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='MMPretrain config of the compressed classifier')
    parser.add_argument(
        '--weights',
        metavar='FILE',
        help='checkpoint of the original (of timm, its authors, MMPretrain or MMDetection; .pth or '
        '.safetensors), or timm:NAME for the pretrained weights of timm',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=SettingsAction,
        metavar='KEY=VALUE',
        help='settings of the config to override, such as model.backbone.arch.static_init=random',
    )
    parser.set_defaults(launcher='none', work_dir=None)


def read_weights(name: str) -> dict[str, Tensor]:
    """Weights of an original, see ``--weights``.

    Raises:
        SetupError: They cannot be had, and why.
    """
    if name.startswith('timm:'):
        try:
            return timm.create_model(name.removeprefix('timm:'), pretrained=True).state_dict()
        except (RuntimeError, OSError, ValueError) as error:
            raise SetupError(f'{name} cannot be had: {error}') from error
    try:
        return read_state_dict(name)
    except (OSError, ValueError) as error:
        raise SetupError(str(error)) from error


@dataclass
class Recipe:
    """What is built from what.

    Attributes:
        kind: Name of the backbone's class.
        backbone: Its other arguments.
        original: See :func:`read_weights`.
        statistics: File of statistics, or None.
        out: Checkpoint to write.
        options: ``seed``, and of a DeiT ``glad_init``.
    """

    kind: str
    backbone: dict[str, Any]
    original: str
    statistics: str | None
    out: str
    options: dict[str, Any]


def read_recipe(
    cfg: Config, weights: str | None = None, statistics: str | None = None, out: str | None = None
) -> Recipe:
    """What a config says under ``model.backbone``, ``load_from`` and ``compression``, unless the
    arguments say something else.

    Raises:
        SetupError: Something is missing, or the backbone is none of ours.
    """
    kind, backbone = backbone_config(cfg)
    options = cfg.get('compression', Config()).to_dict()
    original = weights or options.pop('original', None)
    statistics = statistics or options.pop('statistics', None)
    out = out or cfg.get('load_from')
    options = {key: value for key, value in options.items() if key in ('glad_init', 'seed')}
    if original is None:
        raise SetupError('--weights is needed: the config has no compression.original.')
    if out is None:
        raise SetupError('--out is needed: the config has no load_from.')
    return Recipe(kind, backbone, original, statistics, out, options)


def backbone_config(cfg: Config) -> tuple[str, dict[str, Any]]:
    """Type and other arguments of a config's backbone, which is one of ours.

    Raises:
        SetupError: It is not.
    """
    backbone = cfg.to_dict()['model'].get('backbone') or {}
    kind = str(backbone.pop('type', None)).split('.')[-1]
    if kind not in BUILDERS:
        raise SetupError(f'The backbone is {kind}; compressed ones are {", ".join(BUILDERS)}.')
    backbone.pop('init_cfg', None)
    return kind, backbone


def build(recipe: Recipe) -> tuple[dict[str, Tensor], BuildReport]:
    """Build and save.

    Raises:
        SetupError: It cannot be built, and why.
    """
    weights = read_weights(recipe.original)
    statistics = None
    try:
        if recipe.statistics is not None:
            statistics = load_statistics(recipe.statistics)
            check_fingerprint(statistics, weights, recipe)
        state, report = BUILDERS[recipe.kind](
            weights,
            None if statistics is None else statistics.tensors,
            **recipe.options,
            **recipe.backbone,
        )
    except (OSError, ValueError) as error:
        raise SetupError(str(error)) from error
    meta = dict(original=recipe.original, statistics=recipe.statistics, **recipe.options)
    save(recipe.out, state, meta)
    return state, report


def check_fingerprint(statistics: Statistics, weights: dict[str, Tensor], recipe: Recipe) -> None:
    """Refuse statistics of other weights.

    Raises:
        ValueError: They are.
    """
    found = weights_fingerprint(to_timm_keys(weights))
    if statistics.metadata['weights'] != found:
        raise ValueError(
            f'{recipe.statistics} was collected from {statistics.metadata["model"]} with other '
            f'weights than those of {recipe.original}.'
        )


def run_build(args: argparse.Namespace) -> None:
    """Build, save and report."""
    cfg = load_config(args)
    recipe = read_recipe(cfg, args.weights, args.stats, args.out)
    if args.images < 0:
        raise SetupError('--images must be at least 0.')
    if args.images and recipe.kind != IntegratedDeiT.__name__:
        raise SetupError(f'--images measures GLADs, and {recipe.kind} has none.')
    if args.images:
        check_data(cfg, 'val')
    state, report = build(recipe)
    if args.images:
        model = _load(recipe.kind, recipe.backbone, state)
        report.measured = token_survival(model, data_images(cfg, 'val', args.images))
    print(report.table() if args.table else report.summary())
    for line in survival_lines(report):
        print(line)
    if args.report:
        write_json(args.report, report.as_dict())
    print(f'Wrote {recipe.out}')


def run_build_study(args: argparse.Namespace) -> None:
    """Build for each variant."""
    if not osp.isfile(args.study):
        raise SetupError(f'There is no study {args.study}.')
    study = read_config(args.study).to_dict()
    for name, variant in study['variants'].items():
        options = {**study.get('options', {}), **variant}
        cfg = read_config(options.pop('config', study['config']))
        cfg.merge_from_dict(options)
        if cfg.get('load_from') is None:
            continue
        recipe = read_recipe(cfg)
        build(recipe)
        print(f'{name}: wrote {recipe.out}', flush=True)


def survival_lines(report: BuildReport) -> Iterator[str]:
    """What was measured, one line for each aggregation."""
    for layer, values in report.measured.items():
        numbers = ', '.join(f'{key} {value:.4f}' for key, value in values.items())
        yield f'before layer {layer}: {numbers}'


def data_images(cfg: Config, split: str, count: int) -> Iterator[Tensor]:
    """The first images of a data set of an MMPretrain config (of the training images a random
    sample) as its model sees them in the test, in batches."""
    loader = cfg[f'{split}_dataloader'].to_dict()
    set_pipeline(loader['dataset'], evaluation_pipeline(cfg))
    loader.update(sampler=dict(type='DefaultSampler', shuffle=split == 'train', seed=0))
    preprocessor = build_preprocessor(cfg)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        batches = Runner.build_dataloader(loader, seed=0)
    for batch in batches:
        images = preprocessor(batch)['inputs'][:count]
        yield images
        count -= len(images)
        if not count:
            return


def run_calibrate(args: argparse.Namespace) -> None:
    """Fit the un-projections and save the backbone with them."""
    cfg = load_config(args)
    if args.images < 1:
        raise SetupError('--images must be at least 1.')
    check_data(cfg, 'train')
    recipe = read_recipe(cfg, args.weights, None, args.out)
    if recipe.kind != IntegratedDeiT.__name__:
        raise SetupError(f'{recipe.kind} keeps its tokens on the grid: there is nothing to fit.')
    try:
        pyramid = IntegratedDeiT(**{**recipe.backbone, 'out_type': 'pyramid'})
        pyramid.load_pretrained(args.checkpoint, 'backbone.')
        plain = dict(pyramid.arch_settings, static_layers=(), pyramid=(), taps=pyramid.taps)
        arguments = dict(arch=plain, out_type='pyramid')
        state, _ = build_integrated_deit(read_weights(recipe.original), None, **arguments)
    except (OSError, ValueError) as error:
        raise SetupError(str(error)) from error
    original = _load(recipe.kind, arguments, state)
    images = data_images(cfg, 'train', args.images)
    for i, errors in calibrate_unprojections(pyramid, original, images).items():
        print(f'map {i}: relative error {errors["before"]:.4f} before, {errors["after"]:.4f} after')
    state = {f'backbone.{key}': value for key, value in pyramid.state_dict().items()}
    save(args.out, state, dict(original=recipe.original, compressed=args.checkpoint))
    print(f'Wrote {args.out}')


def _load(kind: str, backbone: dict[str, Any], state: dict[str, Tensor]) -> torch.nn.Module:
    model = MODELS.build(dict(type=kind, **backbone)).eval()
    prefix = 'backbone.'
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    model.load_state_dict(own)
    return model


def save(path: str, state: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a checkpoint that loads with ``weights_only=True``, whole or not at all.

    Raises:
        SetupError: It cannot be written.
    """
    partial = f'{path}.partial'
    try:
        os.makedirs(osp.dirname(osp.abspath(path)), exist_ok=True)
        torch.save(dict(meta=meta, state_dict=state), partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise SetupError(f'{path} could not be written: {error}') from error
    finally:
        if osp.exists(partial):
            os.remove(partial)


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a JSON file.

    Raises:
        SetupError: It cannot be written.
    """
    try:
        os.makedirs(osp.dirname(osp.abspath(path)), exist_ok=True)
        with open(path, 'w') as file:
            file.write(json.dumps(content, indent=1) + '\n')
    except OSError as error:
        raise SetupError(f'{path} could not be written: {error}') from error
    print(f'Wrote {path}')
