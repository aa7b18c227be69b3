# SPDX-License-Identifier: Apache-2.0
"""What older PyTorchs lack: tests of it are skipped there."""

import pytest
import torch
from torch import nn

from effvit_mm.models.layers.utils import TORCH_2_4

needs_compile = pytest.mark.skipif(not TORCH_2_4, reason='torch.compile needs PyTorch 2.4')
needs_export = pytest.mark.skipif(
    not hasattr(getattr(torch.export, 'Dim', None), 'AUTO'),
    reason='torch.export needs PyTorch 2.6',
)


def need_cpu_autocast(dtype: torch.dtype) -> None:
    """Skip the test where PyTorch has no such autocast on a CPU: 2.1 has bfloat16 alone."""
    try:
        with torch.autocast('cpu', dtype=dtype):
            torch.ones(1, 1) @ torch.ones(1, 1)
    except RuntimeError as error:
        pytest.skip(str(error))


def need_cpu_type(dtype: torch.dtype) -> None:
    """Skip the test where PyTorch has no convolution of this type on a CPU: 2.1 in float16."""
    try:
        nn.Conv2d(1, 1, 1, dtype=dtype)(torch.ones(1, 1, 2, 2, dtype=dtype))
    except RuntimeError as error:
        pytest.skip(str(error))
