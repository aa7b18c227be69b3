# SPDX-License-Identifier: Apache-2.0
"""tools/train.py and tools/test.py as a user calls them: in a process of their own."""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from PIL import Image

from effvit_mm.engine import launch

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / 'configs'


def run_tool(script, *args, cwd=ROOT, python=(sys.executable,), **environment):
    """Run a tool; returns its exit status, and stdout and stderr together."""
    command = [str(ROOT / 'tools' / script), *map(str, args)]
    if script.endswith('.py'):
        command = [*python, *command]
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    environment = {**os.environ, 'PATH': path, 'CUDA_VISIBLE_DEVICES': '-1', **environment}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    return result.returncode, result.stdout + result.stderr


def succeed(*args, **kwargs):
    """Run a tool that must succeed; returns what it printed."""
    status, output = run_tool(*args, **kwargs)
    assert status == 0, output
    return output


def one_sentence(output):
    """The error of a tool that stopped before its run: no traceback above it."""
    assert 'Traceback' not in output, output
    errors = [line for line in output.splitlines() if line.startswith('error: ')]
    assert len(errors) == 1, output
    return errors[0]


def polygon(x, y, width, height):
    """A diamond as COCO polygon."""
    cx, cy = x + width / 2, y + height / 2
    return [[cx, y, x + width, cy, cx, y + height, x, cy]]


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    """Four images at sizes of COCO and up, annotated in COCO's format, two per split."""
    pytest.importorskip('mmdet')
    from mmdet.datasets import CocoDataset

    root = tmp_path_factory.mktemp('coco')
    rng = np.random.default_rng(0)
    # the ids of COCO have gaps; only the names count
    categories = [
        dict(id=i + 1 + i // 11, name=name)
        for i, name in enumerate(CocoDataset.METAINFO['classes'])
    ]
    sizes = dict(train=[(480, 640), (612, 612)], val=[(640, 480), (768, 1024)])
    (root / 'annotations').mkdir()
    for split, shapes in sizes.items():
        (root / f'{split}2017').mkdir()
        images, annotations = [], []
        for image_id, (height, width) in enumerate(shapes, start=1):
            coarse = rng.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
            name = f'{image_id:012d}.jpg'
            image = Image.fromarray(coarse).resize((width, height), Image.BICUBIC)
            image.save(root / f'{split}2017' / name)
            images.append(dict(id=image_id, file_name=name, height=height, width=width))
            for _ in range(3):
                w, h = rng.integers(60, 200, 2).tolist()
                x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
                annotations.append(
                    dict(
                        id=len(annotations) + 1,
                        image_id=image_id,
                        category_id=categories[rng.integers(80)]['id'],
                        bbox=[x, y, w, h],
                        area=w * h / 2,
                        iscrowd=0,
                        segmentation=polygon(x, y, w, h),
                    )
                )
        content = dict(images=images, annotations=annotations, categories=categories)
        (root / 'annotations' / f'instances_{split}2017.json').write_text(json.dumps(content))
    return root


def coco_paths(root):
    """Command line options that point a COCO config to another folder."""
    splits = dict(train='train', val='val', test='val')
    options = [f'{split}_dataloader.dataset.data_root={root}/' for split in splits]
    annotation = f'{root}/annotations/instances_val2017.json'
    return options + [f'{split}_evaluator.ann_file={annotation}' for split in ('val', 'test')]


def scalars(work_dir):
    """What the newest run in a work dir logged, one dict per line."""
    (*_, newest) = sorted(work_dir.glob('*/vis_data/scalars.json')) or sorted(
        work_dir.glob('*/*.json')
    )
    return [json.loads(line) for line in newest.read_text().splitlines()]


def test_the_coco_command_trains_and_evaluates_and_its_result_is_tested(coco, tmp_path):
    """`tools/train.py configs/mask_rcnn_partialformer_b3.py` at 800 x 1333 with only the paths of
    the data changed; and, for the time, one image a step and one epoch."""
    config, work_dir = CONFIGS / 'mask_rcnn_partialformer_b3.py', tmp_path / 'run'
    options = [*coco_paths(coco), 'default_hooks.logger.interval=1']
    # after two steps nothing may be found with a score that counts, and then there is no metric
    options += ['model.test_cfg.rcnn.score_thr=0']
    output = succeed(
        *('train.py', config, '--work-dir', work_dir, '--cfg-options', *options),
        *('train_dataloader.batch_size=1', 'train_cfg.max_epochs=1'),
    )
    *steps, evaluation = scalars(work_dir)
    assert [step['step'] for step in steps] == [1, 2]
    assert all(step['loss_mask'] > 0 and step['loss_rpn_bbox'] > 0 for step in steps), output
    assert evaluation['coco/bbox_mAP'] >= 0 and evaluation['coco/segm_mAP'] >= 0
    (weights,) = work_dir.glob('epoch_1-*.pth')
    assert weights.stat().st_size < 0.5 * (work_dir / 'epoch_1.pth').stat().st_size

    tested, pictures, dump = (tmp_path / name for name in ('tested', 'pictures', 'dump.pkl'))
    succeed(
        *('test.py', config, weights, '--work-dir', tested, '--show-dir', pictures, '--out', dump),
        *('--cfg-options', *options),
    )
    assert dump.is_file()
    assert len(list(pictures.glob('*.jpg'))) == 2
    (metrics,) = scalars(tested)
    assert metrics['coco/segm_mAP'] == evaluation['coco/segm_mAP']


def test_a_classifier_is_resumed_tested_and_becomes_a_detectors_backbone(digits_root, tmp_path):
    pytest.importorskip('mmpretrain')
    config, work_dir = CONFIGS / 'classifier_partialformer_b0_digits.py', tmp_path / 'classifier'
    arguments = ('train.py', config, '--work-dir', work_dir)
    options = ('default_hooks.logger.interval=1', 'train_dataloader.batch_size=10')
    succeed(
        *(*arguments, '--auto-scale-lr', '--cfg-options', *options, 'train_cfg.max_epochs=1'),
        cwd=digits_root,
    )
    assert [line['epoch'] for line in scalars(work_dir) if 'loss' in line] == [1, 1]
    output = succeed(
        *(*arguments, '--resume', '--cfg-options', *options, 'train_cfg.max_epochs=2'),
        cwd=digits_root,
    )
    assert 'resumed epoch: 1, iter: 2' in output
    *steps, evaluation = scalars(work_dir)
    assert [line['step'] for line in steps] == [3, 4]

    (weights,) = work_dir.glob('epoch_2-*.pth')
    tested = tmp_path / 'tested'
    succeed(
        *('test.py', config, weights, '--work-dir', tested, '--out', tmp_path / 'out.pkl'),
        cwd=digits_root,
    )
    (metrics,) = scalars(tested)
    assert metrics['accuracy/top1'] == evaluation['accuracy/top1']
    assert (tmp_path / 'out.pkl').is_file()

    pytest.importorskip('mmdet')
    output = succeed(
        *('train.py', CONFIGS / 'mask_rcnn_partialformer_b0_digits.py'),
        *('--work-dir', tmp_path / 'detector', '--cfg-options'),
        *('train_cfg.max_iters=1', 'train_cfg.val_interval=1', 'train_dataloader.batch_size=2'),
        *('model.backbone.init_cfg.type=Pretrained', 'model.backbone.init_cfg.prefix=backbone.'),
        f'model.backbone.init_cfg.checkpoint={weights}',
        cwd=digits_root,
    )
    assert f'tensors from {weights}' in output


def test_two_processes_train_and_test_on_the_cpu(digits_root, tmp_path):
    pytest.importorskip('mmseg')
    config, work_dir = CONFIGS / 'semantic_fpn_partialformer_b0_digits.py', tmp_path / 'run'
    output = succeed(
        *('dist_train.sh', config, 2, '--work-dir', work_dir, '--cfg-options'),
        *('train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2'),
        *('default_hooks.logger.interval=1', 'default_hooks.checkpoint.interval=2'),
        cwd=digits_root,
        OMP_NUM_THREADS='1',
    )
    assert 'Distributed training: True' in output and 'GPU number: 2' in output
    *steps, evaluation = scalars(work_dir)
    assert [line['step'] for line in steps] == [1, 2]
    labels, tested = tmp_path / 'labels', tmp_path / 'tested'
    succeed(
        *('dist_test.sh', config, work_dir / 'iter_2.pth', 2, '--work-dir', tested),
        *('--out', labels, '--show-dir', tmp_path / 'pictures'),
        cwd=digits_root,
        OMP_NUM_THREADS='1',
    )
    assert len(list(labels.glob('*.png'))) == 2
    assert list((tmp_path / 'pictures').rglob('*.png'))
    assert scalars(tested)[-1]['mIoU'] == evaluation['mIoU']


@pytest.mark.parametrize(
    ('framework', 'config'),
    [
        ('mmdet', 'mask_rcnn_partialformer_b0.py'),
        ('mmseg', 'semantic_fpn_partialformer_b0.py'),
        ('mmcv', 'classifier_partialformer_b0.py'),
    ],
)
def test_a_missing_framework_is_one_sentence(framework, config, tmp_path):
    """In an environment that is this one without the framework."""
    pytest.importorskip(framework)
    mine = Path(sysconfig.get_path('purelib'))
    hidden = {framework, *packages_distributions()[framework]}
    hidden = {name.replace('-', '_') for name in hidden}
    for entry in mine.iterdir():
        if entry.name.split('-')[0] not in hidden:
            (tmp_path / entry.name).symlink_to(entry)
    # -S: without this environment's own packages
    python = (sys.executable, '-S')
    status, output = run_tool('train.py', CONFIGS / config, python=python, PYTHONPATH=str(tmp_path))
    assert status == 1
    assert 'follow "Installation" in the README' in one_sentence(output)


@pytest.mark.parametrize(
    ('config', 'options', 'words'),
    [
        ('mask_rcnn_partialformer_b3.py', {}, ['data/coco', 'https://cocodataset.org']),
        ('classifier_partialformer_b0.py', {}, ['data/imagenet', 'https://image-net.org']),
        ('semantic_fpn_partialformer_b4.py', {}, ['data/ade/ADEChallengeData2016', 'ADE']),
        ('mask_rcnn_partialformer_b0_digits.py', {}, ['python tools/prepare_digits.py']),
        ('classifier_partialformer_b0_digits.py', {}, ['python tools/prepare_digits.py']),
        ('semantic_fpn_partialformer_b0_digits.py', {}, ['python tools/prepare_digits.py']),
        (
            'mask_rcnn_partialformer_b3.py',
            {
                'train_dataloader.dataset': dict(
                    _delete_=True,
                    type='RepeatDataset',
                    times=2,
                    dataset=dict(type='MyDataset', data_root='elsewhere', ann_file='a.json'),
                )
            },
            ['elsewhere/a.json', 'MyDataset', '--cfg-options'],
        ),
    ],
)
def test_a_missing_data_set_says_where_it_comes_from(config, options, words, tmp_path, monkeypatch):
    scope = {'m': 'mmdet', 's': 'mmseg', 'c': 'mmpretrain'}[config[0]]
    pytest.importorskip(scope)
    cfg = Config.fromfile(CONFIGS / config)
    cfg.merge_from_dict(options)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(launch.SetupError) as error:
        launch.check_data(cfg, 'train', 'val')
    for word in words:
        assert word in str(error.value)


def test_a_missing_checkpoint_says_what_writes_it(digits_root):
    config = CONFIGS / 'classifier_integrated_deit_digits.py'
    status, output = run_tool('train.py', config, cwd=digits_root)
    assert status != 0
    message = one_sentence(output)
    assert 'load_from' in message and 'tools/compress.py build' in message
    load_from = digits_root / 'some.pth'
    load_from.touch()
    status, output = run_tool(
        'train.py', config, '--cfg-options', f'load_from={load_from}', cwd=digits_root
    )
    assert status != 0
    assert 'train the teacher first' in one_sentence(output)


@pytest.mark.parametrize(
    ('dataset', 'missing'),
    [
        (dict(type='CUB', data_root='.', split='train'), None),
        (dict(type='CIFAR10', data_root='nowhere', split='train'), None),
        (dict(type='CIFAR10', data_root='nowhere', download=False), 'nowhere'),
        (dict(type='ImageNet', data_root='.', split='train'), './train'),
    ],
)
def test_a_split_is_a_folder_for_imagenet_only(dataset, missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config(dict(train_dataloader=dict(dataset=dataset)))
    if missing is None:
        launch.check_data(cfg, 'train')
        return
    with pytest.raises(launch.SetupError, match=f'needs {missing}'):
        launch.check_data(cfg, 'train')


def test_resume_without_a_checkpoint_starts_as_the_config_says(digits_root, tmp_path):
    """Also where jobs that are requeued always have --resume."""
    pytest.importorskip('mmpretrain')
    config = CONFIGS / 'classifier_partialformer_b0_digits.py'
    cfg = Config.fromfile(config)
    launch.import_framework('mmpretrain')
    with DefaultScope.overwrite_default_scope('mmpretrain'), torch.no_grad():
        model = launch.build_model(cfg, None)
        model.head.fc.bias.fill_(7)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'start.pth')
    options = (f'load_from={tmp_path / "start.pth"}', 'optim_wrapper.optimizer.lr=0.0')
    work_dir = tmp_path / 'work'
    arguments = ('train.py', config, '--work-dir', work_dir, '--resume', '--cfg-options')
    succeed(*(*arguments, *options, 'train_cfg.max_epochs=1'), cwd=digits_root)
    state = torch.load(work_dir / 'epoch_1.pth', weights_only=False)['state_dict']
    assert torch.all(state['head.fc.bias'] == 7)
    # a resumed run's own config evaluates weights alone
    output = succeed(*(*arguments, *options, 'train_cfg.max_epochs=2'), cwd=digits_root)
    assert 'resumed epoch: 1' in output
    (weights,) = work_dir.glob('epoch_2-*.pth')
    succeed(
        'test.py', work_dir / config.name, weights, '--work-dir', tmp_path / 't', cwd=digits_root
    )


def test_an_evaluator_that_was_forgotten_is_found_before_training(coco, monkeypatch):
    cfg = Config.fromfile(CONFIGS / 'mask_rcnn_partialformer_b3.py')
    options = [option for option in coco_paths(coco) if 'val_evaluator' not in option]
    cfg.merge_from_dict(dict(option.split('=') for option in options))
    launch.check_data(cfg, 'train', 'test')
    with pytest.raises(launch.SetupError, match='val_evaluator needs data/coco/annotations'):
        launch.check_data(cfg, 'train', 'val')


def test_operators_without_cuda_on_a_gpu_are_one_sentence(monkeypatch):
    ops = pytest.importorskip('mmcv.ops')
    monkeypatch.setattr(ops, 'get_compiling_cuda_version', lambda: 'not available')
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    launch.check_operators()
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    with pytest.raises(launch.SetupError, match=r'mim install (onedl-)?mmcv==.*nvcc'):
        launch.check_operators()
    monkeypatch.setattr(ops, 'get_compiling_cuda_version', lambda: '12.8')
    launch.check_operators()


def test_an_mmcv_without_operators_is_one_sentence(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'mmcv._ext'", name='mmcv._ext')

    monkeypatch.setattr(launch.importlib, 'import_module', import_module)
    with pytest.raises(launch.SetupError, match='no compiled operators'):
        launch.import_framework('mmdet')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['train.py', 'configs/none.py'], 'no config configs/none.py'),
        (['train.py', CONFIGS / '_base_' / 'common.py'], 'default_scope=None'),
        (['train.py', CONFIGS / 'common.py', '--resume', 'none.pth'], 'no checkpoint none.pth'),
        (['test.py', CONFIGS / 'common.py', 'none.pth'], 'no checkpoint none.pth'),
        (
            ['train.py', CONFIGS / 'semantic_fpn_partialformer_b0_digits.py', '--amp'],
            '--amp needs a GPU',
        ),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments, words, digits_root):
    status, output = run_tool(*arguments, cwd=digits_root)
    assert status == 1 and words in one_sentence(output)


def test_importing_the_package_does_not_import_the_tools_helpers():
    code = 'import sys, effvit_mm; sys.exit("effvit_mm.engine.launch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
