# SPDX-License-Identifier: Apache-2.0
"""Less attention (LaViT, CVPR 2024).

A stage computes attention scores in its first layers (:class:`VanillaAttention`). The layers after
them derive theirs from the layer before by two learned linear maps (:class:`LessAttention`,
:class:`ScoreTransformation`), and a stage's last scores are added to the next stage's first ones
(:class:`AttentionDownsample`).

Scores are those *before* the softmax, are float32 at any precision, and are laid out as tokens are:
``(B, N, h, m)``, for each of ``N`` queries and ``h`` heads a row of ``m`` keys. So they are tiled
and convolved as maps with ``h*m`` channels, without changing layout.

Keys are few, ``m = 49``, on maps of any size. So the products with the query and the output
weights are taken on the keys' side, ``(X W_q) K^T = X (W_q K^T)`` and ``(P V) W_o = P (V W_o)``:
the same function for ``N h m C`` multiply-accumulates instead of ``N (C + m) C``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .grid import Tiling, ceil_div, cover_matrix
from .utils import (
    at_least_float32,
    check_heads,
    full_precision,
    is_captured,
    map_to_tokens,
    mix_tokens,
    precise_sum,
    tokens_to_map,
)


class StageGrid(NamedTuple):
    """The places of a stage's tokens: its map, its key cells, its tiles of queries.

    Args:
        height: Height of the map.
        width: Width of the map.
        image_size: Height and width of the image in pixels.
        stride: Pixels per cell of the map.
        key_cover: Shares ``(m, cells)`` that average the reduced map to the grid of keys; None
            where it is that grid.
        tiling: Tiles of queries that Ψ acts on; None where there is no Ψ.
    """

    height: int
    width: int
    image_size: tuple[int, int]
    stride: int
    key_cover: Tensor | None
    tiling: Tiling | None


def make_stage_grid(
    x: Tensor,
    height: int,
    width: int,
    image_size: tuple[int, int],
    stride: int,
    reduction: int,
    key_grid: int,
    query_grid: int | None,
) -> StageGrid:
    """The grid of a stage whose tokens are ``x (B, height*width, C)``.

    Args:
        x: The tokens; only their number and device matter.
        height: Height of the map.
        width: Width of the map.
        image_size: Height and width of the image in pixels.
        stride: Pixels per cell of the map.
        reduction: Cells of the map per cell of the reduced map, from which keys are taken.
        key_grid: Side of the grid of keys.
        query_grid: Side of the tiles that Ψ acts on; None where there is no Ψ.
    """
    cover = tiling = None
    cell = stride * reduction
    # where each reduced cell is a key there is nothing to average
    if is_captured() or image_size[0] != cell * key_grid or image_size[1] != cell * key_grid:
        cols = ceil_div(width, reduction)
        cells = ceil_div(height, reduction) * cols
        cover = cover_matrix(image_size, cols, cells, cell, key_grid, x.device)
    if query_grid is not None:
        tiling = Tiling(x.shape[0], height, width, (query_grid, query_grid), device=x.device)
    return StageGrid(height, width, image_size, stride, cover, tiling)


def fold(tokens: Tensor, weight: Tensor) -> Tensor:
    """Apply each head's weight to its channels of keys or values.

    Args:
        tokens: ``(B, m, h*d)``.
        weight: ``(h, d, C)``.

    Returns:
        ``(B, h*m, C)``.
    """
    batch, m, _ = tokens.shape
    heads, d, dim = weight.shape
    folded = torch.einsum('bmhd,hdc->bhmc', tokens.view(batch, m, heads, d), weight)
    return folded.reshape(batch, heads * m, dim)


def attend(scores: Tensor, values: Tensor, proj: nn.Linear) -> Tensor:
    """``concat_h(softmax(A_h) V_h) W_o + b``.

    Args:
        scores: ``(B, N, h, m)``.
        values: ``(B, m, C)``.
        proj: The output projection.

    Returns:
        ``(B, N, C)`` in the dtype of the values.
    """
    batch, n, heads, m = scores.shape
    weights = scores.softmax(dim=3).to(values.dtype).view(batch, n, heads * m)
    projected = fold(values, proj.weight.t().view(heads, -1, proj.out_features))
    # each head's weights sum to 1, so that the bias can be added to the few values
    projected = projected + (proj.bias * (1 / heads)).to(projected.dtype)
    return weights @ projected


class SpatialReduction(nn.Module):
    """The tokens that keys and values are made of: ``m = key_grid**2`` at any image size.

    A convolution with kernel and stride ``ratio`` as in PVT, an average to the grid of keys in
    image pixels where the reduced map is not that grid, and a norm. Without a ratio (PVT's last
    stage) only the average.

    Args:
        dim: Channels ``C``.
        ratio: Reduction ratio.
    """

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        if ratio > 1:
            self.conv = nn.Conv2d(dim, dim, ratio, stride=ratio)
            self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, grid: StageGrid) -> Tensor:
        """Tokens ``(B, N, C)`` to ``(B, m, C)``."""
        height, width, ratio = grid.height, grid.width, self.ratio
        if ratio > 1:
            x = tokens_to_map(x, height, width)
            if is_captured() or height % ratio or width % ratio:
                x = F.pad(x, (0, ratio - 1, 0, ratio - 1))  # ceil(H/ratio): every cell is read
            x = map_to_tokens(self.conv(x))
        if grid.key_cover is not None:
            x = grid.key_cover.to(x.dtype) @ x
        return self.norm(x) if ratio > 1 else x


class ScoreTransformation(nn.Module):
    """``A' = Ψ(Θ(A)ᵀ)ᵀ``: a linear map over keys, then one over queries, of pre-softmax scores.

    As matrices, ``A' = Ψ A Θᵀ`` for each head; the heads share both. Stored are the differences
    from the identity, zero at the start, so an untrained layer repeats the scores it is given.

    Ψ acts on tiles of a fixed size: at the pretraining size one tile is the whole map. Where a tile
    reaches beyond the map, the rows there are 0 before the maps and dropped after them. Neither map
    has a bias, which would make those rows other than 0, and Ψ's would be invisible to the softmax.

    Args:
        num_keys: Number of keys ``m``.
        num_queries: Queries ``A`` of a tile; None: Ψ is the identity.
    """

    def __init__(self, num_keys: int, num_queries: int | None = None) -> None:
        super().__init__()
        self.register_buffer('theta_identity', torch.eye(num_keys), persistent=False)
        self.theta_delta = nn.Parameter(torch.zeros(num_keys, num_keys))
        self.psi_delta = None
        if num_queries is not None:
            self.register_buffer('psi_identity', torch.eye(num_queries), persistent=False)
            self.psi_delta = nn.Parameter(torch.zeros(num_queries, num_queries))

    def forward(self, scores: Tensor, tiling: Tiling | None = None) -> Tensor:
        """Scores ``(B, N, h, m)`` to scores of the same shape."""
        with full_precision(scores):
            scores = scores @ precise_sum(self.theta_identity, self.theta_delta).t()
            if self.psi_delta is None:
                return scores
            psi = precise_sum(self.psi_identity, self.psi_delta)
            return tiling.join(mix_tokens(psi, tiling.cut(scores.flatten(2)))).view_as(scores)


class AttentionDownsample(nn.Module):
    """Attention residual: the last scores of a stage, made to fit the first of the next.

    For each key, the scores of the queries are a map with ``h`` channels: a depthwise convolution
    with the kernel, stride and padding of the patch embedding; a norm over each query's keys; a
    1x1 convolution from the heads before to those after. The latter starts at zero: no residual.

    Args:
        heads_in: Heads of the stage before.
        heads_out: Heads of the stage.
        num_keys: Number of keys ``m``.
        stride: Stride of the patch embedding between them.
    """

    def __init__(self, heads_in: int, heads_out: int, num_keys: int, stride: int = 2) -> None:
        super().__init__()
        # no bias: it would be the same for all keys, which the norm takes away
        self.conv = nn.Conv2d(
            heads_in,
            heads_in,
            2 * stride - 1,
            stride=stride,
            padding=stride - 1,
            groups=heads_in,
            bias=False,
        )
        self.norm = nn.LayerNorm(num_keys, eps=1e-6)
        self.head_mix = nn.Parameter(torch.zeros(heads_out, heads_in))

    def forward(self, scores: Tensor, height: int, width: int) -> Tensor:
        """Scores ``(B, H*W, h_in, m)`` to ``(B, H'*W', h_out, m)``."""
        batch, heads, m = scores.shape[0], self.conv.in_channels, self.norm.normalized_shape[0]
        with full_precision(scores):
            x = tokens_to_map(scores.flatten(2), height, width)
            # a head's kernel for each of its keys
            kernel = at_least_float32(self.conv.weight).expand(-1, m, -1, -1)
            kernel = kernel.reshape(heads * m, 1, *self.conv.kernel_size)
            x = F.conv2d(x, kernel, None, self.conv.stride, self.conv.padding, groups=heads * m)
            x = map_to_tokens(x).view(batch, -1, heads, m)
            weight, bias = at_least_float32(self.norm.weight), at_least_float32(self.norm.bias)
            x = F.layer_norm(x, (m,), weight, bias, self.norm.eps)
            return torch.einsum('gh,bnhm->bngm', at_least_float32(self.head_mix), x)


class VanillaAttention(nn.Module):
    """VA layer: ``A = Q Kᵀ / √d_h``, ``Z = softmax(A) V``, with spatially reduced keys and values.

    The projections have no bias: the norm before them has one, and what a key bias adds is
    invisible to the softmax.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        reduction: Spatial reduction ratio of keys and values.
    """

    def __init__(self, dim: int, num_heads: int, reduction: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.reduction = SpatialReduction(dim, reduction)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def scores(self, x: Tensor, keys: Tensor) -> Tensor:
        """``A = X W_q Kᵀ / √d_h`` of tokens ``(B, N, C)`` and keys ``(B, m, C)``."""
        batch, n, dim = x.shape
        with full_precision(x):
            weight = at_least_float32(self.q.weight) * self.scale
            folded = fold(at_least_float32(keys), weight.view(self.num_heads, -1, dim))
            scores = at_least_float32(x) @ folded.transpose(1, 2)
        return scores.view(batch, n, self.num_heads, -1)

    def forward(self, x: Tensor, scores: Tensor | None, grid: StageGrid) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: Normalised tokens ``(B, N, C)``.
            scores: The attention residual, added to this layer's scores; None: there is none.
            grid: The tokens' places.

        Returns:
            ``Z`` after the projection, ``(B, N, C)``, and the scores ``A (B, N, h, m)``.
        """
        reduced = self.reduction(x, grid)
        own = self.scores(x, self.k(reduced))
        scores = own if scores is None else own + scores
        return attend(scores, self.v(reduced), self.proj), scores


