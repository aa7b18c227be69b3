# SPDX-License-Identifier: Apache-2.0
# A small Swin of MMPretrain for the digits, enlarged to 96 pixels: whole windows of 3 x 3 cells in
# all four stages.
_base_ = ['./classifier_deit_digits.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='SwinTransformer',
        arch=dict(embed_dims=16, depths=(2, 2, 4, 2), num_heads=(1, 2, 4, 8)),
        img_size=96,
        window_size=3,
        drop_path_rate=0.0,
    ),
    neck=dict(_delete_=True, type='GlobalAveragePooling'),
    head=dict(in_channels=128),
)

train_dataloader = dict(dataset=dict(pipeline=_base_.enlarged_train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=_base_.enlarged_pipeline))
test_dataloader = val_dataloader
