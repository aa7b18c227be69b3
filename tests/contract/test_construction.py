# SPDX-License-Identifier: Apache-2.0
"""Contract: construction. From every scope, with clear errors, copied and pickled."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS

from .families import FAMILIES, image
from .frameworks import FRAMEWORKS, build_in_scope, top_model

FRESH_PROCESS = """
import sys
from mmengine import Config
config = Config.fromfile(sys.argv[1])
foreign = [m for m in ('mmcv', 'mmdet', 'mmseg', 'mmpretrain') if m in sys.modules]
assert not foreign, f'importing effvit_mm imports {foreign}'
from mmengine.registry import MODELS
for backbone in config.backbones:
    print(type(MODELS.build(backbone)).__name__)
"""


@pytest.mark.parametrize('scope', ['root', *FRAMEWORKS])
def test_builds_from_every_scope(family, scope):
    config = family.config(in_channels=4, out_indices=(0, 2), drop_path_rate=0.1, norm_eval=True)
    model = MODELS.build(config) if scope == 'root' else build_in_scope(scope, config)
    assert type(model) is family.cls


def test_custom_imports_are_all_a_config_needs_and_import_no_framework(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(
        "custom_imports = dict(imports=['effvit_mm'], allow_failed_imports=False)\n"
        f'backbones = {[family.config() for family in FAMILIES]!r}\n'
    )
    run = subprocess.run(
        [sys.executable, '-c', FRESH_PROCESS, str(path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [family.name for family in FAMILIES]


@pytest.mark.parametrize('framework', FRAMEWORKS)
@torch.no_grad()
def test_serves_the_models_of_every_framework(family, framework):
    model = top_model(framework, family)
    model.init_weights()
    features = model.eval().extract_feat(image(64, 96))
    features = features if isinstance(features, (tuple, list)) else (features,)
    assert all(f.isfinite().all() and len(f) == 2 for f in features)


@pytest.mark.parametrize('in_channels', [1, 4])
@torch.no_grad()
def test_takes_images_with_other_channels_than_three(family, in_channels):
    model = family.build(in_channels=in_channels)
    assert all(o.isfinite().all() for o in model(image(40, 50, channels=in_channels)))
    with pytest.raises(ValueError, match=f'{in_channels}'):
        model(image(40, 50))


@pytest.mark.parametrize('name', ['b99', '', None, 3])
def test_an_unknown_architecture_is_an_error_that_names_the_valid_ones(family, name):
    with pytest.raises(ValueError) as error:
        family.cls(arch=name)
    assert all(repr(valid) in str(error.value) for valid in family.cls.arch_zoo)


def test_a_missing_architecture_field_is_named(family):
    for field in next(iter(family.cls.arch_zoo.values())):
        arch = {k: v for k, v in family.small.items() if k != field}
        with pytest.raises(ValueError, match=f"'{field}'"):
            family.cls(arch=arch)


def test_an_extra_architecture_field_is_named(family):
    with pytest.raises(ValueError, match="'surplus'"):
        family.cls(arch={**family.small, 'surplus': 1})


def test_a_dict_that_starts_from_a_named_architecture_changes_only_what_it_gives(family):
    name = next(iter(family.cls.arch_zoo))
    named = family.cls.resolve_arch(name)
    for field, value in family.small.items():
        resolved = family.cls.resolve_arch({'base': name, field: value})
        assert resolved == {**named, field: value}


def test_building_leaves_the_architecture_tables_as_they_were(family):
    zoo, small = copy.deepcopy(family.cls.arch_zoo), copy.deepcopy(family.small)
    family.cls(arch=small)
    assert small == family.small
    assert zoo == family.cls.arch_zoo


def test_heads_that_do_not_divide_the_channels_are_an_error(family):
    with pytest.raises(ValueError, match=r'(?i)head'):
        family.cls(arch={**family.small, **family.indivisible})


@pytest.mark.parametrize('out_indices', [(4,), (-1,), (0, 7), (), (1, 1), ('0',)], ids=str)
def test_out_indices_out_of_range_are_an_error(family, out_indices):
    with pytest.raises(ValueError, match='out_indices'):
        family.build(out_indices=out_indices)


@pytest.mark.parametrize('frozen_stages', [-2, 5])
def test_frozen_stages_out_of_range_are_an_error(family, frozen_stages):
    with pytest.raises(ValueError, match='frozen_stages'):
        family.build(frozen_stages=frozen_stages)


COPIES = {
    'deepcopy': copy.deepcopy,
    'pickle': lambda model: pickle.loads(pickle.dumps(model)),
    'EMA': lambda model: ExponentialMovingAverage(model),
}


@pytest.mark.parametrize('how', COPIES)
def test_copies_compute_the_same_also_after_a_training_step(family, how):
    model = family.build(frozen_stages=1).train()
    x = image(48, 64)
    sum(o.sum() for o in model(x)).backward()
    twin = COPIES[how](model).eval()
    with torch.no_grad():
        for a, b in zip(twin(x), model.eval()(x), strict=True):
            assert torch.equal(a, b)


def test_moving_average_follows_the_weights(family):
    model = family.build()
    average = ExponentialMovingAverage(model, momentum=0.5)
    average.update_parameters(model)
    before = [p.clone() for p in average.module.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    average.update_parameters(model)
    for p, old in zip(average.module.parameters(), before, strict=True):
        torch.testing.assert_close(p, old + 0.5)


def test_train_and_eval_return_the_module(family):
    model = family.build(frozen_stages=2, norm_eval=True)
    assert model.train() is model
    assert model.train(False) is model
    assert model.eval() is model


@pytest.mark.parametrize('train', [False, True], ids=['eval', 'train'])
def test_everything_is_computed_on_the_device_of_the_model(family, train):
    """Torch refuses to mix devices; ``meta`` is another one than the CPU that needs no GPU."""
    for fields in ({}, *family.ablations):
        model = family.cls(arch={**family.small, **fields}).to('meta').train(train)
        outputs = model(torch.zeros(2, 3, 100, 133, device='meta'))
        assert all(o.device.type == 'meta' for o in outputs)
        if train:
            sum(o.sum() for o in outputs).backward()
