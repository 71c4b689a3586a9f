"""Search for short schedules: initial schedules, then simulated annealing, within a budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmplan.solvers.mpsp.bounds import Configuration, curve, dag_bound, level_bound
from mmplan.solvers.mpsp.configuration_schedules import configuration_schedules
from mmplan.solvers.mpsp.initial_schedules import FluidScheduler, portfolio
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import (
    ChainSchedule,
    ChainSegment,
    ChainSegments,
    Evaluator,
    TimedSegment,
)
from mmplan.solvers.search_budget import SearchBudget

# The values below are chosen by hand. The shares trade one kind of initial schedule against
# another; none of them decides alone, since the best schedule of all kinds is annealed last.
# Share of the budget for bi-point schedules.
_PORTFOLIO_SHARE = 0.1
# Share of the budget for schedules from the bound's configurations.
_CONFIGURATIONS_SHARE = 0.05
# Share of the budget for fluid schedules.
_FLUID_SHARE = 0.2
# They are searched for anew so often: each search gets stuck elsewhere.
_FLUID_SEARCHES = 3
# Share of what the initial schedules leave for annealing the best schedule without cuts.
_UNCUT_SHARE = 0.1
# The same for the best schedule from configurations: it begins far from its best, with many cuts.
_CONFIGURED_SHARE = 0.2
# The same for each round of trials: the best schedule of each search is annealed for an equal part
# of it, and the better half for the next round. The best schedule of all has what remains.
_TRIAL_SHARE = 0.2
# Schedules from which schedules without cuts are made.
_UNCUT_SOURCES = 40
# Factors of the times that chains should take in bi-point schedules.
_SPAN_FACTORS = (1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.5)
# Annealing at its start accepts a schedule that is worse by this share with probability 1/e.
_HOT = 0.0015
# The same share at its end.
_COLD = 0.0001
# After so many moves for each chain without a better schedule annealing goes back to the best, or
# on from another initial schedule, each as often as the other.
_PATIENCE = 40
# So many of the best before each of these changes are given, and of initial schedules.
_DIFFERENT = 4
# Annealing ends within this factor of the bound.
_GOOD_ENOUGH = 1.0005
# Probability that a move also changes whether the schedule is strict.
_CHANGE_STRICT = 0.02
# Probability of one move at a time; otherwise two.
_ONE_MOVE = 0.7
# With at least so many counts a chain's count changes by a normal step, else by one of these.
_MANY_COUNTS = 20
_STEPS = (-2, -1, -1, 1, 1, 2)
# Blocks by which a cut moves.
_CUT_STEPS = (-3, -2, -1, -1, 1, 1, 2, 3)
# Segments of a chain at most: cuts move activations.
_MAX_SEGMENTS = 4
# Seconds of a quiet core. A segment decoded, and a move of the annealing beside that.
_SEGMENT_S = 1.0e-6
_MOVE_S = 9e-6
# An initial schedule, for each chain and each of its counts.
_CHAIN_S = 6e-6
_COUNT_S = 2.5e-7
# A schedule from configurations, for each of them.
_ORDER_S = 2e-5
# A fluid schedule, for each chain, and each time that it asks how many devices one needs.
_FLUID_CHAIN_S = 3e-5
_FLUID_LOOK_S = 2.4e-7


def find_schedules(
    instance: Instance,
    *,
    bound_s: float,
    configurations: Sequence[Configuration] = (),
    budget: SearchBudget,
) -> dict[str, ChainSchedule]:
    """The best schedules that are found within the budget, by a label; equal ones once.

    They are the best of all, the best with one segment for each chain (which moves no activations
    within a MetaOp), and the tasks one after another. The best ones before the search is over are
    given too: with messages and sums of gradients theirs may be the shortest step.

    Args:
        bound_s: no schedule's forwards and backwards take less.
        configurations: from the bound, for some of the initial schedules.
    """
    schedules = _search(Evaluator(instance), _targets(instance), bound_s, configurations, budget)
    schedules["tasks one after another"] = sequential_schedule(instance)
    unique: dict[str, ChainSchedule] = {}
    for label, schedule in schedules.items():
        if schedule not in unique.values():
            unique[label] = schedule
    return unique


def sequential_schedule(instance: Instance) -> ChainSchedule:
    """Tasks one after another, each MetaOp on the count that makes it fastest."""
    order = sorted(range(len(instance.chains)), key=lambda m: (instance.chains[m].task, m))
    return ChainSchedule(
        [
            [ChainSegment(int(c.both_s.sum(axis=1).argmin()), 0, c.blocks, float(order.index(m)))]
            for m, c in enumerate(instance.chains)
        ],
        strict=True,
    )


def _targets(instance: Instance) -> list[list[float]]:
    """Seconds that the chains should take, by level and over the graph."""
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, c.both_s) for c in chains]
    if instance.levels == 1:
        return [[level_bound(curves, devices)] * len(chains)]
    by_level = [0.0] * len(chains)
    for members in map(instance.of_level, range(instance.levels)):
        for m in members:
            by_level[m] = level_bound([curves[i] for i in members], devices)
    return [by_level, dag_bound(curves, [c.after for c in chains], devices)[1]]


def _search(
    evaluator: Evaluator,
    targets: Sequence[Sequence[float]],
    bound_s: float,
    configurations: Sequence[Configuration],
    budget: SearchBudget,
) -> dict[str, ChainSchedule]:
    """The best schedule, the best one with one segment for each chain, and those before them."""
    rng = random.Random(0)
    instance, all_s = evaluator.instance, budget.left_s
    # Each kind has its share of the budget, and at least one schedule.
    own = budget.part(all_s * _PORTFOLIO_SHARE)
    chains = instance.chains
    made_s = _CHAIN_S * len(chains) + _COUNT_S * sum(len(chain.counts) for chain in chains)
    pools = [_rated(evaluator, portfolio(instance, targets, _SPAN_FACTORS), made_s, own)]
    scheduler = FluidScheduler(instance, targets[-1], rng)
    for _ in range(_FLUID_SEARCHES):
        own = budget.part(all_s * _FLUID_SHARE / _FLUID_SEARCHES)
        pools.append(_fluid_schedules(evaluator, scheduler, own))
    made_s = _ORDER_S * len(configurations)
    ordered = configuration_schedules(instance, configurations, rng)
    own = budget.part(all_s * _CONFIGURATIONS_SHARE)
    configured = _rated(evaluator, ordered, made_s, own)
    every = sorted((rated for own in [*pools, configured] for rated in own), key=_cost)
    uncut = min((_Rated.of(evaluator, x) for x in _without_cuts(every[:_UNCUT_SOURCES])), key=_cost)
    firsts = sorted((min(own, key=_cost) for own in pools), key=_cost)
    fluid = [rated for own in pools[1:] for rated in own]
    starts = {
        "bi-point slices": min(pools[0], key=_cost),
        "fluid slices": min(fluid, key=_cost),
        "one slice for each MetaOp, not annealed": uncut,
    }
    left_s = budget.left_s
    annealing = _Annealing(evaluator, rng, bound_s, every)
    uncut = annealing.run(uncut, budget.part(left_s * _UNCUT_SHARE), _UNCUT_MOVES)
    if configured:
        part = budget.part(left_s * _CONFIGURED_SHARE)
        firsts.append(annealing.run(min(configured, key=_cost), part, _MOVES))
    firsts = sorted([*firsts, uncut], key=_cost)
    others: list[_Rated] = []
    while len(firsts) > 1:
        part_s = left_s * _TRIAL_SHARE / len(firsts)
        firsts = sorted([annealing.run(x, budget.part(part_s), _MOVES) for x in firsts], key=_cost)
        others += firsts[len(firsts) // 2 :]
        firsts = firsts[: len(firsts) // 2]
    trial = firsts[0]
    best = annealing.run(trial, budget, _MOVES)
    found = {
        "the best schedule of slices": best,
        "one slice for each MetaOp": uncut,
        "slices annealed for a while": trial,
        **{f"slices annealed for a while, {i}": own for i, own in enumerate(others, 2)},
        **{f"slices, {i}": own for i, own in enumerate(_different(annealing.optima), 2)},
        **{f"bi-point slices, {i}": own for i, own in enumerate(_different(pools[0])[1:], 2)},
        **{f"fluid slices, {i}": own for i, own in enumerate(_different(fluid)[1:], 2)},
        **starts,
    }
    return {label: rated.schedule for label, rated in found.items()}


def _different(some: Sequence[_Rated]) -> list[_Rated]:
    """The best few with different cuts or counts, whatever their priorities."""
    found: dict[object, _Rated] = {}
    for rated in sorted(some, key=_cost):
        if len(found) == _DIFFERENT:
            break
        cuts = tuple((s.k, s.end) for own in rated.schedule.segments for s in own)
        found.setdefault(cuts, rated)
    return [*found.values()]


@dataclass(frozen=True, slots=True)
class _Rated:
    """A schedule, its cost (:meth:`Evaluator.cost`), and each chain's first segment."""

    schedule: ChainSchedule
    cost_s: float
    guide_s: float
    starts: list[list[float]]
    heads: list[TimedSegment]

    @classmethod
    def of(cls, evaluator: Evaluator, schedule: ChainSchedule) -> _Rated:
        heads = evaluator.heads(schedule)
        return cls(schedule, *evaluator.cost(schedule, heads), heads)


