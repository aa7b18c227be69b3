# SPDX-License-Identifier: Apache-2.0
"""PartialFormer (Vo et al., "Efficient Vision Transformers with Partial Attention", ECCV 2024)."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from mmengine.registry import MODELS
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn

from ..layers.partial_attention import (
    MixedMultiHeadAttention,
    SingleQueryAttention,
    gather_tokens,
    merge_tokens,
    split_tokens,
)
from ..layers.utils import (
    ConditionalPositionEncoding,
    ConvPatchEmbed,
    feed_forward,
    tokens_to_map,
)
from .base import PyramidBackbone, as_fraction

SQA_PROJECTIONS = ('channel_mlp', 'linear', 'none')


class PartialBlock(nn.Module):
    """One PartialFormer block (Figs. 3 and 4).

    Position encoding, then the split by content; MMSA on the abstract token and the foreground; SQA
    with the abstract token as the query of the background; everything back at its own place; FFN.

    Args:
        dim: Channels ``C``.
        num_heads: Attention heads.
        foreground_ratio: Share of foreground tokens; at 1 there is no background and no SQA.
        mlp_ratio: Hidden over input channels of the FFN.
        head_expansion: HeadMLP's expansion ratio; 0 is plain attention instead of MMSA.
        sqa: Output projection of SQA, ``'channel_mlp'`` or ``'linear'``; ``'none'``: no SQA.
        channel_reduction: ChannelMLP's reduction ratio.
        abstract_token: Whether an abstract token takes part. Without it SQA's query is a learned
            vector of the block, and foreground and background do not exchange anything.
        drop_path: Stochastic depth rate.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        foreground_ratio: Fraction,
        mlp_ratio: float = 4.0,
        head_expansion: int = 2,
        sqa: str = 'channel_mlp',
        channel_reduction: int = 4,
        abstract_token: bool = True,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.foreground_ratio = foreground_ratio
        self.has_background = foreground_ratio < 1
        self.pos_embed = ConditionalPositionEncoding(dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.mmsa = MixedMultiHeadAttention(dim, num_heads, head_expansion)
        self.sqa = None
        if self.has_background and sqa != 'none':
            reduction = channel_reduction if sqa == 'channel_mlp' else 0
            self.sqa = SingleQueryAttention(dim, num_heads, reduction)
        self.query = None
        if self.sqa is not None and not abstract_token:
            self.query = nn.Parameter(torch.zeros(1, 1, dim))
            trunc_normal_(self.query, std=1.0)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def attend(self, x: Tensor, abstract: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Partial attention with both residuals; shapes as in :meth:`forward`."""
        index = split_tokens(x, self.foreground_ratio) if self.has_background else None
        tokens = self.norm1(x)
        foreground = tokens if index is None else gather_tokens(tokens, index)
        # MMSA on [a ; X_f]
        if abstract is not None:
            foreground = torch.cat([self.norm1(abstract).to(foreground.dtype), foreground], dim=1)
        updates = self.mmsa(foreground)
        # SQA: the abstract token, which has now seen the foreground, reads the background
        if self.sqa is not None:
            if self.query is not None:
                query = self.query.expand(x.shape[0], -1, -1)
            else:
                query = self.norm1(abstract + updates[:, :1])
            background = self.sqa(query, tokens, index, self.mmsa.qkv.weight)
            updates = torch.cat([updates, background.to(updates.dtype)], dim=1)
        updates = self.drop_path(updates)
        if self.sqa is not None:
            updates, background = updates[:, :-1], updates[:, -1:]
        else:
            background = None
        if abstract is not None:
            abstract, updates = abstract + updates[:, :1], updates[:, 1:]
            if background is not None:
                abstract = abstract + background
        if index is None:
            return x + updates, abstract
        return merge_tokens(x, background, updates, index), abstract

    def forward(
        self, x: Tensor, abstract: Tensor | None, height: int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens ``(B, H*W, C)`` and abstract token ``(B, 1, C)`` to the same."""
        x = self.pos_embed(x, height, width)
        x, abstract = self.attend(x, abstract)
        if abstract is not None:
            abstract = feed_forward(abstract, self.norm2, self.mlp, self.drop_path)
        return feed_forward(x, self.norm2, self.mlp, self.drop_path), abstract


class PartialStage(nn.Module):
    """A patch embedding and the blocks that follow it.

    Args:
        in_channels: Channels of the map before.
        dim: Channels of the stage.
        stride: Of the patch embedding.
        blocks: The blocks.
        first: Whether this is the first stage.
        abstract_token: Whether there is an abstract token: the first stage creates it, the later
            ones project it to their channels.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        stride: int,
        blocks: Sequence[PartialBlock],
        first: bool,
        abstract_token: bool,
    ) -> None:
        super().__init__()
        # normed before the convolution, not after it: context scores are channel means, and
        # straight after a LayerNorm those would be zero
        self.norm = None if first else nn.LayerNorm(in_channels, eps=1e-6)
        self.patch_embed = ConvPatchEmbed(in_channels, dim, stride)
        self.abstract_token = None
        self.abstract_proj = None
        if abstract_token and first:
            self.abstract_token = nn.Parameter(torch.zeros(1, 1, dim))
            trunc_normal_(self.abstract_token, std=0.02)
        elif abstract_token:
            self.abstract_proj = nn.Linear(in_channels, dim)
        self.blocks = nn.ModuleList(blocks)

    def enter(self, x: Tensor, abstract: Tensor | None) -> tuple[Tensor, Tensor | None, int, int]:
        """Embed what comes into the stage.

        Args:
            x: The image, or the map of the stage before, ``(B, C_in, H_in, W_in)``.
            abstract: The abstract token of the stage before, ``(B, 1, C_in)``.

        Returns:
            Tokens ``(B, H*W, C)``, abstract token ``(B, 1, C)``, and the tokens' grid ``H, W``.
        """
        if self.norm is not None:
            x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.abstract_token is not None:
            abstract = self.abstract_token.expand(x.shape[0], -1, -1)
        elif self.abstract_proj is not None:
            abstract = self.abstract_proj(self.norm(abstract))
        x, height, width = self.patch_embed(x)
        return x, abstract, height, width


@MODELS.register_module()
class PartialFormer(PyramidBackbone):
    """PartialFormer backbone.

    Architecture fields (``arch`` as a dict; those after ``num_heads`` may be left out):

    - ``base_channels``: channels ``C`` of the first stage.
    - ``depths``: blocks ``L_i`` of each stage.
    - ``num_heads``: attention heads of each stage.
    - ``channel_multipliers``: channels of each stage over ``C``. The paper's text reads both
      "doubles" and {C, 2C, 3C, 4C}; only doubling meets its published cost.
    - ``foreground_ratios``: share of foreground tokens in each stage, as number or ``'1/16'``.
    - ``mlp_ratios``: FFN expansion of each stage.
    - ``head_expansion``: HeadMLP's ratio ``e``; 0 replaces MMSA by plain attention.
    - ``sqa``: ``'channel_mlp'`` (paper), ``'linear'``, or ``'none'`` for no SQA.
    - ``channel_reduction``: ChannelMLP's ratio ``r``.
    - ``abstract_token``: whether there is one.

    Args:
        arch: ``'b0'`` … ``'b4'``, or a dict of the fields above.
        in_channels: See :class:`PyramidBackbone`, also for the arguments not listed here.
        drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.

    The forward takes images ``(B, in_channels, H, W)`` of any size and returns a tuple of maps
    ``(B, out_channels[i], ceil(H/s), ceil(W/s))`` with ``s`` of 4, 8, 16, 32.
    """

    no_decay_keys: ClassVar[tuple[str, ...]] = (
        'abstract_token',
        '.query',
        'expand_delta',
        'reduce_delta',
    )
    arch_zoo: ClassVar[dict[str, dict[str, Any]]] = {
        'b0': dict(base_channels=32, depths=(2, 2, 5, 2), num_heads=(1, 2, 4, 8)),
        'b1': dict(base_channels=48, depths=(2, 2, 4, 2), num_heads=(2, 4, 8, 16)),
        'b2': dict(base_channels=64, depths=(2, 2, 6, 2), num_heads=(2, 4, 8, 16)),
        'b3': dict(base_channels=80, depths=(2, 2, 9, 4), num_heads=(2, 4, 8, 16)),
        'b4': dict(base_channels=96, depths=(3, 4, 12, 5), num_heads=(3, 6, 12, 24)),
    }
    arch_defaults: ClassVar[dict[str, Any]] = dict(
        channel_multipliers=(1, 2, 4, 8),
        foreground_ratios=('1/64', '1/16', '1/4', '1/2'),
        mlp_ratios=(4, 4, 4, 4),
        head_expansion=2,
        sqa='channel_mlp',
        channel_reduction=4,
        abstract_token=True,
    )
    per_stage_fields: ClassVar[tuple[str, ...]] = (
        'depths',
        'num_heads',
        'channel_multipliers',
        'foreground_ratios',
        'mlp_ratios',
    )

    def __init__(
        self,
        arch: str | dict = 'b3',
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
        if a['sqa'] not in SQA_PROJECTIONS:
            raise ValueError(f'sqa must be one of {SQA_PROJECTIONS}, not {a["sqa"]!r}.')
        dims = [a['base_channels'] * m for m in a['channel_multipliers']]
        ratios = [as_fraction(r, 'foreground_ratios') for r in a['foreground_ratios']]
        last = max(1, sum(a['depths']) - 1)
        self.stages = nn.ModuleList()
        for i in range(self.num_stages):
            before = sum(a['depths'][:i])
            blocks = [
                PartialBlock(
                    dims[i],
                    a['num_heads'][i],
                    ratios[i],
                    mlp_ratio=a['mlp_ratios'][i],
                    head_expansion=a['head_expansion'],
                    sqa=a['sqa'],
                    channel_reduction=a['channel_reduction'],
                    abstract_token=a['abstract_token'],
                    drop_path=drop_path_rate * (before + j) / last,
                )
                for j in range(a['depths'][i])
            ]
            self.stages.append(
                PartialStage(
                    dims[i - 1] if i else in_channels,
                    dims[i],
                    stride=2 if i else 4,
                    blocks=blocks,
                    first=i == 0,
                    abstract_token=a['abstract_token'],
                )
            )
        self.finish(dims)

    def forward(
        self, x: Tensor, out_indices: Sequence[int] | None = None, normed: bool = True
    ) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to a tuple of feature maps, one per out index; for the
        other arguments see :class:`PyramidBackbone`."""
        self.check_image(x)
        features, abstract = [], None
        out_indices = self.wanted_maps(out_indices, normed)
        make_map = self.output if normed else self.bare_output
        for i in range(out_indices[-1] + 1):
            stage = self.stages[i]
            x, abstract, height, width = stage.enter(x, abstract)
            for block in stage.blocks:
                x, abstract = self.run_block(block, x, abstract, height, width)
            if i in out_indices:
                features.append(make_map(i, x, height, width))
            x = tokens_to_map(x, height, width)
        return tuple(features)
