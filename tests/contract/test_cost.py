# SPDX-License-Identifier: Apache-2.0
"""Contract: cost. What is published is met, what is counted is what the formula says, and growth is
nearly linear. Times are measured in ``docs/benchmarks.md``, never asserted."""

import pytest
from torch import nn

from effvit_mm.analysis.cost import analytical_macs, counted_macs, growth_exponent, peak_memory

NUM_CLASSES = 1000


@pytest.fixture(scope='session')
def costs(family):
    """Of every named architecture, as a classifier: millions of parameters, GMACs, MACs' growth."""
    table = {}
    for arch in family.cls.arch_zoo:
        backbone = family.cls(arch=arch, out_indices=(3,))
        head = backbone.out_channels[0] * NUM_CLASSES
        params = sum(p.numel() for p in backbone.parameters()) + head + NUM_CLASSES
        macs = analytical_macs(backbone, 224, 224) + head
        growth = growth_exponent(lambda h, w, b=backbone: analytical_macs(b, h, w))
        table[arch] = params / 1e6, macs / 1e9, growth
    return table


def test_published_budgets_are_those_of_named_architectures(family):
    assert family.budgets.keys() <= family.cls.arch_zoo.keys()


def test_named_architectures_meet_the_published_parameters(family, costs):
    published = {arch: b.params for arch, b in family.budgets.items() if b.params is not None}
    assert {arch: costs[arch][0] for arch in published} == pytest.approx(published, rel=0.03)


def test_named_architectures_meet_the_published_macs(family, costs):
    published = {arch: b.gmacs for arch, b in family.budgets.items() if b.gmacs is not None}
    assert {arch: costs[arch][1] for arch in published} == pytest.approx(published, rel=0.05)


def test_macs_grow_nearly_linearly_with_pixels(family, costs):
    assert all(growth <= 1.15 for *_, growth in costs.values()), costs


@pytest.mark.slow
@pytest.mark.parametrize('size', [(224, 224), (100, 133)], ids=str)
def test_the_formula_equals_the_counter_for_named_architectures(family, arch, size):
    backbone = family.cls(arch=arch)
    counted = counted_macs(backbone, *size)
    assert analytical_macs(backbone, *size) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize('size', [(224, 224), (37, 61)], ids=str)
@pytest.mark.parametrize('out_indices', [(0,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_the_formula_equals_the_counter(family, size, out_indices):
    backbone = family.build(out_indices=out_indices, in_channels=1)
    counted = counted_macs(backbone, *size, in_channels=1)
    assert analytical_macs(backbone, *size) == pytest.approx(counted, rel=0.02)


def test_the_formula_equals_the_counter_for_every_ablation(family):
    for fields in family.ablations:
        backbone = family.cls(arch={**family.small, **fields})
        counted = counted_macs(backbone, 224, 224)
        assert analytical_macs(backbone, 224, 224) == pytest.approx(counted, rel=0.02), fields


def test_a_module_without_formula_is_an_error():
    with pytest.raises(TypeError, match='Linear'):
        analytical_macs(nn.Linear(2, 2), 224, 224)


@pytest.mark.slow
@pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])
def test_peak_memory_grows_nearly_linearly_with_pixels(family, arch, training):
    backbone = family.cls(arch=arch)
    assert growth_exponent(lambda h, w: peak_memory(backbone, h, w, training)) <= 1.15
