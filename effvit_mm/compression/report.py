# SPDX-License-Identifier: Apache-2.0
"""Figures of a compression: what the statistics show, what the search chose, what GLADs gather.

Every ``draw_*`` function returns a matplotlib figure: ``figure.savefig(path)`` writes it, without a
display. matplotlib is imported only when something is drawn.
"""

import argparse
import json
import math
import os
import os.path as osp
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.faults import SetupError
from ..models.checkpoint import read_state_dict
from .statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATIC, DYNAMIC, ACCENT = '#e8871e', '#3b6ea5', '#b03a48'


def add_parsers(commands: Any) -> None:
    """Add the command to what ``ArgumentParser.add_subparsers`` returned; it sets ``run``."""
    report = commands.add_parser('report', help='draw statistics, pyramid, and what GLADs gather')
    report.add_argument('stats', help='what `compress.py stats` wrote')
    report.add_argument('--search', metavar='FILE.json', help='what `compress.py search` wrote')
    report.add_argument('--checkpoint', help='of the compressed model, for its GLADs')
    report.add_argument('--out-dir', required=True, help='where pictures go')
    report.set_defaults(run=run_report)


def _figure(width: float, height: float) -> 'Figure':
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout='constrained')


def draw_difference(stats: Statistics, static_layers: Sequence[int] = ()) -> 'Figure':
    """How much the attention of a layer differs between images: heads as dots, their mean as bars.

    Args:
        stats: Statistics.
        static_layers: Layers to be highlighted.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _figure(7, 3.6)
    axes = figure.subplots()
    for layer, heads in enumerate(stats.layers('difference')):
        colour = STATIC if layer in static_layers else DYNAMIC
        axes.bar(layer, heads.mean().item(), color=colour, alpha=0.75, width=0.7)
        axes.plot([layer] * len(heads), heads.tolist(), 'o', color='black', ms=2.5, alpha=0.6)
    for colour, kind in ((STATIC, 'static'), (DYNAMIC, 'dynamic')):
        if static_layers:
            axes.bar(0, 0, color=colour, alpha=0.75, label=kind)
    axes.plot([], [], 'o', color='black', ms=2.5, alpha=0.6, label='one head')
    axes.legend(frameon=False, fontsize=8, ncols=3, loc='lower right', bbox_to_anchor=(1, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel='layer', ylabel='difference, 0: all alike', ylim=(0, 1))
    axes.set_title('attention between images', fontsize=10, loc='left')
    axes.spines[['top', 'right']].set_visible(False)
    return figure


def draw_singular_values(stats: Statistics) -> 'Figure':
    """The share of each layer's singular values that the first ``m`` hold."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure = _figure(7, 4.2)
    axes = figure.subplots()
    colours = ScalarMappable(Normalize(0, max(1, stats.depth - 1)), colormaps['viridis'])
    for layer, sigma in enumerate(stats.layers('singular_values')):
        share = torch.cat((sigma.new_zeros(1), sigma.cumsum(0) / sigma.sum()))
        axes.plot(range(len(share)), share.tolist(), color=colours.to_rgba(layer), lw=1.4)
    figure.colorbar(colours, ax=axes, label='layer')
    axes.set(xlabel='singular values, the largest first', ylabel='share of their sum')
    axes.set(ylim=(0, 1.02), xlim=(0, None))
    axes.set_title('rank of the attention', fontsize=10, loc='left')
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    return figure


def draw_pyramid(found: Mapping[str, Any]) -> 'Figure':
    """Tokens of each layer and the GLADs between them.

    Args:
        found: :meth:`SearchResult.as_dict`.
    """
    tokens, arch = found['tokens'], found['arch']
    figure = _figure(7, 3.6)
    axes = figure.subplots()
    static = set(arch['static_layers'])
    for layer, m in enumerate(tokens):
        axes.bar(layer, m, width=0.8, color=STATIC if layer in static else DYNAMIC)
        axes.text(layer, m, f'{m}', ha='center', va='bottom', fontsize=8)
    for layer, _ in arch['pyramid']:
        axes.axvline(layer - 0.5, color=ACCENT, lw=1.5, ls='--')
    for colour, kind in ((STATIC, 'static'), (DYNAMIC, 'dynamic')):
        axes.bar(0, 0, color=colour, label=kind)
    axes.plot([], [], color=ACCENT, ls='--', label='GLAD')
    axes.legend(frameon=False, fontsize=8, ncols=3, loc='lower right', bbox_to_anchor=(1, 1))
    axes.set(xlabel='layer', ylabel='tokens', xticks=range(len(tokens)))
    axes.set_ylim(0, 1.12 * max(tokens))
    title = f'{found["cost_ratio"]:.1%} of the cost, {found["retained"]:.1%} of the singular values'
    axes.set_title(f'{title} ({found["objective"]})', fontsize=10, loc='left')
    axes.spines[['top', 'right']].set_visible(False)
    return figure


