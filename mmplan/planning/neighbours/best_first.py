"""Changes of some starts, tried best first.

The search tries those layouts first of which an estimate promises most, and goes on from each that
is about as good as the best so far: by one change, then by two. Estimates know nothing of how many
micro-batches are in flight: where a step takes longer than estimated, changes of all leads and of
the backwards promise a share of that. They may also be wrong about some degrees: where many trials
gain nothing, those of degrees that were tried less come first.

Where memory refuses a layout, the next ZeRO stage is tried. Then come *small* layouts, whose units
share all devices in many parts: changes may lead to them only by way of what does not fit.

A layout whose busiest device alone takes as long as the best plan's step is not simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmplan.planning.measured_trials import rounded
from mmplan.planning.neighbours.changes import Tuning
from mmplan.planning.neighbours.layout import PlanLayout, UnitChoice
from mmplan.planning.neighbours.trials import LayoutTrials, degrees_of, merit
from mmplan.schema.plan import Plan
from mmplan.solvers.problem import Candidate

# The best different layouts, from which the search starts. Chosen by hand, as all that follows.
_STARTS = 3
# The search goes on from layouts that take up to this times the best step.
_NEAR = 1.02
# Where nothing else is left, from these.
_FAR = 1.1
# Pairs of changes are looked at once this many layouts in a row gained nothing, and from then on
# each trial in vain lets others of the same degrees come later by this share of the step, by so
# much at most.
_PATIENCE = 12
_LATER_EACH = 0.003
_MOST_LATER = 0.1
# What left the step of so many layouts in a row as it was is not tried again.
_TRIED_TWICE = 2
# A step that takes longer than estimated may lack micro-batches in flight: by such changes it may
# lose this share of what it takes more.
_UNSEEN_SHARE = 0.5
# This share of the step at least.
_LEAST_UNSEEN = 0.05
# Changes of units that a step does not wait for come as if they took so many times as long, and
# others that are new only in such units.
_LATER = 1.05
_LITTLE_LATER = 1.01
_IN_FLIGHT = ("leads", "backwards")
# Steps are equal but for rounding.
_SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What a search found.

    Attributes:
        plan: the best: a start, or one that is better than all of them.
        start: that the best was reached from.
        candidate: the units of the best; None where it is a start.
    """

    plan: Plan
    start: Plan
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True)
class _Centre:
    """A layout around which others are tried.

    Attributes:
        plan: of the layout.
        start: that led to it.
        slack: units that its step does not wait for, or whose changes left it as it was.
        tried: what was tried of the other units.
    """

    layout: PlanLayout
    plan: Plan
    start: Plan
    slack: set[int] = field(default_factory=set)
    tried: set[object] = field(default_factory=set)

    def news(self, other: PlanLayout) -> object:
        """What another layout has of units that the step waits for; None where that was tried."""
        units = (_changed(self.layout, other) | _led_otherwise(self.layout, other)) - self.slack
        settings = other.zero, other.backwards, other.rule, other.timed, other.in_turn
        own = self.layout
        if not units and settings == (own.zero, own.backwards, own.rule, own.timed, own.in_turn):
            return None
        choices = ((i, other.choices[i], other.group_of(i)) for i in units)
        found = settings, frozenset(choices)
        return None if found in self.tried else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Untried:
    """A layout that waits for its trial.

    Attributes:
        expected_s: what its step should take, by what is known.
        promised_s: what it may take.
        around: that changes led to it from.
        limit_s: the search goes on from it if it takes less.
        factor: by which ``expected_s`` is more than estimated.
        waits: it was put back, since only units differ that the other plan does not wait for.
        later: share of the best step by which it was put back, since its degrees gained nothing.
    """

    layout: PlanLayout
    expected_s: float
    promised_s: float
    around: _Centre
    limit_s: float = math.inf
    factor: float = 1.0
    waits: bool = False
    later: float = 0.0


