# SPDX-License-Identifier: Apache-2.0
from .base import PyramidBackbone
from .integrated_deit import IntegratedDeiT
from .lavit import LaViT
from .partialformer import PartialFormer

__all__ = ['IntegratedDeiT', 'LaViT', 'PartialFormer', 'PyramidBackbone']
