# SPDX-License-Identifier: Apache-2.0
# Mask R-CNN on the digit scenes that tools/prepare_digits.py writes: the COCO config with narrow
# heads, boxes and masks regressed for all classes alike (a class has few examples), anchors for
# digits of 20 to 56 pixels, and 500 steps: less than 6 minutes on two CPU cores.
_base_ = ['./mask_rcnn_coco.py']

metainfo = dict(classes=tuple('0123456789'))

model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[64.0] * 3),
    neck=dict(out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[5], ratios=[1.0, 2.0], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, finest_scale=32),
        bbox_head=dict(
            in_channels=64, fc_out_channels=256, num_classes=10, reg_class_agnostic=True
        ),
        mask_roi_extractor=dict(out_channels=64, finest_scale=32),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_classes=10, class_agnostic=True),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=20)),
)

# no flips: a mirrored digit is none
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True, poly2mask=True),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        data_root='data/digits/',
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='scenes/train/'),
        metainfo=metainfo,
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root='data/digits/',
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='scenes/val/'),
        metainfo=metainfo,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='data/digits/annotations/instances_val.json')
test_evaluator = val_evaluator

steps = 500
optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=10.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=30, end=steps),
]
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=steps, val_interval=steps)
auto_scale_lr = dict(base_batch_size=8)

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(by_epoch=False, interval=steps),
)
log_processor = dict(window_size=10, by_epoch=False)
