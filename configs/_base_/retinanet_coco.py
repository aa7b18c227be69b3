# SPDX-License-Identifier: Apache-2.0
# RetinaNet on COCO, 1x. A config adds the backbone and the FPN's in_channels.
_base_ = [
    './coco_1x.py',
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
]

model = dict(
    # RetinaNet begins at stride 8; the first stage's output norm would get no gradient
    backbone=dict(_delete_=True, out_indices=(1, 2, 3)),
    neck=dict(start_level=0),
)

# the weight decay that PVT and its successors train RetinaNet with
optim_wrapper = dict(optimizer=dict(weight_decay=1e-4))
