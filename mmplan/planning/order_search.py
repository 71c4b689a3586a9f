"""The order of units that share ranks: several are estimated, and the best few simulated.

An estimate runs the events of a plan in the order that a rule gives them, with the profile's
seconds and without messages. It takes a seventh of a simulation's time. Where no rank idles in it
and the step takes longer all the same, other rules are simulated. Sums of gradients over different
ranks then get an order of their own, those that take longest first: a rank of several waits for
others where they begin with different ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.planning.measured_trials import AS_FAST, rounded
from mmplan.program.instructions import Op
from mmplan.program.model import BlockReduction, Stage
from mmplan.program.schedules.global_order import Event, OrderBuilder, edge_links
from mmplan.program.schedules.plan_order import order_stages
from mmplan.program.schedules.registry import POLICIES
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.base import MOST_COUNT
from mmplan.schema.plan import ChunkTimes, Order, OrderRule, Plan, Unit

# Forwards that units run ahead of what their consumers need. On shared ranks more than one may hide
# what a rank does for others. On 150 random plans with shared ranks these leads with the three
# rules came within 0.1% of the best order that was tried; the usual order was 7% above it.
LEADS = (1, 2, 3, 6)
# The orders with the best estimates that are simulated, one of a lead; chosen by hand.
_SIMULATED = 2
# A step that takes longer by this factor than its estimate waits for what no estimate has; chosen
# by hand.
_UNSEEN = 1.02
# Nominal times are whole nanoseconds: sums of whole numbers are exact, so that equal parts of a
# plan stay equal.
_NANOSECONDS = 1e9


def shares_ranks(plan: Plan) -> bool:
    """Whether a rank is in several units."""
    ranks = [rank for unit in plan.units for rank in set(unit.all_ranks)]
    return len(set(ranks)) < len(ranks)


class OrderSearch:
    """Tries orders of plans whose units share ranks.

    Args:
        costs: under the plans' training settings.
        simulated: adds the prediction to a plan.
        fits: whether a simulated plan fits the memory.
        lowered: a plan lowered, where some are held.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        simulated: Callable[[Plan], Plan],
        fits: Callable[[Plan], bool],
        lowered: Callable[[Plan], LoweredPlan] = lower_plan,
    ) -> None:
        self._costs, self._simulated, self._fits = costs, simulated, fits
        self._lowered = lowered

    def best_order(self, plan: Plan, leads: Sequence[int] = LEADS) -> Plan:
        """The plan as it is, or in an order in which its shared ranks idle less.

        Args:
            plan: simulated.
            leads: that units may have beside their own.
        """
        if not shares_ranks(plan):
            return plan
        estimates = _Estimates(self._lowered(plan), self._costs)
        own = estimates.of_orders(plan, [plan.order or Order()])[0]
        if own.step_s < AS_FAST * own.busiest_s:
            # Messages or sums take what the step takes longer: another rule may hide more of them.
            is_unseen = plan.predicted.iteration_s > _UNSEEN * own.step_s
            others = _under_other_rules(plan) if is_unseen else ()
        else:
            others = estimates.best_of_each_lead(leads, below_s=own.step_s / AS_FAST)
        tried, best_s = 0, plan.predicted.iteration_s / AS_FAST
        for changed in others:
            with suppress(InvalidInputError):
                changed = self._simulated(changed)
                if not self._fits(changed):
                    continue
                tried += 1
                if changed.predicted.iteration_s < best_s:
                    plan, best_s = changed, changed.predicted.iteration_s
            if tried == _SIMULATED:
                break
        return plan

    def best_sums(self, plan: Plan) -> Plan:
        """The plan as it is, or with the longest sums of gradients first.

        Args:
            plan: simulated.
        """
        sums = _sums(self._lowered(plan), self._costs) if shares_ranks(plan) else {}
        if sums:
            order = (plan.order or Order()).model_copy(update={"sums": sums})
            with suppress(InvalidInputError):
                changed = self._simulated(plan.model_copy(update={"order": order}))
                limit_s = plan.predicted.iteration_s / AS_FAST
                if changed.predicted.iteration_s < limit_s and self._fits(changed):
                    return changed
        return plan


def _sums(lowered: LoweredPlan, costs: CostModel) -> dict[str, int]:
    """By module the time of a block's sum; none where all sums of a rank are of the same ranks."""
    graph = lowered.graph
    whole = ProgramCosts.of_lowered(lowered.plan, graph, costs)
    seconds: defaultdict[str, float] = defaultdict(float)
    first_of: dict[int, tuple[int, ...]] = {}
    are_apart = False
    for reduction in graph.reductions:
        if isinstance(reduction, BlockReduction):
            ranks, (start, end) = reduction.ranks, reduction.blocks
            are_apart |= any(first_of.setdefault(rank, ranks) != ranks for rank in ranks)
            each_s = whole.reduce_s(reduction) / (end - start)
            seconds[reduction.owner] = max(seconds[reduction.owner], each_s)
    found = {owner: max(1, round(each_s * _NANOSECONDS)) for owner, each_s in seconds.items()}
    return found if are_apart else {}


