# SPDX-License-Identifier: Apache-2.0
"""Compare models' parameters, MACs, speed and memory, taking turns in one process.

  benchmark.py ours:PartialFormer/b3 timm:swin_tiny_patch4_window7_224
  benchmark.py ours:LaViT/small mmdet:PyramidVisionTransformerV2/b2 \\
      --backbone --size 800x1333 --batch-size 1 --mode inference training
  benchmark.py ours:LaViT/small timm:pvt_v2_b2 --size 224 448 896 --batch-size 1
  benchmark.py --suite vs_peers_224 growth --minutes 60 --write docs/benchmarks.md

Models: ours:FAMILY/ARCH, timm:NAME, mmdet:TYPE/ARCH (also mmseg:, mmpretrain:), or a config, whose
backbone is taken; with constructor arguments as in 'ours:LaViT/small(diagonality_loss=None)'.
Several sizes give a table of how costs grow with pixels.

A suite is a file in configs/benchmarks (by name) or anywhere (by path) with tables: name -> the
settings models (label -> model), reference, sizes, batch_size, backbone, modes, and kind, which is
'speed', or 'scores' for LaViT's score transformation. --write puts each table into a Markdown file,
between <!-- results: NAME begin --> and <!-- results: NAME end -->.
"""

import argparse
import json
import os.path as osp
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

import torch
from tqdm import tqdm

from effvit_mm.analysis import benchmark_report as report
from effvit_mm.analysis.benchmark import DTYPES, Settings, compare, machine
from effvit_mm.analysis.networks import build_network, parse_model
from effvit_mm.engine.faults import SetupError, check_writable, run_or_explain
from effvit_mm.engine.launch import read_config
from effvit_mm.models.backbones import LaViT

SUITES = Path(osp.abspath(__file__)).parents[1] / 'configs' / 'benchmarks'
MODES = ('inference', 'training')
Size = tuple[int, int]


@dataclass
class Table:
    """One table: which models, at which sizes, doing what. Fields as in a suite."""

    models: dict[str, str]
    reference: str | None = None
    sizes: Sequence[Size] = ((224, 224),)
    batch_size: int = 16
    backbone: bool = False
    modes: Sequence[str] = ('inference',)
    kind: str = 'speed'
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict, init=False)

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is.

        Raises:
            SetupError: Says what.
        """
        for text in self.models.values():
            parse_model(text)
        if not self.models:
            raise SetupError('Name at least one model, or a suite.')
        if self.reference is not None and self.reference not in self.models:
            known = ', '.join(self.models)
            raise SetupError(f'The reference {self.reference!r} is none of the models: {known}.')
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or self.kind not in ('speed', 'scores'):
            raise SetupError(
                f'There is no {unknown[0] if unknown else self.kind!r}: modes are inference, '
                'training; kinds are speed, scores.'
            )
        for size in self.sizes:
            Settings(tuple(size), self.batch_size).check()
        if self.kind == 'speed' and len({h * w for h, w in self.sizes}) < len(self.sizes):
            raise SetupError('Growth with pixels needs sizes of different numbers of pixels.')

    def measurements(self) -> int:
        """How many times models are timed: what the time is shared among."""
        passes = {'inference': 2 if self.batch_size > 1 else 1, 'training': 1}
        per_size = sum(passes[mode] for mode in self.modes)
        return per_size * len(self.sizes) * len(self.models) if self.kind == 'speed' else 0


def parse_size(text: str) -> Size:
    """``'224'`` or ``'800x1333'`` as height and width."""
    match = re.fullmatch(r'(\d+)(?:[x×](\d+))?', text)
    if match is None:
        raise argparse.ArgumentTypeError(f'{text!r} is no size such as 224 or 800x1333')
    return int(match[1]), int(match[2] or match[1])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('models', nargs='*', metavar='MODEL')
    what = parser.add_argument_group('what is measured (a suite says this itself)')
    what.add_argument('--backbone', action='store_true', help='all feature maps, no classifier')
    what.add_argument('--size', nargs='+', type=parse_size, metavar='N|HxW', help='default: 224')
    what.add_argument('--batch-size', type=int, help='default: 16')
    what.add_argument('--mode', nargs='+', choices=MODES, help='default: inference')
    what.add_argument('--reference', metavar='MODEL', help='of the ratios; default: the last model')
    suite = parser.add_argument_group('suites')
    suite.add_argument('--suite', nargs='+', help='files, or their names in configs/benchmarks')
    suite.add_argument('--only', nargs='+', metavar='TABLE', help='only these of its tables')
    suite.add_argument('--write', metavar='FILE', help='Markdown whose tables are replaced')
    how = parser.add_argument_group('how it is measured')
    how.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    how.add_argument('--dtype', choices=list(DTYPES), default='float32', help='by autocast')
    how.add_argument(
        '--compile',
        nargs='?',
        choices=['no', 'static', 'dynamic'],
        default='no',
        const='static',
        help='torch.compile, for the shapes at hand or for all',
    )
    how.add_argument('--threads', type=int, help='CPU threads; default: all cores')
    how.add_argument('--rounds', type=int, default=25, help='at most; there are at least 3')
    how.add_argument(
        '--seconds', type=float, default=30, help='for each model and measurement; default: 30'
    )
    how.add_argument('--minutes', type=float, help='for everything, instead of --seconds')
    how.add_argument('--no-memory', action='store_true', help='do not measure peak memory')
    parser.add_argument('--out-dir', help='for JSON, Markdown and plots; suites: work_dirs/…')
    return parser.parse_args(argv)


def load_suite(name: str) -> dict[str, Table]:
    """The tables of a suite.

    Raises:
        SetupError: There is no such suite, or a table has fields that tables do not have.
    """
    path = Path(name) if name.endswith('.py') else SUITES / f'{name}.py'
    if not path.is_file():
        known = ', '.join(sorted(file.stem for file in SUITES.glob('*.py')))
        raise SetupError(f'There is no suite {name}; there are {known}, or give a path.')
    described = read_config(str(path)).to_dict().get('tables', {})
    if not described:
        raise SetupError(f'The suite {name} has no tables.')
    tables = {}
    for key, fields in described.items():
        try:
            tables[key] = Table(**fields)
        except TypeError as error:
            raise SetupError(f'{name}, {key}: {str(error).removeprefix("Table.")}.') from error
    return tables


def load_suites(names: Sequence[str], only: Sequence[str] | None) -> dict[str, tuple[str, Table]]:
    """The tables of suites, or only some of them, each with the suite that it is in.

    Raises:
        SetupError: There is no such suite or table, or two have the same name.
    """
    tables: dict[str, tuple[str, Table]] = {}
    for suite in names:
        for key, table in load_suite(suite).items():
            if key in tables:
                raise SetupError(f'The suites {tables[key][0]} and {suite} both have {key}.')
            tables[key] = suite, table
    for key in only or ():
        if key not in tables:
            raise SetupError(
                f'--suite {" ".join(names)} has no table {key!r}; there are {", ".join(tables)}.'
            )
    return {key: tables[key] for key in only or tables}


def ad_hoc_table(args: argparse.Namespace) -> Table:
    """The table that the command line describes, labels being the models' names."""
    given = dict(
        reference=args.reference,
        sizes=args.size,
        batch_size=args.batch_size,
        modes=args.mode,
        backbone=args.backbone,
    )
    models = {text: text for text in args.models}
    return Table(models, **{key: value for key, value in given.items() if value is not None})


