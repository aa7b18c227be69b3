# SPDX-License-Identifier: Apache-2.0
"""Looking into a backbone while it runs unchanged."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Family = TypeVar('Family', bound=nn.Module)


def find_backbone(model: nn.Module, family: type[Family], what: str) -> Family:
    """The first backbone of a family in a model.

    Args:
        model: A backbone, or a model with one in it.
        family: The backbone's class.
        what: What it is looked for; for the error.

    Raises:
        ValueError: There is none.
    """
    backbone = next((m for m in model.modules() if isinstance(m, family)), None)
    if backbone is None:
        name = family.__name__
        raise ValueError(f'{type(model).__name__} has no {what}: it has no {name}.')
    return backbone


def run_observed(backbone: nn.Module, images: Tensor, handles: Iterable[RemovableHandle]) -> None:
    """A forward in eval mode and without gradients; removes the hooks that observed it.

    Args:
        backbone: The backbone; afterwards in the mode it was in.
        images: Preprocessed images ``(B, in_channels, H, W)``.
        handles: Of the hooks.
    """
    training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(images)
    finally:
        backbone.train(training)
        for handle in handles:
            handle.remove()
