# SPDX-License-Identifier: Apache-2.0
from .base import PyramidBackbone
from .dgssa_swin import DGSSASwin
from .integrated_deit import IntegratedDeiT
from .lavit import LaViT
from .partialformer import PartialFormer

__all__ = ['DGSSASwin', 'IntegratedDeiT', 'LaViT', 'PartialFormer', 'PyramidBackbone']
