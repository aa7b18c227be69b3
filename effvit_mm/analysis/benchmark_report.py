# SPDX-License-Identifier: Apache-2.0
"""What :mod:`effvit_mm.analysis.benchmark` measured, as Markdown and as pictures."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .benchmark import MIB, growth_exponents
from .cost import lavit_score_macs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
#: of each cost: its name, its key in a model's results, a unit and its size
COSTS = (
    ('MACs', 'macs', 'G', 1e9),
    ('time', 'median', 'ms', 1e-3),
    ('memory', 'counted_memory', 'MiB', MIB),
)


def format_size(size: Sequence[int]) -> str:
    """Height and width as ``'800×1333'``, a square's as ``'224²'``."""
    height, width = size
    return f'{height}²' if height == width else f'{height}×{width}'


def describe(settings: dict[str, Any], *others: dict[str, Any]) -> str:
    """One line about what was measured; others differ from it in size."""
    compiled = {'no': 'eager', 'static': 'compiled', 'dynamic': 'compiled for any shape'}
    precision = settings['dtype'] if settings['dtype'] == 'float32' else f'{settings["dtype"]} AMP'
    return ', '.join(
        [
            'Training step (forward and backward)' if settings['training'] else 'Inference',
            'backbones' if settings['backbone'] else 'classifiers',
            f'batch {settings["batch_size"]}',
            *(format_size(each['size']) for each in (settings, *others)),
            precision,
            compiled[settings['compile']],
        ]
    )


def describe_machine(facts: dict[str, Any]) -> str:
    """One line about the machine and the versions, from :func:`machine`."""
    threads = f'{facts["threads"]} thread{"s" if facts["threads"] > 1 else ""}'
    where = f'{facts["processor"]}, {threads} on {facts["cores"]} cores'
    if 'gpu' in facts:
        where = f'{facts["gpu"]} (CUDA {facts["cuda"]}), {where}'
    versions = [f'{name} {facts[name]}' for name in ('torch', 'timm', 'mmdet') if name in facts]
    return f'{where}; {", ".join(versions)}'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ['---'] * len(header), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _spread(row: dict[str, Any]) -> str:
    low, high = row['quartiles']
    return f'{_ms(row["median"])} ({_ms(low)}–{_ms(high)})'


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}'


def comparison_table(result: Result) -> str:
    """Models side by side at one size, from :func:`compare`."""
    settings, reference = result['settings'], result['reference']
    single = settings['batch_size'] == 1
    latency = not settings['training'] and not single
    header = ['model', 'parameters (M)', 'GMACs', 'images/s', 'ms per batch']
    header += ['ms for one image'] if latency else []
    header += [f'speed against {reference}', 'peak memory (MiB)', 'counted memory (MiB)']
    rows = []
    for label, row in result['models'].items():
        low, high = row['speed_quartiles']
        speed = '1' if label == reference else f'{row["speed"]:.2f}× ({low:.2f}–{high:.2f})'
        peak = '–' if row['peak_memory'] is None else f'{row["peak_memory"] / MIB:.0f}'
        rows.append(
            [
                label,
                f'{row["params"] / 1e6:.1f}',
                f'{row["macs"] / 1e9:.2f}',
                f'{row["images_per_second"]:.1f}',
                _spread(row),
                *([_spread(row['latency'])] if latency else []),
                speed,
                peak,
                f'{row["counted_memory"] / MIB:.0f}',
            ]
        )
    return table(header, rows)


def growth_table(results: Sequence[Result]) -> str:
    """Costs at several sizes and the exponents with which they grow."""
    exponents = growth_exponents(results)
    sizes = [format_size(result['settings']['size']) for result in results]
    rows = []
    for label in exponents:
        for name, key, unit, scale in COSTS:
            values = (result['models'][label][key] / scale for result in results)
            cells = (f'{value:.{2 if value < 10 else 0}f}' for value in values)
            rows.append([label, f'{name} ({unit})', *cells, f'{exponents[label][name]:.2f}'])
    return table(['model', 'cost', *sizes, 'exponent in pixels'], rows)


