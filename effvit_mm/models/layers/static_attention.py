# SPDX-License-Identifier: Apache-2.0
"""Static attention (DGSSA, Yu et al., arXiv 2310.07664).

In early layers the attention of different images is alike. So ``softmax(Q K^T / sqrt(d_h))`` is
replaced by learned matrices, one per head, that start as the mean over training images of the
attention which the layer computed; queries and keys disappear. A layer costs
``2nd² + n²d`` multiply-accumulates instead of ``4nd² + 2n²d``.

:class:`StaticAttention` acts on a whole sequence (DeiT), :class:`StaticWindowAttention` on windows
(Swin). :class:`MlpMixing` is the block the paper compares them with.
"""

import math
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .utils import at_least_float32, check_heads, is_captured

INITS = ('dynamic', 'random', 'local')


def nearest_offsets(num_heads: int) -> list[tuple[int, int]]:
    """The ``num_heads`` offsets (down, right) on a grid that are nearest to (0, 0), it included."""
    reach = range(-num_heads, num_heads + 1)
    offsets = [(y, x) for y in reach for x in reach]
    return sorted(offsets, key=lambda o: (o[0] ** 2 + o[1] ** 2, o))[:num_heads]


def local_logits(num_heads: int, num_tokens: int, strength: float = 1.0) -> Tensor:
    """Position-aware start: each head looks at one neighbour on the grid.

    Head ``k`` of the token in cell ``c`` prefers the cell at ``c`` plus its offset (the nearest
    ones, the cell itself first), with ``-strength`` times the squared distance from it.

    Args:
        num_heads: Number of heads ``h``.
        num_tokens: Tokens ``n``: a square grid, or a square grid after a class token. The class
            token looks at all tokens alike, the others do not look at it more than at the farthest
            cell.
        strength: How fast attention falls with the distance.

    Returns:
        Logits ``(h, n, n)``.

    Raises:
        ValueError: ``n`` is neither a square nor one more.
    """
    side = math.isqrt(num_tokens)
    extra = num_tokens - side**2
    if extra > 1:
        raise ValueError(
            f"init='local' needs tokens on a square grid, with or without a class token; "
            f'{num_tokens} are not.'
        )
    y, x = (c.flatten().float() for c in torch.meshgrid(*[torch.arange(side)] * 2, indexing='ij'))
    logits = torch.zeros(num_heads, num_tokens, num_tokens)
    for head, (dy, dx) in enumerate(nearest_offsets(num_heads)):
        distance = (y - y[:, None] - dy) ** 2
        distance = distance + (x - x[:, None] - dx) ** 2
        logits[head, extra:, extra:] = -strength * distance
        if extra:
            logits[head, 1:, 0] = logits[head, 1:, 1:].min(dim=1).values
    return logits


def _check_init(init: str) -> None:
    if init not in INITS:
        raise ValueError(f'A static attention starts as one of {", ".join(INITS)}, not {init!r}.')


class StaticAttention(nn.Module):
    """``Z_i = A_i V_i`` with a learned matrix ``A_i`` for each head, then the output projection.

    Stored is the matrix itself: nothing is masked by a softmax here, so rows need not stay
    distributions.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        num_tokens: Tokens ``n``.
        qkv_bias: Whether the values have a bias.
        init: How the matrices start: ``'dynamic'`` is to be replaced by the mean attention of a
            pretrained model (``effvit_mm.compression``) and uniform until then, ``'random'`` is
            normal with standard deviation ``1/n``, ``'local'`` looks at neighbours.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        qkv_bias: bool = True,
        init: str = 'dynamic',
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        _check_init(init)
        self.num_heads = num_heads
        matrix = torch.full((num_heads, num_tokens, num_tokens), 1 / num_tokens)
        if init == 'random':
            matrix.normal_(std=1 / num_tokens)
        elif init == 'local':
            matrix = local_logits(num_heads, num_tokens).softmax(dim=2)
        self.matrix = nn.Parameter(matrix)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: Tokens ``(B, n, C)``.
            inside: ``(B, n)``, which tokens are there: the values of others count as 0. None: all.

        Returns:
            ``(B, n, C)``.
        """
        v = self.v(x)
        if inside is not None:
            v = v * inside[..., None].to(v.dtype)
        v = v.unflatten(2, (self.num_heads, -1))
        z = torch.einsum('hnm,bmhd->bnhd', self.matrix.to(v.dtype), v)
        return self.proj(z.flatten(2))


