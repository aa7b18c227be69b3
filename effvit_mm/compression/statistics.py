# SPDX-License-Identifier: Apache-2.0
"""What images show about a pretrained DeiT or Swin, for its compression.

In one pass over images, and of every layer ``l`` (counted through all stages):

- ``attention_mean.l (h, n, n)``: the mean attention ``Ā`` of each head, which a static attention
  starts from. In a Swin the mean runs over images and windows, for each pair of tokens over the
  windows where the shift mask lets it be seen; the relative position bias is part of the attention.
- ``singular_values.l (n)``: ``σ_{l,i}``, the mean over images, heads and windows of the i-th
  singular value of the attention.
- ``difference.l (h)``: how much the attention differs between images (and windows),
  ``Σ_jk E[(A − Ā)²] / Σ_jk E[A²]``: 0 where all are the same, 1 where they have nothing in common.
- DeiT: ``gram.l (n, n) = E[X Xᵀ] / C`` of the tokens ``X`` that enter the layer, and
  ``token_std.l ()``, the mean over tokens of their standard deviation over channels.

All sums are float64. They are additive: parts of the images may be summed in several processes, or
in runs that were interrupted.
"""

import hashlib
import json
import os
import os.path as osp
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from ..version import __version__

#: changes when files of an older version can no longer be read
FORMAT = 'effvit_mm.statistics.1'


@dataclass
class Statistics:
    """Statistics of a model on a data set.

    Attributes:
        tensors: Named as the module's docstring says; on the CPU.
        metadata: ``kind`` (``'deit'`` or ``'swin'``), ``model``, ``weights`` (a fingerprint, see
            :func:`weights_fingerprint`), ``depth``, and lists with a number for each layer
            ``heads``, ``dims``, ``tokens``; ``mlp_ratio``, ``image_size``, ``dataset``,
            ``image_count``, ``versions``.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.metadata['depth']

    def layers(self, name: str) -> list[Tensor]:
        """One of the statistics, layer by layer."""
        return [self.tensors[f'{name}.{layer}'] for layer in range(self.depth)]

    def singular_values(self) -> Tensor:
        """``(L, n)``, for the search.

        Raises:
            ValueError: The layers have different numbers of tokens, or windows.
        """
        if self.metadata['kind'] != 'deit':
            raise ValueError(
                'Only a DeiT has tokens to aggregate: these are statistics of a Swin, which is a '
                'pyramid already.'
            )
        return torch.stack(self.layers('singular_values'))

    def save(self, path: str) -> None:
        """Write a safetensors file, whole or not at all; metadata are JSON in its header.

        Raises:
            OSError: It cannot be written.
        """
        write_tensors(path, self.tensors, dict(self.metadata, format=FORMAT))


def load_statistics(path: str) -> Statistics:
    """Read what :meth:`Statistics.save` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or something else.
    """
    if not osp.isfile(path):
        raise FileNotFoundError(
            f'There is no file {path}: `tools/compress.py stats` writes statistics.'
        )
    tensors, metadata = read_tensors(path)
    if metadata.pop('format', None) != FORMAT:
        raise ValueError(f'{path} holds no statistics that this version of effvit_mm can read.')
    return Statistics(tensors, metadata)


def write_tensors(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file beside ``path``, then move it there.

    Raises:
        OSError: It cannot be written; a file that was there before is unchanged.
    """
    os.makedirs(osp.dirname(osp.abspath(path)), exist_ok=True)
    scratch = f'{path}.{os.getpid()}.tmp'
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(tensors, scratch, {key: json.dumps(value) for key, value in metadata.items()})
        os.replace(scratch, path)
    except SafetensorError as error:  # what a full disk is reported as
        raise OSError(str(error)) from error
    finally:
        if osp.exists(scratch):
            os.remove(scratch)


