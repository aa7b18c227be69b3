# SPDX-License-Identifier: Apache-2.0
# Segmentation of the digit scenes that tools/prepare_digits.py writes, for the configs of
# segmentors to take from: 600 steps of 8 images.
digits_metainfo = dict(
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

digits_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
digits_train = dict(
    type='BaseSegDataset',
    data_root='data/digits',
    data_prefix=dict(img_path='scenes/train', seg_map_path='semantic/train'),
    img_suffix='.png',
    metainfo=digits_metainfo,
    pipeline=digits_pipeline,
)
digits_val = dict(
    type='BaseSegDataset',
    data_root='data/digits',
    data_prefix=dict(img_path='scenes/val', seg_map_path='semantic/val'),
    img_suffix='.png',
    metainfo=digits_metainfo,
    pipeline=digits_pipeline,
)

digits_preprocessor = dict(mean=[127.5] * 3, std=[64.0] * 3, size=(128, 128))
# SyncBN of several processes needs GPUs, and BN would leave each process its own statistics
digits_norm = dict(type='GN', num_groups=16)
# nine of ten pixels are background; weighted alike, it is all that is learned
digits_class_weight = [0.1] + [1.0] * 10

digits_steps = 600
digits_schedule = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=0.9, eta_min=0.0, begin=30, end=digits_steps, by_epoch=False),
]
