# SPDX-License-Identifier: Apache-2.0
"""tools/visualize.py: a command for each family, for data of the config and images of one's own.
(What the pictures show: tests/analysis.)"""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings
from PIL import Image

from effvit_mm.engine.launch import drop_teacher, import_framework

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
COMMANDS = {
    'foreground': 'classifier_partialformer_b0_digits',
    'similarity': 'classifier_partialformer_b0_digits',
    'attention': 'classifier_lavit_digits',
    'static': 'classifier_dgssa_swin_digits',
    'tokens': 'classifier_integrated_deit_digits',
}


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A function that writes the checkpoint of a config's untrained model."""
    pytest.importorskip('mmpretrain')
    import_framework('mmpretrain')

    def write(name):
        cfg = Config.fromfile(CONFIGS / f'{name}.py')
        import_modules_from_strings(**cfg.custom_imports)
        drop_teacher(cfg)
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            model = MODELS.build({**cfg.model, 'data_preprocessor': cfg.data_preprocessor})
        path = tmp_path_factory.mktemp('checkpoint') / 'untrained.pth'
        torch.save(model.state_dict(), path)
        return str(path)

    return write


@pytest.mark.parametrize('command', COMMANDS)
def test_each_command_draws_an_image_of_any_size(load_tool, checkpoint, tmp_path, capsys, command):
    name = COMMANDS[command]
    # DGSSA-Swin's config enlarges images to squares itself; the others take them as they are
    Image.new('RGB', (130, 75), (200, 30, 90)).save(tmp_path / 'own.png')
    load_tool('visualize').main(
        [
            *(command, str(CONFIGS / f'{name}.py'), checkpoint(name)),
            *('--images', str(tmp_path / 'own.png'), '--out-dir', str(tmp_path / 'pictures')),
            *('--device', 'cpu'),
        ]
    )
    written = sorted((tmp_path / 'pictures').iterdir())
    out = capsys.readouterr().out
    assert written and all(f'Wrote {path}' in out for path in written)
    for path in written:
        assert min(Image.open(path).size) > 200
    if command == 'similarity':
        assert out.count('\n1.') == 2 and out.count('\n3.') == 5


@pytest.mark.parametrize('command', COMMANDS)
def test_a_model_of_another_family_is_said(load_tool, checkpoint, tmp_path, command):
    name = 'classifier_lavit_digits' if command != 'attention' else COMMANDS['foreground']
    tool = load_tool('visualize')
    Image.new('RGB', (64, 64)).save(tmp_path / 'own.png')
    with pytest.raises(tool.SetupError, match='has no'):
        tool.main(
            [
                *(command, str(CONFIGS / f'{name}.py'), checkpoint(name)),
                *('--images', str(tmp_path / 'own.png'), '--out-dir', str(tmp_path / 'pictures')),
                *('--device', 'cpu'),
            ]
        )
