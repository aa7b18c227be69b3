# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_distilled_imagenet.py']

model = dict(
    backbone=dict(type='DGSSASwin', arch='base', drop_path_rate=0.5),
    head=dict(in_channels=1024),
    teacher=dict(model_name='swin_base_patch4_window7_224'),
)
compression = dict(
    original='timm:swin_base_patch4_window7_224',
    statistics='work_dirs/dgssa_swin_base/statistics.safetensors',
)
load_from = 'work_dirs/dgssa_swin_base/compressed.pth'
