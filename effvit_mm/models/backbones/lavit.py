# SPDX-License-Identifier: Apache-2.0
"""LaViT (Zhang et al., "You Only Need Less Attention at Each Stage in Vision Transformers",
CVPR 2024)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from mmengine.registry import MODELS
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from ..auxiliary import AuxiliaryLossSource
from ..layers.less_attention import (
    AttentionDownsample,
    LessAttention,
    StageGrid,
    VanillaAttention,
    attention_between_cells,
    make_stage_grid,
)
from ..layers.utils import (
    ConditionalPositionEncoding,
    ConvPatchEmbed,
    feed_forward,
    tokens_to_map,
)
from .base import NUM_STAGES, STRIDES, PyramidBackbone


class LaViTBlock(nn.Module):
    """One layer: vanilla or less attention, then the FFN, each with a norm and a residual.

    Args:
        dim: Channels ``C``.
        attention: :class:`VanillaAttention` or :class:`LessAttention`.
        takes_scores: Whether the attention is given scores: those of the layer before, or the
            attention residual.
        mlp_ratio: Hidden over input channels of the FFN.
        drop_path: Stochastic depth rate.
    """

    def __init__(
        self,
        dim: int,
        attention: VanillaAttention | LessAttention,
        takes_scores: bool,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.takes_scores = takes_scores
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attention
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, scores: Tensor | None, grid: StageGrid) -> tuple[Tensor, Tensor]:
        """Tokens ``(B, N, C)`` and scores ``(B, N, h, m)`` to the same of this layer."""
        update, scores = self.attn(self.norm1(x), scores, grid)
        x = x + self.drop_path(update)
        return feed_forward(x, self.norm2, self.mlp, self.drop_path), scores


class LaViTStage(nn.Module):
    """A patch embedding and the blocks that follow it.

    Args:
        in_channels: Channels of the map before.
        dim: Channels of the stage.
        patch_stride: Stride of the patch embedding.
        blocks: The blocks.
        attn_downsample: The attention residual from the stage before; None: there is none.
        grid: ``stride``, ``reduction``, ``key_grid`` and ``query_grid`` of
            :func:`make_stage_grid`.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        patch_stride: int,
        blocks: Sequence[LaViTBlock],
        attn_downsample: AttentionDownsample | None,
        grid: dict[str, Any],
    ) -> None:
        super().__init__()
        self.patch_embed = ConvPatchEmbed(in_channels, dim, patch_stride)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pos_embed = ConditionalPositionEncoding(dim)
        self.attn_downsample = attn_downsample
        self.blocks = nn.ModuleList(blocks)
        self.grid = grid

    def enter(
        self, x: Tensor, scores: Tensor | None, image_size: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, StageGrid]:
        """Embed what comes into the stage.

        Args:
            x: The image, or the map of the stage before, ``(B, C_in, H_in, W_in)``.
            scores: The last scores of the stage before, ``(B, H_in*W_in, h_in, m)``.
            image_size: Height and width of the image in pixels.

        Returns:
            Tokens ``(B, H*W, C)``, attention residual ``(B, H*W, h, m)`` or None, and the grid.
        """
        if self.attn_downsample is None:
            scores = None
        else:
            scores = self.attn_downsample(scores, x.shape[2], x.shape[3])
        x, height, width = self.patch_embed(x)
        x = self.pos_embed(self.norm(x), height, width)
        return x, scores, make_stage_grid(x, height, width, image_size, **self.grid)


