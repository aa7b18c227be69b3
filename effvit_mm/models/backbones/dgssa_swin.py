# SPDX-License-Identifier: Apache-2.0
"""DGSSA-Swin: a Swin transformer with static attention in early layers (Yu et al., arXiv
2310.07664)."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from mmengine.registry import MODELS
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.grid import Tiling, ceil_div, divide
from ..layers.qkv import QKV
from ..layers.static_attention import StaticWindowAttention
from ..layers.utils import check_heads, feed_forward, is_captured, map_to_tokens
from .base import PyramidBackbone

#: added to the logits of pairs that may not see each other
MASKED = -1e4


class Windows:
    """Windows over a map, and which of their cells may see each other.

    What is beyond the map, rolled by the shift, lies in the last two rows and columns of windows.
    So there are three kinds of windows along a side, nine in all, whatever the map's size.

    Args:
        tiling: The windows.
    """

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling
        self.mask = self.kind = None
        (nh, nw), (th, tw) = tiling.tiles, tiling.tile
        whole = not is_captured() and not (tiling.height % th or tiling.width % tw)
        if whole and not any(tiling.shift):
            return
        window = torch.arange(nh * nw, device=tiling.device)
        y, x = divide(window, nw)
        kind = 3 * (y - (nh - 3)).clamp(0, 2) + (x - (nw - 3)).clamp(0, 2)
        self.kind = kind.repeat(tiling.batch)
        down, along = divide(torch.arange(9, device=tiling.device), 3)
        examples = (down + (nh - 3)).clamp(min=0) * nw + (along + (nw - 3)).clamp(min=0)
        regions = tiling.regions().index_select(0, examples)
        apart = regions[:, :, None] != regions[:, None, :]
        self.mask = apart.to(torch.float32) * MASKED


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
            bias = (bias + mask[:, None]).index_select(0, kind)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.proj(z.transpose(1, 2).flatten(2))


class SwinBlock(nn.Module):
    """One layer: attention in windows, then the FFN, each with a norm and a residual.

    Args:
        dim: Channels ``C``.
        attention: Dynamic or static attention.
        shifted: Whether the windows are shifted by half their side.
        mlp_ratio: Hidden over input channels of the FFN.
        drop_path: Stochastic depth rate.
    """

    def __init__(
        self,
        dim: int,
        attention: WindowAttention | StaticWindowAttention,
        shifted: bool,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.shifted = shifted
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, windows: tuple[Windows, Windows]) -> Tensor:
        """Tokens ``(B, N, C)`` to the same shape; windows without and with shift."""
        w = windows[int(self.shifted)]
        z = self.attn(w.tiling.cut(self.norm1(x)), w.mask, w.kind)
        x = x + self.drop_path(w.tiling.join(z))
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


@MODELS.register_module()
class DGSSASwin(PyramidBackbone):
    """Swin with static attention (DGSSA) in early layers.

    Architecture fields (``arch`` as a dict; those after ``static_layers`` may be left out):

    - ``embed_dims``: channels of the first stage, doubled by each further one.
    - ``depths``, ``num_heads``: layers and heads of each stage.
    - ``static_layers``: layers with static attention, counted from 0 through all stages.
    - ``window_size``: side of a window in cells.
    - ``mlp_ratio``: FFN expansion.
    - ``static_init``: see :class:`StaticWindowAttention`.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict of the fields above.
        in_channels: See :class:`PyramidBackbone`, also for the arguments not listed here.
        drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.
    """

    no_decay_keys: ClassVar[tuple[str, ...]] = ('relative_position_bias_table', 'attn.logits')
    arch_zoo: ClassVar[dict[str, dict[str, Any]]] = {
        name: dict(embed_dims=c, depths=d, num_heads=h, static_layers=tuple(range(1, p + 1)))
        for name, c, d, h, p in (
            ('tiny', 96, (2, 2, 6, 2), (3, 6, 12, 24), 6),
            ('small', 96, (2, 2, 18, 2), (3, 6, 12, 24), 12),
            ('base', 128, (2, 2, 18, 2), (4, 8, 16, 32), 12),
        )
    }
    arch_defaults: ClassVar[dict[str, Any]] = dict(
        window_size=7, mlp_ratio=4, static_init='dynamic'
    )
    per_stage_fields: ClassVar[tuple[str, ...]] = ('depths', 'num_heads')
    must_have: ClassVar[str] = r'layers\.(\d+)\.'

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
        total, size = sum(a['depths']), a['window_size']
        if not all(0 < layer < total for layer in a['static_layers']):
            raise ValueError(
                f'static_layers must lie in 1…{total - 1}, not {tuple(a["static_layers"])}.'
            )
        dims = [a['embed_dims'] * 2**i for i in range(4)]
        self.patch_embed = PatchEmbed(in_channels, dims[0])
        self.layers = nn.ModuleList()
        layer = 0
        for i in range(self.num_stages):
            stage = nn.Module()
            if i:
                stage.downsample = PatchMerging(dims[i - 1], dims[i])
            stage.blocks = nn.ModuleList()
            for j in range(a['depths'][i]):
                heads = a['num_heads'][i]
                if layer in a['static_layers']:
                    attn = StaticWindowAttention(dims[i], heads, size**2, init=a['static_init'])
                else:
                    attn = WindowAttention(dims[i], heads, size)
                rate = drop_path_rate * layer / max(1, total - 1)
                stage.blocks.append(SwinBlock(dims[i], attn, j % 2 == 1, a['mlp_ratio'], rate))
                layer += 1
            self.layers.append(stage)
        self.finish(dims)
        for module in self.modules():
            if isinstance(module, WindowAttention):
                trunc_normal_(module.relative_position_bias_table, std=0.02)
        for i in self.out_indices:
            getattr(self, f'norm{i}').eps = 1e-5

    @property
    def stages(self) -> nn.ModuleList:
        """The stages, which carry timm's name ``layers``."""
        return self.layers

    def _frozen_modules(self) -> Iterator[nn.Module]:
        if self.frozen_stages >= 0:
            yield self.patch_embed
        for i in range(self.frozen_stages):
            yield self.layers[i]
            if i in self.out_indices:
                yield getattr(self, f'norm{i}')

    def get_layer_depth(self, param_name: str, prefix: str = 'backbone.') -> tuple[int, int]:
        """See :meth:`PyramidBackbone.get_layer_depth`."""
        name = param_name.removeprefix(prefix)
        if param_name.startswith(prefix) and name.startswith('patch_embed.'):
            return 0, sum(len(stage.blocks) for stage in self.layers) + 2
        if param_name.startswith(prefix) and name.startswith('layers.'):
            param_name = f'{prefix}stages.{name.removeprefix("layers.")}'
        return super().get_layer_depth(param_name, prefix)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to a tuple of maps, one per out index."""
        self.check_image(x)
        x, height, width = self.patch_embed(x)
        side, features = self.arch_settings['window_size'], []
        for i, stage in enumerate(self.layers):
            if i:
                x, height, width = stage.downsample(x, height, width)
            windows = tuple(
                Windows(Tiling(x.shape[0], height, width, (side, side), (s, s), x.device))
                for s in (0, side // 2)
            )
            for block in stage.blocks:
                x = self.run_block(block, x, windows)
            if i in self.out_indices:
                features.append(self.output(i, x, height, width))
        return tuple(features)
