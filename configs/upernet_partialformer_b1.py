# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b1', drop_path_rate=0.1),
    decode_head=dict(in_channels=[48, 96, 192, 384]),
    auxiliary_head=dict(in_channels=192),
)
