# SPDX-License-Identifier: Apache-2.0
# COCO, 12 epochs, with the optimiser, warm-up and batch size that MMDetection trains Swin with.
# What a detector adds: its model and its dataset of MMDetection.
#
# The backbone of a classifier trained with the config classifier_... is loaded with
#   --cfg-options model.backbone.init_cfg.type=Pretrained
#     model.backbone.init_cfg.checkpoint=work_dirs/.../epoch_300-....pth
#     model.backbone.init_cfg.prefix=backbone.
_base_ = [
    './common.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
]

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=_base_.no_decay,
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
# 8 GPUs with 2 images each
auto_scale_lr = dict(base_batch_size=16)

default_hooks = dict(checkpoint=dict(published_keys=_base_.published_keys))
