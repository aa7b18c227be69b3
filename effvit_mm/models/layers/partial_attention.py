# SPDX-License-Identifier: Apache-2.0
"""Partial attention (PartialFormer, ECCV 2024, section 3.1).

The tokens of a map are split by content into a few foreground and many background tokens.
Foreground tokens attend to each other (:class:`MixedMultiHeadAttention`), the background is read
by one query (:class:`SingleQueryAttention`), and an abstract token carries information between the
two. Only foreground tokens are ever gathered: the background stays where it is.

Pure functions first, in the order in which a block calls them; then the modules.
"""

from fractions import Fraction

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .utils import (
    CACHE_BLOCK,
    at_least_float32,
    blocks_pay,
    check_heads,
    full_precision,
    mix_tokens,
    precise_sum,
)

MASKED = -1e30  # a large finite float32: -inf would become NaN where a whole row is masked
MANY_QUERIES = (
    256  # from here on attention is computed for a block of queries at a time, if it pays
)


def num_foreground(num_tokens: int, ratio: Fraction) -> int:
    """Number of foreground tokens, ``ceil(num_tokens * ratio)``, so at least one.

    Integer arithmetic only: ``int(n * ratio)`` would be frozen to a constant by exporters.
    """
    return (num_tokens * ratio.numerator + ratio.denominator - 1) // ratio.denominator


def context_score(x: Tensor) -> Tensor:
    """Context score of each token: its channel mean, ``(B, N, C) -> (B, N)``, at least float32."""
    return x.mean(dim=2, dtype=torch.promote_types(x.dtype, torch.float32))


def split_tokens(x: Tensor, ratio: Fraction) -> Tensor:
    """Indices ``(B, N_f)`` of the foreground: the tokens with the highest context scores.

    The paper sorts all tokens; only the split matters, not the order inside it, so a top-k does.
    ``x (B, N, C)`` are tokens *before* the norm: after it, channel means are zero.
    """
    n = num_foreground(x.shape[1], ratio)
    return context_score(x).topk(n, dim=1, sorted=False).indices


def foreground_mask(index: Tensor, num_tokens: int) -> Tensor:
    """Indices ``(B, N_f)`` to a boolean mask ``(B, N)``, true where a token is foreground."""
    mask = torch.zeros(index.shape[0], num_tokens, dtype=torch.bool, device=index.device)
    return mask.scatter(1, index, 1)  # 1, not True: TorchScript has no boolean scalars


def flat_index(index: Tensor, num_tokens: int) -> Tensor:
    """``(B, N_f)`` indices within each sample to ``(B*N_f,)`` row indices of ``(B*N, C)``."""
    offset = torch.arange(index.shape[0], device=index.device) * num_tokens
    return (index + offset[:, None]).flatten()


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Collect the tokens ``index (B, N_f)`` of ``x (B, N, C)`` into ``(B, N_f, C)``."""
    rows = x.flatten(0, 1).index_select(0, flat_index(index, x.shape[1]))
    return rows.view(index.shape[0], index.shape[1], x.shape[2])


def merge_tokens(x: Tensor, background: Tensor | None, foreground: Tensor, index: Tensor) -> Tensor:
    """Add to every token the update of its group, at the token's own place.

    Args:
        x: Tokens ``(B, N, C)``.
        background: One update for all background tokens, ``(B, 1, C)``; None: no update.
        foreground: Updates of the foreground tokens, ``(B, N_f, C)``.
        index: Positions of the foreground tokens, ``(B, N_f)``.

    Returns:
        ``x + background`` where a token is background, ``x + foreground`` where it is not.
    """
    rows = flat_index(index, x.shape[1])
    updated = x.flatten(0, 1).index_select(0, rows) + foreground.flatten(0, 1)
    merged = (x.clone() if background is None else x + background).flatten(0, 1)
    return merged.index_copy_(0, rows, updated.to(merged.dtype)).view_as(x)


def single_query_attention(
    query: Tensor, tokens: Tensor, foreground: Tensor, qkv_weight: Tensor, num_heads: int
) -> Tensor:
    """``softmax(q K_b^T / sqrt(d_h)) V_b`` over the background tokens, linear in their number.

    With a single query neither ``K`` nor ``V`` has to be computed for every token: the query is
    folded into the key weights, ``q (X W_k)^T = (q W_k^T) X^T``, and the value weights are applied
    to the average, ``p (X W_v) = (p X) W_v``. Per token that costs ``2 h C`` multiply-accumulates
    instead of ``2 C^2``. Foreground tokens are masked, not removed.

    Args:
        query: The single query's token ``(B, 1, C)``, normalised like ``tokens``.
        tokens: All tokens after the norm, ``(B, N, C)``.
        foreground: Mask of the foreground tokens, boolean ``(B, N)``.
        qkv_weight: The weight ``(3C, C)`` shared with MMSA; it has no bias.
        num_heads: Number of heads ``h``.

    Returns:
        ``(B, 1, C)``, at least float32; finite but meaningless where there is no background.
    """
    batch, _, dim = tokens.shape
    head_dim = dim // num_heads
    with full_precision(tokens):
        w_q, w_k, w_v = at_least_float32(qkv_weight).chunk(3)
        tokens, query = at_least_float32(tokens), at_least_float32(query)
        q = F.linear(query, w_q * head_dim**-0.5).view(batch, num_heads, head_dim)
        q = torch.einsum('bhd,hdc->bhc', q, w_k.view(num_heads, head_dim, dim))
        logits = q @ tokens.transpose(1, 2)
        weights = logits.masked_fill(foreground[:, None], MASKED).softmax(dim=2)
        z = torch.einsum('bhc,hdc->bhd', weights @ tokens, w_v.view(num_heads, head_dim, dim))
        return z.reshape(batch, 1, dim)


class HeadMLP(nn.Module):
    """Two fully connected layers across attention heads with a softmax in between (Fig. 5a).

    Maps pre-softmax logits of ``h`` heads to attention weights of ``h`` heads by way of ``e*h``
    mixed heads: ``W_2 softmax(W_1 A)``, the softmax over keys.

    Both weights are stored as a learned difference from "no mixing" (each head repeated ``e``
    times, then averaged), so an untrained HeadMLP is close to plain attention and weight decay
    pulls towards that, not towards zero. Neither layer has a bias: the first's would be invisible
    to the softmax, the second's would add the *sum* of all values, which grows with the image.

    Args:
        num_heads: Number of heads ``h``.
        expansion: Expansion ratio ``e``.
    """

    def __init__(self, num_heads: int, expansion: int = 2) -> None:
        super().__init__()
        self.num_mixed = expansion * num_heads
        repeat = torch.eye(num_heads).repeat_interleave(expansion, dim=0)
        self.register_buffer('expand_identity', repeat, persistent=False)
        self.register_buffer('reduce_identity', repeat.t() / expansion, persistent=False)
        self.expand_delta = nn.Parameter(torch.empty_like(repeat))
        # contiguous: FSDP mixes up the optimizer's state of a transposed parameter when it is saved
        self.reduce_delta = nn.Parameter(torch.empty(num_heads, self.num_mixed))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random differences: the ``e`` copies of a head must be able to part."""
        trunc_normal_(self.expand_delta, std=0.02)
        trunc_normal_(self.reduce_delta, std=0.02)

    def forward(self, logits: Tensor) -> Tensor:
        """``(B, h, n, m)`` logits to ``(B, h, n, m)`` weights of the same dtype."""
        batch, _, n, m = logits.shape
        expand = precise_sum(self.expand_identity, self.expand_delta)
        reduce = precise_sum(self.reduce_identity, self.reduce_delta)
        mixed = mix_tokens(expand, logits.flatten(2)).view(batch, -1, n, m).softmax(dim=3)
        return mix_tokens(reduce, mixed.flatten(2)).view(batch, -1, n, m)


