# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/upernet_ade20k.py', './_base_/lavit.py']

model = dict(
    backbone=dict(type='LaViT', arch='tiny', drop_path_rate=0.1),
    decode_head=dict(in_channels=[64, 128, 256, 448]),
    auxiliary_head=dict(in_channels=256),
)
