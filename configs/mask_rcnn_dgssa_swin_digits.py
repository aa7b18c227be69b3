# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/mask_rcnn_digits.py', './_base_/dgssa_swin_digits.py']

model = dict(
    backbone=_base_.dgssa_swin_digits,
    neck=dict(in_channels=[16, 32, 64, 128]),
)
