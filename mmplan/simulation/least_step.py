"""A lower bound of a plan's step, before it is compiled: its ranks' computes, and their first wait.

It holds for every order of the computes and for split backwards too, so a search may pass over what
cannot become the best.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cache

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.program.instructions import Op
from mmplan.program.model import Program
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.plan import Plan


def least_step_s(plan: Plan, costs: CostModel, lowered: LoweredPlan | None = None) -> float:
    """Seconds that the step takes at least, in any order and with split backwards or whole ones.

    A rank computes all of its micro-batches, and none before the first of its stages has an input.

    Args:
        plan: the plan.
        costs: of its modules.
        lowered: the plan lowered, where that is done already.
    """
    lowered = lower_plan(plan) if lowered is None else lowered
    stages = lowered.graph.stages
    own_costs = ProgramCosts(Program.of(plan, lowered.graph, [()] * plan.devices), costs, plan)
    # By consumer, the stages of each module that feed it.
    producers: defaultdict[int, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for edge in lowered.graph.edges:
        producers[edge.consumer][stages[edge.producer].module].add(edge.producer)

    @cache
    def first_output_s(index: int) -> float:
        stage = stages[index]
        sizes = {stop - start for row in stage.microbatches for start, stop in row}
        first_s = (own_costs.compute_s(stage, Op.FORWARD, n) for n in sizes)
        return first_input_s(index) + min(first_s, default=0.0)

    def first_input_s(index: int) -> float:
        # Of slices of one module a micro-batch may need any one.
        return max((min(map(first_output_s, own)) for own in producers[index].values()), default=0)

    work_s: defaultdict[int, float] = defaultdict(float)
    wait_s: dict[int, float] = {}
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
    return max((work_s[rank] + wait_s[rank] for rank in work_s), default=0.0)
