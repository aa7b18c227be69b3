# SPDX-License-Identifier: Apache-2.0
# Training images for transformers without convolutions, which overfit few digits: moved, inverted,
# and in other hues. Nothing is mirrored: a mirrored digit is none.
augmented_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=64, padding=6, padding_mode='reflect'),
    dict(type='Invert', prob=0.5),
    dict(type='ColorJitter', hue=0.5, backend='cv2'),
    dict(type='PackInputs'),
]
# the same at 96 pixels, and without augmentation
enlarged_train_pipeline = [
    *augmented_pipeline[:-1],
    dict(type='Resize', scale=96),
    dict(type='PackInputs'),
]
enlarged_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=96),
    dict(type='PackInputs'),
]
