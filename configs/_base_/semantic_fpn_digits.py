# SPDX-License-Identifier: Apache-2.0
# Semantic FPN on the digit scenes written by tools/prepare_digits.py: the ADE20K config with narrow
# heads and 600 steps, minutes on two CPU cores.
_base_ = ['./semantic_fpn_ade20k.py']

metainfo = dict(
    classes=('background', *'0123456789'),
    palette=[
        [0, 0, 0],
        [230, 25, 75],
        [60, 180, 75],
        [255, 225, 25],
        [0, 130, 200],
        [245, 130, 48],
        [145, 30, 180],
        [70, 240, 240],
        [240, 50, 230],
        [210, 245, 60],
        [250, 190, 212],
    ],
)

model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[64.0] * 3, size=(128, 128)),
    neck=dict(out_channels=64),
    decode_head=dict(
        in_channels=[64, 64, 64, 64],
        channels=64,
        num_classes=11,
        # SyncBN exists on GPUs only, and BN would leave each process its own statistics
        norm_cfg=dict(_delete_=True, type='GN', num_groups=16),
        # nine of ten pixels are background; weighted alike, it is all that is learned
        loss_decode=dict(class_weight=[0.1] + [1.0] * 10),
    ),
)

pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type='BaseSegDataset',
        data_root='data/digits',
        data_prefix=dict(img_path='scenes/train', seg_map_path='semantic/train'),
        img_suffix='.png',
        metainfo=metainfo,
        pipeline=pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type='BaseSegDataset',
        data_root='data/digits',
        data_prefix=dict(img_path='scenes/val', seg_map_path='semantic/val'),
        img_suffix='.png',
        metainfo=metainfo,
        pipeline=pipeline,
    ),
)
test_dataloader = val_dataloader

steps = 600
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=0.9, eta_min=0.0, begin=30, end=steps, by_epoch=False),
]
train_cfg = dict(max_iters=steps, val_interval=steps)
auto_scale_lr = dict(base_batch_size=8)

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=steps))
