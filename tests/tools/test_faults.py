# SPDX-License-Identifier: Apache-2.0
"""Files, configs and command lines with something wrong in them, as the tools get them: one
sentence of docs/faults.md each, and no code of a checkpoint runs."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import mmengine.runner.checkpoint as mmengine_checkpoint
import numpy as np
import pytest
import timm
import torch
from attacks import attacks
from mmengine import optim as mmengine_optim
from mmengine.runner import CheckpointLoader
from PIL import Image
from test_faults_page import sentences

import effvit_mm.timm_models  # noqa: F401
from effvit_mm.engine.faults import run_or_explain, safe_checkpoints
from effvit_mm.models.checkpoint import CheckpointError, _load_found, read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / 'configs' / 'classifier_partialformer_b0_digits.py'
FAST = ['train_dataloader.batch_size=10', 'train_cfg.max_epochs=1', 'val_dataloader.batch_size=10']

pytest.importorskip('mmpretrain')


def on_page(sentence):
    """Whether docs/faults.md quotes a sentence."""
    patterns = ('.*'.join(map(re.escape, text.split('…'))) for text in sentences())
    return any(re.search(pattern, sentence) for pattern in patterns)


@pytest.fixture
def use(load_tool, digits_root, monkeypatch):
    """A function that runs a tool; returns how it ended."""
    monkeypatch.chdir(digits_root)

    def use(name, *args):
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, args)])
        tool = load_tool(name)
        try:
            run_or_explain(tool.main)
        except SystemExit as end:
            return end.code
        return None

    return use


@pytest.fixture
def refused(use):
    """A function that runs a tool which must say a sentence of the page; returns it."""

    def refused(*args):
        sentence = use(*args)
        assert isinstance(sentence, str) and sentence.startswith('error: ')
        assert '\n' not in sentence and on_page(sentence), sentence
        return sentence

    return refused


@pytest.fixture(scope='module')
def trained(digits_root, tmp_path_factory):
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp('run')
    subprocess.run(
        [
            *(sys.executable, ROOT / 'tools' / 'train.py', CONFIG),
            *('--work-dir', folder, '--cfg-options', *FAST),
        ],
        cwd=digits_root,
        check=True,
        capture_output=True,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '-1'},
    )
    return folder


@pytest.fixture(scope='module')
def state(trained):
    return read_checkpoint(str(trained / 'epoch_1.pth'))['state_dict']


def options(checkpoint, folder):
    """Each way in which the tools read a checkpoint."""
    pretrained = [
        *('model.backbone.init_cfg.type=Pretrained', 'model.backbone.init_cfg.prefix=backbone.'),
        f'model.backbone.init_cfg.checkpoint={checkpoint}',
    ]
    work = ['--work-dir', folder / 'work', '--cfg-options', *FAST]
    return {
        'load_from': ('train', CONFIG, *work, f'load_from={checkpoint}'),
        'resume': ('train', CONFIG, '--resume', checkpoint, *work),
        'init_cfg': ('train', CONFIG, *work, *pretrained),
        'test': ('test', CONFIG, checkpoint, *work[:2]),
        'export': ('export', CONFIG, checkpoint, '--out', folder / 'model.onnx'),
        'visualize': ('visualize', 'foreground', CONFIG, checkpoint, '--out-dir', folder),
        'compress': (
            *('compress', 'stats', 'deit_tiny_patch16_224', checkpoint),
            *('--data', 'data/digits', '--out', folder / 's.safetensors'),
        ),
        'build': (
            *('compress', 'build', ROOT / 'configs' / 'classifier_dgssa_swin_digits.py'),
            *('--weights', checkpoint, '--out', folder / 'built.pth'),
        ),
    }


WAYS = list(options(Path('x'), Path('y')))
every_way = pytest.mark.parametrize('way', WAYS)


@every_way
def test_code_in_a_checkpoint_never_runs(way, refused, state, tmp_path):
    marker = tmp_path / 'marker'
    content = dict(state_dict=state, meta=dict(x=attacks(marker)['mkdir']))
    path = tmp_path / 'attack.pth'
    torch.save(content, path)
    assert 'attack.pth was refused' in refused(*options(path, tmp_path)[way])
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the attack does work where code is allowed to run
    assert marker.exists()


def test_a_folder_is_no_checkpoint(refused, tmp_path):
    assert 'is a folder' in refused(*options(tmp_path, tmp_path / 'out')['test'])


def test_mmengine_s_own_loader_is_back_afterwards():
    before = CheckpointLoader._get_checkpoint_loader('x.pth')
    with safe_checkpoints():
        assert CheckpointLoader._get_checkpoint_loader('x.pth') is not before
        assert CheckpointLoader._get_checkpoint_loader('https://x/x.pth').__name__.endswith('file')
    assert CheckpointLoader._get_checkpoint_loader('x.pth') is before


@every_way
def test_a_truncated_checkpoint_is_said(way, refused, trained, tmp_path):
    data = (trained / 'epoch_1.pth').read_bytes()
    (tmp_path / 'half.pth').write_bytes(data[: len(data) // 2])
    said = refused(*options(tmp_path / 'half.pth', tmp_path)[way])
    assert 'half.pth is not a complete checkpoint file: copy or download it again' in said


@every_way
def test_a_missing_checkpoint_is_said(way, refused, tmp_path):
    said = refused(*options(tmp_path / 'none.pth', tmp_path)[way])
    assert 'none.pth' in said and ('There is no checkpoint' in said or 'is not there' in said)


@pytest.mark.parametrize('way', [way for way in WAYS if way not in ('compress', 'build')])
@pytest.mark.parametrize('kind', ['renamed', 'another model', 'another size'])
def test_a_checkpoint_of_something_else_is_refused(way, kind, refused, state, tmp_path):
    if kind == 'renamed':
        content = {f'my.{key}': value for key, value in state.items()}
    elif kind == 'another model':
        content = timm.create_model('resnet10t', num_classes=10).state_dict()
    else:
        content = timm.create_model('partialformer_b1', num_classes=10).state_dict()
    path = tmp_path / 'other.pth'
    # what --resume looks for first is there
    torch.save(dict(state_dict=content, meta={}, message_hub={}, optimizer={}), path)
    said = refused(*options(path, tmp_path)[way])
    assert 'other.pth' in said
    assert {
        'renamed': 'none of its weights' in said or 'no weights under the prefix' in said,
        'another model': 'none of its weights' in said or 'no weights under the prefix' in said,
        'another size': re.search(r'abstract_token is [[(]1, 1, 48', said),
    }[kind], said


def test_more_blocks_of_the_same_width_are_another_architecture(refused, state, tmp_path):
    more = {
        key.replace('stages.0.blocks.1.', 'stages.0.blocks.2.'): value
        for key, value in state.items()
        if 'stages.0.blocks.1.' in key
    }
    assert more
    torch.save(dict(state_dict={**state, **more}), tmp_path / 'deeper.pth')
    said = refused(*options(tmp_path / 'deeper.pth', tmp_path)['load_from'])
    assert 'of another architecture' in said and 'blocks.2.' in said


def test_a_backbone_alone_belongs_into_init_cfg(refused, state, tmp_path):
    prefix = 'backbone.'
    bare = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    torch.save(bare, tmp_path / 'bare.pth')
    said = refused(*options(tmp_path / 'bare.pth', tmp_path)['load_from'])
    assert "init_cfg=dict(type='Pretrained'" in said


WRAPPED = {
    'DataParallel': lambda state: dict(state_dict={f'module.{k}': v for k, v in state.items()}),
    'bare': dict,
    'model': lambda state: dict(model=state, optimizer=dict(state={}), epoch=3),
    'beside an average': lambda state: dict(
        model=state, model_ema={k: torch.zeros_like(v) for k, v in state.items()}
    ),
    'average alone': lambda state: dict(state_dict_ema=state),
    'averaged model': lambda state: {
        'steps': torch.tensor(3),
        **{f'module.{k}': v for k, v in state.items()},
    },
}


@pytest.mark.parametrize('kind', WRAPPED)
def test_what_only_wraps_the_weights_is_tested_as_they_are(kind, use, trained, state, tmp_path):
    """Its predictions are those of the run's own file."""
    torch.save(WRAPPED[kind](state), tmp_path / 'wrapped.pth')
    scores = []
    for i, path in enumerate((trained / 'epoch_1.pth', tmp_path / 'wrapped.pth')):
        out = tmp_path / f'{i}.pkl'
        name = f'experiment_name={tmp_path.name}{i}'
        arguments = ('--work-dir', tmp_path, '--out', out, '--cfg-options', name)
        assert use('test', CONFIG, path, *arguments) is None
        import mmengine

        scores.append(torch.stack([sample['pred_score'] for sample in mmengine.load(out)]))
    assert torch.equal(*scores)


