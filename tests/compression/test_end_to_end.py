# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on the embedded digits in a minute, as docs/compression.md describes it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner, load_checkpoint

from effvit_mm.compression import evaluation
from effvit_mm.engine.launch import import_framework

pytest.importorskip('mmpretrain')
ROOT = Path(__file__).resolve().parents[2]


def load_config(name, root, **changes):
    """A config of this repository, with paths under ``root``."""
    cfg = Config.fromfile(ROOT / 'configs' / f'{name}.py')
    import_framework(cfg.default_scope)
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.dataset.data_root = str(root / 'data/digits/classification')
        loader.batch_size = 20
        loader.collate_fn = dict(type='default_collate')
    cfg.work_dir = str(root / name)
    cfg.launcher = 'none'
    cfg.experiment_name = name
    cfg.merge_from_dict(changes)
    return cfg


def train(cfg):
    """Train; returns the logged scalars of all steps, and the path of the last checkpoint."""
    runner = Runner.from_cfg(cfg)
    runner.train()
    log = Path(runner.log_dir) / 'vis_data' / 'scalars.json'
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return lines, (Path(cfg.work_dir) / 'last_checkpoint').read_text()


@pytest.fixture(scope='module')
def compress():
    spec = importlib.util.spec_from_file_location('compress', ROOT / 'tools' / 'compress.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    """Data, and a DeiT that has seen it for two epochs."""
    root = tmp_path_factory.mktemp('digits')
    counts = ['--num-train', '1', '--num-val', '1']
    counts += ['--num-classification-train', '400', '--num-classification-val', '40']
    tool = ROOT / 'tools' / 'prepare_digits.py'
    subprocess.run([sys.executable, tool, '--out', root / 'data/digits', *counts], check=True)
    cfg = load_config('classifier_deit_digits', root)
    cfg.merge_from_dict({'train_cfg.max_epochs': 2, 'optim_wrapper.optimizer.lr': 3e-3})
    cfg.param_scheduler = []
    _, checkpoint = train(cfg)
    return root, checkpoint


def load(cfg, checkpoint):
    """The model of a config with the weights of a checkpoint."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build({**cfg.model, 'data_preprocessor': cfg.data_preprocessor}).eval()
    load_checkpoint(model, checkpoint, strict=False)
    return model


def disagreement(cfg, checkpoint):
    """Mean cross-entropy of the model's predictions to the teacher's on the validation images."""
    model = load(cfg, checkpoint)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        loader = Runner.build_dataloader(cfg.val_dataloader)
    losses = []
    with torch.no_grad():
        for batch in loader:
            data = model.data_preprocessor(batch)
            losses.append(model.loss(**data)['loss_distillation'])
    return torch.stack(losses).mean().item()


def test_statistics_search_build_and_distillation_on_the_digits(original, compress, tmp_path):
    root, checkpoint = original
    statistics, found = tmp_path / 's.safetensors', tmp_path / 's.json'
    config = str(root / 'deit.py')
    load_config('classifier_deit_digits', root).dump(config)
    options = ['--max-images', '100', '--workers', '0', '--out', str(statistics)]
    compress(['stats', config, checkpoint, *options])
    search = ['--static', '2', '--glads', '3', '--eta', '0.5', '--out', str(found)]
    compress(['search', str(statistics), *search])
    result = json.loads(found.read_text())
    assert result['cost_ratio'] <= 0.5

    cfg = load_config('classifier_integrated_deit_digits', root)
    cfg.model.teacher_checkpoint = checkpoint
    cfg.model.backbone.arch.update(result['arch'])
    cfg.compression = dict(original=checkpoint, statistics=str(statistics))
    cfg.train_cfg.max_epochs = 4
    cfg.param_scheduler = []
    ours = str(root / 'ours.py')
    losses = {}
    for start in ('linear', 'random'):
        cfg.load_from = str(tmp_path / f'{start}.pth')
        cfg.dump(ours)
        static = 'dynamic' if start == 'linear' else 'random'
        options = [f'compression.glad_init={start}', f'model.backbone.arch.static_init={static}']
        compress(['build', ours, '--cfg-options', *options])
        losses[start] = disagreement(cfg, cfg.load_from)
    # before any training, the statistics bring the compressed model closer to the original
    assert losses['linear'] < losses['random']

    cfg.load_from = str(tmp_path / 'linear.pth')
    lines, trained = train(cfg)
    steps = [line for line in lines if 'loss_token' in line]
    assert steps[-1]['loss_token'] < steps[0]['loss_token']
    assert all(line['token_variance'] > 0 for line in steps)
    assert any('accuracy/top1' in line for line in lines)
    assert disagreement(cfg, trained) < losses['linear']

    # what a study tabulates
    model = load(cfg, trained)
    assert not any(key.startswith('teacher.') for key in model.state_dict())
    accuracy = [line['accuracy/top1'] for line in lines if 'accuracy/top1' in line]
    assert evaluation.top1(evaluation.student_of(model), cfg) == pytest.approx(accuracy[-1])
    teacher_log = next((root / 'classifier_deit_digits').glob('*/vis_data/scalars.json'))
    teacher = [json.loads(line) for line in teacher_log.read_text().splitlines()]
    expected = [line['accuracy/top1'] for line in teacher if 'accuracy/top1' in line][-1]
    assert evaluation.top1_of_teacher(model, cfg) == pytest.approx(expected)
    before = load(cfg, cfg.load_from)
    expected = evaluation.top1(evaluation.student_of(before), cfg)
    assert evaluation.top1_before_training(model, cfg) == pytest.approx(expected)
    assert evaluation.speed(model, cfg, rounds=3) > 1
