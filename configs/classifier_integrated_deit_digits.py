# SPDX-License-Identifier: Apache-2.0
# The DeiT of classifier_deit_digits.py compressed: docs/compression.md says how the pyramid was
# found and how the checkpoint is built.
_base_ = [
    './_base_/classifier_distilled_digits.py',
    './_base_/digits_augmented.py',
    './_base_/integrated_deit_digits.py',
]

model = dict(
    backbone=dict(_delete_=True, **_base_.integrated_deit_digits, out_type='cls_token'),
    neck=None,
    head=dict(in_channels=64),
    teacher=dict(
        type='ImageClassifier',
        backbone=dict(
            type='VisionTransformer',
            arch=dict(embed_dims=64, num_layers=8, num_heads=4, feedforward_channels=256),
            img_size=64,
            patch_size=8,
        ),
        head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
    ),
    teacher_checkpoint='work_dirs/classifier_deit_digits/epoch_16.pth',
)
compression = dict(
    original='work_dirs/classifier_deit_digits/epoch_16.pth',
    statistics='work_dirs/classifier_deit_digits/statistics.safetensors',
)
load_from = 'work_dirs/classifier_integrated_deit_digits/compressed.pth'

train_dataloader = dict(dataset=dict(pipeline=_base_.moved_train_pipeline))