class Clock:
    """Shares the time among the measurements that are left.

    Args:
        args: The command line: ``seconds`` for each, or ``minutes`` for all.
        measurements: How many there are.
    """

    def __init__(self, args: argparse.Namespace, measurements: int) -> None:
        self.seconds = args.seconds
        self.deadline = None if args.minutes is None else time.monotonic() + args.minutes * 60
        self.left = measurements

    def share(self, measurements: int) -> float:
        """Seconds for each of the next measurements, which are then no longer left.

        Building models, counting and measuring memory take their time before it is shared.
        """
        share = self.seconds
        if self.deadline is not None:
            share = max(0.0, self.deadline - time.monotonic()) / max(1, self.left)
        self.left -= measurements
        return share


class Bar:
    """A progress bar on stderr, one for each thing that is done."""

    def __init__(self, name: str) -> None:
        self.name, self.what, self.bar = name, '', None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bar is None or self.what != what:
            self.close()
            text = f'{self.name}: {what}' if self.name else what
            self.what, self.bar = what, tqdm(desc=text, total=total, leave=False, disable=None)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def measure(name: str, table: Table, args: argparse.Namespace, clock: Clock) -> None:
    """Fill in a table's results: a list over sizes for each mode."""
    for mode in table.modes if table.kind == 'speed' else ():
        table.results[mode] = []
        for size in table.sizes:
            settings = Settings(
                tuple(size),
                table.batch_size,
                table.backbone,
                mode == 'training',
                args.device,
                args.dtype,
                args.compile,
            )
            part = table.measurements() // (len(table.modes) * len(table.sizes))
            bar = Bar(name)
            result = compare(
                table.models,
                settings,
                table.reference,
                lambda part=part: clock.share(part),
                args.rounds,
                not args.no_memory and len(table.sizes) == 1,  # growth has counted memory
                bar,
            )
            bar.close()
            table.results[mode].append(result)


