# SPDX-License-Identifier: Apache-2.0
"""Names of the weights of DeiT and Swin, from wherever they come, to timm's.

timm, the original authors (facebookresearch/deit, microsoft/Swin-Transformer), MMPretrain and
MMDetection train the same two architectures under different names. Everything in this package
speaks timm's.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.checkpoint import WRAPPINGS

KINDS = {'deit': 'vision transformer', 'swin': 'Swin transformer'}

# what is computed, not trained
_BUFFERS = re.compile(r'(relative_position_index|relative_coords_table|attn_mask)$')

# of MMPretrain's classifiers: the rest beside the backbone (its losses, its preprocessor) is no
# part of the model, and necks and heads of detectors and segmentors are no part of a classifier
_MM_HEADS = re.compile(r'^head\.(?:fc|layers\.head)\.(weight|bias)$')

_MM_COMMON = (
    (r'^patch_embed\.projection\.', 'patch_embed.proj.'),
    (r'\.attn\.w_msa\.', '.attn.'),
    (r'\.ffn\.layers\.0\.0\.', '.mlp.fc1.'),
    (r'\.ffn\.layers\.1\.', '.mlp.fc2.'),
)
_MM_VIT = (
    (r'^layers\.(\d+)\.', r'blocks.\1.'),
    (r'^(blocks\.\d+)\.ln([12])\.', r'\1.norm\2.'),
    (r'^ln1\.', 'norm.'),
)
_MM_SWIN = (
    (r'^stages\.(\d+)\.blocks\.', r'layers.\1.blocks.'),
    (r'^stages\.(\d+)\.downsample\.', lambda m: f'layers.{int(m[1]) + 1}.downsample.'),
)


def unwrap(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint: out of the entries that files wrap them in (``state_dict``,
    ``model``, their moving average where it is alone) and without prefixes that all of them
    share."""
    for key in WRAPPINGS:
        if isinstance(checkpoint.get(key), Mapping):
            return unwrap(checkpoint[key])
    state = {key: value for key, value in checkpoint.items() if isinstance(value, Tensor)}
    for prefix in ('module.', 'model.'):
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def to_timm_keys(checkpoint: Mapping[str, Any], kind: str | None = None) -> dict[str, Tensor]:
    """Rename the weights of a DeiT or a Swin to timm's names, and reorder what is stored in
    another order.

    Backbones are taken out of classifiers, detectors and segmentors (prefix ``backbone.``); a
    classifier's linear layer becomes timm's ``head`` (of Swin ``head.fc``). Index tables and masks,
    which are computed, are left out.

    Args:
        checkpoint: A state dict, or what :func:`torch.load` returns for a checkpoint file.
        kind: ``'deit'`` or ``'swin'``: refuse the other.

    Returns:
        State dict with timm's names; tensors are shared with the input where order allows.

    Raises:
        ValueError: It is not the state dict of a DeiT or a Swin, or not of the kind asked for.
    """
    state = unwrap(checkpoint)
    backbone = {k.removeprefix('backbone.'): v for k, v in state.items() if _in_backbone(k)}
    if backbone:
        heads = {f'head.{m[1]}': v for k, v in state.items() if (m := _MM_HEADS.match(k))}
        state = {**backbone, **heads}
    state = {key: value for key, value in state.items() if not _BUFFERS.search(key)}
    # timm's `features_only` models flatten their first level
    state = {re.sub(r'^layers_(\d+)\.', r'layers.\1.', key): v for key, v in state.items()}
    found = architecture_kind(state)
    if found is None:
        first = next(iter(state), None)
        raise ValueError(
            'These are not the weights of a DeiT or a Swin under the names of timm, of the '
            f'original authors, of MMPretrain or of MMDetection; the first name is {first!r}.'
        )
    if kind is not None and found != kind:
        raise ValueError(f'These are the weights of a {KINDS[found]}, not of a {KINDS[kind]}.')
    return _convert_swin(state) if found == 'swin' else _convert_deit(state)


def architecture_kind(state: Mapping[str, Tensor]) -> str | None:
    """``'deit'``, ``'swin'``, or None for something else, told by the names of a state dict."""
    if not any(key.startswith('patch_embed.proj') for key in state):
        return None
    if any(re.match(r'(layers|stages)\.\d+\.blocks\.\d+\.', key) for key in state):
        return 'swin'
    if 'cls_token' in state and any(re.match(r'(layers|blocks)\.\d+\.', key) for key in state):
        return 'deit'
    return None


def _in_backbone(key: str) -> bool:
    return key.startswith('backbone.')


def _rename(state: Mapping[str, Tensor], rules: tuple) -> dict[str, Tensor]:
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    return renamed


def _convert_deit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if any(key.startswith('layers.') for key in state):
        state = _rename(state, _MM_COMMON + _MM_VIT)
    for key in ('dist_token', 'head_dist.weight'):
        if key in state:
            raise ValueError(
                'This DeiT has a distillation token, which the paper does not compress: take the '
                'checkpoint of the same size without "distilled" in its name.'
            )
    return state


def _convert_swin(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if any(key.startswith('stages.') for key in state):
        last = max(int(m[1]) for key in state if (m := re.match(r'stages\.(\d+)\.', key)))
        # the last output norm is the model's; a detector's others have no counterpart
        rules = ((rf'^norm{last}\.', 'norm.'), (r'^head\.', 'head.fc.'))
        state = _rename(state, _MM_COMMON + _MM_SWIN + rules)
        state = {key: v for key, v in state.items() if not re.match(r'norm\d\.', key)}
        return {key: _unfold_order_to_timm(key, v) for key, v in state.items()}
    if any(key.startswith('layers.0.downsample.') for key in state):  # the original authors'
        rules = (
            (r'^layers\.(\d+)\.downsample\.', lambda m: f'layers.{int(m[1]) + 1}.downsample.'),
            (r'^head\.(?=weight|bias)', 'head.fc.'),
        )
        state = _rename(state, rules)
    return state


def _unfold_order_to_timm(key: str, value: Tensor) -> Tensor:
    """Patch merging joins the four neighbours of a 2 x 2 cell: OpenMMLab's ``nn.Unfold`` channel by
    channel, rows first within a channel; timm neighbour by neighbour, columns first."""
    if '.downsample.' not in key:
        return value
    channels = value.shape[-1] // 4
    order = torch.arange(4 * channels).view(channels, 2, 2).permute(2, 1, 0).flatten()
    return value[..., order.to(value.device)]
