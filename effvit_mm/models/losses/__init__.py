# SPDX-License-Identifier: Apache-2.0
from .diagonality import DiagonalityPreservingLoss

__all__ = ['DiagonalityPreservingLoss']
