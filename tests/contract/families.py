# SPDX-License-Identifier: Apache-2.0
"""The backbones that the contract is run over. A new family joins by one entry in ``FAMILIES``."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from effvit_mm import DGSSASwin, IntegratedDeiT, LaViT, PartialFormer
from effvit_mm.models.backbones import PyramidBackbone
from effvit_mm.models.layers.grid import Tiling
from effvit_mm.models.layers.token_aggregation import linear_start

STRIDES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Budget:
    """Published cost of a named architecture as a 1000-way classifier at 224 x 224."""

    gmacs: float | None = None
    params: float | None = None  # millions


@dataclass(frozen=True)
class Family:
    """What the contract has to know about a family beyond its class.

    Args:
        cls: The backbone's class.
        small: A fast ``arch`` dict with everything switched on, and two blocks in the second stage.
        indivisible: Fields that, put into ``small``, let heads not divide channels.
        budgets: Published cost of every named architecture; empty where nothing is published.
        mirror: Makes a model mirror-symmetric in place, where a mechanism can be: convolution
            kernels are symmetrised already, matrices bound to a grid are left to this function.
            None: not possible, then nothing is checked by mirroring.
        poison_padding: For families whose tiles add cells beyond the map that must not count
            whatever they hold. Context in which they hold garbage. (LaViT's count and are 0, which
            tests/models/layers/test_grid.py checks.)
        ablations: Fields that, put into ``small``, each switch another part on or off.
        stem: How the names of the parameters before the first block start.
        stage: Of the stages 0 to 3 of ``small``, how the names of their parameters start.
        block: How the names of a block's parameters start; no stage has more blocks than that one.
        settle: Brings a new backbone to where training starts, in place, where that is not how it
            is constructed.
    """

    cls: type[PyramidBackbone]
    small: dict[str, Any]
    indivisible: dict[str, Any]
    budgets: dict[str, Budget] = field(default_factory=dict)
    mirror: Callable[[nn.Module], None] | None = None
    poison_padding: Callable[[nn.Module], AbstractContextManager] | None = None
    ablations: tuple[dict[str, Any], ...] = ()
    stem: tuple[str, ...] = ('stages.0.patch_embed.',)
    stage: tuple[tuple[str, ...], ...] = tuple((f'stages.{i}.', f'norm{i}.') for i in range(4))
    block: str = 'stages.1.blocks.1.'
    settle: Callable[[nn.Module], None] = lambda model: None

    @property
    def name(self) -> str:
        return self.cls.__name__

    def config(self, **kwargs: Any) -> dict[str, Any]:
        """Config of the small backbone."""
        return dict(type=self.name, arch=copy.deepcopy(self.small), **kwargs)

    def build(self, awake: bool = True, **kwargs: Any) -> PyramidBackbone:
        """The small backbone in eval mode, awakened unless told otherwise; always the same."""
        torch.manual_seed(0)
        model = self.cls(arch=copy.deepcopy(self.small), **kwargs).eval()
        self.settle(model)
        return awaken(model) if awake else model

    def is_frozen(self, name: str, frozen_stages: int) -> bool:
        """Whether what has this name is part of what ``frozen_stages`` freezes."""
        frozen = [start for stage in self.stage[: max(0, frozen_stages)] for start in stage]
        return f'{name}.'.startswith((*frozen, *(self.stem if frozen_stages >= 0 else ())))


def awaken(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Weights of a size that training would give them, so that nothing is hidden by being zero.

    Fresh transformers are almost the identity; errors in what their blocks add would not show.

    Args:
        model: Changed in place.
        gain: Standard deviation of a linear layer's output for inputs of standard deviation 1.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator, dtype=p.dtype)

    with torch.no_grad():
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if name == 'weight' and isinstance(module, (nn.Linear, nn.Conv2d)):
                    scale = gain if isinstance(module, nn.Linear) else 1.0
                    p.copy_(noise(p) * scale / p[0].numel() ** 0.5)
                else:
                    p.add_(noise(p), alpha=0.1)
    return model


def image(
    height: int, width: int, batch: int = 2, channels: int = 3, seed: int = 0, **kwargs: Any
) -> Tensor:
    """A batch of noise images ``(batch, channels, height, width)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, height, width, generator=generator, **kwargs)


