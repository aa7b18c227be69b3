# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/semantic_fpn_ade20k.py', './_base_/lavit.py']

model = dict(
    backbone=dict(type='LaViT', arch='base', drop_path_rate=0.2),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