def read_tensors(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file by :func:`write_tensors`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or no safetensors file.
    """
    if not osp.isfile(path):
        raise FileNotFoundError(f'There is no file {path}.')
    try:
        with safe_open(path, framework='pt') as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f'{path} is not a complete file of statistics: {error}') from error
    return tensors, metadata


def weights_fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of a model's weights under timm's names, its head left out."""
    digest = hashlib.sha256()
    for name in sorted(state):
        if not name.startswith('head.'):
            value = state[name].detach().cpu().float().contiguous()
            digest.update(f'{name}{tuple(value.shape)}'.encode())
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def attention_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Kind of a model and its blocks, counted through all stages.

    Raises:
        ValueError: It is neither timm's DeiT nor timm's Swin, or has parts that the compressed
            model does not have, or tokens that windows of the Swin would have to be padded with.
    """
    if isinstance(model, VisionTransformer):
        if model.num_prefix_tokens != 1 or model.cls_token is None:
            raise ValueError(
                'The model must have a class token and no other extra token (such as a '
                f'distillation token); it has {model.num_prefix_tokens}.'
            )
        kind, blocks = 'deit', list(model.blocks)
    elif isinstance(model, SwinTransformer):
        kind, blocks = 'swin', [block for stage in model.layers for block in stage.blocks]
        for block in blocks:
            pairs = zip(block.input_resolution, block.window_size, strict=True)
            if any(side % window for side, window in pairs):
                raise ValueError(
                    f"timm's Swin would pad a map of {block.input_resolution} cells to windows of "
                    f'{block.window_size}, and attend to the padding: take its own image size.'
                )
    else:
        raise ValueError(
            f"{type(model).__name__} is neither timm's VisionTransformer nor its SwinTransformer."
        )
    for block in blocks:
        if type(block.attn) not in (Attention, WindowAttention):
            raise ValueError(f'{type(block.attn).__name__} is not the attention of DeiT or Swin.')
    return kind, blocks


def compute_attention(attn: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """The attention that a module of timm computes, which its fused operator does not hand out.

    Args:
        attn: timm's ``Attention`` or ``WindowAttention``.
        x: Its input ``(B, n, C)``; ``B`` counts windows, those of an image one after the other.
        mask: What is added to the logits of each window of an image, ``(w, n, n)``; None: nothing.

    Returns:
        ``softmax(Q Kᵀ / sqrt(d_h) + bias + mask)``, ``(B, h, n, n)``.
    """
    batch, n, _ = x.shape
    q, k, _ = attn.qkv(x).view(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    if isinstance(attn, Attention):
        q, k = attn.q_norm(q), attn.k_norm(k)
    logits = (q * attn.scale) @ k.transpose(-2, -1)
    if isinstance(attn, WindowAttention):
        logits = logits + attn._get_rel_pos_bias()
    if mask is not None:
        logits = (logits.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    return logits.softmax(dim=-1)


@contextmanager
def observed(
    model: nn.Module,
    attention: Callable[[int, Tensor, Tensor | None], None],
    tokens: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Show what happens in a model while it runs; its results stay what they are.

    Args:
        model: See :func:`attention_layers`.
        attention: Is called with each layer's number, attention ``(B, h, n, n)`` and mask.
        tokens: Is called with each layer's number and the tokens ``(B, n, C)`` that enter it.
    """
    handles = []
    for layer, block in enumerate(attention_layers(model)[1]):

        def see_attention(attn, args, kwargs, layer=layer):
            mask = kwargs.get('mask', args[1] if len(args) > 1 else None)
            attention(layer, compute_attention(attn, args[0], mask), mask)

        handles.append(block.attn.register_forward_pre_hook(see_attention, with_kwargs=True))
        if tokens is not None:
            hook = block.register_forward_pre_hook(lambda _, args, i=layer: tokens(i, args[0]))
            handles.append(hook)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class StatisticsSums:
    """The sums over images that statistics are made of.

    Args:
        model: The model, on its device; see :func:`attention_layers`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kind, self.blocks = attention_layers(model)
        self.device = next(model.parameters()).device
        self.sums: dict[str, Tensor] = {}
        self._start('images')
        for layer, block in enumerate(self.blocks):
            h, n = block.attn.num_heads, _num_tokens(model, block)
            self._start(f'attention.{layer}', h, n, n)
            self._start(f'square.{layer}', h, n, n)
            self._start(f'seen.{layer}', n, n)
            self._start(f'sigma.{layer}', n)
            self._start(f'matrices.{layer}')
            if self.kind == 'deit':
                self._start(f'gram.{layer}', n, n)
                self._start(f'std.{layer}')

    def _start(self, name: str, *shape: int) -> None:
        self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=self.device)

    @property
    def image_count(self) -> int:
        """How many images have been added."""
        return int(self.sums['images'])

    @torch.no_grad()
    def add(self, images: Tensor) -> None:
        """Run the model on images ``(B, 3, H, W)``, normalised, and add what it shows."""
        tokens = self._add_tokens if self.kind == 'deit' else None
        training = self.model.training
        try:
            with observed(self.model.eval(), self._add_attention, tokens):
                self.model.forward_features(images.to(self.device))
        finally:
            self.model.train(training)
        self.sums['images'] += len(images)

    def _add_attention(self, layer: int, attention: Tensor, mask: Tensor | None) -> None:
        a = attention.double()
        number = len(a)
        if mask is None:
            seen = a.new_full(a.shape[2:], number)
        else:
            visible = (mask == 0).to(a.dtype)  # what is masked has an attention of about e^-100
            seen = visible.sum(dim=0) * (number // len(mask))
            a = (a.unflatten(0, (-1, len(mask))) * visible[:, None]).flatten(0, 1)
        self.sums[f'attention.{layer}'] += a.sum(dim=0)
        self.sums[f'square.{layer}'] += a.square().sum(dim=0)
        self.sums[f'seen.{layer}'] += seen
        sigma = torch.linalg.svdvals(a)
        self.sums[f'sigma.{layer}'] += sigma.mean(dim=1).sum(dim=0)
        self.sums[f'matrices.{layer}'] += number

    def _add_tokens(self, layer: int, x: Tensor) -> None:
        x = x.double()
        self.sums[f'gram.{layer}'] += torch.einsum('bnc,bmc->nm', x, x) / x.shape[2]
        self.sums[f'std.{layer}'] += x.std(dim=2, unbiased=False).mean(dim=1).sum()

    def finish(self, /, **metadata: Any) -> Statistics:
        """The statistics of all that was added.

        Args:
            **metadata: What to say beside what the model says, such as ``dataset``.

        Raises:
            ValueError: Nothing was added.
        """
        sums = {name: value.cpu() for name, value in self.sums.items()}
        if not sums['images']:
            raise ValueError('There were no images to collect statistics from.')
        tensors = {}
        for layer in range(len(self.blocks)):
            seen = sums[f'seen.{layer}'].clamp(min=1)
            mean, square = sums[f'attention.{layer}'] / seen, sums[f'square.{layer}'] / seen
            variance = (square - mean.square()).clamp(min=0)
            tensors[f'attention_mean.{layer}'] = mean.float()
            tensors[f'difference.{layer}'] = variance.sum(dim=(1, 2)) / square.sum(dim=(1, 2))
            sigma = sums[f'sigma.{layer}'] / sums[f'matrices.{layer}']
            tensors[f'singular_values.{layer}'] = sigma
            if self.kind == 'deit':
                tensors[f'gram.{layer}'] = sums[f'gram.{layer}'] / sums['images']
                tensors[f'token_std.{layer}'] = sums[f'std.{layer}'] / sums['images']
        described = dict(describe_model(self.model), image_count=self.image_count)
        versions = dict(effvit_mm=__version__, torch=torch.__version__, timm=timm.__version__)
        return Statistics(tensors, {**described, 'versions': versions, **metadata})


def _num_tokens(model: nn.Module, block: nn.Module) -> int:
    """Tokens that see each other in a block."""
    if isinstance(block.attn, WindowAttention):
        return block.attn.window_area
    return model.patch_embed.num_patches + model.num_prefix_tokens


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Metadata that the model itself gives."""
    kind, blocks = attention_layers(model)
    height, width = model.patch_embed.img_size
    return dict(
        kind=kind,
        weights=weights_fingerprint(model.state_dict()),
        depth=len(blocks),
        heads=[block.attn.num_heads for block in blocks],
        dims=[block.attn.qkv.in_features for block in blocks],
        tokens=[_num_tokens(model, block) for block in blocks],
        mlp_ratio=blocks[0].mlp.fc1.out_features / blocks[0].mlp.fc1.in_features,
        patch_size=model.patch_embed.patch_size[0],
        image_size=[height, width],
    )


def collect_statistics(
    model: nn.Module, batches: Iterable[Tensor], /, **metadata: Any
) -> Statistics:
    """Statistics of a model over images, in this process and in one go.

    ``tools/compress.py stats`` adds the rest: images of a data set, several processes, resuming.

    Args:
        model: timm's VisionTransformer or SwinTransformer with its pretrained weights; is used in
            eval mode, on its device.
        batches: Images ``(B, 3, H, W)``, normalised as the model expects them.
        **metadata: What to say in the statistics' metadata, such as ``model`` and ``dataset``.

    Raises:
        ValueError: See :func:`attention_layers`; or there are no images.
    """
    sums = StatisticsSums(model)
    for images in batches:
        sums.add(images)
    return sums.finish(**metadata)
