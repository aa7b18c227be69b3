# SPDX-License-Identifier: Apache-2.0
"""Packaging. mmcv with compiled operators is installed beforehand: see README, "Installation"."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# Both families provide the modules mmengine, mmcv, mmdet, mmseg and mmpretrain, so neither is
# required: installing one over the other would overwrite files.
ONEDL = [
    'onedl-mmengine>=0.10.12,<0.11',
    'onedl-mmcv>=2.3.6,<2.4',
    'onedl-mmdetection>=3.5.1,<3.6',
    'onedl-mmpretrain>=1.3.6,<1.4',
    'onedl-mmsegmentation>=1.4.2,<1.5',
]
OPENMMLAB = [
    'mmengine>=0.10.7,<0.11',
    'mmcv>=2.1.0,<2.2',
    'mmdet>=3.3.0,<3.4',
    'mmpretrain>=1.2.0,<1.3',
    'mmsegmentation>=1.2.2,<1.3',
    'numpy<2',
    'opencv-python<4.12',
    # MMSegmentation imports these two and does not ask for them
    'ftfy',
    'regex',
]
TESTS = [
    'pytest>=8',
    'pytest-xdist>=3.6',
    'hypothesis>=6',
    'onnx>=1.17',
    'onnxruntime>=1.20',
    'onnxscript>=0.5',
    'scikit-learn>=1.5',
    'ruff',
]


def read_version() -> str:
    """``__version__`` of effvit_mm, without importing it."""
    scope: dict = {}
    exec((ROOT / 'effvit_mm' / 'version.py').read_text(), scope)
    return scope['__version__']


class BuildWithMim(build_py):
    """Put configs, tools and the model index where OpenMMLab's MIM looks: ``effvit_mm/.mim``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they lie beside the package
            return
        mim = Path(self.build_lib, 'effvit_mm', '.mim')
        shutil.rmtree(mim, ignore_errors=True)
        for folder in ('configs', 'tools'):
            ignore = shutil.ignore_patterns('__pycache__', '.*')
            shutil.copytree(ROOT / folder, mim / folder, ignore=ignore)
        shutil.copy(ROOT / 'model-index.yml', mim)


setup(
    name='effvit_mm',
    version=read_version(),
    description='Efficient ViT backbones for MMPretrain, MMDetection and MMSegmentation',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires='>=3.10',
    packages=find_packages(include=['effvit_mm', 'effvit_mm.*']),
    cmdclass={'build_py': BuildWithMim},
    install_requires=['torch>=2.1', 'timm>=1.0.31,<1.1', 'safetensors>=0.4'],
    extras_require={'onedl': ONEDL, 'openmmlab': OPENMMLAB, 'tests': TESTS},
    zip_safe=False,
)
