# SPDX-License-Identifier: Apache-2.0
"""What a compressed model costs, by the parts that Yu et al. (arXiv 2310.07664) name.

Costs are multiply-accumulates of the blocks and the GLADs, shares are of the original's blocks.
Layers count from 0, token counts include the class token. The sums that the paper prints slip: the
cost of a dynamic layer appears as ``12nd² + 4nd²`` instead of ``12nd² + 2n²d``, and every layer of
a compressed model is charged as a static one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: pairs of layer and token count: before that layer stands a GLAD, that layer and later ones see
#: that many tokens
Pyramid = tuple[tuple[int, int], ...]

#: Integrated-DeiT-S as published: 197 → 127 before layer 3 → 77 before 5 → 35 before 7
PUBLISHED_PYRAMID: Pyramid = ((3, 127), (5, 77), (7, 35))


def check_static(num_static: int, depth: int) -> None:
    """Refuse a ``P`` for which there are no layers 1…P."""
    if not 0 <= num_static < depth:
        raise ValueError(
            f'P binds: static layers are 1…P and layer 0 is never static, so with {depth} layers '
            f'P must be between 0 and {depth - 1}, not {num_static}.'
        )


@dataclass(frozen=True)
class Costs:
    """Multiply-accumulates of a ViT's blocks by the paper's parts.

    Attributes:
        depth: Layers ``L``.
        tokens: Tokens ``n``, class token included.
        dim: Channels ``d``.
        mlp_ratio: Hidden over input channels of the MLP.
    """

    depth: int
    tokens: int
    dim: int
    mlp_ratio: float = 4.0

    def dynamic_layer(self, m: Any) -> Any:
        """``4md² + 2m²d + 8md²`` for ``m`` tokens (an integer or an array)."""
        return 4 * m * self.dim**2 + 2 * m**2 * self.dim + self._mlp(m)

    def static_layer(self, m: Any) -> Any:
        """``2md² + m²d + 8md²``: no queries, no keys."""
        return 2 * m * self.dim**2 + m**2 * self.dim + self._mlp(m)

    def glad(self, n: Any, m: Any) -> Any:
        """``mnd`` from ``n`` tokens to ``m``."""
        return n * m * self.dim

    def _mlp(self, m: Any) -> Any:
        return 2 * m * self.dim * int(self.dim * self.mlp_ratio)

    def original(self) -> int:
        """All blocks of the original."""
        return self.depth * self.dynamic_layer(self.tokens)

    def compressed(self, static_layers: Sequence[int], pyramid: Pyramid) -> int:
        """All blocks and GLADs of a compressed model."""
        start, total, m = dict(pyramid), 0, self.tokens
        for layer in range(self.depth):
            if layer in start:
                total += self.glad(m, start[layer])
                m = start[layer]
            total += self.static_layer(m) if layer in static_layers else self.dynamic_layer(m)
        return total


def cost_ratio(costs: Costs, static_layers: Sequence[int], pyramid: Pyramid) -> float:
    """Cost of the compressed blocks and GLADs over that of the original blocks.

    Integrated-DeiT-S (``Costs(12, 197, 384)``, static layers 1 and 2, :data:`PUBLISHED_PYRAMID`)
    has 0.457.
    """
    return costs.compressed(static_layers, pyramid) / costs.original()


def swin_cost_ratio(
    embed_dim: int,
    depths: Sequence[int],
    num_static: int,
    window_size: int = 7,
    image_size: int = 224,
    mlp_ratio: float = 4.0,
) -> float:
    """Cost of a Swin's blocks and patch mergings with static attention in its blocks 1…P over that
    of the original.

    A window has ``w²`` tokens, so attention costs ``2nw²d`` instead of ``2n²d``, and half of that
    when static. A map that is smaller than a window is one window.

    Args:
        embed_dim: Channels of the first stage; every stage doubles them.
        depths: Blocks of each stage.
        num_static: ``P``; blocks count through all stages.
        window_size: Side ``w`` of a window.
        image_size: Side of the image in pixels.
        mlp_ratio: Hidden over input channels of the MLP.

    Raises:
        ValueError: There are not that many blocks after block 0.
    """
    check_static(num_static, sum(depths))
    original = saved = first = 0
    for stage, depth in enumerate(depths):
        dim, side = embed_dim * 2**stage, math.ceil(image_size / (4 * 2**stage))
        n, window = side**2, min(window_size, side) ** 2
        original += depth * (4 * n * dim**2 + 2 * n * window * dim)
        original += depth * 2 * n * dim * int(dim * mlp_ratio)
        original += 2 * n * dim**2 if stage else 0  # merging: 4 · d/2 to d channels
        static = sum(1 <= block <= num_static for block in range(first, first + depth))
        saved += static * (2 * n * dim**2 + n * window * dim)
        first += depth
    return 1 - saved / original


def scale_pyramid(costs: Costs, num_static: int, eta: float, pyramid: Pyramid) -> Pyramid:
    """A pyramid of the same shape for another cost.

    GLADs stay before the same layers and all counts of patch tokens are multiplied by one factor
    (rounded down; the class token is added to them): the largest with which the cost ratio is at
    most ``eta``. The token counts of Integrated-DeiT-T and -B are such scalings of the published S
    pyramid, as theirs are not known and no statistics of a pretrained model have chosen them yet.

    Args:
        costs: Dimensions of the model.
        num_static: ``P``.
        eta: The most it may cost, as a share of the original blocks.
        pyramid: The shape, made for the same number of tokens.

    Raises:
        ValueError: No factor costs at most ``eta``.
    """
    static = tuple(range(1, num_static + 1))
    best: Pyramid = ()
    # the largest of the counts takes every value once
    patches = pyramid[0][1] - 1
    for first in range(1, costs.tokens - 1):
        scaled = tuple((layer, 1 + (m - 1) * first // patches) for layer, m in pyramid)
        counts = [m for _, m in scaled]
        falls = all(a > b for a, b in itertools.pairwise(counts)) and counts[-1] >= 2
        if falls and cost_ratio(costs, static, scaled) <= eta:
            best = scaled
    if not best:
        raise ValueError(f'eta binds: no scaling of {pyramid} costs at most {eta}.')
    return best
