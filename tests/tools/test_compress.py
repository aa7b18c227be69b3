# SPDX-License-Identifier: Apache-2.0
"""tools/compress.py as a user calls it, on small models and images made up here."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from effvit_mm.compression import collect_statistics, load_statistics
from effvit_mm.compression import stats_command as command
from effvit_mm.compression.collection import StateFile, image_order
from effvit_mm.engine.launch import SetupError

ROOT = Path(__file__).resolve().parents[2]
NAME = 'deit_tiny_patch16_224'
SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3)
KWARGS = ['--model-kwargs', *(f'{key}={value}' for key, value in SMALL.items())]

CONFIG = """
default_scope = 'mmpretrain'
model = dict(type='ImageClassifier', backbone={backbone},
             head=dict(type='LinearClsHead', num_classes=2, in_channels={channels}))
data_preprocessor = dict(mean=[120.0, 110.0, 100.0], std=[60.0, 50.0, 40.0], to_rgb=True)
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=({size}, {size})),
            dict(type='PackInputs')]
dataset = dict(type='CustomDataset', data_root={root!r}, pipeline=pipeline)
train_dataloader = dict(batch_size=4, dataset=dataset)
test_dataloader = dict(batch_size=4, dataset=dataset)
"""
VIT = dict(
    type='VisionTransformer',
    arch=dict(embed_dims=24, num_layers=4, num_heads=3, feedforward_channels=96),
    img_size=32,
    patch_size=8,
)
SWIN = dict(
    type='SwinTransformer',
    arch=dict(embed_dims=8, depths=[2, 2], num_heads=[2, 4]),
    img_size=64,
    window_size=4,
    out_indices=(1,),
)


@pytest.fixture(scope='module')
def tool(load_tool):
    return load_tool('compress')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Eleven images of 32 x 32 pixels in two folders."""
    root = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    for i in range(11):
        path = root / ('a' if i % 2 else 'b') / f'{i}.png'
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture(scope='module')
def original():
    torch.manual_seed(0)
    model = timm.create_model(NAME, **SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(15)
    return model.eval()


@pytest.fixture(scope='module')
def checkpoint(original, tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'tiny.pth'
    torch.save(dict(model=original.state_dict()), path)
    return path


@pytest.fixture
def arguments(folder, checkpoint, tmp_path):
    """A complete command, of 11 images in batches of 2."""
    out = tmp_path / 'stats.safetensors'
    command = ['stats', NAME, checkpoint, *KWARGS, '--data', folder, '--out', out]
    return [*map(str, command), '--batch-size', '2', '--workers', '0', '--device', 'cpu']


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'stats.safetensors'


def assert_equal(found, expected, rtol=1e-6, atol=1e-9):
    """Sums are exact to 1e-12, but the model's float32 attention is rounded by the batch that an
    image is in; an image more or less would change a mean by a percent."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        looser = dict(rtol=1e-5, atol=1e-7) if value.dtype == torch.float32 else {}
        torch.testing.assert_close(
            value, expected[name], **{**dict(rtol=rtol, atol=atol), **looser}
        )


def test_folder_gives_the_statistics_of_its_images(tool, arguments, out, folder, original, capsys):
    tool.main(arguments)
    stats = load_statistics(str(out))
    data = {**timm.data.resolve_model_data_config(original), 'input_size': (3, 32, 32)}
    transform = timm.data.create_transform(**data, is_training=False)
    images = [transform(Image.open(path)) for path in sorted(folder.rglob('*.png'))]
    expected = collect_statistics(original, [torch.stack(images)])
    assert_equal(stats.tensors, expected.tensors, rtol=1e-4, atol=1e-6)
    meta = stats.metadata
    assert (meta['model'], meta['dataset'], meta['image_count']) == (NAME, str(folder), 11)
    assert meta['weights'] == expected.metadata['weights']
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    printed = capsys.readouterr()
    assert '| 3 | 0.' in printed.out and f'Wrote {out}' in printed.out
    assert '11/11' in printed.err


@pytest.mark.parametrize('workers', [0, 2])
def test_max_images_is_a_sample_that_the_seed_fixes(tool, arguments, out, workers):
    means = []
    for seed in (0, 0, 1):
        extra = ['--max-images', '5', '--seed', str(seed), '--workers', str(workers)]
        tool.main([*arguments, *extra])
        stats = load_statistics(str(out))
        assert stats.metadata['image_count'] == 5
        means.append(stats.tensors['attention_mean.0'])
    assert torch.equal(means[0], means[1]) and not torch.equal(means[0], means[2])


def test_more_images_begin_with_the_fewer():
    assert image_order(100, 30, seed=3)[:10] == image_order(100, 10, seed=3)
    assert sorted(image_order(100, None, seed=3)) == list(range(100))


def interrupt_at(monkeypatch, number, action):
    """Do something when the image of this number is loaded."""
    load, count = command.folder_images, [0]

    def patched(*args):
        images = load(*args)
        inner = images.load

        def counted(i):
            count[0] += 1
            if count[0] == number:
                action()
            return inner(i)

        images.load = counted
        return images

    monkeypatch.setattr(command, 'folder_images', patched)
    return count


@pytest.mark.parametrize('sent', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('batch_size', ['2', '3'])
def test_interrupted_run_resumes(
    tool, arguments, out, monkeypatch, capsys, sent, batch_size, original
):
    tool.main(arguments)
    expected = load_statistics(str(out)).tensors
    out.unlink()
    count = interrupt_at(monkeypatch, 5, lambda: os.kill(os.getpid(), sent))
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 130
    message = capsys.readouterr().err
    assert 'Interrupted after 6 of 11 images' in message and '--max-images 6' in message
    assert not out.exists() and Path(f'{out}.unfinished').exists()
    tool.main([*arguments, '--batch-size', batch_size])
    assert count[0] == 11, 'every image is seen once'
    assert load_statistics(str(out)).metadata['image_count'] == 11
    assert_equal(load_statistics(str(out)).tensors, expected)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_ends_at_once(tool, arguments, out, monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    interrupt_at(monkeypatch, 5, twice)
    with pytest.raises(KeyboardInterrupt):
        tool.main(arguments)
    assert not out.exists()


def test_interrupted_run_can_be_finished_with_what_there_is(tool, arguments, out, monkeypatch):
    interrupt_at(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit):
        tool.main(arguments)
    with pytest.raises(SetupError, match='has 6 images already, more than the 5 asked for'):
        tool.main([*arguments, '--max-images', '5'])
    tool.main([*arguments, '--max-images', '6'])
    assert load_statistics(str(out)).metadata['image_count'] == 6


def test_killed_run_resumes_from_what_was_saved_last(tool, arguments, out, monkeypatch):
    class Killed(Exception):
        pass

    def die():
        raise Killed

    tool.main(arguments)
    expected = load_statistics(str(out)).tensors
    monkeypatch.setattr(command, 'StateFile', partial(StateFile, period=0))
    count = interrupt_at(monkeypatch, 6, die)
    with pytest.raises(Killed):
        tool.main(arguments)
    tool.main(arguments)
    assert count[0] == 6 + 11 - 4, 'four images were saved'
    assert_equal(load_statistics(str(out)).tensors, expected)


@pytest.mark.parametrize(
    'change, what', [(['--seed', '1'], 'seed'), (['--data', 'OTHER'], 'data'), (None, 'weights')]
)
def test_unfinished_run_of_something_else_is_not_resumed(
    tool, arguments, folder, original, monkeypatch, tmp_path, change, what
):
    interrupt_at(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit):
        tool.main(arguments)
    if change is None:
        torch.save({k: v + 1 for k, v in original.state_dict().items()}, tmp_path / 'other.pth')
        arguments[2] = str(tmp_path / 'other.pth')
        change = []
    change = [str(folder / 'a') if word == 'OTHER' else word for word in change]
    with pytest.raises(SetupError, match=f'unfinished run of another {what} .*remove it'):
        tool.main([*arguments, *change])


def test_full_disk_is_one_sentence_and_keeps_what_was_saved(tool, arguments, out, monkeypatch):
    monkeypatch.setattr(command, 'StateFile', partial(StateFile, period=0))
    replace, calls = os.replace, []

    def fills_up(*args):
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, 'No space left on device')
        return replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr('effvit_mm.compression.statistics.os.replace', fills_up)
        with pytest.raises(SetupError, match='No space left .*unfinished has what was saved last'):
            tool.main(arguments)
    assert not out.exists()
    tool.main(arguments)
    assert load_statistics(str(out)).metadata['image_count'] == 11


def test_a_file_that_cannot_be_written_whole_is_one_sentence_and_leaves_nothing(
    tool, arguments, out
):
    """A limit on the size of files in place of a full disk: writing fails halfway as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(SetupError, match='could not be written: .* Make room, or choose'):
            tool.main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(out.parent.iterdir()) == []
    tool.main(arguments)
    assert load_statistics(str(out)).metadata['image_count'] == 11


def test_a_signal_to_all_processes_of_the_group_saves_the_sums_too(arguments, out, folder):
    """torchrun, timeout and Slurm end the loading processes as well."""
    images = out.parent / 'many'
    images.mkdir()
    for i in range(400):
        (images / f'{i}.png').symlink_to(folder / 'b' / '0.png')
    arguments[arguments.index('--workers') + 1] = '2'
    command = [sys.executable, str(ROOT / 'tools/compress.py'), *arguments, '--data', str(images)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        seen = ''
        while not re.search(r'\| [1-9]\d*/400', seen):  # images are being seen
            character = process.stderr.read(1)
            assert character, seen
            seen += character
        for _ in range(2):  # torchrun passes on what Slurm has sent to all already
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.01)
        _, rest = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # the second one may come after the sums have been saved
    assert process.returncode in (130, -signal.SIGTERM) and 'Traceback' not in rest, rest
    assert 'Interrupted after' in rest and Path(f'{out}.unfinished').is_file()


def test_each_process_has_its_own_gpu(tool, arguments, monkeypatch):
    moved = []

    class Model:
        def to(self, device):
            moved.append(device)
            raise ValueError('that is all')

    for name, value in dict(RANK='1', LOCAL_RANK='1').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, 'check_device', lambda device: None)
    monkeypatch.setattr(command, 'load_original', lambda *_: type('', (), dict(model=Model())))
    monkeypatch.setattr('torch.cuda.set_device', moved.append)
    monkeypatch.setattr('torch.distributed.init_process_group', moved.append)
    monkeypatch.setattr('torch.distributed.get_rank', lambda: 1)
    with pytest.raises(SetupError, match='that is all'):
        tool.main([*arguments, '--device', 'cuda', '--launcher', 'pytorch'])
    assert moved == ['cuda:1', 'nccl', 'cuda:1']


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason='needs gloo')
def test_two_processes_give_the_statistics_of_one(tool, arguments, out):
    tool.main(arguments)
    expected = load_statistics(str(out))
    out.unlink()
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    done = subprocess.run(
        [*launch, str(ROOT / 'tools/compress.py'), *arguments, '--launcher', 'pytorch'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('Wrote') == 1
    found = load_statistics(str(out))
    assert found.metadata == expected.metadata
    assert_equal(found.tensors, expected.tensors)


@pytest.mark.parametrize('kind', ['deit', 'swin'])
def test_mmpretrain_config_gives_the_statistics_of_its_backbone(tool, folder, tmp_path, out, kind):
    models = pytest.importorskip('mmpretrain.models')
    backbone, size = (VIT, 32) if kind == 'deit' else (SWIN, 64)
    config = tmp_path / 'config.py'
    text = CONFIG.format(backbone=backbone, channels=24, size=size, root=str(folder))
    config.write_text(text)
    torch.manual_seed(0)
    settings = {k: v for k, v in backbone.items() if k != 'type'}
    model = getattr(models, backbone['type'])(**settings)
    model.init_weights()
    model.eval()  # returns None
    state = {f'backbone.{k}': v for k, v in model.state_dict().items()}
    torch.save(dict(state_dict=state), tmp_path / 'weights.pth')
    extra = ['--out', str(out), '--workers', '0', '--device', 'cpu']
    tool.main(['stats', str(config), str(tmp_path / 'weights.pth'), *extra])
    found = load_statistics(str(out))
    assert found.metadata['kind'] == kind and found.metadata['image_count'] == 11
    if kind == 'deit':
        entering = []
        handle = model.layers[2].register_forward_pre_hook(lambda _, a: entering.append(a[0]))
        mean, std = torch.tensor([120.0, 110, 100]), torch.tensor([60.0, 50, 40])
        pixels = [np.asarray(Image.open(path)) for path in sorted(folder.rglob('*.png'))]
        with torch.no_grad():
            model(((torch.tensor(np.stack(pixels)) - mean) / std).permute(0, 3, 1, 2))
        handle.remove()
        x = entering[0].double()
        gram = torch.einsum('bnc,bmc->nm', x, x) / len(x) / 24
        torch.testing.assert_close(found.tensors['gram.2'], gram, rtol=1e-4, atol=1e-5)


def test_backbone_with_something_that_timm_has_not_is_refused(tool, folder, tmp_path, out):
    models = pytest.importorskip('mmpretrain.models')
    settings = {k: v for k, v in VIT.items() if k != 'type'}
    torch.save(models.VisionTransformer(**settings).state_dict(), tmp_path / 'weights.pth')
    backbone = {**VIT, 'layer_cfgs': dict(act_cfg=dict(type='ReLU'))}
    config = tmp_path / 'config.py'
    text = CONFIG.format(backbone=backbone, channels=24, size=32, root=str(folder))
    config.write_text(text)
    command = ['stats', str(config), str(tmp_path / 'weights.pth'), '--out', str(out)]
    with pytest.raises(SetupError, match='it computes something else'):
        tool.main(command)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'--data': 'nowhere'}, 'There is no folder nowhere'),
        ({'--data': 'EMPTY'}, 'There is no image in'),
        ({'--data': 'nowhere.py'}, 'There is no config nowhere.py'),
        ({'--batch-size': '0'}, '--batch-size must be at least 1'),
        ({1: 'no_such_model'}, 'timm cannot make no_such_model'),
        ({1: 'resnet10t'}, 'timm cannot make|does not fit|neither'),
        ({2: 'nowhere.pth'}, 'There is no checkpoint nowhere.pth'),
        ({1: 'nowhere.py'}, 'There is no config nowhere.py'),
        ({'--launcher': 'pytorch'}, 'torchrun'),
    ],
)
def test_mistakes_are_one_sentence(tool, arguments, tmp_path, monkeypatch, changes, message):
    monkeypatch.delenv('RANK', raising=False)
    for key, value in changes.items():
        if value == 'EMPTY':
            (tmp_path / 'empty').mkdir()
            value = str(tmp_path / 'empty')
        if isinstance(key, str):
            arguments += [key, value]
        else:
            arguments[key] = value
    with pytest.raises(SetupError, match=message) as error:
        tool.main(arguments)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('workers', ['0', '1'])
