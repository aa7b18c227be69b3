# SPDX-License-Identifier: Apache-2.0
# UPerNet on the digit scenes: the ADE20K config with narrow heads, minutes on two CPU cores.
_base_ = ['./upernet_ade20k.py', './digits_masks.py']

model = dict(
    data_preprocessor=_base_.digits_preprocessor,
    decode_head=dict(
        channels=64,
        # the last map of a 128x128 image has 4x4 cells
        pool_scales=(1, 2, 4),
        num_classes=11,
        norm_cfg=dict(_delete_=True, **_base_.digits_norm),
        loss_decode=dict(class_weight=_base_.digits_class_weight),
    ),
    auxiliary_head=dict(
        channels=64,
        num_classes=11,
        norm_cfg=dict(_delete_=True, **_base_.digits_norm),
        loss_decode=dict(class_weight=_base_.digits_class_weight),
    ),
)

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(_delete_=True, **_base_.digits_train),
)
val_dataloader = dict(
    num_workers=0, persistent_workers=False, dataset=dict(_delete_=True, **_base_.digits_val)
)
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
param_scheduler = _base_.digits_schedule
train_cfg = dict(max_iters=_base_.digits_steps, val_interval=_base_.digits_steps)
auto_scale_lr = dict(base_batch_size=8)

default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=_base_.digits_steps))
