# SPDX-License-Identifier: Apache-2.0
"""The backbones in timm's registry, for use without OpenMMLab.

After ``import effvit_mm.timm_models``, ``timm.create_model('partialformer_b3', num_classes=10)``
builds a classifier and ``timm.create_model('lavit_small', features_only=True)`` a pyramid of maps.
Names are those of the families and of their architectures, see :data:`FAMILIES`.

Weights are named as in a classifier of MMPretrain, ``backbone.…`` and ``head.…`` (``head.fc.…`` is
understood), so checkpoints of either load in the other, and with ``features_only`` what of a
classifier's fits. None have been published.
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from .models.backbones import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer, PyramidBackbone
from .models.backbones.base import NUM_STAGES, STRIDES
from .models.checkpoint import select_prefix

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
        global_pool: ``'avg'``, of an Integrated-DeiT ``'token'``; or ``''`` for the features as
            they are, without a head.
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
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        maps: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
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
        self.maps = None if maps is None else tuple(maps)
        is_deit = isinstance(self.backbone, IntegratedDeiT)
        layers = [f'blocks.{i}' for i in self.backbone.taps] if is_deit else None
        names = layers or [f'stages.{i}' for i in range(NUM_STAGES)]
        self.feature_info = [
            dict(num_chs=dim, reduction=stride, module=f'backbone.{name}')
            for dim, stride, name in zip(self.backbone.stage_channels, STRIDES, names, strict=True)
        ]
        self.in_chans, self.num_classes = in_chans, num_classes
        self.global_pool = self._checked_pool(global_pool, num_classes)
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._make_head(num_classes)
        _adapt_when_loading(self)

    def _checked_pool(self, global_pool: str | None, num_classes: int) -> str:
        """The pooling that is asked for, None: the default."""
        pools = ('token' if self.by_token else 'avg', '')
        pool = pools[0] if global_pool is None else global_pool
        if pool not in pools:
            raise ValueError(f"global_pool must be {pools[0]!r} or '' here, not {pool!r}.")
        if num_classes and not pool and not self.by_token:
            raise ValueError("A head needs pooled features: global_pool='' goes with 0 classes.")
        return pool

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
                blocks=[
                    (r'^backbone\.(?:blocks|aggregations)\.(\d+)', None),
                    (r'^backbone\.norm', (99999,)),
                ],
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
                (r'^backbone\.norm', (99999,)),
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
        pool = self.global_pool if global_pool is None else global_pool
        self.global_pool, self.num_classes = self._checked_pool(pool, num_classes), num_classes
        like = next(self.parameters())
        self.head = self._make_head(num_classes).to(like.device, like.dtype).train(self.training)

    def _taken(self, indices: int | Sequence[int] | None) -> list[int]:
        """Stages as timm asks for them, of those that were built."""
        if self.by_token:
            raise ValueError(
                'A classifier of this family computes a class token, not maps: create it with '
                'features_only=True.'
            )
        return _stage_indices(indices, self.maps or range(self.backbone.num_stages))

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
            indices: Which stages, the lowest is given first; the last so many if a number, all if
                None.
            norm: Norm a classifier's last map, the only one with a norm. The maps of
                ``features_only`` have norms of their own and always are.
            stop_early: Run no further than the last stage that is asked for.
            output_fmt: ``'NCHW'``.
            intermediates_only: Only the maps.

        Raises:
            ValueError: The format is another, there are no such stages, or this is the classifier
                of a family with a class token.
        """
        if output_fmt != 'NCHW':
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}.")
        taken, last = self._taken(indices), self.backbone.num_stages - 1
        final = taken[-1] if stop_early or intermediates_only else last
        wanted = sorted({*taken, final})
        bare = {} if self.maps is not None else dict(normed=False)
        maps = dict(zip(wanted, self.backbone(x, out_indices=wanted, **bare), strict=True))
        features = maps[final]
        if self.maps is None and final == last:
            norm_layer = getattr(self.backbone, f'norm{last}')
            features = norm_layer(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
            if norm:
                maps[last] = features
        intermediates = [maps[i] for i in taken]
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after those asked for and the head; with ``features_only`` no other
        stages were built, and the norms belong to the maps."""
        taken, backbone = self._taken(indices), self.backbone
        ends = taken[-1] < backbone.num_stages - 1
        if self.maps is None and (ends or prune_norm):
            delattr(backbone, f'norm{backbone.num_stages - 1}')
            backbone.add_module(f'norm{taken[-1]}', nn.Identity())
        if self.maps is None and ends:
            backbone.stages = backbone.stages[: taken[-1] + 1]
            backbone.num_stages, backbone.out_indices = taken[-1] + 1, (taken[-1],)
            backbone.frozen_stages = min(backbone.frozen_stages, backbone.num_stages)
            backbone.out_channels = [backbone.stage_channels[taken[-1]]]
            backbone.out_strides = [STRIDES[taken[-1]]]
            self.num_features = self.head_hidden_size = backbone.stage_channels[taken[-1]]
        if prune_head or ends:
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


def _stage_indices(
    indices: int | Sequence[int] | None, built: Sequence[int] = range(NUM_STAGES)
) -> list[int]:
    """Stages, rising, of what timm allows: all, the last so many, or numbers from either end.

    Args:
        indices: As they are asked for.
        built: The stages that there are, rising.

    Raises:
        ValueError: There are no such stages, or none is asked for.
    """
    if indices is None:
        return list(built)
    if isinstance(indices, int):
        taken = list(built[-indices:]) if 0 < indices <= len(built) else []
    else:
        end = built[-1] + 1
        taken = sorted({i + end if i < 0 else i for i in indices})
    if not taken or not set(taken) <= set(built):
        there = ', '.join(map(str, built))
        raise ValueError(f'There are the stages {there}; {indices!r} does not choose among them.')
    return taken


def _rename_head(state: dict[str, Tensor], model: nn.Module | None = None) -> dict[str, Tensor]:
    """MMPretrain's name of the head becomes timm's."""
    return {
        f'head.{key[8:]}' if key.startswith('head.fc.') else key: value
        for key, value in state.items()
    }


def _adapt_when_loading(module: nn.Module) -> None:
    """Let :func:`_adapt_state` see what ``load_state_dict`` is given."""
    if hasattr(module, 'register_load_state_dict_pre_hook'):
        module.register_load_state_dict_pre_hook(_adapt_state)
    else:  # torch < 2.5 has it under another name
        module._register_load_state_dict_pre_hook(_adapt_state, with_module=True)


def _adapt_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Also take weights with MMPretrain's names and, with ``features_only``, a classifier's.

    Args:
        module: A :class:`TimmModel`, or timm's wrapper around one.
        state: Changed in place.
        prefix: That of the module.
    """
    model = getattr(module, 'model', module)
    given = {k.removeprefix(prefix): state.pop(k) for k in list(state) if k.startswith(prefix)}
    given = _rename_head(given)
    other = given.keys() != module.state_dict().keys()
    if model.maps is not None and other and any(key.startswith('backbone.') for key in given):
        weights = select_prefix(given, 'backbone.', 'the checkpoint')
        model.backbone.load_weights(weights, 'the checkpoint')
        given = module.state_dict()
    state.update({prefix + key: value for key, value in given.items()})


#: what timm's own functions take out of the arguments of ``create_model``
_OF_TIMM = {'pretrained_cfg', 'pretrained_cfg_overlay', 'pretrained_model_args', 'cache_dir'}


def _check_arguments(family: str, variant: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that nobody would look at."""
    own = inspect.signature(TimmModel).parameters.keys() - {'family', 'arch', 'maps', 'kwargs'}
    # a class token or maps, and which, is decided here; timm calls no init_weights and no hook
    of_backbone = inspect.signature(FAMILIES[family][0]).parameters.keys() - {
        *('arch', 'in_channels', 'out_indices', 'out_type', 'init_cfg', 'diagonality_loss')
    }
    public = {*own, *of_backbone, 'features_only', 'out_indices', 'device', 'dtype'}
    if 'img_size' in kwargs:
        raise TypeError(f'{variant} takes images of any size: leave img_size out.')
    for name in kwargs.keys() - public - _OF_TIMM - {'feature_cls'}:
        raise TypeError(
            f'{variant} has no argument {name!r}; there are {", ".join(sorted(public))}.'
        )
    for name in {'out_indices', 'feature_cls'} & kwargs.keys():
        if not kwargs.get('features_only'):
            raise TypeError(f'{variant}: {name} goes with features_only=True.')
    if kwargs.get('feature_cls', 'getter') != 'getter':
        raise ValueError(f"{variant}: feature_cls must be 'getter', or left out.")


def _create(
    family: str,
    arch: str,
    variant: str,
    pretrained: bool,
    features_only: bool = False,
    device: Any = None,
    dtype: Any = None,
    **kwargs: Any,
) -> nn.Module:
    if pretrained:
        cfg = resolve_pretrained_cfg(
            variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay')
        )
        if not (cfg.has_weights or cfg.state_dict):
            raise ValueError(
                f'No weights of {variant} have been published; your own are loaded with '
                'checkpoint_path=…, or as pretrained ones with pretrained_cfg_overlay=dict(file=…).'
            )
    feature_cfg = {}
    if features_only:
        maps = _stage_indices(kwargs.pop('out_indices', None))
        kwargs.update(maps=maps, num_classes=0)
        feature_cfg = dict(out_indices=maps, feature_cls='getter')
    model = build_model_with_cfg(
        TimmModel,
        variant,
        pretrained,
        pretrained_filter_fn=_rename_head,
        feature_cfg=feature_cfg,
        features_only=features_only,
        family=family,
        arch=arch,
        **kwargs,
    )
    if features_only:
        _adapt_when_loading(model)
    return model.to(device=device, dtype=dtype)


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
                pool_size=None if deit else (7, 7),
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
                kwargs = {key: value for key, value in kwargs.items() if value is not None}
                _check_arguments(_family, _name, kwargs)
                return _create(_family, _arch, _name, pretrained, **kwargs)

            create.__name__ = create.__qualname__ = name
            create.__doc__ = f'{cls.__name__} {arch}, see :class:`TimmModel`.'
            setattr(module, name, register_model(create))
    return module.default_cfgs


default_cfgs = _register()
