# SPDX-License-Identifier: Apache-2.0
"""DGSSA-Swin: a Swin transformer with static attention in early layers (Yu et al., arXiv
2310.07664)."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from mmengine.registry import MODELS
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.grid import Tiling, ceil_div
from ..layers.qkv import QKV
from ..layers.static_attention import MlpMixing, StaticWindowAttention
from ..layers.utils import check_heads, feed_forward, is_captured, map_to_tokens
from ..layers.windows import PaddedWindows, Windows
from .base import NUM_STAGES, STRIDES, PyramidBackbone


class WindowAttention(nn.Module):
    """Swin's attention in windows with relative position bias.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        window_size: Side of a window, of ``n`` cells.
    """

    def __init__(self, dim: int, num_heads: int, window_size: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = QKV(dim)
        self.proj = nn.Linear(dim, dim)
        side = 2 * window_size - 1
        self.relative_position_bias_table = nn.Parameter(torch.zeros(side**2, num_heads))
        y, x = torch.meshgrid(*[torch.arange(window_size)] * 2, indexing='ij')
        y, x = y.flatten(), x.flatten()
        index = (y[:, None] - y + window_size - 1) * side + x[:, None] - x + window_size - 1
        self.register_buffer('relative_position_index', index, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, kind: Tensor | None = None) -> Tensor:
        """Windows ``(W, n, C)`` to the same shape; masks as in :class:`StaticWindowAttention`."""
        n = x.shape[1]
        qkv = self.qkv(x).view(-1, n, 3, self.num_heads, x.shape[2] // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.view(n, n, self.num_heads).permute(2, 0, 1)[None]
        if mask is not None:
            bias = (bias + mask[:, None]).to(q.dtype).index_select(0, kind)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        z = z.transpose(1, 2)
        if is_captured():  # converters take fused attention apart, which has another layout then
            z = z.clone(memory_format=torch.contiguous_format)
        return self.proj(z.flatten(2))


class SwinBlock(nn.Module):
    """One layer: attention in windows, then the FFN, each with a norm and a residual.

    Args:
        dim: Channels ``C``.
        attention: Dynamic or static attention, or token mixing.
        mlp_ratio: Hidden over input channels of the FFN.
        drop_path: Stochastic depth rate.
    """

    def __init__(
        self,
        dim: int,
        attention: WindowAttention | StaticWindowAttention | MlpMixing,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """Tokens ``(B, N, C)`` of a map, of which these are the windows, to the same shape."""
        z = windows.cut(self.norm1(x))
        if isinstance(self.attn, MlpMixing):
            z = self.attn(z)
        else:
            z = self.attn(z, windows.mask, windows.kind)
        x = x + self.drop_path(windows.join(z))
        return feed_forward(x, self.norm2, self.mlp, self.drop_path)


class PatchEmbed(nn.Module):
    """Patches of 4 x 4 pixels, zeros beyond the image, and a norm."""

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, 4, stride=4)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Images to tokens ``(B, H'*W', C)`` and ``H', W'``, rounded up."""
        if is_captured() or x.shape[2] % 4 or x.shape[3] % 4:
            x = F.pad(x, (0, 3, 0, 3))
        x = self.proj(x)
        return self.norm(map_to_tokens(x)), x.shape[2], x.shape[3]


class PatchMerging(nn.Module):
    """Joins 2 x 2 neighbours, zeros beyond the map, columns first as timm stores them."""

    def __init__(self, dim: int, dim_out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, dim_out, bias=False)

    def forward(self, x: Tensor, height: int, width: int) -> tuple[Tensor, int, int]:
        """Tokens ``(B, H*W, C)`` to ``(B, H'*W', C')`` and ``H', W'``, half and rounded up."""
        tiling = Tiling(x.shape[0], height, width, (2, 2), device=x.device)
        cells = tiling.cut(x)[:, [0, 2, 1, 3]].flatten(1).view(x.shape[0], -1, 4 * x.shape[2])
        return self.reduction(self.norm(cells)), ceil_div(height, 2), ceil_div(width, 2)


