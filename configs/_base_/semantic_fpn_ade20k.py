# SPDX-License-Identifier: Apache-2.0
# Semantic FPN on ADE20K, 80k iterations of 16 images: the recipe of PVT (AdamW 1e-4, weight decay
# 1e-4, polynomial decay of power 0.9, 512x512 crops). A config adds the backbone and the FPN's
# in_channels. A classifier's backbone is loaded as in coco_1x.py.
_base_ = ['./common.py', './mmseg_runtime.py', './ade20k.py']

model = dict(
    type='EncoderDecoder',
    data_preprocessor=_base_.ade20k_preprocessor,
    backbone=dict(),
    neck=dict(type='FPN', out_channels=256, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[256, 256, 256, 256],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=128,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4),
    paramwise_cfg=_base_.no_decay,
)
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, begin=0, end=80000, by_epoch=False)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=80000, val_interval=8000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
# 4 GPUs with 4 images each
auto_scale_lr = dict(enable=False, base_batch_size=16)

default_hooks = dict(
    checkpoint=dict(interval=8000, max_keep_ckpts=3, published_keys=_base_.published_keys)
)
