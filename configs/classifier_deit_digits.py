# SPDX-License-Identifier: Apache-2.0
# A small DeiT of MMPretrain for the digits: what the compression pipeline starts from there
# (docs/compression.md). 8 x 8 patches and the class token.
_base_ = ['./_base_/classifier_digits.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch=dict(embed_dims=64, num_layers=8, num_heads=4, feedforward_channels=256),
        img_size=64,
        patch_size=8,
    ),
    neck=None,
    head=dict(in_channels=64),
)

epochs = 40
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=2, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=2,
        end=epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=epochs)
