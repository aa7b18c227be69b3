# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b3', drop_path_rate=0.2),
    decode_head=dict(in_channels=[80, 160, 320, 640]),
    auxiliary_head=dict(in_channels=320),
)
