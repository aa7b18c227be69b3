# SPDX-License-Identifier: Apache-2.0
# ImageNet-1k, 300 epochs at 224 pixels, with the model that was compressed as the teacher: the
# paper's recipe (AdamW 1e-3, 5 warm-up epochs from 1e-6, a cosine to 1e-5, weight decay 0.05,
# DeiT's augmentation; batches of 1024 for DGSSA alone, of 4096 with GLAD). A config adds the
# backbone, the head's in_channels and the teacher; `tools/compress.py build` makes what `load_from`
# names out of what `compression` names, docs/compression.md says how.
_base_ = ['./classifier_imagenet.py']

custom_imports = dict(
    imports=['effvit_mm', 'effvit_mm.models.classifiers'], allow_failed_imports=False
)

model = dict(
    type='DistilledImageClassifier',
    teacher=dict(type='TimmClassifier', pretrained=True),
    token_loss=dict(type='TokenDistillationLoss', loss_weight=1.0),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=5,
        end=300,
        convert_to_iter_based=True,
    ),
]
