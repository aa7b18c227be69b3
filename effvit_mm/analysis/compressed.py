# SPDX-License-Identifier: Apache-2.0
"""What no image changes in the compressed families (Yu et al., arXiv 2310.07664): static attention,
and which patches feed which token after an aggregation."""

import math
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ..models.backbones import DGSSASwin, IntegratedDeiT
from ..models.layers.static_attention import StaticAttention, StaticWindowAttention
from ..models.layers.token_aggregation import glads_of
from .pictures import empty_grid, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def find_compressed(model: nn.Module, what: str) -> IntegratedDeiT | DGSSASwin:
    """The first compressed backbone in a model.

    Raises:
        ValueError: There is none.
    """
    for module in model.modules():
        if isinstance(module, IntegratedDeiT | DGSSASwin):
            return module
    raise ValueError(
        f'{type(model).__name__} has no {what}: it has no IntegratedDeiT or DGSSASwin.'
    )


@torch.no_grad()
def static_matrices(model: nn.Module) -> dict[int, Tensor]:
    """The attention ``(h, n, n)`` of every static layer, layers counted from 0; of a Swin that of a
    window in which nothing is masked.

    Raises:
        ValueError: No layer of the model has static attention.
    """
    backbone = find_compressed(model, 'static attention to show')
    found = {}
    for layer, block in enumerate(backbone.all_blocks()):
        for module in block.modules():
            if isinstance(module, StaticAttention):
                found[layer] = module.matrix.detach().clone()
            elif isinstance(module, StaticWindowAttention):
                found[layer] = module.attention().detach().clone()
    if not found:
        raise ValueError(
            f'This {type(backbone).__name__} has no static attention: no layer is static.'
        )
    return found


def layers_after_glads(model: nn.Module) -> set[int]:
    """Layers whose tokens a GLAD has made, so that they have no place on the image."""
    backbone = find_compressed(model, 'layers')
    num_layers = len(backbone.all_blocks())
    return set(range(min(map(int, glads_of(backbone)), default=num_layers), num_layers))


def query_map(matrix: Tensor, row: float = 0.5, column: float = 0.5) -> tuple[Tensor, int, int]:
    """What one cell attends to, as maps of the grid.

    Args:
        matrix: Attention ``(h, n, n)`` among the cells of a square grid, with or without a class
            token before them.
        row: The cell's place as a share of the grid's height.
        column: And of its width.

    Returns:
        Maps ``(h, side, side)``, and the cell's row and column.
    """
    side = math.isqrt(matrix.shape[1])
    extra = matrix.shape[1] - side**2
    y, x = min(int(row * side), side - 1), min(int(column * side), side - 1)
    return matrix[:, extra + y * side + x, extra:].unflatten(1, (side, side)), y, x


def draw_static(
    matrices: Mapping[int, Tensor],
    name: str,
    max_heads: int = 6,
    aggregated: Container[int] = (),
) -> 'Figure':
    """Static attention: for each layer a row with the matrices of the first heads, and below each
    what the cell in the middle attends to.

    Args:
        matrices: From :func:`static_matrices`.
        name: Of the model, for the title.
        max_heads: How many heads are shown.
        aggregated: Layers whose tokens have no place on the grid, see :func:`layers_after_glads`.
    """
    heads = min(max_heads, max(len(matrix) for matrix in matrices.values()))
    figure, axes = empty_grid(2 * len(matrices), heads, 1.0, 1.7, header=0.45)
    figure.suptitle(
        f'{name}: static attention. Above: all queries (rows) on all keys;\n'
        'below: the cell in the middle (outlined) on the grid',
        fontsize=9,
    )
    for i, (layer, matrix) in enumerate(matrices.items()):
        n = matrix.shape[1]
        maps, y, x = (None, 0, 0) if layer in aggregated else query_map(matrix)
        for head in range(min(heads, len(matrix))):
            above, below = axes[2 * i, head], axes[2 * i + 1, head]
            values = matrix[head].numpy()
            # a few large entries would leave the rest black
            high = max(float(np.quantile(values, 0.995)), 1e-12)
            above.imshow(values, cmap='magma', vmin=min(0.0, values.min()), vmax=high)
            above.set_title(f'layer {layer}, head {head}, {n}²', fontsize=8)
            if maps is None:
                below.text(0.5, 0.5, 'tokens of a GLAD:\nno grid', ha='center', fontsize=7)
                continue
            values = maps[head].numpy()
            below.imshow(values, cmap='magma', vmin=min(0.0, values.min()))
            below.set_title(f'largest {values.max():.2f}', fontsize=8)
            _outline(below, x - 0.5, y - 0.5, 1)
    return figure