class BestFirstSearch:
    """Tries the layouts that promise most, until its budget ends or none is left.

    Args:
        trials: of layouts.
        least_s: no plan takes less.
    """

    def __init__(self, trials: LayoutTrials, *, least_s: float) -> None:
        self._trials, self._least_s = trials, least_s
        self._budget, self._memory_bytes = trials.budget, trials.memory_bytes
        self._space, self._estimates, self._changes = trials.space, trials.estimates, trials.changes
        self._seen: set[PlanLayout] = set()
        self._heap: list[tuple[float, int, _Untried]] = []
        # By unit and choice, and by all degrees, the least factor by which steps took longer than
        # estimated.
        self._factors: dict[tuple[object, ...], float] = {}
        # How a layout runs otherwise than that from which it was made, and how often in a row that
        # left the step as it was.
        self._tunings: dict[PlanLayout, Tuning] = {}
        self._in_vain: Counter[Tuning] = Counter()
        # The best plan of each set of degrees and order.
        self._best_of: dict[object, Neighbours] = {}
        # By degrees, trials since the last gain.
        self._tried_degrees: Counter[object] = Counter()
        # Of equal estimates the first is tried first.
        self._numbers = itertools.count()
        # By their steps the layouts whose neighbours are known. Of equal ones the first is enough:
        # they differ in what nothing waits for.
        self._expanded: dict[float, _Centre] = {}
        # Layouts by their steps that the search may go on from; and those that only run otherwise
        # than what they were made from, and take longer.
        self._passed: list[tuple[float, int, _Centre]] = []
        self._worse: list[tuple[float, int, _Centre]] = []
        # The step of the best plan.
        self._best_s = math.inf
        # No trial is begun for which too little is left.
        self._longest_s = trials.trial_s

    def run(self, starts: Sequence[Plan]) -> Iterator[Neighbours]:
        """The best plan that changes of some others lead to, after each trial.

        Args:
            starts: simulated, best first; one at least.
        """
        best, in_vain = Neighbours(plan=starts[0], start=starts[0]), 0
        self._best_s = best.plan.predicted.iteration_s
        centre = self._begin(starts)
        # Whose pairs of changes are still to come.
        around, are_small_tried = centre, False
        while centre is not None:
            if around is not None and (in_vain >= _PATIENCE or not self._heap):
                self._push(self._changes.pairs(around.layout), around, math.inf)
                around = None
            if not self._heap and not are_small_tried:
                self._push(self._small(starts[0]), centre, math.inf)
                are_small_tried = True
            for others in (self._passed, self._worse):
                if not self._heap:
                    self._go_on_from(others, _FAR)
            if not self._heap or not self._may_gain:
                break
            own = heapq.heappop(self._heap)[-1]
            layout, expected_s, parent = own.layout, own.expected_s, own.around
            tuning = self._tunings.get(layout)
            if tuning and self._in_vain[tuning] >= _TRIED_TWICE:
                continue
            learnt = self._factor(layout)
            if learnt > own.factor:
                longer_s = expected_s * learnt / own.factor
                self._add(replace(own, expected_s=longer_s, promised_s=longer_s, factor=learnt))
                continue
            if self._estimates.busiest_s(layout) >= self._best_s:
                continue
            later = min(_MOST_LATER, _LATER_EACH * self._tried_degrees[degrees_of(layout)])
            if in_vain >= _PATIENCE and later > own.later:
                later_s = own.promised_s + (later - own.later) * self._best_s
                self._add(replace(own, promised_s=later_s, later=later))
                continue
            news = parent.news(layout)
            parent_s = rounded(parent.plan.predicted.iteration_s)
            if news is None and not own.waits:
                in_slack = _changed(parent.layout, layout) <= parent.slack
                later_s = (_LATER if in_slack else _LITTLE_LATER) * parent_s
                later_s = max(own.promised_s, later_s)
                self._add(replace(own, promised_s=later_s, waits=True))
                continue
            needed = self._trials.needed(layout)
            if needed > self._memory_bytes:
                self._cut_further(own, needed)
                continue
            candidate = self._trials.candidate(layout)
            if candidate is None:
                continue
            plan, needed = self._tried(layout, candidate)
            if plan is None:
                self._cut_further(own, needed)
                continue
            in_vain += 1
            self._tried_degrees[degrees_of(layout)] += 1
            self._learn(
                layout,
                plan.predicted.iteration_s * own.factor / expected_s if expected_s else 1.0,
            )
            step_s = rounded(plan.predicted.iteration_s)
            changed = _changed(parent.layout, layout)
            parent.tried.add(news)
            slack = parent.slack - changed
            if step_s <= _FAR * self._best_s and (critical := self._trials.critical_units(plan)):
                slack = set(range(len(layout.choices))) - critical
            found = _Centre(layout, plan, parent.start, slack)
            of_kind = Neighbours(plan=plan, start=parent.start, candidate=candidate)
            kind = degrees_of(layout), layout.rule, layout.timed
            if merit(plan) < merit(self._best_of.setdefault(kind, of_kind).plan):
                self._best_of[kind] = of_kind
            if merit(plan) < merit(best.plan):
                best = of_kind
                self._best_s, in_vain = plan.predicted.iteration_s, 0
                self._tried_degrees.clear()
            if merit(plan) < merit(centre.plan):
                around = centre = found
            if tuning:
                is_same = step_s == rounded(own.limit_s)
                self._in_vain[tuning] = self._in_vain[tuning] + 1 if is_same else 0
            if step_s == parent_s:
                parent.slack.update(changed or slack)
            if step_s != rounded(own.limit_s):
                gains = step_s * _SAME < own.limit_s
                others = self._passed if gains else self._worse
                heapq.heappush(others, (step_s, next(self._numbers), found))
            self._go_on_from(self._passed, _NEAR)
            yield best

    def best_of_kinds(self, number: int) -> list[Neighbours]:
        """So many of the best plans that were tried, of other degrees or orders and steps each."""
        best_of: dict[float, Neighbours] = {}
        for own in sorted(self._best_of.values(), key=lambda own: merit(own.plan)):
            best_of.setdefault(rounded(own.plan.predicted.iteration_s), own)
        return list(best_of.values())[:number]

    def _go_on_from(self, others: list[tuple[float, int, _Centre]], factor: float) -> None:
        """Look around the first new one of layouts that take up to this times the best step."""
        while others and others[0][0] <= factor * self._best_s:
            step_s, _, own = heapq.heappop(others)
            if step_s not in self._expanded:
                self._expand(own)
                return

    def _small(self, start: Plan) -> Iterator[PlanLayout]:
        """Changes of a start may lead to these only by way of what does not fit."""
        for small in self._changes.small(start.training.zero, self._trials.small_budget()):
            yield self._changes.with_usual_leads(small)
            yield small

    def _begin(self, starts: Sequence[Plan]) -> _Centre | None:
        """Look around the best different starts; the best of them that has a layout."""
        centres: dict[PlanLayout, _Centre] = {}
        for start in starts:
            layout = self._space.layout_of(start)
            if layout is not None and len(centres) < _STARTS:
                centres.setdefault(layout, _Centre(layout, start, start))
        for layout, own in centres.items():
            self._seen.add(layout)
            self._learn(layout, 1.0)
            is_ordered = layout.shares_devices and own.plan.order is None
            if is_ordered or own.plan.waves or self._space.units_of(layout) != own.plan.units:
                self._add(_Untried(layout=layout, expected_s=0.0, promised_s=0.0, around=own))
            self._expand(own)
        return next(iter(centres.values()), None)

    @property
    def _may_gain(self) -> bool:
        is_over = self._budget.left_s <= self._longest_s
        return not is_over and self._best_s > self._least_s * _SAME

    def _tried(self, layout: PlanLayout, candidate: Candidate) -> tuple[Plan | None, float]:
        left_s = self._budget.left_s
        found = self._trials.run(layout, candidate)
        self._longest_s = max(self._longest_s, left_s - self._budget.left_s)
        return found

    def _cut_further(self, untried: _Untried, needed: float) -> None:
        """Try a layout that does not fit with the first ZeRO stage that may save enough.

        Args:
            needed: bytes; 0 or infinite where something else is wrong with it.
        """
        if not 0 < needed < math.inf:
            return
        layout = untried.layout
        own = self._estimates.least_bytes(layout)
        for least in range(min(layout.zero) + 1, self._estimates.most_zero(layout) + 1):
            further = layout.cut_further(least)
            saved = own - self._estimates.least_bytes(further)
            if needed - saved <= self._memory_bytes:
                if further not in self._seen:
                    self._add(replace(untried, layout=further))
                return

    def _expand(self, own: _Centre) -> None:
        """Try what is one change away: leads that gain nothing lead nowhere."""
        step_s = own.plan.predicted.iteration_s
        self._expanded[rounded(step_s)] = own
        self._push(self._changes.neighbours(own.layout), own, math.inf)
        tuned = dict[PlanLayout, Tuning]()
        for tuning, other in self._changes.tuned(own.layout):
            tuned.setdefault(other, tuning)
        self._tunings |= tuned
        self._push(tuned, own, step_s)

    def _push(self, others: Iterable[PlanLayout | None], own: _Centre, limit_s: float) -> None:
        """Layouts to try later, those first that should take least.

        Args:
            others: two changes at most from ``own``; None where one was made in vain.
            limit_s: the search goes on from those that take less.
        """
        step_s = own.plan.predicted.iteration_s
        estimated_s = self._estimates.estimate_s(own.layout)
        # Most of the budget is for trials.
        budget = self._budget.part(self._budget.left_s / 4)
        for other in others:
            if budget.is_over:
                return
            budget.spend(self._changes.made_s)
            if other is not None and other not in self._seen:
                self._seen.add(other)
                budget.spend(self._changes.estimate_s)
                if self._estimates.busiest_s(other) >= self._best_s:
                    continue
                expected_s = step_s / estimated_s * self._estimates.estimate_s(other)
                promised_s = expected_s
                tuning = self._tunings.get(other)
                if tuning is not None and tuning[0] in _IN_FLIGHT:
                    unseen_s = _UNSEEN_SHARE * (step_s - estimated_s)
                    promised_s -= max(unseen_s, _LEAST_UNSEEN * step_s)
                self._add(
                    _Untried(
                        layout=other,
                        expected_s=rounded(expected_s),
                        promised_s=promised_s,
                        limit_s=limit_s,
                        around=own,
                    )
                )

    def _add(self, untried: _Untried) -> None:
        self._seen.add(untried.layout)
        item = rounded(untried.promised_s), next(self._numbers), untried
        heapq.heappush(self._heap, item)

    def _factor(self, layout: PlanLayout) -> float:
        """By which a layout should take longer than estimated, by the choices in it."""
        own = (self._factors.get(key, 1.0) for key in _learnt_by(layout))
        return max(1.0, *own)

    def _learn(self, layout: PlanLayout, factor: float) -> None:
        for key in _learnt_by(layout):
            self._factors[key] = min(factor, self._factors.get(key, math.inf))


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


def _led_otherwise(layout: PlanLayout, other: PlanLayout) -> set[int]:
    """Units that have other leads."""
    pairs = enumerate(zip(layout.choices, other.choices, strict=True))
    return {i for i, (own, its) in pairs if (own.lead, own.sync_lead) != (its.lead, its.sync_lead)}


def _runs(choice: UnitChoice) -> tuple[object, ...]:
    """What a unit does on its devices, wherever these are and whatever its lead."""
    c = choice
    return c.tp, c.pp, c.vpp, c.dp, c.size, c.kind, c.items


def _learnt_by(layout: PlanLayout) -> Iterator[tuple[object, ...]]:
    """What estimates are corrected by: all degrees, and each unit's choice, whatever its lead."""
    order = layout.rule, layout.timed
    yield layout.backwards, order, layout.in_turn, *degrees_of(layout)
    for index, choice in enumerate(layout.choices):
        yield layout.backwards, order, index, *_runs(choice)
