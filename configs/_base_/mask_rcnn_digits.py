# SPDX-License-Identifier: Apache-2.0
# Mask R-CNN on the digit scenes: the COCO config with narrow heads, boxes and masks regressed for
# all classes alike (a class has few examples), and anchors for digits of 20 to 56 pixels. Less
# than 6 minutes on two CPU cores.
_base_ = ['./mask_rcnn_coco.py', './digits_scenes.py']

model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[64.0] * 3),
    neck=dict(out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[5], ratios=[1.0, 2.0], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, finest_scale=32),
        bbox_head=dict(
            in_channels=64, fc_out_channels=256, num_classes=10, reg_class_agnostic=True
        ),
        mask_roi_extractor=dict(out_channels=64, finest_scale=32),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_classes=10, class_agnostic=True),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=20)),
)

train_dataloader = _base_.digits_train_dataloader
val_dataloader = _base_.digits_val_dataloader
test_dataloader = val_dataloader
val_evaluator = _base_.digits_evaluator
test_evaluator = val_evaluator

optim_wrapper = _base_.digits_optimization
param_scheduler = _base_.digits_schedule
train_cfg = dict(_delete_=True, **_base_.digits_loop)
auto_scale_lr = dict(base_batch_size=8)

default_hooks = _base_.digits_hooks
log_processor = dict(window_size=10, by_epoch=False)
