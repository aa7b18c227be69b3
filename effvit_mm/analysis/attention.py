# SPDX-License-Identifier: Apache-2.0
"""Attention of LaViT, and of PartialFormer's queries: what layers attend to, how much that changes
from layer to layer, and how alike it is for different queries."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.backbones.lavit import LaViT, LaViTBlock
from ..models.backbones.partialformer import PartialFormer
from ..models.layers.less_attention import LessAttention
from ..models.layers.partial_attention import foreground_mask, split_tokens
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


def mean_cosine(rows: Tensor) -> Tensor:
    """Mean cosine similarity of all pairs of different rows, ``(…, n, m)`` to ``(…)``; NaN for a
    single row."""
    n = rows.shape[-2]
    total = F.normalize(rows, dim=-1).sum(dim=-2).square().sum(dim=-1)
    return (total - n) / (n * (n - 1))


class QuerySimilarity(NamedTuple):
    """How alike queries of one block attend, from 0 to 1.

    Attributes:
        stage: Number of the stage, from 0.
        block: Number of the block in its stage, from 0.
        foreground: Mean cosine of the weights of two foreground queries; NaN for a single one.
        background: Of two background queries; NaN where there are less than two.
    """

    stage: int
    block: int
    foreground: float
    background: float


def query_similarity(model: nn.Module, images: Tensor) -> list[QuerySimilarity]:
    """The analysis that PartialFormer's paper opens with, in a trained PartialFormer: would the
    background's queries have told different things apart, had they attended?

    Every token's query, from the weights that MMSA and SQA share, is compared with the keys of all
    tokens, ``softmax(Q K^T / sqrt(d_h))`` without HeadMLP; the cosine of two queries' weights is
    averaged over pairs, heads and images, apart for foreground and background.

    Args:
        model: A PartialFormer, or a model with one in it. It runs unchanged, in eval mode.
        images: Preprocessed images ``(B, in_channels, H, W)``. Time and memory are quadratic in
            their pixels.

    Raises:
        ValueError: There is no PartialFormer in the model.
    """
    backbone = find_backbone(model, PartialFormer, 'queries to compare')
    found: list[QuerySimilarity] = []
    handles = []
    for s, stage in enumerate(backbone.stages):
        for j, block in enumerate(stage.blocks):

            def record(_, args, x, s=s, j=j, block=block):
                mmsa, (batch, n, _) = block.mmsa, x.shape
                qkv = mmsa.qkv(block.norm1(x)).view(batch, n, 3, mmsa.num_heads, mmsa.head_dim)
                q, k, _ = qkv.permute(2, 0, 3, 1, 4).float().unbind(0)
                weights = (q * mmsa.head_dim**-0.5 @ k.transpose(2, 3)).softmax(dim=3)
                mask = foreground_mask(split_tokens(x, block.foreground_ratio), n)
                values = []
                for chosen in (mask, ~mask):
                    if chosen.sum() < 2 * batch:
                        values.append(math.nan)
                        continue
                    rows = [weights[i][:, chosen[i]] for i in range(batch)]
                    values.append(mean_cosine(torch.stack(rows)).mean().item())
                found.append(QuerySimilarity(s, j, *values))

            # what the position encoding returns is what the block splits
            handles.append(block.pos_embed.register_forward_hook(record))
    run_observed(backbone, images, handles)
    return found


def background_similarity(model: nn.Module, cfg: Config, num_images: int = 64) -> float:
    """Mean over blocks of :func:`query_similarity` of the background, on the validation data; a
    measure for ``tools/study.py``."""
    return _over_validation(
        model,
        cfg,
        num_images,
        lambda images: [s.background for s in query_similarity(model, images)],
    )


def saturation(model: nn.Module, cfg: Config, num_images: int = 64) -> float:
    """Mean :func:`layer_similarity` of a trained model on its validation data.

    Args:
        model: A model of MMPretrain with a LaViT in it, with its weights.
        cfg: Its config.
        num_images: How many of the validation images, at least.
    """
    return _over_validation(
        model,
        cfg,
        num_images,
        lambda images: [s for *_, s in layer_similarity(attention_of(model, images))],
    )


def _over_validation(
    model: nn.Module, cfg: Config, num_images: int, measure: Callable[[Tensor], list[float]]
) -> float:
    """Mean of what is measured on batches of the validation data, without NaN."""
    loader = Runner.build_dataloader({**cfg.val_dataloader, 'num_workers': 0}, seed=0)
    values, seen = [], 0
    for data in loader:
        images = model.data_preprocessor(data, False)['inputs']
        found = [value for value in measure(images) if not math.isnan(value)]
        values.append(statistics.fmean(found))
        seen += len(images)
        if seen >= num_images:
            break
    return statistics.fmean(values)
