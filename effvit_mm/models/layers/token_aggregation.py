# SPDX-License-Identifier: Apache-2.0
"""Global aggregation of tokens (GLAD, Yu et al., arXiv 2310.07664), what the paper compares it
with, and the way back to the grid.

``Y = GELU(LN(W X)) + E`` makes ``m`` tokens of ``n``; ``W (m, n)`` and the position embedding
``E (m, C)`` are learned. The class token comes first and counts.
"""

import math

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from .utils import mix_tokens


class GLAD(nn.Module):
    """Global aggregation: ``Y = GELU(LN(W X)) + E``.

    Args:
        dim: Channels ``C``.
        num_in: Tokens ``n`` before.
        num_out: Tokens ``m`` after.
        norm: Whether there are the LayerNorm and the GELU.
        pos_embed: Whether there is the new position embedding ``E``.
    """

    def __init__(
        self, dim: int, num_in: int, num_out: int, norm: bool = True, pos_embed: bool = True
    ) -> None:
        super().__init__()
        if not 1 < num_out < num_in:
            raise ValueError(f'GLAD makes fewer tokens, at least 2: not {num_out} of {num_in}.')
        self.dim, self.num_in, self.num_out = dim, num_in, num_out
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        trunc_normal_(self.weight, std=num_in**-0.5)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else None
        self.pos_embed = None
        if pos_embed:
            self.pos_embed = nn.Parameter(torch.empty(num_out, dim))
            trunc_normal_(self.pos_embed, std=0.02)

    def project(self, x: Tensor) -> Tensor:
        """``GELU(LN(W X))``, which the token distillation compares: ``(B, n, C)`` to
        ``(B, m, C)``."""
        x = mix_tokens(self.weight, x)
        return x if self.norm is None else F.gelu(self.norm(x))

    def place(self, y: Tensor) -> Tensor:
        """``Y + E``."""
        return y if self.pos_embed is None else y + self.pos_embed.to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(B, n, C)`` to ``(B, m, C)``."""
        return self.place(self.project(x))

    def inverse(self) -> Tensor:
        """``(n, m)``: what brings ``m`` tokens back to ``n`` without having seen any image, the
        pseudo-inverse of ``W``."""
        return torch.linalg.pinv(self.weight.detach().double()).to(self.weight.dtype)


def glads_of(backbone: nn.Module) -> dict[str, GLAD]:
    """The GLADs of a backbone, if it has any, by the layer that each stands before."""
    aggregations = getattr(backbone, 'aggregations', {})
    return {layer: module for layer, module in aggregations.items() if isinstance(module, GLAD)}


class _GridAggregation(nn.Module):
    """Aggregation of 2x2 neighbours on a square grid, beside which the class token passes."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.side = math.isqrt(num_in - 1)
        if self.side**2 != num_in - 1:
            raise ValueError(
                f'2x2 neighbours need a square grid and a class token; {num_in} tokens are none.'
            )
        self.num_in, self.num_out = num_in, 1 + ((self.side + 1) // 2) ** 2

    def place(self, y: Tensor) -> Tensor:
        """There is no new position embedding."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(B, n, C)`` to ``(B, m, C)``."""
        return self.project(x)

    def _grid(self, x: Tensor) -> Tensor:
        """Patch tokens as ``(B, s, 2, s, 2, C)``; cells beyond an odd side are 0."""
        half, odd = (self.side + 1) // 2, self.side % 2
        grid = x[:, 1:].unflatten(1, (self.side, self.side))
        if odd:
            grid = F.pad(grid, (0, 0, 0, 1, 0, 1))
        return grid.unflatten(2, (half, 2)).unflatten(1, (half, 2))

    def inverse(self) -> Tensor:
        """``(n, m)``: every cell takes the token that it went into."""
        half = (self.side + 1) // 2
        y, x = torch.meshgrid(*[torch.arange(self.side)] * 2, indexing='ij')
        source = (y // 2 * half + x // 2).flatten()
        inverse = torch.zeros(self.num_in, self.num_out)
        inverse[0, 0] = 1
        inverse[torch.arange(1, self.num_in), 1 + source] = 1
        return inverse


class ConcatAggregation(_GridAggregation):
    """The paper's local comparison: 2x2 neighbours concatenated, a linear layer back to ``C``.

    Args:
        dim: Channels ``C``.
        num_in: Tokens ``n`` before: a square grid and a class token.
    """

    def __init__(self, dim: int, num_in: int) -> None:
        super().__init__(num_in)
        self.norm = nn.LayerNorm(4 * dim, eps=1e-6)
        self.reduction = nn.Linear(4 * dim, dim, bias=False)

    def project(self, x: Tensor) -> Tensor:
        """Tokens ``(B, n, C)`` to ``(B, m, C)``."""
        cells = self._grid(x).permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)
        return torch.cat((x[:, :1], self.reduction(self.norm(cells))), dim=1)


class DownsampleAggregation(_GridAggregation):
    """The paper's other local comparison: the mean of 2x2 neighbours.

    Args:
        num_in: Tokens ``n`` before: a square grid and a class token.
    """

    def __init__(self, num_in: int) -> None:
        super().__init__(num_in)
        half, odd = (self.side + 1) // 2, self.side % 2
        count = torch.full((half, half), 4.0)
        if odd:
            count[-1] /= 2
            count[:, -1] /= 2
        self.register_buffer('count', count.flatten()[:, None], persistent=False)

    def project(self, x: Tensor) -> Tensor:
        """Tokens ``(B, n, C)`` to ``(B, m, C)``."""
        cells = self._grid(x).sum(dim=(2, 4)).flatten(1, 2) / self.count.to(x.dtype)
        return torch.cat((x[:, :1], cells), dim=1)


class Unprojection(nn.Module):
    """Back to the grid: ``U Y`` with a learned ``U (cells, m)``.

    Args:
        start: ``U`` at the start.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def forward(self, y: Tensor) -> Tensor:
        """Tokens ``(B, m, C)`` to cells ``(B, cells, C)``."""
        return mix_tokens(self.weight, y)


def ridge_unprojection(xy: Tensor, yy: Tensor, strength: float = 1e-3) -> Tensor:
    """The linear map from aggregated tokens to the tokens before with the least squared error.

    ``U = E[X Yᵀ] (E[Y Yᵀ] + λ I)⁻¹`` with ``λ`` relative to the mean of the diagonal.

    Args:
        xy: ``E[X Yᵀ] (n, m)``, over images and channels.
        yy: ``E[Y Yᵀ] (m, m)``.
        strength: ``λ`` over the mean of ``yy``'s diagonal.

    Returns:
        ``U (n, m)`` in the dtype of ``xy``, computed in float64.
    """
    yy = yy.double()
    ridge = strength * yy.diagonal().mean() * torch.eye(len(yy), dtype=yy.dtype, device=yy.device)
    return torch.linalg.solve(yy + ridge, xy.double().t()).t().to(xy.dtype)


def balanced_rotation(energies: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random orthogonal ``R (k, k)`` with equal ``(R diag(energies) Rᵀ)_ii``.

    A random one, then plane rotations that each give one more token the mean energy (Bendel and
    Mickey 1978, who generate correlation matrices so).

    Args:
        energies: Non-negative ``(k,)``, float64.
        generator: For the random part.
    """
    k, mean = len(energies), energies.mean()
    noise = torch.randn(k, k, generator=generator, dtype=torch.float64).to(energies.device)
    rotation, _ = torch.linalg.qr(noise)
    gram = (rotation * energies) @ rotation.t()
    for _ in range(k - 1):
        diagonal = gram.diagonal()
        low, high = int(diagonal.argmin()), int(diagonal.argmax())
        if diagonal[high] - diagonal[low] <= 1e-12 * mean:
            break
        # the tangent t of the angle at which cos² a + sin² b + 2 sin cos c is the mean
        a, b, c = gram[low, low] - mean, gram[high, high] - mean, gram[low, high]
        tangent = ((c.square() - a * b).clamp(min=0).sqrt() - c) / b
        cosine = 1 / (1 + tangent.square()).sqrt()
        sine = tangent * cosine
        plane = torch.stack([cosine, sine, -sine, cosine]).view(2, 2)
        pair = [low, high]
        rotation[pair] = plane @ rotation[pair]
        gram[pair] = plane @ gram[pair]
        gram[:, pair] = gram[:, pair] @ plane.t()
    return rotation


def linear_start(
    gram: Tensor,
    token_std: float,
    num_out: int,
    dim: int,
    generator: torch.Generator | None = None,
    offset: float = 4.0,
) -> dict[str, Tensor]:
    """Weights of a :class:`GLAD` with which it starts as a projection that keeps most.

    ``W = blockdiag(1, R V)``: the class token passes, the patch tokens go into the span of the
    ``m - 1`` leading eigenvectors ``V`` of their Gram matrix ``E[X Xᵀ]``, and an orthogonal matrix
    ``R`` gives all new tokens exactly the same share (:func:`balanced_rotation`): a norm, which
    makes tokens equally large, then changes little. The norm takes a token's scale; its weight
    gives back the mean one (of the new tokens, which are larger where many were alike). Its bias,
    ``offset`` standard deviations, moves the GELU into its linear part, and ``E = -bias`` undoes
    it.

    Args:
        gram: ``E[X Xᵀ] (n, n)`` of the tokens before, over images and channels, class token first.
        token_std: Mean over tokens of the standard deviation over their channels.
        num_out: Tokens ``m`` after.
        dim: Channels ``C``.
        generator: For ``R``.
        offset: The norm's bias, in standard deviations.

    Returns:
        ``weight (m, n)``, ``norm.weight (C,)``, ``norm.bias (C,)``, ``pos_embed (m, C)``.
    """
    patches = gram[1:, 1:].double()
    if not 1 < num_out <= len(patches):
        raise ValueError(f'{num_out} tokens cannot be made of {len(gram)}.')
    energies, vectors = torch.linalg.eigh(patches)
    leading = vectors[:, -(num_out - 1) :].t()
    rotation = balanced_rotation(energies[-(num_out - 1) :].clamp(min=0), generator)
    weight = torch.zeros(num_out, len(gram), dtype=torch.float64)
    weight[0, 0] = 1
    weight[1:, 1:] = rotation @ leading
    before = gram.double().diagonal().clamp(min=0).sqrt().mean()
    after = (weight @ gram.double() @ weight.t()).diagonal().clamp(min=0).sqrt().mean()
    scale = float(token_std) * float(after / before)
    bias = torch.full((dim,), offset * scale)
    return {
        'weight': weight.float(),
        'norm.weight': torch.full((dim,), scale),
        'norm.bias': bias,
        'pos_embed': -bias.expand(num_out, dim).clone(),
    }