def test_damaged_image_is_named(tool, arguments, tmp_path, workers):
    (tmp_path / 'images').mkdir()
    (tmp_path / 'images' / 'cut.png').write_bytes(b'\x89PNG')
    extra = ['--data', str(tmp_path / 'images'), '--workers', workers]
    with pytest.raises(SetupError, match='cut.png is not a readable image') as error:
        tool.main([*arguments, *extra])
    assert '\n' not in str(error.value)


def test_search_prints_a_table_and_json_and_writes_the_json(tool, arguments, out, capsys):
    tool.main(arguments)
    capsys.readouterr()
    path = out.parent / 'search' / 'found.json'
    command = ['search', str(out), '--static', '1', '--glads', '2', '--eta', '0.7']
    tool.main([*command, '--compare', '2:9', '3:5', '--out', str(path)])
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert json.loads(printed[printed.index('{') : printed.rindex('}') + 1]) == found
    assert found['arch']['static_layers'] == [1] and len(found['arch']['pyramid']) == 2
    assert found['cost_ratio'] <= 0.7
    assert '| 1 | static | 17 |  |' in printed and 'compared: 2:9 3:5 costs' in printed


@pytest.mark.parametrize(
    'changes, message',
    [
        (['--eta', '0.1'], 'eta binds'),
        (['--static', '4'], 'P binds'),
        (['--compare', '3-5'], 'such as 3:127'),
    ],
)
def test_search_that_cannot_be_is_one_sentence(tool, arguments, out, changes, message):
    tool.main(arguments)
    with pytest.raises(SetupError, match=message):
        tool.main(['search', str(out), '--static', '1', '--glads', '2', '--eta', '0.9', *changes])


