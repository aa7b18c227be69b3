# SPDX-License-Identifier: Apache-2.0
"""Every variant of the compression's studies is a model that can be built and learns from the
original."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from effvit_mm.analysis.cost import analytical_macs
from effvit_mm.engine.launch import import_framework
from effvit_mm.models.backbones import IntegratedDeiT

pytest.importorskip('mmpretrain')
ROOT = Path(__file__).resolve().parents[2]
STUDIES = {
    name: Config.fromfile(ROOT / 'configs' / 'studies' / f'{name}.py').to_dict()
    for name in ('integrated_deit_digits', 'dgssa_swin_digits')
}


@pytest.mark.parametrize(
    ('study', 'variant'),
    [(name, variant) for name, study in STUDIES.items() for variant in study['variants']],
)
def test_a_variant_starts_from_a_checkpoint_of_its_own_and_has_gradients(study, variant):
    study = STUDIES[study]
    cfg = Config.fromfile(ROOT / study['config'])
    cfg.merge_from_dict({**study['options'], **study['variants'][variant]})
    starts = [changes['load_from'] for changes in study['variants'].values()]
    assert cfg.load_from in starts and len(set(starts)) == len(starts)
    cfg.model.teacher_checkpoint = None
    import_framework('mmpretrain')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build({**cfg.model, 'data_preprocessor': cfg.data_preprocessor})
    model.train()
    from mmpretrain.structures import DataSample

    size = 96 if 'swin' in study['config'] else 64
    images = torch.randn(2, 3, size, size)
    losses = model.loss(images, [DataSample().set_gt_label(i) for i in range(2)])
    sum(value for name, value in losses.items() if name.startswith('loss')).backward()
    assert all(torch.isfinite(value) for value in losses.values())
    patches = next(m for m in model.backbone.modules() if isinstance(m, torch.nn.Conv2d))
    assert patches.weight.grad.abs().sum() > 0


@pytest.mark.parametrize('variant', ['Q = 2', 'Q = 1', 'concat', 'downsample'])
def test_other_aggregations_are_placed_for_about_the_same_cost(variant):
    study = STUDIES['integrated_deit_digits']
    macs = []
    for changes in ({}, study['variants'][variant]):
        cfg = Config.fromfile(ROOT / study['config'])
        cfg.merge_from_dict({k: v for k, v in changes.items() if k != 'load_from'})
        model = IntegratedDeiT(cfg.model.backbone.arch.to_dict(), out_type='cls_token')
        macs.append(analytical_macs(model, 64, 64))
    assert macs[1] == pytest.approx(macs[0], rel=0.05)


def test_the_studies_reach_every_baseline_and_ablation_of_the_paper():
    changes = [variant for study in STUDIES.values() for variant in study['variants'].values()]
    settings = {(key, str(value)) for change in changes for key, value in change.items()}
    arch = 'model.backbone.arch.'
    assert settings >= {
        (f'{arch}static_init', 'random'),
        (f'{arch}static_init', 'local'),
        (f'{arch}static_block', 'mlp'),
        (f'{arch}aggregation', 'concat'),
        (f'{arch}aggregation', 'downsample'),
        (f'{arch}pyramid', '()'),  # B1
        (f'{arch}static_layers', '()'),  # B2
        (f'{arch}static_layers', '(1, 2, 3, 4, 5, 6)'),  # P
        (f'{arch}static_layers', '(1, 2, 3, 4, 5, 6, 7, 8, 9)'),
        (f'{arch}pyramid', '((3, 20),)'),  # Q
        (f'{arch}static_layers', '(1, 2, 3, 4, 5, 6, 7)'),  # A1
        (f'{arch}pyramid', '((1, 24), (4, 20), (6, 19))'),  # A2
        (f'{arch}glad_norm', 'False'),
        (f'{arch}glad_pos_embed', 'False'),
        ('model.token_loss', 'None'),
        ('model.distillation_weight', '0.0'),
        ('compression.glad_init', 'random'),
    }
