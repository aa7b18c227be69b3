# SPDX-License-Identifier: Apache-2.0
"""Compress a pretrained DeiT or Swin: statistics → search → build (``tools/compress.py``)."""

from .build import BuildReport, build_dgssa_swin, build_integrated_deit
from .calibration import calibrate_unprojections, token_survival
from .search import SearchResult, evaluate_pyramid, search_architecture
from .statistics import Statistics, collect_statistics, load_statistics

__all__ = [
    'BuildReport',
    'SearchResult',
    'Statistics',
    'build_dgssa_swin',
    'build_integrated_deit',
    'calibrate_unprojections',
    'collect_statistics',
    'evaluate_pyramid',
    'load_statistics',
    'search_architecture',
    'token_survival',
]
