# SPDX-License-Identifier: Apache-2.0
"""Models by name, ours and their peers, to be compared.

A model is named by where it comes from:

- ``ours:LaViT/small``, a family of this package and an architecture;
- ``timm:pvt_v2_b2``, a name of ``timm.create_model``;
- ``mmdet:SwinTransformer/tiny``, a backbone of a framework (also ``mmseg:``, ``mmpretrain:``), with
  a name from :data:`PEERS` or, for MMPretrain, one of the backbone's own;
- ``configs/mask_rcnn_lavit_small.py`` or ``mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py``, the
  backbone of a config.

Constructor arguments follow in brackets: ``'ours:LaViT/small(drop_path_rate=0.1)'``.
"""

import ast
import difflib
import inspect
import re
from dataclasses import dataclass
from typing import Any

import timm
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.faults import SetupError
from ..engine.launch import FRAMEWORKS, import_framework, read_config
from ..models import backbones

NUM_CLASSES = 1000

_PVT_LAYERS = dict(tiny=(2, 2, 2, 2), small=(3, 4, 6, 3), medium=(3, 4, 18, 3), large=(3, 8, 27, 3))
_SWINS = {
    'tiny': (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    'small': (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    'base': (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    'large': (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
_PVT_V2S = {
    'b0': dict(embed_dims=32, num_layers=(2, 2, 2, 2)),
    'b1': dict(embed_dims=64, num_layers=(2, 2, 2, 2)),
    'b2': dict(embed_dims=64, num_layers=(3, 4, 6, 3)),
    'b3': dict(embed_dims=64, num_layers=(3, 4, 18, 3)),
    'b4': dict(embed_dims=64, num_layers=(3, 8, 27, 3)),
    'b5': dict(embed_dims=64, num_layers=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4)),
}
#: constructor arguments of MMDetection's and MMSegmentation's backbones by their usual names
PEERS: dict[str, dict[str, dict[str, Any]]] = {
    'SwinTransformer': {
        name: dict(embed_dims=dim, depths=depths, num_heads=heads)
        for name, (dim, depths, heads) in _SWINS.items()
    },
    'PyramidVisionTransformerV2': _PVT_V2S,
    'PyramidVisionTransformer': {
        name: dict(num_layers=layers) for name, layers in _PVT_LAYERS.items()
    },
}


@dataclass(frozen=True)
class ModelName:
    """A model's name, taken apart.

    Args:
        text: The whole name.
        source: ``'ours'``, ``'timm'``, a framework's scope, or ``'config'``.
        kind: Family, name in timm, type of a backbone, or the config's path.
        arch: Architecture; None: none is given.
        kwargs: Constructor arguments.
    """

    text: str
    source: str
    kind: str
    arch: str | None
    kwargs: dict[str, Any]


def parse_model(text: str) -> ModelName:
    """Take a model's name apart; see the module's docstring.

    Raises:
        SetupError: It is not of that form, or its source is unknown.
    """
    name, bracket, arguments = text.partition('(')
    kwargs = _parse_arguments(text, bracket + arguments) if bracket else {}
    if name.endswith('.py'):
        return ModelName(text, 'config', name, None, kwargs)
    match = re.fullmatch(r'(\w+):([\w.-]+)(?:/([\w.-]+))?', name)
    sources = ('ours', 'timm', *FRAMEWORKS)
    if match is None or match[1] not in sources:
        raise SetupError(
            f'{text!r} names no model: write ours:LaViT/small, timm:pvt_v2_b2, '
            'mmdet:SwinTransformer/tiny (or mmseg:, mmpretrain:), or the path of a config.'
        )
    return ModelName(text, *match.groups(), kwargs)


def _parse_arguments(text: str, call: str) -> dict[str, Any]:
    try:
        tree = ast.parse(f'f{call}', mode='eval').body
        if not isinstance(tree, ast.Call) or tree.args or any(not k.arg for k in tree.keywords):
            raise ValueError(call)
        return {k.arg: ast.literal_eval(k.value) for k in tree.keywords}
    except (SyntaxError, ValueError):
        raise SetupError(
            f'{text!r}: arguments are written as in Python, with literals for values, such as '
            "(window_size=7, name='x')."
        ) from None


class Network(nn.Module):
    """A backbone, as a classifier or as it is. ``train`` and ``eval`` return the module, which
    MMDetection's Swin does not.

    Args:
        backbone: Returns a tensor, or a sequence of them with the deepest one last.
        features: Channels of the deepest one, to classify it by global average pooling (of a map)
            and a linear layer, as ImageNet models do; None: the backbone's output is returned.
        padded_size: The image is filled up with zeros to this height and width; None: it is not.
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int | None = None,
        padded_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = None if features is None else nn.Linear(features, NUM_CLASSES)
        self.padded_size = padded_size

    def forward(self, x: Tensor) -> Any:
        """Images ``(B, 3, H, W)`` to logits ``(B, 1000)``, or to what the backbone returns."""
        if self.padded_size is not None:
            height, width = self.padded_size
            x = F.pad(x, (0, width - x.shape[3], 0, height - x.shape[2]))
        x = self.backbone(x)
        if self.fc is None:
            return x
        x = x if isinstance(x, Tensor) else x[-1]
        return self.fc(x.mean(dim=(2, 3)) if x.ndim == 4 else x)


def build_network(text: str, size: tuple[int, int], backbone: bool = False) -> Network:
    """An untrained model by its name.

    As a classifier, ours and the frameworks' are built for their last output alone (or the class
    token, where a family has one). timm's models for one image size only are built for ``size``,
    rounded up to multiples of 32, to which the image is padded, as MMDetection pads images.
    Stochastic depth, on which sources differ, is off unless the name or the config asks for it.

    Args:
        text: The name, see the module's docstring.
        size: Height and width of the images in pixels.
        backbone: The backbone with all its feature maps, as detectors use it, instead of a
            1000-way classifier.

    Raises:
        SetupError: There is no such model, it refuses its arguments, or its framework is not
            installed.
    """
    name = parse_model(text)
    builders = dict(ours=_build_ours, timm=_build_timm, config=_build_of_config)
    build = builders.get(name.source, _build_of_framework)
    try:
        return build(name, size, backbone)
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SetupError(f'{text}: {first_line(error)}') from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def families() -> dict[str, type[nn.Module]]:
    """The backbones of this package by name."""
    base = backbones.PyramidBackbone
    found = {name: getattr(backbones, name) for name in backbones.__all__}
    return {k: v for k, v in found.items() if issubclass(v, base) and v is not base}


def _as_classifier(kind: type[nn.Module]) -> dict[str, Any]:
    """Arguments that make a backbone return what a classifier looks at."""
    parameters = inspect.signature(kind).parameters
    if 'out_type' in parameters and issubclass(kind, backbones.PyramidBackbone):  # a class token
        return dict(out_type='cls_token')
    if 'out_indices' not in parameters:
        return {}
    default = parameters['out_indices'].default
    # -1 and None are the last one already
    return dict(out_indices=(max(default),)) if isinstance(default, list | tuple) else {}


def _build_ours(name: ModelName, size: tuple[int, int], backbone: bool) -> Network:
    if name.kind not in families():
        known = ', '.join(families())
        raise SetupError(f'{name.text}: there is no family {name.kind!r}; there are {known}.')
    kind = families()[name.kind]
    given = {} if name.arch is None else dict(arch=name.arch)
    defaults = {} if backbone else _as_classifier(kind)
    model = kind(**{**defaults, **given, **name.kwargs})
    return Network(model, None if backbone else model.out_channels[-1])


def _build_timm(name: ModelName, size: tuple[int, int], backbone: bool) -> Network:
    if name.arch is not None or not timm.is_model(name.kind):
        near = difflib.get_close_matches(name.kind, timm.list_models(), n=3)
        hint = f'; did you mean {" or ".join(near)}?' if near else '.'
        raise SetupError(f'{name.text}: timm has no model of that name{hint}')
    kwargs, padded = dict(name.kwargs), None
    default = timm.get_pretrained_cfg(name.kind)
    fixed = default is not None and default.fixed_input_size
    if fixed and 'img_size' not in kwargs and size != tuple(default.input_size[1:]):
        padded = tuple(-(-side // 32) * 32 for side in size)
        kwargs['img_size'] = padded
    if backbone:
        kwargs['features_only'] = True
    return Network(timm.create_model(name.kind, **kwargs), None, padded)


def _build_of_framework(name: ModelName, size: tuple[int, int], backbone: bool) -> Network:
    import_framework(name.source)
    with DefaultScope.overwrite_default_scope(name.source):
        kind = MODELS.get(f'{name.source}.{name.kind}')
    if kind is None:
        raise SetupError(f'{name.text}: {FRAMEWORKS[name.source]} has no {name.kind}.')
    given: dict[str, Any] = {}
    if name.arch is not None and 'arch' in inspect.signature(kind).parameters:
        given = dict(arch=name.arch)
    elif name.arch is not None:
        archs = PEERS.get(name.kind, {})
        if name.arch not in archs:
            known = f'there are {", ".join(archs)}' if archs else 'give its arguments in brackets'
            raise SetupError(f'{name.text}: no {name.arch!r} of {name.kind} is known; {known}.')
        given = archs[name.arch]
    defaults = {} if backbone else _as_classifier(kind)
    # some hand their arguments on to a base class
    if any('drop_path_rate' in inspect.signature(c.__init__).parameters for c in kind.__mro__):
        defaults['drop_path_rate'] = 0.0
    settings = {**defaults, **given, 'type': name.kind, **name.kwargs}
    network = _build_registered(name.source, settings)
    return network if backbone else _with_head(network)


def _build_of_config(name: ModelName, size: tuple[int, int], backbone: bool) -> Network:
    scope, separator, _ = name.kind.partition('::')
    if separator:
        from mmengine.hub import get_config

        import_framework(scope)
        config = get_config(name.kind)
    else:
        config = read_config(name.kind)
        scope = config.get('default_scope')
        import_framework(scope)
    settings = {**config.model.backbone, **name.kwargs}
    settings.pop('init_cfg', None)
    network = _build_registered(scope, settings)
    return network if backbone else _with_head(network)


def _build_registered(scope: str, settings: dict[str, Any]) -> Network:
    with DefaultScope.overwrite_default_scope(scope):
        return Network(MODELS.build(settings))


def _with_head(network: Network) -> Network:
    """A classifier of a backbone whose channels are not known beforehand."""
    network.eval()
    with torch.no_grad():
        out = network(torch.zeros(1, 3, 224, 224))
    return Network(network.backbone, (out if isinstance(out, Tensor) else out[-1]).shape[1])
