# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mmengine.registry import MODELS

from effvit_mm import DiagonalityPreservingLoss


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dominant(n):
    """Symmetric, and every diagonal element at least the mean of its row."""
    a = double(2, 3, n, n)
    return a + a.transpose(2, 3) + 4 * torch.eye(n)


def slow_scores(a):
    n, total = a.shape[-1], 0
    for matrix in a.reshape(-1, n, n):
        for i in range(n):
            total = total + sum((matrix[i, j] - matrix[j, i]).abs() for j in range(n))
            rest = sum(matrix[i, j] for j in range(n) if j != i)
            total = total + (rest - (n - 1) * matrix[i, i]).relu()
    return total / (n * (n - 1)) / a[..., 0, 0].numel()


def slow_probs(p):
    n, total = p.shape[-1], 0
    for matrix in p.reshape(-1, n, n):
        for i in range(n):
            total = total + sum((matrix[i, j] - matrix[j, i]).abs() for j in range(n)) / 2
            total = total + (1 - n * matrix[i, i]).relu()
    return total / n / p[..., 0, 0].numel()


SLOW = {'scores': slow_scores, 'probs': slow_probs}


def attention(on, *shape, seed=0):
    a = double(*shape, seed=seed)
    return a.softmax(-1) if on == 'probs' else a


@pytest.mark.parametrize('on', SLOW)
@pytest.mark.parametrize('shape', [(2, 3, 5, 5), (1, 1, 2, 2), (4, 4)], ids=str)
def test_value_and_gradient_equal_the_explicit_sum(on, shape):
    fast, slow = (attention(on, *shape).requires_grad_() for _ in range(2))
    loss = DiagonalityPreservingLoss(on, loss_weight=0.5)(fast)
    expected = 0.5 * SLOW[on](slow)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('n', [2, 7, 49])
def test_it_is_zero_for_a_symmetric_diagonally_dominant_matrix(n):
    assert DiagonalityPreservingLoss()(dominant(n) + n * torch.eye(n)) == 0
    assert DiagonalityPreservingLoss('probs')(torch.eye(n).double()) == 0
    assert (
        DiagonalityPreservingLoss('probs')(torch.full((n, n), 1 / n, dtype=torch.float64)) < 1e-12
    )


@pytest.mark.parametrize('on', SLOW)
def test_it_grows_with_asymmetry(on):
    n, loss = 7, DiagonalityPreservingLoss(on)
    base = torch.eye(n).double() if on == 'probs' else dominant(n) + n * torch.eye(n)
    step = torch.triu(torch.ones(n, n), 1) * (0.01 if on == 'probs' else 0.1)
    values = [float(loss(base + k * (step - step.T) / 2)) for k in range(5)]
    assert values[0] < 1e-12
    assert values == sorted(values) and len(set(values)) == 5


def test_it_grows_as_the_diagonal_falls_below_its_surroundings():
    values = [float(DiagonalityPreservingLoss()(-k * torch.eye(5).double())) for k in range(4)]
    assert values[0] == 0
    assert values == sorted(values) and len(set(values)) == 4


@pytest.mark.parametrize('on', SLOW)
def test_it_does_not_depend_on_batch_and_heads(on):
    loss, a = DiagonalityPreservingLoss(on), attention(on, 1, 1, 6, 6)
    torch.testing.assert_close(loss(a.repeat(3, 4, 1, 1)), loss(a))


def test_it_does_not_depend_on_the_number_of_tokens():
    """Of matrices with the same kind of elements, whatever their size."""
    values = [float(DiagonalityPreservingLoss()(double(4, 4, n, n))) for n in (16, 49, 144)]
    assert max(values) < 1.1 * min(values)
    probs = [
        float(DiagonalityPreservingLoss('probs')(attention('probs', 4, 4, n, n)))
        for n in (16, 49, 144)
    ]
    assert max(probs) < 1.1 * min(probs)


def test_on_scores_it_is_bounded_below():
    assert DiagonalityPreservingLoss()(1e6 * torch.eye(5)) == 0


def test_only_on_scores_it_sees_what_the_softmax_ignores():
    a = dominant(5) + 5 * torch.eye(5)
    row = double(2, 3, 5, 1)
    assert DiagonalityPreservingLoss('scores')(a + row) > 0
    by_probs = DiagonalityPreservingLoss('probs')
    torch.testing.assert_close(by_probs((a + row).softmax(-1)), by_probs(a.softmax(-1)))


def test_the_weight_scales_it():
    a = double(2, 5, 5)
    losses = [DiagonalityPreservingLoss(loss_weight=w)(a) for w in (1.0, 3.0)]
    torch.testing.assert_close(losses[1], 3 * losses[0])


def test_it_is_in_the_root_registry():
    loss = MODELS.build(dict(type='DiagonalityPreservingLoss', on='probs', loss_weight=2.0))
    assert (loss.on, loss.loss_weight) == ('probs', 2.0)


def test_an_unknown_quantity_is_named():
    with pytest.raises(ValueError, match="on must be one of .*'logits'"):
        DiagonalityPreservingLoss('logits')
