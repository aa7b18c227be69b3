# SPDX-License-Identifier: Apache-2.0
"""tools/export.py: files hold the checkpoint's weights and compute what the framework computes."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmengine.utils import import_modules_from_strings
from versions import needs_export

from effvit_mm.engine import export as core
from effvit_mm.engine.faults import run_or_explain
from effvit_mm.engine.launch import build_model, drop_teacher, import_framework

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
MAPS = ['stride4', 'stride8', 'stride16', 'stride32']
# one block; exporting it takes a second
SHALLOW = [
    '--cfg-options',
    'model.backbone.out_indices=[0]',
    'model.backbone.arch.depths=(1,1,1,1)',
    'model.head.in_channels=32',
]
LAVIT = 'classifier_lavit_digits'
PARTIALFORMER = 'classifier_partialformer_b0_digits'


@pytest.fixture(autouse=True)
def _same_logging():
    logger = MMLogger.get_current_instance()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope='module')
def tool(load_tool):
    return load_tool('export')


@pytest.fixture
def refused(tool, capsys):
    """A function that runs the tool and returns the sentence it ends with."""

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_or_explain(lambda: tool.main([str(arg) for arg in args]))
        sentence = str(ended.value)
        assert sentence.startswith('error: ') and '\n' not in sentence
        return sentence

    return run


def config(name):
    cfg = Config.fromfile(CONFIGS / f'{name}.py')
    pytest.importorskip(cfg.default_scope)
    pytest.importorskip('onnxruntime')
    import_framework(cfg.default_scope)
    if 'teacher' in cfg.model:
        import_modules_from_strings(**cfg.custom_imports)
        drop_teacher(cfg)
    return cfg


def build(name, checkpoint=None, seed=0, shallow=False):
    cfg = config(name)
    if shallow:
        cfg.merge_from_dict(
            dict(
                model=dict(
                    backbone=dict(out_indices=[0], arch=dict(depths=(1, 1, 1, 1))),
                    head=dict(in_channels=32),
                )
            )
        )
    torch.manual_seed(seed)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = build_model(cfg, checkpoint)
    if checkpoint is None:
        core.wake_zeros(model)
    return model


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A function that writes a checkpoint of a config's model, with weights by a seed."""
    folder = tmp_path_factory.mktemp('checkpoints')
    logging.getLogger('mmengine').setLevel('WARNING')

    def write(name, seed=0, shallow=False, change=lambda state: None):
        path = folder / f'{name}_{seed}_{shallow}.pth'
        state = build(name, seed=seed, shallow=shallow).state_dict()
        change(state)
        torch.save(dict(state_dict=state), path)
        return str(path)

    return write


def largest_difference(actual, expected):
    assert [a.shape for a in actual] == [e.shape for e in expected]
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ('name', 'args', 'outputs'),
    [
        (PARTIALFORMER, [], ['logits']),
        ('mask_rcnn_lavit_digits', [], MAPS),
        pytest.param(
            'semantic_fpn_partialformer_b0_digits', ['--opset', '18'], MAPS, marks=needs_export
        ),  # PyTorch 2.1 writes no opset above 17
        ('classifier_integrated_deit_digits', [], ['logits']),
        pytest.param('classifier_dgssa_swin_digits', [], ['logits'], marks=pytest.mark.slow),
        pytest.param('mask_rcnn_integrated_deit_digits', [], MAPS, marks=pytest.mark.slow),
        pytest.param('upernet_dgssa_swin_digits', [], MAPS, marks=pytest.mark.slow),
        pytest.param(LAVIT, ['--part', 'backbone'], ['stride32'], marks=pytest.mark.slow),
        pytest.param('upernet_lavit_digits', [], MAPS, marks=pytest.mark.slow),
        pytest.param('retinanet_lavit_digits', [], ['stride8', 'stride16'], marks=pytest.mark.slow),
        pytest.param(LAVIT, [], ['logits'], marks=pytest.mark.slow),
        pytest.param('mask_rcnn_partialformer_b0_digits', [], MAPS, marks=pytest.mark.slow),
    ],
)
def test_onnx_computes_what_the_framework_does(tool, checkpoint, tmp_path, name, args, outputs):
    weights, out = checkpoint(name), tmp_path / 'new' / 'model.onnx'
    tool.main([str(CONFIGS / f'{name}.py'), weights, '--out', str(out), '--size', '64', *args])
    import onnx

    file = onnx.load(out)
    meta = {prop.key: prop.value for prop in file.metadata_props}
    assert [o.name for o in file.graph.output][: len(outputs)] == outputs
    assert json.loads(meta['output_names']) == [o.name for o in file.graph.output]
    assert meta['config'] == name and meta['checkpoint'] == Path(weights).name
    assert json.loads(meta['mean']) == [127.5] * 3 and meta['channel_order'] == 'rgb'
    assert json.loads(meta['versions'])['torch'] == torch.__version__
    (opset,) = [entry.version for entry in file.opset_import if entry.domain == '']
    assert opset == (18 if args == ['--opset', '18'] else 17)

    model = build(name, weights)
    compute = {
        'backbone': model.backbone,
        'backbone-neck': model.extract_feat,
        'model': model,
    }[meta['part']]
    image = torch.randn(2, 3, 75, 130)
    with torch.no_grad():
        expected = core.as_tuple(compute(image))
    assert largest_difference(core.load_onnx(str(out))(image), expected) < 1e-4


