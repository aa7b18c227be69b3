# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_imagenet.py', './_base_/lavit.py']

model = dict(
    backbone=dict(type='LaViT', arch='base', drop_path_rate=0.3),
    head=dict(in_channels=512),
)
