# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b4', drop_path_rate=0.3),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