def test_search_refuses_another_file(tool, tmp_path):
    (tmp_path / 'x').write_text('no statistics')
    with pytest.raises(SetupError, match='not a complete file of statistics'):
        tool.main(['search', str(tmp_path / 'x')])


def test_a_swin_s_static_layers_and_what_they_save_are_json_too(tool, folder, tmp_path, capsys):
    small = dict(img_size=64, embed_dim=8, depths='(2,2)', num_heads='(1,2)', window_size=8)
    kwargs = [f'{key}={value}' for key, value in small.items()]
    torch.manual_seed(0)
    model = timm.create_model(
        'swin_tiny_patch4_window7_224',
        **{**small, 'depths': (2, 2), 'num_heads': (1, 2), 'num_classes': 2},
    )
    torch.save(model.state_dict(), tmp_path / 'swin.pth')
    stats, found = str(tmp_path / 's.safetensors'), tmp_path / 'found.json'
    arguments = [
        str(tmp_path / 'swin.pth'),
        '--data',
        str(folder),
        '--out',
        stats,
        '--workers',
        '0',
    ]
    tool.main(['stats', 'swin_tiny_patch4_window7_224', *arguments, '--model-kwargs', *kwargs])
    tool.main(['search', stats, '--static', '2', '--out', str(found)])
    result = json.loads(found.read_text())
    assert result['arch'] == dict(static_layers=[1, 2])
    # both maps, 16 x 16 and 8 x 8, have windows of 64 tokens; merging makes 16 channels of 32
    costs = [256 * 8 * (4 * 8 + 2 * 64 + 8 * 8), 64 * 16 * (4 * 16 + 2 * 64 + 8 * 16)]
    saved = 256 * 8 * (2 * 8 + 64) + 64 * 16 * (2 * 16 + 64)
    expected = 1 - saved / (2 * sum(costs) + 2 * 64 * 16 * 16)
    assert result['cost_ratio'] == pytest.approx(expected)
    assert 'A Swin is a pyramid already' in capsys.readouterr().out
    with pytest.raises(SetupError, match='--glads, --eta can choose nothing'):
        tool.main(['search', stats, '--glads', '2', '--eta', '0.5'])


def test_arguments_for_timm_are_refused_with_a_config(tool, folder, tmp_path):
    models = pytest.importorskip('mmpretrain.models')
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(backbone=VIT, channels=24, size=32, root=str(folder)))
    model = models.VisionTransformer(**{k: v for k, v in VIT.items() if k != 'type'})
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    arguments = [str(config), str(tmp_path / 'weights.pth'), '--out', str(tmp_path / 'out')]
    with pytest.raises(SetupError, match='--model-kwargs are for models of timm'):
        tool.main(['stats', *arguments, '--model-kwargs', 'depth=3'])
