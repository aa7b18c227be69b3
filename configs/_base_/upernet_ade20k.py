# SPDX-License-Identifier: Apache-2.0
# UPerNet on ADE20K, 160k iterations of 16 images: the recipe of Swin (AdamW 6e-5, weight decay
# 0.01, 1500 iterations of warm-up, linear decay, 512x512 crops). A config adds the backbone and
# the in_channels of both heads. A classifier's backbone is loaded as in coco_1x.py.
_base_ = ['./common.py', './mmseg_runtime.py', './ade20k.py']

model = dict(
    type='EncoderDecoder',
    data_preprocessor=_base_.ade20k_preprocessor,
    backbone=dict(),
    decode_head=dict(
        type='UPerHead',
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=_base_.no_decay,
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=160000, by_epoch=False),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=160000, val_interval=16000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
# 8 GPUs with 2 images each
train_dataloader = dict(batch_size=2)
auto_scale_lr = dict(enable=False, base_batch_size=16)

default_hooks = dict(
    checkpoint=dict(interval=16000, max_keep_ckpts=3, published_keys=_base_.published_keys)
)
