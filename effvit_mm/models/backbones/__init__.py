# SPDX-License-Identifier: Apache-2.0
from .base import PyramidBackbone
from .partialformer import PartialFormer

__all__ = ['PartialFormer', 'PyramidBackbone']