class StaticWindowAttention(nn.Module):
    """Static attention in windows, some of whose pairs of tokens are masked (Swin).

    Stored are logits, ``A = softmax(logits + mask)``: rows are distributions in every window, also
    where a shifted window brings together what is not neighbouring.

    Args:
        dim: Channels ``C``.
        num_heads: Number of heads ``h``; must divide ``dim``.
        num_tokens: Tokens ``n`` of a window.
        qkv_bias: Whether the values have a bias.
        init: As for :class:`StaticAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        qkv_bias: bool = True,
        init: str = 'dynamic',
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        _check_init(init)
        self.num_heads = num_heads
        logits = torch.zeros(num_heads, num_tokens, num_tokens)
        if init == 'random':
            trunc_normal_(logits, std=0.02)
        elif init == 'local':
            logits = local_logits(num_heads, num_tokens)
        self.logits = nn.Parameter(logits)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None

    def attention(self, mask: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """``softmax(logits + mask)``, computed in float32 at least.

        In inference on a CPU, results for masks are kept. Whether they still hold is told by the
        values of logits and mask: what moving averages write to a parameter's ``data`` shows
        neither in its identity nor in its version. Comparing takes a fraction of the time of nine
        softmaxes, but as long as one, and on other devices it would wait for them.

        Args:
            mask: What is added for each kind of window, ``(K, n, n)``. None: nothing.
            dtype: Of the result, by default that of the computation.

        Returns:
            ``(K, h, n, n)`` with a mask, ``(h, n, n)`` without.
        """
        logits = at_least_float32(self.logits)
        dtype = dtype or logits.dtype
        if mask is None:
            return logits.softmax(dim=-1).to(dtype)
        keep = not (self.training or torch.is_grad_enabled() or is_captured())
        # fake tensors, and parameters that are replaced for one call, leave nothing behind
        keep = keep and type(self.logits) is nn.Parameter and type(mask) is Tensor
        keep = keep and logits.device.type == mask.device.type == 'cpu'
        if keep and self._cache is not None:
            old_logits, old_mask, weights = self._cache
            same = old_logits.dtype == logits.dtype and weights.dtype == dtype
            if same and torch.equal(old_logits, logits) and torch.equal(old_mask, mask):
                return weights
        weights = (logits + mask[:, None]).softmax(dim=-1).to(dtype)
        self._cache = (logits.clone(), mask, weights) if keep else None
        return weights

    def forward(self, x: Tensor, mask: Tensor | None = None, kind: Tensor | None = None) -> Tensor:
        """Attend in every window.

        Args:
            x: Tokens of the windows ``(W, n, C)``.
            mask: What is added to the logits of each kind of window, ``(K, n, n)``, 0 or a large
                negative number. None: nothing.
            kind: Of each window, which of the masks is its own, ``(W,)``.

        Returns:
            ``(W, n, C)``.
        """
        v = self.v(x).unflatten(2, (self.num_heads, -1))
        weights = self.attention(mask, v.dtype)
        if mask is None:
            z = torch.einsum('hnm,bmhd->bnhd', weights, v)
        else:
            z = torch.einsum('bhnm,bmhd->bnhd', weights.index_select(0, kind), v)
        return self.proj(z.flatten(2))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_cache': None}


class MlpMixing(nn.Module):
    """Token mixing of MLP-Mixer in the place of an attention: ``FC_2(GELU(FC_1(X^T)))^T``.

    Args:
        dim: Channels ``C``.
        num_tokens: Tokens ``n``.
        hidden: Hidden units of the MLP over tokens; by default ``n``, with which it costs
            ``2n²d``.
    """

    def __init__(self, dim: int, num_tokens: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or num_tokens
        self.fc1 = nn.Linear(num_tokens, hidden)
        self.fc2 = nn.Linear(hidden, num_tokens)

    def forward(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        """Tokens ``(B, n, C)``, those not ``inside (B, n)`` counting as 0, to ``(B, n, C)``."""
        if inside is not None:
            x = x * inside[..., None].to(x.dtype)
        return self.fc2(F.gelu(self.fc1(x.transpose(1, 2)))).transpose(1, 2)
