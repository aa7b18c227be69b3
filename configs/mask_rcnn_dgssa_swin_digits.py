# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/mask_rcnn_digits.py']

model = dict(
    backbone=dict(
        type='DGSSASwin',
        arch=dict(
            embed_dims=16,
            depths=(2, 2, 4, 2),
            num_heads=(1, 2, 4, 8),
            window_size=3,
            static_layers=(1, 2, 3, 4, 5),
        ),
    ),
    neck=dict(in_channels=[16, 32, 64, 128]),
)
