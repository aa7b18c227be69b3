# SPDX-License-Identifier: Apache-2.0
"""The index of configs and the page made from it say what the code does."""

import shutil

import pytest
import yaml

pytest.importorskip('mmdet')


@pytest.fixture(scope='module')
def model_zoo(load_tool):
    return load_tool('model_zoo')


@pytest.fixture(scope='module')
def index(model_zoo):
    return yaml.safe_load((model_zoo.ROOT / 'model-index.yml').read_text())


def test_every_config_but_those_on_the_digits_is_in_the_index(index, model_zoo):
    configs = {path.stem for path in (model_zoo.ROOT / 'configs').glob('*.py')}
    listed = [model['Name'] for model in index['Models']]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in configs if not name.endswith(('_digits', '_fsdp'))}


def test_the_page_is_what_the_index_says(index, model_zoo):
    assert (model_zoo.ROOT / 'docs' / 'model_zoo.md').read_text() == model_zoo.zoo_text(index)


@pytest.mark.parametrize('family, size', [('partialformer', 'b0'), ('dgssa_swin', 'tiny')])
def test_the_costs_in_the_index_are_those_of_the_code(index, model_zoo, family, size):
    pytest.importorskip('mmpretrain')
    models = {model['Name']: model for model in index['Models']}
    for head in ('classifier', 'mask_rcnn'):
        old = models[f'{head}_{family}_{size}']
        assert model_zoo.entry(family, head, size, old) == old


def test_an_index_that_is_out_of_date_is_named(model_zoo, tmp_path, monkeypatch):
    for name in ('model-index.yml', 'configs/classifier_lavit_tiny.py', 'docs/model_zoo.md'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(model_zoo.ROOT / name, tmp_path / name)
    monkeypatch.setattr(model_zoo, 'ROOT', tmp_path)
    with pytest.raises(model_zoo.SetupError, match='which is no config'):
        model_zoo.main(['--check'])


@pytest.mark.slow
def test_index_and_page_are_up_to_date(model_zoo):
    model_zoo.main(['--check'])
