# SPDX-License-Identifier: Apache-2.0
_base_ = ['./mask_rcnn_lavit_small.py', './_base_/fsdp.py']

custom_imports = _base_.fsdp_imports
optim_wrapper = dict(paramwise_cfg=_base_.fsdp_paramwise_cfg)
