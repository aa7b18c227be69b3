# SPDX-License-Identifier: Apache-2.0
"""PartialFormer, LaViT and DGSSA + GLAD for MMPretrain, MMDetection and MMSegmentation.

Importing this package registers its modules in mmengine's root registries, where every framework
finds them: ``custom_imports = dict(imports=['effvit_mm'])`` in a config is all it takes.
"""

from . import engine, models  # noqa: F401  (registration)
from .engine import AuxiliaryLossHook
from .models.backbones import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer
from .models.losses import DiagonalityPreservingLoss, TokenDistillationLoss
from .paths import config_path
from .version import __version__

__all__ = [
    'AuxiliaryLossHook',
    'DGSSASwin',
    'DiagonalityPreservingLoss',
    'IntegratedDeiT',
    'LaViT',
    'PartialFormer',
    'TokenDistillationLoss',
    '__version__',
    'config_path',
]
