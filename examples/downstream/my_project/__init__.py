# SPDX-License-Identifier: Apache-2.0
from .backbones import CoordPartialFormer  # noqa: F401 (registration)
