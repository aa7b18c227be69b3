# SPDX-License-Identifier: Apache-2.0
from . import backbones, losses  # noqa: F401
