# SPDX-License-Identifier: Apache-2.0
"""Classifiers of MMPretrain. Not imported with the package, which does not need MMPretrain:
``custom_imports = dict(imports=['effvit_mm', 'effvit_mm.models.classifiers'])``."""

from .distilled import DistilledImageClassifier

__all__ = ['DistilledImageClassifier']
