# SPDX-License-Identifier: Apache-2.0
"""LaViT's attention: what its layers attend to, and how much it changes from layer to layer."""

import itertools
import statistics
from dataclasses import dataclass

from mmengine.config import Config
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.backbones.lavit import LaViT, LaViTBlock
from ..models.layers.less_attention import LessAttention
from .observe import find_backbone, run_observed


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer for a batch of images.

    Args:
        stage: Number of the stage, from 0.
        layer: Number of the layer in its stage, from 0.
        less: Whether it is a less-attention layer.
        height: Height of the stage's map.
        width: Width of the stage's map.
        weights: ``softmax(A) (B, height*width, h, m)``: of each query and head, its weights on the
            ``m`` keys, the cells of a square grid over the image.
    """

    stage: int
    layer: int
    less: bool
    height: int
    width: int
    weights: Tensor


def attention_of(model: nn.Module, images: Tensor) -> list[LayerAttention]:
    """The attention of all layers of a LaViT; the backbone runs unchanged, in eval mode.

    Args:
        model: A LaViT, or a model with one in it.
        images: Preprocessed images ``(B, in_channels, H, W)``.

    Raises:
        ValueError: There is no LaViT in the model.
    """
    backbone = find_backbone(model, LaViT, 'attention to show here')
    layers: list[LayerAttention] = []
    handles = []
    for s, stage in enumerate(backbone.stages):
        for j, block in enumerate(stage.blocks):

            def record(block: LaViTBlock, args: tuple, output: tuple, s: int = s, j: int = j):
                grid, scores = args[2], output[1]
                less = isinstance(block.attn, LessAttention)
                weights = scores.softmax(dim=3)
                layers.append(LayerAttention(s, j, less, grid.height, grid.width, weights))

            handles.append(block.register_forward_hook(record))
    run_observed(backbone, images, handles)
    return layers


def layer_similarity(layers: list[LayerAttention]) -> list[tuple[int, int, float]]:
    """Cosine similarity of each layer's attention with that of the layer before in its stage.

    The cosine is that of a query's weights on the keys in the two layers, averaged over queries,
    heads and images: 1 means that the layer attends to what the layer before attended to, which
    the paper calls attention saturation.

    Returns:
        Stage, layer and similarity, for every layer but the first of each stage.
    """
    similarities = []
    for before, after in itertools.pairwise(layers):
        if before.stage == after.stage:
            cosine = F.cosine_similarity(before.weights, after.weights, dim=3).mean().item()
            similarities.append((after.stage, after.layer, cosine))
    return similarities


def saturation(model: nn.Module, cfg: Config, num_images: int = 64) -> float:
    """Mean :func:`layer_similarity` of a trained model on its validation data.

    Args:
        model: A model of MMPretrain with a LaViT in it, with its weights.
        cfg: Its config.
        num_images: How many of the validation images, at least.
    """
    loader = Runner.build_dataloader({**cfg.val_dataloader, 'num_workers': 0}, seed=0)
    values, seen = [], 0
    for data in loader:
        images = model.data_preprocessor(data, False)['inputs']
        values.append(
            statistics.fmean(s for *_, s in layer_similarity(attention_of(model, images)))
        )
        seen += len(images)
        if seen >= num_images:
            break
    return statistics.fmean(values)
