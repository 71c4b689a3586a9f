"""Changes of a plan that are tried in simulation: what no formula of one solver sees.

A *layout* is what such a change acts on: of each unit its degrees, micro-batch and lead, which
units share devices, and how the whole runs: backwards, order, ZeRO stage. The search starts from
the layouts of the solvers' best plans (:mod:`mmplan.planning.neighbours.best_first`).

No change leads from the starts to some *uniform* layouts, whose units run alike in one or two
groups. The few that promise most are tried first, and the best of them are the starts of a search
of their own. The two searches take turns, and that with the better plan comes first in each. Where
much may be gained, both begin anew, by estimates in which more hides sums of gradients. Where no
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
# Each of two searches has so many turns, of this share of the budget. The better one has the rest.
_TURNS = 2
_TURN_SHARE = 1 / 8
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
        more_s: seconds of a quiet core for a second search, by other estimates.
    """

    def __init__(self, trials: LayoutTrials, *, least_s: float, more_s: float = 0.0) -> None:
        self._trials, self._least_s, self._more_s = trials, least_s, more_s
        self._whole_s = trials.budget.left_s

    @property
    def evaluations(self) -> int:
        """Layouts that were simulated."""
        return self._trials.evaluations

    def run(self, starts: Sequence[Plan]) -> list[Neighbours]:
        """The best plans of each search, the best first; those without a candidate are starts.

        Of each it is the best, and others of other degrees or orders, which may gain more later.

        Args:
            starts: simulated, best first; one at least.
        """
        found = self._searched(starts, starts[0])
        if self._more_s > 0:
            self._trials.estimates.hides_sums = True
            self._whole_s = self._more_s
            self._trials.budget.earn(self._more_s, most_s=math.inf)
            known = {id(plan) for plan in starts}
            own = self._searched(sorted([found[0].plan, *starts], key=merit), starts[0])
            found += [
                best if id(best.start) in known else replace(best, start=starts[0])
                for best in own
                if best.candidate
            ]
        return sorted(found, key=lambda best: merit(best.plan))

    def _searched(self, starts: Sequence[Plan], start: Plan) -> list[Neighbours]:
        """What two searches find, one of starts and one of uniform layouts.

        Args:
            start: what uniform layouts are reported to come from.
        """
        origins, uniform = [starts], self._simulated_uniform(start)
        if uniform and not self._is_same(uniform[0].plan, starts[0]):
            origins.append([own.plan for own in uniform])
            origins.sort(key=lambda own: merit(own[0]))
        best_of = [Neighbours(plan=own[0], start=own[0]) for own in origins]
        searches = [BestFirstSearch(self._trials, least_s=self._least_s) for _ in origins]
        runs = [search.run(own) for search, own in zip(searches, origins, strict=True)]
        turn = _TURN_IN_VAIN, _TURN_SHARE * self._trials.budget.left_s
        for most, spent_s in (*[turn] * _TURNS, (_IN_VAIN, math.inf)):
            for place in sorted(range(len(origins)), key=lambda n: merit(best_of[n].plan)):
                best_of[place] = self._go_on(runs[place], best_of[place], most, spent_s)
        found: list[Neighbours] = []
        for own, best, search in zip(origins, best_of, searches, strict=True):
            if own is not starts and best.candidate is None:
                best = uniform[0]
            others = [other for other in search.best_of_kinds(_KINDS) if other is not best]
            found += [
                item if own is starts else replace(item, start=start) for item in (best, *others)
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
        return sorted(found, key=lambda own: merit(own.plan))

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
