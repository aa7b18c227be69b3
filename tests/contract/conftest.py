# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch
from mmengine.logging import MMLogger

from .families import FAMILIES

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_generate_tests(metafunc):
    """Tests that take ``family`` run for every family, those that take ``arch`` for its names."""
    if 'arch' in metafunc.fixturenames:
        named = [(f, a) for f in FAMILIES for a in f.cls.arch_zoo]
        metafunc.parametrize('family,arch', named, ids=[f'{f.name}-{a}' for f, a in named])
    elif 'family' in metafunc.fixturenames:
        metafunc.parametrize('family', FAMILIES, ids=[f.name for f in FAMILIES], scope='session')


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def logged():
    """What mmengine's current logger says, as a list of messages."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
