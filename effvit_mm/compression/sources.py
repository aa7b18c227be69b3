# SPDX-License-Identifier: Apache-2.0
"""The models that statistics are collected from, and the images.

A model is one of timm, by name, or the backbone of an MMPretrain config, rebuilt in timm. Images
come from a folder or from a data set of an MMPretrain config. Between the two they are RGB, from 0
to 255; how they are normalised belongs to the model.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, MODELS, DefaultScope
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..engine.faults import UNREADABLE, SetupError
from ..engine.launch import check_data, datasets_in, load_config
from ..models.checkpoint import read_state_dict
from .keys import to_timm_keys

IMAGE_SUFFIXES = frozenset({'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'})


@dataclass
class Original:
    """A pretrained model.

    Attributes:
        name: What the user called it.
        model: timm's VisionTransformer or SwinTransformer without a head, in eval mode.
        mean: Of the channels, in the model's order, from 0 to 255.
        std: The same.
        rgb: Whether the model's order is RGB, and not BGR.
        prepare: From the path of an image to the image ``(3, H, W)``, RGB, from 0 to 255.
    """

    name: str
    model: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rgb: bool
    prepare: Callable[[str], Tensor]

    def normalise(self, images: Tensor) -> Tensor:
        """RGB images ``(B, 3, H, W)`` from 0 to 255 to what the model takes."""
        images = images.float() if self.rgb else images.float().flip(1)
        mean, std = (images.new_tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (images - mean) / std


def read_config(path: str, options: dict[str, Any] | None) -> Config:
    """An MMPretrain config.

    Raises:
        SetupError: It is not there, not MMPretrain's, or MMPretrain is not installed.
    """
    arguments = argparse.Namespace(config=path, cfg_options=options, launcher='none', work_dir=None)
    cfg = load_config(arguments)
    if cfg.default_scope != 'mmpretrain':
        raise SetupError(f'{path} is a config of {cfg.default_scope}; it must be of MMPretrain.')
    return cfg


def load_original(
    name: str,
    checkpoint: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> Original:
    """A pretrained model.

    Args:
        name: A model of timm, or an MMPretrain config.
        checkpoint: Its weights, under any of the names that :func:`to_timm_keys` knows. None: the
            pretrained ones of timm.
        model_kwargs: Arguments for timm's model.
        cfg_options: Settings of the config to override.

    Raises:
        SetupError: There is no such model or checkpoint, or the two do not fit.
    """
    if name.endswith('.py'):
        if checkpoint is None:
            raise SetupError(f'The weights of {name} are needed: give a checkpoint.')
        original = _from_config(name, checkpoint, cfg_options)
        if model_kwargs:
            raise SetupError('--model-kwargs are for models of timm; a config has --cfg-options.')
        return original
    kwargs = {**(model_kwargs or {}), 'num_classes': 0}
    try:
        model = timm.create_model(name, pretrained=checkpoint is None, **kwargs)
    except Exception as error:  # whatever timm and its downloads stumble over
        reason = ' '.join(str(error).split())[:200]
        advice = '' if checkpoint else '; without a connection, give a checkpoint'
        raise SetupError(f'timm cannot make {name}: {reason}{advice}') from error
    if checkpoint is not None:
        _load(model, _read_weights(checkpoint), checkpoint)
    data = resolve_model_data_config(model)
    size = getattr(model.patch_embed, 'img_size', None) if hasattr(model, 'patch_embed') else None
    data['input_size'] = (3, *(size or data['input_size'][1:]))
    transform = create_transform(**data, is_training=False, normalize=False)
    mean, std = (tuple(255 * v for v in data[key]) for key in ('mean', 'std'))
    return Original(name, model.eval(), mean, std, True, partial(_open_image, transform))


def _open_image(transform: Callable, path: str) -> Tensor:
    with Image.open(path) as image:
        return transform(image.convert('RGB'))


def _read_weights(checkpoint: str) -> dict[str, Tensor]:
    try:
        return to_timm_keys(read_state_dict(checkpoint))
    except (OSError, ValueError) as error:
        raise SetupError(str(error)) from error


def _load(model: nn.Module, state: dict[str, Tensor], checkpoint: str) -> None:
    """Load all weights but those of the head."""
    state = {name: value for name, value in state.items() if not name.startswith('head.')}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = ' '.join(str(error).split())[:200]
        raise SetupError(f'{checkpoint} does not fit the model: {reason} …') from error


def _from_config(path: str, checkpoint: str, cfg_options: dict[str, Any] | None) -> Original:
    cfg = read_config(path, cfg_options)
    settings = {k: v for k, v in cfg.model.backbone.items() if k != 'init_cfg'}
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        backbone = MODELS.build(settings)
    backbone.eval()  # returns None
    model = _in_timm(backbone, path).eval()
    state = _read_weights(checkpoint)
    _load(model, state, checkpoint)
    _check_equal(backbone, model, checkpoint, path)
    preprocessor = preprocessor_settings(cfg)
    mean = tuple(preprocessor.get('mean') or (0.0,) * 3)
    std = tuple(preprocessor.get('std') or (1.0,) * 3)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        pipeline = Compose(evaluation_pipeline(cfg))
    rgb = bool(preprocessor.get('to_rgb', False))
    return Original(path, model, mean, std, rgb, partial(_run_pipeline, pipeline))


def preprocessor_settings(cfg: Config) -> dict[str, Any]:
    """How a config of MMPretrain normalises images: beside the model or in it."""
    return cfg.get('data_preprocessor') or cfg.model.get('data_preprocessor') or {}


def build_preprocessor(cfg: Config) -> nn.Module:
    """The data preprocessor of a config of MMPretrain."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build({'type': 'ClsDataPreprocessor', **preprocessor_settings(cfg)})


