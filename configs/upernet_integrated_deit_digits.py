# SPDX-License-Identifier: Apache-2.0
# Scenes of 128 pixels are four windows of the pretraining's 64.
_base_ = ['./_base_/upernet_digits.py']

model = dict(
    backbone=dict(
        type='IntegratedDeiT',
        arch=dict(
            embed_dims=64,
            depth=8,
            num_heads=4,
            patch_size=8,
            image_size=64,
            static_layers=(1, 2),
            pyramid=((3, 22), (4, 20), (6, 19)),
        ),
    ),
    decode_head=dict(in_channels=[64, 64, 64, 64]),
    auxiliary_head=dict(in_channels=64),
)
