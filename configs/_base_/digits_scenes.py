# SPDX-License-Identifier: Apache-2.0
# Detection on the digit scenes that tools/prepare_digits.py writes, for the configs of detectors to
# take from: 500 steps of 8 images.
digits_metainfo = dict(classes=tuple('0123456789'))

# no flips: a mirrored digit is none
digits_train = dict(
    data_root='data/digits/',
    ann_file='annotations/instances_train.json',
    data_prefix=dict(img='scenes/train/'),
    metainfo=digits_metainfo,
    pipeline=[
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True, poly2mask=True),
        dict(type='PackDetInputs'),
    ],
)
digits_val = dict(
    data_root='data/digits/',
    ann_file='annotations/instances_val.json',
    data_prefix=dict(img='scenes/val/'),
    metainfo=digits_metainfo,
    pipeline=[
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='Resize', scale=(128, 128), keep_ratio=True),
        dict(
            type='PackDetInputs',
            meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
        ),
    ],
)
digits_train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=digits_train,
)
digits_val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=digits_val)
digits_evaluator = dict(ann_file='data/digits/annotations/instances_val.json')

digits_steps = 500
digits_schedule = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=30, end=digits_steps),
]
digits_optimization = dict(optimizer=dict(lr=1e-3, weight_decay=0.05), clip_grad=dict(max_norm=10))
digits_loop = dict(type='IterBasedTrainLoop', max_iters=digits_steps, val_interval=digits_steps)
digits_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(by_epoch=False, interval=digits_steps),
)
