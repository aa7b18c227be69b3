# SPDX-License-Identifier: Apache-2.0
"""What a backbone costs: multiply-accumulates by formula and by counter, and memory, at any size.

MACs are those of matrix products and convolutions, as papers and OpenMMLab count them. The formula
follows the paper piece by piece from the architecture's fields, so it checks the code; the counter
runs the code on fake tensors (shapes without data), so no image is too large for it.
"""

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from ..models.backbones import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer
from ..models.backbones.base import as_fraction
from ..models.layers.partial_attention import num_foreground


@singledispatch
def analytical_macs(backbone: nn.Module, height: int, width: int) -> int:
    """MACs of one image by the paper's formulas; every family registers its own.

    Args:
        backbone: A backbone of this package.
        height: Image height in pixels.
        width: Image width in pixels.

    Raises:
        TypeError: No formula is registered for the backbone's class.
    """
    raise TypeError(f'No formula for the cost of {type(backbone).__name__} is registered.')


@analytical_macs.register
def partialformer_macs(backbone: PartialFormer, height: int, width: int) -> int:
    """PartialFormer (ECCV 2024): MMSA is quadratic in foreground tokens, SQA linear in all."""
    a = backbone.arch_settings
    macs, dim_in = 0, backbone.in_channels
    for i in range(backbone.num_stages):
        dim, heads = a['base_channels'] * a['channel_multipliers'][i], a['num_heads'][i]
        ratio = as_fraction(a['foreground_ratios'][i], 'foreground_ratios')
        stride, extra = (2 if i else 4), int(a['abstract_token'])
        height, width = -(-height // stride), -(-width // stride)
        n = height * width
        n_f = num_foreground(n, ratio) + extra  # [a ; X_f]

        position = 9 * n * dim
        mmsa = 4 * n_f * dim**2 + 2 * n_f**2 * dim  # q, k, v, projection; Q K^T and A V
        mmsa += 2 * heads**2 * a['head_expansion'] * n_f**2  # HeadMLP, h -> e h -> h
        sqa = 0
        if ratio < 1 and a['sqa'] != 'none':
            sqa = 2 * n * heads * dim + 3 * dim**2  # q W_k^T X^T and p X; W_q, W_k, W_v once each
            hidden = max(1, dim // a['channel_reduction'])
            sqa += 2 * dim * hidden if a['sqa'] == 'channel_mlp' else dim**2
        ffn = 2 * (n + extra) * dim * int(dim * a['mlp_ratios'][i])

        macs += n * dim * dim_in * (2 * stride - 1) ** 2  # patch embedding
        macs += extra * dim_in * dim if i else 0  # abstract token from stage to stage
        macs += a['depths'][i] * (position + mmsa + sqa + ffn)
        dim_in = dim
    return macs


class ScoreMacs(NamedTuple):
    """MACs of one layer's pre-softmax scores in one stage of LaViT, for one image.

    Args:
        theta: The map over keys, ``N h m^2``.
        psi: The map over queries, on whole tiles; 0 where there is none.
        folded: Keys, and ``X (W_q K^T)``, as this package computes what the two replace.
        plain: Queries, keys and ``Q K^T``, as the paper's formula writes it.
    """

    theta: int
    psi: int
    folded: int
    plain: int


def lavit_score_macs(backbone: LaViT, height: int, width: int) -> list[ScoreMacs]:
    """What scores cost in each stage of a LaViT, transformed and computed.

    Args:
        backbone: The LaViT.
        height: Image height in pixels.
        width: Image width in pixels.
    """
    a, stages = backbone.arch_settings, []
    m = a['key_grid'] ** 2
    for i in range(backbone.num_stages):
        dim, heads, side = a['dims'][i], a['num_heads'][i], a['query_grids'][i]
        height, width = (-(-length // (2 if i else 4)) for length in (height, width))
        n = height * width
        theta = n * heads * m**2
        psi = 0
        if side is not None:
            psi = -(-height // side) * -(-width // side) * side**4 * heads * m
        folded = 2 * m * dim**2 + n * heads * m * dim
        stages.append(ScoreMacs(theta, psi, folded, (n + m) * dim**2 + n * m * dim))
    return stages


@analytical_macs.register
def lavit_macs(backbone: LaViT, height: int, width: int) -> int:
    """LaViT (CVPR 2024): with few keys, query and output weights are applied on the keys' side."""
    a = backbone.arch_settings
    macs, dim_in, heads_in, image = 0, backbone.in_channels, 0, (height, width)
    m = a['key_grid'] ** 2
    for i, scores in enumerate(lavit_score_macs(backbone, height, width)):
        dim, heads, ratio = a['dims'][i], a['num_heads'][i], a['reductions'][i]
        stride = 2 if i else 4
        height, width = -(-height // stride), -(-width // stride)
        n, cells = height * width, -(-height // ratio) * -(-width // ratio)

        reduction = cells * dim**2 * ratio**2 if ratio > 1 else 0
        if image != (4 * 2**i * ratio * a['key_grid'],) * 2:
            reduction += cells * m * dim  # average to the grid of keys
        projected = 2 * m * dim**2 + n * heads * m * dim  # V, V W_o and P (V W_o)
        ffn = 2 * n * dim * int(dim * a['mlp_ratios'][i])

        vanilla, depth = a['vanilla_layers'][i], a['depths'][i]
        macs += n * dim * dim_in * (2 * stride - 1) ** 2 + 9 * n * dim  # embeddings
        if i and a['attention_residual']:
            macs += n * heads_in * m * (9 + heads)
        macs += depth * (reduction + projected + ffn)
        macs += vanilla * scores.folded + (depth - vanilla) * (scores.theta + scores.psi)
        dim_in, heads_in = dim, heads
    return macs


@analytical_macs.register
def integrated_deit_macs(backbone: IntegratedDeiT, height: int, width: int) -> int:
    """Integrated-DeiT (arXiv 2310.07664): by layers; its static ones have no queries and keys."""
    a = backbone.arch_settings
    dim, patch = a['embed_dims'], a['patch_size']
    height, width = -(-height // patch), -(-width // patch)
    windows = -(-height // backbone.grid) * -(-width // backbone.grid)
    macs = height * width * backbone.in_channels * patch**2 * dim
    n, pyramid = 1 + backbone.grid**2, dict(a['pyramid'])
    for layer, m in enumerate(backbone.tokens_of):
        if layer in pyramid and a['aggregation'] == 'glad':
            macs += windows * m * n * dim
        elif layer in pyramid and a['aggregation'] == 'concat':
            macs += windows * (m - 1) * 4 * dim**2
        n, static = m, layer in a['static_layers']
        # of the last layer a classifier only sees the class token
        seen = 1 if backbone.out_type == 'cls_token' and layer == a['depth'] - 1 else n
        if static and a['static_block'] == 'mlp':
            mixing = 2 * n**2 * dim
        elif static:
            mixing = 2 * n * dim**2 + n**2 * dim
        else:
            mixing = 2 * (seen + n) * dim**2 + 2 * seen * n * dim
        macs += windows * (mixing + 2 * seen * dim * int(dim * a['mlp_ratio']))
    if backbone.out_type == 'cls_token':
        return macs
    for i, stride in zip(backbone.out_indices, backbone.out_strides, strict=True):
        if backbone.tokens_of[backbone.taps[i]] < 1 + backbone.grid**2:  # back to the grid
            macs += windows * backbone.grid**2 * backbone.tokens_of[backbone.taps[i]] * dim
        macs += 9 * height * width * dim * a['window_mixing']
        for doubling in range(max(0, round(math.log2(patch / stride)))):
            macs += 4 * height * width * 4**doubling * dim**2  # deconvolution
    return macs


@analytical_macs.register
def dgssa_swin_macs(backbone: DGSSASwin, height: int, width: int) -> int:
    """Swin with static layers (arXiv 2310.07664): these have no queries and keys, and one product
    of n x n matrices instead of two; the cells that windows have beyond the map count."""
    a = backbone.arch_settings
    macs, dim, layer = 0, a['embed_dims'], 0
    for i in range(backbone.num_stages):
        stride = 2 if i else 4
        height, width = -(-height // stride), -(-width // stride)
        n, map_side = height * width, -(-a['image_size'] // (4 * 2**i))
        side = min(a['window_size'], map_side)
        cells = -(-height // side) * -(-width // side) * side**2

        macs += n * dim * (2 * dim if i else 16 * backbone.in_channels)  # merging or patches
        for block in range(a['depths'][i]):
            if layer not in a['static_layers']:
                macs += 4 * cells * dim**2 + 2 * cells * side**2 * dim
            elif a['static_block'] == 'attention':
                macs += 2 * cells * dim**2 + cells * side**2 * dim
            else:
                shifts = block % 2 and map_side > side and side > 1  # by zeros before the map
                before = side - side // 2 if shifts else 0
                windows = -(-(height + before) // side) * -(-(width + before) // side)
                macs += 2 * windows * side**4 * dim
            macs += 2 * n * dim * int(dim * a['mlp_ratio'])
            layer += 1
        dim *= 2
    return macs


def _unfused_attention() -> AbstractContextManager:
    """Fused attention is one operator that counters do not know; unfused it is two products."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch < 2.3
        return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False)
    return sdpa_kernel(SDPBackend.MATH)


def counted_macs(model: nn.Module, height: int, width: int, in_channels: int = 3) -> int:
    """MACs of one image by torch's operator counter, attention included.

    Args:
        model: Any module that takes an image batch.
        height: Image height in pixels.
        width: Image width in pixels.
        in_channels: Image channels.
    """
    model = copy.deepcopy(model).requires_grad_(False)
    model.eval()  # some frameworks' models return nothing from it
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), _unfused_attention(), counter:
        model(torch.zeros(1, in_channels, height, width))
    return counter.get_total_flops() // 2


class _PeakMemory(TorchDispatchMode):
    """Adds up the bytes of the storages that are alive, and remembers the most there were."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._add(existing)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self.alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {k: kept for k, kept in self.alive.items() if not kept[0].expired()}
        self._add(tensor for tensor in tree_flatten(out)[0] if isinstance(tensor, Tensor))
        return out


def peak_memory(
    model: nn.Module, height: int, width: int, training: bool = False, in_channels: int = 3
) -> int:
    """Most bytes of weights, activations and gradients that are alive at once for one image.

    What ``torch.cuda.max_memory_allocated`` measures, but counted on fake tensors, so the same on
    every machine: workspaces inside operators and the allocator's fragments are not in it. Gradient
    mode stays on for inference too, only nothing asks for gradients: what is done differently
    without it depends on a CPU's cores.

    Args:
        model: Any module that takes an image batch and returns a tensor or a tuple of them.
        height: Image height in pixels.
        width: Image width in pixels.
        training: Forward and backward pass, instead of inference.
        in_channels: Image channels.
    """
    model = copy.deepcopy(model).requires_grad_(training)
    model.train(training)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        image = torch.zeros(1, in_channels, height, width)
        fake_model = {k: fake.from_tensor(v) for k, v in model.state_dict(keep_vars=True).items()}
        with _PeakMemory(fake_model.values()) as memory:
            out = torch.func.functional_call(model, fake_model, (image,))
            if training:
                sum(o.sum() for o in tree_flatten(out)[0]).backward()
    return memory.peak


def growth_exponent(
    cost: Callable[[int, int], float], small: int = 224, large: int = 1344
) -> float:
    """Exponent ``p`` of a cost that grows like pixels to the power of ``p``; 1 is linear.

    Args:
        cost: Function of an image's height and width.
        small: Side of the smaller, square image.
        large: Side of the larger one.
    """
    return math.log(cost(large, large) / cost(small, small)) / math.log((large / small) ** 2)
