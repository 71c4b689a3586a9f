"""Search for the order in which micro-batches enter a pipeline.

A pipeline whose micro-batches differ runs best when neighbours have similar work: light ones first,
then heavier and heavier ones, then lighter ones again. Such *pyramids* differ in the weights of the
units' times, in the micro-batches that rise and those that fall, and in the positions of the few
heaviest: some belong to the warm-up or the cool-down, far from the others. The search is genetic:
it draws random pyramids, breeds the best of them, and then moves single micro-batches.

Shape suffixes used in this file: R = candidates, C = cells (micro-batches of all replicas),
F = features of a cell, L = lists, M = places of a list, H = heaviest cells of a list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Indices

# Candidates evaluated at once: few enough for the cache, and numpy's calls cost little each.
_AT_ONCE = 64
# Pyramids that a generation is bred from. Chosen by hand.
_PARENTS = 4
# Micro-batches for which the default budget is large enough; more ones get more in proportion.
_DEFAULT_MICROBATCHES = 32
# Heaviest cells of a list that may stand outside the pyramid. Chosen by hand.
_MAX_APART = 4
# Probability with which such a cell does.
_APART_PROBABILITY = 0.5
# Relative loss that a move may have at first; it falls to 0 towards the end. Chosen by hand.
_WORSE = 0.01
# Relative spread of makespans below which the order does not matter.
_SAME = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBudget:
    """The number of candidates; counts and not seconds, so that every process tries the same.

    Attributes:
        first: random pyramids; with 0 the order stays as given.
        generations: each breeds 64 pyramids.
        scans: each tries 64 moves and swaps of single micro-batches.
    """

    first: int = 256
    generations: int = 128
    scans: int = 192

    @property
    def columns(self) -> int:
        """Number of orders that are evaluated."""
        return self.first + _AT_ONCE * (self.generations + self.scans)


def full_budget(num_microbatches: int) -> OrderBudget:
    """A budget beyond which little is gained; it grows with the number of micro-batches."""
    factor = max(1.0, num_microbatches / _DEFAULT_MICROBATCHES)
    full = OrderBudget()
    generations, scans = int(full.generations * factor), int(full.scans * factor)
    return replace(full, generations=generations, scans=scans)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """The best order found.

    Attributes:
        order: place k holds cell ``order[k]``.
        makespan: its time, in the unit of the times given.
    """

    order: Indices
    makespan: float


def search_order(
    evaluate: Callable[[Indices], Floats],
    time_FC: Floats,
    lists: Sequence[Sequence[int]],
    *,
    seed: int,
    budget: OrderBudget,
) -> FoundOrder:
    """The best order of cells found within the budget, never worse than the given one.

    Args:
        evaluate: orders [R, C] to makespans [R].
        time_FC: times of the cells, one row per part of the pipeline.
        lists: places whose cells may be exchanged, in pipeline order: the micro-batches of one
            replica. Places in no list keep their cells.
        seed: the same seed gives the same order.
    """
    search = _OrderSearch(evaluate, time_FC, lists, seed)
    given = float(evaluate(np.arange(time_FC.shape[1])[None, :])[0])
    order, makespan = search.run(given, budget)
    return FoundOrder(order=order, makespan=makespan)


@dataclass(slots=True)
class _Genes:
    """The parameters of pyramids.

    Attributes:
        weights: [R, F].
        up: [R, M], whether the cell of that rank in its list stands on the rising side.
        apart: [R, H], relative position of the h-th heaviest cell in its list; -1 in the pyramid.
    """

    weights: Floats
    up: NDArray[np.bool_]
    apart: Floats

    def of(self, chosen: Indices) -> _Genes:
        return _Genes(self.weights[chosen], self.up[chosen], self.apart[chosen])


@dataclass(slots=True)
class _Pyramids:
    """Candidates: orders [R, C] and makespans [R]."""

    genes: _Genes
    orders: Indices
    spans: Floats

    def best(self, count: int) -> _Pyramids:
        top = np.argsort(self.spans, kind="stable")[:count]
        return _Pyramids(self.genes.of(top), self.orders[top], self.spans[top])

    def joined(self, other: _Pyramids) -> _Pyramids:
        return _Pyramids(
            _Genes(
                np.vstack([self.genes.weights, other.genes.weights]),
                np.vstack([self.genes.up, other.genes.up]),
                np.vstack([self.genes.apart, other.genes.apart]),
            ),
            np.vstack([self.orders, other.orders]),
            np.concatenate([self.spans, other.spans]),
        )


class _OrderSearch:
    def __init__(
        self,
        evaluate: Callable[[Indices], Floats],
        time_FC: Floats,
        lists: Sequence[Sequence[int]],
        seed: int,
    ) -> None:
        self._evaluate = evaluate
        self._time_FC = time_FC
        self._rng = np.random.Generator(np.random.PCG64(seed))
        by_length: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        for places in lists:
            if len(places) > 1:
                by_length[len(places)].append(places)
        self._groups = [np.array(rows, np.intp) for _, rows in sorted(by_length.items())]
        self._ranks = [self._ranking(places_LM) for places_LM in self._groups]

    def run(self, given: float, budget: OrderBudget) -> tuple[Indices, float]:
        order, span = np.arange(self._time_FC.shape[1]), given
        if not self._groups or not budget.first:
            return order, span
        pyramids = self._draw(budget.first)
        if pyramids.spans.max() > pyramids.spans.min() * (1 + _SAME):
            for _ in range(budget.generations):
                parents = pyramids.best(_PARENTS)
                pyramids = parents.joined(self._bred(parents))
        else:
            budget = OrderBudget(scans=0)
        best = int(pyramids.spans.argmin())
        if pyramids.spans[best] < span:
            order, span = pyramids.orders[best], float(pyramids.spans[best])
        return self._climb(order, span, budget.scans)

    def _climb(self, order: Indices, span: float, scans: int) -> tuple[Indices, float]:
        """Scan from the best order so far, at first over slightly worse ones."""
        best, best_span = order, span
        for index in range(scans):
            allowed = 1 + _WORSE * (1 - index / scans) ** 2
            order, span = self._scan(order, span, allowed)
            if span < best_span:
                best, best_span = order, span
        return best, best_span

    def _ranking(self, places_LM: Indices) -> Indices:
        """Rank of each place's cell in its list, by the sum of its times."""
        heavy = np.cumsum(self._time_FC, axis=0)[-1][places_LM]
        return np.argsort(np.argsort(heavy, axis=1, kind="stable"), axis=1)

    def _draw(self, count: int) -> _Pyramids:
        weights = self._rng.random((count, len(self._time_FC)))
        longest = max(places_LM.shape[1] for places_LM in self._groups)
        up = self._rng.random((count, longest)) < 0.5
        return self._built(_Genes(weights, up, self._apart(count)))

    def _apart(self, count: int) -> Floats:
        places = self._rng.random((count, _MAX_APART))
        return np.where(self._rng.random(places.shape) < _APART_PROBABILITY, places, -1.0)

    def _bred(self, parents: _Pyramids) -> _Pyramids:
        genes = parents.genes.of(self._rng.integers(len(parents.spans), size=_AT_ONCE))
        weights = genes.weights * (0.6 + 0.8 * self._rng.random(genes.weights.shape))
        flipped = self._rng.random(genes.up.shape) < 2.0 / genes.up.shape[1]
        # Some cells that stand apart are drawn again, and some move a little.
        chance, step = self._rng.random((2, *genes.apart.shape))
        moved = np.clip(genes.apart + 0.2 * (step - 0.5), 0.0, 1.0)
        apart = np.where((chance < 0.4) & (genes.apart >= 0), moved, genes.apart)
        apart = np.where(chance < 0.15, self._apart(_AT_ONCE), apart)
        return self._built(_Genes(weights, genes.up ^ flipped, apart))

    def _built(self, genes: _Genes) -> _Pyramids:
        # Summed feature by feature: the rounding of matrix products depends on the processor.
        key_RC = np.zeros((len(genes.up), self._time_FC.shape[1]))
        for feature, time_C in enumerate(self._time_FC):
            key_RC += genes.weights[:, feature, None] * time_C
        orders = np.repeat(np.arange(key_RC.shape[1])[None, :], len(key_RC), axis=0)
        for places_LM, rank_LM in zip(self._groups, self._ranks, strict=True):
            key = key_RC[:, places_LM]
            rises = genes.up[:, rank_LM]
            place = np.where(rises, key, 2 * key.max(axis=2, keepdims=True) - key)
            place = _set_apart(place, genes.apart, rank_LM)
            filled = np.argsort(place, axis=2, kind="stable")
            orders[:, places_LM] = np.take_along_axis(
                np.broadcast_to(places_LM, filled.shape), filled, axis=2
            )
        return _Pyramids(genes, orders, self._spans(orders))

    def _spans(self, orders: Indices) -> Floats:
        parts = [orders[i : i + _AT_ONCE] for i in range(0, len(orders), _AT_ONCE)]
        return np.concatenate([self._evaluate(part) for part in parts])

    def _scan(self, order: Indices, span: float, allowed: float) -> tuple[Indices, float]:
        """Take the best of 64 changes, each of all lists of a length or of one of them."""
        places_LM = self._groups[int(self._rng.integers(len(self._groups)))]
        if len(places_LM) > 1 and self._rng.integers(2):
            places_LM = places_LM[[int(self._rng.integers(len(places_LM)))]]
        changed = draw_changes(self._rng, places_LM.shape[1])
        orders = np.repeat(order[None, :], len(changed), axis=0)
        orders[:, places_LM] = order[places_LM][:, changed].swapaxes(0, 1)
        spans = self._evaluate(orders)
        best = int(spans.argmin())
        # Equal orders are taken too, to cross plateaus.
        if spans[best] <= span * allowed:
            return orders[best], float(spans[best])
        return order, span


def _set_apart(place: Floats, apart: Floats, rank_LM: Indices) -> Floats:
    """Sort keys [R, L, M] of the cells, the heaviest at their positions ``apart`` [R, H]."""
    count = rank_LM.shape[1]
    ranked = np.argsort(np.argsort(place, axis=2, kind="stable"), axis=2, kind="stable")
    place = ranked.astype(np.float64)
    for index in range(min(apart.shape[1], count - 1)):
        wanted = apart[:, index, None, None]
        heavy = rank_LM == count - 1 - index
        place = np.where(heavy & (wanted >= 0), wanted * count - 0.5, place)
    return place


def draw_changes(rng: np.random.Generator, count: int) -> Indices:
    """[64, count]: one place's content moved to another place or swapped with it; count >= 2."""
    place = rng.integers(count, size=(_AT_ONCE, 1))
    target = (place + 1 + rng.integers(count - 1, size=place.shape)) % count
    old = np.arange(count)
    passed = (np.minimum(place, target) <= old) & (old <= np.maximum(place, target))
    moved = np.where(passed, old + np.sign(target - place), old)
    swapped = np.where(old == place, target, old)
    changed = np.where(rng.random(place.shape) < 0.5, moved, swapped)
    return np.where(old == target, place, changed)
