# SPDX-License-Identifier: Apache-2.0
"""Training a compressed model with the original as its teacher (Yu et al., arXiv 2310.07664)."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.registry import MODELS
from mmpretrain.models import ImageClassifier
from mmpretrain.models import build_classifier as build_mmpretrain
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoint import read_state_dict, split_init_cfg
from ..layers.token_aggregation import GLAD, glads_of
from ..layers.utils import at_least_float32, full_precision


class _Held:
    """Holds a module that is no part of its owner: neither its parameters nor its state, and
    shared by the owner's copies."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._copies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}

    def like(self, x: Tensor) -> nn.Module:
        """The module, or a copy of it, with the device and precision of ``x``. The module itself
        stays as it is: another owner may need it, and in full precision."""
        own = next(self.module.parameters())
        if (own.device, own.dtype) == (x.device, x.dtype):
            return self.module
        key = x.device, x.dtype
        if key not in self._copies:
            self._copies[key] = copy.deepcopy(self.module).to(*key)
        return self._copies[key]

    def __deepcopy__(self, memo: dict) -> '_Held':
        return self


@MODELS.register_module()
class DistilledImageClassifier(ImageClassifier):
    """An ImageClassifier that learns the predictions of a frozen teacher.

    ``loss_distillation`` is the cross-entropy between the teacher's and the student's predictions.
    Where the backbone aggregates tokens with GLADs, ``loss_token`` is the token distillation: the
    teacher's tokens at the same layer go through another GLAD, which is trained and saved with the
    student, but whose norm is fixed, and without a position embedding. With a trained norm both
    sides could fall to 0 together; ``token_variance`` in the log is that of the teacher's side.

    The teacher is in eval mode, gets no gradient, and is not part of the state dict.

    Args:
        *args: Arguments of MMPretrain's ``ImageClassifier``: backbone, neck, head, ….
        teacher: Config of any classifier of MMPretrain; ``dict(type='TimmClassifier',
            model_name='deit_small_patch16_224', pretrained=True)`` for one of timm. If it has a
            ``data_preprocessor`` with another mean or standard deviation than the student's, the
            images are converted. None: for predictions only, which need no teacher.
        teacher_checkpoint: Path or URL of the teacher's weights; None: as the config builds it. An
            ``init_cfg`` of the teacher is not read, so one with a checkpoint is refused.
        temperature: Temperature of both predictions.
        distillation_weight: Weight of ``loss_distillation``.
        hard_weight: Weight of the head's own loss on the labels, ``loss_hard``; 0: labels are not
            used.
        token_loss: Config of the token distillation, by default :class:`TokenDistillationLoss`
            where the backbone has GLADs; None: no token distillation.
        **kwargs: As ``*args``.
    """

    def __init__(
        self,
        *args: Any,
        teacher: dict | None,
        teacher_checkpoint: str | None = None,
        temperature: float = 1.0,
        distillation_weight: float = 1.0,
        hard_weight: float = 0.0,
        token_loss: dict | None = dict(type='TokenDistillationLoss'),  # noqa: B006 (not changed)
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.head is None:
            raise ValueError('DistilledImageClassifier compares predictions: it needs a head.')
        if not temperature > 0:
            raise ValueError(f'temperature must be above 0, not {temperature}.')
        self.temperature = temperature
        self.distillation_weight = distillation_weight
        self.hard_weight = hard_weight
        self._teacher = None
        if teacher is not None:
            model = build_mmpretrain(dict(teacher))
            if teacher_checkpoint is not None:
                _load_teacher(model, teacher_checkpoint)
            elif any(split_init_cfg(getattr(m, 'init_cfg', None))[0] for m in model.modules()):
                raise ValueError(
                    "The weights in the teacher's init_cfg or pretrained would not be loaded: give "
                    'the file as teacher_checkpoint.'
                )
            self._teacher = _Held(model.requires_grad_(False).eval())
            self._from_student, self._to_teacher = self._conversion()

        glads = glads_of(self.backbone)
        self.token_loss = None
        if token_loss is not None and glads:
            self.token_loss = MODELS.build(dict(token_loss))
            if teacher is not None:
                self.teacher_blocks(self.teacher)  # a teacher without them is refused now
            self._build_teacher_glads(glads)

    @property
    def teacher(self) -> nn.Module | None:
        """The teacher, if there is one."""
        return self._teacher and self._teacher.module

    def teacher_blocks(self, teacher: nn.Module) -> nn.ModuleList:
        """The transformer blocks of the teacher, or of a copy of it.

        Raises:
            ValueError: It is no ViT of timm or MMPretrain.
        """
        for owner, name in (('model', 'blocks'), ('backbone', 'layers')):
            blocks = getattr(getattr(teacher, owner, None), name, None)
            if isinstance(blocks, nn.ModuleList | nn.Sequential):
                return blocks
        raise ValueError(
            f'Token distillation needs a DeiT or ViT of timm or MMPretrain as the teacher, not '
            f'{type(teacher).__name__}; token_loss=None trains without it.'
        )

    def _build_teacher_glads(self, glads: dict[str, GLAD]) -> None:
        """A GLAD for the teacher's side of each of the student's."""
        num_tokens = next(iter(glads.values())).num_in
        self.teacher_glads = nn.ModuleDict()
        for layer, glad in glads.items():
            dim, norm = glad.dim, glad.norm is not None
            self.teacher_glads[layer] = GLAD(dim, num_tokens, glad.num_out, norm, pos_embed=False)
            if norm:
                self.teacher_glads[layer].norm.requires_grad_(False)
        # they start from the student's, which may have been loaded after the construction
        self.register_buffer('teacher_glads_started', torch.tensor(False))
        if self.teacher is None:
            self.register_load_state_dict_post_hook(_forget_missing_teacher_glads)

    @torch.no_grad()
    def start_teacher_glads(self) -> None:
        """Let the teacher's GLADs do what all of the student's up to the same layer do."""
        weight = None
        for layer, other in self.teacher_glads.items():
            glad = self.backbone.aggregations[layer]
            weight = glad.weight if weight is None else glad.weight @ weight
            other.weight.copy_(weight)
            if other.norm is not None:
                other.norm.load_state_dict(glad.norm.state_dict())
        self.teacher_glads_started.fill_(True)

    def _conversion(self) -> tuple[Tensor | None, Tensor | None]:
        """Scale and shift from the student's images to the teacher's; None where they agree."""
        ours, theirs = self.data_preprocessor, self.teacher.data_preprocessor
        if not getattr(theirs, '_enable_normalize', False):
            return None, None
        if not getattr(ours, '_enable_normalize', False):
            raise ValueError(
                "The teacher's data_preprocessor normalises images, the student's does not: give "
                'both a mean and a standard deviation, or the teacher none.'
            )
        if ours.to_rgb != theirs.to_rgb:
            raise ValueError(
                'Student and teacher must see the same order of channels: set to_rgb alike in '
                'their data_preprocessor.'
            )
        if torch.equal(ours.mean, theirs.mean) and torch.equal(ours.std, theirs.std):
            return None, None
        return ours.std / theirs.std, (ours.mean - theirs.mean) / theirs.std

    @torch.no_grad()
    def teach(self, inputs: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """What the teacher makes of images ``(B, 3, H, W)`` as the student sees them.

        Returns:
            Its logits, and for every layer with a token distillation the tokens ``(B, n, C)`` that
            enter it.
        """
        if self._from_student is not None:
            inputs = inputs * self._from_student.to(inputs) + self._to_teacher.to(inputs)
        teacher = self._teacher.like(next(self.backbone.parameters()))
        layers = [int(layer) for layer in self.teacher_glads] if self.token_loss else []
        tokens: dict[int, Tensor] = {}
        with _recording(self.teacher_blocks(teacher) if layers else (), layers, tokens):
            logits = teacher(inputs, mode='tensor')
        return (logits[-1] if isinstance(logits, tuple | list) else logits), tokens

    def loss(self, inputs: Tensor, data_samples: list[DataSample]) -> dict[str, Tensor]:
        """The losses named in the description of the class.

        Args:
            inputs: Images ``(B, 3, H, W)`` after preprocessing and batch augmentation.
            data_samples: Their annotations; only ``hard_weight`` makes use of them.
        """
        if self.teacher is None:
            raise ValueError(
                'DistilledImageClassifier was built without a teacher: it only predicts.'
            )
        if self.teacher.training:
            self.teacher.eval()
        target, tokens = self.teach(inputs)
        if self.token_loss is None:
            feats, aggregated = self.backbone(inputs), {}
        else:
            feats, aggregated = self.backbone.forward_tokens(inputs)
        feats = self.neck(feats) if self.with_neck else feats
        losses = dict(loss_distillation=self._soft_loss(self.head(feats), target))
        if self.token_loss is not None:
            losses.update(self._token_loss(aggregated, tokens))
        if self.hard_weight:
            hard = self.head.loss(feats, data_samples)
            losses['loss_hard'] = self.hard_weight * hard.pop('loss')
            losses.update(hard)
        return losses

    def _soft_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.shape != target.shape:
            raise ValueError(
                f'The student predicts {logits.shape[1]} classes, the teacher {target.shape[1]}.'
            )
        with full_precision(logits):
            logits = at_least_float32(logits) / self.temperature
            probs = (at_least_float32(target) / self.temperature).softmax(dim=1)
            loss = F.cross_entropy(logits, probs)
        return self.distillation_weight * self.temperature**2 * loss

    def _token_loss(
        self, aggregated: dict[int, Tensor], tokens: dict[int, Tensor]
    ) -> dict[str, Tensor]:
        if not self.teacher_glads_started:
            self.start_teacher_glads()
        targets = {}
        for layer, x in tokens.items():
            glad = self.teacher_glads[str(layer)]
            if x.shape[1:] != (glad.num_in, glad.dim):
                raise ValueError(
                    f"The teacher's tokens are {tuple(x.shape[1:])}, the student's GLADs were made "
                    f'for {(glad.num_in, glad.dim)}: token distillation needs the model that was '
                    'compressed as the teacher, and images of its size.'
                )
            targets[layer] = glad.project(x)
        compared = {layer: aggregated[layer] for layer in targets}
        variance = torch.stack([at_least_float32(y.detach()).var() for y in targets.values()])
        return dict(loss_token=self.token_loss(compared, targets), token_variance=variance.mean())

    def train(self, mode: bool = True) -> 'DistilledImageClassifier':
        """Set the mode of the student; the teacher stays in eval."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self


@contextmanager
def _recording(blocks: Any, layers: list[int], tokens: dict[int, Tensor]) -> Iterator[None]:
    """Put the tokens that enter ``blocks[layer]`` into ``tokens[layer]``."""
    handles = []
    for layer in layers:

        def record(module: nn.Module, args: tuple, layer: int = layer) -> None:
            tokens[layer] = args[0]

        handles.append(blocks[layer].register_forward_pre_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forget_missing_teacher_glads(module: nn.Module, incompatible: Any) -> None:
    """Predictions do not need them, and what `tools/compress.py build` writes has none."""
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.startswith('teacher_glads')]


def _load_teacher(model: nn.Module, path: str) -> None:
    """Load all weights of a teacher.

    Raises:
        ValueError: The checkpoint is of another model.
    """
    try:
        model.load_state_dict(read_state_dict(path), strict=True)
    except RuntimeError as error:
        reason = ' '.join(str(error).split())[:300]
        raise ValueError(f'{path} does not fit the teacher: {reason} …') from error
