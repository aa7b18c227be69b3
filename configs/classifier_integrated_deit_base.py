# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/integrated_deit_imagenet.py']

model = dict(
    backbone=dict(arch='base'),
    head=dict(in_channels=768),
    teacher=dict(model_name='deit_base_patch16_224'),
)
compression = dict(
    original='timm:deit_base_patch16_224',
    statistics='work_dirs/integrated_deit_base/statistics.safetensors',
)
load_from = 'work_dirs/integrated_deit_base/compressed.pth'
