"""Changes of a plan that are tried in simulation: what no formula of one solver sees.

A *layout* is what such a change acts on: of each unit its degrees, micro-batch and lead, which
units share devices, and how the whole runs: backwards, order, ZeRO stage. The search starts from
the layouts of the solvers' best plans. It tries those first of which an estimate promises most, and
goes on from each that is about as good as the best so far: by one change, then by two. Where memory
refuses a layout, the next ZeRO stage is tried. Then come *small* layouts, whose units share all
devices in many parts: changes may lead to them only by way of what does not fit. The search begins
with these where no solver has a plan that fits. At the end the best layout's changes are tried once
more where devices are shared, with forwards first: many take twice as long in its own order.

No change leads from the starts to some *uniform* layouts, whose units run alike in one or two
groups. The few that promise most are tried first; where one of them is better than all that
changes of the starts lead to, a second search goes on from it.

A layout whose busiest device alone takes as long as the best plan's step is not simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from mmplan.planning.measured_trials import rounded
from mmplan.planning.neighbours.changes import ESTIMATE_S, LayoutChanges, Tuning
from mmplan.planning.neighbours.estimates import MOST_ZERO, LayoutEstimates
from mmplan.planning.neighbours.layout import LayoutSpace, PlanLayout, UnitChoice
from mmplan.planning.unit_schedules import SHORTER
from mmplan.schema.base import ZeroStage
from mmplan.schema.plan import Order, OrderRule, Plan
from mmplan.solvers.problem import Candidate, Request
from mmplan.solvers.search_budget import SearchBudget

# The best different layouts, from which the search starts. Chosen by hand, as all that follows.
_STARTS = 3
# The search goes on from layouts that take up to this times the best step.
_NEAR = 1.02
# Pairs of changes are looked at once this many layouts in a row gained nothing.
_PATIENCE = 12
# What left the step of so many layouts in a row as it was is not tried again.
_TRIED_TWICE = 2
# The search ends after so many layouts in a row that gained nothing.
_GIVE_UP = 100
# On shared devices changes are tried in this order at the end, with this share of the budget.
_EAGER: OrderRule = "forward-first"
_EAGER_SHARE = 0.2
# Uniform layouts that are tried, and the share of the budget for these and changes of the best.
_UNIFORM, UNIFORM_SHARE = 6, 0.3
# The first search is given up while one of these is better, if this share of its budget is enough
# for few trials only.
_BEHIND, _FEW = 1 / 3, 16
# Steps are equal but for rounding.
_SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What a search found.

    Attributes:
        plan: the best: a start, or one that is better than all of them.
        start: that the best was reached from.
        candidate: the units of the best; None where it is a start.
        evaluations: layouts that were simulated.
    """

    plan: Plan
    start: Plan
    candidate: Candidate | None = None
    evaluations: int = 0


