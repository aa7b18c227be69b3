# SPDX-License-Identifier: Apache-2.0
_base_ = ['./upernet_dgssa_swin_base.py', './_base_/fsdp.py']

custom_imports = _base_.fsdp_imports
optim_wrapper = dict(paramwise_cfg=_base_.fsdp_paramwise_cfg)
