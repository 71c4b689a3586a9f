"""Search for a short schedule: a portfolio of list schedules, then local moves within a budget."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mmplan.solvers.mpsp.bounds import Column
from mmplan.solvers.mpsp.fluid_schedules import Fluid
from mmplan.solvers.mpsp.initial_schedules import from_columns, portfolio
from mmplan.solvers.mpsp.instance import Instance, parts
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Evaluator, Pieces, SchedulePiece

# Worse by this share of the time is taken with probability 1/e, at first and at last.
_HOT, _COLD = 0.003, 0.0001
# Moves without a better draft before the search returns to the best.
_PATIENCE = 2000
# A draft this close to the bound is not worth more seconds.
_ENOUGH = 1.0005
_STRETCHES = (1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.5)
# Orders of a configuration program's columns to try.
_SHUFFLES = 40
# Shares of the budget: the portfolio, each configuration program's answers, fluid schedules.
_DRAWN, _ANSWERS, _FLUID = 0.1, 0.1, 0.5
# Of the rest: each of so many first drafts, the one without cuts.
_FIRST, _FIRSTS, _WHOLE = 0.1, 3, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best drafts.

    Attributes:
        best: of all.
        whole: of those with one slice for each chain, which move no activations.
    """

    best: ChainSchedule
    whole: ChainSchedule


def search(
    evaluator: Evaluator,
    *,
    targets: Sequence[Sequence[float]],
    columns: Sequence[Sequence[Column]],
    bound_s: float,
    limit_s: float,
    seed: int = 0,
) -> SearchResult:
    """The best drafts that are found within the seconds.

    Args:
        targets: ways to set the seconds that each chain should take.
        columns: answers of configuration programs; the first of all levels together.
        bound_s: nothing takes less.
    """
    begun = time.monotonic()
    rng = random.Random(seed)
    instance = evaluator.instance
    # Each kind takes its share of the seconds, at least one draft of each.
    until = begun + limit_s * _DRAWN
    pools = [_rated(evaluator, portfolio(instance, targets, _STRETCHES), until)]
    for own in columns:
        if own:
            until += limit_s * _ANSWERS
            pools.append(_rated(evaluator, _from_answer(instance, own, rng), until))
    until = max(until, time.monotonic()) + limit_s * _FLUID
    pools.append(_evolved(evaluator, Fluid(instance, targets[-1], rng), until))
    pool = [rated for own in pools for rated in own]
    whole = min((_Rated.of(evaluator, d) for d in _whole(pool)), key=lambda rated: rated.cost_s)
    starts = [min(own, key=lambda rated: rated.cost_s) for own in pools] + [whole]
    left_s = max(0.0, limit_s - (time.monotonic() - begun))
    climb = _Climb(evaluator, rng, bound_s)
    ahead = sorted(starts, key=lambda rated: rated.cost_s)[:_FIRSTS]
    ahead = [climb.run(rated, _FIRST * left_s, _MOVES, _WEIGHTS) for rated in ahead]
    whole = climb.run(whole, _WHOLE * left_s, (_recount, _hurry), (1, 1))
    best = min((*starts, *ahead, whole), key=lambda rated: rated.cost_s)
    rest_s = limit_s - (time.monotonic() - begun)
    best = climb.run(best, rest_s, _MOVES, _WEIGHTS)
    return SearchResult(best=best.draft, whole=whole.draft)


@dataclass(frozen=True, slots=True)
class _Rated:
    """A draft with its cost, what guides the search, the starts and each chain's device-seconds."""

    draft: ChainSchedule
    cost_s: float
    guide_s: float
    starts: list[list[float]]
    areas: list[float]

    @classmethod
    def of(cls, evaluator: Evaluator, draft: ChainSchedule) -> _Rated:
        areas = [evaluator.area(m, own) for m, own in enumerate(draft.pieces)]
        return cls(draft, *evaluator.cost(draft, sum(areas)), areas)


