# SPDX-License-Identifier: Apache-2.0
"""Brings the losses of a backbone into the training of any framework."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn

from ..models.auxiliary import loss_sources


def _forget_losses(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: what a call past the top model left behind is not of this forward."""
    for source in loss_sources(model):
        source.take_losses()


def _add_losses(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: with ``mode='loss'``, the output with the sources' losses added."""
    taken = [(source, source.take_losses()) for source in loss_sources(model)]
    if kwargs.get('mode', args[2] if len(args) > 2 else 'tensor') != 'loss':
        return output
    output = dict(output)
    for source, losses in taken:
        for name, loss in losses.items():
            if name in output:
                raise KeyError(
                    f'{type(source).__name__} adds the loss {name!r}, which '
                    f'{type(model).__name__} already has.'
                )
            output[name] = loss
    return output


@HOOKS.register_module()
class AuxiliaryLossHook(Hook):
    """Adds auxiliary losses of a model's parts to the losses that the model returns.

    While training, every part that has losses of its own (LaViT's ``loss_diagonality``) computes
    them, and what the model returns with ``mode='loss'`` contains them. So they are logged, scaled,
    accumulated and reduced like every other loss, in MMPretrain, MMDetection and MMSegmentation::

        custom_hooks = [dict(type='AuxiliaryLossHook')]
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def before_train(self, runner: Runner) -> None:
        """Attach to the runner's model."""
        self.attach(runner.model)

    def after_train(self, runner: Runner) -> None:
        """Detach from the runner's model."""
        self.detach(runner.model)

    @staticmethod
    def _unwrap(model: nn.Module) -> nn.Module:
        while is_model_wrapper(model):
            model = model.module
        return model

    def attach(self, model: nn.Module) -> None:
        """Start collecting; for training loops other than mmengine's.

        Args:
            model: A top model, whose forward takes ``mode``, or its (nested) wrapper.

        Raises:
            ValueError: No part of the model has losses of its own.
        """
        self.detach(model)
        model = self._unwrap(model)
        sources = list(loss_sources(model))
        if not sources:
            raise ValueError(
                f'AuxiliaryLossHook: no part of this {type(model).__name__} has losses of its own.'
            )
        for source in sources:
            source._collected = True
        self._handles = [
            model.register_forward_pre_hook(_forget_losses, with_kwargs=True),
            model.register_forward_hook(_add_losses, with_kwargs=True),
        ]

    def detach(self, model: nn.Module) -> None:
        """Stop collecting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for source in loss_sources(self._unwrap(model)):
            source._collected = False
            source.take_losses()
