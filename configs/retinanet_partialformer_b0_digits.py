# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/retinanet_digits.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b0'),
    neck=dict(in_channels=[64, 128, 256]),
)
