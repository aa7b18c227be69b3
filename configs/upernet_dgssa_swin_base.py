# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py']

model = dict(
    backbone=dict(type='DGSSASwin', arch='base', drop_path_rate=0.3),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512),
)
