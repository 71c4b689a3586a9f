"""What a plan holds at least, without simulating it: enough to see that one does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mmplan.costs import CostModel, ProgramCosts
from mmplan.excerpt import Outline, outline
from mmplan.program.model import Program, SampleRange, Stage
from mmplan.schema.plan import Plan


def least_memory_bytes(plan: Plan, costs: CostModel, drawn: Outline | None = None) -> float:
    """Bytes that some device holds at least: its fixed ones, and the most of one of its stages.

    Exact where devices run one stage each and backwards are whole. Takes a fraction of what
    simulating takes; an outline that is there already is used.
    """
    drawn = outline(plan) if drawn is None else drawn
    graph = drawn.graph
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
    kept = drawn.enough.stages
    fixed = {rank: found.static_bytes(rank) for rank in _first_ranks(kept)}
    before = drawn.orders.forwards_before
    return max(
        fixed[ranks[0]]
        + _held_bytes(graph.stages[stage.index], spans, before[stage.index][d], found)
        for stage in kept
        for d, (ranks, spans) in enumerate(zip(stage.ranks, stage.microbatches, strict=True))
    )


def _first_ranks(stages: Sequence[Stage]) -> set[int]:
    return {group[0] for stage in stages for group in stage.ranks}


def _held_bytes(
    stage: Stage, spans: Sequence[SampleRange], before: Sequence[int], costs: ProgramCosts
) -> float:
    """Most bytes of micro-batches between forward and backward; ``before`` as in ``Orders``."""
    if not stage.has_backward:
        return 0.0
    sizes = (stop - start for start, stop in spans)
    upto = list(accumulate((costs.activation_bytes(stage, n) for n in sizes), initial=0.0))
    return max((upto[count] - upto[m] for m, count in enumerate(before)), default=0.0)