class LessAttention(nn.Module):
    """LA layer: ``A = Ψ(Θ(A_before)ᵀ)ᵀ``, ``Z = softmax(A) V``; no queries, no keys.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        reduction: Spatial reduction ratio of values.
        num_keys: Number of keys ``m``.
        num_queries: Queries of a tile that Ψ acts on; None: only Θ is learned.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        reduction: int,
        num_keys: int,
        num_queries: int | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.reduction = SpatialReduction(dim, reduction)
        self.transform = ScoreTransformation(num_keys, num_queries)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, scores: Tensor, grid: StageGrid) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: Normalised tokens ``(B, N, C)``.
            scores: The scores of the layer before, ``(B, N, h, m)``.
            grid: The tokens' places.

        Returns:
            ``Z`` after the projection, ``(B, N, C)``, and this layer's scores.
        """
        scores = self.transform(scores, grid.tiling)
        return attend(scores, self.v(self.reduction(x, grid)), self.proj), scores


def attention_between_cells(attention: Tensor, grid: StageGrid, key_grid: int) -> Tensor:
    """Average the rows of the queries that lie in each key's cell: square ``(B, h, m, m)``.

    Args:
        attention: Scores or probabilities ``(B, N, h, m)``.
        grid: The tokens' places.
        key_grid: Side of the grid of keys, ``m = key_grid**2``.
    """
    batch, _, heads, m = attention.shape
    cover = cover_matrix(
        grid.image_size,
        grid.width,
        grid.height * grid.width,
        grid.stride,
        key_grid,
        attention.device,
    )
    with full_precision(attention):
        cells = cover.to(attention.dtype) @ attention.flatten(2)
    return cells.view(batch, m, heads, m).transpose(1, 2)
