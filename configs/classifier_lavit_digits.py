# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_digits.py', './_base_/lavit.py']

model = dict(
    backbone=dict(
        type='LaViT',
        arch=dict(dims=(32, 64, 128, 192), depths=(2, 2, 4, 2), num_heads=(1, 2, 4, 6)),
    ),
    head=dict(in_channels=192),
)
