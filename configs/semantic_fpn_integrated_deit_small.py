# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/semantic_fpn_ade20k.py']

model = dict(
    backbone=dict(type='IntegratedDeiT', arch='small'),
    neck=dict(in_channels=[384, 384, 384, 384]),
)
