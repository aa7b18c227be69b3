# SPDX-License-Identifier: Apache-2.0
"""Export to ONNX and ``torch.export``, and the comparison of what was exported with eager.

``tools/export.py`` is the command line of this. A file appears only after the exported model has
computed what the model in PyTorch computes, at sizes other than the one it was traced at.
"""

import inspect
import json
import os
import os.path as osp
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from torch import Tensor, nn

from ..version import __version__
from .faults import SetupError

SUFFIXES = {'onnx': '.onnx', 'torch-export': '.pt2'}
PARTS = ('backbone', 'backbone-neck', 'model')
INPUT = 'image'
METADATA_FILE = 'metadata.json'
MIN_OPSET = 17
MIN_SIDE = 33  # pixels; a side of one cell at stride 32 is a special case for the exporters
TRACED_BATCH = 2  # exporters take 1 for a constant
BATCHES = (1, 3)

Run = Callable[[Tensor], Sequence[Tensor]]


class Normalise(nn.Module):
    """What a data preprocessor does to pixels: channel order, mean, standard deviation; no padding.

    Args:
        mean: Per channel, in the order that the network sees.
        std: Per channel.
        flip: The network sees the channels in reverse order.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.register_buffer('mean', torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer('std', torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Pixels 0…255 ``(B, C, H, W)`` to what the backbone takes, of the same shape."""
        return ((image.flip(1) if self.flip else image) - self.mean) / self.std