def test_the_average_that_ema_hook_saves_is_what_is_loaded(use, digits_root, tmp_path):
    from effvit_mm.models.checkpoint import read_state_dict

    hook = "custom_hooks = [dict(type='EMAHook', momentum=0.5)]"
    config = tmp_path / 'ema.py'
    config.write_text(f'_base_ = [{str(CONFIG)!r}]\n{hook}')
    run = ('--work-dir', tmp_path, '--cfg-options', *FAST, f'experiment_name={tmp_path.name}')
    assert use('train', config, *run) is None
    content = read_checkpoint(str(tmp_path / 'epoch_1.pth'))
    key = 'backbone.stages.0.patch_embed.proj.weight'
    loaded = read_state_dict(str(tmp_path / 'epoch_1.pth'))[key]
    assert torch.equal(loaded, content['state_dict'][key])
    assert not torch.equal(loaded, content['ema_state_dict'][f'module.{key}'])
    again = (*run[:-1], 'train_cfg.max_epochs=2', f'experiment_name={tmp_path.name}2')
    assert use('train', config, '--resume', *again) is None
    assert (tmp_path / 'epoch_2.pth').exists()


def test_a_head_of_another_size_is_new_in_training_and_an_error_in_a_test(
    use, refused, state, tmp_path
):
    other = {k: v[:5] if k.startswith('head.') else v for k, v in state.items()}
    torch.save(dict(state_dict=other), tmp_path / 'head.pth')
    ways = options(tmp_path / 'head.pth', tmp_path)
    assert 'head.fc.weight is [5, 256] in the checkpoint' in refused(*ways['test'])
    assert use(*ways['load_from'], f'experiment_name={tmp_path.name}') is None


