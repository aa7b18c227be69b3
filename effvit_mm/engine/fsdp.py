# SPDX-License-Identifier: Apache-2.0
"""Fully sharded training (FSDP) with mmengine's FlexibleRunner.

Not imported by ``import effvit_mm``; a config names it::

    custom_imports = dict(imports=['effvit_mm', 'effvit_mm.engine.fsdp'])
    runner_type = 'FlexibleRunner'
    strategy = dict(type='BackboneFSDPStrategy', state_dict_cfg='full')
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from mmengine._strategy import FSDPStrategy
from mmengine.optim import BaseOptimWrapper
from mmengine.registry import STRATEGIES
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from ..models.backbones import PyramidBackbone


@STRATEGIES.register_module()
class BackboneFSDPStrategy(FSDPStrategy):
    """mmengine's ``FSDPStrategy``, with each block of our backbones as a unit.

    What it does beyond that, mmengine's own strategy not doing it:

    - ``clip_grad`` is by the norm of the whole gradient. Each process has a shard of it;
      clipped by the norms of shards, a step would have another direction.
    - A run is resumed with PyTorch from 2.1 on, which takes the arguments in another order.
    - It runs on a CPU (gloo).
    - ``paramwise_cfg.flat_decay_mult`` is an error: sharded, every parameter is flat, and nothing
      would be decayed.

    Args:
        **kwargs: Of ``FSDPStrategy``. ``model_wrapper`` may give another ``auto_wrap_policy``.
    """

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        teacher = getattr(model, 'teacher', None)
        if teacher is not None and all(teacher is not module for module in model.modules()):
            raise ValueError(
                f'{type(model).__name__} is not trained with FSDP, since the teacher is no part of '
                'it: train it with its own config and tools/dist_train.sh.'
            )
        blocks = {
            id(block)
            for module in model.modules()
            if isinstance(module, PyramidBackbone)
            for block in module.all_blocks()
        }
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: id(m) in blocks)
        wrapper = dict(type='MMFullyShardedDataParallel', auto_wrap_policy=policy)
        if not torch.cuda.is_available():
            wrapper['device_id'] = torch.device('cpu')
            # already on the CPU, moving there is no copy, and what is freed would still be read
            self.state_dict_config.offload_to_cpu = False
            self.optim_state_dict_config.offload_to_cpu = False
        self.model_wrapper = {**wrapper, **(self.model_wrapper or {})}
        return super()._wrap_model(model)

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> BaseOptimWrapper:
        """mmengine's, clipping by the norm of the whole gradient.

        Raises:
            ValueError: Parameters are to be told by their number of dimensions.
        """
        if isinstance(optim_wrapper, dict):
            # without a type mmengine's would be given AmpOptimWrapper's arguments
            optim_wrapper.setdefault('type', 'OptimWrapper')
            paramwise_cfg = optim_wrapper.get('paramwise_cfg') or {}
            if paramwise_cfg.get('flat_decay_mult') is not None:
                raise ValueError(
                    'With FSDP every parameter is flat: set paramwise_cfg.flat_decay_mult=None and '
                    'name in custom_keys what is not to be decayed.'
                )
        built = super().build_optim_wrapper(optim_wrapper, model)
        if getattr(built, 'clip_grad_kwargs', None) and built.clip_func is (
            nn.utils.clip_grad_norm_
        ):
            built.clip_func = self._clip_grad_norm
        return built

    def _clip_grad_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """:func:`torch.nn.utils.clip_grad_norm_` over all processes."""
        return self.model.clip_grad_norm_(max_norm, norm_type)

    def load_optim_state_dict(self, state_dict: dict) -> None:
        """Give each process its shard of an optimizer's state dict that
        :meth:`optim_state_dict` made."""
        optimizer = self.optim_wrapper.optimizer
        shard = FullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=optimizer, optim_state_dict=state_dict
        )
        self.optim_wrapper.load_state_dict(shard)