class Stage(nn.Module):
    """Tokens of a map of its own, and layers whose windows are shifted every other time.

    Args:
        patch_embed: What makes the tokens, from an image or from the tokens before.
        blocks: The layers.
        side: Side of a window in cells.
        may_shift: Whether, in pretraining, the map had more than one window.
    """

    def __init__(
        self, patch_embed: nn.Module, blocks: list[SwinBlock], side: int, may_shift: bool
    ) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.blocks = nn.ModuleList(blocks)
        self.side = side
        self.kinds = [
            (PaddedWindows, side // 2 * (shifted and may_shift))
            if isinstance(block.attn, MlpMixing)
            else (Windows, side // 2 * shifted)
            for block, shifted in zip(blocks, itertools.cycle((0, 1)), strict=False)
        ]

    def windows(self, x: Tensor, height: int, width: int) -> list[Windows]:
        """The windows of every layer over the map of tokens ``x (B, H*W, C)``."""
        made = {
            (cls, shift): cls(x.shape[0], height, width, self.side, shift, x.device)
            for cls, shift in dict.fromkeys(self.kinds)
        }
        return [made[kind] for kind in self.kinds]


@MODELS.register_module()
class DGSSASwin(PyramidBackbone):
    """Swin with static attention (DGSSA) in early layers.

    Architecture fields (``arch`` as a dict; those after ``static_layers`` may be left out):

    - ``embed_dims``: channels of the first stage, doubled by each further one.
    - ``depths``, ``num_heads``: layers and heads of each stage.
    - ``static_layers``: layers with static attention, counted from 0 through all stages.
    - ``window_size``: side of a window in cells.
    - ``image_size``: side in pixels of the pretraining's images. Where a stage's map was smaller
      than a window then, a window has its size, as in timm and the original.
    - ``mlp_ratio``: FFN expansion.
    - ``static_block``: ``'attention'``, or ``'mlp'`` for token mixing by an MLP instead
      (:class:`MlpMixing`), whose windows are shifted by padding, since it cannot be masked.
    - ``static_init``: see :class:`StaticWindowAttention`.

    A stage ``i`` is ``stages.i``; what timm calls ``layers.i`` and ``patch_embed`` or
    ``layers.i.downsample`` are its ``blocks`` and its ``patch_embed``.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict of the fields above.
        in_channels: See :class:`PyramidBackbone`, also for the arguments not listed here.
        drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.
    """

    no_decay_keys: ClassVar[tuple[str, ...]] = (
        'relative_position_bias_table',
        'attn.logits',
        'q_bias',
        'v_bias',
    )
    arch_zoo: ClassVar[dict[str, dict[str, Any]]] = {
        name: dict(embed_dims=c, depths=d, num_heads=h, static_layers=tuple(range(1, p + 1)))
        for name, c, d, h, p in (
            ('tiny', 96, (2, 2, 6, 2), (3, 6, 12, 24), 6),
            ('small', 96, (2, 2, 18, 2), (3, 6, 12, 24), 12),
            ('base', 128, (2, 2, 18, 2), (4, 8, 16, 32), 12),
        )
    }
    arch_defaults: ClassVar[dict[str, Any]] = dict(
        window_size=7,
        image_size=224,
        mlp_ratio=4,
        static_block='attention',
        static_init='dynamic',
    )
    per_stage_fields: ClassVar[tuple[str, ...]] = ('depths', 'num_heads')

    def __init__(
        self,
        arch: str | dict = 'tiny',
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(
            arch, in_channels, out_indices, frozen_stages, norm_eval, with_cp, init_cfg
        )
        a = self.arch_settings
        total = sum(a['depths'])
        if not all(0 < layer < total for layer in a['static_layers']):
            raise ValueError(
                f'static_layers must lie in 1…{total - 1}, not {tuple(a["static_layers"])}.'
            )
        if a['static_block'] not in ('attention', 'mlp'):
            raise ValueError(
                f"static_block must be 'attention' or 'mlp', not {a['static_block']!r}."
            )
        rates = [drop_path_rate * layer / max(1, total - 1) for layer in range(total)]
        self.stages = nn.ModuleList()
        dim, layer = a['embed_dims'], 0
        for i in range(self.num_stages):
            embed = PatchMerging(dim // 2, dim) if i else PatchEmbed(in_channels, dim)
            map_side = ceil_div(a['image_size'], STRIDES[i])
            side = min(a['window_size'], map_side)
            blocks = []
            for _ in range(a['depths'][i]):
                attention = self._attention(layer, dim, a['num_heads'][i], side)
                blocks.append(SwinBlock(dim, attention, a['mlp_ratio'], rates[layer]))
                layer += 1
            self.stages.append(Stage(embed, blocks, side, map_side > side))
            dim *= 2
        self.finish([a['embed_dims'] * 2**i for i in range(NUM_STAGES)])
        for module in self.modules():
            if isinstance(module, WindowAttention):
                trunc_normal_(module.relative_position_bias_table, std=0.02)
        for i in self.out_indices:
            getattr(self, f'norm{i}').eps = 1e-5

    def _attention(self, layer: int, dim: int, num_heads: int, side: int) -> nn.Module:
        a = self.arch_settings
        if layer not in a['static_layers']:
            return WindowAttention(dim, num_heads, side)
        if a['static_block'] == 'mlp':
            return MlpMixing(dim, side**2)
        return StaticWindowAttention(dim, num_heads, side**2, init=a['static_init'])

    def adapt_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Also take timm's names, and its last norm for the last map's."""
        if not any(key.startswith('layers.') for key in state):
            return state
        adapted = {}
        for key, value in state.items():
            key = name_from_timm(key)
            if key.endswith('.attn.qkv.bias'):
                adapted[f'{key[:-4]}q_bias'], _, adapted[f'{key[:-4]}v_bias'] = value.chunk(3)
            elif not key.endswith(COMPUTED):
                adapted[re.sub(r'^norm\.', 'norm3.', key)] = value
        return adapted

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = prefix + name_from_timm(key.removeprefix(prefix))
            state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, x: Tensor, out_indices: Sequence[int] | None = None, normed: bool = True
    ) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to a tuple of feature maps, one per out index; for the
        other arguments see :class:`PyramidBackbone`."""
        self.check_image(x)
        features, size = [], ()
        out_indices = self.wanted_maps(out_indices, normed)
        make_map = self.output if normed else self.bare_output
        for i in range(out_indices[-1] + 1):
            stage = self.stages[i]
            x, *size = stage.patch_embed(x, *size)
            for block, windows in zip(stage.blocks, stage.windows(x, *size), strict=True):
                x = self.run_block(block, x, windows)
            if i in out_indices:
                features.append(make_map(i, x, *size))
        return tuple(features)


#: ends of the names of what timm stores though it is computed
COMPUTED = ('relative_position_index', 'attn_mask')


def name_from_timm(name: str) -> str:
    """What a weight of timm's Swin is called here, but for the last norm."""
    for pattern, replacement in (
        (r'^patch_embed\.', 'stages.0.patch_embed.'),
        (r'^layers\.(\d+)\.downsample\.', r'stages.\1.patch_embed.'),
        (r'^layers\.', 'stages.'),
    ):
        name = re.sub(pattern, replacement, name)
    return name