def _under_other_rules(plan: Plan) -> Iterator[Plan]:
    """The plan under each rule but its own, without times."""
    own = plan.order or Order()
    for rule in get_args(OrderRule):
        if rule != own.rule:
            order = None if rule == Order().rule else Order(rule=rule)
            yield plan.model_copy(update={"order": order})


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Seconds of a step without messages, syncs and reductions.

    Attributes:
        step_s: to the end of the last compute.
        busiest_s: of the computes of the rank that has most of them.
    """

    step_s: float
    busiest_s: float


class _Estimates:
    """Estimates of a plan in several orders."""

    def __init__(self, lowered: LoweredPlan, costs: CostModel) -> None:
        self._plan = lowered.plan
        self._stages, self._graph = lowered.graph.stages, lowered.simulated_graph
        self._costs = ProgramCosts.of_lowered(lowered.plan, lowered.graph, costs)
        self._links = [edge_links(self._graph.stages, edge) for edge in self._graph.edges]

    def best_of_each_lead(self, leads: Sequence[int], *, below_s: float) -> list[Plan]:
        """The plan in the order with the best estimate of each lead, best first."""
        times = nominal_times(self._stages, self._costs)
        orders = [Order(rule=r, times=t) for t in ({}, times) for r in get_args(OrderRule)]
        found: list[tuple[float, Plan]] = []
        for units in dict.fromkeys((self._plan.units, *map(self._with_lead, leads))):
            changed = self._plan.model_copy(update={"units": units})
            with suppress(InvalidInputError):
                steps = [rounded(e.step_s) for e in self.of_orders(changed, orders)]
                order = orders[steps.index(min(steps))]
                stored = None if order == Order() else order
                found.append((min(steps), changed.model_copy(update={"order": stored})))
        found.sort(key=lambda pair: pair[0])
        return [changed for step_s, changed in found if step_s < below_s]

    def of_orders(self, plan: Plan, orders: Sequence[Order]) -> list[_Estimate]:
        """An estimate of each order of a plan that differs from this one in leads.

        Raises:
            InvalidInputError: the units' schedules wait for each other.
        """
        batches = {name: task.batch for name, task in plan.tasks.items()}
        own = order_stages(plan, self._graph)
        return [
            self._run(OrderBuilder(self._graph, batches, own, self._links, order).run())
            for order in orders
        ]

    def _run(self, events: Iterator[Event]) -> _Estimate:
        free_s: defaultdict[int, float] = defaultdict(float)
        busy_s: defaultdict[int, float] = defaultdict(float)
        ready_s: defaultdict[Event, float] = defaultdict(float)
        for event in events:
            seconds = self._seconds_of(event)
            end_s = max(ready_s.pop(event, 0.0), *(free_s[rank] for rank in event.ranks)) + seconds
            for rank in event.ranks:
                free_s[rank] = end_s
                busy_s[rank] += seconds
            for other in event.then:
                ready_s[other] = max(ready_s[other], end_s)
        return _Estimate(max(free_s.values()), max(busy_s.values()))

    def _seconds_of(self, event: Event) -> float:
        if event.op not in (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT):
            return 0.0
        stage = self._graph.stages[event.index]
        start, stop = stage.microbatches[event.d][event.mb]
        return self._costs.compute_s(self._stages[event.index], event.op, stop - start)

    def _with_lead(self, lead: int) -> tuple[Unit, ...]:
        return tuple(
            unit.model_copy(update={"schedule": unit.schedule.model_copy(update={"lead": lead})})
            if POLICIES[unit.schedule.kind].runs_ahead
            else unit
            for unit in self._plan.units
        )


def timed(plan: Plan, lowered: LoweredPlan, costs: CostModel) -> Plan:
    """The plan with an order that knows what computes take."""
    whole = ProgramCosts.of_lowered(plan, lowered.graph, costs)
    times = nominal_times(lowered.graph.stages, whole)
    order = (plan.order or Order()).model_copy(update={"times": times})
    return plan.model_copy(update={"order": order})


def nominal_times(
    stages: Sequence[Stage], costs: ProgramCosts
) -> dict[str, tuple[ChunkTimes, ...]]:
    """By unit, nanoseconds of each chunk for one sample of its largest micro-batch."""
    times: defaultdict[str, list[ChunkTimes]] = defaultdict(list)
    for stage in stages:
        most = max(stop - start for row in stage.microbatches for start, stop in row)
        seconds = [
            costs.compute_s(stage, op, most) if op is Op.FORWARD or stage.has_backward else 0.0
            for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT)
        ]
        # Of seconds beyond reason a plan's file holds the largest whole number that it can.
        forward, backward, inputs = (
            max(1, round(min(s / most * _NANOSECONDS, MOST_COUNT))) for s in seconds
        )
        times[stage.unit].append(
            ChunkTimes(forward=forward, backward=backward, input_backward=inputs)
        )
    return {unit: tuple(chunks) for unit, chunks in times.items()}


def order_notes(plan: Plan, plain: Plan) -> list[str]:
    """What another order gains, if the plan has one."""
    if plan is plain:
        return []
    order = plan.order or Order()
    rule = order.rule.replace("-", " ")
    times = " by the profile's times" if order.times else ""
    lead = max(unit.schedule.lead for unit in plan.units)
    gain = 1 - plan.predicted.iteration_s / plain.predicted.iteration_s
    return [
        f"on shared devices the order is {rule}{times}, with a lead of {lead}: "
        f"the step takes {gain:.1%} less than in the usual order"
    ]


def sums_notes(plan: Plan, before: Plan) -> list[str]:
    """What the order of its sums gains, if the plan has one."""
    if plan is before:
        return []
    gain = 1 - plan.predicted.iteration_s / before.predicted.iteration_s
    return [f"the longest sums of gradients come first: the step takes {gain:.1%} less"]
