# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_distilled_imagenet.py']

model = dict(
    backbone=dict(type='DGSSASwin', arch='small', drop_path_rate=0.3),
    head=dict(in_channels=768),
    teacher=dict(model_name='swin_small_patch4_window7_224'),
)
compression = dict(
    original='timm:swin_small_patch4_window7_224',
    statistics='work_dirs/dgssa_swin_small/statistics.safetensors',
)
load_from = 'work_dirs/dgssa_swin_small/compressed.pth'
