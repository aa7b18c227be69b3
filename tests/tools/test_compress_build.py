# SPDX-License-Identifier: Apache-2.0
"""tools/compress.py build, build-study and calibrate, as a user calls them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from effvit_mm import IntegratedDeiT
from effvit_mm.compression import build_integrated_deit, load_statistics
from effvit_mm.compression.build_command import read_weights
from effvit_mm.engine.launch import SetupError

pytest.importorskip('mmpretrain')

CONFIG = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['effvit_mm'], allow_failed_imports=False)
data_preprocessor = dict(mean=[127.5] * 3, std=[64.0] * 3)
dataset = dict(type='CustomDataset', data_root={root!r},
               pipeline=[dict(type='LoadImageFromFile'), dict(type='PackInputs')])
loader = dict(batch_size=4, num_workers=0, dataset=dataset,
              sampler=dict(type='DefaultSampler', shuffle=False),
              collate_fn=dict(type='default_collate'))
train_dataloader = val_dataloader = test_dataloader = loader
model = dict(type='ImageClassifier', backbone={backbone},
             head=dict(type='LinearClsHead', num_classes=2, in_channels=24))
"""
VIT = dict(
    type='VisionTransformer',
    arch=dict(embed_dims=24, num_layers=4, num_heads=3, feedforward_channels=96),
    img_size=64,
    patch_size=16,
)
OURS = dict(
    type='IntegratedDeiT',
    arch=dict(
        embed_dims=24,
        depth=4,
        num_heads=3,
        image_size=64,
        static_layers=(1,),
        pyramid=((2, 9), (3, 5)),
        taps=(0, 1, 2, 3),
    ),
    out_type='cls_token',
)


@pytest.fixture(scope='module')
def compress(load_tool):
    return load_tool('compress').main


@pytest.fixture(scope='module')
def work(tmp_path_factory, compress):
    """Images, the config and checkpoint of an original, and its statistics."""
    root = tmp_path_factory.mktemp('compress')
    rng = np.random.default_rng(0)
    for i in range(12):
        path = root / 'images' / 'ab'[i % 2] / f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    images = str(root / 'images')
    (root / 'deit.py').write_text(CONFIG.format(root=images, backbone=VIT))
    ours = CONFIG.format(root=images, backbone=OURS)
    ours += f"""
compression = dict(original={str(root / 'deit.pth')!r}, statistics={str(root / 's.safetensors')!r})
load_from = {str(root / 'compressed.pth')!r}
"""
    (root / 'ours.py').write_text(ours)
    from mmpretrain.models import build_classifier

    torch.manual_seed(0)
    model = build_classifier(Config.fromfile(root / 'deit.py').model)
    torch.save(dict(state_dict=model.state_dict()), root / 'deit.pth')
    arguments = [str(root / 'deit.py'), str(root / 'deit.pth'), '--workers', '0']
    compress(['stats', *arguments, '--out', str(root / 's.safetensors')])
    return root


def backbone(path):
    """What is under ``backbone.`` in a checkpoint."""
    state = torch.load(path, weights_only=True)['state_dict']
    return {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}


def test_a_config_says_what_is_built_from_what(work, compress, capsys):
    report = work / 'report.json'
    compress(['build', str(work / 'ours.py'), '--images', '8', '--report', str(report)])
    output = capsys.readouterr().out
    assert 'inherited' in output and 'before layer 2: class_cosine' in output
    IntegratedDeiT(OURS['arch'], out_type='cls_token').load_state_dict(
        backbone(work / 'compressed.pth')
    )
    content = json.loads(report.read_text())
    names = [entry['name'] for entry in content['tensors']]
    assert 'backbone.blocks.1.attn.matrix' in names and 'head.fc.weight' in names
    assert content['measured']['2']['class_cosine'] > 0.9


def test_options_override_the_config(work, compress, capsys):
    out = work / 'other.pth'
    options = ['model.backbone.arch.static_init=random', 'compression.glad_init=random']
    compress(
        ['build', str(work / 'ours.py'), '--table', '--out', str(out), '--cfg-options', *options]
    )
    lines = capsys.readouterr().out.splitlines()
    new = [line.split()[1] for line in lines if line.startswith('new')]
    assert 'backbone.blocks.1.attn.matrix' in new and 'backbone.aggregations.2.weight' in new
    assert out.is_file()


def test_a_study_is_built_variant_by_variant(work, compress, capsys):
    variants = {
        'random': {
            'model.backbone.arch.static_init': 'random',
            'load_from': str(work / 'study' / 'random.pth'),
        },
        'no GLAD': {
            'model.backbone.arch.pyramid': (),
            'load_from': str(work / 'study' / 'no_glad.pth'),
        },
        'from scratch': {'load_from': None},
    }
    study = work / 'study.py'
    study.write_text(f'config = {str(work / "ours.py")!r}\nvariants = {variants!r}\n')
    compress(['build-study', str(study)])
    built = sorted(path.name for path in (work / 'study').iterdir())
    assert built == ['no_glad.pth', 'random.pth']
    assert not any('aggregations' in key for key in backbone(work / 'study' / 'no_glad.pth'))