def evaluation_pipeline(cfg: Config) -> list[dict]:
    """How a config prepares test images: without chance."""
    for split in ('test', 'val'):
        if cfg.get(f'{split}_dataloader'):
            return next(datasets_in(cfg[f'{split}_dataloader'].dataset)).pipeline
    raise SetupError(f'{cfg.filename} has no test_dataloader, whose pipeline is to be used.')


def _run_pipeline(pipeline: Compose, path: str) -> Tensor:
    return pipeline(dict(img_path=path))['inputs'].flip(0)  # OpenCV reads BGR


def _in_timm(backbone: nn.Module, path: str) -> nn.Module:
    """A model of timm with the dimensions of a backbone of MMPretrain."""
    from mmpretrain.models import SwinTransformer as MMSwin
    from mmpretrain.models import VisionTransformer as MMViT

    if type(backbone) is MMViT:
        layer, projection = backbone.layers[0], backbone.patch_embed.projection
        return VisionTransformer(
            img_size=backbone.img_size,
            patch_size=projection.kernel_size,
            in_chans=projection.in_channels,
            embed_dim=backbone.embed_dims,
            depth=backbone.num_layers,
            num_heads=layer.attn.num_heads,
            mlp_ratio=backbone.arch_settings['feedforward_channels'] / backbone.embed_dims,
            qkv_bias=layer.attn.qkv.bias is not None,
            norm_layer=partial(nn.LayerNorm, eps=layer.ln1.eps),
            num_classes=0,
        )
    if type(backbone) is MMSwin:
        block, projection = backbone.stages[0].blocks[0], backbone.patch_embed.projection
        return SwinTransformer(
            img_size=tuple(s * projection.stride[0] for s in backbone.patch_resolution),
            patch_size=projection.kernel_size[0],
            in_chans=projection.in_channels,
            embed_dim=backbone.embed_dims,
            depths=backbone.depths,
            num_heads=backbone.num_heads,
            window_size=block.attn.window_size,
            norm_layer=partial(nn.LayerNorm, eps=block.norm1.eps),
            num_classes=0,
        )
    raise SetupError(
        f'The backbone of {path} is {type(backbone).__name__}; statistics are collected from '
        "MMPretrain's VisionTransformer and SwinTransformer."
    )


