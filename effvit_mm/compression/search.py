# SPDX-License-Identifier: Apache-2.0
"""Where tokens are aggregated, and to how many: the search of Yu et al. (arXiv 2310.07664).

Given that layers 1…P have static attention, choose the layers before which the Q GLADs stand and
the token counts ``m_l`` that maximise the accuracy metric ``AM = Σ_{l>P} Σ_{i≤m_l} σ_{l,i}`` while
the multiply-accumulates stay within the share ``η`` of the original's. ``σ_{l,i}`` is the
expectation of the i-th singular value of layer l's attention. Layers count from 0, token counts
include the class token.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .costs import Costs, Pyramid, check_static, cost_ratio

OBJECTIVES = ('raw', 'normalised')


@dataclass(frozen=True)
class SearchResult:
    """An architecture and what is known about it.

    Attributes:
        static_layers: Layers with static attention.
        pyramid: Pairs of layer and token count: before that layer stands a GLAD, that layer and
            later ones see that many tokens.
        tokens: Tokens that each layer sees.
        cost_ratio: Cost of blocks and GLADs over that of the original blocks.
        metric: The objective ``AM``.
        retained: ``AM`` over that of the same layers with all tokens, between 0 and 1.
        objective: ``'raw'`` or ``'normalised'``.
    """

    static_layers: tuple[int, ...]
    pyramid: Pyramid
    tokens: tuple[int, ...]
    cost_ratio: float
    metric: float
    retained: float
    objective: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON. The entry ``'arch'`` holds the fields of ``IntegratedDeiT``'s ``arch``."""
        return dict(
            arch=dict(
                static_layers=list(self.static_layers), pyramid=[list(p) for p in self.pyramid]
            ),
            tokens=list(self.tokens),
            cost_ratio=self.cost_ratio,
            objective=self.objective,
            metric=self.metric,
            retained=self.retained,
        )

    def table(self) -> str:
        """The architecture layer by layer, and its totals below, in Markdown."""
        placed = dict(self.pyramid)
        lines = ['| layer | attention | tokens | GLAD before it |', '|---|---|---|---|']
        before = self.tokens[0]
        for layer, m in enumerate(self.tokens):
            kind = 'static' if layer in self.static_layers else 'dynamic'
            glad = f'{before} → {m}' if layer in placed else ''
            lines.append(f'| {layer} | {kind} | {m} | {glad} |')
            before = m
        totals = f'cost {self.cost_ratio:.1%} of the original, {self.retained:.1%} of the'
        return '\n'.join([*lines, '', f'{totals} {self.objective} singular values retained'])


class _Problem:
    """Costs, and what each layer retains of its singular values with each token count."""

    def __init__(
        self, singular_values: Any, dim: int, num_static: int, objective: str, mlp_ratio: float
    ) -> None:
        sigma = np.asarray(singular_values, dtype=np.float64)
        if sigma.ndim != 2 or not np.isfinite(sigma).all() or (sigma < 0).any():
            raise ValueError(
                'singular_values must be a finite, non-negative array (layers, tokens), not one of '
                f'shape {sigma.shape}.'
            )
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be 'raw' or 'normalised', not {objective!r}.")
        depth, tokens = sigma.shape
        check_static(num_static, depth)
        self.costs = Costs(depth, tokens, dim, mlp_ratio)
        self.depth, self.tokens, self.objective = depth, tokens, objective
        self.num_static, self.static_layers = num_static, tuple(range(1, num_static + 1))
        self.first = num_static + 1  # the first layer that a GLAD may stand before
        if objective == 'normalised':
            total = sigma.sum(axis=1, keepdims=True)
            if (total == 0).any():
                raise ValueError("objective='normalised' needs layers with non-zero attention.")
            sigma = sigma / total
        #: (layers, tokens + 1): sum of the first m singular values
        self.kept = np.concatenate((np.zeros((depth, 1)), sigma.cumsum(axis=1)), axis=1)

    def result(self, pyramid: Pyramid) -> SearchResult:
        """What a pyramid costs and retains."""
        placed, tokens, m = dict(pyramid), [], self.tokens
        for layer in range(self.depth):
            m = placed.get(layer, m)
            tokens.append(m)
        later = range(self.first, self.depth)
        metric = float(sum(self.kept[layer, tokens[layer]] for layer in later))
        full = float(sum(self.kept[layer, -1] for layer in later))
        return SearchResult(
            static_layers=self.static_layers,
            pyramid=pyramid,
            tokens=tuple(tokens),
            cost_ratio=cost_ratio(self.costs, self.static_layers, pyramid),
            metric=metric,
            retained=metric / full if full else 1.0,
            objective=self.objective,
        )

    def cost_until_first(self) -> int:
        """Cost of the layers up to P, which no GLAD changes."""
        n = self.tokens
        return self.costs.dynamic_layer(n) + self.num_static * self.costs.static_layer(n)


