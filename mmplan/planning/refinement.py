"""Other orders and backwards of a chosen plan, where they make its step shorter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mmplan.errors import InvalidInputError
from mmplan.planning.candidate_plans import INSTRUCTIONS_OF_FIRST, CandidatePlans
from mmplan.planning.measured_trials import SimulatedPlan, as_fast_as, rounded, step_s
from mmplan.planning.order_search import LEADS, OrderSearch, shares_ranks
from mmplan.planning.uneven_shares import with_uneven_shares
from mmplan.planning.unit_polish import polished
from mmplan.planning.unit_schedules import best_backwards, fused_backwards, other_orders
from mmplan.schema.plan import Plan
from mmplan.simulation.least_step import least_step_s
from mmplan.solvers.problem import Solution

# Who found a plan that is a change of solvers' plans.
NEIGHBOURS = "neighbours"
# Other orders and backwards are tried of plans that take up to this times the best step; chosen by
# hand: orders alone may gain a quarter.
REFINED_WITHIN = 2
# Simulations that this takes at least: of its order, its cuts and its backwards.
LEAST_SIMULATIONS = 3
# Split backwards in an order of their own are tried of plans that take up to this times the best
# refined step.
BOTH_WITHIN = 1.05
# Changes of single units must shorten the step to less than this share; chosen by hand.
POLISHED_BY = 0.999
# A step that may lose less than this share gets as much less effort for them; chosen by hand.
POLISHED_WHOLLY = 0.06
# The best few are polished, for so many times the effort of one; chosen by hand.
MOST_POLISHED = 5
POLISH_EFFORTS = 4
# A change that takes more than the effort divided by this is not simulated: a plan of few
# instructions gets many where its replicas are cut unevenly. Chosen by hand.
POLISHED_OFTEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinedPlan:
    """A plan and its changes, each of the one before.

    Attributes:
        plain: fused backwards, in the best order of its micro-batches.
        reordered: in the best order on shared ranks.
        split: with split backwards where they gain; the plan itself where all this lost.
        shared_out: with uneven shares of samples; None where that was not tried.
        polished: with other micro-batches and kinds of schedule of single units; None where that
            was not tried.
        summed: with its sums of gradients in another order; None where that was not tried.
    """

    plain: SimulatedPlan
    reordered: SimulatedPlan
    split: SimulatedPlan
    shared_out: SimulatedPlan | None = None
    polished: SimulatedPlan | None = None
    summed: SimulatedPlan | None = None

    @property
    def computed(self) -> SimulatedPlan:
        """After all changes of the computes."""
        return self.polished or self.unpolished

    @property
    def unpolished(self) -> SimulatedPlan:
        """Before changes of single units."""
        return self.shared_out or self.split

    @property
    def final(self) -> SimulatedPlan:
        """After all changes."""
        return self.summed or self.computed


class Refinement:
    """Changes of a plan that keep its units' degrees and devices.

    Args:
        plans: simulates them.
    """

    def __init__(self, plans: CandidatePlans) -> None:
        self._plans, self._request = plans, plans.request
        self._orders = OrderSearch(
            plans.request.costs,
            simulated=plans.simulated,
            fits=plans.fits,
            lowered=plans.lowered,
        )
        # By the identity of the plan that was refined, which callers keep.
        self._known: dict[int, RefinedPlan] = {}

    def run(
        self,
        plans: Sequence[SimulatedPlan],
        *,
        all_of_them: bool,
        both: bool,
        is_best_first: bool = True,
    ) -> list[RefinedPlan]:
        """Some plans, each refined where it may become the best of all.

        Args:
            plans: the best first.
            all_of_them: those too that are slower by their computes alone.
            both: those that are near the best get split backwards in an order of their own and
                uneven shares too, and the best few are polished.
            is_best_first: whether the first is the best of all, and refined however large it is.
        """
        found = [RefinedPlan(plain=x, reordered=x, split=x) for x in plans]
        effort_before = self._plans.effort
        for position, first in enumerate(plans):
            if known := self._known.get(id(first.plan)):
                found[position] = known
                continue
            limit_s = math.inf if all_of_them else as_fast_as(x.final for x in found)
            spent = self._plans.effort - effort_before
            own = LEAST_SIMULATIONS * self._plans.instructions_of(first.plan)
            is_best = is_best_first and not position
            if not is_best and spent + own > INSTRUCTIONS_OF_FIRST:
                continue  # it is large, and was not the best
            least_s = self._least_step_s(first.plan)
            if least_s > limit_s or step_s(first) > REFINED_WITHIN * limit_s:
                continue  # no order of it is the best
            found_so = self._best_cuts(self._best_order(self._fused(first)))
            plain = self._in_usual_order(found_so)
            reordered = self._on_shared_ranks(found_so)
            if rounded(step_s(plain)) <= rounded(step_s(reordered)):
                reordered = plain
            split = self._best_backwards(reordered)
            if step_s(split) > step_s(first):  # a search has found more
                split = first
            known = self._summed(RefinedPlan(plain=plain, reordered=reordered, split=split))
            found[position] = self._known[id(first.plan)] = known
        if both:
            self._change_best(found, self._changed_wholly, effort=INSTRUCTIONS_OF_FIRST)
            effort = POLISH_EFFORTS * INSTRUCTIONS_OF_FIRST
            self._change_best(found, self._with_polish, effort=effort, most=MOST_POLISHED)
        return found

    def _change_best(
        self,
        found: list[RefinedPlan],
        change: Callable[[RefinedPlan], RefinedPlan],
        *,
        effort: float,
        most: int | None = None,
    ) -> None:
        """Change the best, and others near it of other steps while effort is left.

        Args:
            effort: instructions that are simulated.
            most: so many plans at most.
        """
        last = self._plans.effort + effort
        position_of: dict[float, int] = {}
        for position, x in enumerate(found):
            position_of.setdefault(step_s(x.final), position)
        order = sorted(position_of)[:most]
        for own_s in order:
            x = found[position_of[own_s]]
            is_large = self._plans.effort + self._plans.instructions_of(x.plain.plan) > last
            if own_s == order[0] or (own_s <= BOTH_WITHIN * order[0] and not is_large):
                found[position_of[own_s]] = self._shorter(x, change(x))

    def _changed_wholly(self, x: RefinedPlan) -> RefinedPlan:
        """A plan with split backwards in an order of their own, and uneven shares."""
        split = self._both_changed(x.split)
        return replace(x, split=split, shared_out=self._shared_out(split))

    def _with_polish(self, x: RefinedPlan) -> RefinedPlan:
        return replace(x, polished=self._polished(x.computed))

    def _shorter(self, x: RefinedPlan, changed: RefinedPlan) -> RefinedPlan:
        """The shorter one with its sums in order: what gains before that may lose with it."""
        return min(x, self._summed(changed), key=lambda own: step_s(own.final))

    def _summed(self, x: RefinedPlan) -> RefinedPlan:
        """The same with its sums in the order in which ranks wait least for each other."""
        plan = self._orders.best_sums(x.computed.plan)
        summed = None if plan is x.computed.plan else replace(x.computed, plan=plan)
        return replace(x, summed=summed)

    def _best_order(self, best: SimulatedPlan) -> SimulatedPlan:
        """The chosen plan in the fastest order of its micro-batches that fits the memory."""
        plans = [best.plan]
        for units in other_orders(best.plan.units):
            if units != best.plan.units:
                with suppress(InvalidInputError):
                    plans.append(
                        self._plans.simulated(best.plan.model_copy(update={"units": units}))
                    )
        fitting = [plan for plan in plans if self._plans.fits(plan)]
        # The first of equals: forwards issued early that hide nothing only take memory.
        return replace(best, plan=min(fitting, key=lambda p: rounded(p.predicted.iteration_s)))

    def _best_cuts(self, best: SimulatedPlan) -> SimulatedPlan:
        """The plan, or it with its heavy stages elsewhere where that is faster and fits."""
        plan = self._plans.cuts.turned(best.plan)
        if plan is not best.plan:
            with suppress(InvalidInputError):
                other = replace(best, plan=self._plans.simulated(plan))
                if step_s(other) < step_s(best) and self._plans.fits(other.plan):
                    return other
        return best

    def _in_usual_order(self, item: SimulatedPlan) -> SimulatedPlan:
        """The plan in the order that it has by default; as it is where it does not fit or run so.

        A search tries most layouts in another order.
        """
        if item.plan.order is not None:
            with suppress(InvalidInputError):
                plan = self._plans.simulated(item.plan.model_copy(update={"order": None}))
                if self._plans.fits(plan):
                    return replace(item, plan=plan)
        return item

    def _on_shared_ranks(self, item: SimulatedPlan) -> SimulatedPlan:
        """The plan with the order in which its shared ranks idle least."""
        is_large = self._plans.instructions_of(item.plan) > INSTRUCTIONS_OF_FIRST
        plan = self._orders.best_order(item.plan, leads=() if is_large else LEADS)
        return item if plan is item.plan else replace(item, plan=plan)

    def _both_changed(self, best: SimulatedPlan) -> SimulatedPlan:
        """The best plan, or it with split backwards in an order that is found for them.

        Each alone may gain nothing. A baseline that is changed is a baseline no more.
        """
        request = self._request
        plan = best_backwards(
            best.plan,
            request.workload,
            request.cluster,
            lambda plan: self._orders.best_order(self._plans.simulated(plan), leads=()),
        )
        return best if plan is best.plan else _as_change(best, plan)

    def _polished(self, best: SimulatedPlan) -> SimulatedPlan:
        """The best plan, or it with other micro-batches or kinds of schedule of single units."""
        if best.plan.waves or not step_s(best):  # slices of waves have times
            return best
        better = self._better(best)
        plan = polished(best.plan, self._request.workload, better)
        return best if plan is best.plan else _as_change(best, plan)

    def _shared_out(self, best: SimulatedPlan) -> SimulatedPlan:
        """The plan, or it with fewer samples on devices that have much to do."""
        request = self._request
        if not shares_ranks(best.plan) or not step_s(best):
            return best
        plan = with_uneven_shares(best.plan, request.costs, request.workload, self._better(best))
        return best if plan is best.plan else _as_change(best, plan)

    def _better(self, best: SimulatedPlan) -> Callable[[Plan, Plan], Plan | None]:
        """Simulates changes of a plan, of which one shortens the step, else gives None.

        What the computes take leaves so much to gain: a step that may lose little gets less effort.
        """
        share = 1 - self._least_step_s(best.plan) / step_s(best)
        effort = min(1.0, share / POLISHED_WHOLLY) * INSTRUCTIONS_OF_FIRST
        last = self._plans.effort + effort

        def better(own: Plan, other: Plan) -> Plan | None:
            if self._plans.effort >= last:
                return None
            limit_s, needed = POLISHED_BY * own.predicted.iteration_s, math.inf
            with suppress(InvalidInputError):
                other, needed = self._plans.with_bytes(
                    other, None, limit_s, effort / POLISHED_OFTEN
                )
            simulates = needed <= self._plans.memory_bytes and self._plans.is_compiled(other)
            return other if simulates and other.predicted.iteration_s < limit_s else None

        return better

    def _least_step_s(self, plan: Plan) -> float:
        return least_step_s(plan, self._request.costs, self._plans.lowered(plan))

    def _fused(self, item: SimulatedPlan) -> SimulatedPlan:
        """The plan with fused backwards, if these fit and can run."""
        units = fused_backwards(item.plan.units, self._request.workload)
        if units != item.plan.units:
            with suppress(InvalidInputError):
                plan = self._plans.simulated(item.plan.model_copy(update={"units": units}))
                if self._plans.fits(plan):
                    objective_s = plan.predicted.iteration_s
                    candidate = replace(item.candidate, objective_s=objective_s)
                    return replace(item, plan=plan, candidate=candidate)
        return item

    def _best_backwards(self, fused: SimulatedPlan) -> SimulatedPlan:
        """Split backwards where they gain; the formula's optimum and baselines stay as they are."""
        request = self._request
        if request.top == 1 or fused.is_baseline:
            return fused
        plan = best_backwards(fused.plan, request.workload, request.cluster, self._plans.simulated)
        return replace(fused, plan=plan)


def _as_change(item: SimulatedPlan, plan: Plan) -> SimulatedPlan:
    """A change of a plan by more than its order or backwards: a baseline is a baseline no more."""
    solution = item.solution
    if item.is_baseline:
        note = f"changed in simulation from {item.label}"
        solution = replace(of_neighbours(solution.formula_bound_s), notes=(note,))
    return replace(item, plan=plan, solution=solution, is_baseline=False)


def of_neighbours(least_s: float) -> Solution:
    """The solution whose plans are changes of others; no plan takes less than ``least_s``."""
    return Solution(
        solver=NEIGHBOURS,
        method="simulation",
        candidates=(),
        formula_bound_s=least_s,
        closed_form=False,
    )
