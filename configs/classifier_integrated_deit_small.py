# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_distilled_imagenet.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='IntegratedDeiT',
        arch='small',
        out_type='cls_token',
        drop_path_rate=0.1,
    ),
    neck=None,
    head=dict(in_channels=384),
    teacher=dict(model_name='deit_small_patch16_224'),
)
compression = dict(
    original='timm:deit_small_patch16_224',
    statistics='work_dirs/integrated_deit_small/statistics.safetensors',
)
load_from = 'work_dirs/integrated_deit_small/compressed.pth'

# 8 GPUs with 512 images each
train_dataloader = dict(batch_size=512)
auto_scale_lr = dict(base_batch_size=4096)
