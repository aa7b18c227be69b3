# SPDX-License-Identifier: Apache-2.0
"""What all backbones promise and no paper is about: named architectures, outputs, freezing,
checkpoints, layer depths. A family derives from :class:`PyramidBackbone` and adds its stages."""

import copy
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checkpoint import CheckpointError, read_state_dict, select_prefix, split_init_cfg
from ..layers.utils import TORCH_2_4, ConditionalPositionEncoding, is_captured, tokens_to_map

NUM_STAGES = 4
STRIDES = (4, 8, 16, 32)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def as_fraction(value: Any, field: str) -> Fraction:
    """A ratio given as number, ``'1/16'`` or ``(1, 16)`` as an exact fraction in (0, 1]."""
    try:
        fraction = (
            Fraction(*value)
            if isinstance(value, Sequence) and not isinstance(value, str)
            else Fraction(value).limit_denominator(4096)
        )
    except (TypeError, ValueError, ZeroDivisionError):
        raise ValueError(f"{field}: '{value}' is not a ratio such as 0.25 or '1/4'.") from None
    if not 0 < fraction <= 1:
        raise ValueError(f'{field}: {value} is not between 0 and 1.')
    return fraction


def init_vit_weights(module: nn.Module) -> None:
    """Initialisation shared by the families: truncated normal (0.02) linear layers, zero biases;
    fan-out normal convolutions, torch's biases. For :meth:`torch.nn.Module.apply`.

    Were the biases of convolutions zero, so would be the tokens of padding and of blank images, and
    each norm on their way would multiply gradients by 1000: beyond float32 in an untrained LaViT.

    Position encodings keep torch's own initialisation, which adds a third of the variance of what
    goes in: a fan-out normal one multiplies the residual stream's scale by 1.6 per block.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
        nn.init.normal_(module.weight, std=(2.0 * module.groups / fan_out) ** 0.5)
        if module.bias is not None:
            bound = module.weight[0].numel() ** -0.5
            nn.init.uniform_(module.bias, -bound, bound)
    elif isinstance(module, ConditionalPositionEncoding):  # after the convolution inside it
        nn.init.kaiming_uniform_(module.proj.weight, a=5**0.5)


class PyramidBackbone(BaseModule):
    """Base of the four-stage backbones.

    A subclass calls ``super().__init__``, builds ``self.stages`` (``num_stages`` modules, each with
    a ``patch_embed`` and ``blocks``; no more than ``out_indices`` need), calls :meth:`finish` last,
    and returns maps made by :meth:`output` from its forward, which takes images
    ``(B, in_channels, H, W)`` and, in our families,

    * ``out_indices``: which stages' maps are returned this time, None: those that the backbone was
      made for. No stage after the last of them runs. They rise, and have norms unless
    * ``normed`` is False, for maps as the stages leave them (Integrated-DeiT, whose maps are made
      by more than a norm, has no such argument).

    Args:
        arch: Name of an architecture in ``arch_zoo``, or a dict of its fields. With the key
            ``base`` the dict starts from a named one and changes only the fields it gives.
        in_channels: Channels of the image.
        out_indices: Which stages' features are returned, in 0…3.
        frozen_stages: -1 freezes nothing, 0 the first patch embedding, ``k`` also the first ``k``
            stages with their output norms. Frozen at construction.
        norm_eval: Keep norm layers in eval mode while training.
        with_cp: Checkpoint activations block by block: less memory, more time.
        init_cfg: mmengine initialisation config. ``dict(type='Pretrained', checkpoint=…,
            prefix='backbone.')`` takes the backbone out of a classifier's checkpoint.

    Attributes:
        out_channels (list[int]): Channels of each returned feature map.
        out_strides (list[int]): Image pixels per cell of each returned feature map.
        stage_channels (list[int]): Channels of all four stages, returned or not.
    """

    arch_zoo: ClassVar[dict[str, dict[str, Any]]]
    arch_defaults: ClassVar[dict[str, Any]] = {}
    per_stage_fields: ClassVar[tuple[str, ...]] = ()
    #: parts of the names of parameters, other than norms and biases, that weight decay would harm:
    #: tokens, and differences from an identity. For the keys of ``paramwise_cfg.custom_keys``.
    no_decay_keys: ClassVar[tuple[str, ...]] = ()
    #: names of weights that a checkpoint may lack, and of those that show another architecture
    #: where only the checkpoint has them; regular expressions
    may_lack: ClassVar[str] = r'norm\d\.'
    must_have: ClassVar[str] = r'stages\.(\d+)\.'

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not TORCH_2_4 and 'forward' in vars(cls):
            # where a compiler as old as PyTorch 2.1's breaks a graph, it changes LaViT's results
            cls.forward = torch.compiler.disable(cls.forward)

    def __init__(
        self,
        arch: str | dict,
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.arch_settings = self.resolve_arch(arch)
        out_indices = tuple(out_indices)
        if not out_indices or not all(
            isinstance(i, int) and 0 <= i < NUM_STAGES for i in out_indices
        ):
            raise ValueError(f'out_indices must be among 0, 1, 2, 3, not {out_indices}.')
        if len(set(out_indices)) != len(out_indices) or list(out_indices) != sorted(out_indices):
            raise ValueError(f'out_indices must rise without repetition, not {out_indices}.')
        self.num_stages = max(out_indices) + 1
        if not -1 <= frozen_stages <= self.num_stages:
            raise ValueError(
                f'frozen_stages must be between -1 and {self.num_stages}, not {frozen_stages}.'
            )
        self.in_channels = in_channels
        self.out_indices = out_indices
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

    @classmethod
    def resolve_arch(cls, arch: str | dict) -> dict[str, Any]:
        """All fields of an architecture given by name or dict.

        Raises:
            ValueError: The name is unknown, or a field is missing, unknown or of the wrong length.
        """
        names = ', '.join(repr(name) for name in cls.arch_zoo)

        def named(name: Any) -> dict[str, Any]:
            if not isinstance(name, str) or name not in cls.arch_zoo:
                raise ValueError(
                    f'{cls.__name__} has no architecture {name!r}; there are {names}, '
                    'or give a dict of fields.'
                )
            return cls.arch_zoo[name]

        if isinstance(arch, dict):
            fields = {**(named(arch['base']) if 'base' in arch else {}), **arch}
            fields.pop('base', None)
        else:
            fields = dict(named(arch))
        required = next(iter(cls.arch_zoo.values())).keys()
        missing = [field for field in required if field not in fields]
        if missing:
            raise ValueError(
                f'{cls.__name__}: the architecture lacks the field {missing[0]!r}; '
                f'give it, or start from a named one with base={names.split(",")[0]}.'
            )
        known = [*required, *(field for field in cls.arch_defaults if field not in required)]
        extra = [field for field in fields if field not in known]
        if extra:
            raise ValueError(
                f'{cls.__name__}: there is no architecture field {extra[0]!r}; '
                f'there are {", ".join(known)}.'
            )
        fields = copy.deepcopy({**cls.arch_defaults, **fields})
        for field in cls.per_stage_fields:
            if not isinstance(fields[field], Sequence) or len(fields[field]) != NUM_STAGES:
                raise ValueError(
                    f'{cls.__name__}: the field {field!r} needs {NUM_STAGES} values, one per '
                    f'stage, not {fields[field]!r}.'
                )
        return fields

    def finish(self, channels: Sequence[int], strides: Sequence[int] = STRIDES) -> None:
        """Last step of construction: output norms, initialisation, freezing.

        Args:
            channels: Channels of every stage.
            strides: Stride of every stage in pixels.
        """
        self.stage_channels = list(channels)
        self.out_channels = [channels[i] for i in self.out_indices]
        self.out_strides = [strides[i] for i in self.out_indices]
        for i in self.out_indices:
            self.add_module(f'norm{i}', nn.LayerNorm(channels[i], eps=1e-6))
        self.apply(init_vit_weights)
        for module in self._frozen_modules():
            module.requires_grad_(False)

    def _frozen_modules(self) -> Iterator[nn.Module]:
        if self.frozen_stages >= 0:
            yield self.stages[0].patch_embed
        for i in range(self.frozen_stages):
            yield self.stages[i]
            if i in self.out_indices:
                yield getattr(self, f'norm{i}')

    def train(self, mode: bool = True) -> 'PyramidBackbone':
        """Set the mode; frozen stages, and norms with ``norm_eval``, stay in eval."""
        super().train(mode)
        if mode:
            for module in self._frozen_modules():
                module.eval()
            if self.norm_eval:
                for module in self.modules():
                    if isinstance(module, NORMS):
                        module.eval()
        return self

    def wanted_maps(
        self, out_indices: Sequence[int] | None, normed: bool = True
    ) -> tuple[int, ...]:
        """What a forward returns, by its arguments, see the class.

        Raises:
            ValueError: There are no such maps.
        """
        if out_indices is None:
            return self.out_indices
        there = self.out_indices if normed else tuple(range(self.num_stages))
        wanted = tuple(i for i in there if i in out_indices)
        if not wanted or wanted != tuple(out_indices):
            raise ValueError(
                f'{type(self).__name__}: out_indices must rise and be among {there}, not '
                f'{tuple(out_indices)}.'
            )
        return wanted

    def check_image(self, x: Tensor) -> None:
        """Refuse what is not a batch of images with ``in_channels`` channels."""
        name = type(self).__name__
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'{name} takes images (B, {self.in_channels}, H, W), not {tuple(x.shape)}.'
            )
        if not x.is_floating_point():
            raise ValueError(
                f'{name} takes normalised images in floating point, as a data_preprocessor gives '
                f'them, not {x.dtype}.'
            )
        if not is_captured() and 0 in x.shape:
            raise ValueError(f'{name} takes at least one image and pixel, not {tuple(x.shape)}.')

    def run_block(self, block: nn.Module, *args: Any) -> Any:
        """Call a block, checkpointing its activations with ``with_cp``."""
        if self.with_cp and self.training and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def output(self, i: int, tokens: Tensor, height: int, width: int) -> Tensor:
        """Feature map of stage ``i``: tokens ``(B, H*W, C)``, normed, to ``(B, C, H, W)``."""
        return self.bare_output(i, getattr(self, f'norm{i}')(tokens), height, width)

    def bare_output(self, i: int, tokens: Tensor, height: int, width: int) -> Tensor:
        """Feature map of stage ``i`` as the stage leaves it, without the norm and what else
        :meth:`output` does."""
        return tokens_to_map(tokens, height, width).contiguous()

    def all_blocks(self) -> list[nn.Module]:
        """The blocks of all stages in the order in which they run."""
        return [block for stage in self.stages for block in stage.blocks]

    def get_layer_depth(self, param_name: str, prefix: str = 'backbone.') -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning-rate decay.

        Args:
            param_name: The parameter's name, with ``prefix``.
            prefix: The backbone's prefix in the top model.

        Returns:
            The depth, and the number of depths: the stem is 0, block ``j`` (counted through all
            stages) ``j + 1``, what leads into a stage counts as its first block, and output norms
            and what is not in the backbone have the last depth.
        """
        depths = [len(stage.blocks) for stage in self.stages]
        num_depths = sum(depths) + 2
        name = param_name.removeprefix(prefix)
        if not param_name.startswith(prefix) or not name.startswith('stages.'):
            return num_depths - 1, num_depths
        _, stage, rest = name.split('.', 2)
        before = sum(depths[: int(stage)])
        block = re.match(r'blocks\.(\d+)\.', rest)
        if block:
            return before + int(block[1]) + 1, num_depths
        return (before + 1 if int(stage) else 0), num_depths

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says; a checkpoint that does not fit is an error."""
        initialised, original = self.is_init, self.init_cfg
        pretrained, rest = split_init_cfg(original)
        self.init_cfg = rest or None
        super().init_weights()
        self.init_cfg = original
        for config in [] if initialised else pretrained:
            self.load_pretrained(config['checkpoint'], config.get('prefix'))

    def adapt_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of a checkpoint's state dict is loaded; a family may rename."""
        return state

    def _is_surplus(self, key: str) -> bool:
        """Whether a weight that only the checkpoint has shows another architecture."""
        part = re.match(self.must_have, key)
        return part is not None and int(part[1]) < self.num_stages

    def refuse_surplus(self, state: dict[str, Tensor], path: str) -> None:
        """Refuse weights of blocks that this architecture has not; arguments as in
        :meth:`load_weights`.

        Raises:
            CheckpointError: There are some.
        """
        own = self.state_dict()
        surplus = [key for key in state if key not in own and self._is_surplus(key)]
        if surplus:
            raise CheckpointError(
                f'{path} is of another architecture than this {type(self).__name__}: it also has '
                f'{surplus[0]} and {len(surplus) - 1} more.'
            )

    def load_pretrained(self, path: str, prefix: str | None = None) -> None:
        """Load weights from a checkpoint and log what was not loaded.

        Output norms that the checkpoint lacks, and stages or heads that this backbone lacks, are
        no error: a classifier's checkpoint has only the last norm and has a head.

        Args:
            path: Local path or URL.
            prefix: The backbone's prefix in the checkpoint, ``'backbone.'`` in a classifier's.

        Raises:
            CheckpointError: Nothing matched, or the checkpoint is of another architecture.
        """
        self.load_weights(select_prefix(read_state_dict(path), prefix, path), path)

    def load_weights(self, state: dict[str, Tensor], path: str) -> None:
        """Load a checkpoint's state dict as :meth:`load_pretrained` does.

        Args:
            state: The weights, named as in a backbone.
            path: What to call them in messages.

        Raises:
            CheckpointError: Nothing matched, or they are of another architecture.
        """
        state = self.adapt_state(state)
        own = self.state_dict()
        matched = [key for key in state if key in own]
        if not matched:
            nested = any(key.startswith('backbone.') for key in state)
            hint = " Its keys start with 'backbone.': set prefix='backbone.'." if nested else ''
            raise CheckpointError(f'{path} matches no weight of {type(self).__name__}.{hint}')
        different = f'{path} is of another architecture than this {type(self).__name__}'
        for key in matched:
            if state[key].shape != own[key].shape:
                raise CheckpointError(
                    f'{different}: {key} is {tuple(state[key].shape)}, not {tuple(own[key].shape)}.'
                )
        missing = [key for key in own if key not in state]
        unexpected = [key for key in state if key not in own]
        lacking = [key for key in missing if not re.match(self.may_lack, key)]
        if lacking:
            raise CheckpointError(
                f'{different}: it lacks {lacking[0]} and {len(lacking) - 1} more.'
            )
        self.refuse_surplus(state, path)
        self.load_state_dict(state, strict=False)
        left_out = f'; left at their initialisation: {", ".join(missing)}' if missing else ''
        unused = f'; not used: {", ".join(unexpected)}' if unexpected else ''
        print_log(
            f'{type(self).__name__}: loaded {len(matched)} tensors from {path}{left_out}{unused}',
            logger='current',
        )
