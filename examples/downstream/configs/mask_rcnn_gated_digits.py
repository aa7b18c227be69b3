# SPDX-License-Identifier: Apache-2.0
# a `_base_` is evaluated before any import of the file, hence `__import__`
_base_ = [__import__('effvit_mm').config_path('mask_rcnn_partialformer_b0_digits')]

custom_imports = dict(imports=['effvit_mm', 'my_project'], allow_failed_imports=False)

model = dict(backbone=dict(type='GatedPartialFormer', arch='b0'))
