# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/integrated_deit_imagenet.py']

model = dict(
    backbone=dict(arch='tiny'),
    head=dict(in_channels=192),
    teacher=dict(model_name='deit_tiny_patch16_224'),
)
compression = dict(
    original='timm:deit_tiny_patch16_224',
    statistics='work_dirs/integrated_deit_tiny/statistics.safetensors',
)
load_from = 'work_dirs/integrated_deit_tiny/compressed.pth'
