# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_digits.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b0'),
    head=dict(in_channels=256),
)
