# SPDX-License-Identifier: Apache-2.0
from .auxiliary_loss import AuxiliaryLossHook
from .layer_decay import LayerDecayOptimWrapperConstructor

__all__ = ['AuxiliaryLossHook', 'LayerDecayOptimWrapperConstructor']
