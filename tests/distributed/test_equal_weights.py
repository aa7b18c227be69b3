# SPDX-License-Identifier: Apache-2.0
"""Two processes train the same weights as one with the same global batch.

The digits configs with small backbones, ten steps through ``engine.launch`` and mmengine's
Runner; ``digits.py`` says what makes the frameworks' losses independent of how images are shared
out. All is computed in float64. Some results of the frameworks are not: a mean is taken over ``n +
1.2e-7``, which is of another size for half of the images; and LaViT's own loss has kinks, at which
identical tokens of an empty background lie, so that rounding chooses the gradient there.
"""

import pytest
import torch
from contract.families import FAMILIES
from contract.frameworks import FRAMEWORKS, need

from .digits import STEPS, Case, train

SUBSET = dict(mmpretrain=(1,), mmdet=(0, 1, 2), mmseg=(0, 1, 2))
VARIANTS = {
    'plain': lambda framework: dict(),
    'frozen stages': lambda framework: dict(frozen_stages=1),
    'checkpointing': lambda framework: dict(with_cp=True),
    'some outputs': lambda framework: dict(out_indices=SUBSET[framework]),
}


def cases():
    """All; LaViT, with its loss, stands for the others in a fast run, besides
    ``tests/contract/test_training.py``, where two processes train all families."""
    for framework in FRAMEWORKS:
        for family in FAMILIES:
            for variant in VARIANTS:
                name = family.name
                fast = variant == 'plain' and name == 'LaViT'
                marks = [] if fast else [pytest.mark.slow]
                values = framework, name, variant
                yield pytest.param(*values, marks=marks, id='-'.join(values))


def distance(a, b):
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(('framework', 'family', 'variant'), cases())
def test_two_processes_train_the_weights_of_one(
    framework, family, variant, one, two, digits_root, tmp_path
):
    need(framework)
    case = Case(family, framework, VARIANTS[variant](framework), hook=family == 'LaViT')
    (alone,) = one.call(train, case, 1, digits_root, str(tmp_path / 'one'))
    first, second = two.call(train, case, 2, digits_root, str(tmp_path / 'two'))

    assert distance(first['after'], second['after']) == 0
    assert distance(alone['before'], first['before']) == 0
    moved = distance(alone['before'], alone['after'])
    tolerance = 1e-4 if family == 'LaViT' else 1e-6
    assert distance(alone['after'], first['after']) < tolerance * moved

    # the ranks saw other images than each other, and together those of the one process
    assert len(alone['losses']) == len(first['losses']) == STEPS
    for step, (a, b, c) in enumerate(
        zip(alone['losses'], first['losses'], second['losses'], strict=True)
    ):
        assert b['loss'] != c['loss'], step
        mean = (b['loss'] + c['loss']) / 2
        assert a['loss'] == pytest.approx(mean, rel=1e-5), step
        assert ('loss_diagonality' in a) == (family == 'LaViT')

    frozen = set() if variant != 'frozen stages' else frozen_names(family)
    for name, p in alone['before'].items():
        if name.startswith('backbone.'):  # a detector's first samples leave other parts out
            assert torch.equal(alone['after'][name], p) == (name in frozen), name


def frozen_names(name):
    """Names of what ``frozen_stages=1`` freezes."""
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(awake=False, frozen_stages=1)
    return {f'backbone.{n}' for n, _ in model.named_parameters() if family.is_frozen(n, 1)}


@pytest.mark.slow
def test_a_gradient_that_is_not_averaged_would_be_seen(one, two, digits_root, tmp_path):
    """Two processes with half of the images each and twice the learning rate differ by far more
    than the tolerance."""
    need('mmpretrain')
    case = Case('PartialFormer', 'mmpretrain')
    wrong = Case('PartialFormer', 'mmpretrain', settings={'optim_wrapper.optimizer.lr': 0.02})
    (alone,) = one.call(train, case, 1, digits_root, str(tmp_path / 'one'))
    first, _ = two.call(train, wrong, 2, digits_root, str(tmp_path / 'two'))
    moved = distance(alone['before'], alone['after'])
    assert distance(alone['after'], first['after']) > 0.1 * moved
