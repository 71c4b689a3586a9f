"""The largest sync batch that a plan's degrees and micro-batches can hold."""

from __future__ import annotations

from collections.abc import Sequence

from mmplan.schema.plan import Unit
from mmplan.solvers.distmm.stage_costs import Stages
from mmplan.solvers.problem import Problem, Request

# Far beyond any device: a unit that still fits is not limited by memory.
UNLIMITED = 2**40


def largest_of_all_tasks(request: Request, units: Sequence[Unit]) -> dict[str, int]:
    """:func:`largest_sync_batches` of the tasks of a plan with these units."""
    sizes: dict[str, int] = {}
    for task in request.tasks.values():
        own = [unit for unit in units if unit.task == task.name]
        sizes |= largest_sync_batches(Problem(request=request, task=task), own)
    return sizes


def largest_sync_batches(problem: Problem, units: Sequence[Unit]) -> dict[str, int]:
    """Samples of the largest sync batch that still fits, by cross-sample loss.

    A replica holds K micro-batches of the sync batch and those that later stages need. Each
    stage gives the most K that fits beside the other units of its ranks; K micro-batches
    times the replicas, least over the modules, is the answer. A loss whose modules hold no
    activations is not limited, and is left out.
    """
    spare = _spare_bytes(problem, units)
    sizes: dict[str, int] = {}
    for loss in problem.task.sync_batches:
        modules = problem.synced_modules(loss)
        limits = [_limit(problem, u, spare[u.name]) for u in units if u.module in modules]
        if min(limits) < UNLIMITED:
            sizes[loss] = min(limits)
    return sizes


def _limit(problem: Problem, unit: Unit, spare: Sequence[float]) -> int:
    """Samples that all replicas of a unit can hold for one sync; see above."""
    stages = Stages(problem, unit.module, unit.tp, unit.pp)
    size = max(unit.microbatches[0])
    held = stages.held(size)

    def fits(count: int) -> bool:
        flights = stages.in_flight(unit.schedule.kind, count, unit.schedule.lead)
        return all(h * n <= s for h, n, s in zip(held, flights, spare, strict=True))

    low, high = 0, 1
    while high * size * unit.dp < UNLIMITED and fits(high):
        low, high = high, 2 * high
    if high * size * unit.dp >= UNLIMITED:
        return UNLIMITED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * size * unit.dp


def _spare_bytes(problem: Problem, units: Sequence[Unit]) -> dict[str, list[float]]:
    """Bytes for activations on each stage of each unit.

    Units on common devices share what their parameters leave, in proportion to what their
    activations take now.
    """
    fixed: dict[str, list[float]] = {}
    active: dict[str, list[float]] = {}
    for unit in units:
        stages = Stages(problem, unit.module, unit.tp, unit.pp)
        count, size = len(unit.microbatches[0]), max(unit.microbatches[0])
        flights = stages.in_flight("gpipe", count)
        fixed[unit.name] = list(stages.fixed(unit.dp))
        active[unit.name] = [h * n for h, n in zip(stages.held(size), flights, strict=True)]
    spare: dict[str, list[float]] = {}
    for unit in units:
        beside = [u for u in units if set(u.all_ranks) & set(unit.all_ranks)]
        spare[unit.name] = []
        for p in range(unit.pp):
            # Units that share devices have one stage each; others have only themselves.
            index = {u.name: p if u is unit else 0 for u in beside}
            left = problem.memory_bytes - sum(fixed[u.name][index[u.name]] for u in beside)
            total = sum(active[u.name][index[u.name]] for u in beside)
            own = active[unit.name][p]
            spare[unit.name].append(left * own / total if total else left)
    return spare
