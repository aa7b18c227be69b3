# SPDX-License-Identifier: Apache-2.0
"""The backbones in timm's registry, for use without OpenMMLab.

After ``import effvit_mm.timm_models``, ``timm.create_model('partialformer_b3', num_classes=10)``
builds a classifier and ``timm.create_model('lavit_small', features_only=True)`` a pyramid of maps.
Names are those of the families and of their architectures, see :data:`FAMILIES`.

Weights are named as in a classifier of MMPretrain, ``backbone.…`` and ``head.…`` (``head.fc.…`` is
understood), so checkpoints of either load in the other. None have been published.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmengine.logging import print_log
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .models.backbones import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer, PyramidBackbone
from .models.backbones.base import NUM_STAGES, STRIDES

#: prefix of the names in timm's registry -> backbone, and what it is built with
FAMILIES: dict[str, tuple[type[PyramidBackbone], dict[str, Any]]] = {
    'partialformer': (PartialFormer, {}),
    # timm's training has no place for a model's own losses
    'lavit': (LaViT, dict(diagonality_loss=None)),
    'integrated_deit': (IntegratedDeiT, {}),
    'dgssa_swin': (DGSSASwin, {}),
}


class TimmModel(nn.Module):
    """A backbone with timm's interface of a classifier.

    Args:
        family: Key of :data:`FAMILIES`.
        arch: Name of an architecture of the family, or a dict of its fields.
        num_classes: Classes of the head; 0: the pooled features are returned.
        in_chans: Channels of the image.
        global_pool: ``'avg'``, or ``''`` for the features as they are.
        drop_rate: Dropout before the head.
        drop_path_rate: Stochastic depth rate of the last block.
        maps: Stages whose feature maps, with norms of their own, are built instead of a classifier.
        **kwargs: Further arguments of the backbone.
    """

    def __init__(
        self,
        family: str,
        arch: str | dict,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        maps: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check_pool(global_pool)
        cls, defaults = FAMILIES[family]
        kwargs = {**defaults, **kwargs}
        self.by_token = cls is IntegratedDeiT and maps is None
        if self.by_token:
            kwargs['out_type'] = 'cls_token'
        self.backbone = cls(
            arch,
            in_channels=in_chans,
            out_indices=(NUM_STAGES - 1,) if maps is None else tuple(maps),
            drop_path_rate=drop_path_rate,
            **kwargs,
        )
        if maps is None and not self.by_token:
            # a classifier's other stages have no norm; their maps can still be looked at
            for i in range(NUM_STAGES - 1):
                self.backbone.add_module(f'norm{i}', nn.Identity())
        channels = cls(arch, **defaults).out_channels if maps is not None else self._channels()
        taps = getattr(self.backbone, 'taps', None)
        modules = [f'blocks.{tap}' for tap in taps] if taps else [f'stages.{i}' for i in range(4)]
        self.feature_info = [
            dict(num_chs=dim, reduction=stride, module=f'backbone.{module}')
            for dim, stride, module in zip(channels, STRIDES, modules, strict=True)
        ]
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._make_head(num_classes)
        self.register_load_state_dict_pre_hook(_rename_head)

    def _channels(self) -> list[int]:
        """Channels of the four stages."""
        a = self.backbone.arch_settings
        if 'dims' in a:
            return list(a['dims'])
        if 'base_channels' in a:
            return [a['base_channels'] * factor for factor in a['channel_multipliers']]
        if self.by_token:
            return [a['embed_dims']] * NUM_STAGES
        return [a['embed_dims'] * 2**i for i in range(NUM_STAGES)]

    def _make_head(self, num_classes: int) -> nn.Module:
        if not num_classes:
            return nn.Identity()
        head = nn.Linear(self.num_features, num_classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay would harm."""
        keys = self.backbone.no_decay_keys
        return {name for name, _ in self.named_parameters() if any(key in name for key in keys)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters for layer-wise learning-rate decay."""
        if isinstance(self.backbone, IntegratedDeiT):
            return dict(
                stem=r'^backbone\.(?:cls_token|pos_embed|patch_embed)',
                blocks=[(r'^backbone\.(?:blocks|aggregations)\.(\d+)', None), (r'.*', (99999,))],
            )
        if coarse:
            return dict(
                stem=r'^backbone\.stages\.0\.patch_embed', blocks=r'^backbone\.stages\.(\d+)'
            )
        return dict(
            stem=r'^backbone\.stages\.0\.patch_embed',
            blocks=[
                (r'^backbone\.stages\.(\d+)\.blocks\.(\d+)', None),
                (r'^backbone\.stages\.(\d+)\.', (0,)),
                (r'.*', (99999,)),
            ],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Checkpoint activations block by block."""
        self.backbone.with_cp = enable

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Another number of classes; 0: pooled features."""
        self.num_classes = num_classes
        if global_pool is not None:
            _check_pool(global_pool)
            self.global_pool = global_pool
        like = next(self.backbone.parameters())
        self.head = self._make_head(num_classes).to(like).train(self.training)

    @contextmanager
    def _stages(self, indices: Sequence[int]) -> Iterator[None]:
        before = self.backbone.out_indices
        self.backbone.out_indices = tuple(indices)
        try:
            yield
        finally:
            self.backbone.out_indices = before

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps of stages ``(B, C, H, W)``, and the last features.

        Args:
            x: Images ``(B, in_chans, H, W)``.
            indices: Which stages; the last so many if a number, all if None.
            norm: No effect: of a classifier the last map is normed, with ``features_only`` all are.
            stop_early: No effect: stages that are not needed were not built.
            output_fmt: ``'NCHW'``.
            intermediates_only: Only the maps.
        """
        if output_fmt != 'NCHW':
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}.")
        if self.by_token:
            raise ValueError(
                'A classifier of this family computes a class token, not maps: create it with '
                'features_only=True.'
            )
        taken, _ = feature_take_indices(NUM_STAGES, indices)
        taken = sorted(set(taken))
        last = NUM_STAGES - 1
        wanted = taken if intermediates_only or last in taken else [*taken, last]
        unbuilt = [i for i in wanted if not hasattr(self.backbone, f'norm{i}')]
        if unbuilt:
            raise ValueError(
                f'Stages {unbuilt} are not there: they were not built, or pruned; '
                'intermediates_only=True does without the last.'
            )
        with self._stages(wanted):
            maps = dict(zip(wanted, self.backbone(x), strict=True))
        intermediates = [maps[i] for i in taken]
        return intermediates if intermediates_only else (maps[last], intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the head, and the stages after those that ``indices`` name.

        Args:
            indices: As of :meth:`forward_intermediates`, which takes ``intermediates_only=True``
                afterwards if the last stage is gone.
            prune_norm: No effect: the last map's norm goes with its stage.
            prune_head: Whether the head goes.

        Returns:
            The stages that ``indices`` name.
        """
        taken, last = feature_take_indices(NUM_STAGES, indices)
        if not isinstance(self.backbone, IntegratedDeiT):  # whose stages are taps of one stack
            del self.backbone.stages[last + 1 :]
            for i in range(last + 1, NUM_STAGES):
                if hasattr(self.backbone, f'norm{i}'):
                    delattr(self.backbone, f'norm{i}')
        if prune_head:
            self.reset_classifier(0, '')
        return taken

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, in_chans, H, W)`` to the last map ``(B, C, H/32, W/32)``, or the class token
        ``(B, C)`` of an Integrated-DeiT."""
        return self.backbone(x)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What :meth:`forward_features` gives to logits ``(B, num_classes)``."""
        if self.global_pool and x.ndim == 4:
            x = x.mean(dim=(2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.forward_head(self.forward_features(x))


def _check_pool(global_pool: str) -> None:
    if global_pool not in ('avg', ''):
        raise ValueError(f"global_pool must be 'avg' or '', not {global_pool!r}.")


def _from_classifier(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Let ``features_only`` models load a classifier as detectors do: without its head and later
    stages; what a classifier lacks, such as norms of the maps, stays as it is, which is said."""
    if any(key.startswith(f'{prefix}model.') for key in state):
        return
    backbone, own = module.model.backbone, module.state_dict()
    for key in [key for key in state if key.startswith(prefix)]:
        name, value = f'model.{key.removeprefix(prefix)}', state.pop(key)
        inner = name.removeprefix('model.backbone.')
        if name in own or (inner != name and backbone._is_surplus(inner)):
            state[prefix + name] = value
    lacking = [
        key
        for key in own
        if prefix + key not in state
        and re.match(backbone.may_lack, key.removeprefix('model.backbone.'))
    ]
    if lacking:
        print_log(
            f'{type(backbone).__name__}: left at their initialisation: {", ".join(lacking)}',
            logger='current',
        )
    state.update({prefix + key: own[key] for key in lacking})


def _rename_head(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """MMPretrain's name of the head."""
    for key in [key for key in state if key.startswith(f'{prefix}head.fc.')]:
        state[key.replace('head.fc.', 'head.')] = state.pop(key)


def _create(family: str, arch: str, variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    if pretrained:
        raise ValueError(
            f'No weights of {variant} have been published; checkpoint_path= loads your own.'
        )
    feature_cfg = {}
    if kwargs.get('features_only'):
        indices = kwargs.pop('out_indices', range(NUM_STAGES))
        maps, _ = feature_take_indices(NUM_STAGES, indices)
        kwargs.update(maps=sorted(set(maps)), num_classes=0)
        feature_cfg = dict(out_indices=sorted(set(maps)), feature_cls='getter')
    # timm's size of the images, which these models do not need to know
    kwargs.pop('img_size', None)
    model = build_model_with_cfg(
        TimmModel, variant, False, feature_cfg=feature_cfg, family=family, arch=arch, **kwargs
    )
    if feature_cfg:
        model.register_load_state_dict_pre_hook(_from_classifier)
    return model


def _register() -> dict[str, Any]:
    """Register every architecture; returns timm's default configs."""
    module = sys.modules[__name__]
    cfgs = {}
    for family, (cls, _) in FAMILIES.items():
        deit = cls is IntegratedDeiT
        stem = 'backbone.patch_embed.proj' if deit else 'backbone.stages.0.patch_embed.proj'
        for arch in cls.arch_zoo:
            cfgs[f'{family}_{arch}.untrained'] = dict(
                num_classes=1000,
                input_size=(3, 224, 224),
                pool_size=(7, 7),
                crop_pct=0.9,
                interpolation='bicubic',
                mean=IMAGENET_DEFAULT_MEAN,
                std=IMAGENET_DEFAULT_STD,
                first_conv=stem,
                classifier='head',
                fixed_input_size=False,
                license='apache-2.0',
            )
    module.default_cfgs = generate_default_cfgs(cfgs)
    for family, (cls, _) in FAMILIES.items():
        for arch in cls.arch_zoo:
            name = f'{family}_{arch}'

            def create(
                pretrained: bool = False,
                *,
                _family: str = family,
                _arch: str = arch,
                _name: str = name,
                **kwargs: Any,
            ) -> nn.Module:
                return _create(_family, _arch, _name, pretrained, **kwargs)

            create.__name__ = create.__qualname__ = name
            create.__doc__ = f'{cls.__name__} {arch}, see :class:`TimmModel`.'
            setattr(module, name, register_model(create))
    return module.default_cfgs


default_cfgs = _register()