def draw_attention(stats: Statistics, layers: Sequence[int]) -> 'Figure':
    """The mean attention of each head, from which static matrices start; rows are queries.

    Colours are logarithmic, from a hundredth of a uniform attention on.
    """
    from matplotlib.colors import LogNorm

    means = [stats.tensors[f'attention_mean.{layer}'] for layer in layers]
    columns = max(len(mean) for mean in means)
    figure = _figure(1.7 * columns + 1.2, 1.8 * len(layers) + 0.5)
    grid = figure.subplots(len(layers), columns, squeeze=False)
    low = 0.01 / max(mean.shape[1] for mean in means)
    shades = LogNorm(low, max(mean.max().item() for mean in means))
    for layer, mean, row in zip(layers, means, grid, strict=True):
        for head, axes in enumerate(row):
            axes.set(xticks=[], yticks=[])
            if head >= len(mean):
                axes.set_axis_off()
                continue
            picture = axes.imshow(mean[head].clamp(min=low), norm=shades, cmap='magma')
            if layer == layers[0]:
                axes.set_title(f'head {head}', fontsize=9)
        row[0].set_ylabel(f'layer {layer}', fontsize=9)
    figure.colorbar(picture, ax=grid, label='mean attention', fraction=0.04)
    return figure


def glad_sources(state: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """How much each original token feeds each token of each GLAD, norms and layers between left
    out: ``|W_k … W_1|``, ``(m, n)`` by layer.

    Raises:
        ValueError: There is no GLAD in the state dict.
    """
    weights = {}
    for name, value in state.items():
        parts = name.removeprefix('backbone.').split('.')
        if len(parts) == 3 and parts[0] == 'aggregations' and parts[2] == 'weight':
            weights[int(parts[1])] = value
    if not weights:
        raise ValueError('The checkpoint has no GLAD.')
    sources, product = {}, None
    for layer in sorted(weights):
        weight = weights[layer].double()
        product = weight if product is None else weight @ product
        sources[layer] = product.abs()
    return sources


def draw_sources(sources: Mapping[int, Tensor], tokens: int = 10) -> 'Figure':
    """Which patches feed the first tokens of each GLAD, the class token being the first.

    Args:
        sources: From :func:`glad_sources`, of a square grid of patches.
        tokens: How many tokens are shown.
    """
    columns = min(tokens, max(len(value) for value in sources.values()))
    figure = _figure(1.2 * columns + 0.6, 1.35 * len(sources) + 0.3)
    grid = figure.subplots(len(sources), columns, squeeze=False)
    for (layer, value), row in zip(sources.items(), grid, strict=True):
        side = math.isqrt(value.shape[1] - 1)
        patches = value[:, 1:].unflatten(1, (side, side))
        for token, axes in enumerate(row):
            axes.set(xticks=[], yticks=[])
            if token >= len(patches):
                axes.set_axis_off()
                continue
            high = max(patches[token].max().item(), 1e-12)
            axes.imshow(patches[token], cmap='magma', vmin=0, vmax=high)
            alone = value[token, 0] > 1e3 * patches[token].max()
            name = (
                'class token' + (',\nonly itself' if alone else '')
                if token == 0
                else f'token {token}'
            )
            axes.set_title(name, fontsize=7)
        row[0].set_ylabel(f'GLAD before {layer}\n{len(patches)} tokens', fontsize=7)
    return figure


def _figures(args: argparse.Namespace, stats: Statistics) -> Iterator[tuple[str, 'Figure']]:
    found, static = None, ()
    if args.search:
        try:
            with open(args.search) as file:
                found = json.load(file)
            static = found['arch']['static_layers']
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SetupError(f'{args.search} is no result of a search: {error}') from error
        if len(found['tokens']) != stats.depth:
            raise SetupError(f'{args.search} is of another model than {args.stats}.')
    yield 'difference.png', draw_difference(stats, static)
    yield 'singular_values.png', draw_singular_values(stats)
    layers = static or range(1, min(3, stats.depth))
    if layers:
        yield 'attention.png', draw_attention(stats, layers)
    if found:
        yield 'pyramid.png', draw_pyramid(found)
    if args.checkpoint:
        try:
            sources = glad_sources(read_state_dict(args.checkpoint))
        except (OSError, ValueError) as error:
            raise SetupError(f'{args.checkpoint}: {error}') from error
        yield 'glad_sources.png', draw_sources(sources)


def run_report(args: argparse.Namespace) -> None:
    """Draw, and say where the pictures are."""
    from .stats_command import read_statistics

    stats = read_statistics(args.stats)
    for name, figure in _figures(args, stats):
        path = osp.join(args.out_dir, name)
        try:
            os.makedirs(args.out_dir, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise SetupError(f'{path} could not be written: {error}') from error
        print(f'Wrote {path}')
