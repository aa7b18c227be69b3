# SPDX-License-Identifier: Apache-2.0
"""A project that builds on effvit_mm. Importing it registers its modules."""

from .backbones import GatedPartialFormer

__all__ = ['GatedPartialFormer']