def test_calibration_writes_a_backbone_for_maps(work, compress, capsys):
    compress(['build', str(work / 'ours.py')])
    out = work / 'pyramid.pth'
    arguments = [str(work / 'ours.py'), str(work / 'compressed.pth'), '--images', '10']
    compress(['calibrate', *arguments, '--out', str(out)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith('map ')]
    assert len(printed) == 2
    for line in printed:
        before, after = (float(line.split(word)[0].split()[-1]) for word in (' before', ' after'))
        assert after < before
    model = IntegratedDeiT(
        OURS['arch'],
        init_cfg=dict(type='Pretrained', checkpoint=str(out), prefix='backbone.'),
    )
    model.init_weights()
    weights = backbone(out)
    assert torch.equal(model.unprojections['3'].weight, weights['unprojections.3.weight'])


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['{}/deit.py', '--weights', '{}/deit.pth'], 'The backbone is VisionTransformer'),
        (['{}/ours.py', '--weights', '{}/none.pth'], 'There is no checkpoint'),
        (['{}/ours.py', '--stats', '{}/deit.pth'], 'deit.pth'),
        (['{}/ours.py', '--cfg-options', 'compression.original=None'], '--weights is needed'),
        (['{}/ours.py', '--cfg-options', 'load_from=None'], '--out is needed'),
        (['{}/ours.py', '--cfg-options', 'model.backbone.arch.depth=5'], 'has 4 blocks'),
        (['{}/ours.py', '--cfg-options', 'compression.glad_init=x'], 'glad_init'),
    ],
)
def test_what_cannot_be_built_is_said_in_one_sentence(work, compress, arguments, message):
    with pytest.raises(SetupError, match=message) as error:
        compress(['build', *(argument.format(work) for argument in arguments)])
    assert '\n' not in str(error.value)


def test_fewer_maps_are_built_of_what_they_need(work):
    state = torch.load(work / 'deit.pth', weights_only=True)
    tensors = load_statistics(str(work / 's.safetensors')).tensors
    built, report = build_integrated_deit(state, tensors, OURS['arch'], out_indices=(0, 1))
    model = IntegratedDeiT(OURS['arch'], out_indices=(0, 1))
    model.load_state_dict(
        {k.removeprefix('backbone.'): v for k, v in built.items() if not k.startswith('head.')}
    )
    assert model.num_layers == 2 and 'blocks.3.norm1.weight' in report.names('dropped')


@pytest.mark.parametrize('command', ['build', 'calibrate'])
def test_images_come_from_a_repeated_data_set_with_its_preprocessor_in_the_model(
    work, compress, command
):
    text = (work / 'ours.py').read_text().replace('data_preprocessor', 'preprocessor')
    text = text.replace(
        'dataset=dataset', "dataset=dict(type='RepeatDataset', times=2, dataset=dataset)"
    )
    text += "model.update(data_preprocessor=dict(type='ClsDataPreprocessor', **preprocessor))\n"
    (work / 'repeated.py').write_text(text)
    compress(['build', str(work / 'ours.py')])
    outs = work / 'plain.pth', work / 'repeated.pth'
    for name, out in zip(('ours.py', 'repeated.py'), outs, strict=True):
        arguments = ['--out', str(out), '--images', '8']
        checkpoint = [str(work / 'compressed.pth')] if command == 'calibrate' else []
        compress([command, str(work / name), *checkpoint, *arguments])
    plain, repeated = map(backbone, outs)
    assert plain.keys() == repeated.keys()
    for images in ('-1', '0') if command == 'calibrate' else ('-1',):
        with pytest.raises(SetupError, match='--images must be at least'):
            compress(
                [command, str(work / 'ours.py'), *checkpoint, '--out', 'x', '--images', images]
            )


def test_statistics_of_other_weights_are_refused(work, compress):
    state = torch.load(work / 'deit.pth', weights_only=True)['state_dict']
    state['backbone.cls_token'] = state['backbone.cls_token'] + 1
    torch.save(state, work / 'changed.pth')
    with pytest.raises(SetupError, match='with other weights than those of'):
        compress(['build', str(work / 'ours.py'), '--weights', str(work / 'changed.pth')])


def test_weights_are_read_from_safetensors_too(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / 'x.safetensors'
    save_file({'a': torch.ones(2)}, path, metadata={'format': 'pt'})
    assert torch.equal(read_weights(str(path))['a'], torch.ones(2))
    Path(path).write_bytes(b'nothing')
    with pytest.raises(SetupError, match='not a complete checkpoint file'):
        read_weights(str(path))
