# SPDX-License-Identifier: Apache-2.0
# A small DeiT of MMPretrain for the digits: what the compression starts from there
# (docs/compression.md). 8 x 8 patches and the class token.
_base_ = ['./_base_/classifier_digits.py', './_base_/digits_augmented.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch=dict(embed_dims=64, num_layers=8, num_heads=4, feedforward_channels=256),
        img_size=64,
        patch_size=8,
    ),
    neck=None,
    # with 0.02, which 1000 classes start from, ten epochs pass before anything is learned
    head=dict(in_channels=64, init_cfg=dict(std=0.1)),
)

train_dataloader = dict(batch_size=32, dataset=dict(pipeline=_base_.moved_train_pipeline))
epochs = 16
optim_wrapper = dict(optimizer=dict(betas=(0.9, 0.98)))
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
auto_scale_lr = dict(base_batch_size=32)
