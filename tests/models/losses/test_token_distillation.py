# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from effvit_mm.models.losses import TokenDistillationLoss


def tokens(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {3: (2, 5, 4), 6: (2, 3, 4)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def test_it_is_the_sum_over_layers_of_mean_squared_differences():
    ours, theirs = tokens(0), tokens(1)
    expected = 0.0
    for layer in ours:
        differences = [
            (a - b) ** 2
            for a, b in zip(ours[layer].flatten(), theirs[layer].flatten(), strict=True)
        ]
        expected += sum(differences) / len(differences)
    torch.testing.assert_close(TokenDistillationLoss(0.5)(ours, theirs), 0.5 * expected)


def test_both_sides_get_gradients():
    ours, theirs = tokens(0), tokens(1)
    sides = [t.requires_grad_() for t in (*ours.values(), *theirs.values())]
    TokenDistillationLoss()(ours, theirs).backward()
    assert all(t.grad.abs().sum() > 0 for t in sides)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_compared_in_float32(dtype):
    ours, theirs = ({k: v.to(dtype) for k, v in tokens(i).items()} for i in (0, 1))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = TokenDistillationLoss()(ours, theirs)
    assert loss.dtype == torch.float32
    exact = TokenDistillationLoss()(
        {k: v.double() for k, v in ours.items()}, {k: v.double() for k, v in theirs.items()}
    )
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


def test_layers_and_shapes_that_differ_are_refused():
    ours, theirs = tokens(0), tokens(1)
    loss = TokenDistillationLoss()
    with pytest.raises(ValueError, match='at least one'):
        loss({}, {})
    with pytest.raises(ValueError, match=r'\[3, 6\] and \[6\]'):
        loss(ours, {6: theirs[6]})
    with pytest.raises(ValueError, match='Layer 6'):
        loss(ours, {**theirs, 6: theirs[3]})
