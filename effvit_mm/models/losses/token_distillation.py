# SPDX-License-Identifier: Apache-2.0
"""Token distillation (GLAD, Yu et al., arXiv 2310.07664)."""

from collections.abc import Mapping

from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.utils import at_least_float32, full_precision


@MODELS.register_module()
class TokenDistillationLoss(nn.Module):
    """``L_glad = Σ MSE(Y, Y_t)`` over the layers before which tokens are aggregated.

    ``Y`` are the student's aggregated tokens and ``Y_t`` those that another GLAD makes of the
    pretrained model's tokens at the same layer, both before the new position embedding.

    Args:
        loss_weight: Weight of the loss.
    """

    def __init__(self, loss_weight: float = 1.0) -> None:
        super().__init__()
        self.loss_weight = loss_weight

    def forward(self, tokens: Mapping[int, Tensor], targets: Mapping[int, Tensor]) -> Tensor:
        """The loss, a scalar in at least float32.

        Args:
            tokens: Of each layer ``Y (B, m, C)``.
            targets: Of the same layers ``Y_t (B, m, C)``.

        Raises:
            ValueError: There is no layer, the layers differ, or their tokens do.
        """
        if not tokens or tokens.keys() != targets.keys():
            raise ValueError(
                'Token distillation compares the same layers of student and teacher, at least one: '
                f'not {sorted(tokens)} and {sorted(targets)}.'
            )
        loss = 0.0
        for layer, y in tokens.items():
            if y.shape != targets[layer].shape:
                raise ValueError(
                    f'Layer {layer}: tokens of the student are {tuple(y.shape)}, those of the '
                    f'teacher {tuple(targets[layer].shape)}.'
                )
            with full_precision(y):
                loss = loss + F.mse_loss(at_least_float32(y), at_least_float32(targets[layer]))
        return self.loss_weight * loss
