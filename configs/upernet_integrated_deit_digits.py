# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_digits.py', './_base_/integrated_deit_digits.py']

model = dict(
    backbone=_base_.integrated_deit_digits,
    decode_head=dict(in_channels=[64, 64, 64, 64]),
    auxiliary_head=dict(in_channels=64),
)
