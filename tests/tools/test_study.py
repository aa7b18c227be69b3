# SPDX-License-Identifier: Apache-2.0
"""tools/study.py: every variant is trained with every seed, once, and tabulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / 'configs' / 'studies').glob('*.py'))


def run_study(*args, cwd):
    command = [sys.executable, ROOT / 'tools' / 'study.py', *map(str, args)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a few digits and a study of two steps on them."""
    pytest.importorskip('mmpretrain')
    root = tmp_path_factory.mktemp('study')
    counts = ['--num-train', '2', '--num-val', '2']
    counts += ['--num-classification-train', '20', '--num-classification-val', '10']
    prepare = [sys.executable, ROOT / 'tools' / 'prepare_digits.py', *counts]
    subprocess.run(prepare, cwd=root, check=True)
    (root / 'study.py').write_text(f"""
config = {str(ROOT / 'configs' / 'classifier_lavit_digits.py')!r}
metric = 'accuracy/top1'
seeds = (0, 1)
options = {{
    'train_cfg.max_epochs': 1,
    'train_dataloader.batch_size': 10,
    'default_hooks.logger.interval': 1,
    'model.backbone.arch.depths': (1, 1, 2, 1),
}}
variants = {{
    'less': {{}},
    'vanilla, no loss': {{
        'model.backbone.arch.vanilla_layers': (1, 1, 2, 1),
        'model.backbone.diagonality_loss': None,
    }},
}}
measures = {{'saturation': 'effvit_mm.analysis.attention:saturation'}}
""")
    return root


def test_variants_and_seeds_are_trained_once_and_tabulated(folder):
    status, output = run_study('study.py', '--seeds', 0, cwd=folder)
    assert status == 0, output
    work_dir = folder / 'work_dirs' / 'studies' / 'study'
    runs = sorted(path.parent.name for path in work_dir.glob('*/result.json'))
    assert runs == ['less_seed0', 'vanilla, no loss_seed0']
    cfg = Config.fromfile(work_dir / 'vanilla, no loss_seed0' / 'config.py')
    assert cfg.randomness.seed == 0 and cfg.model.backbone.diagonality_loss is None
    assert cfg.model.backbone.arch.vanilla_layers == (1, 1, 2, 1)

    before = {path: path.stat().st_mtime_ns for path in work_dir.glob('*/result.json')}
    status, output = run_study('study.py', '--only', 'less', cwd=folder)
    assert status == 0, output
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    results = json.loads((work_dir / 'results.json').read_text())
    assert [(r['variant'], r['seed']) for r in results] == [('less', 0), ('less', 1)]
    assert all(0 <= r['metric'] <= 100 and r['step'] > 0 for r in results)
    assert all(0 < r['saturation'] <= 1 for r in results)
    header, _, row = (work_dir / 'results.md').read_text().splitlines()
    assert header == '| variant | accuracy/top1 (mean) | per seed | step (ms) | saturation |'
    assert row.startswith('| less |') and row.count('|') == header.count('|')

    # what is measured in addition is measured on the runs that there are
    more = (folder / 'study.py').read_text() + "measures['twice'] = measures['saturation']\n"
    (folder / 'more.py').write_text(more)
    place = ('--work-dir', work_dir, '--only', 'less', '--seeds', 0)
    status, output = run_study('more.py', *place, cwd=folder)
    assert status == 0, output
    assert json.loads((work_dir / 'less_seed0' / 'result.json').read_text())['twice'] > 0
    # results of other settings are refused, and stay
    (folder / 'more.py').write_text(more + "options['train_cfg.max_epochs'] = 2\n")
    status, output = run_study('more.py', *place, cwd=folder)
    assert status == 1 and "has the result of other settings of 'less'" in output


@pytest.mark.parametrize(
    ('change', 'args', 'sentence'),
    [
        ('', ['--only', 'none'], "study.py has no variant 'none'; there are less"),
        ('extra = 1', [], "there is no field 'extra'"),
        ("config = 'none.py'", ['--seeds', 5], 'There is no config none.py'),
        ("metric = 'none'", ['--only', 'less', '--seeds', 6], "has no 'none' in its log"),
    ],
)
def test_mistakes_are_said_in_a_sentence(folder, change, args, sentence):
    (folder / 'wrong').mkdir(exist_ok=True)
    text = (folder / 'study.py').read_text()
    (folder / 'wrong' / 'study.py').write_text(f'{text}\n{change}\n')
    status, output = run_study('wrong/study.py', *args, '--work-dir', 'wrong', cwd=folder)
    assert status == 1 and 'Traceback' not in output, output
    (error,) = [line for line in output.splitlines() if line.startswith('error: ')]
    assert sentence in error


@pytest.mark.parametrize('path', STUDIES, ids=[path.stem for path in STUDIES])
def test_the_studies_name_configs_and_settings_that_exist(path):
    study = Config.fromfile(path).to_dict()
    for variant in study['variants'].values():
        options = dict(variant)
        cfg = Config.fromfile(ROOT / options.pop('config', study['config']))
        for key in {**study.get('options', {}), **options}:
            *parents, last = key.split('.')
            part = cfg
            for name in parents:
                if isinstance(part, list):
                    part = dict(zip(map(str, range(len(part))), part, strict=True))
                assert name in part, key
                part = part[name]


def test_a_variant_whose_name_has_a_slash_has_one_folder(load_tool):
    assert load_tool('study').folder_name('foreground 1/4', 0) == 'foreground 1-4_seed0'
