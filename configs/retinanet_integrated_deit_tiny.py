# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/retinanet_coco.py']

model = dict(
    backbone=dict(type='IntegratedDeiT', arch='tiny'),
    neck=dict(in_channels=[192, 192, 192]),
)
