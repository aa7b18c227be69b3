# SPDX-License-Identifier: Apache-2.0
from .base import PyramidBackbone
from .lavit import LaViT
from .partialformer import PartialFormer

__all__ = ['LaViT', 'PartialFormer', 'PyramidBackbone']
