"""Search for the order in which micro-batches enter a pipeline.

A pipeline whose micro-batches differ runs best when neighbours are alike: light ones first, then
ever heavier ones, then lighter ones again. Such *pyramids* differ in what counts as heavy (a
weight for each unit's time) and in who goes up and who goes down. The search draws pyramids,
breeds the best of them, and then moves single micro-batches.

Shape suffixes used in this file: R = candidates, C = cells (micro-batches of all replicas),
F = features of a cell, L = lists, M = places of a list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_AT_ONCE = 64
_PARENTS = 4
_KICKS = 3
# Spread below which the order does not matter.
_SAME = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to try; counts and not seconds, so that every process tries the same.

    Attributes:
        first: pyramids drawn; with 0 the order stays as given.
        generations: each breeds 64 pyramids.
        scans: each tries a micro-batch, or a few, at every place, moved and swapped.
    """

    first: int = 128
    generations: int = 64
    scans: int = 96

    def columns(self, num_microbatches: int) -> int:
        """Orders that are evaluated, with so many micro-batches in the longest list."""
        scanned = 2 * num_microbatches * scanned_places(num_microbatches)
        return self.first + _AT_ONCE * self.generations + scanned * self.scans


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order found.

    Attributes:
        order: place k holds cell ``order[k]``.
        makespan: its time, in the unit of the times given.
        given: that of the order as given.
    """

    order: Indices
    makespan: float
    given: float


def search_order(
    evaluate: Callable[[Indices], Floats],
    time_FC: Floats,
    lists: Sequence[Sequence[int]],
    *,
    seed: int,
    effort: Effort,
) -> Found:
    """The best order of cells that the effort finds, never worse than the one given.

    Args:
        evaluate: orders [R, C] to makespans [R].
        time_FC: what makes a cell heavy, one row per part of the pipeline.
        lists: places whose cells may change places with each other, in pipeline order: the
            micro-batches of one replica. Places in no list keep their cells.
        seed: the same seed gives the same order.
    """
    search = _Search(evaluate, time_FC, lists, seed)
    given = float(evaluate(np.arange(time_FC.shape[1])[None, :])[0])
    found = search.run(given, effort)
    return Found(order=found[0], makespan=found[1], given=given)


@dataclass(slots=True)
class _Pyramids:
    """Candidates: weights [R, F] and, per place in the list's ranking, whether it goes up."""

    weights: Floats
    up: NDArray[np.bool_]
    orders: Indices
    spans: Floats

    def best(self, count: int) -> _Pyramids:
        top = np.argsort(self.spans, kind="stable")[:count]
        return _Pyramids(self.weights[top], self.up[top], self.orders[top], self.spans[top])

    def joined(self, other: _Pyramids) -> _Pyramids:
        return _Pyramids(
            np.vstack([self.weights, other.weights]),
            np.vstack([self.up, other.up]),
            np.vstack([self.orders, other.orders]),
            np.concatenate([self.spans, other.spans]),
        )


