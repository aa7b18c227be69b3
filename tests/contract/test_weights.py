# SPDX-License-Identifier: Apache-2.0
"""Contract: weights. What is loaded, what is said about the rest, and that no code ever runs."""

import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from attacks import attacks
from mmengine.runner import save_checkpoint

from effvit_mm.models.checkpoint import read_state_dict

from .families import awaken, image
from .frameworks import top_model
from .runs import train


def pretrained(family, checkpoint, prefix='backbone.', **kwargs):
    """A fresh backbone, initialised from a checkpoint as the frameworks do it."""
    config = dict(type='Pretrained', checkpoint=str(checkpoint))
    if prefix is not None:
        config['prefix'] = prefix
    model = family.build(init_cfg=config, **kwargs)
    model.init_weights()
    return model


def assert_loaded(model, state):
    """Every weight that ``state`` has of the model is in the model."""
    for name, value in model.state_dict().items():
        if name in state:
            assert torch.equal(value, state[name]), name


@pytest.fixture(scope='session')
def classifier(family, tmp_path_factory):
    """Checkpoint of a MMPretrain classifier written by mmengine, and its backbone's weights."""
    model = top_model('mmpretrain', family)
    awaken(model.backbone, gain=0.5)
    path = tmp_path_factory.mktemp('weights') / 'classifier.pth'
    save_checkpoint(dict(meta=dict(epoch=1), state_dict=model.state_dict()), str(path))
    return path, model.backbone.state_dict()


@pytest.fixture(scope='session')
def backbone_file(family, tmp_path_factory):
    """Bare weights of a backbone with all outputs, and the same weights."""
    model = awaken(family.build(), gain=0.5)
    path = tmp_path_factory.mktemp('weights') / 'backbone.pth'
    torch.save(model.state_dict(), path)
    return path, model.state_dict()


@pytest.mark.parametrize('out_indices', [(3,), (0, 1, 2, 3), (1, 2)], ids=str)
def test_a_classifier_s_checkpoint_initialises_a_backbone(family, classifier, out_indices):
    path, state = classifier
    model = pretrained(family, path, out_indices=out_indices)
    assert_loaded(model, state)
    assert all(name in state or re.match(family.cls.may_lack, name) for name in model.state_dict())


@pytest.mark.parametrize('framework', ['mmdet', 'mmseg'])
def test_a_classifier_s_checkpoint_initialises_detectors_and_segmentors(
    family, classifier, framework
):
    path, state = classifier
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    model = top_model(framework, family, init_cfg=init_cfg)
    model.init_weights()
    assert_loaded(model.backbone, state)


def test_frozen_stages_are_loaded_and_stay_frozen(family, classifier):
    path, state = classifier
    model = pretrained(family, path, frozen_stages=2)
    assert_loaded(model, state)
    for name, p in model.named_parameters():
        assert p.requires_grad != family.is_frozen(name, 2), name


def test_what_was_not_loaded_is_logged(family, classifier, logged):
    path, state = classifier
    model = pretrained(family, path)
    text = '\n'.join(logged)
    left_out = [name for name in model.state_dict() if name not in state]
    assert left_out
    assert all(name in text for name in left_out)


def test_what_was_not_used_is_logged(family, backbone_file, logged):
    path, state = backbone_file
    model = pretrained(family, path, prefix=None, out_indices=(3,))
    text = '\n'.join(logged)
    unused = [name for name in state if name not in model.state_dict()]
    assert unused
    assert all(name in text for name in unused)


@torch.no_grad()
def test_loading_after_saving_is_strict_and_exact(family, backbone_file):
    path, state = backbone_file
    model = family.build()
    model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    assert_loaded(model, state)
    twin = pretrained(family, path, prefix=None)
    for size in [(64, 64), (50, 91)]:
        for a, b in zip(model(image(*size)), twin(image(*size)), strict=True):
            assert torch.equal(a, b)


@torch.no_grad()
def test_weights_fit_whatever_image_size_was_run_before(family, backbone_file):
    path, state = backbone_file
    model = family.build()
    model(image(300, 70))
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    fresh = pretrained(family, path, prefix=None)
    for a, b in zip(model(image(64, 96)), fresh(image(64, 96)), strict=True):
        assert torch.equal(a, b)


def test_the_prefix_of_data_parallel_is_taken_off(family, classifier, tmp_path):
    path, state = classifier
    content = torch.load(path, weights_only=True)
    content['state_dict'] = {f'module.{k}': v for k, v in content['state_dict'].items()}
    torch.save(content, tmp_path / 'parallel.pth')
    assert_loaded(pretrained(family, tmp_path / 'parallel.pth'), state)


@pytest.mark.parametrize('wrapping', ['state_dict', 'model', 'module'])
def test_weights_are_found_under_the_usual_keys(family, backbone_file, wrapping, tmp_path):
    _, state = backbone_file
    torch.save({wrapping: state, 'epoch': 3}, tmp_path / 'wrapped.pth')
    assert_loaded(pretrained(family, tmp_path / 'wrapped.pth', prefix=None), state)


# errors


def test_no_matching_weight_is_an_error(family, tmp_path):
    torch.save({'conv1.weight': torch.zeros(3), 'fc.bias': torch.zeros(3)}, tmp_path / 'other.pth')
    with pytest.raises(ValueError, match=r'other\.pth'):
        pretrained(family, tmp_path / 'other.pth', prefix=None)


def test_a_forgotten_prefix_is_an_error_that_names_it(family, classifier):
    with pytest.raises(ValueError, match=r"prefix='backbone\.'"):
        pretrained(family, classifier[0], prefix=None)