@MODELS.register_module()
class LaViT(AuxiliaryLossSource, PyramidBackbone):
    """LaViT backbone.

    Architecture fields (``arch`` as a dict; those after ``num_heads`` may be left out):

    - ``dims``: channels of each stage.
    - ``depths``: layers of each stage.
    - ``num_heads``: attention heads of each stage.
    - ``mlp_ratios``: FFN expansion of each stage.
    - ``reductions``: spatial reduction of keys and values in each stage, as in PVT.
    - ``vanilla_layers``: how many first layers of each stage compute their attention; the layers
      after them are less-attention layers. ``vanilla_layers=depths`` is the baseline without.
    - ``key_grid``: side of the grid of keys, in all stages the same cells of the image.
    - ``query_grids``: side of the tiles of queries that Ψ acts on in each stage. None: only Θ is
      learned (by default where a dense Ψ would cost more than the attention it replaces).
    - ``attention_residual``: whether a stage's last scores are added to the next one's first.

    Keys and Ψ's tiles are those of a 224 x 224 image by default; other sizes are averaged to that
    grid of keys, and tiled.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'base'``, or a dict of the fields above.
        in_channels: See :class:`PyramidBackbone`, also for the arguments not listed here.
        drop_path_rate: Stochastic depth rate of the last block, rising linearly from 0.
        diagonality_loss: Config of the loss on less-attention layers, by default
            :class:`DiagonalityPreservingLoss` on scores; None: no loss. It reaches the training as
            ``loss_diagonality`` where ``AuxiliaryLossHook`` is among the ``custom_hooks``.

    The forward takes images ``(B, in_channels, H, W)`` of any size and returns a tuple of maps
    ``(B, out_channels[i], ceil(H/s), ceil(W/s))`` with ``s`` of 4, 8, 16, 32.
    """

    no_decay_keys: ClassVar[tuple[str, ...]] = ('theta_delta', 'psi_delta', 'head_mix')
    arch_zoo: ClassVar[dict[str, dict[str, Any]]] = {
        'tiny': dict(dims=(64, 128, 256, 448), depths=(2, 2, 3, 2), num_heads=(1, 2, 4, 7)),
        'small': dict(dims=(64, 128, 320, 512), depths=(3, 4, 6, 3), num_heads=(1, 2, 5, 8)),
        'base': dict(dims=(64, 128, 320, 512), depths=(3, 4, 18, 3), num_heads=(1, 2, 5, 8)),
    }
    arch_defaults: ClassVar[dict[str, Any]] = dict(
        mlp_ratios=(6, 6, 4, 4),
        reductions=(8, 4, 2, 1),
        vanilla_layers=(1, 1, 1, 1),
        key_grid=7,
        query_grids=(None, None, 14, 7),
        attention_residual=True,
    )
    per_stage_fields: ClassVar[tuple[str, ...]] = (
        'dims',
        'depths',
        'num_heads',
        'mlp_ratios',
        'reductions',
        'vanilla_layers',
        'query_grids',
    )

    def __init__(
        self,
        arch: str | dict = 'small',
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        diagonality_loss: dict | None = dict(on='scores'),  # noqa: B006 (is not changed)
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(
            arch, in_channels, out_indices, frozen_stages, norm_eval, with_cp, init_cfg
        )
        a = self.arch_settings
        for i in range(NUM_STAGES):
            if not 1 <= a['vanilla_layers'][i] <= a['depths'][i]:
                raise ValueError(
                    f'vanilla_layers: stage {i} needs between 1 and {a["depths"][i]} of them, as '
                    f'deep as it is, not {a["vanilla_layers"][i]}.'
                )
        last = max(1, sum(a['depths']) - 1)
        drop_rates = [drop_path_rate * j / last for j in range(last + 1)]
        self.stages = nn.ModuleList()
        for i in range(self.num_stages):
            self.stages.append(self._build_stage(i, drop_rates[sum(a['depths'][:i]) :]))
        self.diagonality_loss = None
        if diagonality_loss is not None and self.less_attention_layers():
            config = {'type': 'DiagonalityPreservingLoss', **diagonality_loss}
            self.diagonality_loss = MODELS.build(config)
        self.finish(a['dims'])

    def _build_stage(self, i: int, drop_rates: Sequence[float]) -> LaViTStage:
        a = self.arch_settings
        dim, heads, num_keys = a['dims'][i], a['num_heads'][i], a['key_grid'] ** 2
        reduction, query_grid = a['reductions'][i], a['query_grids'][i]
        residual = i > 0 and a['attention_residual']
        blocks = []
        for j in range(a['depths'][i]):
            if j < a['vanilla_layers'][i]:
                attention = VanillaAttention(dim, heads, reduction)
                takes_scores = residual and j == 0
            else:
                num_queries = None if query_grid is None else query_grid**2
                attention = LessAttention(dim, heads, reduction, num_keys, num_queries)
                takes_scores = True
            blocks.append(
                LaViTBlock(dim, attention, takes_scores, a['mlp_ratios'][i], drop_rates[j])
            )
        return LaViTStage(
            a['dims'][i - 1] if i else self.in_channels,
            dim,
            patch_stride=2 if i else 4,
            blocks=blocks,
            attn_downsample=(
                AttentionDownsample(a['num_heads'][i - 1], heads, num_keys) if residual else None
            ),
            grid=dict(
                stride=STRIDES[i],
                reduction=reduction,
                key_grid=a['key_grid'],
                query_grid=query_grid if len(blocks) > a['vanilla_layers'][i] else None,
            ),
        )

    def less_attention_layers(self) -> list[LessAttention]:
        """The less-attention layers, from first to last."""
        return [module for module in self.modules() if isinstance(module, LessAttention)]

    def _loss_of(self, scores: Tensor, grid: StageGrid) -> Tensor:
        """The diagonality-preserving loss of one layer's scores."""
        on_probs = self.diagonality_loss.on == 'probs'
        attention = scores.softmax(dim=3) if on_probs else scores
        key_grid = self.arch_settings['key_grid']
        return self.diagonality_loss(attention_between_cells(attention, grid, key_grid))

    def forward(
        self, x: Tensor, out_indices: Sequence[int] | None = None, normed: bool = True
    ) -> tuple[Tensor, ...]:
        """Images ``(B, in_channels, H, W)`` to a tuple of feature maps, one per out index; for the
        other arguments see :class:`PyramidBackbone`."""
        self.check_image(x)
        image_size = x.shape[2], x.shape[3]
        collects = self.diagonality_loss is not None and self.wants_losses()
        features, losses, scores = [], [], None
        out_indices = self.wanted_maps(out_indices, normed)
        make_map = self.output if normed else self.bare_output
        for i in range(out_indices[-1] + 1):
            stage = self.stages[i]
            x, scores, grid = stage.enter(x, scores, image_size)
            for block in stage.blocks:
                x, scores = self.run_block(block, x, scores if block.takes_scores else None, grid)
                if collects and isinstance(block.attn, LessAttention):
                    losses.append(self._loss_of(scores, grid))
            if i in out_indices:
                features.append(make_map(i, x, grid.height, grid.width))
            x = tokens_to_map(x, grid.height, grid.width)
        if losses:
            loss = torch.stack(losses).mean()
            features[-1] = self.hand_over('loss_diagonality', loss, features[-1])
        return tuple(features)