def evaluate_pyramid(
    singular_values: Any,
    dim: int,
    num_static: int,
    pyramid: Sequence[Sequence[int]],
    objective: str = 'raw',
    mlp_ratio: float = 4.0,
) -> SearchResult:
    """What a given pyramid costs and retains; arguments as in :func:`search_architecture`.

    Raises:
        ValueError: Layers do not rise after layer P, or token counts do not fall.
    """
    problem = _Problem(singular_values, dim, num_static, objective, mlp_ratio)
    pairs = tuple((int(layer), int(m)) for layer, m in pyramid)
    layers, counts = [num_static, *(p[0] for p in pairs)], [problem.tokens, *(p[1] for p in pairs)]
    rising = all(a < b for a, b in itertools.pairwise(layers))
    falling = all(a > b for a, b in itertools.pairwise(counts))
    if not (rising and falling and layers[-1] < problem.depth and counts[-1] >= 1):
        raise ValueError(
            f'A pyramid has layers that rise from {num_static + 1} to {problem.depth - 1} and '
            f'token counts that fall from below {problem.tokens}; {pairs} is none.'
        )
    return problem.result(pairs)


def search_architecture(
    singular_values: Any,
    dim: int,
    num_static: int,
    num_glads: int,
    eta: float,
    objective: str = 'raw',
    m_min: int = 2,
    grid_step: int = 1,
    mlp_ratio: float = 4.0,
) -> SearchResult:
    """The best pyramid within a cost: exact, by dynamic programming.

    For each layer, token count and number of GLADs so far, all those ways to get there are kept
    that no other way beats in both cost and retained singular values (a Pareto front). The last
    GLAD needs no front: more tokens cost more and retain more, so each way takes the most that it
    can pay for.

    Args:
        singular_values: ``(L, n)``, for each layer the expectation of its attention's singular
            values, the largest first; a tensor or an array.
        dim: Channels ``d``.
        num_static: ``P``: layers 1…P have static attention, and GLADs come after them.
        num_glads: ``Q``.
        eta: The most that blocks and GLADs may cost, as a share of the original blocks.
        objective: ``'raw'``, the paper's sum, led by the layers of the highest rank, or
            ``'normalised'``, where every layer's singular values are divided by their sum.
        m_min: The smallest token count, class token included.
        grid_step: Token counts are ``m_min``, ``m_min + grid_step``, …; they fall strictly from
            one GLAD to the next.
        mlp_ratio: Hidden over input channels of the MLP.

    Raises:
        ValueError: An argument is out of range, or no pyramid satisfies all constraints; says which
            one binds.
    """
    problem = _Problem(singular_values, dim, num_static, objective, mlp_ratio)
    counts = _token_counts(problem, num_glads, eta, m_min, grid_step)
    budget = eta * problem.costs.original() * (1 + 1e-12)
    _check_budget(problem, counts, num_glads, eta, m_min)
    if num_glads == 0:
        return problem.result(())
    return problem.result(_Search(problem, counts, num_glads, budget).run())


