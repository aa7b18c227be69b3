# SPDX-License-Identifier: Apache-2.0
# The Swin of classifier_swin_digits.py with static attention in half of its layers.
_base_ = [
    './_base_/classifier_distilled_digits.py',
    './_base_/digits_augmented.py',
    './_base_/dgssa_swin_digits.py',
]

model = dict(
    backbone=_base_.dgssa_swin_digits,
    head=dict(in_channels=128),
    teacher=dict(
        type='ImageClassifier',
        backbone=dict(
            type='SwinTransformer',
            arch=dict(embed_dims=16, depths=(2, 2, 4, 2), num_heads=(1, 2, 4, 8)),
            img_size=96,
            window_size=3,
        ),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=10, in_channels=128),
    ),
    teacher_checkpoint='work_dirs/classifier_swin_digits/epoch_16.pth',
)
compression = dict(
    original='work_dirs/classifier_swin_digits/epoch_16.pth',
    statistics='work_dirs/classifier_swin_digits/statistics.safetensors',
)
load_from = 'work_dirs/classifier_dgssa_swin_digits/compressed.pth'

train_dataloader = dict(dataset=dict(pipeline=_base_.enlarged_train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=_base_.enlarged_pipeline))
test_dataloader = val_dataloader
