# SPDX-License-Identifier: Apache-2.0
"""``tools/dist_train.sh`` when one of its processes is killed, and the run that goes on from what
is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contract.frameworks import need
from mmengine.registry import DefaultScope

from effvit_mm.engine.launch import build_model

from .conftest import ROOT
from .digits import GLOBAL_BATCH, Case, make_config

#: seconds: PyTorch's launcher gives the processes that are left 30 to end by themselves
BOUND = 60


def environment(**more):
    """For a run of a tool with this Python, on the CPU."""
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    more |= dict(PATH=path, CUDA_VISIBLE_DEVICES='-1', OMP_NUM_THREADS='1')
    return {**os.environ, **more}


def process_of_rank(rank, mark):
    """Id of the process that trains as this rank, among those with ``mark`` in the environment."""
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            variables = (folder / 'environ').read_bytes().split(b'\0')
        except OSError:  # ended, or another user's
            continue
        if f'RANK={rank}'.encode() in variables and f'TEST_MARK={mark}'.encode() in variables:
            return int(folder.name)
    raise AssertionError(f'there is no process of rank {rank}')


def wait_for(condition, process, seconds):
    """Wait until something holds while a process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, 'the run ended'
        assert time.monotonic() < end, 'not within the time'
        time.sleep(0.1)


@pytest.fixture(scope='module')
def killed(digits_root, tmp_path_factory):
    """A run of two processes without an end, of which one is killed after a checkpoint."""
    need('mmseg')
    folder = tmp_path_factory.mktemp('killed')
    hook = dict(type='CheckpointHook', by_epoch=False, interval=4, max_keep_ckpts=2)
    settings = {'train_cfg.max_iters': 10**6, 'default_hooks.checkpoint': hook}
    settings |= {'log_level': 'INFO', 'optim_wrapper.optimizer.lr': 1e-3}
    with DefaultScope.overwrite_default_scope('mmseg'):
        cfg = make_config(Case('LaViT', 'mmseg', hook=True, settings=settings), 1, str(folder))
    config, work_dir = folder / 'config.py', folder / 'run'
    cfg.dump(config)
    mark, log = str(uuid.uuid4()), folder / 'log'
    command = [ROOT / 'tools/dist_train.sh', config, '2', '--work-dir', work_dir, '--cfg-options']
    command.append(f'train_dataloader.batch_size={GLOBAL_BATCH // 2}')
    with log.open('w') as stream:
        process = subprocess.Popen(
            command,
            cwd=digits_root,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(TEST_MARK=mark),
        )
        try:
            wait_for((work_dir / 'last_checkpoint').exists, process, 120)
            os.kill(process_of_rank(1, mark), signal.SIGKILL)
            start = time.monotonic()
            status = process.wait(BOUND)
            seconds = time.monotonic() - start
        finally:
            process.kill()
    time.sleep(0.5)
    remaining = [p for p in Path('/proc').glob('[0-9]*') if mark.encode() in read_environment(p)]
    return SimpleNamespace(
        cfg=cfg,
        config=config,
        work_dir=work_dir,
        status=status,
        seconds=seconds,
        output=log.read_text(),
        remaining=remaining,
    )


def read_environment(folder):
    """Of a process in /proc; empty if it has ended."""
    try:
        return (folder / 'environ').read_bytes()
    except OSError:
        return b''


def last_checkpoint(work_dir):
    """What mmengine would resume."""
    return Path((work_dir / 'last_checkpoint').read_text().strip())


def test_when_a_process_is_killed_the_job_ends_soon_and_says_why(killed):
    assert killed.status != 0
    assert killed.seconds < BOUND
    assert not killed.remaining
    assert re.search(r'rank\s*:\s*1 ', killed.output)
    assert 'Signal 9 (SIGKILL)' in killed.output
    (error,) = [line for line in killed.output.splitlines() if line.startswith('error: ')]
    assert 'a training process failed' in error and '--resume' in error


def test_the_last_checkpoint_of_a_killed_job_fits_the_model(killed):
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = build_model(killed.cfg, str(last_checkpoint(killed.work_dir)))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_a_killed_job_is_resumed_by_two_processes_or_by_one_to_the_same_weights(
    killed, digits_root, tmp_path
):
    """One process takes the images of both."""
    saved = torch.load(last_checkpoint(killed.work_dir), weights_only=False)
    end = saved['meta']['iter'] + 6
    results = []
    for processes in (2, 1):
        work_dir = tmp_path / str(processes)
        shutil.copytree(killed.work_dir, work_dir)
        path = work_dir / last_checkpoint(killed.work_dir).name
        (work_dir / 'last_checkpoint').write_text(str(path))
        options = [
            f'train_cfg.max_iters={end}',
            f'train_dataloader.batch_size={GLOBAL_BATCH // processes}',
        ]
        command = [ROOT / 'tools/dist_train.sh', killed.config, str(processes), '--resume']
        command += ['--work-dir', work_dir, '--cfg-options', *options]
        run = subprocess.run(
            command, cwd=digits_root, capture_output=True, text=True, env=environment()
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert f'iter: {saved["meta"]["iter"]}' in run.stdout + run.stderr
        results.append(torch.load(last_checkpoint(work_dir), weights_only=False))
    two, one = results
    assert two['meta']['iter'] == one['meta']['iter'] == end
    moved = max(
        float((two['state_dict'][name] - value).abs().max())
        for name, value in saved['state_dict'].items()
    )
    for name, value in two['state_dict'].items():
        assert (value - one['state_dict'][name]).abs().max() < 1e-3 * moved, name
