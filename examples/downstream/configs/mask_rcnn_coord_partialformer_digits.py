# SPDX-License-Identifier: Apache-2.0
# Mask R-CNN on the digits with this project's backbone. Everything else is effvit_mm's config.
_base_ = [__import__('effvit_mm').config_path('mask_rcnn_partialformer_b0_digits.py')]

custom_imports = dict(imports=['effvit_mm', 'my_project'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        type='CoordPartialFormer', arch=dict(_delete_=True, base='b0', depths=(2, 2, 3, 2))
    )
)
