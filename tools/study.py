# SPDX-License-Identifier: Apache-2.0
"""Train variants of a config, each with several seeds, and tabulate what they reach.

A study is a Python file with

  config    path of the config that all variants start from
  metric    name of the metric in the log, such as 'accuracy/top1'; its last value counts
  seeds     random seeds, the same for all variants
  options   settings that all variants share, as --cfg-options of tools/train.py (may be left out)
  variants  name -> settings of the variant; 'config' among them is another config to start from
  measures  name -> 'module:function', called with the trained model and its config (may be left
            out); returns a number

Names that begin with an underscore are the study's own.

Every run trains in a process of its own, with a folder of its own under the work dir. Runs that
are finished are not repeated, so an interrupted study goes on where it stopped; results of other
settings are refused. At the end, results.json and results.md lie in the work dir.

Example:

  study.py configs/studies/lavit_digits.py
"""

import argparse
import importlib
import json
import os
import os.path as osp
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# so that a plain clone works; an installed effvit_mm comes first
sys.path.append(osp.dirname(osp.dirname(osp.abspath(__file__))))

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope

from effvit_mm.engine.faults import SetupError, check_writable, run_or_explain
from effvit_mm.engine.launch import build_model, check_data, import_framework, read_config

TRAIN = osp.join(osp.dirname(osp.abspath(__file__)), 'train.py')
FIELDS = ('config', 'metric', 'seeds', 'options', 'variants', 'measures')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('study', help='path of the study')
    parser.add_argument('--work-dir', help='default: work_dirs/studies/<study name>')
    parser.add_argument('--only', nargs='+', metavar='VARIANT', help='run only these variants')
    parser.add_argument('--seeds', nargs='+', type=int, help="instead of the study's")
    return parser.parse_args(argv)


def load_study(path: str) -> dict[str, Any]:
    """Read a study and fill in what may be left out.

    Raises:
        SetupError: There is no such file, or a field is missing or unknown.
    """
    if not osp.isfile(path):
        raise SetupError(f'There is no study {path}.')
    study = read_config(path).to_dict()
    study = {field: value for field, value in study.items() if not field.startswith('_')}
    unknown = [field for field in study if field not in FIELDS]
    if unknown:
        raise SetupError(f'{path}: there is no field {unknown[0]!r}; there are {FIELDS}.')
    study = {'options': {}, 'measures': {}, **study}
    missing = [field for field in FIELDS if field not in study]
    if missing:
        raise SetupError(f'{path} lacks the field {missing[0]!r}.')
    return study


def make_config(study: dict[str, Any], variant: str, seed: int) -> Config:
    """The config of one run.

    Raises:
        SetupError: Its config is not there.
    """
    options = dict(study['variants'][variant])
    path = options.pop('config', study['config'])
    if not osp.isfile(path):
        raise SetupError(f'There is no config {path}, which {variant!r} starts from.')
    cfg = read_config(path)
    cfg.merge_from_dict({**study['options'], **options, 'randomness': dict(seed=seed)})
    return cfg


def folder_name(variant: str, seed: int) -> str:
    """Of a run; a variant may be called ``foreground 1/4``."""
    return f'{variant}_seed{seed}'.replace(os.sep, '-')


def read_log(folder: Path, metric: str) -> dict[str, float]:
    """The last value of the metric, and the median seconds of a training step.

    Raises:
        SetupError: The metric is not in the log.
    """
    logs = sorted(folder.glob('*/vis_data/scalars.json'), key=osp.getmtime)
    lines = [json.loads(line) for line in logs[-1].read_text().splitlines()] if logs else []
    values = [line[metric] for line in lines if metric in line]
    if not values:
        known = sorted({key for line in lines for key in line})
        raise SetupError(f'{folder} has no {metric!r} in its log; there are {", ".join(known)}.')
    # the first steps warm up caches
    steps = [line['time'] for line in lines if 'lr' in line][1:]
    return dict(metric=values[-1], step=statistics.median(steps) if steps else float('nan'))


