# SPDX-License-Identifier: Apache-2.0
"""A small model of each framework around a backbone, built as its users build it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from mmengine.hub import get_config
from mmengine.registry import DefaultScope
from torch import nn

from .families import Family

FRAMEWORKS = ('mmpretrain', 'mmdet', 'mmseg')


def need(framework: str) -> Any:
    """Import a framework, or skip the test where it is not installed. A broken one is an error."""
    if find_spec(framework) is None:
        pytest.skip(f'{framework} is not installed')
    return import_module(framework)


def build_in_scope(framework: str, config: dict) -> nn.Module:
    """Build from a framework's registry under its own default scope."""
    need(framework)
    registry = import_module(f'{framework}.registry').MODELS
    with DefaultScope.overwrite_default_scope(framework):
        import_module(f'{framework}.models')
        return registry.build(config)


def top_model(framework: str, family: Family, **kwargs: Any) -> nn.Module:
    """ImageClassifier, MaskRCNN or EncoderDecoder around the family's small backbone."""
    need(framework)
    if framework == 'mmpretrain':
        kwargs.setdefault('out_indices', (3,))
    channels = family.build(awake=False, **kwargs).out_channels
    if framework == 'mmpretrain':
        config = dict(
            type='ImageClassifier',
            backbone=family.config(**kwargs),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=channels[-1]),
        )
    elif framework == 'mmseg':
        config = dict(
            type='EncoderDecoder',
            data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 64)),
            backbone=family.config(**kwargs),
            decode_head=dict(
                type='FCNHead',
                in_channels=channels[-1],
                in_index=len(channels) - 1,
                channels=8,
                num_convs=1,
                num_classes=3,
                norm_cfg=dict(type='BN'),
            ),
            train_cfg=dict(),
            test_cfg=dict(mode='whole'),
        )
    else:
        config = get_config('mmdet::_base_/models/mask-rcnn_r50_fpn.py').model
        config.backbone = family.config(**kwargs)
        config.neck.in_channels = channels
        config.roi_head.bbox_head.fc_out_channels = 8
    return build_in_scope(framework, config)