def _token_counts(
    problem: _Problem, num_glads: int, eta: float, m_min: int, grid_step: int
) -> np.ndarray:
    """All token counts to choose from, ascending."""
    if num_glads < 0 or grid_step < 1 or m_min < 2:
        raise ValueError(
            'Q must be at least 0, grid_step at least 1 and m_min at least 2 (the class token and '
            f'one more); they are {num_glads}, {grid_step} and {m_min}.'
        )
    if not eta > 0:
        raise ValueError(f'eta must be positive, not {eta}.')
    places = problem.depth - problem.first
    if num_glads > places:
        raise ValueError(
            f'Q binds: there are {places} layers after layer {problem.num_static} and each takes '
            f'one GLAD at most, so {num_glads} GLADs have no place; lower Q or P.'
        )
    counts = np.arange(m_min, problem.tokens, grid_step, dtype=np.int64)
    if num_glads > len(counts):
        raise ValueError(
            f'm_min and grid_step bind: they leave {len(counts)} token counts below '
            f'{problem.tokens}, and {num_glads} GLADs need {num_glads} different ones.'
        )
    return counts


def _check_budget(
    problem: _Problem, counts: np.ndarray, num_glads: int, eta: float, m_min: int
) -> None:
    """Refuse a budget below the cheapest architecture, and say what makes that so expensive."""
    original = problem.costs.original() * (1 + 1e-12)
    least = _least_cost(problem, counts, num_glads) / original
    if least <= eta:
        return
    what = f'the cheapest architecture with P={problem.num_static} and Q={num_glads}'
    if num_glads == 0:
        raise ValueError(
            f'eta binds: {what} costs {least:.3f} of the original, more than eta={eta}; without '
            'GLADs only P changes the cost.'
        )
    reachable = _least_cost(problem, np.arange(2, problem.tokens), num_glads) / original
    if reachable <= eta:
        raise ValueError(
            f'm_min or grid_step binds: with token counts from {m_min} in steps of '
            f'{counts[1] - counts[0] if len(counts) > 1 else 1}, {what} costs {least:.3f} of the '
            f'original, more than eta={eta}; with all counts from 2 it would cost {reachable:.3f}.'
        )
    raise ValueError(
        f'eta binds: {what} costs {reachable:.3f} of the original with as few as 2 tokens, more '
        f'than eta={eta}: the first {problem.first} layers keep all {problem.tokens} tokens.'
    )


def _least_cost(problem: _Problem, counts: np.ndarray, num_glads: int) -> float:
    """The cost of the cheapest architecture."""
    costs = problem.costs
    glad = costs.glad(counts[:, None], counts[None]).astype(float)
    glad[np.tril_indices(len(counts))] = np.inf  # [m', m]: only from m > m' tokens
    layer_cost = costs.dynamic_layer(counts)
    before = float(problem.cost_until_first())
    least = np.full((num_glads + 1, len(counts)), np.inf)  # by GLADs so far and tokens
    for _ in range(problem.first, problem.depth):
        for q in range(num_glads, 1, -1):
            least[q] = np.minimum(least[q], (glad + least[q - 1]).min(axis=1))
        if num_glads:
            least[1] = np.minimum(least[1], before + costs.glad(problem.tokens, counts))
        least += layer_cost
        before += costs.dynamic_layer(problem.tokens)
    return float(least[num_glads].min()) if num_glads else before


