# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/retinanet_coco.py']

model = dict(
    backbone=dict(type='DGSSASwin', arch='small', drop_path_rate=0.2),
    neck=dict(in_channels=[192, 384, 768]),
)
