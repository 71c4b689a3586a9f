"""Changes of a plan that are tried in simulation: what no formula of one solver sees.

A *layout* is what such a change acts on: of each unit its degrees, micro-batch and lead, which
units share devices, and how the whole runs: backwards, order, ZeRO stage. The search starts from
the layouts of the solvers' best plans (:mod:`mmplan.planning.neighbours.best_first`).

No change leads from the starts to some *uniform* layouts, whose units run alike in one or two
groups. The few that promise most are tried first, and the best of them are the starts of a search
of their own. The two searches take turns, and that with the better plan comes first in each. Where
much may be gained, both begin anew, by estimates in which more hides sums of gradients; then they
do so with the best plan so far as a start, and uniform layouts with other groups apart. Where no
solver has a plan that fits, the first small layout that does is the plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmplan.planning.neighbours.best_first import BestFirstSearch, Neighbours
from mmplan.planning.neighbours.estimates import MOST_ZERO
from mmplan.planning.neighbours.layout import PlanLayout
from mmplan.planning.neighbours.trials import LayoutTrials, merit
from mmplan.schema.plan import Plan
from mmplan.solvers.problem import Candidate

# Uniform layouts that are tried. Chosen by hand, as all that follows.
_UNIFORM = 8
# Of them with the same groups.
_ALIKE = 2
# Share of the budget that there is because of these. Their own trials get half of it at most.
UNIFORM_SHARE = 0.3
# Origins of uniform layouts with other groups.
_BY_GROUPS = 4
# Searches have so many turns each, which take this share of the budget. The best one has the rest.
_TURNS = 2
_TURNS_SHARE = 1 / 4
# A turn ends after so many trials in a row that gained nothing, and a search after so many.
_TURN_IN_VAIN = 30
_IN_VAIN = 200
# Plans of a search beside its best that are refined too where they are about as fast.
_KINDS = 4
# A search that still gains goes on: a hundredth of the step is worth a tenth of the budget, where
# no more than this share of it is left.
_GAIN_BUDGETS = 10
_LEFT_SHARE = 1 / 2


class NeighbourSearch:
    """Changes of starts, and layouts that are unlike all of these.

    Args:
        trials: of layouts, with the budget of the whole search.
        least_s: no plan takes less.
        again: whether other searches follow, by other estimates and with as much budget each.
    """

    def __init__(self, trials: LayoutTrials, *, least_s: float, again: bool = False) -> None:
        self._trials, self._least_s, self._again = trials, least_s, again
        self._whole_s = trials.budget.left_s

    @property
    def evaluations(self) -> int:
        """Layouts that were simulated."""
        return self._trials.evaluations

    def run(self, starts: Sequence[Plan]) -> list[Neighbours]:
        """The best plans of all searches, the best first; those without a candidate are starts.

        Of each search they are its best, and others of other degrees or orders, which may gain
        more later.

        Args:
            starts: simulated, best first; one at least.
        """
        own = [Neighbours(plan=plan, start=plan) for plan in starts]
        found = self._searched([own, *self._unlike(starts[0], self._simulated_uniform(starts[0]))])
        if self._again:
            self._trials.estimates.hides_sums = True
            self._begin_again()
            uniform = self._simulated_uniform(starts[0])
            found += self._searched([own, *self._unlike(starts[0], uniform)])
            self._begin_again()
            own = sorted([*own, min(found, key=_merit)], key=_merit)
            found += self._searched([own, *self._by_groups(uniform)])
        return sorted(found, key=_merit)

    def _begin_again(self) -> None:
        self._trials.budget.earn(self._whole_s, most_s=self._whole_s)

    def _unlike(self, start: Plan, uniform: list[Neighbours]) -> list[list[Neighbours]]:
        """Uniform layouts as an origin, if their best is not the start."""
        return [uniform] if uniform and not self._is_same(uniform[0].plan, start) else []

    def _by_groups(self, uniform: Sequence[Neighbours]) -> list[list[Neighbours]]:
        """Origins of uniform layouts, each of those with the same groups of devices."""
        found: defaultdict[tuple[tuple[int, ...], ...], list[Neighbours]] = defaultdict(list)
        for own in uniform:
            if layout := self._trials.space.layout_of(own.plan):
                found[layout.groups].append(own)
        return list(found.values())[:_BY_GROUPS]

    def _searched(self, origins: Sequence[list[Neighbours]]) -> list[Neighbours]:
        """What searches find that begin at these and take turns.

        Args:
            origins: of each search, the best first.
        """
        origins = sorted(origins, key=lambda own: _merit(own[0]))
        best_of = [own[0] for own in origins]
        searches = [BestFirstSearch(self._trials, least_s=self._least_s) for _ in origins]
        runs = [
            search.run([item.plan for item in own])
            for search, own in zip(searches, origins, strict=True)
        ]
        turn = _TURN_IN_VAIN, _TURNS_SHARE / len(origins) * self._trials.budget.left_s
        for most, spent_s in (*[turn] * _TURNS, (_IN_VAIN, math.inf)):
            for place in sorted(range(len(origins)), key=lambda n: _merit(best_of[n])):
                best_of[place] = self._go_on(runs[place], best_of[place], most, spent_s)
        found: list[Neighbours] = []
        for own, best, search in zip(origins, best_of, searches, strict=True):
            start_of = {id(item.plan): item.start for item in own}
            others = [other for other in search.best_of_kinds(_KINDS) if other is not best]
            found += [
                item if item is own[0] else replace(item, start=start_of[id(item.start)])
                for item in (best if best.candidate else own[0], *others)
            ]
        return found

    def _go_on(
        self, search: Iterator[Neighbours], best: Neighbours, most: int, spent_s: float
    ) -> Neighbours:
        """The best of a search that goes on for so many trials in vain, or seconds of the budget.

        Args:
            search: gives the best after each trial.
            best: so far.
        """
        until_s, in_vain = self._trials.budget.left_s - spent_s, 0
        for found in search:
            in_vain = in_vain + 1 if found is best else 0
            gain = 1 - found.plan.predicted.iteration_s / best.plan.predicted.iteration_s
            earned_s = _GAIN_BUDGETS * gain * self._whole_s
            self._trials.budget.earn(earned_s, most_s=_LEFT_SHARE * self._whole_s)
            best = found
            if in_vain == most or self._trials.budget.left_s <= until_s:
                break
        return best

    def _is_same(self, plan: Plan, other: Plan) -> bool:
        """Whether one has the other's layout and step: that of waves may have another step."""
        layout_of = self._trials.space.layout_of
        return merit(plan) == merit(other) and layout_of(plan) == layout_of(other)

    def first_fit(self) -> tuple[Candidate, Plan] | None:
        """A plan that fits where no solver has one, those first that hold least."""
        seen, numbers = set[PlanLayout](), itertools.count()
        small = self._trials.changes.small(0, self._trials.small_budget())
        heap = [(self._trials.estimates.least_bytes(own), next(numbers), own) for own in small]
        heapq.heapify(heap)
        while heap and not self._trials.budget.is_over:
            _, _, layout = heapq.heappop(heap)
            others = [layout, *filter(None, self._trials.changes.neighbours(layout))]
            stages = range(min(layout.zero), MOST_ZERO + 1)
            for other, zero in itertools.product(others, stages):
                if self._trials.budget.is_over:
                    return None
                other = other.in_usual_order().cut_further(zero)
                # What was learnt could be wrong, and the first that fits is wanted.
                if other in seen or self._trials.least_bytes(other) > self._trials.memory_bytes:
                    continue
                seen.add(other)
                candidate = self._trials.candidate(other)
                if candidate and (plan := self._trials.run(other, candidate)[0]):
                    return candidate, plan
                held = self._trials.estimates.least_bytes(other)
                heapq.heappush(heap, (held, next(numbers), other))
        return None

    def _simulated_uniform(self, start: Plan) -> list[Neighbours]:
        """The few uniform layouts that promise most and fit, the best first.

        Args:
            start: what the others are reported to come from; none has a lower ZeRO stage.
        """
        trials, found = self._trials, list[Neighbours]()
        layouts = self._uniform(start.training.zero)
        # Most is for changes of the best.
        until_s = (1 - UNIFORM_SHARE / 2) * trials.budget.left_s
        for layout in layouts:
            candidate = trials.candidate(layout)
            if candidate is None or trials.needed(layout) > trials.memory_bytes:
                continue
            if trials.budget.left_s - until_s <= trials.trial_s:
                break
            plan, _ = trials.run(layout, candidate)
            if plan is not None:
                found.append(Neighbours(plan=plan, start=start, candidate=candidate))
        return sorted(found, key=_merit)

    def _uniform(self, least_zero: int) -> list[PlanLayout]:
        """The few that promise most of those that fit."""
        budget = self._trials.small_budget()
        # Of those with the same groups few, or they would all be about the same.
        best_of: defaultdict[tuple[object, ...], list[tuple[float, int, PlanLayout]]]
        best_of = defaultdict(list)
        numbers = itertools.count()
        for layout in self._trials.changes.uniform(budget):
            if budget.is_over:
                break
            for zero in range(least_zero, self._trials.estimates.most_zero(layout) + 1):
                further = layout.cut_further(zero)
                budget.spend(self._trials.changes.estimate_s)
                if self._trials.estimates.least_bytes(further) <= self._trials.memory_bytes:
                    estimate_s = self._trials.estimates.estimate_s(further)
                    own = best_of[further.groups, bool(further.in_turn)]
                    own.append((estimate_s, next(numbers), further))
                    own.sort()
                    del own[_ALIKE:]
                    break
        every = itertools.chain(*best_of.values())
        return [layout for _, _, layout in heapq.nsmallest(_UNIFORM, every)]


def _merit(own: Neighbours) -> tuple[float, int]:
    return merit(own.plan)
