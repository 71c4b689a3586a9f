"""A lower bound of a plan's step, before it is compiled: its ranks' computes, and their first wait.

It holds for every order of the computes and for split backwards too, so a search may pass over what
cannot become the best. Of a plan with its own backwards it knows too what comes after a rank's
last one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cache

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.program.instructions import Op
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.plan import Plan

# By stage and module, stages of it.
_StagesByModule = defaultdict[int, defaultdict[str, set[int]]]


def least_step_s(
    plan: Plan,
    costs: CostModel,
    lowered: LoweredPlan | None = None,
    *,
    as_planned: bool = False,
) -> float:
    """Seconds that the step takes at least, in any order and with split backwards or whole ones.

    A rank computes all of its micro-batches, and none before the first of its stages has an input.
    As planned, the gradient of its last whole backward then goes on to the first blocks.

    Args:
        plan: the plan.
        costs: of its modules.
        lowered: the plan lowered, where that is done already.
        as_planned: with the plan's own backwards.
    """
    lowered = lower_plan(plan) if lowered is None else lowered
    stages = lowered.graph.stages
    own_costs = ProgramCosts.of_lowered(plan, lowered.graph, costs)
    # By consumer, the stages of each module that feed it.
    producers: _StagesByModule = defaultdict(lambda: defaultdict(set))
    returns: _StagesByModule = defaultdict(lambda: defaultdict(set))
    for edge in lowered.graph.edges:
        producers[edge.consumer][stages[edge.producer].module].add(edge.producer)
        if edge.carries_gradient:
            returns[edge.consumer][stages[edge.producer].module].add(edge.producer)

    @cache
    def shortest_s(index: int, op: Op) -> float:
        kept = lowered.simulated_graph.stages[index]
        sizes = {stop - start for row in kept.microbatches for start, stop in row}
        return min((own_costs.compute_s(stages[index], op, n) for n in sizes), default=0.0)

    @cache
    def first_output_s(index: int) -> float:
        return first_input_s(index) + shortest_s(index, Op.FORWARD)

    def first_input_s(index: int) -> float:
        # Of slices of one module a micro-batch may need any one.
        return max((min(map(first_output_s, own)) for own in producers[index].values()), default=0)

    @cache
    def last_return_s(index: int) -> float:
        """After a stage's last backward, until its gradient has come to the first blocks."""
        ways = returns[index].values()
        return max((min(map(returned_s, own)) for own in ways), default=0.0)

    def returned_s(index: int) -> float:
        op = Op.INPUT if stages[index].split else Op.BACKWARD
        return shortest_s(index, op) + last_return_s(index)

    work_s: defaultdict[int, float] = defaultdict(float)
    wait_s: dict[int, float] = {}
    rest_s: dict[int, float] = {}
    for kept in lowered.simulated_graph.stages:
        stage = stages[kept.index]
        ops = (Op.FORWARD, Op.BACKWARD) if stage.has_backward else (Op.FORWARD,)
        for ranks, row in zip(kept.ranks, kept.microbatches, strict=True):
            counts = Counter(stop - start for start, stop in row)
            seconds = sum(
                count * own_costs.compute_s(stage, op, n)
                for n, count in counts.items()
                for op in ops
            )
            for rank in ranks:
                work_s[rank] += seconds
                wait_s[rank] = min(first_input_s(stage.index), wait_s.get(rank, math.inf))
                # Of split backwards the gradients of weights may come last.
                own_s = last_return_s(stage.index) if as_planned and not stage.split else 0.0
                rest_s[rank] = min(own_s, rest_s.get(rank, math.inf))
    return max((work_s[rank] + wait_s[rank] + rest_s[rank] for rank in work_s), default=0.0)