def _rated(evaluator: Evaluator, drafts: Iterator[ChainSchedule], deadline: float) -> list[_Rated]:
    rated: list[_Rated] = []
    for draft in drafts:
        rated.append(_Rated.of(evaluator, draft))
        if time.monotonic() > deadline:
            break
    return rated


def _evolved(evaluator: Evaluator, fluid: Fluid, deadline: float) -> list[_Rated]:
    """Fluid schedules, each setting drawn near the best one so far."""
    rated: list[_Rated] = []
    first, best, least_s = fluid.first(), None, math.inf
    while not rated or time.monotonic() < deadline:
        setting = first.pop() if first else fluid.draw(best)
        pieces = fluid.pieces(setting)
        own = [_Rated.of(evaluator, ChainSchedule(pieces, strict)) for strict in (False, True)]
        rated += own
        cost_s = min(x.cost_s for x in own)
        if cost_s < least_s:
            best, least_s = setting, cost_s
    return rated


def _whole(pool: Sequence[_Rated]) -> Iterator[ChainSchedule]:
    """The best drafts with each chain on the count of its longest slice."""
    for rated in sorted(pool, key=lambda rated: rated.cost_s)[:40]:
        pieces: Pieces = []
        for own in rated.draft.pieces:
            k = max(own, key=lambda piece: piece[2] - piece[1])[0]
            pieces.append([(k, 0, own[-1][2], own[0][3])])
        yield ChainSchedule(pieces, rated.draft.strict)


def _from_answer(
    instance: Instance, columns: Sequence[Column], rng: random.Random
) -> Iterator[ChainSchedule]:
    """A configuration program's slices shifted left, in several orders of its columns."""
    order = sorted(range(len(columns)), key=lambda j: -columns[j].seconds)
    tables = [parts(chain.both_s) for chain in instance.chains]
    for attempt in range(_SHUFFLES):
        if attempt == 1:
            order.reverse()
        elif attempt:
            rng.shuffle(order)
        yield ChainSchedule(from_columns(instance, tables, columns, order=order))


Move = Callable[[list[SchedulePiece], int, int, random.Random, tuple[float, float]], bool]


class _Climb:
    """Annealing: changes counts, cuts and urgencies, mostly of chains that end late."""

    def __init__(self, evaluator: Evaluator, rng: random.Random, bound_s: float) -> None:
        self._evaluator = evaluator
        self._rng = rng
        self._bound_s = bound_s

    def run(
        self, start: _Rated, limit_s: float, moves: Sequence[Move], weights: Sequence[int]
    ) -> _Rated:
        """The best draft seen within the seconds."""
        best, current, idle, rng = start, start, 0, self._rng
        urgencies = [piece[3] for own in start.draft.pieces for piece in own]
        # Scale of urgencies, so that a new one lies among the others.
        spread = min(urgencies), max(urgencies)
        begun, late = time.monotonic(), self._late(start)
        while (done := (time.monotonic() - begun) / max(limit_s, 1e-9)) < 1:
            if best.cost_s <= self._bound_s * _ENOUGH:
                break
            moved = self._moved(current, moves, weights, spread, late)
            if moved is None:
                continue
            heat_s = _HOT * (_COLD / _HOT) ** done * best.guide_s
            # Worse by this much is taken: the usual rule, its random number drawn before.
            rated = self._rated(current, *moved, heat_s * rng.expovariate(1))
            idle += 1
            if rated is not None:
                current, late = rated, self._late(rated)
                if rated.cost_s < best.cost_s:
                    best, idle = rated, 0
            if idle > _PATIENCE:
                current, late, idle = best, self._late(best), 0
        return best

    def _late(self, rated: _Rated) -> list[float]:
        return self._evaluator.lateness(rated.draft, rated.starts)

    def _rated(
        self, current: _Rated, draft: ChainSchedule, chains: Sequence[int], worse_s: float
    ) -> _Rated | None:
        """A draft that differs in some chains; None where it is worse by more than that."""
        areas = list(current.areas)
        for m in chains:
            areas[m] = self._evaluator.area(m, draft.pieces[m])
        most_s = current.guide_s + worse_s
        cost_s, guide_s, starts = self._evaluator.cost(draft, sum(areas), most_s)
        if guide_s > most_s:
            return None
        return _Rated(draft, cost_s, guide_s, starts, areas)

    def _moved(
        self,
        rated: _Rated,
        moves: Sequence[Move],
        weights: Sequence[int],
        spread: tuple[float, float],
        late: Sequence[float],
    ) -> tuple[ChainSchedule, list[int]] | None:
        """The draft after one move, sometimes two, and the chains that it changed; None where the
        move does not exist."""
        rng, draft = self._rng, rated.draft
        # Other chains' pieces are shared with the draft that it comes from.
        draft = ChainSchedule(list(draft.pieces), draft.strict ^ (rng.random() < 0.02))
        changed: list[int] = []
        for _ in range(1 if rng.random() < 0.7 else 2):
            several = [rng.randrange(len(draft.pieces)) for _ in range(rng.choice((1, 4)))]
            m = max(several, key=late.__getitem__)
            i = rng.randrange(len(draft.pieces[m]))
            options = len(self._evaluator.instance.chains[m].counts)
            move = rng.choices(moves, weights=weights)[0]
            draft.pieces[m] = list(draft.pieces[m])
            if not move(draft.pieces[m], i, options, rng, spread):
                return None
            changed.append(m)
        return draft, changed


