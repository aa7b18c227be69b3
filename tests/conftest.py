# SPDX-License-Identifier: Apache-2.0
"""What every test gets: the process-wide state of mmengine as it was before; and the wheel."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from mmengine.registry import DefaultScope

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *('setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'model-index.yml'),
    *('effvit_mm', 'configs', 'tools'),
)


@pytest.fixture(autouse=True)
def default_scope_restored():
    """A Runner leaves its default scope behind; the next test starts without it.

    Without this, whether a registry finds a class depends on which test ran before in
    the same process.
    """
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


@pytest.fixture(scope='session')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel, built from a copy so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp('checkout')
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns('__pycache__', '.mim')
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, '-m', 'pip', 'wheel', str(copy), '--wheel-dir', str(copy / 'dist')]
    command += ['--no-deps', '--no-build-isolation', '--no-cache-dir', '--quiet']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (copy / 'dist').glob('effvit_mm-*-py3-none-any.whl')
    return ZipFile(path)
