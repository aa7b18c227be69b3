# SPDX-License-Identifier: Apache-2.0
# Mask R-CNN on COCO, 1x. A config adds the backbone and the FPN's in_channels.
_base_ = [
    './coco_1x.py',
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
]

model = dict(backbone=dict(_delete_=True))
