# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from .workers import Group

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='session')
def one():
    """A process that trains alone."""
    group = Group(1)
    yield group
    group.close()


@pytest.fixture(scope='session')
def two():
    """Two processes that train together."""
    group = Group(2)
    yield group
    group.close()


@pytest.fixture(scope='session')
def digits_root(tmp_path_factory):
    """A folder with a few of the embedded pictures in data/digits: two images of 64 pixels for
    each process and step are an epoch of ten steps."""
    root = tmp_path_factory.mktemp('root')
    counts = ['--num-train', '12', '--num-val', '2', '--scene-size', '64']
    counts += ['--num-classification-train', '40', '--num-classification-val', '10']
    counts += ['--classification-size', '64']
    subprocess.run(
        [sys.executable, ROOT / 'tools' / 'prepare_digits.py', *counts], cwd=root, check=True
    )
    return root