class NeighbourSearch:
    """Tries the layouts that promise most, until its budget ends or nothing more is gained.

    Args:
        request: whose plans these are.
        trial: the simulated plan of a candidate, None where it does not fit or cannot run, and the
            bytes that it needs at least, 0 or infinite where nobody knows. It spends from the
            budget what it takes.
        trial_s: seconds of a quiet core that a trial takes about.
        budget: of the whole search.
        least_s: no plan takes less.
    """

    def __init__(
        self,
        request: Request,
        *,
        trial: Callable[[Candidate], tuple[Plan | None, float]],
        trial_s: float,
        budget: SearchBudget,
        least_s: float,
    ) -> None:
        self._request, self._trial, self._budget = request, trial, budget
        self._least_s = least_s
        self._memory_bytes = request.cluster.device.memory_bytes
        self._space = LayoutSpace(request)
        self._estimates = LayoutEstimates(self._space)
        self._changes = LayoutChanges(self._space, self._estimates)
        self._seen: set[PlanLayout] = set()
        self._heap: list[tuple[float, int, PlanLayout, float, Plan, float]] = []
        # By unit and choice, and by all degrees, the least factor by which steps took longer than
        # estimated; by :func:`_held_by` that by which plans held more.
        self._factors: dict[tuple[object, ...], float] = {}
        self._byte_factors: dict[tuple[object, ...], float] = {}
        # How a layout runs otherwise than that from which it was made, and how often in a row that
        # left the step as it was.
        self._tunings: dict[PlanLayout, Tuning] = {}
        self._in_vain: Counter[Tuning] = Counter()
        # Of equal estimates the first is tried first.
        self._numbers = itertools.count()
        # The steps of layouts whose neighbours are known. Of equal ones the first is enough: they
        # differ in what nothing waits for.
        self._expanded: set[float] = set()
        self._evaluations = 0
        # The step of the best plan, and of the best uniform layout; and what is left of the budget
        # to a search after this one, and while this one is behind.
        self._best_s, self._rival_s = math.inf, math.inf
        self._until_s, self._behind_s = 0.0, 0.0
        self._evaluated_before = 0
        # No trial is begun for which too little is left.
        self._longest_s = self._trial_s = trial_s

    def run(self, starts: Sequence[Plan]) -> Neighbours:
        """The best plan that changes of some others lead to.

        No change leads from the starts to some uniform layouts. Where one of these is better than
        all that was found, a second search goes on from it, with the rest of the budget: a share
        that is its own, and most of the first one's where that could try only few for its part.

        Args:
            starts: simulated, best first; one at least.
        """
        first_s = (1 - UNIFORM_SHARE) * self._budget.left_s
        uniform = self._best_uniform(starts[0].training.zero)
        least_s = self._budget.left_s - first_s
        self._rival_s = math.inf if uniform is None else uniform.plan.predicted.iteration_s
        found = self._from(starts, least_s, least_s + (1 - _BEHIND) * first_s)
        if uniform is not None and _merit(uniform.plan) < _merit(found.plan):
            self._forget()
            other = self._from([uniform.plan], 0.0, 0.0)
            found = replace(uniform if other.candidate is None else other, start=starts[0])
        return replace(found, evaluations=self._evaluations)

    def _from(self, starts: Sequence[Plan], until_s: float, behind_s: float) -> Neighbours:
        """The best plan that changes lead to, until so much of the budget is left.

        Args:
            starts: simulated, best first.
            until_s: of the whole budget.
            behind_s: likewise, while few layouts were tried and the best uniform one is better.
        """
        best, in_vain = Neighbours(plan=starts[0], start=starts[0]), 0
        self._best_s, self._until_s = best.plan.predicted.iteration_s, until_s
        self._behind_s, self._evaluated_before = behind_s, self._evaluations
        self._longest_s = self._trial_s
        first = self._begin(starts)
        # Whose pairs of changes are still to come.
        around, are_small_tried = first, False
        best_layout, eager_s = first, _EAGER_SHARE * self._left_s
        # Units whose changes left the best step as it was: it waits for others.
        slack: set[int] = set()
        while True:
            is_over = not self._goes_on(in_vain) or self._left_s < eager_s
            if not is_over and around is not None and (in_vain >= _PATIENCE or not self._heap):
                self._push(self._changes.pairs(around), around, best.plan, best.start, math.inf)
                around = None
            if not is_over and not self._heap and first is not None and not are_small_tried:
                self._push(self._small(starts[0]), first, starts[0], starts[0], math.inf)
                are_small_tried = True
            if (is_over or not self._heap) and best_layout and eager_s:
                eager_s, in_vain = 0.0, 0
                self._heap.clear()
                self._factors.clear()
                self._push(self._eager(best_layout), best_layout, best.plan, best.start, math.inf)
            if not self._heap or not self._goes_on(in_vain):
                break
            expected_s, _, layout, limit_s, start, factor = heapq.heappop(self._heap)
            tuning = self._tunings.get(layout)
            if tuning and self._in_vain[tuning] >= _TRIED_TWICE:
                continue
            learnt = self._factor(layout)
            if learnt > factor:
                estimate_s = expected_s / factor
                self._add(layout, learnt * estimate_s, limit_s, start, learnt)
                continue
            best_s = self._best_s
            if self._estimates.busiest_s(layout) >= best_s:
                continue
            changed = _changed(best_layout, layout) if best_layout else set[int]()
            # Once: what was put back is not before the best step again.
            if expected_s < rounded(best_s) and changed and changed <= slack:
                self._add(layout, best_s, limit_s, start, factor)
                continue
            needed = self._needed(layout)
            if needed > self._memory_bytes:
                self._cut_further(layout, needed, expected_s, limit_s, start)
                continue
            candidate = self._candidate(layout)
            if candidate is None:
                continue
            plan, needed = self._evaluated(layout, candidate)
            if plan is None:
                self._cut_further(layout, needed, expected_s, limit_s, start)
                continue
            in_vain += 1
            self._learn(
                layout, plan.predicted.iteration_s * factor / expected_s if expected_s else 1.0
            )
            if _merit(plan) < _merit(best.plan):
                best = Neighbours(plan=plan, start=start, candidate=candidate)
                self._best_s = plan.predicted.iteration_s
                around, best_layout, in_vain = layout, layout, 0
                slack -= changed
            step_s = rounded(plan.predicted.iteration_s)
            if tuning:
                is_same = step_s == rounded(limit_s)
                self._in_vain[tuning] = self._in_vain[tuning] + 1 if is_same else 0
            if step_s == rounded(best_s):
                slack |= changed
            is_near = step_s <= _NEAR * self._best_s
            if step_s * _SAME < limit_s and is_near and step_s not in self._expanded:
                self._expand(layout, plan, start)
        return best

    def first_fit(self) -> tuple[Candidate, Plan] | None:
        """A plan that fits where no solver has one, those first that hold least."""
        small = self._changes.small(0, self._small_budget())
        heap = [(self._estimates.least_bytes(own), next(self._numbers), own) for own in small]
        heapq.heapify(heap)
        while heap and not self._budget.is_over:
            _, _, layout = heapq.heappop(heap)
            others = [layout, *self._changes.neighbours(layout)]
            stages = range(min(layout.zero), MOST_ZERO + 1)
            for other, zero in itertools.product(others, stages):
                if self._budget.is_over:
                    return None
                other = other.cut_further(zero)
                # What was learnt could be wrong, and the first that fits is wanted.
                if other in self._seen or self._least_bytes(other) > self._memory_bytes:
                    continue
                self._seen.add(other)
                candidate = self._candidate(other)
                if candidate and (plan := self._evaluated(other, candidate)[0]):
                    return candidate, plan
                held = self._estimates.least_bytes(other)
                heapq.heappush(heap, (held, next(self._numbers), other))
        return None

    def _eager(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Changes in another order: what is good about them may not be seen in the usual one."""
        tuned = (other for _, other in self._changes.tuned(layout))
        for other in (layout, *tuned, *self._changes.neighbours(layout)):
            if any(len(group) > 1 for group in other.groups):
                yield replace(other, rule=_EAGER)

    @property
    def _left_s(self) -> float:
        """What this search may spend of the budget."""
        few = self._evaluations < _FEW + self._evaluated_before
        is_behind = few and self._rival_s < self._best_s
        return self._budget.left_s - (self._behind_s if is_behind else self._until_s)

    def _forget(self) -> None:
        """Begin anew, but for what plans are known to hold."""
        self._seen.clear()
        self._heap.clear()
        self._factors.clear()
        self._expanded.clear()
        self._tunings.clear()
        self._in_vain.clear()

    def _best_uniform(self, least_zero: int) -> Neighbours | None:
        """The best of the few uniform layouts that promise most and fit."""
        found: Neighbours | None = None
        # Most is for changes of the best.
        self._until_s = (1 - UNIFORM_SHARE / 2) * self._budget.left_s
        for layout in self._uniform(least_zero):
            candidate = self._candidate(layout)
            if candidate is None or self._needed(layout) > self._memory_bytes:
                continue
            if self._left_s <= self._longest_s:
                break
            plan, _ = self._evaluated(layout, candidate)
            if plan is not None and (found is None or _merit(plan) < _merit(found.plan)):
                found = Neighbours(plan=plan, start=plan, candidate=candidate)
        return found

    def _uniform(self, least_zero: int) -> list[PlanLayout]:
        """The few that promise most of those that fit."""
        budget = self._small_budget()
        estimated: list[tuple[float, int, PlanLayout]] = []
        for layout in self._changes.uniform(budget):
            if budget.is_over:
                break
            for zero in range(least_zero, self._estimates.most_zero(layout) + 1):
                further = layout.cut_further(zero)
                budget.spend(ESTIMATE_S)
                if self._estimates.least_bytes(further) <= self._memory_bytes:
                    estimate_s = self._estimates.estimate_s(further)
                    estimated.append((estimate_s, len(estimated), further))
                    break
        return [layout for _, _, layout in heapq.nsmallest(_UNIFORM, estimated)]

    def _small(self, start: Plan) -> Iterator[PlanLayout]:
        """Changes of a start may lead to these only by way of what does not fit."""
        for small in self._changes.small(start.training.zero, self._small_budget()):
            yield self._changes.with_usual_leads(small)
            yield small

    def _small_budget(self) -> SearchBudget:
        return self._budget.part(self._budget.left_s / 8)

    def _begin(self, starts: Sequence[Plan]) -> PlanLayout | None:
        """Look around the best different starts; the layout of the first, where it has one."""
        layouts: dict[PlanLayout, Plan] = {}
        for start in starts:
            layout = self._space.layout_of(start)
            if layout is not None and len(layouts) < _STARTS:
                layouts.setdefault(layout, start)
        for layout, start in layouts.items():
            self._seen.add(layout)
            self._learn(layout, 1.0)
            if start.waves or self._space.units_of(layout) != start.units:
                self._add(layout, 0.0, math.inf, start)
            self._expand(layout, start, start)
        return next((own for own, start in layouts.items() if start is starts[0]), None)

    def _goes_on(self, in_vain: int) -> bool:
        may_gain = self._best_s > self._least_s * _SAME
        return may_gain and in_vain < _GIVE_UP and self._left_s > self._longest_s

    def _needed(self, layout: PlanLayout) -> float:
        """Bytes of the fullest device, by the estimate and what others held."""
        factor = self._byte_factors.get(_held_by(layout), 1.0)
        return factor * self._least_bytes(layout)

    def _least_bytes(self, layout: PlanLayout) -> float:
        self._budget.spend(ESTIMATE_S)
        return self._estimates.least_bytes(layout)

    def _cut_further(
        self, layout: PlanLayout, needed: float, expected_s: float, limit_s: float, start: Plan
    ) -> None:
        """Try a layout that does not fit with the first ZeRO stage that may save enough.

        Args:
            needed: bytes; 0 or infinite where something else is wrong with it.
        """
        if not 0 < needed < math.inf:
            return
        own = self._estimates.least_bytes(layout)
        for least in range(min(layout.zero) + 1, self._estimates.most_zero(layout) + 1):
            further = layout.cut_further(least)
            saved = own - self._estimates.least_bytes(further)
            if needed - saved <= self._memory_bytes:
                if further not in self._seen:
                    self._add(further, expected_s, limit_s, start)
                return

    def _expand(self, layout: PlanLayout, plan: Plan, start: Plan) -> None:
        """Try what is one change away: leads that gain nothing lead nowhere."""
        self._expanded.add(rounded(plan.predicted.iteration_s))
        self._push(self._changes.neighbours(layout), layout, plan, start, math.inf)
        tuned = dict[PlanLayout, Tuning]()
        for tuning, other in self._changes.tuned(layout):
            tuned.setdefault(other, tuning)
        self._tunings |= tuned
        self._push(tuned, layout, plan, start, plan.predicted.iteration_s)

    def _push(
        self,
        others: Iterable[PlanLayout],
        layout: PlanLayout,
        plan: Plan,
        start: Plan,
        limit_s: float,
    ) -> None:
        """Layouts to try later, those first that should take least.

        Args:
            others: two changes at most from ``layout``.
            limit_s: the search goes on from those that take less.
        """
        scale = plan.predicted.iteration_s / self._estimates.estimate_s(layout)
        # Most of the budget is for trials.
        budget = self._budget.part(self._budget.left_s / 4)
        for other in others:
            if budget.is_over:
                return
            if other not in self._seen:
                self._seen.add(other)
                budget.spend(ESTIMATE_S)
                if self._estimates.busiest_s(other) >= self._best_s:
                    continue
                self._add(other, scale * self._estimates.estimate_s(other), limit_s, start)

    def _add(
        self,
        layout: PlanLayout,
        expected_s: float,
        limit_s: float,
        start: Plan,
        factor: float = 1.0,
    ) -> None:
        self._seen.add(layout)
        item = rounded(expected_s), next(self._numbers), layout, limit_s, start, factor
        heapq.heappush(self._heap, item)

    def _factor(self, layout: PlanLayout) -> float:
        """By which a layout should take longer than estimated, by the choices in it."""
        own = (self._factors.get(key, 1.0) for key in _learnt_by(layout))
        return max(1.0, *own)

    def _learn(self, layout: PlanLayout, factor: float) -> None:
        for key in _learnt_by(layout):
            self._factors[key] = min(factor, self._factors.get(key, math.inf))

    def _candidate(self, layout: PlanLayout) -> Candidate | None:
        units = self._space.units_of(layout)
        if units is None:
            return None
        return Candidate(
            units=units,
            objective_s=0.0,
            in_turn=layout.in_turn,
            zero=cast(ZeroStage, self._space.plan_zero(layout)),
            order=None if layout.rule == Order().rule else Order(rule=layout.rule),
        )

    def _evaluated(self, layout: PlanLayout, candidate: Candidate) -> tuple[Plan | None, float]:
        left_s = self._budget.left_s
        plan, num_bytes = self._trial(candidate)
        self._evaluations += 1
        self._longest_s = max(self._longest_s, left_s - self._budget.left_s)
        least_bytes = self._estimates.least_bytes(layout)
        if 0 < num_bytes < math.inf and least_bytes:
            key = _held_by(layout)
            factor = num_bytes / least_bytes
            self._byte_factors[key] = max(1.0, min(factor, self._byte_factors.get(key, math.inf)))
        return plan, num_bytes


def _changed(layout: PlanLayout, other: PlanLayout) -> set[int]:
    """Units that run in another way, whatever their leads, or share devices with others."""
    pairs = enumerate(zip(layout.choices, other.choices, strict=True))
    found = {
        i
        for i, (own, its) in pairs
        if own is not its and (own.offset, _runs(own)) != (its.offset, _runs(its))
    }
    kept = set(other.groups)
    return found | {i for group in layout.groups if group not in kept for i in group}


def _runs(choice: UnitChoice) -> tuple[object, ...]:
    """What a unit does on its devices, wherever these are and whatever its lead."""
    c = choice
    return c.tp, c.pp, c.vpp, c.dp, c.size, c.kind, c.items


def _degrees_of(layout: PlanLayout) -> tuple[object, ...]:
    """Degrees and places of all units, whatever their micro-batches and leads."""
    places = ((c.tp, c.pp, c.vpp, c.dp, c.offset, c.items) for c in layout.choices)
    return layout.groups, *places


def _held_by(layout: PlanLayout) -> tuple[object, ...]:
    """What estimates of bytes are corrected by."""
    return layout.zero, layout.backwards, layout.in_turn, *_degrees_of(layout)


def _learnt_by(layout: PlanLayout) -> Iterator[tuple[object, ...]]:
    """What estimates are corrected by: all degrees, and each unit's choice, whatever its lead."""
    yield layout.backwards, layout.rule, layout.in_turn, *_degrees_of(layout)
    for index, choice in enumerate(layout.choices):
        yield layout.backwards, layout.rule, index, *_runs(choice)


def _merit(plan: Plan) -> tuple[float, int]:
    """Less is better: the step, then its device-seconds; split backwards must gain something."""
    split = any(unit.schedule.split_backward for unit in plan.units)
    step_s = plan.predicted.iteration_s / (SHORTER if split else 1)
    return rounded(step_s), plan.predicted.devices_used