def _cost(rated: _Rated) -> float:
    return rated.cost_s


def _rated(
    evaluator: Evaluator, schedules: Iterator[ChainSchedule], made_s: float, budget: SearchBudget
) -> list[_Rated]:
    """The schedules, each of which takes ``made_s`` seconds to make."""
    rated: list[_Rated] = []
    for schedule in schedules:
        before = evaluator.decoded
        rated.append(_Rated.of(evaluator, schedule))
        budget.spend(made_s + _SEGMENT_S * (evaluator.decoded - before))
        if budget.is_over:
            break
    return rated


def _fluid_schedules(
    evaluator: Evaluator, scheduler: FluidScheduler, budget: SearchBudget
) -> list[_Rated]:
    """Fluid schedules; settings are drawn near the best ones so far."""
    rated: list[_Rated] = []
    first, best, least_s = scheduler.first(), None, math.inf
    chains_s = _FLUID_CHAIN_S * len(evaluator.instance.chains)
    while not rated or not budget.is_over:
        settings = first.pop() if first else scheduler.draw(best)
        before, looked = evaluator.decoded, scheduler.looked
        segments = scheduler.segments(settings)
        own = [_Rated.of(evaluator, ChainSchedule(segments, strict)) for strict in (False, True)]
        rated += own
        decoded = evaluator.decoded - before
        looked_s = _FLUID_LOOK_S * (scheduler.looked - looked)
        budget.spend(chains_s + looked_s + _SEGMENT_S * decoded)
        cost_s = min(map(_cost, own))
        if cost_s < least_s:
            best, least_s = settings, cost_s
    return rated


