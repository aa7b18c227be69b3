# SPDX-License-Identifier: Apache-2.0
# What all configs with LaViT share: the diagonality-preserving loss is collected.
custom_hooks = [dict(type='AuxiliaryLossHook')]
