# SPDX-License-Identifier: Apache-2.0
"""What every mechanism needs and no paper is about: token/map layout and precision."""

import contextlib

import torch
from mmengine.utils import digit_version
from timm.layers import Mlp
from torch import Tensor, nn


def tokens_to_map(x: Tensor, height: int, width: int) -> Tensor:
    """View tokens ``(B, H*W, C)`` as a map ``(B, C, H, W)`` without moving memory.

    The view has ``channels_last`` strides, which is the layout convolutions like best on both
    CPU and tensor cores, so no copy happens on the way in or out.
    """
    return x.view(x.shape[0], height, width, x.shape[2]).permute(0, 3, 1, 2)


def map_to_tokens(x: Tensor) -> Tensor:
    """Turn a map ``(B, C, H, W)`` into tokens ``(B, H*W, C)``; free if it is ``channels_last``."""
    return x.permute(0, 2, 3, 1).flatten(1, 2).contiguous()


#: whether torch.is_autocast_enabled takes a device, and torch.compile captures our backbones
TORCH_2_4 = digit_version(torch.__version__) >= digit_version('2.4')


def _autocast_is_on(device_type: str) -> bool:
    if device_type == 'meta':  # which has no autocast
        return False
    if TORCH_2_4:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == 'cpu' else torch.is_autocast_enabled()


def full_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """Context in which autocast does not lower the precision of what is computed on ``x``'s device.

    A null context where autocast is off, so that exported and compiled graphs stay clean. Casting
    the operands with ``.float()`` remains the caller's business.
    """
    if _autocast_is_on(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 if it is of a lower precision, else unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def precise_sum(start: Tensor, difference: Tensor) -> Tensor:
    """``start + difference`` in float32 at least: beside a 1, bfloat16 and float16 would lose small
    differences."""
    return at_least_float32(start) + at_least_float32(difference)


def mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """``W X`` for ``W (m, n)`` and ``X (B, n, C)``: ``(B, m, C)``.

    ``weight @ x`` would transpose ``x`` in memory where ``weight`` asks for a gradient, which takes
    up to 2.5 times as long.
    """
    return torch.bmm(weight.to(x.dtype).expand(x.shape[0], -1, -1), x)


#: values of an intermediate result that stay in a core's cache beside what is computed from them
CACHE_BLOCK = 2**19


def is_compiling() -> bool:
    """Whether torch compiles or exports; torch 2.1 asks under another name."""
    if hasattr(torch.compiler, 'is_compiling'):
        return torch.compiler.is_compiling()
    return torch._dynamo.is_compiling()


def is_captured() -> bool:
    """Whether a graph is being made that must not depend on the size at hand."""
    return is_compiling() or torch.jit.is_tracing()


def check_heads(dim: int, num_heads: int) -> None:
    """Refuse heads that do not divide the channels."""
    if dim % num_heads:
        raise ValueError(f'{dim} channels cannot be divided among {num_heads} heads.')


def blocks_pay(x: Tensor) -> bool:
    """Whether to compute large intermediate results block by block: in eager inference on a CPU.

    There they would leave the cache, and fresh memory has to be mapped for each. Training keeps
    them anyway, GPUs prefer few large kernels, and compiled and exported graphs stay free of loops.
    """
    return x.device.type == 'cpu' and not torch.is_grad_enabled() and not is_captured()


def _is_plain(mlp: nn.Module) -> bool:
    """Whether an MLP is what timm's is by default, with parameters, and nobody looks at its parts
    or changes what they do."""
    if type(mlp) is not Mlp:
        return False
    kinds = type(mlp.fc1), type(mlp.act), type(mlp.norm), type(mlp.fc2)
    every = nn.modules.module
    return (
        kinds == (nn.Linear, nn.GELU, nn.Identity, nn.Linear)
        and type(mlp.fc2.weight) is type(mlp.fc2.bias) is nn.Parameter
        and not (every._global_forward_hooks or every._global_forward_pre_hooks)
        and not any(
            m.training or m._forward_hooks or m._forward_pre_hooks or 'forward' in vars(m)
            for m in mlp.modules()
        )
    )


def _add_mlp(
    x: Tensor, norm: nn.Module, mlp: nn.Module, plain: bool, out: Tensor | None = None
) -> Tensor:
    """``X + MLP(LN(X))`` in inference, with as few intermediate results as possible: GELU in place,
    and the residual and the bias as what the second product is added to.

    Args:
        x: Tokens ``(…, C)``.
        norm: ``LN``.
        mlp: ``MLP``.
        plain: What :func:`_is_plain` says of it; where it is not, it is called as a whole.
        out: Where to put the result. None: a new tensor.
    """
    if not plain:
        return torch.add(x, mlp(norm(x)), out=out)
    hidden = mlp.fc1(norm(x))
    hidden = torch.ops.aten.gelu_(hidden, approximate=mlp.act.approximate)
    same_type = hidden.dtype == x.dtype == mlp.fc2.weight.dtype  # not so with autocast
    if not (same_type and x.is_contiguous()):
        return torch.add(x, mlp.fc2(hidden), out=out)
    out = torch.add(x, mlp.fc2.bias, out=out)
    rows = out.view(-1, x.shape[-1])
    # counters of operations know addmm, and not addmm_
    torch.addmm(rows, hidden.flatten(0, -2), mlp.fc2.weight.t(), out=rows)
    return out


def feed_forward(x: Tensor, norm: nn.Module, mlp: nn.Module, drop_path: nn.Module) -> Tensor:
    """``X + DropPath(MLP(LN(X)))`` on tokens ``(B, N, C)``.

    In eager inference on a CPU, intermediate results are reused where they lie, and large maps are
    taken block by block: the first stages' FFN takes about half the time, and its hidden
    activations, otherwise the largest tensors of a forward, never exist as a whole.
    """
    if drop_path.training or not blocks_pay(x):
        return x + drop_path(mlp(norm(x)))
    hidden, plain = mlp.fc1.out_features, _is_plain(mlp)
    rows = CACHE_BLOCK // hidden
    # with fewer rows than columns, reading the weights for every block costs more than it saves
    if rows < hidden or x.shape[0] * x.shape[1] <= rows * torch.get_num_threads():
        return _add_mlp(x, norm, mlp, plain)
    rows *= torch.get_num_threads()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, target in zip(
        x.flatten(0, 1).split(rows), out.flatten(0, 1).split(rows), strict=True
    ):
        _add_mlp(part, norm, mlp, plain, out=target)
    return out


class ConvPatchEmbed(nn.Module):
    """Overlapping convolutional patch embedding, from a map to tokens.

    Kernel ``2*stride - 1`` and padding ``stride - 1`` give ``ceil(H/stride) x ceil(W/stride)``
    tokens for every image size, with no image padding of our own.

    Args:
        in_channels: Channels of the input map.
        out_channels: Channels of the tokens.
        stride: Downsampling factor in pixels of the input map.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            in_channels, out_channels, 2 * stride - 1, stride=stride, padding=stride - 1
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """``(B, C_in, H, W)`` to tokens ``(B, H'*W', C_out)`` and their grid ``H', W'``."""
        x = self.proj(x.contiguous(memory_format=torch.channels_last))
        return map_to_tokens(x), x.shape[2], x.shape[3]


class ConditionalPositionEncoding(nn.Module):
    """Conditional position encoding (CPVT): ``X + DWConv3x3(X)`` on the tokens' grid."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        """Tokens ``(B, H*W, C)`` to tokens of the same shape."""
        return x + map_to_tokens(self.proj(tokens_to_map(x, height, width)))
