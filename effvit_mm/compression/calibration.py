# SPDX-License-Identifier: Apache-2.0
"""What is measured or fitted on images once a compressed DeiT has its weights: how much of its
tokens each aggregation lets through, and the way back from aggregated tokens to the grid."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..models.backbones import IntegratedDeiT
from ..models.layers.token_aggregation import GLAD, ridge_unprojection


@contextmanager
def block_outputs(model: IntegratedDeiT) -> Iterator[dict[int, Tensor]]:
    """The latest result of every block, by its layer; the tokens of the embedding are layer -1."""
    seen: dict[int, Tensor] = {}

    def hook(layer: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple, result: Tensor) -> None:
            if layer == 0:
                seen[-1] = args[0]
            seen[layer] = result

        return keep

    handles = [block.register_forward_hook(hook(i)) for i, block in enumerate(model.blocks)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def token_survival(model: IntegratedDeiT, images: Iterable[Tensor]) -> dict[str, dict[str, float]]:
    """How much of the tokens each aggregation lets through.

    Args:
        model: Is used in eval mode, and is left in it.
        images: Batches ``(B, 3, H, W)``, normalised, of the size of the pretraining.

    Returns:
        For each layer that an aggregation stands before: ``class_cosine``, the mean cosine of the
        class token before and after; ``patch_error``, the relative error ``‖X − U Y‖ / ‖X‖`` of the
        patch tokens ``X`` brought back from the aggregated ``Y``, ``U`` the aggregation's inverse;
        and of a GLAD ``patch_floor``, the same of ``U W X``, what no norm and no GELU can go below.
    """
    model.eval()
    sums: dict[int, Tensor] = {}
    for batch in images:
        with block_outputs(model) as seen:
            _, aggregated = model.forward_tokens(batch)
        for layer, y in aggregated.items():
            if layer == 0:
                raise ValueError('There is nothing before an aggregation at layer 0 to compare.')
            aggregation = model.aggregations[str(layer)]
            x, y = seen[layer - 1].double(), aggregation.place(y).double()
            inverse = aggregation.inverse().double().to(x.device)
            cosine = torch.cosine_similarity(x[:, 0], y[:, 0], dim=1)
            kept = inverse @ (aggregation.weight.double() @ x) if _is_linear(aggregation) else x
            errors = [(x - back)[:, 1:].square().sum() for back in (inverse @ y, kept)]
            total = x[:, 1:].square().sum()
            values = torch.stack([cosine.sum(), *errors, total, total.new_tensor(len(x))])
            sums[layer] = sums.get(layer, 0) + values.cpu()
    result = {}
    for layer, (cosine, error, floor, total, count) in sums.items():
        result[str(layer)] = dict(
            class_cosine=(cosine / count).item(), patch_error=(error / total).sqrt().item()
        )
        if _is_linear(model.aggregations[str(layer)]):
            result[str(layer)]['patch_floor'] = (floor / total).sqrt().item()
    return result


def _is_linear(aggregation: nn.Module) -> bool:
    return isinstance(aggregation, GLAD)


@torch.no_grad()
def calibrate_unprojections(
    model: IntegratedDeiT,
    original: IntegratedDeiT,
    images: Iterable[Tensor],
    strength: float = 1e-3,
) -> dict[str, dict[str, float]]:
    """Fit the un-projections: the grid's tokens of the original from the compressed model's.

    ``U = E[X Yᵀ] (E[Y Yᵀ] + λ I)⁻¹`` for every feature map whose tokens were aggregated, ``Y`` the
    compressed model's tokens there and ``X`` those of the original after the same layer.

    Args:
        model: With ``out_type='pyramid'``; gets the fitted un-projections. Both models are used in
            eval mode, and are left in it.
        original: The model before the compression, without static layers and aggregations.
            Also with ``out_type='pyramid'``, as a classifier's last layer computes one token only.
        images: Batches ``(B, 3, H, W)``, normalised, of the size of the pretraining.
        strength: ``λ`` over the mean of ``E[Y Yᵀ]``'s diagonal.

    Returns:
        For each un-projection, by its out index, the relative error ``‖X − U Y‖ / ‖X‖`` on these
        images ``before`` and ``after`` the fit.
    """
    model.eval()
    original.eval()
    sums: dict[str, list[Tensor]] = {}
    for batch in images:
        with block_outputs(model) as ours, block_outputs(original) as theirs:
            model(batch)
            original(batch)
        for i in model.unprojections:
            layer = model.taps[int(i)]
            y, x = ours[layer].double(), theirs[layer][:, 1:].double()
            products = [
                torch.einsum('bnc,bmc->nm', x, y),
                torch.einsum('bnc,bmc->nm', y, y),
                x.square().sum(),
                x.new_tensor(len(x) * x.shape[2]),
            ]
            total = sums.get(i, [0.0] * len(products))
            sums[i] = [a + b for a, b in zip(total, products, strict=True)]
    report = {}
    for i, (xy, yy, xx, count) in sums.items():
        weight = model.unprojections[i].weight

        def error(u: Tensor, xy: Tensor = xy, yy: Tensor = yy, xx: Tensor = xx) -> float:
            squared = xx - 2 * (u * xy).sum() + ((u @ yy) * u).sum()
            return (squared / xx).clamp(min=0).sqrt().item()

        before = error(weight.double())
        weight.copy_(ridge_unprojection(xy / count, yy / count, strength))
        report[i] = dict(before=before, after=error(weight.double()))
    return report
