# SPDX-License-Identifier: Apache-2.0
"""From the weights of a pretrained DeiT or Swin to those of its compressed version.

What a compressed layer shares with the original is inherited, what it has instead is derived from
the statistics (paper: static matrices "inherit self-attention information from the replaced dynamic
self-attention"), and a report says of every tensor on both sides which it was.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..models.backbones import DGSSASwin, IntegratedDeiT
from ..models.backbones.dgssa_swin import name_from_timm
from ..models.layers.token_aggregation import GLAD, linear_start
from .keys import to_timm_keys

STATUSES = ('inherited', 'derived', 'new', 'dropped')

#: names that both models have: where the original lacks one, the two do not belong together
INHERITED = re.compile(
    r'(patch_embed|cls_token|pos_embed)|'
    r'(blocks\.\d+|stages\.\d+\.blocks\.\d+)\.(norm|mlp|attn\.(proj|relative_position))|'
    r'stages\.\d+\.patch_embed'
)


@dataclass(frozen=True)
class TensorRecord:
    """What became of one tensor, or came of it."""

    name: str
    status: str
    shape: tuple[int, ...]
    note: str = ''


@dataclass
class BuildReport:
    """What happened to every tensor.

    Attributes:
        records: Of every tensor of the compressed model whether it was ``inherited`` (the original,
            unchanged), ``derived`` (part of the original, or from statistics) or is ``new``
            (initialised at random), and every tensor or part of the original that was ``dropped``.
        measured: Numbers measured on images, see :func:`calibration.token_survival`.
    """

    records: list[TensorRecord]
    measured: dict[str, Any] = field(default_factory=dict)

    def names(self, status: str) -> list[str]:
        """Names of the tensors of a status."""
        return [record.name for record in self.records if record.status == status]

    def summary(self) -> str:
        """Number of tensors and of values per status, one line each."""
        lines = []
        for status in STATUSES:
            chosen = [r for r in self.records if r.status == status]
            values = sum(torch.Size(r.shape).numel() for r in chosen)
            lines.append(f'{status:<10}{len(chosen):>5} tensors {values:>12,} values')
        return '\n'.join(lines)

    def table(self) -> str:
        """One line per tensor: status, name, shape, note."""
        width = max(len(record.name) for record in self.records)
        return '\n'.join(
            f'{r.status:<10}{r.name:<{width}}  {"x".join(map(str, r.shape)):<16}{r.note}'.rstrip()
            for r in sorted(self.records, key=lambda r: STATUSES.index(r.status))
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tensors = [vars(record) for record in self.records]
        return dict(tensors=tensors, measured=self.measured)


def build_integrated_deit(
    state: Mapping[str, Any],
    statistics: Mapping[str, Tensor] | None,
    arch: str | dict,
    *,
    glad_init: str = 'linear',
    seed: int = 0,
    **backbone: Any,
) -> tuple[dict[str, Tensor], BuildReport]:
    """Compress a DeiT: weights of :class:`IntegratedDeiT` (prefix ``backbone.``) and, where the
    original has one, of the linear classifier (``head.fc.``).

    Args:
        state: State dict or checkpoint of the original, see :func:`to_timm_keys`.
        statistics: Tensors that ``tools/compress.py stats`` collected from it; None where nothing
            is derived from them: no static layer with ``static_init='dynamic'``, no GLAD with
            ``glad_init='linear'``.
        arch: Architecture of the compressed model, as :class:`IntegratedDeiT` takes it.
        glad_init: ``'linear'``, the start in which GELU and LayerNorm keep what they are given, or
            ``'random'``, as constructed.
        seed: Of what is random.
        **backbone: Other arguments of :class:`IntegratedDeiT`.

    Raises:
        ValueError: The original is no DeiT or of another size, or statistics are missing or of
            another model.
    """
    if glad_init not in ('linear', 'random'):
        raise ValueError(f"glad_init must be 'linear' or 'random', not {glad_init!r}.")
    source = to_timm_keys(state, 'deit')
    with _seeded(seed):
        model = IntegratedDeiT(arch, **backbone)
    assembly = _Assembly(source, model, statistics)
    settings = model.arch_settings
    _check_depth(source, 'blocks', settings['depth'])
    if glad_init == 'linear':
        _start_aggregations(assembly, model, seed)
    for layer in range(model.num_layers):
        dynamic = layer not in settings['static_layers']
        before = None if dynamic else _aggregated(assembly, model, layer)
        assembly.attention(f'blocks.{layer}', layer, dynamic, settings, before)
    built, report = assembly.finish('head')
    if model.out_type == 'pyramid' and model.unprojections:
        _start_unprojections(built, report, model)
    return built, report


def build_dgssa_swin(
    state: Mapping[str, Any],
    statistics: Mapping[str, Tensor] | None,
    arch: str | dict,
    *,
    seed: int = 0,
    **backbone: Any,
) -> tuple[dict[str, Tensor], BuildReport]:
    """Compress a Swin: weights of :class:`DGSSASwin` (prefix ``backbone.``) and, where the original
    has one, of the linear classifier (``head.fc.``). Arguments as in
    :func:`build_integrated_deit`."""
    source = {name_from_timm(key): value for key, value in to_timm_keys(state, 'swin').items()}
    with _seeded(seed):
        model = DGSSASwin(arch, **backbone)
    assembly = _Assembly(source, model, statistics)
    settings = model.arch_settings
    layer = 0
    for stage, depth in enumerate(settings['depths'][: model.num_stages]):
        _check_depth(source, f'stages.{stage}.blocks', depth)
        for block in range(depth):
            dynamic = layer not in settings['static_layers']
            assembly.attention(f'stages.{stage}.blocks.{block}', layer, dynamic, settings)
            layer += 1
    return assembly.finish('head.fc')


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let torch's generator start from ``seed``; it is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _check_depth(source: Mapping[str, Tensor], prefix: str, depth: int) -> None:
    found = {m[1] for key in source if (m := re.match(rf'{re.escape(prefix)}\.(\d+)\.', key))}
    if len(found) != depth:
        raise ValueError(
            f'The original has {len(found)} blocks in {prefix}, the architecture {depth}.'
        )


class _Assembly:
    """The compressed state dict in the making, and the account of every tensor."""

    def __init__(
        self, source: dict[str, Tensor], model: nn.Module, statistics: Mapping[str, Tensor] | None
    ) -> None:
        self.source, self.statistics = source, statistics
        self.own = model.state_dict()
        self.state: dict[str, Tensor] = {}
        self.records: list[TensorRecord] = []
        self.accounted: set[str] = set()

    def put(self, name: str, value: Tensor, status: str, note: str = '') -> None:
        """Set a tensor of the compressed model."""
        if value.shape != self.own[name].shape:
            raise ValueError(
                f'{name} would be {_shape(value)} from {note or "the original"}, and is '
                f'{_shape(self.own[name])} in the architecture: they are of different models.'
            )
        self.state[name] = value.to(self.own[name].dtype).clone()
        self.records.append(TensorRecord(f'backbone.{name}', status, tuple(value.shape), note))

    def drop(self, name: str, value: Tensor, note: str) -> None:
        """Account for a tensor of the original, or a part of it, that has no place any more."""
        self.records.append(TensorRecord(name, 'dropped', tuple(value.shape), note))

    def take(self, name: str) -> Tensor:
        """A tensor of the original, of which the caller gives an account."""
        if name not in self.source:
            raise ValueError(f'The original lacks {name}.')
        self.accounted.add(name)
        return self.source[name]

    def statistic(self, name: str) -> Tensor:
        """A tensor of the statistics."""
        if self.statistics is None or name not in self.statistics:
            what = 'There are no statistics' if self.statistics is None else 'The statistics lack'
            raise ValueError(
                f'{what}{": " if self.statistics is None else " "}{name} is needed, which '
                'tools/compress.py stats collects from the original.'
            )
        return self.statistics[name]

    def attention(
        self,
        block: str,
        layer: int,
        dynamic: bool,
        settings: dict[str, Any],
        before: Tensor | None = None,
    ) -> None:
        """Account for the attention of a block, except its output projection; ``before (m, n)``
        aggregates the original's tokens to those of the block."""
        weight = self.take(f'{block}.attn.qkv.weight')
        bias = self.take(f'{block}.attn.qkv.bias')
        (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias) = weight.chunk(3), bias.chunk(3)
        unseen = 'a bias of the keys, which softmax cannot see'
        if dynamic:
            self.put(f'{block}.attn.qkv.weight', weight, 'inherited')
            self.put(f'{block}.attn.qkv.q_bias', q_bias, 'inherited', 'rows of attn.qkv.bias')
            self.put(f'{block}.attn.qkv.v_bias', v_bias, 'inherited', 'rows of attn.qkv.bias')
            self.drop(f'{block}.attn.qkv.bias[keys]', k_bias, unseen)
            return
        static = 'the attention of this layer is static'
        self.drop(f'{block}.attn.qkv.weight[queries]', q_weight, static)
        self.drop(f'{block}.attn.qkv.weight[keys]', k_weight, static)
        self.drop(f'{block}.attn.qkv.bias[queries]', q_bias, static)
        self.drop(f'{block}.attn.qkv.bias[keys]', k_bias, unseen)
        table = f'{block}.attn.relative_position_bias_table'
        if table in self.source:
            self.drop(table, self.take(table), 'part of the mean attention')
        if settings['static_block'] == 'mlp':
            mixing = 'token mixing by an MLP instead of attention'
            for name, value in (('weight', v_weight), ('bias', v_bias)):
                self.drop(f'{block}.attn.qkv.{name}[values]', value, mixing)
            for name in (f'{block}.attn.proj.weight', f'{block}.attn.proj.bias'):
                if name not in self.own:
                    self.drop(name, self.take(name), mixing)
            return
        self.put(f'{block}.attn.v.weight', v_weight, 'inherited', 'rows of attn.qkv.weight')
        self.put(f'{block}.attn.v.bias', v_bias, 'inherited', 'rows of attn.qkv.bias')
        if settings['static_init'] == 'dynamic':
            self.static_attention(block, layer, before)

    def static_attention(self, block: str, layer: int, before: Tensor | None) -> None:
        """The mean attention of a layer as its static matrices."""
        name = f'attention_mean.{layer}'
        mean = self.statistic(name)
        mean = mean / mean.sum(dim=-1, keepdim=True)
        if f'{block}.attn.matrix' in self.own:
            if before is not None:  # between the aggregated tokens, as if they were brought back
                mean = before @ mean.double() @ torch.linalg.pinv(before)
                name = f'{name}, between aggregated tokens'
            self.put(f'{block}.attn.matrix', mean, 'derived', name)
        else:  # windows: softmax gives the mean back
            logits = mean.clamp(min=torch.finfo(torch.float32).tiny).log()
            self.put(f'{block}.attn.logits', logits, 'derived', f'log of {name}')

    def finish(self, head: str) -> tuple[dict[str, Tensor], BuildReport]:
        """Inherit what has the same name, keep what is new, drop the rest."""
        for name, initial in self.own.items():
            if name in self.state:
                continue
            # the norm of the original's last tokens is that of the last map
            original = re.sub(r'^norm3\.', 'norm.', name)
            if original in self.source:
                note = '' if original == name else f'as {original}'
                self.put(name, self.take(original), 'inherited', note)
            elif INHERITED.match(name):
                raise ValueError(f'The original lacks {name}.')
            else:
                self.put(name, initial, 'new')
        state = {f'backbone.{name}': self.state[name] for name in self.own}
        for kind in ('weight', 'bias'):
            if f'{head}.{kind}' in self.source:
                value = self.take(f'{head}.{kind}')
                state[f'head.fc.{kind}'] = value.clone()
                record = TensorRecord(f'head.fc.{kind}', 'inherited', tuple(value.shape))
                self.records.append(record)
        for name in self.source:
            if name not in self.accounted:
                self.drop(name, self.source[name], 'no such part in the compressed model')
        return state, BuildReport(self.records)


