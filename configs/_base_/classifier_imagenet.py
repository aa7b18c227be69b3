# SPDX-License-Identifier: Apache-2.0
# ImageNet-1k, 300 epochs at 224 pixels: the recipe of DeiT and Swin as MMPretrain has it. A config
# adds the backbone and the head's in_channels.
_base_ = [
    './common.py',
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]

model = dict(
    type='ImageClassifier',
    # only the last stage is used; norms of the others would get no gradient
    backbone=dict(out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

# 8 GPUs with 128 images each; --auto-scale-lr for another batch size
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, **_base_.no_decay),
    clip_grad=dict(max_norm=5.0),
)

default_hooks = dict(
    checkpoint=dict(
        published_keys=_base_.published_keys,
        max_keep_ckpts=3,
        save_best='accuracy/top1',
    )
)