class Part(nn.Module):
    """The part of a model that is exported, with nothing else in it.

    Heads that are left out, teachers and losses hold weights; in a file they would only take room.

    Args:
        model: A model of MMPretrain, MMDetection or MMSegmentation.
        part: One of :data:`PARTS`.
        normalise: Put before the backbone; None: the input is normalised already.
        softmax: Turn the logits of a whole classifier into scores.
    """

    def __init__(
        self,
        model: nn.Module,
        part: str,
        normalise: Normalise | None = None,
        softmax: bool = False,
    ) -> None:
        super().__init__()
        self.normalise = normalise or nn.Identity()
        self.backbone = model.backbone
        self.neck = model.neck if part != 'backbone' and model.with_neck else nn.Identity()
        self.head = model.head if part == 'model' else nn.Identity()
        self.last = nn.Softmax(dim=1) if softmax else nn.Identity()

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Images ``(B, C, H, W)`` to feature maps, or to logits or scores ``(B, classes)``."""
        out = self.last(self.head(self.neck(self.backbone(self.normalise(image)))))
        return out if isinstance(out, Tensor) else tuple(out)


@dataclass(frozen=True)
class Difference:
    """Largest difference between an exported model and eager for one input.

    Attributes:
        shape: Of the input, ``(B, C, H, W)``.
        absolute: Largest over all values of all outputs.
        relative: The same, of each output divided by that output's largest value in eager.
    """

    shape: tuple[int, ...]
    absolute: float
    relative: float


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """A tensor, or a sequence of tensors, as a tuple.

    Raises:
        SetupError: It is something else, which has no place in an exported file.
    """
    out = (out,) if isinstance(out, Tensor) else tuple(out)
    if not all(isinstance(value, Tensor) for value in out):
        raise SetupError('This part of the model returns more than tensors; export another --part.')
    return out


def choose_part(cfg: Config, part: str | None) -> str:
    """The part that is exported, by default the largest that is free of post-processing.

    Raises:
        SetupError: The model has no such part, or it cannot be exported.
    """
    classifies = cfg.default_scope == 'mmpretrain'
    has_neck = cfg.model.get('neck') is not None
    if part is None:
        part = 'model' if classifies else 'backbone-neck' if has_neck else 'backbone'
    if part == 'model' and not classifies:
        raise SetupError(
            '--part model is for classifiers of MMPretrain; of detectors and segmentors '
            'backbone-neck or backbone is exported.'
        )
    if part == 'model' and cfg.model.get('head') is None:
        raise SetupError('The config has no head: use --part backbone.')
    if part == 'backbone-neck' and not has_neck:
        raise SetupError('The config has no neck: use --part backbone.')
    return part


def choose_format(out: str, chosen: str | None) -> str:
    """The format, by the file's suffix where none is given.

    Raises:
        SetupError: The suffix says nothing, or something else than the chosen format.
    """
    suffix = osp.splitext(out)[1]
    known = ' or '.join(f'{end} ({name})' for name, end in SUFFIXES.items())
    if chosen is not None and chosen not in SUFFIXES:
        raise SetupError(f'There is no format {chosen!r}; there are {", ".join(SUFFIXES)}.')
    for name, end in SUFFIXES.items():
        if suffix == end and chosen in (None, name):
            return name
    if chosen is None:
        raise SetupError(f'{out}: the name of the file must end in {known}.')
    raise SetupError(f'--format {chosen} writes a {SUFFIXES[chosen]} file, not {out}.')


def check_opset(opset: int) -> None:
    """Refuse an opset that the exporter would not write.

    Raises:
        SetupError: Names the range.
    """
    from torch.onnx import _constants

    newest = getattr(_constants, 'ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET', _constants.ONNX_MAX_OPSET)
    if not MIN_OPSET <= opset <= newest:
        raise SetupError(f'--opset must be between {MIN_OPSET} and {newest}, not {opset}.')


def require(*names: str) -> list[ModuleType]:
    """Import modules that only the export needs.

    Raises:
        SetupError: One is not installed.
    """
    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise SetupError(
            f'Exporting to ONNX needs {" and ".join(names)} ({error}): '
            f'pip install {" ".join(names)}'
        ) from error


def preprocessing(cfg: Config) -> dict[str, Any]:
    """What the config's data preprocessor does to pixels.

    Returns:
        ``mean`` and ``std`` in the network's order of channels (None: it does not normalise),
        ``flip``: whether that order is the reverse of the loaded one, ``loaded`` and ``seen``: the
        two orders, ``'bgr'`` or ``'rgb'``, and ``pad_size_divisor`` in pixels.
    """
    # beside the model in MMPretrain's configs, inside it in the others'
    settings = cfg.model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    reverse = settings.get('rgb_to_bgr', False)
    flip = reverse or settings.get('to_rgb', False) or settings.get('bgr_to_rgb', False)
    mean, std = settings.get('mean'), settings.get('std')
    return dict(
        mean=None if mean is None else [float(value) for value in mean],
        std=None if std is None else [float(value) for value in std],
        flip=bool(flip),
        loaded='rgb' if reverse else 'bgr',
        seen='bgr' if reverse or not flip else 'rgb',
        pad_size_divisor=settings.get('pad_size_divisor', 1),
    )


def make_part(
    cfg: Config, model: nn.Module, part: str, normalise: bool = False, softmax: bool = False
) -> tuple[Part, Run]:
    """The module that is exported, and what eager computes, by the framework's own methods.

    Raises:
        SetupError: Softmax of something that has no logits, or a preprocessor that normalises
            nothing.
    """
    before = None
    if softmax and part != 'model':
        raise SetupError('--softmax is for whole classifiers: --part model.')
    if normalise:
        pixels = preprocessing(cfg)
        if pixels['mean'] is None:
            raise SetupError("--normalise: the config's data_preprocessor has no mean and std.")
        before = Normalise(pixels['mean'], pixels['std'], pixels['flip'])
    module = Part(model, part, before, softmax).eval()
    framework = {'backbone': model.backbone, 'backbone-neck': model.extract_feat, 'model': model}

    def eager(image: Tensor) -> tuple[Tensor, ...]:
        image = image if before is None else before(image)
        with torch.no_grad():
            out = as_tuple(framework[part](image))
        return tuple(o.softmax(dim=1) for o in out) if softmax else out

    return module, eager


def noise(shape: Sequence[int], pixels: bool, seed: int = 0) -> Tensor:
    """Images of noise ``(B, C, H, W)``, each with colours of its own so that no two are alike to a
    model: normalised ones of standard deviation 1, or whole pixel values 0…255."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(*shape, generator=generator)
    image += torch.randn(*shape[:2], 1, 1, generator=generator)
    return (image * 50 + 127).round().clamp(0, 255) if pixels else image


