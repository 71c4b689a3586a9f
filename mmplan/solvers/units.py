"""From a chosen option and its ranks to a unit of the plan."""

from __future__ import annotations

from mmplan.schema.plan import Schedule, Unit
from mmplan.solvers.placement import Grid
from mmplan.solvers.problem import Blocks, Problem
from mmplan.solvers.shares import cut, split_evenly


def make_unit(
    problem: Problem,
    module: str,
    *,
    ranks: Grid,
    blocks: tuple[Blocks, ...],
    size: int,
    pinned: bool,
    schedule: Schedule,
) -> Unit:
    """A module's unit: shares differ by at most one sample, micro-batches hold ``size``."""
    shares = split_evenly(problem.round_samples, len(ranks))
    return Unit(
        name=module,
        task=problem.task.name,
        module=module,
        tp=len(ranks[0][0]),
        pp=len(ranks[0]),
        dp=len(ranks),
        ranks=ranks,
        blocks=blocks,
        samples=tuple(share * problem.rounds for share in shares),
        microbatches=tuple(_microbatches(share, shares[0], size, pinned) for share in shares),
        schedule=schedule,
    )


def _microbatches(share: int, largest_share: int, size: int, pinned: bool) -> tuple[int, ...]:
    """As many micro-batches as the largest share has, so that replicas keep step."""
    if pinned:
        return cut(share, size, pinned=True)
    return split_evenly(share, min(share, -(-largest_share // size)))


def last_stage_ranks(unit: Unit) -> tuple[int, ...]:
    """Ranks that hold a unit's output."""
    return tuple(sorted(rank for replica in unit.ranks for rank in replica[-1]))
