# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/semantic_fpn_ade20k.py']

model = dict(
    backbone=dict(type='DGSSASwin', arch='tiny', drop_path_rate=0.3),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
