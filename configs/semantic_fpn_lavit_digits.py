# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/semantic_fpn_digits.py', './_base_/lavit_digits.py']

model = dict(
    backbone=_base_.lavit_digits,
    neck=dict(in_channels=[32, 64, 128, 192]),
)