def test_another_checkpoint_gives_another_file(tool, checkpoint, tmp_path):
    image = torch.randn(2, 3, 64, 64)
    logits = []
    for seed in (1, 2):
        weights, out = checkpoint(LAVIT, seed, shallow=True), tmp_path / f'{seed}.onnx'
        args = [str(CONFIGS / f'{LAVIT}.py'), weights, '--out', str(out), '--size', '64']
        tool.main([*args, *SHALLOW])
        logits.append(core.load_onnx(str(out))(image)[0])
        with torch.no_grad():
            expected = build(LAVIT, weights, shallow=True)(image)
        assert largest_difference(logits[-1:], [expected]) < 1e-5
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@needs_export
@pytest.mark.parametrize(
    ('name', 'options'),
    [
        (LAVIT, SHALLOW),
        pytest.param(LAVIT, [], marks=pytest.mark.slow),
        pytest.param(PARTIALFORMER, [], marks=pytest.mark.slow),
        pytest.param('mask_rcnn_lavit_digits', [], marks=pytest.mark.slow),
        pytest.param('semantic_fpn_partialformer_b0_digits', [], marks=pytest.mark.slow),
    ],
)
def test_torch_export_computes_what_the_framework_does(
    tool, checkpoint, tmp_path, capsys, name, options
):
    shallow, out = bool(options), str(tmp_path / 'model.pt2')
    weights = checkpoint(name, shallow=shallow)
    tool.main([str(CONFIGS / f'{name}.py'), weights, '--out', out, '--size', '64', *options])
    table = [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if ' x ' in line]
    assert len(table) == 6 and all(float(value) < 1e-5 for row in table for value in row)

    extra = {core.METADATA_FILE: ''}
    program = torch.export.load(out, extra_files=extra)
    meta = json.loads(extra[core.METADATA_FILE])
    assert meta['config'] == name and meta['std'] == [64.0] * 3
    model = build(name, weights, shallow=shallow)
    compute = model if meta['part'] == 'model' else model.extract_feat
    image = torch.randn(4, 3, 75, 130)
    with torch.no_grad():
        actual = core.as_tuple(program.module()(image))
        assert largest_difference(actual, core.as_tuple(compute(image))) < 1e-5
    surplus = {name.split('.')[0] for name in program.state_dict} - {'backbone', 'neck', 'head'}
    assert not surplus


def test_with_normalisation_and_softmax_pixels_become_scores(tool, checkpoint, tmp_path):
    weights, out = checkpoint(LAVIT, shallow=True), str(tmp_path / 'model.onnx')
    args = [str(CONFIGS / f'{LAVIT}.py'), weights, '--out', out, '--size', '64', *SHALLOW]
    tool.main([*args, '--normalise', '--softmax'])
    from mmpretrain.structures import DataSample

    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    data = dict(inputs=pixels, data_samples=[DataSample(), DataSample()])
    with torch.no_grad():
        found = build(LAVIT, weights, shallow=True).test_step(data)
    (scores,) = core.load_onnx(out)(pixels.float())
    assert largest_difference([scores], [torch.stack([f.pred_score for f in found])]) < 1e-6


