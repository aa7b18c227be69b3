# SPDX-License-Identifier: Apache-2.0
"""What the tools build without a Runner is what the Runner builds."""

import socket
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from effvit_mm.engine.launch import SetupError, build_model, import_framework
from effvit_mm.engine.layer_decay import LayerDecayOptimWrapperConstructor
from effvit_mm.models.checkpoint import CheckpointError, read_state_dict

CONFIG = Path(__file__).resolve().parents[2] / 'configs' / 'classifier_lavit_digits.py'


def test_a_model_has_the_preprocessor_that_the_config_has_beside_it(tmp_path):
    pytest.importorskip('mmpretrain')
    import_framework('mmpretrain')
    cfg = Config.fromfile(CONFIG)
    assert 'data_preprocessor' not in cfg.model
    image = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        runner = Runner(
            model=dict(cfg.model),
            work_dir=str(tmp_path),
            data_preprocessor=cfg.data_preprocessor,
            default_scope='mmpretrain',
            experiment_name='test_launch',
        )
        torch.save(runner.model.state_dict(), tmp_path / 'model.pth')
        model = build_model(cfg, str(tmp_path / 'model.pth'))
        expected = runner.model.data_preprocessor(dict(inputs=image))['inputs']
        actual = model.data_preprocessor(dict(inputs=image))['inputs']
        assert torch.equal(actual, expected) and actual.min() < 0
        with torch.no_grad():
            logits = runner.model.eval()(expected, mode='tensor')
            assert torch.equal(model(actual, mode='tensor'), logits)
        with pytest.raises(SetupError, match='no checkpoint'):
            build_model(cfg, str(tmp_path / 'none.pth'))


@pytest.mark.parametrize('paramwise_cfg', [None, {}])
def test_layer_decay_without_a_rate_is_refused(paramwise_cfg):
    cfg = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
    with pytest.raises(ValueError, match='needs layer_decay_rate'):
        LayerDecayOptimWrapperConstructor(cfg, paramwise_cfg)


def test_a_url_is_downloaded_once_on_every_machine(monkeypatch, tmp_path):
    fetched = []

    def fetch(url, path):
        fetched.append(url)
        torch.save({'a': torch.ones(2)}, path)

    monkeypatch.setattr('effvit_mm.models.checkpoint.download_url_to_file', fetch)
    monkeypatch.setattr('effvit_mm.models.checkpoint.get_dir', lambda: str(tmp_path))
    monkeypatch.setenv('RANK', '8')  # the first process of the second machine
    monkeypatch.setenv('LOCAL_RANK', '0')
    for _ in range(2):
        assert torch.equal(read_state_dict('https://x/a.pth')['a'], torch.ones(2))
    monkeypatch.setenv('LOCAL_RANK', '1')
    read_state_dict('https://x/a.pth')
    assert fetched == ['https://x/a.pth']


def test_a_url_that_does_not_answer_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr('effvit_mm.models.checkpoint.get_dir', lambda: str(tmp_path))
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))  # taken, so that nobody listens there
        url = f'http://127.0.0.1:{unused.getsockname()[1]}/a.pth'
        with pytest.raises(CheckpointError, match=f'{url} cannot be downloaded: '):
            read_state_dict(url)
