# SPDX-License-Identifier: Apache-2.0
"""Projects that use this one: the example in the repository, with effvit_mm as it is installed from
its wheel."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / 'examples' / 'downstream'
FEW = ['--num-train', '4', '--num-val', '2']
FEW += ['--num-classification-train', '20', '--num-classification-val', '10']


def run(python, *args, cwd, path=None):
    """Output of a command that must succeed; ``path`` is put on PYTHONPATH."""
    env = {'PATH': '/usr/bin:/bin', 'HOME': str(cwd), 'OMP_NUM_THREADS': '1'}
    env |= {'PYTHONPATH': str(path)} if path else {}
    done = subprocess.run(
        [str(a) for a in (python, *args)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A folder elsewhere with a few digits."""
    folder = tmp_path_factory.mktemp('elsewhere')
    run(sys.executable, ROOT / 'tools' / 'prepare_digits.py', *FEW, cwd=folder)
    return folder


def test_a_project_of_its_own_trains_its_backbone(project):
    pytest.importorskip('mmdet')
    run(
        sys.executable,
        ROOT / 'tools' / 'train.py',
        EXAMPLE / 'configs' / 'mask_rcnn_coord_partialformer_digits.py',
        '--work-dir',
        project / 'run',
        '--cfg-options',
        *('train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2'),
        'default_hooks.checkpoint.interval=2',
        cwd=project,
        path=EXAMPLE,
    )
    import torch

    state = torch.load(project / 'run' / 'iter_2.pth', weights_only=False)['state_dict']
    assert state['backbone.stages.0.patch_embed.proj.weight'].shape[1] == 5


def test_a_config_that_is_not_there_is_named():
    import effvit_mm

    with pytest.raises(FileNotFoundError, match='effvit_mm has no config mask_rcnn_b9.py'):
        effvit_mm.config_path('mask_rcnn_b9.py')


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel, and of this one everything but effvit_mm."""
    folder = tmp_path_factory.mktemp('environment')
    venv.create(folder, with_pip=False)
    python = folder / 'bin' / 'python'
    site = run(
        python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))', cwd=folder
    ).strip()
    # .pth files of a folder that is added like this, such as an editable install's, are not read
    Path(site, 'others.pth').write_text(sysconfig.get_path('purelib') + '\n')
    command = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--quiet']
    subprocess.run([*command, '--target', site, wheel.filename], check=True)
    return python


def test_a_wheel_trains_its_configs_from_another_folder(installed, project):
    pytest.importorskip('mmpretrain')
    where = run(installed, '-c', 'import effvit_mm; print(effvit_mm.__file__)', cwd=project)
    assert installed.parents[1] in Path(where.strip()).parents
    mim = Path(where.strip()).parent / '.mim'
    config = run(
        installed,
        '-c',
        'import effvit_mm as e; print(e.config_path("classifier_lavit_digits.py"))',
        cwd=project,
    ).strip()
    assert Path(config).parent == mim / 'configs'
    run(
        installed,
        mim / 'tools' / 'train.py',
        config,
        '--work-dir',
        project / 'from_wheel',
        '--cfg-options',
        *('train_cfg.max_epochs=1', 'train_dataloader.batch_size=10'),
        'model.backbone.arch.depths=(1,1,2,1)',
        cwd=project,
    )
    assert (project / 'from_wheel' / 'epoch_1.pth').is_file()
