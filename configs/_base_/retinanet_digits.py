# SPDX-License-Identifier: Apache-2.0
# RetinaNet on the digit scenes: the COCO config with a narrow head of two layers instead of four,
# on strides 8, 16 and 32, and anchors for digits of 20 to 56 pixels.
_base_ = ['./retinanet_coco.py', './digits_scenes.py']

model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[64.0] * 3),
    neck=dict(out_channels=64, num_outs=3),
    bbox_head=dict(
        num_classes=10,
        in_channels=64,
        feat_channels=64,
        stacked_convs=2,
        anchor_generator=dict(
            octave_base_scale=3, scales_per_octave=2, ratios=[1.0, 2.0], strides=[8, 16, 32]
        ),
    ),
    test_cfg=dict(nms_pre=300, max_per_img=20),
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
