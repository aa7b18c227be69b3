# SPDX-License-Identifier: Apache-2.0
"""Diagonality-preserving loss (LaViT, CVPR 2024)."""

from mmengine.registry import MODELS
from torch import Tensor, nn

QUANTITIES = ('scores', 'probs')


@MODELS.register_module()
class DiagonalityPreservingLoss(nn.Module):
    """Keeps derived attention symmetric, with a diagonal that is not below its surroundings.

    On scores, for an ``n x n`` matrix ``A`` (the paper's loss, with a hinge: without it the second
    term has no lower bound)::

        ( Σ_ij |A_ij - A_ji| + Σ_i relu(Σ_{j≠i} A_ij - (n - 1) A_ii) ) / (n (n - 1))

    0 where ``A`` is symmetric and each diagonal element at least the mean of its row. On
    probabilities ``P``, which unlike scores change when attention becomes uniform, and do not when
    a constant is added to a row::

        1/n Σ_i ( ½ Σ_j |P_ij - P_ji| + relu(1 - n P_ii) )

    Both are means over all matrices, so they do not grow with ``n``, heads or batch.

    Args:
        on: ``'scores'`` or ``'probs'``: which of the two, and what the caller has to give.
        loss_weight: Weight ``λ``.
    """

    def __init__(self, on: str = 'scores', loss_weight: float = 0.1) -> None:
        super().__init__()
        if on not in QUANTITIES:
            raise ValueError(f'on must be one of {QUANTITIES}, not {on!r}.')
        self.on = on
        self.loss_weight = loss_weight

    def forward(self, attention: Tensor) -> Tensor:
        """Square scores or probabilities ``(..., n, n)`` to the loss, a scalar."""
        n = attention.shape[-1]
        asymmetry = (attention - attention.transpose(-2, -1)).abs().sum(dim=(-2, -1))
        diagonal = attention.diagonal(dim1=-2, dim2=-1)
        if self.on == 'probs':
            below = (1 - n * diagonal).relu().sum(dim=-1)
            return self.loss_weight * ((0.5 * asymmetry + below) / n).mean()
        below = (attention.sum(dim=-1) - n * diagonal).relu().sum(dim=-1)
        return self.loss_weight * ((asymmetry + below) / (n * (n - 1))).mean()

    def extra_repr(self) -> str:
        """Arguments."""
        return f'on={self.on!r}, loss_weight={self.loss_weight}'
