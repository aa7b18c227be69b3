# SPDX-License-Identifier: Apache-2.0
from .diagonality import DiagonalityPreservingLoss
from .token_distillation import TokenDistillationLoss

__all__ = ['DiagonalityPreservingLoss', 'TokenDistillationLoss']