def assigned_tokens(sources: Tensor) -> Tensor:
    """Of every patch the token that it feeds most, each token's weights taken relative to its
    largest; ``sources (m, n)`` with the class token first, to ``(side, side)`` of 1 … m - 1."""
    patches = sources[1:, 1:]
    shares = patches / patches.max(dim=1, keepdim=True).values.clamp(min=1e-12)
    side = math.isqrt(patches.shape[1])
    return shares.argmax(dim=0).view(side, side) + 1


def draw_tokens(
    image: np.ndarray, sources: Mapping[int, Tensor], patch: int, shown: int = 5
) -> 'Figure':
    """Which patches feed which token: for each GLAD a row with a colour for each token, laid over
    the image, and the weights of some of the tokens.

    Args:
        image: The image that the network saw, RGB ``(H, W, 3)`` uint8; the windows that it is cut
            into all have the same weights.
        sources: From :func:`effvit_mm.compression.report.glad_sources`.
        patch: Side of a patch in pixels.
        shown: Tokens of which the weights are drawn, those that most patches feed.
    """
    import matplotlib

    height, width = image.shape[:2]
    figure, axes = empty_grid(len(sources), 2 + shown, height / width, 1.9, header=0.4)
    figure.suptitle('patches and the tokens they feed (class token left out)', fontsize=10)
    for (layer, value), row in zip(sources.items(), axes, strict=True):
        assigned, count = assigned_tokens(value), len(value)
        show(row[0], image, f'image {width}×{height}\nGLAD before layer {layer}')
        # neighbouring numbers get colours that are far apart
        order = (np.arange(count) * 0.618034) % 1
        colours = matplotlib.colormaps['hsv'](order)[:, :3]
        cells = _repeat(colours[assigned.numpy()], patch, height, width)
        grey = np.repeat(image.mean(axis=2, keepdims=True) / 255, 3, axis=2)
        used = len(assigned.unique())
        row[1].imshow(0.45 * grey + 0.55 * cells)
        row[1].set_title(f'{count} tokens,\n{used} lead some patch', fontsize=8)
        numbers, areas = assigned.unique(return_counts=True)
        largest = numbers[areas.argsort(descending=True, stable=True)][:shown]
        for axis, token in zip(row[2:], largest.tolist(), strict=False):
            weights = value[token, 1:].view(assigned.shape).numpy()
            axis.imshow(grey.mean(axis=2), cmap='gray', vmin=0, vmax=2)
            weights = _repeat(weights[..., None], patch, height, width)[..., 0]
            axis.imshow(weights, cmap='inferno', alpha=0.65, vmin=0)
            axis.set_title(f'token {token}\nlargest weight {weights.max():.2f}', fontsize=8)
    return figure


def _repeat(cells: np.ndarray, patch: int, height: int, width: int) -> np.ndarray:
    """The cells ``(side, side, …)`` of a window as pixels, repeated over an image."""
    pixels = cells.repeat(patch, axis=0).repeat(patch, axis=1)
    down, right = (-(-length // len(pixels)) for length in (height, width))
    return np.tile(pixels, (down, right, 1))[:height, :width]


def _outline(axes, left: float, top: float, side: float) -> None:
    from matplotlib.patches import Rectangle

    from .pictures import OUTLINE

    axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=OUTLINE, lw=1.5))
