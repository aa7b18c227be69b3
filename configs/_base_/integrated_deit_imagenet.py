# SPDX-License-Identifier: Apache-2.0
# What Integrated-DeiT's classifiers for ImageNet-1k share: a config adds the architecture, its
# channels, and the original.
_base_ = ['./classifier_distilled_imagenet.py']

model = dict(
    backbone=dict(_delete_=True, type='IntegratedDeiT', out_type='cls_token', drop_path_rate=0.1),
    neck=None,
)

# 8 GPUs with 512 images each
train_dataloader = dict(batch_size=512)
auto_scale_lr = dict(base_batch_size=4096)