@torch.no_grad()
def _check_equal(backbone: nn.Module, model: nn.Module, checkpoint: str, path: str) -> None:
    """Refuse a backbone that has something which timm's model has not."""
    state = read_state_dict(checkpoint)
    prefix = 'backbone.' if any(name.startswith('backbone.') for name in state) else ''
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if not set(backbone.state_dict()) & set(own):
        return  # weights under the names of another framework: there is nothing to compare with
    backbone = copy.deepcopy(backbone)
    backbone.load_state_dict(own, strict=False)
    blocks = backbone.layers if hasattr(backbone, 'layers') else backbone.stages[-1].blocks
    theirs = model.blocks if hasattr(model, 'blocks') else model.layers[-1].blocks
    seen = []
    for block in (blocks[-1], theirs[-1]):
        block_handle = block.register_forward_hook(lambda _, args, out: seen.append(out))
        (backbone if block is blocks[-1] else model)(
            torch.randn(1, 3, *model.patch_embed.img_size, generator=torch.Generator())
        )
        block_handle.remove()
    expected, found = (tokens.reshape(-1) for tokens in seen)
    if expected.shape != found.shape or (expected - found).norm() > 1e-3 * expected.norm():
        raise SetupError(
            f'The backbone of {path} has something that neither DeiT nor Swin has: rebuilt in '
            'timm it computes something else.'
        )


class Images(Dataset):
    """RGB images ``(3, H, W)``, from 0 to 255, all of one size.

    Args:
        name: What the user called them.
        count: How many there are.
        load: From an index to an image, and what to call it.
        size: Their height and width.
    """

    def __init__(
        self,
        name: str,
        count: int,
        load: Callable[[int], tuple[Tensor, str]],
        size: tuple[int, int],
    ) -> None:
        self.name, self.count, self.load, self.size = name, count, load, tuple(size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        image, path = self.load(index)
        if tuple(image.shape[1:]) != self.size:
            raise SetupError(
                f'{path} is {image.shape[2]} x {image.shape[1]} pixels after the test pipeline, '
                f'but the model takes {self.size[1]} x {self.size[0]}.'
            )
        return image


def folder_images(folder: str, original: Original) -> Images:
    """All images in a folder and those below it, prepared as the model's own are.

    Raises:
        SetupError: There is no such folder, or no image in it.
    """
    if not Path(folder).is_dir():
        raise SetupError(f'There is no folder {folder}.')
    paths = sorted(str(p) for p in Path(folder).rglob('*') if p.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise SetupError(f'There is no image in {folder} ({", ".join(sorted(IMAGE_SUFFIXES))}).')
    load = partial(_load_path, original.prepare, paths)
    return Images(folder, len(paths), load, original.model.patch_embed.img_size)


def _load_path(prepare: Callable[[str], Tensor], paths: list[str], i: int) -> tuple[Tensor, str]:
    try:
        return prepare(paths[i]), paths[i]
    except UNREADABLE as error:
        raise SetupError(f'{paths[i]} is not a readable image: {error}') from error


def config_images(
    path: str, split: str, original: Original, cfg_options: dict[str, Any] | None = None
) -> Images:
    """The images of a data set of an MMPretrain config, prepared by its test pipeline.

    Raises:
        SetupError: There is no such data set, or its data are not there.
    """
    cfg = read_config(path, cfg_options)
    loader = cfg.get(f'{split}_dataloader')
    if not loader:
        raise SetupError(f'{path} has no {split}_dataloader.')
    check_data(Config({f'{split}_dataloader': loader}), split)
    settings = copy.deepcopy(loader.dataset)
    set_pipeline(settings, evaluation_pipeline(cfg))
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        dataset = DATASETS.build(settings)
    load = partial(_load_item, dataset)
    return Images(f'{path} {split}', len(dataset), load, original.model.patch_embed.img_size)


def set_pipeline(dataset: dict, pipeline: list[dict]) -> None:
    """Give a dataset a pipeline, also below RepeatDataset, ConcatDataset and the like."""
    for inner in datasets_in(dataset):
        inner['pipeline'] = pipeline


def _load_item(dataset: Dataset, i: int) -> tuple[Tensor, str]:
    path = dataset.get_data_info(i)['img_path'] if hasattr(dataset, 'get_data_info') else i
    try:
        return dataset[i]['inputs'].flip(0), f'{path}'  # OpenCV reads BGR
    except UNREADABLE as error:
        raise SetupError(f'Image {path} cannot be loaded: {error}') from error
