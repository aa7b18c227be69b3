# SPDX-License-Identifier: Apache-2.0
"""Layer-wise learning-rate decay that works in all three frameworks."""

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Scales the learning rate of layer ``d`` of ``n`` by ``layer_decay_rate ** (n - 1 - d)``.

    The frameworks' own constructors ask the whole model for its depths (MMPretrain) or know a fixed
    list of backbones (MMDetection, MMSegmentation); this one asks ``model.backbone``. All other
    keys of ``paramwise_cfg`` keep their meaning, ``lr_mult`` included.

    Example::

        optim_wrapper = dict(
            constructor='LayerDecayOptimWrapperConstructor',
            paramwise_cfg=dict(layer_decay_rate=0.9, norm_decay_mult=0.0))
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        # without any paramwise_cfg the base class would not call add_params at all
        if 'layer_decay_rate' not in self.paramwise_cfg:
            raise ValueError(
                'LayerDecayOptimWrapperConstructor needs layer_decay_rate in paramwise_cfg.'
            )

    def add_params(self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs) -> None:
        """Add the parameters of ``module``; see the base class."""
        first = len(params)
        super().add_params(params, module, prefix, **kwargs)
        if prefix:
            return
        rate = self.paramwise_cfg['layer_decay_rate']
        backbone = getattr(module, 'backbone', module)
        if not hasattr(backbone, 'get_layer_depth'):
            raise ValueError(
                f'Layer-wise decay needs get_layer_depth, which {type(backbone).__name__} lacks.'
            )
        where = '' if backbone is module else 'backbone.'
        # FSDP's units, which blocks may be, show in the names
        names = {
            id(parameter): name.replace('_fsdp_wrapped_module.', '')
            for name, parameter in module.named_parameters()
        }
        for group in params[first:]:
            depth, num_depths = backbone.get_layer_depth(names[id(group['params'][0])], where)
            group['lr_scale'] = rate ** (num_depths - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * group['lr_scale']
