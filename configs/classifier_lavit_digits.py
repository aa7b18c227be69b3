# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_digits.py', './_base_/lavit_digits.py']

model = dict(
    backbone=_base_.lavit_digits,
    head=dict(in_channels=192),
)