def test_a_run_goes_on_from_its_own_files_only(refused, trained, tmp_path):
    (published,) = trained.glob('epoch_1-*.pth')
    assert 'has weights but no message_hub' in refused(*options(published, tmp_path)['resume'])
    (tmp_path / 'work').mkdir(exist_ok=True)
    (tmp_path / 'work' / 'last_checkpoint').write_text(str(tmp_path / 'moved.pth'))
    said = refused('train', CONFIG, '--resume', '--work-dir', tmp_path / 'work')
    assert 'moved.pth, which is not there' in said


# mmengine 0.10.7 and torch 2.1 have no list of what is harmless: the way without it


def test_a_training_checkpoint_is_read_without_torch_s_list_too(trained):
    path = str(trained / 'epoch_1.pth')
    content, expected = _load_found(path, 'cpu'), torch.load(path, weights_only=False)
    assert content.keys() == expected.keys()
    for key, value in expected['state_dict'].items():
        assert torch.equal(content['state_dict'][key], value)
    assert content['optimizer']['param_groups'] == expected['optimizer']['param_groups']
    ours, theirs = (c['message_hub']['log_scalars']['train/loss'] for c in (content, expected))
    assert ours.data[0].tolist() == theirs.data[0].tolist() and ours.mean() == theirs.mean()


@pytest.mark.parametrize('kind', ['MultiStepLR', 'CosineAnnealingLR', 'OneCycleLR', 'PolyLR'])
@pytest.mark.parametrize('read', [read_checkpoint, lambda path: _load_found(path, 'cpu')])
def test_the_state_of_schedulers_is_read(read, kind, tmp_path):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    own = dict(
        MultiStepLR=dict(milestones=[8, 11]),
        CosineAnnealingLR=dict(T_max=9),
        OneCycleLR=dict(eta_max=1.0, total_steps=9),
    )
    scheduler = getattr(mmengine_optim, kind)(optimizer, **own.get(kind, {}))
    state = dict(param_schedulers=[scheduler.state_dict()], optimizer=optimizer.state_dict())
    torch.save(state, tmp_path / 'epoch_1.pth')
    assert read(str(tmp_path / 'epoch_1.pth')) == state


