# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/retinanet_coco.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b2', drop_path_rate=0.1),
    neck=dict(in_channels=[128, 256, 512]),
)
