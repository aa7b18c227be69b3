# SPDX-License-Identifier: Apache-2.0
# Distillation on the digits. The teacher is what `tools/train.py` makes of the config that
# docs/compression.md starts with; a config adds the backbone, the head's in_channels, the teacher,
# and what `tools/compress.py build` reads and writes.
_base_ = ['./classifier_digits.py']

custom_imports = dict(
    imports=['effvit_mm', 'effvit_mm.models.classifiers'], allow_failed_imports=False
)

# with weight 1 the tokens of so small a model outweigh its predictions: docs/compression.md
model = dict(
    type='DistilledImageClassifier',
    token_loss=dict(type='TokenDistillationLoss', loss_weight=0.01),
)

epochs = 8
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
