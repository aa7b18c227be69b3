# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py']

model = dict(
    backbone=dict(type='IntegratedDeiT', arch='small'),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
)
