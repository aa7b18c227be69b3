# SPDX-License-Identifier: Apache-2.0
"""examples/downstream: what a project that builds on the package does, in a copy elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import effvit_mm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path):
    """A copy of the example, in a folder that knows nothing of this one."""
    ignore = shutil.ignore_patterns('__pycache__')
    return Path(shutil.copytree(ROOT / 'examples/downstream', tmp_path / 'project', ignore=ignore))


@pytest.fixture
def weights(tmp_path):
    """Weights of a PartialFormer, as a classifier's checkpoint would have them."""
    torch.manual_seed(0)
    state = effvit_mm.PartialFormer('b0').state_dict()
    path = tmp_path / 'classifier.pth'
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in state.items()}), path)
    return path


def test_the_projects_detector_trains_from_its_own_config(project, weights, digits_root):
    pytest.importorskip('mmdet')
    tool, config = ROOT / 'tools/train.py', project / 'configs/mask_rcnn_gated_digits.py'
    options = [
        *('train_cfg.max_iters=3', 'train_cfg.val_interval=3', 'train_dataloader.batch_size=2'),
        *('model.backbone.init_cfg.type=Pretrained', 'model.backbone.init_cfg.prefix=backbone.'),
        f'model.backbone.init_cfg.checkpoint={weights}',
    ]
    command = [sys.executable, tool, config, '--work-dir', project / 'run']
    command += ['--cfg-options', *options]
    path = os.pathsep.join((str(project), str(ROOT)))
    environment = {**os.environ, 'PYTHONPATH': path, 'CUDA_VISIBLE_DEVICES': '-1'}
    done = subprocess.run(
        command, cwd=digits_root, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'tensors from {weights}' in done.stdout + done.stderr
    (trained,) = (project / 'run').glob('iter_3-*.pth')
    state = torch.load(trained, weights_only=True)['state_dict']
    for i in range(4):
        assert state[f'backbone.gates.{i}.excite.weight'].abs().sum() > 0


def test_the_projects_backbone_starts_as_the_one_it_derives_from(project, weights, monkeypatch):
    monkeypatch.syspath_prepend(project)
    from my_project import GatedPartialFormer

    gated, plain = GatedPartialFormer('b0').eval(), effvit_mm.PartialFormer('b0').eval()
    for model in (gated, plain):
        model.load_pretrained(str(weights), 'backbone.')
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        for a, b in zip(gated(x), plain(x), strict=True):
            assert torch.equal(a, b)


def test_configs_of_the_package_are_found_by_name():
    name = 'mask_rcnn_partialformer_b3'
    assert Path(effvit_mm.config_path(name)) == ROOT / 'configs' / f'{name}.py'
    with pytest.raises(FileNotFoundError, match="no config 'nonsense'"):
        effvit_mm.config_path('nonsense')