def measure(study: dict[str, Any], config: Path) -> dict[str, float]:
    """What the study measures on the trained model of one run."""
    if not study['measures']:
        return {}
    cfg = Config.fromfile(config)
    import_framework(cfg.default_scope)
    init_default_scope(cfg.default_scope)
    model = build_model(cfg, (config.parent / 'last_checkpoint').read_text())
    results = {}
    for name, target in study['measures'].items():
        module, _, function = target.partition(':')
        results[name] = getattr(importlib.import_module(module), function)(model, cfg)
    return results


def run(study: dict[str, Any], variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one variant with one seed, unless that has been done; returns its results.

    Raises:
        SetupError: The training failed, its data are not there, or there is a result of other
            settings.
    """
    results, config, settings = (folder / f for f in ('result.json', 'config.py', 'settings.txt'))
    cfg = make_config(study, variant, seed)
    text = cfg.pretty_text  # the Runner writes a config.py of its own
    if results.is_file():
        if settings.is_file() and settings.read_text() != text:
            raise SetupError(
                f'{folder} has the result of other settings of {variant!r}: remove it, or choose '
                'another --work-dir.'
            )
        result = json.loads(results.read_text())
        if not result.keys() >= study['measures'].keys():
            result.update(measure(study, config))
            results.write_text(json.dumps(result))
        return result
    check_data(cfg, 'train', 'val')
    folder.mkdir(parents=True, exist_ok=True)
    settings.write_text(text)
    cfg.work_dir = str(folder)
    cfg.dump(config)
    command = [sys.executable, TRAIN, str(config)]
    start = time.monotonic()
    with open(folder / 'train.log', 'w') as log:
        status = subprocess.run(
            [*command, '--work-dir', str(folder)], stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if status:
        raise SetupError(f'Training {variant!r} with seed {seed} failed: see {log.name}.')
    result = dict(
        variant=variant,
        seed=seed,
        **read_log(folder, study['metric']),
        minutes=(time.monotonic() - start) / 60,
        **measure(study, config),
    )
    results.write_text(json.dumps(result))
    return result


def tabulate(study: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row per variant: mean, all seeds' values, time of a step, measures."""
    names = list(study['measures'])
    rows = [
        f'| variant | {study["metric"]} (mean) | per seed | step (ms) | '
        + ''.join(f'{name} | ' for name in names),
        '|---' * (4 + len(names)) + '|',
    ]
    for variant in study['variants']:
        runs = [result for result in results if result['variant'] == variant]
        if not runs:
            continue
        values = [result['metric'] for result in runs]
        step = statistics.median(result['step'] for result in runs) * 1e3
        cells = [
            variant,
            f'{statistics.fmean(values):.2f}',
            ', '.join(f'{value:.2f}' for value in values),
            f'{step:.0f}',
            *(f'{statistics.fmean(result[name] for result in runs):.3f}' for name in names),
        ]
        rows.append(f'| {" | ".join(cells)} |')
    return '\n'.join(row.rstrip() for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is left of the study, seed by seed, and print the table."""
    args = parse_args(argv)
    study = load_study(args.study)
    name = osp.splitext(osp.basename(args.study))[0]
    work_dir = Path(args.work_dir or osp.join('work_dirs', 'studies', name))
    unknown = [variant for variant in args.only or () if variant not in study['variants']]
    if unknown:
        known = ', '.join(study['variants'])
        raise SetupError(f'{args.study} has no variant {unknown[0]!r}; there are {known}.')
    variants = args.only or list(study['variants'])
    check_writable(str(work_dir))
    results = []
    for seed in args.seeds or study['seeds']:
        for variant in variants:
            result = run(study, variant, seed, work_dir / folder_name(variant, seed))
            print(
                f'{variant}, seed {seed}: {study["metric"]} {result["metric"]:.2f}, '
                f'{result["minutes"]:.1f} minutes',
                flush=True,
            )
            results.append(result)
    table = tabulate(study, results)
    (work_dir / 'results.json').write_text(json.dumps(results, indent=1))
    (work_dir / 'results.md').write_text(f'{table}\n')
    print(
        f'\n{name}: {torch.get_num_threads()} threads of {os.cpu_count()} cores, '
        f'torch {torch.__version__}\n\n{table}\n\nWrote {work_dir}/results.md'
    )


if __name__ == '__main__':
    run_or_explain(main)
