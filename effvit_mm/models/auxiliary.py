# SPDX-License-Identifier: Apache-2.0
"""Losses that a part of a model computes in its forward, and the whole model is trained with."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from .layers.utils import is_compiling


class _Tie(torch.autograd.Function):
    """The identity of a feature and a loss, which makes both pass through the same backward node.

    A wrapper that prepares a module's parameters when the gradient of the module's *output* arrives
    (FSDP) would not know of a loss that leaves by another way.
    """

    @staticmethod
    def forward(ctx: Any, feature: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        return feature.clone(), loss.clone()

    @staticmethod
    def backward(ctx: Any, feature: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        return feature, loss


class AuxiliaryLossSource:
    """Mixin of modules with losses of their own; ``AuxiliaryLossHook`` collects them.

    A subclass of this and of :class:`torch.nn.Module` computes them in its forward if
    :meth:`wants_losses`, and ends with :meth:`hand_over`. They are kept only until the top model's
    forward ends, and are never copied or pickled.
    """

    _collected = False
    _warned = False
    _losses: tuple[tuple[str, Tensor], ...] = ()

    def wants_losses(self) -> bool:
        """Whether somebody collects losses now. Warns once when training without a collector."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        if not self._collected and not self._warned and not is_compiling():
            self._warned = True
            print_log(
                f'{type(self).__name__} is trained without its auxiliary losses: nobody collects '
                "them. Add custom_hooks = [dict(type='AuxiliaryLossHook')] to the config, or "
                'switch the losses off.',
                logger='current',
                level=logging.WARNING,
            )
        return self._collected

    def hand_over(self, name: str, loss: Tensor, feature: Tensor) -> Tensor:
        """Leave a loss for the collector.

        Args:
            name: Its name in the log, ``loss_…``.
            loss: A scalar.
            feature: An output of the module's forward, which the loss is tied to.

        Returns:
            The feature, to be returned in place of the one given.
        """
        feature, loss = _Tie.apply(feature, loss)
        self._losses = (*self._losses, (name, loss))
        return feature

    def take_losses(self) -> dict[str, Tensor]:
        """The losses since the last call, by name; of several forwards their sum."""
        losses: dict[str, Tensor] = {}
        for name, loss in self._losses:
            losses[name] = losses[name] + loss if name in losses else loss
        self._losses = ()
        return losses

    def __getstate__(self) -> dict[str, Any]:
        # a loss is part of a graph, which cannot be copied, and a copy has no collector
        inherited = getattr(super(), '__getstate__', None)
        state = dict(inherited() if inherited else self.__dict__)
        state.pop('_losses', None)
        state.pop('_collected', None)
        return state


def loss_sources(model: nn.Module) -> Iterator[AuxiliaryLossSource]:
    """All parts of a model that have losses of their own."""
    return (module for module in model.modules() if isinstance(module, AuxiliaryLossSource))