def _recount(
    own: list[SchedulePiece], i: int, options: int, rng: random.Random, spread: tuple[float, float]
) -> bool:
    """Another count for a piece, mostly a neighbour."""
    k, a, b, urgency = own[i]
    step = rng.choice((-2, -1, -1, 1, 1, 2)) if options < 20 else round(rng.gauss(0, options / 16))
    new = k + step
    if new == k or not 0 <= new < options:
        return False
    own[i] = (new, a, b, urgency)
    return True


def _shift(
    own: list[SchedulePiece], i: int, options: int, rng: random.Random, spread: tuple[float, float]
) -> bool:
    """Some blocks go over to the next piece, or come from it."""
    if i + 1 >= len(own):
        return False
    (k, a, b, urgency), (k2, _, b2, urgency2) = own[i], own[i + 1]
    cut = b + rng.choice((-3, -2, -1, -1, 1, 1, 2, 3))
    if not a < cut < b2:
        return False
    own[i : i + 2] = [(k, a, cut, urgency), (k2, cut, b2, urgency2)]
    return True


def _split(
    own: list[SchedulePiece], i: int, options: int, rng: random.Random, spread: tuple[float, float]
) -> bool:
    """A piece becomes two with different counts."""
    k, a, b, urgency = own[i]
    new = k + (rng.choice((-1, 1)) if options < 20 else round(rng.gauss(0, options / 12)))
    if b - a < 2 or len(own) > 3 or new == k or not 0 <= new < options:
        return False
    cut = rng.randrange(a + 1, b)
    halves = [(k, a, cut, urgency), (new, cut, b, urgency)]
    if rng.random() < 0.5:
        halves = [(new, a, cut, urgency), (k, cut, b, urgency)]
    own[i : i + 1] = halves
    return True


def _merge(
    own: list[SchedulePiece], i: int, options: int, rng: random.Random, spread: tuple[float, float]
) -> bool:
    """Two neighbours become one."""
    if i + 1 >= len(own):
        return False
    k, urgency = rng.choice((own[i], own[i + 1]))[0], own[i][3]
    own[i : i + 2] = [(k, own[i][1], own[i + 1][2], urgency)]
    return True


def _hurry(
    own: list[SchedulePiece], i: int, options: int, rng: random.Random, spread: tuple[float, float]
) -> bool:
    """Another urgency."""
    k, a, b, urgency = own[i]
    low, high = spread
    if rng.random() < 0.5:
        urgency = rng.uniform(low, high)
    else:
        urgency += rng.gauss(0, 0.1) * (high - low)
    own[i] = (k, a, b, urgency)
    return True


_MOVES: Sequence[Move] = (_recount, _shift, _split, _merge, _hurry)
_WEIGHTS = (4, 3, 1, 1, 3)
