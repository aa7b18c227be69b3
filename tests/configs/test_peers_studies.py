# SPDX-License-Identifier: Apache-2.0
"""Every variant of the studies beside other models trains, and costs what the studies say."""

from pathlib import Path

import pytest
import torch
from contract.frameworks import build_in_scope, need
from mmengine.config import Config

from effvit_mm.analysis.cost import counted_macs
from effvit_mm.engine.launch import import_framework

ROOT = Path(__file__).resolve().parents[2]
#: framework, side of the images, millions of multiply-accumulates
STUDIES = {
    'peers_classification': ('mmpretrain', 64, (33, 42)),
    'peers_detection': ('mmdet', 128, (126, 146)),
    'peers_segmentation': ('mmseg', 128, (126, 146)),
}


def loaded(study):
    return Config.fromfile(ROOT / 'configs' / 'studies' / f'{study}.py').to_dict()


@pytest.mark.parametrize(
    ('study', 'variant'), [(study, name) for study in STUDIES for name in loaded(study)['variants']]
)
def test_a_variant_has_gradients_and_the_cost_of_its_peers(study, variant):
    scope, side, (least, most) = STUDIES[study]
    for name in (scope, 'mmdet'):  # the peers are MMDetection's
        need(name)
    import_framework(scope)
    study = loaded(study)
    cfg = Config.fromfile(ROOT / study['config'])
    cfg.merge_from_dict({**study['options'], **study['variants'][variant]})
    model = build_in_scope(scope, {**cfg.model, 'data_preprocessor': None}).train()
    features = model.extract_feat(torch.randn(2, 3, side, side))
    assert [f.shape[0] for f in features] == [2] * len(features)
    sum(f.square().mean() for f in features).backward()
    patches = next(m for m in model.backbone.modules() if isinstance(m, torch.nn.Conv2d))
    assert patches.weight.grad.abs().sum() > 0
    assert least <= counted_macs(model.backbone, side, side) / 1e6 <= most
