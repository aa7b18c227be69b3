# SPDX-License-Identifier: Apache-2.0
"""Integrated-DeiT: a DeiT with static attention in early layers and global aggregation in later
ones (Yu et al., arXiv 2310.07664)."""

import itertools
import math
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, ClassVar

import torch
from mmengine.registry import MODELS
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.grid import Tiling, ceil_div, divide
from ..layers.qkv import QKV
from ..layers.static_attention import MlpMixing, StaticAttention
from ..layers.token_aggregation import (
    GLAD,
    ConcatAggregation,
    DownsampleAggregation,
    Unprojection,
)
from ..layers.utils import check_heads, feed_forward, is_captured, map_to_tokens, tokens_to_map
from .base import NUM_STAGES, STRIDES, PyramidBackbone


class PatchEmbed(nn.Module):
    """Patches of ``patch_size`` pixels; those that reach beyond the image see zeros there.

    Args:
        in_channels: Channels of the image.
        dim: Channels ``C`` of the tokens.
        patch_size: Side of a patch in pixels.
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """``(B, C_in, H, W)`` to tokens ``(B, H'*W', C)`` and ``H', W'``, rounded up."""
        patch = self.proj.stride[0]
        if is_captured() or x.shape[2] % patch or x.shape[3] % patch:
            x = F.pad(x, (0, patch - 1, 0, patch - 1))
        x = self.proj(x)
        return map_to_tokens(x), x.shape[2], x.shape[3]


class DynamicAttention(nn.Module):
    """DeiT's multi-head self-attention.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = QKV(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, inside: Tensor | None = None, first: int | None = None) -> Tensor:
        """Attend.

        Args:
            x: Tokens ``(B, n, C)``.
            inside: ``(B, n)``, which tokens are there; others are no keys. None: all are.
            first: Only so many tokens, the first ones, attend. None: all.

        Returns:
            ``(B, first or n, C)``.
        """
        batch, n, dim = x.shape
        if first is None:
            qkv = self.qkv(x).view(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
        else:
            q = self.qkv(x[:, :first], 0, 1).view(batch, first, self.num_heads, -1).transpose(1, 2)
            kv = self.qkv(x, 1, 3).view(batch, n, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            k, v = kv.unbind(0)
        mask = None if inside is None else inside[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(z.transpose(1, 2).reshape(batch, -1, dim))


class DeiTBlock(nn.Module):
    """One layer: attention, then the FFN, each with a norm and a residual.

    Args:
        dim: Channels ``C``.
        attention: Dynamic or static attention, or token mixing.
        mlp_ratio: Hidden over input channels of the FFN.
        drop_path: Stochastic depth rate.
    """

    def __init__(
        self, dim: int, attention: nn.Module, mlp_ratio: float = 4.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attention
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, inside: Tensor | None = None, first: int | None = None) -> Tensor:
        """Tokens ``(B, n, C)``, of which those ``inside (B, n)`` count, to the same shape, or to
        the ``first`` of them only."""
        y = self.norm1(x)
        if isinstance(self.attn, DynamicAttention):
            y = self.attn(y, inside, first)
        else:
            y = self.attn(y, inside)[:, :first]
        x = x[:, :first] + self.drop_path(y)
        return feed_forward(x, self.norm2, self.mlp, self.drop_path)


class WindowMixing(nn.Module):
    """``X + DWConv3x3(X)`` on the reassembled map, zero at the start: windows, which otherwise
    never talk, exchange what is next to their borders."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Tokens ``(B, H*W, C)`` to tokens of the same shape."""
        return x + map_to_tokens(self.proj(tokens_to_map(x, height, width)))


def _halve(x: Tensor) -> Tensor:
    """3x3 maximum pooling with stride 2, ``(B, C, H, W)`` to ``(B, C, ceil(H/2), ceil(W/2))``."""
    if not is_captured():
        return F.max_pool2d(x, 3, stride=2, padding=1)
    # the operator would tie a graph to the parity of the sides
    for dim in (2, 3):
        side = x.shape[dim]
        middle = 2 * torch.arange(ceil_div(side, 2), device=x.device)
        before, after = (middle - 1).clamp(min=0), (middle + 1).clamp(max=side - 1)
        x = torch.stack([x.index_select(dim, i) for i in (before, middle, after)]).amax(dim=0)
    return x


def _crop(x: Tensor, height: int, width: int) -> Tensor:
    """The first rows and columns of a map."""
    if not is_captured():
        return x[:, :, :height, :width]
    # a slice would ask whether the map is that large
    rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
    return x.index_select(2, rows).index_select(3, columns)


def _mean_of_windows(x: Tensor, batch: int) -> Tensor:
    """Means ``(B, C)`` of what the windows of each image have, ``(B*T, C)``."""
    if not is_captured():
        return x.view(batch, -1, x.shape[1]).mean(dim=1)
    # a view would ask whether there is more than one window, and ONNX's scatter keeps one of them
    windows = x.shape[0] // batch
    sample, _ = divide(torch.arange(x.shape[0], device=x.device), windows)
    own = sample == torch.arange(batch, device=x.device)[:, None]
    return own.to(x.dtype) @ x / windows


class _ToStride(nn.Module):
    """From the patches' stride to another one, as the feature pyramids of plain ViTs do:
    deconvolutions to finer maps, 3x3 maximum pooling to coarser ones.

    Args:
        dim: Channels ``C``.
        stride_in: Stride of the patches.
        stride_out: Stride of the result.
    """

    def __init__(self, dim: int, stride_in: int, stride_out: int) -> None:
        super().__init__()
        self.halvings = max(0, round(math.log2(stride_out / stride_in)))
        doublings = max(0, round(math.log2(stride_in / stride_out)))
        self.factor = 2**doublings
        steps: list[nn.Module] = []
        for i in range(doublings):
            if i:
                steps += [nn.GroupNorm(1, dim), nn.GELU()]
            steps.append(nn.ConvTranspose2d(dim, dim, 2, stride=2))
        self.deconv = nn.Sequential(*steps)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Map ``(B, C, H', W')`` to ``(B, C, height, width)``."""
        x = self.deconv(x)
        for _ in range(self.halvings):
            x = _halve(x)
        if self.factor > 1:
            x = _crop(x, height, width)
        return x.contiguous()


@MODELS.register_module()
class IntegratedDeiT(PyramidBackbone):
    """DeiT with static attention (DGSSA) in early layers and global aggregation (GLAD) later.

    Architecture fields (``arch`` as a dict; those after ``num_heads`` may be left out). Layers
    count from 0, tokens include the class token.

    - ``embed_dims``: channels ``C``.
    - ``depth``: layers.
    - ``num_heads``: attention heads.
    - ``mlp_ratio``: FFN expansion.
    - ``patch_size``: side of a patch in pixels: 4, 8, 16 or 32.
    - ``image_size``: side in pixels of the pretraining's images, which is the size of a window.
    - ``static_layers``: layers with static attention; none: ``()``.
    - ``pyramid``: pairs of a layer and the tokens that it and those after it have: a GLAD before
      each of these layers; none: ``()``.
    - ``static_block``: ``'attention'``, or ``'mlp'`` for token mixing by an MLP instead.
    - ``static_init``: see :class:`StaticAttention`.
    - ``aggregation``: ``'glad'``, or ``'concat'`` or ``'downsample'`` of 2x2 neighbours, which give
      the number of tokens themselves.
    - ``glad_norm``, ``glad_pos_embed``: whether GLAD has LayerNorm and GELU, and the embedding.
    - ``taps``: four layers whose output becomes the maps with stride 4, 8, 16, 32; None: those
      before three GLADs and the last one, else spread evenly.
    - ``window_mixing``: whether the maps have a depthwise convolution, zero at the start.

    Images of another size than ``image_size`` are cut into windows of that size, each with its own
    class token (see docs/fidelity.md); an image of that size is a single window.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict of the fields above.
        in_channels: See :class:`PyramidBackbone`, also for the arguments not listed here.
        drop_path_rate: Stochastic depth rate of the last layer, rising linearly from 0.
        out_type: ``'pyramid'``: a tuple of maps ``(B, C, ceil(H/s), ceil(W/s))``, ``s`` of 4, 8,
            16, 32, for detection and segmentation. ``'cls_token'``: a tuple with the class token
            ``(B, C)``, of several windows their mean, for classification; ``out_indices`` is (3,)
            then, whatever it is given as.
    """

    no_decay_keys: ClassVar[tuple[str, ...]] = (
        'cls_token',
        'pos_embed',
        '.q_bias',
        '.v_bias',
        'attn.matrix',
        'aggregations',
        'unprojections',
    )
    # only small's tokens are published; those of tiny and base have its shape and cost 0.54 and
    # 0.457 of the original (`compression.costs.scale_pyramid`) until statistics choose them
    arch_zoo: ClassVar[dict[str, dict[str, Any]]] = {
        'tiny': dict(
            embed_dims=192,
            depth=12,
            num_heads=3,
            static_layers=(1, 2),
            pyramid=((3, 175), (5, 105), (7, 47)),
        ),
        'small': dict(
            embed_dims=384,
            depth=12,
            num_heads=6,
            static_layers=(1, 2),
            pyramid=((3, 127), (5, 77), (7, 35)),
        ),
        'base': dict(
            embed_dims=768,
            depth=12,
            num_heads=12,
            static_layers=(1, 2),
            pyramid=((3, 124), (5, 75), (7, 34)),
        ),
    }
    arch_defaults: ClassVar[dict[str, Any]] = dict(
        mlp_ratio=4,
        patch_size=16,
        image_size=224,
        static_block='attention',
        static_init='dynamic',
        aggregation='glad',
        glad_norm=True,
        glad_pos_embed=True,
        taps=None,
        window_mixing=True,
    )
    may_lack: ClassVar[str] = r'(norm\d|unprojections|window_mixing|to_stride)\.'
    must_have: ClassVar[str] = r'(?:blocks|aggregations)\.(\d+)\.'

    def __init__(
        self,
        arch: str | dict = 'small',
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        out_type: str = 'pyramid',
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        if out_type not in ('pyramid', 'cls_token'):
            raise ValueError(f"out_type must be 'pyramid' or 'cls_token', not {out_type!r}.")
        if out_type == 'cls_token':
            out_indices = (NUM_STAGES - 1,)
        super().__init__(
            arch, in_channels, out_indices, frozen_stages, norm_eval, with_cp, init_cfg
        )
        a = self.arch_settings
        self.out_type = out_type
        self._check_arch(a)
        dim = a['embed_dims']
        self.grid = a['image_size'] // a['patch_size']
        self.taps = tuple(a['taps'] or self._default_taps(a))
        self.num_layers = a['depth'] if out_type == 'cls_token' else self.taps[max(out_indices)] + 1

        self.patch_embed = PatchEmbed(in_channels, dim, a['patch_size'])
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid**2, dim))
        self.aggregations = nn.ModuleDict()
        self.blocks = nn.ModuleList()
        self.tokens_of = self._build_layers(drop_path_rate)
        self._build_outputs()
        self.finish([dim] * NUM_STAGES)
        trunc_normal_(self.cls_token, std=0.02)
        trunc_normal_(self.pos_embed, std=0.02)
        if out_type == 'pyramid':
            for module in self.window_mixing.values():
                nn.init.zeros_(module.proj.weight)
        if frozen_stages >= 0:
            self.cls_token.requires_grad_(False)
            self.pos_embed.requires_grad_(False)

    @staticmethod
    def _check_arch(a: dict[str, Any]) -> None:
        """Refuse fields that do not fit each other."""
        depth, patch = a['depth'], a['patch_size']
        if patch not in STRIDES or a['image_size'] % patch:
            raise ValueError(
                f'patch_size must be 4, 8, 16 or 32 and divide image_size, not {patch} with '
                f'{a["image_size"]}.'
            )
        for field, value in (
            ('static_block', ('attention', 'mlp')),
            ('aggregation', tuple(_KINDS)),
        ):
            if a[field] not in value:
                raise ValueError(f'{field} must be one of {", ".join(value)}, not {a[field]!r}.')
        layers = [layer for layer, _ in a['pyramid']]
        tokens = [1 + (a['image_size'] // patch) ** 2, *(m for _, m in a['pyramid'])]
        if layers != sorted(set(layers)) or not all(0 <= layer < depth for layer in layers):
            raise ValueError(f'pyramid: layers must rise within 0…{depth - 1}, not {layers}.')
        if a['aggregation'] == 'glad' and any(
            m < 2 or m >= n for n, m in itertools.pairwise(tokens)
        ):
            raise ValueError(f'pyramid: tokens must fall from {tokens[0]}, not {tokens[1:]}.')
        if not all(0 < layer < depth for layer in a['static_layers']):
            raise ValueError(
                f'static_layers must lie in 1…{depth - 1}, not {tuple(a["static_layers"])}.'
            )
        taps = a['taps']
        if taps is not None and (
            len(taps) != NUM_STAGES
            or list(taps) != sorted(set(taps))
            or not all(0 <= tap < depth for tap in taps)
        ):
            raise ValueError(f'taps must be four rising layers in 0…{depth - 1}, not {taps}.')

    @staticmethod
    def _default_taps(a: dict[str, Any]) -> list[int]:
        before = [layer - 1 for layer, _ in a['pyramid']]
        if len(before) == NUM_STAGES - 1 and before[0] >= 0 and before[-1] < a['depth'] - 1:
            return [*before, a['depth'] - 1]
        if a['depth'] < NUM_STAGES:
            raise ValueError(f'depth must be at least {NUM_STAGES}, not {a["depth"]}.')
        return [(i + 1) * a['depth'] // NUM_STAGES - 1 for i in range(NUM_STAGES)]

    def _build_layers(self, drop_path_rate: float) -> list[int]:
        """Blocks and what aggregates before them; returns the tokens of every layer."""
        a, tokens, tokens_of = self.arch_settings, 1 + self.grid**2, []
        dim, pyramid = a['embed_dims'], dict(a['pyramid'])
        for layer in range(self.num_layers):
            if layer in pyramid:
                aggregation = _KINDS[a['aggregation']](a, tokens, pyramid[layer])
                self.aggregations[str(layer)] = aggregation
                tokens = aggregation.num_out
            tokens_of.append(tokens)
            if layer not in a['static_layers']:
                attention = DynamicAttention(dim, a['num_heads'])
            elif a['static_block'] == 'attention':
                attention = StaticAttention(dim, a['num_heads'], tokens, init=a['static_init'])
            else:
                attention = MlpMixing(dim, tokens)
            rate = drop_path_rate * layer / max(1, a['depth'] - 1)
            self.blocks.append(DeiTBlock(dim, attention, a['mlp_ratio'], rate))
        return tokens_of

    def _build_outputs(self) -> None:
        """What makes maps of the tokens that are tapped."""
        self.norm = None
        if self.out_type == 'cls_token':
            return
        a = self.arch_settings
        self.unprojections, self.window_mixing = nn.ModuleDict(), nn.ModuleDict()
        self.to_stride = nn.ModuleDict()
        for i in self.out_indices:
            if self.tokens_of[self.taps[i]] < 1 + self.grid**2:
                self.unprojections[str(i)] = Unprojection(self.unprojection_start(i))
            if a['window_mixing']:
                self.window_mixing[str(i)] = WindowMixing(a['embed_dims'])
            self.to_stride[str(i)] = _ToStride(a['embed_dims'], a['patch_size'], STRIDES[i])

    def finish(self, channels: Sequence[int], strides: Sequence[int] = STRIDES) -> None:
        """See :meth:`PyramidBackbone.finish`; the class token's norm is called ``norm`` as in
        DeiT."""
        super().finish(channels, strides)
        if self.out_type == 'cls_token':
            self.norm = self.norm3
            del self.norm3

    def unprojection_start(self, i: int) -> Tensor:
        """``(cells, m)``: the inverses of the aggregations before tap ``i``, one by one."""
        inverse = torch.eye(1 + self.grid**2).to(self.pos_embed)
        for layer, aggregation in self.aggregations.items():
            if int(layer) <= self.taps[i]:
                inverse = inverse @ aggregation.inverse().to(inverse)
        return inverse[1:]

    def reset_unprojections(self, given: Container[str] = ()) -> None:
        """Start the un-projections from the aggregations as they are now, except those whose weight
        is among the ``given`` names."""
        with torch.no_grad():
            for i, unprojection in self.unprojections.items():
                if f'unprojections.{i}.weight' not in given:
                    unprojection.weight.copy_(self.unprojection_start(int(i)))

    def _frozen_modules(self) -> Iterator[nn.Module]:
        if self.frozen_stages >= 0:
            yield self.patch_embed
        if self.frozen_stages < 1:
            return
        last = self.taps[self.frozen_stages - 1]
        if self.out_type == 'cls_token' and self.frozen_stages == NUM_STAGES:
            last = self.num_layers - 1  # layers after the last tap are built here
        for layer in range(last + 1):
            yield self.blocks[layer]
            if str(layer) in self.aggregations:
                yield self.aggregations[str(layer)]
        if self.out_type == 'cls_token':
            if self.frozen_stages == NUM_STAGES:
                yield self.norm if self.norm is not None else self.norm3
            return
        for i in self.out_indices:
            if i < self.frozen_stages:
                yield getattr(self, f'norm{i}')
                for modules in (self.unprojections, self.window_mixing, self.to_stride):
                    if str(i) in modules:
                        yield modules[str(i)]

    def all_blocks(self) -> list[nn.Module]:
        """See :meth:`PyramidBackbone.all_blocks`."""
        return list(self.blocks)

    def get_layer_depth(self, param_name: str, prefix: str = 'backbone.') -> tuple[int, int]:
        """See :meth:`PyramidBackbone.get_layer_depth`: an aggregation belongs to the layer after
        it."""
        num_depths = self.num_layers + 2
        name = param_name.removeprefix(prefix)
        part = re.match(self.must_have, name)
        if not param_name.startswith(prefix):
            return num_depths - 1, num_depths
        if part:
            return int(part[1]) + 1, num_depths
        stem = name.startswith(('patch_embed', 'cls_token', 'pos_embed'))
        return (0 if stem else num_depths - 1), num_depths

    def _is_surplus(self, key: str) -> bool:
        # layers after the last one that is tapped are not built
        unbuilt = range(self.num_layers, self.arch_settings['depth'])
        part = re.match(self.must_have, key)
        return part is not None and int(part[1]) not in unbuilt

    def adapt_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Also take DeiT's own names of biases, and a class token's norm for the last map's."""
        adapted = {}
        for key, value in state.items():
            if key.endswith('.attn.qkv.bias'):
                adapted[f'{key[:-4]}q_bias'], _, adapted[f'{key[:-4]}v_bias'] = value.chunk(3)
            elif key.startswith('norm.') and self.out_type == 'pyramid' and 3 in self.out_indices:
                adapted[f'norm3.{key[5:]}'] = value
            else:
                adapted[key] = value
        return adapted

    def load_weights(self, state: dict[str, Tensor], path: str) -> None:
        """See :meth:`PyramidBackbone.load_weights`. Un-projections that the checkpoint lacks
        start from its aggregations."""
        super().load_weights(state, path)
        if self.out_type == 'pyramid':
            self.reset_unprojections(state)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tiling]:
        """Cut an image into windows of tokens.

        Returns:
            Tokens ``(B*T, 1 + g², C)`` of ``T`` windows of ``g x g`` patches, each with a class
            token; which of them lie on the image ``(B*T, 1 + g²)``, None: all; and the tiling.
        """
        x, height, width = self.patch_embed(x)
        tiling = Tiling(x.shape[0], height, width, (self.grid, self.grid), device=x.device)
        inside = None
        if is_captured() or height % self.grid or width % self.grid:
            inside = F.pad(tiling.inside(x.shape[0]), (1, 0), value=True)
        x = tiling.cut(x) + self.pos_embed[:, 1:]
        cls_token = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        return torch.cat((cls_token.to(x.dtype), x), dim=1), inside, tiling

    def forward_tokens(
        self, x: Tensor, out_indices: Sequence[int] | None = None
    ) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        """The forward, and what the token distillation compares.

        Returns:
            The features, and for every layer before which tokens are aggregated
            ``GELU(LN(W X)) (B*T, m, C)``, the new tokens without their position embedding.
        """
        self.check_image(x)
        image_size = x.shape[2], x.shape[3]
        x, inside, tiling = self.embed(x)
        features, aggregated = [], {}
        out_indices = self.wanted_maps(out_indices)
        depth = self.taps[out_indices[-1]] + 1 if self.out_type == 'pyramid' else self.num_layers
        for layer in range(depth):
            if str(layer) in self.aggregations:
                aggregation = self.aggregations[str(layer)]
                if inside is not None:
                    x = x * inside[..., None].to(x.dtype)
                    inside = None
                aggregated[layer] = aggregation.project(x)
                x = aggregation.place(aggregated[layer])
            # of the last layer a classifier only sees the class token
            last = self.out_type == 'cls_token' and layer == self.num_layers - 1
            x = self.run_block(self.blocks[layer], x, inside, 1 if last else None)
            if self.out_type == 'pyramid' and layer in self.taps:
                i = self.taps.index(layer)
                if i in out_indices:
                    features.append(self.feature_map(i, x, tiling, image_size))
        if self.out_type == 'cls_token':
            return (_mean_of_windows(self.norm(x[:, 0]), tiling.batch),), aggregated
        return tuple(features), aggregated

    def feature_map(self, i: int, x: Tensor, tiling: Tiling, image_size: tuple[int, int]) -> Tensor:
        """Map of out index ``i`` from the windows' tokens ``(B*T, m, C)``."""
        x = self.unprojections[str(i)](x) if str(i) in self.unprojections else x[:, 1:]
        x, height, width = tiling.join(x), tiling.height, tiling.width
        if str(i) in self.window_mixing:
            x = self.window_mixing[str(i)](x, height, width)
        target = (ceil_div(side, STRIDES[i]) for side in image_size)
        return self.to_stride[str(i)](self.output(i, x, height, width), *target)

    def forward(self, x: Tensor, out_indices: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to a tuple of features, see ``out_type``; for
        ``out_indices`` see :class:`PyramidBackbone`."""
        return self.forward_tokens(x, out_indices)[0]


def _glad(a: dict[str, Any], num_in: int, num_out: int) -> nn.Module:
    return GLAD(a['embed_dims'], num_in, num_out, a['glad_norm'], a['glad_pos_embed'])


_KINDS = {
    'glad': _glad,
    'concat': lambda a, num_in, _: ConcatAggregation(a['embed_dims'], num_in),
    'downsample': lambda a, num_in, _: DownsampleAggregation(num_in),
}