@dataclass
class _Ways:
    """Ways to get to one place: their costs, gains, token counts now, and GLADs so far."""

    cost: np.ndarray  # (k,) float64, exact: costs are integers far below 2**53
    gain: np.ndarray  # (k,)
    tokens: np.ndarray  # (k,)
    path: np.ndarray  # (k, q, 2)

    def take(self, index: np.ndarray) -> '_Ways':
        """Some of the ways."""
        return _Ways(self.cost[index], self.gain[index], self.tokens[index], self.path[index])

    @staticmethod
    def join(parts: Sequence['_Ways']) -> '_Ways':
        """All ways of all parts."""
        names = ('cost', 'gain', 'tokens', 'path')
        return _Ways(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def _pareto_front(cost: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Indices of the ways that no other one beats in both, by rising cost."""
    order = np.lexsort((-gain, cost))
    best = np.maximum.accumulate(gain[order])
    rises = np.concatenate(([True], best[1:] > best[:-1]))
    return order[rises]


class _Search:
    """The dynamic programming, layer by layer."""

    def __init__(
        self, problem: _Problem, counts: np.ndarray, num_glads: int, budget: float
    ) -> None:
        self.problem, self.counts, self.num_glads, self.budget = problem, counts, num_glads, budget
        # kept[l, m] summed over layer l and all later ones
        self.kept_from = problem.kept[::-1].cumsum(axis=0)[::-1]
        self.best: tuple[float, float] = (-math.inf, math.inf)  # gain, cost
        self.best_path: Pyramid = ()

    def run(self) -> Pyramid:
        """The best pyramid; the caller knows that there is one."""
        problem = self.problem
        none = np.zeros((1, 0, 2), dtype=np.int64)
        start = float(problem.cost_until_first())
        # ways[q]: with q GLADs so far, before the layer at hand
        ways: list[_Ways | None] = [None] * self.num_glads
        ways[0] = _Ways(np.array([start]), np.zeros(1), np.array([problem.tokens]), none)
        for layer in range(problem.first, problem.depth):
            self._place_last(layer, ways[-1])
            for q in range(self.num_glads - 1, 0, -1):
                ways[q] = self._place(layer, ways[q - 1], ways[q], self.num_glads - q)
            ways = [w and self._pass(layer, w) for w in ways]
        return self.best_path

    def _pass(self, layer: int, ways: _Ways) -> _Ways:
        """The ways after a layer."""
        cost = ways.cost + self.problem.costs.dynamic_layer(ways.tokens)
        gain = ways.gain + self.problem.kept[layer, ways.tokens]
        return _Ways(cost, gain, ways.tokens, ways.path)

    def _place(
        self, layer: int, before: _Ways | None, here: _Ways | None, later_glads: int
    ) -> _Ways | None:
        """The front of the ways with a GLAD before ``layer`` and those that had it earlier."""
        if before is None and here is None:
            return None
        fronts, costs, left = [], self.problem.costs, self.problem.depth - layer
        for m in self.counts[later_glads:].tolist():
            parts = []
            if here is not None:
                parts.append(here.take(np.flatnonzero(here.tokens == m)))
            if before is not None:
                new = before.take(np.flatnonzero(before.tokens > m))
                step = np.broadcast_to(np.array([layer, m]), (len(new.cost), 1, 2))
                path = np.concatenate((new.path, step), axis=1)
                cost = new.cost + costs.glad(new.tokens, m)
                parts.append(_Ways(cost, new.gain, np.full_like(new.tokens, m), path))
            ways = _Ways.join(parts)
            # the next GLADs come a layer later at the earliest
            rest = costs.dynamic_layer(m) + (left - 1) * costs.dynamic_layer(int(self.counts[0]))
            affordable = np.flatnonzero(ways.cost + rest <= self.budget)
            if len(affordable):
                ways = ways.take(affordable)
                fronts.append(ways.take(_pareto_front(ways.cost, ways.gain)))
        return _Ways.join(fronts) if fronts else None

    def _place_last(self, layer: int, ways: _Ways | None) -> None:
        """Put the last GLAD before ``layer``, with the most tokens that each way can pay for."""
        if ways is None:
            return
        costs, left = self.problem.costs, self.problem.depth - layer
        # how many of the ascending counts are below the tokens now, and how many can be paid for
        high = np.searchsorted(self.counts, ways.tokens)
        low = np.zeros_like(high)
        while (low < high).any():
            middle = (low + high) // 2
            m = self.counts[np.minimum(middle, len(self.counts) - 1)]
            total = ways.cost + costs.glad(ways.tokens, m) + left * costs.dynamic_layer(m)
            fits = (total <= self.budget) & (low < high)
            low, high = np.where(fits, middle + 1, low), np.where(fits, high, middle)
        some = np.flatnonzero(low)
        if not len(some):
            return
        ways, m = ways.take(some), self.counts[low[some] - 1]
        total = ways.cost + costs.glad(ways.tokens, m) + left * costs.dynamic_layer(m)
        gain = ways.gain + self.kept_from[layer, m]
        i = np.lexsort((total, -gain))[0]
        if (gain[i], -total[i]) > (self.best[0], -self.best[1]):
            self.best = float(gain[i]), float(total[i])
            steps = [*ways.path[i].tolist(), [layer, m[i].item()]]
            self.best_path = tuple((a, b) for a, b in steps)
