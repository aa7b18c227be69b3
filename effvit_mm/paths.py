# SPDX-License-Identifier: Apache-2.0
"""Where the files are that come with the package."""

from pathlib import Path


def config_path(name: str) -> str:
    """Path of one of this package's configs, for ``_base_`` in configs of other projects.

    mmengine's short form ``'mmdet::…'`` is for OpenMMLab's own packages only. A ``_base_`` is
    evaluated before the imports of its file::

        _base_ = [__import__('effvit_mm').config_path('mask_rcnn_partialformer_b3')]

    Args:
        name: The config's name, without folder and suffix.

    Raises:
        FileNotFoundError: There is no such config.
    """
    package = Path(__file__).resolve().parent
    # a wheel carries them inside, a clone has them beside the package
    for root in (package / '.mim', package.parent):
        path = root / 'configs' / f'{name}.py'
        if path.is_file():
            return str(path)
    raise FileNotFoundError(f'effvit_mm has no config {name!r}.')