@pytest.mark.parametrize('legacy', [False, True])
@pytest.mark.parametrize('attack', ['mkdir', 'eval', 'getattr', 'globals'])
def test_code_never_runs_without_torch_s_list_either(attack, legacy, state, tmp_path, monkeypatch):
    marker = tmp_path / 'marker'
    harm = attacks(marker)[attack]
    path = tmp_path / 'attack.pth'
    torch.save(dict(x=harm), path, _use_new_zipfile_serialization=not legacy)
    monkeypatch.delattr(mmengine_checkpoint, 'get_torch_safe_globals', raising=False)
    with pytest.raises(CheckpointError, match='was refused'):
        read_checkpoint(str(path))
    assert not marker.exists()
    torch.save(dict(state_dict=state), path, _use_new_zipfile_serialization=not legacy)
    assert read_checkpoint(str(path))['state_dict'].keys() == state.keys()


# configs and command lines


CONFIGS = {
    'syntax': ('model = dict(', 'is no config: SyntaxError'),
    'name': ('model = dct()', 'is no config: NameError'),
    'base': ("_base_ = ['./nowhere.py']", 'nowhere.py, which is not there'),
    'import': (
        "_base_ = [{config!r}]\ncustom_imports = dict(imports=['no_such_module'])",
        'imports no_such_module, which is not installed',
    ),
    'part': ("default_scope = 'mmpretrain'", 'has no model'),
    'type': (
        "_base_ = [{config!r}]\nmodel = dict(backbone=dict(type='PartialFormr'))",
        'PartialFormr is not in the mmpretrain::model registry: is it spelt',
    ),
    'argument': (
        '_base_ = [{config!r}]\nmodel = dict(backbone=dict(depth=50))',
        "unexpected keyword argument 'depth'. Is it spelt right?",
    ),
    'arch': (
        "_base_ = [{config!r}]\nmodel = dict(backbone=dict(arch='b9'))",
        "no architecture 'b9'; there are 'b0'",
    ),
}


@pytest.mark.parametrize(
    ('tool', 'kind'),
    [(tool, kind) for tool in ('train', 'export') for kind in CONFIGS]
    + [('benchmark', kind) for kind in ('syntax', 'name', 'base', 'import')],
)
def test_a_wrong_config_is_said(kind, tool, refused, tmp_path):
    text, words = CONFIGS[kind]
    path = tmp_path / 'config.py'
    path.write_text(text.format(config=str(CONFIG)))
    arguments = {
        'train': ['--work-dir', tmp_path / 'work'],
        'export': ['--out', tmp_path / 'model.onnx'],
        'benchmark': ['--backbone', '--size', '64'],
    }[tool]
    assert words in refused(tool, path, *arguments)


def test_an_error_in_a_module_of_the_user_s_keeps_its_traceback(use, tmp_path, monkeypatch):
    (tmp_path / 'broken_module.py').write_text('import effvit_mm\neffvit_mm.nonsense\n')
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / 'config.py'
    config.write_text(
        f"_base_ = [{str(CONFIG)!r}]\ncustom_imports = dict(imports=['broken_module'])"
    )
    with pytest.raises(AttributeError, match='nonsense'):
        use('train', config)


@pytest.mark.parametrize('tool', ['train', 'export'])
def test_a_setting_without_a_value_is_an_error_of_the_command_line(tool, use, capsys):
    arguments = ['--out', 'x.onnx'] if tool == 'export' else []
    assert use(tool, CONFIG, *arguments, '--cfg-options', 'model.x') == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert on_page(said) and "'model.x' is not of the form KEY=VALUE" in said


@pytest.mark.parametrize('tool', ['train', 'test', 'show', 'visualize', 'stats', 'benchmark'])
def test_a_folder_that_cannot_be_written_to_is_said_before_the_work(
    tool, refused, trained, tmp_path
):
    (tmp_path / 'file').touch()
    folder, checkpoint = tmp_path / 'file' / 'folder', trained / 'epoch_1.pth'
    said = refused(
        *{
            'train': ('train', CONFIG, '--work-dir', folder),
            'test': ('test', CONFIG, checkpoint, '--work-dir', folder),
            'show': ('test', CONFIG, checkpoint, '--show-dir', folder, '--work-dir', tmp_path),
            'visualize': ('visualize', 'foreground', CONFIG, checkpoint, '--out-dir', folder),
            'stats': options(checkpoint, folder)['compress'],
            'benchmark': ('benchmark', 'ours:PartialFormer/b0', '--out-dir', folder),
        }[tool]
    )
    assert str(folder) in said and 'Not a directory' in said


