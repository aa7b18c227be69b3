# SPDX-License-Identifier: Apache-2.0
from .layer_decay import LayerDecayOptimWrapperConstructor

__all__ = ['LayerDecayOptimWrapperConstructor']