def _shape(x: Tensor) -> str:
    return ' x '.join(map(str, x.shape))


def _start_aggregations(assembly: _Assembly, model: IntegratedDeiT, seed: int) -> None:
    """GLADs that keep the tokens' main directions (docs/compression.md, "Build")."""
    # With the deviation of the tokens as earlier GLADs have enlarged them, later ones would
    # lose less (0.36 instead of 0.41 before the digits' layer 5), but five epochs of training from
    # there ended 0.3 to 0.8 points lower with each of three seeds.
    generator = torch.Generator().manual_seed(seed)
    before: Tensor | None = None  # from the tokens of the original to those entering the next GLAD
    for layer, tokens in model.arch_settings['pyramid']:
        if layer >= model.num_layers:  # after the last map that is asked for
            return
        prefix = f'aggregations.{layer}'
        if not isinstance(model.get_submodule(prefix), GLAD):
            return
        gram = assembly.statistic(f'gram.{layer}').double()
        std = float(assembly.statistic(f'token_std.{layer}'))
        if before is not None:
            gram = before @ gram @ before.T
        dim = model.arch_settings['embed_dims']
        start = linear_start(gram, std, tokens, dim, generator)
        note = f'main directions of gram.{layer}, token_std.{layer}'
        for name, value in start.items():
            if f'{prefix}.{name}' in assembly.own:  # a GLAD may be without norm, or without E
                assembly.put(f'{prefix}.{name}', value, 'derived', note)
        weight = start['weight'].double()
        before = weight if before is None else weight @ before


