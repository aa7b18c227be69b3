# SPDX-License-Identifier: Apache-2.0
"""Compress a pretrained DeiT or Swin: statistics → search → build (``tools/compress.py``)."""

from .search import SearchResult, evaluate_pyramid, search_architecture
from .statistics import Statistics, collect_statistics, load_statistics

__all__ = [
    'SearchResult',
    'Statistics',
    'collect_statistics',
    'evaluate_pyramid',
    'load_statistics',
    'search_architecture',
]