def _without_cuts(pool: Sequence[_Rated]) -> Iterator[ChainSchedule]:
    """The schedules with each chain on the count of its longest segment."""
    for rated in pool:
        segments: ChainSegments = []
        for own in rated.schedule.segments:
            k = max(own, key=lambda segment: segment.end - segment.first).k
            segments.append([ChainSegment(k, 0, own[-1].end, own[0].priority)])
        yield ChainSchedule(segments, rated.schedule.strict)


class _SegmentPlace(NamedTuple):
    """Where a move applies.

    Attributes:
        own: the segments of chain m, which the move changes in place.
        i: the segment drawn.
        num_counts: of the chain.
        rated: the schedule before all moves.
    """

    own: list[ChainSegment]
    m: int
    i: int
    num_counts: int
    rated: _Rated
    evaluator: Evaluator
    rng: random.Random


_Move = Callable[[_SegmentPlace], bool]
"""Returns False where the move is not possible."""


class _Annealing:
    """Changes counts, cuts and priorities, mostly of chains that end late."""

    def __init__(
        self,
        evaluator: Evaluator,
        rng: random.Random,
        bound_s: float,
        initial: Sequence[_Rated],
    ) -> None:
        self._evaluator = evaluator
        self._rng = rng
        self._bound_s = bound_s
        self._initial = initial
        # The best between two such changes.
        self.optima: list[_Rated] = []
        self._num_counts = [len(chain.counts) for chain in evaluator.instance.chains]

    def run(self, start: _Rated, budget: SearchBudget, moves: Sequence[_Move]) -> _Rated:
        """The best schedule seen within the budget.

        Args:
            moves: each is drawn as often as it stands there.
        """
        best, current, local, idle, rng = start, start, start, 0, self._rng
        lateness = self._evaluator.lateness
        late = lateness(start.heads, start.starts)
        evaluator, all_s = self._evaluator, budget.left_s
        while (left_s := budget.left_s) > 0:
            if best.cost_s <= self._bound_s * _GOOD_ENOUGH:
                break
            moved, before = self._moved(current, moves, late), evaluator.decoded
            if moved is None:
                budget.spend(_MOVE_S / 4)
                continue
            temperature_s = _HOT * (_COLD / _HOT) ** (1 - left_s / all_s) * best.guide_s
            # Metropolis' rule, its random number drawn before the schedule is decoded: decoding
            # then stops as soon as the schedule is too long to be accepted.
            rated = self._accepted(current, *moved, temperature_s * rng.expovariate(1))
            budget.spend(_MOVE_S + _SEGMENT_S * (evaluator.decoded - before))
            idle += 1
            if rated is not None:
                current, late = rated, lateness(rated.heads, rated.starts)
                if rated.cost_s < local.cost_s:
                    local = rated
                if rated.cost_s < best.cost_s:
                    best, idle = rated, 0
            if idle > _PATIENCE * len(self._num_counts):
                self.optima.append(local)
                local = current = best if rng.random() < 0.5 else rng.choice(self._initial)
                idle = 0
                late = lateness(current.heads, current.starts)
        return best

    def _accepted(
        self, current: _Rated, schedule: ChainSchedule, chains: Sequence[int], worse_s: float
    ) -> _Rated | None:
        """A schedule that differs in some chains; None where it is worse by more than that."""
        heads = list(current.heads)
        for m in chains:
            heads[m] = self._evaluator.timed(m, schedule.segments[m])
        max_guide_s = current.guide_s + worse_s
        cost_s, guide_s, starts = self._evaluator.cost(schedule, heads, max_guide_s)
        if guide_s > max_guide_s:
            return None
        return _Rated(schedule, cost_s, guide_s, starts, heads)

    def _moved(
        self,
        rated: _Rated,
        moves: Sequence[_Move],
        late: Sequence[float],
    ) -> tuple[ChainSchedule, list[int]] | None:
        """The schedule after one move or two, and the chains that it changed.

        None where a move is not possible.
        """
        rng, strict = self._rng, rated.schedule.strict
        # Scaling random() is much faster than randrange() and choice().
        draw = rng.random
        if draw() < _CHANGE_STRICT:
            strict = not strict
        # The segments of chains that do not change are shared by both schedules.
        segments = list(rated.schedule.segments)
        changed: list[int] = []
        for _ in range(1 if draw() < _ONE_MOVE else 2):
            m = int(draw() * len(segments))
            if draw() < 0.5:
                for _ in range(3):
                    other = int(draw() * len(segments))
                    if late[other] > late[m]:
                        m = other
            own = segments[m] = list(segments[m])
            move = moves[int(draw() * len(moves))]
            i = int(draw() * len(own))
            at = _SegmentPlace(own, m, i, self._num_counts[m], rated, self._evaluator, rng)
            if not move(at):
                return None
            changed.append(m)
        return ChainSchedule(segments, strict), changed


