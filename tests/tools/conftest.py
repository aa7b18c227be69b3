# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.fixture(scope='session')
def load_tool():
    """A function that imports ``tools/{name}.py``."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