def render(table: Table) -> str:
    """A table's results as Markdown."""
    if table.kind == 'scores':
        networks = {
            label: build_network(text, (224, 224), backbone=True).backbone
            for label, text in table.models.items()
        }
        wrong = [k for k, v in networks.items() if not isinstance(v, LaViT)]
        if wrong:
            raise SetupError(f'{wrong[0]} is no LaViT: it has no scores that are transformed.')
        title = 'Millions of MACs of one layer for one image, by formula:'
        return f'{title}\n\n{report.score_table(networks, table.sizes)}'
    parts = []
    for results in table.results.values():
        title = report.describe(*(result['settings'] for result in results))
        rounds = sorted({count for result in results for count in result['rounds']})
        rounds = '–'.join(str(count) for count in dict.fromkeys((rounds[0], rounds[-1])))
        if len(results) > 1:
            body = report.growth_table(results)
        else:
            body = report.comparison_table(results[0])
        parts.append(f'{title}, {rounds} rounds:\n\n{body}')
    return '\n\n'.join(parts)


def save(folder: Path, name: str, table: Table, facts: dict[str, Any], block: str) -> None:
    """Write a table's JSON, Markdown and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    record = dict(name=name, machine=facts, results=table.results)
    (folder / f'{name}.json').write_text(json.dumps(record, indent=1))
    (folder / f'{name}.md').write_text(f'{block}\n')
    for mode, results in table.results.items():
        draw = report.draw_growth if len(results) > 1 else report.draw_speed
        draw(results).savefig(folder / f'{name}_{mode}.png')


def command_of(argv: Sequence[str], suite: str | None, table: str) -> str:
    """The command that makes a single table again, without where its results go."""
    words, left = [], list(argv)
    while left:
        word = left.pop(0)
        option, _, value = word.partition('=')
        if option in ('--write', '--out-dir'):
            del left[: 0 if value else 1]
        elif option in ('--only', '--suite'):
            while left and not left[0].startswith('-'):
                left.pop(0)
        else:
            words.append(word)
    begin, end = ([], []) if suite is None else (['--suite', suite], ['--only', table])
    return shlex.join(['python', 'tools/benchmark.py', *begin, *words, *end])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure table after table; print each, and write it where it was asked for."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse_args(argv)
    if bool(args.models) == bool(args.suite):
        raise SetupError('Name models, or a --suite (one of the two).')
    if not args.suite and (args.write or args.only):
        raise SetupError('--write and --only need a --suite.')
    if args.suite and (
        args.size or args.batch_size or args.mode or args.reference or args.backbone
    ):
        raise SetupError('A suite says itself at which sizes, batches and modes it measures.')
    if args.rounds < 3:
        raise SetupError('Quartiles need at least 3 rounds.')
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.suite:
        tables = load_suites(args.suite, args.only)
    else:
        tables = {'benchmark': (None, ad_hoc_table(args))}
    out_dirs = {suite: args.out_dir or default_folder(suite) for suite, _ in tables.values()}
    folders = sorted({folder for folder in out_dirs.values() if folder})
    for folder in folders:
        check_writable(folder)  # now rather than after an hour
    for name, (_, table) in tables.items():
        table.check()
        if args.write:
            write(args.write, name, None)
        for text in table.models.values():  # now rather than after an hour
            build_network(text, tuple(table.sizes[0]), table.backbone)
    clock = Clock(args, sum(table.measurements() for _, table in tables.values()))
    for name, (suite, table) in tables.items():
        measure(name if suite else '', table, args, clock)
        facts = machine(args.device)
        facts['command'] = command_of(argv, suite, name)
        parts = [f'```bash\n{facts["command"]}\n```']
        if table.kind == 'speed':  # formulas do not depend on the machine
            parts.append(f'{report.describe_machine(facts)}.')
        block = '\n\n'.join([*parts, render(table)])
        print(f'\n{block}', flush=True)
        if out_dirs[suite]:
            save(Path(out_dirs[suite]), name, table, facts, block)
        if args.write:
            write(args.write, name, block)
    for folder in folders:
        print(f'\nWrote {folder}')


def default_folder(suite: str | None) -> str | None:
    """Where the results of a suite go if nothing else is said."""
    if suite is None:
        return None
    return osp.join('work_dirs', 'benchmarks', osp.splitext(osp.basename(suite))[0])


def write(path: str, name: str, block: str | None) -> None:
    """Replace a table in a Markdown file; None only looks whether it has a place there.

    Raises:
        SetupError: There is no such file, or no place in it.
    """
    if not osp.isfile(path):
        raise SetupError(f'There is no {path} to write into.')
    text = Path(path).read_text(encoding='utf-8')
    try:
        replaced = report.replace_block(text, name, block or '')
    except ValueError as error:
        raise SetupError(f'{path}: {error}') from error
    if block is not None:
        Path(path).write_text(replaced, encoding='utf-8')


if __name__ == '__main__':
    run_or_explain(main)