class MixedMultiHeadAttention(nn.Module):
    """Mixed multi-head self-attention (MMSA): attention whose heads are mixed by a HeadMLP.

    The query/key/value projection has no bias: the norm before it has one, and what a key bias
    adds is invisible to the softmax. Logits and mixing are computed in float32 at any precision.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        head_expansion: HeadMLP's expansion ratio ``e``; 0 is plain multi-head attention.
    """

    def __init__(self, dim: int, num_heads: int, head_expansion: int = 2) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.head_mlp = HeadMLP(num_heads, head_expansion) if head_expansion else None
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised tokens ``(B, n, C)`` to ``(B, n, C)``."""
        batch, n, dim = x.shape
        qkv = self.qkv(x).view(batch, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.head_mlp is None:
            out = F.scaled_dot_product_attention(q, k, v)
        elif blocks_pay(x) and n >= MANY_QUERIES:
            rows = CACHE_BLOCK * torch.get_num_threads() // (batch * self.head_mlp.num_mixed * n)
            parts = q.split(max(rows, 16), dim=2)
            out = torch.cat([self.mixed_attention(part, k, v) for part in parts], dim=2)
        else:
            out = self.mixed_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, n, dim))

    def mixed_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``HeadMLP(Q K^T / sqrt(d_h)) V`` with queries, keys, values ``(B, h, n, d_h)``."""
        with full_precision(q):
            q, k = at_least_float32(q), at_least_float32(k)
            weights = self.head_mlp((q * self.head_dim**-0.5) @ k.transpose(2, 3))
        return weights.to(v.dtype) @ v


class ChannelMLP(nn.Module):
    """``FC(C, C/r) -> LayerNorm -> ReLU -> FC(C/r, C)``, SQA's output projection (Fig. 5b)."""

    def __init__(self, dim: int, reduction: int = 4) -> None:
        super().__init__()
        hidden = max(1, dim // reduction)
        self.fc1 = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, 1, C)`` to ``(B, 1, C)``."""
        return self.fc2(self.act(self.norm(self.fc1(x))))


class SingleQueryAttention(nn.Module):
    """Single query attention (SQA): one query reads the whole background, ``O(N_b)``.

    It has no query, key or value weights of its own, it shares MMSA's.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``, as in the MMSA it shares weights with.
        reduction: ChannelMLP's reduction ratio ``r``; 0 replaces ChannelMLP by a linear layer.
    """

    def __init__(self, dim: int, num_heads: int, reduction: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj = ChannelMLP(dim, reduction) if reduction else nn.Linear(dim, dim)

    def forward(self, query: Tensor, tokens: Tensor, index: Tensor, qkv_weight: Tensor) -> Tensor:
        """Read the background.

        Args:
            query: The single query's token ``(B, 1, C)``, normalised like ``tokens``.
            tokens: All tokens after the norm, ``(B, N, C)``.
            index: Positions of the foreground tokens, ``(B, N_f)``.
            qkv_weight: MMSA's weight ``(3C, C)``.

        Returns:
            The update ``(B, 1, C)`` of every background token and of the abstract token; exactly 0
            where the foreground leaves no background.
        """
        foreground = foreground_mask(index, tokens.shape[1])
        z = single_query_attention(query, tokens, foreground, qkv_weight, self.num_heads)
        nothing_to_read = foreground.all(dim=1)[:, None, None]
        return self.proj(z.to(tokens.dtype)).masked_fill(nothing_to_read, 0.0)
