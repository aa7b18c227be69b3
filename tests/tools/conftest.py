# SPDX-License-Identifier: Apache-2.0
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Here and in the processes that tests start: a shell starts what runs in the background deaf
    to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope='session')
def load_tool():
    """A function that imports ``tools/{name}.py``."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope='session')
def digits_root(tmp_path_factory):
    """A folder with a few of the embedded pictures in data/digits."""
    root = tmp_path_factory.mktemp('root')
    counts = ['--num-train', '4', '--num-val', '2']
    counts += ['--num-classification-train', '20', '--num-classification-val', '10']
    subprocess.run([sys.executable, TOOLS / 'prepare_digits.py', *counts], cwd=root, check=True)
    return root
