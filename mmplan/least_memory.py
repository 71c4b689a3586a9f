"""What a plan holds at least, without simulating it: enough to see that one does not fit."""

from __future__ import annotations

from itertools import accumulate

from mmplan.costs import CostModel, ProgramCosts
from mmplan.program.lower import lower
from mmplan.program.model import Program, Stage
from mmplan.program.orders import order_stages
from mmplan.schema.plan import Plan


def least_memory_bytes(plan: Plan, costs: CostModel) -> float:
    """Bytes that some device holds at least: its fixed ones, and the most of one of its stages.

    Exact where devices run one stage each and backwards are whole. Takes a fraction of what
    simulating takes.
    """
    graph = lower(plan)
    program = Program(
        name=plan.name,
        batches={name: task.batch for name, task in plan.tasks.items()},
        stages=tuple(graph.stages),
        edges=tuple(graph.edges),
        losses=tuple(graph.losses),
        reductions=tuple(graph.reductions),
        instructions=tuple(() for _ in range(plan.devices)),
    )
    found = ProgramCosts(program, costs, plan)
    fixed = {rank: found.static_bytes(rank) for rank in _first_ranks(program)}
    before = order_stages(plan, graph).forwards_before
    return max(
        fixed[ranks[0]] + _held_bytes(stage, d, before[stage.index][d], found)
        for stage in graph.stages
        for d, ranks in enumerate(stage.ranks)
    )


def _first_ranks(program: Program) -> set[int]:
    return {group[0] for stage in program.stages for group in stage.ranks}


def _held_bytes(stage: Stage, d: int, before: list[int], costs: ProgramCosts) -> float:
    """Most bytes of micro-batches between forward and backward; ``before`` as in ``Orders``."""
    if not stage.has_backward:
        return 0.0
    sizes = (stop - start for start, stop in stage.microbatches[d])
    upto = list(accumulate((costs.activation_bytes(stage, n) for n in sizes), initial=0.0))
    return max((upto[count] - upto[m] for m, count in enumerate(before)), default=0.0)
