# SPDX-License-Identifier: Apache-2.0
_base_ = ['./_base_/classifier_imagenet.py']

model = dict(
    backbone=dict(type='PartialFormer', arch='b4', drop_path_rate=0.3),
    head=dict(in_channels=768),
)
