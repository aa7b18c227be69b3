# SPDX-License-Identifier: Apache-2.0
"""What every test gets: the process-wide state of mmengine as it was before."""

import pytest
from mmengine.registry import DefaultScope


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