def random_loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar that every feature takes part in, each with another weight."""
    return sum((o * image(*o.shape[2:], *o.shape[:2]).to(o)).mean() for o in outputs)


@contextmanager
def poison_windows(model: nn.Module) -> Iterator[None]:
    """Put garbage into those cells of the windows that are beyond the map, random garbage: what is
    the same in all channels a norm would take away."""
    cut = Tiling.cut

    def poisoned(self: Tiling, x: Tensor) -> Tensor:
        tiles = cut(self, x)
        if self.tile == (2, 2):  # patch merging sees zeros there, as Swin's does
            return tiles
        outside = ~self.inside().repeat(self.batch, 1)[..., None]
        return torch.where(outside, 30 * torch.randn_like(tiles), tiles)

    with patch.object(Tiling, 'cut', poisoned):
        yield


def start_linear(model: IntegratedDeiT) -> None:
    """Start the GLADs as the compression does, for tokens that are not alike."""
    for glad in model.aggregations.values():
        gram = torch.eye(glad.num_in)
        glad.load_state_dict(linear_start(gram, 1.0, glad.num_out, glad.dim))
    model.reset_unprojections()


FAMILIES = [
    Family(
        PartialFormer,
        small=dict(base_channels=16, depths=(1, 2, 1, 1), num_heads=(1, 2, 4, 8)),
        indivisible=dict(num_heads=(3, 2, 4, 8)),
        # b0, b3 and b4 are published; b1 and b2 lie evenly between on a logarithmic scale
        budgets=dict(
            b0=Budget(0.4), b1=Budget(0.82), b2=Budget(1.67), b3=Budget(3.4, 36.0), b4=Budget(6.8)
        ),
        mirror=lambda model: None,
        ablations=(
            dict(abstract_token=False),
            dict(head_expansion=0),
            dict(sqa='linear'),
            dict(sqa='none'),
            dict(foreground_ratios=(1, 1, 1, 1)),
            dict(channel_multipliers=(1, 2, 3, 4)),
        ),
    ),
    Family(
        LaViT,
        small=dict(dims=(16, 16, 32, 32), depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 4)),
        indivisible=dict(num_heads=(3, 2, 4, 8)),
        budgets=dict(tiny=Budget(1.6, 10.9), small=Budget(3.3, 22.4), base=Budget(6.1, 39.6)),
        ablations=(
            dict(vanilla_layers=(2, 2, 2, 2)),
            dict(attention_residual=False),
            dict(query_grids=(None,) * 4),
            dict(query_grids=(None, 28, 14, 7)),
            dict(key_grid=5),
            dict(reductions=(4, 4, 2, 1)),
        ),
    ),
    Family(
        IntegratedDeiT,
        small=dict(
            embed_dims=24,
            depth=5,
            num_heads=2,
            image_size=64,
            static_layers=(1,),
            pyramid=((2, 15), (3, 13), (4, 11)),
        ),
        indivisible=dict(num_heads=5),
        budgets=dict(tiny=Budget(), small=Budget(), base=Budget()),
        poison_padding=poison_windows,
        ablations=(
            dict(static_layers=()),
            dict(pyramid=()),
            dict(static_block='mlp'),
            dict(static_init='local'),
            dict(glad_norm=False),
            dict(glad_pos_embed=False),
            dict(window_mixing=False),
            dict(patch_size=8),
            dict(aggregation='concat', pyramid=((2, 0),)),
            dict(aggregation='downsample', pyramid=((2, 0),)),
        ),
        stem=('patch_embed.', 'cls_token.', 'pos_embed.'),
        stage=tuple(
            tuple(f'{name}.{i + 1}.' for name in ('blocks', 'aggregations'))
            + tuple(f'{name}.{i}.' for name in ('unprojections', 'window_mixing', 'to_stride'))
            + (f'norm{i}.', *(() if i else ('blocks.0.',)))
            for i in range(4)
        ),
        block='blocks.4.',
        settle=start_linear,
    ),
    Family(
        DGSSASwin,
        small=dict(
            embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), static_layers=(1, 2, 3)
        ),
        indivisible=dict(num_heads=(3, 2, 4, 8)),
        budgets=dict(tiny=Budget(), small=Budget(), base=Budget()),
        poison_padding=poison_windows,
        ablations=(
            dict(static_layers=()),
            dict(static_layers=(5, 6, 7)),
            dict(static_block='mlp'),
            dict(static_init='random'),
            dict(static_init='local'),
            dict(window_size=4),
            dict(image_size=64),
        ),
    ),
]
