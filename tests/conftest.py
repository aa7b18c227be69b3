# SPDX-License-Identifier: Apache-2.0
"""What every test gets: the process-wide state of mmengine as it was before."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mmengine.registry import DefaultScope


@contextmanager
def kept_default_scope() -> Iterator[None]:
    """A Runner leaves its default scope behind; afterwards it is as it was.

    Without this, whether a registry finds a class depends on which test ran before in
    the same process.
    """
    before = dict(DefaultScope._instance_dict)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(before)


@pytest.fixture(autouse=True, scope='module')
def default_scope_restored_after_module() -> Iterator[None]:
    """For what fixtures of a whole module run."""
    with kept_default_scope():
        yield


@pytest.fixture(autouse=True)
def default_scope_restored() -> Iterator[None]:
    with kept_default_scope():
        yield
