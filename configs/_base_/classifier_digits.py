# SPDX-License-Identifier: Apache-2.0
# Classification of the single digits written by tools/prepare_digits.py: minutes on two CPU cores.
_base_ = ['./classifier_imagenet.py']

model = dict(head=dict(num_classes=10, topk=(1,)), train_cfg=None)
data_preprocessor = dict(num_classes=10, mean=[127.5] * 3, std=[64.0] * 3)

pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root='data/digits/classification',
        data_prefix='train',
        pipeline=pipeline,
    ),
)
val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root='data/digits/classification',
        data_prefix='val',
        pipeline=pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator

epochs = 6
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=1,
        end=epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=epochs)
auto_scale_lr = dict(base_batch_size=64)

default_hooks = dict(logger=dict(interval=10))
