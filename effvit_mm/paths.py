# SPDX-License-Identifier: Apache-2.0
"""Where the configs lie that this package brings."""

from pathlib import Path


def config_path(name: str) -> str:
    """Path of one of this package's configs, wherever the package is installed.

    For the ``_base_`` of a config in another project, which is read before anything is imported::

        _base_ = [__import__('effvit_mm').config_path('mask_rcnn_partialformer_b3.py')]

    Args:
        name: File in ``configs``, such as ``'mask_rcnn_partialformer_b3.py'``.

    Raises:
        FileNotFoundError: There is no such config.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / '.mim' / 'configs', package.parent / 'configs'):
        if (folder / name).is_file():
            return str(folder / name)
    raise FileNotFoundError(f'effvit_mm has no config {name}.')