def test_the_preprocessor_of_a_detector_normalises_as_its_framework_does():
    cfg = config('mask_rcnn_lavit_digits')
    cfg.model.data_preprocessor.update(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = build_model(cfg, None)
    pixels = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    with torch.no_grad():
        module, _ = core.make_part(cfg, model, 'backbone', normalise=True)
        expected = model.data_preprocessor(dict(inputs=list(pixels)))['inputs']
        torch.testing.assert_close(module.normalise(pixels.float()), expected)


# what is not exported


@pytest.fixture
def lavit(checkpoint):
    """The arguments of a small export that works."""
    return [CONFIGS / f'{LAVIT}.py', checkpoint(LAVIT, shallow=True), '--size', '64', *SHALLOW]


def test_a_file_that_differs_from_eager_replaces_nothing(refused, lavit, tmp_path):
    out = tmp_path / 'model.onnx'
    out.write_text('what was there')
    sentence = refused(*lavit, '--out', out, '--tolerance', 0)
    assert 'differs from eager' in sentence and 'nothing was written' in sentence
    assert [path.name for path in tmp_path.iterdir()] == ['model.onnx']
    assert out.read_text() == 'what was there'


def test_a_model_to_which_all_images_are_alike_is_no_comparison(refused, checkpoint, tmp_path):
    def forget(state):
        for key in state:
            if key.startswith('head.'):
                state[key].zero_()

    weights = checkpoint(LAVIT, seed=3, shallow=True, change=forget)
    args = [CONFIGS / f'{LAVIT}.py', weights, '--size', '64', *SHALLOW]
    assert 'the same for different images' in refused(*args, '--out', tmp_path / 'model.onnx')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', ['model.onnx', pytest.param('model.pt2', marks=needs_export)])
def test_a_model_bound_to_one_size_is_exported_with_that_size(tool, refused, tmp_path, name):
    pytest.importorskip('mmpretrain')
    pytest.importorskip('onnxruntime')
    (tmp_path / 'vit.py').write_text("""
_base_ = ['mmpretrain::deit/deit-tiny_4xb256_in1k.py']
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True, embed_dims=32, num_layers=1, num_heads=2, feedforward_channels=32
        ),
        img_size=64,
    ),
    head=dict(in_channels=32),
)
""")
    args = [str(tmp_path / 'vit.py'), '--size', '64', '--out', str(tmp_path / 'out' / name)]
    assert 'needs --fixed-size' in refused(*args)
    assert not list((tmp_path / 'out').iterdir())
    tool.main([*args, '--fixed-size'])
    load = core.load_onnx if name.endswith('onnx') else core.load_torch_export
    (logits,) = load(args[-1])(torch.randn(5, 3, 64, 64))
    assert logits.shape == (5, 1000)


@pytest.mark.parametrize(
    ('args', 'sentence'),
    [
        (['--out', 'model.bin'], 'must end in .onnx (onnx) or .pt2 (torch-export)'),
        (['--out', 'model.onnx', '--format', 'torch-export'], 'writes a .pt2 file'),
        (['--out', 'model.onnx', '--format', 'tflite'], "There is no format 'tflite'"),
        (['--out', 'model.onnx', '--opset', '16'], 'must be between 17 and'),
        (['--out', 'model.onnx', '--opset', '99'], 'must be between 17 and'),
        (['--out', 'model.onnx', '--size', '32'], 'of at least 33'),
        (['--out', 'model.onnx', '--part', 'backbone', '--softmax'], 'for whole classifiers'),
        (['--out', 'file/model.onnx'], 'cannot be written'),
        (['--out', 'folder.onnx'], 'it is a folder'),
    ],
)
def test_mistakes_are_said_in_a_sentence(refused, lavit, tmp_path, monkeypatch, args, sentence):
    monkeypatch.chdir(tmp_path)
    Path('file').touch()
    Path('folder.onnx').mkdir()
    assert sentence in refused(*lavit, *args)
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['file', 'folder.onnx']


@pytest.mark.parametrize(
    ('name', 'part', 'sentence'),
    [
        ('mask_rcnn_lavit_digits', 'model', 'is for classifiers of MMPretrain'),
        ('semantic_fpn_lavit_digits', 'model', 'is for classifiers of MMPretrain'),
        ('upernet_lavit_digits', 'backbone-neck', 'has no neck'),
    ],
)
def test_parts_that_a_config_lacks_are_said(refused, tmp_path, name, part, sentence):
    config(name)
    out = tmp_path / 'model.onnx'
    assert sentence in refused(CONFIGS / f'{name}.py', '--out', out, '--part', part)


def test_weights_that_the_config_names_and_that_are_missing_are_said(refused, lavit, tmp_path):
    options = [
        'model.backbone.init_cfg.type=Pretrained',
        'model.backbone.init_cfg.checkpoint=no.pth',
    ]
    args = [lavit[0], *lavit[2:], *options, '--out', tmp_path / 'model.onnx']
    assert 'There is no checkpoint no.pth' in refused(*args)


def test_checkpoints_that_do_not_fit_are_said(refused, lavit, checkpoint, tmp_path):
    damaged, complete = tmp_path / 'damaged.pth', Path(lavit[1]).read_bytes()
    out = ['--out', tmp_path / 'model.onnx']
    wrong = {checkpoint(LAVIT): 'does not fit the config', 'none.pth': 'There is no checkpoint'}
    for path, sentence in wrong.items():
        assert sentence in refused(lavit[0], path, *lavit[2:], *out)
    for content in (b'', b'no checkpoint', complete[: len(complete) // 2]):
        damaged.write_bytes(content)
        assert 'damaged.pth' in refused(lavit[0], damaged, *lavit[2:], *out)
    assert [path.name for path in tmp_path.iterdir()] == ['damaged.pth']


@pytest.mark.parametrize('missing', ['onnx', 'onnxruntime'])
def test_without_onnx_the_way_to_get_it_is_said(refused, lavit, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert 'pip install onnx onnxruntime' in refused(*lavit, '--out', tmp_path / 'model.onnx')