def score_table(models: dict[str, nn.Module], sizes: Sequence[tuple[int, int]]) -> str:
    """LaViT's score transformation beside what it replaces, stage by stage.

    Args:
        models: LaViT backbones by label.
        sizes: Heights and widths of images in pixels.
    """
    header = ['model', 'image', 'stage', 'Θ', 'Ψ', 'X(W_qKᵀ) and keys', 'Q, K and QKᵀ']
    header += ['Θ, Ψ : X(W_qKᵀ)', 'Θ, Ψ : QKᵀ']
    rows = []
    for label, backbone in models.items():
        for size in sizes:
            for i, macs in enumerate(lavit_score_macs(backbone, *size)):
                transformed = macs.theta + macs.psi
                cells = [f'{value / 1e6:.1f}' for value in macs]
                ratios = [f'{transformed / macs.folded:.2f}', f'{transformed / macs.plain:.2f}']
                rows.append([label, format_size(size), str(i + 1), *cells, *ratios])
    return table(header, rows)


def replace_block(text: str, name: str, block: str) -> str:
    """Put a block between the two comments that bear its name.

    Args:
        text: Markdown with ``<!-- results: NAME begin -->`` and ``<!-- results: NAME end -->``.
        name: The name.
        block: What goes between them instead of what is there.

    Raises:
        ValueError: The comments are not there, once each and in this order.
    """
    begin, end = f'<!-- results: {name} begin -->', f'<!-- results: {name} end -->'
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or end not in rest:
        raise ValueError(f'There is no place for {name!r}: it lies between "{begin}" and "{end}".')
    return f'{before}{begin}\n\n{block.strip()}\n\n{end}{after}'


def _is_ours(row: dict[str, Any]) -> bool:
    return row['model'].startswith('ours:')


def draw_speed(results: Sequence[Result]) -> 'Figure':
    """Draw throughput against MACs, a panel for each result; peers are hollow.

    Args:
        results: Of :func:`compare`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 4.2), dpi=150, layout='constrained')
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for ax, result in zip(axes, results, strict=True):
        for label, row in result['models'].items():
            at = row['macs'] / 1e9, row['images_per_second']
            colour = 'C0' if _is_ours(row) else 'C1'
            ax.plot(*at, 'o', color=colour, fillstyle='full' if _is_ours(row) else 'none')
            ax.annotate(label, at, (4, 4), textcoords='offset points', fontsize=8)
        _log_axes(ax, 'GMACs of one image', 'images/s')
        ax.set_title(describe(result['settings']), fontsize=8)
    return figure


def draw_growth(results: Sequence[Result]) -> 'Figure':
    """Draw costs against pixels on logarithmic axes; the legends give the exponents.

    Args:
        results: Of :func:`compare`, the same models at several sizes.
    """
    from matplotlib.figure import Figure

    exponents = growth_exponents(results)
    pixels = [math.prod(result['settings']['size']) for result in results]
    figure = Figure(figsize=(4.6 * len(COSTS), 4.2), dpi=150, layout='constrained')
    for ax, (name, key, unit, scale) in zip(figure.subplots(1, len(COSTS)), COSTS, strict=True):
        for i, label in enumerate(exponents):
            rows = [result['models'][label] for result in results]
            line = '-' if _is_ours(rows[0]) else '--'
            text = f'{label}: {exponents[label][name]:.2f}'
            values = [row[key] / scale for row in rows]
            ax.plot(pixels, values, f'o{line}', color=f'C{i}', label=text, markersize=4)
        _log_axes(ax, 'image (pixels)', f'{name} ({unit})')
        sizes = [format_size(result['settings']['size']) for result in results]
        ax.set_xticks(pixels, sizes)
        ax.minorticks_off()
        ax.legend(fontsize=7, title='exponent', title_fontsize=7)
    figure.suptitle(describe(*(result['settings'] for result in results)), fontsize=9)
    return figure


def _log_axes(axes: Any, x: str, y: str) -> None:
    """Logarithmic axes with plain numbers, and room for labels at the right."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.margins(x=0.3, y=0.1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter('')
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