def _change_count(at: _SegmentPlace) -> bool:
    """Another count for a segment, mostly a neighbouring one."""
    one = at.own[at.i]
    k = one.k + _step(at)
    if k == one.k or not 0 <= k < at.num_counts:
        return False
    at.own[at.i] = ChainSegment(k, one.first, one.end, one.priority)
    return True


def _step(at: _SegmentPlace) -> int:
    """A change of a count's position."""
    if at.num_counts < _MANY_COUNTS:
        return _STEPS[int(at.rng.random() * len(_STEPS))]
    return round(at.rng.gauss(0, at.num_counts / 16))


def _move_cut(at: _SegmentPlace) -> bool:
    """Some blocks go over to the next segment, or come from it."""
    own, i = at.own, at.i
    if i + 1 == len(own):
        return False
    one, other = own[i], own[i + 1]
    cut = one.end + _CUT_STEPS[int(at.rng.random() * len(_CUT_STEPS))]
    if not one.first < cut < other.end:
        return False
    own[i] = ChainSegment(one.k, one.first, cut, one.priority)
    own[i + 1] = ChainSegment(other.k, cut, other.end, other.priority)
    return True


def _split(at: _SegmentPlace) -> bool:
    """A segment becomes two on different counts."""
    one, rng = at.own[at.i], at.rng
    if one.end - one.first < 2 or len(at.own) >= _MAX_SEGMENTS:
        return False
    k = one.k + _step(at)
    if k == one.k or not 0 <= k < at.num_counts:
        return False
    cut = rng.randrange(one.first + 1, one.end)
    first, second = (k, one.k) if rng.random() < 0.5 else (one.k, k)
    at.own[at.i : at.i + 1] = [one._replace(k=first, end=cut), one._replace(k=second, first=cut)]
    return True


def _merge(at: _SegmentPlace) -> bool:
    """Two neighbouring segments become one."""
    own, i = at.own, at.i
    if i + 1 == len(own):
        return False
    k = own[i + (at.rng.random() < 0.5)].k
    own[i : i + 2] = [own[i]._replace(k=k, end=own[i + 1].end)]
    return True


def _start_before(at: _SegmentPlace) -> bool:
    """A segment that waited gets a priority just before one that started meanwhile.

    Other changes of a priority mostly change nothing.
    """
    rated, m, i = at.rated, at.m, at.i
    # An earlier move may have cut the chain into more segments.
    if i >= len(rated.starts[m]):
        return False
    before = at.evaluator.started_before(rated.schedule, rated.starts, m, i)
    if not before:
        return False
    priority = before[int(at.rng.random() * len(before))]
    at.own[i] = at.own[i]._replace(priority=math.nextafter(priority, -math.inf))
    return True


# Each move as often as it is drawn, in proportion. Chosen by hand.
_MOVES: tuple[_Move, ...] = (
    *(_change_count,) * 4,
    *(_move_cut,) * 3,
    _split,
    _merge,
    *(_start_before,) * 2,
)
# The moves that keep one segment for each chain.
_UNCUT_MOVES: tuple[_Move, ...] = (_change_count, _start_before)