def test_a_device_that_is_not_there_is_said(refused, trained, tmp_path):
    ways = options(trained / 'epoch_1.pth', tmp_path)
    for device in ('cuda:77', 'graphics'):
        for way in ('visualize', 'compress'):
            assert f'--device {device} ' in refused(*ways[way], '--device', device)


def test_an_image_that_is_none_is_named(refused, trained, digits_root, tmp_path):
    (tmp_path / 'page.png').write_text('<html>')
    ways = options(trained / 'epoch_1.pth', tmp_path)
    said = refused(*ways['visualize'], '--images', tmp_path / 'page.png')
    assert 'page.png is not a readable image' in said
    data = tmp_path / 'data' / '3'
    data.mkdir(parents=True)
    for i in range(2):
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(data / f'{i}.png')
    (data / 'cut.png').write_bytes(b'\x89PNG')
    loader = [f'train_dataloader.dataset.data_root={data.parent}']
    loader += ['train_dataloader.dataset.data_prefix=', 'train_dataloader.num_workers=1']
    said = refused(*ways['load_from'], *loader, f'experiment_name={tmp_path.name}')
    assert 'cut.png is not a readable image' in said


# what the machine runs out of


def in_a_process(*args, limit=None, **kwargs):
    """Start a tool in a process of its own, under a limit of :mod:`resource`."""
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '-1', 'OMP_NUM_THREADS': '1'},
        preexec_fn=limit and (lambda: resource.setrlimit(limit[0], (limit[1], limit[1]))),
        **kwargs,
    )


def test_too_little_memory_for_a_large_image_is_said(refused, trained, tmp_path):
    """The process may take 512 MiB more than it has."""
    Image.fromarray(np.zeros((4000, 4000, 3), np.uint8)).save(tmp_path / 'large.png')
    way = options(trained / 'epoch_1.pth', tmp_path)['visualize']
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (512 << 20), before[1])
    )
    try:
        said = refused(*way, '--images', tmp_path / 'large.png', '--device', 'cpu')
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 'There is not enough memory: take smaller images' in said


def test_no_room_for_a_checkpoint_is_said_and_the_last_one_stays(trained, digits_root, tmp_path):
    """A limit on the size of files in place of a full disk: writing fails halfway as well."""
    work = ['--work-dir', tmp_path, '--cfg-options', *FAST]
    tool = in_a_process(
        *(ROOT / 'tools' / 'train.py', CONFIG, *work),
        limit=(resource.RLIMIT_FSIZE, 5 << 20),
        cwd=digits_root,
    )
    said = tool.communicate()[0].splitlines()[-1]
    assert tool.returncode == 1
    assert said.startswith('error: The file is larger than the limit') and '--resume' in said
    assert not (tmp_path / 'last_checkpoint').exists()


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs a device that is always full')
def test_a_full_disk_is_said(trained, digits_root, tmp_path):
    (tmp_path / 'epoch_1.pth').symlink_to('/dev/full')
    work = ['--work-dir', tmp_path, '--cfg-options', *FAST]
    tool = in_a_process(ROOT / 'tools' / 'train.py', CONFIG, *work, cwd=digits_root)
    said = tool.communicate()[0].splitlines()[-1]
    assert tool.returncode == 1
    assert said.startswith('error: The disk is full: make room') and '--resume' in said


def test_ctrl_c_in_a_training_says_how_to_go_on(digits_root, tmp_path):
    options = [*FAST[::2], 'train_cfg.max_epochs=1000', 'train_cfg.val_interval=1000']
    options += ['default_hooks.logger.interval=1', 'default_hooks.checkpoint.interval=1000']
    tool = in_a_process(
        *(ROOT / 'tools' / 'train.py', CONFIG, '--work-dir', tmp_path, '--cfg-options', *options),
        cwd=digits_root,
    )
    for line in tool.stdout:
        if 'Epoch(train)' in line:
            tool.send_signal(signal.SIGINT)
            break
    said = tool.stdout.read().splitlines()
    assert tool.wait() == 130 and 'Traceback' not in ''.join(said)
    assert said[-1] == (
        'Interrupted. The same command with --resume goes on from the last checkpoint.'
    )
    assert on_page(said[-1])