class _Search:
    def __init__(
        self,
        evaluate: Callable[[Indices], Floats],
        time_FC: Floats,
        lists: Sequence[Sequence[int]],
        seed: int,
    ) -> None:
        self._evaluate = evaluate
        # A unit that is idle beside the others decides nothing, however uneven it is.
        self._time_FC = time_FC
        self._rng = np.random.Generator(np.random.PCG64(seed))
        by_length: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        for places in lists:
            if len(places) > 1:
                by_length[len(places)].append(places)
        self._groups = [np.array(rows, np.intp) for _, rows in sorted(by_length.items())]
        self._ranks = [self._ranking(places_LM) for places_LM in self._groups]

    def run(self, given: float, effort: Effort) -> tuple[Indices, float]:
        order, span = np.arange(self._time_FC.shape[1]), given
        if not self._groups or not effort.first:
            return order, span
        drawn = self._draw(effort.first)
        if drawn.spans.max() > drawn.spans.min() * (1 + _SAME):
            for _ in range(effort.generations):
                parents = drawn.best(_PARENTS)
                drawn = parents.joined(self._bred(parents))
        else:
            effort = Effort(scans=0)
        best = int(drawn.spans.argmin())
        if drawn.spans[best] < span:
            order, span = drawn.orders[best], float(drawn.spans[best])
        return self._climb(order, span, effort.scans)

    def _climb(self, order: Indices, span: float, scans: int) -> tuple[Indices, float]:
        """Scan from the best order so far; where it leads no further, from one nearby."""
        best, best_span, idle = order, span, 0
        longest = max(places_LM.shape[1] for places_LM in self._groups)
        for _ in range(scans):
            if idle * scanned_places(longest) > 2 * longest:
                order, idle = self._kicked(best), 0
                span = float(self._evaluate(order[None, :])[0])
            before = span
            order, span = self._scan(order, span)
            idle = idle + 1 if span == before else 0
            if span < best_span:
                best, best_span = order, span
        return best, best_span

    def _kicked(self, order: Indices) -> Indices:
        """A few swaps away, the same in all lists of a length."""
        kicked = order.copy()
        for places_LM in self._groups:
            for _ in range(_KICKS):
                pair = self._rng.choice(places_LM.shape[1], 2, replace=False)
                kicked[places_LM[:, pair]] = kicked[places_LM[:, pair[::-1]]]
        return kicked

    def _ranking(self, places_LM: Indices) -> Indices:
        """Rank of each place's cell in its list, by whole time: alike in all lists."""
        heavy = np.cumsum(self._time_FC, axis=0)[-1][places_LM]
        return np.argsort(np.argsort(heavy, axis=1, kind="stable"), axis=1)

    def _draw(self, count: int) -> _Pyramids:
        # Sums of exponentials would do; a running sum rounds alike on every processor.
        drawn = self._rng.random((count, len(self._time_FC)))
        longest = max(places_LM.shape[1] for places_LM in self._groups)
        return self._built(drawn, self._rng.random((count, longest)) < 0.5)

    def _bred(self, parents: _Pyramids) -> _Pyramids:
        chosen = self._rng.integers(len(parents.spans), size=_AT_ONCE)
        weights, up = parents.weights[chosen], parents.up[chosen]
        weights = weights * (0.6 + 0.8 * self._rng.random(weights.shape))
        flipped = self._rng.random(up.shape) < 2.0 / up.shape[1]
        return self._built(weights, up ^ flipped)

    def _built(self, weights: Floats, up: NDArray[np.bool_]) -> _Pyramids:
        # Summed feature by feature: a matrix product rounds differently on other processors.
        key_RC = np.zeros((len(weights), self._time_FC.shape[1]))
        for feature, time_C in enumerate(self._time_FC):
            key_RC += weights[:, feature, None] * time_C
        orders = np.repeat(np.arange(key_RC.shape[1])[None, :], len(weights), axis=0)
        for places_LM, rank_LM in zip(self._groups, self._ranks, strict=True):
            key = key_RC[:, places_LM]
            rises = up[:, rank_LM]
            place = np.where(rises, key, 2 * key.max(axis=2, keepdims=True) - key)
            filled = np.argsort(place, axis=2, kind="stable")
            orders[:, places_LM] = np.take_along_axis(
                np.broadcast_to(places_LM, filled.shape), filled, axis=2
            )
        return _Pyramids(weights, up, orders, self._spans(orders))

    def _spans(self, orders: Indices) -> Floats:
        parts = [orders[i : i + _AT_ONCE] for i in range(0, len(orders), _AT_ONCE)]
        return np.concatenate([self._evaluate(part) for part in parts])

    def _scan(self, order: Indices, span: float) -> tuple[Indices, float]:
        """Some places against all others, in all lists of a length or in one of them."""
        places_LM = self._groups[int(self._rng.integers(len(self._groups)))]
        if len(places_LM) > 1 and self._rng.integers(2):
            places_LM = places_LM[[int(self._rng.integers(len(places_LM)))]]
        count = places_LM.shape[1]
        tried = self._rng.choice(count, min(count, scanned_places(count)), replace=False)
        changed = np.vstack([one_change(count, place) for place in tried.tolist()])
        orders = np.repeat(order[None, :], len(changed), axis=0)
        orders[:, places_LM] = order[places_LM][:, changed].swapaxes(0, 1)
        spans = self._spans(orders)
        best = int(spans.argmin())
        # Equal is taken too: the way down leads over plateaus.
        return (orders[best], float(spans[best])) if spans[best] <= span else (order, span)


def scanned_places(count: int) -> int:
    """Places that a scan of a list tries: short lists leave room for several."""
    return max(1, _AT_ONCE // (2 * count))


def one_change(count: int, place: int) -> Indices:
    """[2 count, count]: what is at ``place`` moved to every place, and swapped with every one."""
    target = np.arange(count)
    rest = np.delete(target, place)
    shifted = target[None, :] - (target[None, :] > target[:, None])
    moved = np.append(rest, 0)[shifted]
    moved[target, target] = place
    swapped = np.repeat(target[None, :], count, axis=0)
    swapped[target, place] = target
    swapped[target, target] = place
    return np.vstack([moved, swapped])