def wake_zeros(model: nn.Module) -> None:
    """Small noise for parameters that are zero everywhere; for models without a checkpoint.

    A fresh head of DeiT is zero, as are gates of residual branches: whatever an exporter did wrong
    before them, a comparison would not show it.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)


def output_names(
    outputs: Sequence[Tensor], height: int, width: int, part: str, softmax: bool
) -> list[str]:
    """``logits`` or ``scores`` of a classifier; ``stride4``, … of maps whose sides are the image's
    divided by a power of two and rounded up; else ``features0``, …"""
    if part == 'model' and len(outputs) == 1:
        return ['scores' if softmax else 'logits']
    strides = []
    for out in outputs:
        for stride in (2**i for i in range(10)):
            if tuple(out.shape[2:]) == (-(-height // stride), -(-width // stride)):
                strides.append(stride)
                break
    if len(set(strides)) == len(outputs):
        return [f'stride{stride}' for stride in strides]
    return [f'features{i}' for i in range(len(outputs))]


def verification_sizes(height: int, width: int, fixed: bool) -> list[tuple[int, int]]:
    """The sizes at which the exported model is compared: the user's, and two odd ones near it."""
    if fixed:
        return [(height, width)]
    return [
        (height, width),
        (max(MIN_SIDE, 3 * height // 4 - 1), width + 13),
        (height + 27, max(MIN_SIDE, 5 * width // 8)),
    ]


def _check_telling(eager: Run, images: Tensor, tolerance: float) -> None:
    """Refuse a model for which all images are the same: comparing would always succeed.

    Raises:
        SetupError: An output differs between images by no more than the tolerance.
    """
    for out in eager(images):
        if (out[0] - out[1]).abs().max() <= tolerance * out.abs().max():
            raise SetupError(
                'The model returns the same for different images, so nothing can be compared; '
                'are its weights trained?'
            )


def _first_words(error: BaseException) -> str:
    """An exporter's message, of which many are pages long, as part of a sentence."""
    text = ' '.join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + ' …'


def _hint(fixed: bool) -> str:
    return '' if fixed else ' (a model that is bound to one image size needs --fixed-size)'


@contextmanager
def _explained(what: str, fixed: bool) -> Iterator[None]:
    """Turn whatever an exporter or a runtime raises into one sentence."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter('ignore')  # what tracers suspect, the comparison finds out
            yield
    except SetupError:
        raise
    except Exception as error:
        raise SetupError(f'{what} failed{_hint(fixed)}: {_first_words(error)}') from error


def write_onnx(
    module: nn.Module,
    image: Tensor,
    names: Sequence[str],
    path: str,
    meta: Mapping[str, Any],
    opset: int = MIN_OPSET,
    fixed: bool = False,
) -> None:
    """Write an ONNX file with a dynamic batch size and, unless ``fixed``, dynamic image sizes.

    By way of TorchScript: it takes seconds where the exporter by way of ``torch.export`` takes
    minutes, and writes opset 17 as well.

    Args:
        module: In eval mode.
        image: The input for tracing.
        names: Of the outputs.
        path: Where to write.
        meta: Put into the file's ``metadata_props``; values that are no strings as JSON.
        opset: Version of ONNX's operators.
        fixed: Height and width are those of ``image``.
    """
    (onnx,) = require('onnx')
    axes = {0: 'batch'} if fixed else {0: 'batch', 2: 'height', 3: 'width'}
    options = {}
    if 'dynamo' in inspect.signature(torch.onnx.export).parameters:
        options['dynamo'] = False
    torch.onnx.export(
        module,
        (image,),
        path,
        opset_version=opset,
        input_names=[INPUT],
        output_names=list(names),
        dynamic_axes={INPUT: axes, **{name: {0: 'batch'} for name in names}},
        **options,
    )
    model = onnx.load(path)
    _name_output_sides(model, fixed)
    strings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()}
    onnx.helper.set_model_props(model, strings)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _name_output_sides(model: Any, fixed: bool) -> None:
    """Readable names for the sides of feature maps, which the exporter names after operators."""
    for output in model.graph.output:
        dims = output.type.tensor_type.shape.dim
        if len(dims) == 4 and not fixed:
            dims[2].dim_param = f'{output.name}_height'
            dims[3].dim_param = f'{output.name}_width'


def load_onnx(path: str) -> Run:
    """The model of an ONNX file in onnxruntime on the CPU."""
    (ort,) = require('onnxruntime')
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    return lambda x: [
        torch.from_numpy(np.asarray(o)) for o in session.run(None, {INPUT: x.numpy()})
    ]


def write_torch_export(
    module: nn.Module, image: Tensor, path: str, meta: Mapping[str, Any], fixed: bool = False
) -> None:
    """Write a ``.pt2`` file; arguments as in :func:`write_onnx`.

    Raises:
        SetupError: The model makes batch or image size a constant, or PyTorch is too old.
    """
    dim = getattr(getattr(torch.export, 'Dim', None), 'AUTO', None)
    if dim is None:
        raise SetupError(f'--format torch-export needs PyTorch 2.6, not {torch.__version__}.')
    dynamic = {0: dim} if fixed else {0: dim, 2: dim, 3: dim}
    program = torch.export.export(module, (image,), dynamic_shapes=(dynamic,))
    inputs = program.graph_signature.user_inputs
    (node,) = [n for n in program.graph.nodes if n.op == 'placeholder' and n.name in inputs]
    shape = node.meta['val'].shape
    names = {0: 'batch size', 2: 'height', 3: 'width'}
    constant = [names[axis] for axis in dynamic if isinstance(shape[axis], int)]
    if constant:
        raise SetupError(
            f'The model takes no other {" and ".join(constant)} once exported{_hint(fixed)}.'
        )
    torch.export.save(program, path, extra_files={METADATA_FILE: json.dumps(dict(meta), indent=2)})


def load_torch_export(path: str) -> Run:
    """The model of a ``.pt2`` file."""
    module = torch.export.load(path).module()

    def run(image: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return as_tuple(module(image))

    return run


def compare(run: Run, eager: Run, image: Tensor) -> Difference:
    """How far an exported model is from eager for one batch of images ``(B, C, H, W)``.

    Raises:
        SetupError: They return different shapes.
    """
    actual, expected = run(image), eager(image)
    shape = tuple(image.shape)
    if [tuple(a.shape) for a in actual] != [tuple(e.shape) for e in expected]:
        raise SetupError(
            f'For images {shape} the exported model returns {[tuple(a.shape) for a in actual]}, '
            f'eager {[tuple(e.shape) for e in expected]}; nothing was written.'
        )
    absolute = [(a - e).abs().max().item() for a, e in zip(actual, expected, strict=True)]
    smallest = torch.finfo(torch.float32).tiny  # of an output that is 0 everywhere
    scale = [max(e.abs().max().item(), smallest) for e in expected]
    relative = [a / s for a, s in zip(absolute, scale, strict=True)]
    # max() would lose a NaN that does not come first
    return Difference(shape, float(np.max(absolute)), float(np.max(relative)))


def describe(
    cfg: Config, name: str, part: str, checkpoint: str | None, normalise: bool, outputs: list[str]
) -> dict[str, Any]:
    """Meta data of an exported file: where it comes from and what its input must be like."""
    pixels = preprocessing(cfg)
    versions = dict(effvit_mm=__version__, torch=torch.__version__)
    versions[cfg.default_scope] = import_module(cfg.default_scope).__version__
    with suppress(metadata.PackageNotFoundError):
        versions['onnx'] = metadata.version('onnx')
    return dict(
        config=name,
        checkpoint=osp.basename(checkpoint) if checkpoint else '',
        part=part,
        versions=versions,
        input_names=[INPUT],
        output_names=outputs,
        normalisation='inside' if normalise else 'before',
        mean=pixels['mean'],
        std=pixels['std'],
        channel_order=pixels['loaded' if normalise else 'seen'],
        pad_size_divisor=pixels['pad_size_divisor'],
    )


@contextmanager
def written_whole(out: str) -> Iterator[str]:
    """A path of the same suffix to write to; it becomes ``out`` when all went well, else nothing
    is left and what ``out`` was before remains.

    Raises:
        SetupError: The file cannot be written there.
    """
    folder = osp.dirname(osp.abspath(out))
    try:
        if osp.isdir(out):
            raise IsADirectoryError(None, 'it is a folder')
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='.export-', dir=folder) as scratch:
            path = osp.join(scratch, osp.basename(out))
            yield path
            os.replace(path, out)
    except OSError as error:
        raise SetupError(f'{out} cannot be written: {error.strerror or error}.') from error


def export(
    cfg: Config,
    model: nn.Module,
    out: str,
    name: str,
    format: str = 'onnx',
    part: str = 'backbone',
    size: tuple[int, int] = (224, 224),
    fixed: bool = False,
    opset: int = MIN_OPSET,
    normalise: bool = False,
    softmax: bool = False,
    tolerance: float = 1e-4,
    checkpoint: str | None = None,
    report: Callable[[Difference], None] = lambda difference: None,
) -> dict[str, Any]:
    """Export a part of a model, compare the written file with eager, and only then keep it.

    Args:
        cfg: The config, its framework imported.
        model: The config's model in eval mode on the CPU.
        out: The file.
        name: The config's name, for the meta data.
        format: ``'onnx'`` or ``'torch-export'``.
        part: One of :data:`PARTS`.
        size: Height and width in pixels to compare at, beside others; the only one with ``fixed``.
        fixed: Make height and width constants.
        opset: Version of ONNX's operators.
        normalise: Take pixels 0…255 and normalise them in the exported model.
        softmax: Return a classifier's scores instead of its logits.
        tolerance: Largest relative difference, see :class:`Difference`.
        checkpoint: Where the weights come from, for the meta data.
        report: Called with the difference for each size and batch size.

    Returns:
        The meta data in the file.

    Raises:
        SetupError: The export failed, the exported model differs from eager, or the file cannot be
            written. No file is left.
    """
    module, eager = make_part(cfg, model, part, normalise, softmax)
    channels = getattr(model.backbone, 'in_channels', 3)
    height, width = size
    if not fixed:  # none of the sizes that are compared
        height, width = height + 32, width + 64
    image = noise((TRACED_BATCH, channels, height, width), normalise)
    with _explained('The model itself', fixed):
        names = output_names(eager(image), height, width, part, softmax)
        _check_telling(make_part(cfg, model, part, normalise)[1], image, tolerance)
    meta = describe(cfg, name, part, checkpoint, normalise, names)
    with written_whole(out) as path:
        with _explained(f'The export to {format}', fixed):
            if format == 'onnx':
                write_onnx(module, image, names, path, meta, opset, fixed)
            else:
                write_torch_export(module, image, path, meta, fixed)
        with _explained('Loading the exported file', fixed):
            run = load_onnx(path) if format == 'onnx' else load_torch_export(path)
        for sides in verification_sizes(*size, fixed):
            for batch in BATCHES:
                shape = (batch, channels, *sides)
                with _explained(f'Running the exported model for images {shape}', fixed):
                    difference = compare(run, eager, noise(shape, normalise, seed=1))
                report(difference)
                if not difference.relative <= tolerance:  # also where it is not a number
                    raise SetupError(
                        f'For images {shape} the exported model differs from eager by '
                        f'{difference.relative:.1e} of the largest value, more than --tolerance '
                        f'{tolerance:g}{_hint(fixed)}; nothing was written.'
                    )
    return meta
