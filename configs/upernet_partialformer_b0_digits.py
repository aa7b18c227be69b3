# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_digits.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b0'),
    decode_head=dict(in_channels=[32, 64, 128, 256]),
    auxiliary_head=dict(in_channels=128),
)