def _aggregated(assembly: _Assembly, model: IntegratedDeiT, layer: int) -> Tensor | None:
    """What the GLADs up to a layer do to the original's tokens, ``(m, n)``; None: nothing.

    Raises:
        ValueError: There is another aggregation.
    """
    weight: Tensor | None = None
    for before, _ in model.arch_settings['pyramid']:
        if before > layer:
            break
        prefix = f'aggregations.{before}'
        if not isinstance(model.get_submodule(prefix), GLAD):
            raise ValueError(
                f"The static layer {layer} with static_init='dynamic' stands after a local "
                'aggregation: the mean attention is that between all tokens.'
            )
        own = f'{prefix}.weight'
        step = (assembly.state[own] if own in assembly.state else assembly.own[own]).double()
        weight = step if weight is None else step @ weight
    return weight


def _start_unprojections(
    built: dict[str, Tensor], report: BuildReport, model: IntegratedDeiT
) -> None:
    """Un-projections that undo the aggregations, as far as can be known without images."""
    prefix = 'backbone.'
    own = {k.removeprefix(prefix): v for k, v in built.items() if k.startswith(prefix)}
    model.load_state_dict(own)
    model.reset_unprojections()
    for name, value in model.state_dict().items():
        if name.startswith('unprojections.'):
            built[prefix + name] = value.clone()
    report.records = [
        replace(r, status='derived', note='inverse of the aggregations')
        if r.name.startswith(f'{prefix}unprojections.')
        else r
        for r in report.records
    ]
