# SPDX-License-Identifier: Apache-2.0
"""Compress a pretrained DeiT or Swin: statistics → search → build (``tools/compress.py``)."""

from .search import SearchResult, evaluate_pyramid, search_architecture

__all__ = ['SearchResult', 'evaluate_pyramid', 'search_architecture']