def test_a_prefix_that_the_checkpoint_lacks_is_an_error(family, classifier):
    with pytest.raises(ValueError, match='encoder'):
        pretrained(family, classifier[0], prefix='encoder.')


@pytest.mark.parametrize('change', ['a block less', 'a block more', 'another shape'])
def test_a_checkpoint_of_another_architecture_is_an_error(family, backbone_file, change, tmp_path):
    state = dict(backbone_file[1])
    block = [name for name in state if name.startswith(family.block)]
    assert block
    following = re.sub(r'\d+\.$', lambda last: f'{int(last[0][:-1]) + 1}.', family.block)
    if change == 'a block less':
        state = {k: v for k, v in state.items() if k not in block}
    elif change == 'a block more':
        state.update({k.replace(family.block, following): state[k] for k in block})
    else:
        state[block[0]] = torch.zeros(*state[block[0]].shape, 2)
    torch.save(state, tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='architecture'):
        pretrained(family, tmp_path / 'other.pth', prefix=None)


def test_a_refused_checkpoint_leaves_the_weights_as_they_were(family, backbone_file, tmp_path):
    state = {k: v + 1 for k, v in backbone_file[1].items()}
    del state[next(reversed([k for k in state if 'blocks.' in k]))]
    torch.save(state, tmp_path / 'incomplete.pth')
    model = family.build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError):
        model.load_pretrained(str(tmp_path / 'incomplete.pth'))
    assert_loaded(model, before)


def test_a_missing_file_is_an_error(family, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'nowhere\.pth'):
        pretrained(family, tmp_path / 'nowhere.pth')


@pytest.mark.parametrize('kept', [0, 10, 0.1, 0.5, 0.99])
@pytest.mark.parametrize('values', [5, 10_000, 500_000])
@pytest.mark.parametrize('legacy', [False, True], ids=['zip', 'legacy'])
def test_a_truncated_file_is_an_error_that_names_it(family, kept, values, legacy, tmp_path):
    buffer = io.BytesIO()
    content = dict(state_dict={'stages.0.x': torch.zeros(values)})
    torch.save(content, buffer, _use_new_zipfile_serialization=not legacy)
    data = buffer.getvalue()
    kept = int(kept * len(data)) if isinstance(kept, float) else kept
    (tmp_path / 'half.pth').write_bytes(data[:kept])
    with pytest.raises(ValueError, match=r'half\.pth'):
        pretrained(family, tmp_path / 'half.pth', prefix=None)


@pytest.mark.parametrize(
    'content', [b'<html>404</html>', b'hello world', b'\x00' * 500, b'PK\x03\x04' + b'a' * 99]
)
def test_a_file_that_is_no_checkpoint_is_an_error_that_names_it(family, content, tmp_path):
    (tmp_path / 'page.pth').write_bytes(content)
    with pytest.raises(ValueError, match=r'page\.pth'):
        pretrained(family, tmp_path / 'page.pth', prefix=None)


@pytest.mark.parametrize('content', [[torch.zeros(2)], {}, {'epoch': 3}, torch.zeros(2)], ids=str)
def test_a_file_without_weights_is_an_error_that_names_it(family, content, tmp_path):
    torch.save(content, tmp_path / 'empty.pth')
    with pytest.raises(ValueError, match=r'empty\.pth'):
        pretrained(family, tmp_path / 'empty.pth', prefix=None)


# code in checkpoints


def write_zip(content, path):
    torch.save(content, path)


def write_legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


def write_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize('place', ['weights', 'meta'])
@pytest.mark.parametrize('write', [write_zip, write_legacy, write_pickle])
@pytest.mark.parametrize('function', ['mkdir', 'eval', 'getattr'])
def test_code_in_a_checkpoint_never_runs(family, backbone_file, place, write, function, tmp_path):
    marker = tmp_path / 'marker'
    attack = attacks(marker)[function]
    content = dict(state_dict=dict(backbone_file[1]), meta=dict())
    content['state_dict' if place == 'weights' else 'meta']['x'] = attack
    path = tmp_path / 'attack.pth'
    write(content, path)
    with pytest.raises(ValueError, match=r'attack\.pth'):
        pretrained(family, path, prefix=None)
    assert not marker.exists()
    if function == 'mkdir':  # the attack does work where code is allowed to run
        pickle.loads(pickle.dumps(attack))
        assert marker.exists()


# mmengine's own files


@pytest.fixture(scope='session')
def training_checkpoint(family, tmp_path_factory) -> Path:
    """What mmengine's runner writes: with optimizer, schedulers and message hub."""
    folder = tmp_path_factory.mktemp('run')
    train(family, folder, epochs=1)
    return folder / 'epoch_1.pth'


def test_a_training_checkpoint_of_mmengine_is_read_without_running_code(
    family, training_checkpoint
):
    trusted = torch.load(training_checkpoint, weights_only=False)
    assert {'message_hub', 'optimizer', 'param_schedulers'} <= trusted.keys()
    assert read_state_dict(str(training_checkpoint)).keys() == trusted['state_dict'].keys()
    model = pretrained(family, training_checkpoint, out_indices=(3,))
    weights = {k.removeprefix('backbone.'): v for k, v in trusted['state_dict'].items()}
    assert weights.keys() > model.state_dict().keys()
    assert_loaded(model, weights)


def test_a_published_checkpoint_of_mmengine_is_read(family, training_checkpoint, tmp_path):
    content = torch.load(training_checkpoint, weights_only=False)
    torch.save({k: content[k] for k in ('meta', 'state_dict')}, tmp_path / 'published.pth')
    model = pretrained(family, tmp_path / 'published.pth', out_indices=(3,))
    assert_loaded(model, {k.removeprefix('backbone.'): v for k, v in content['state_dict'].items()})
