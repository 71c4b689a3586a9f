"""The largest sync batches that a plan has memory for: more negatives for a contrastive loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from mmplan.schema.plan import Unit
from mmplan.solvers.distmm.module_options import Stages
from mmplan.solvers.problem import Problem, Request

# Far beyond any device: a unit that still fits is not limited by memory.
_UNLIMITED = 2**40


def largest_sync_batches(request: Request, units: Sequence[Unit]) -> dict[str, int]:
    """Samples of the largest sync batch of each cross-sample loss that a plan has memory for.

    A replica holds K micro-batches of the sync batch and those that later stages need. Each
    stage gives the most K that fits beside the other units of its ranks; K micro-batches
    times the replicas, least over the modules, is the answer. A loss whose modules hold no
    activations is not limited, and is left out.

    Args:
        request: that the plan answers.
        units: of the plan.
    """
    sizes: dict[str, int] = {}
    for task in request.tasks.values():
        own = [unit for unit in units if unit.task == task.name]
        sizes |= _of_task(Problem(request=request, task=task), own)
    return sizes


def _of_task(problem: Problem, units: Sequence[Unit]) -> dict[str, int]:
    spare = _spare_bytes(problem, units)
    sizes: dict[str, int] = {}
    for loss in problem.task.sync_batches:
        modules = problem.synced_modules(loss)
        limits = [_limit(problem, u, spare[u.name]) for u in units if u.module in modules]
        if min(limits) < _UNLIMITED:
            sizes[loss] = min(limits)
    return sizes


def _limit(problem: Problem, unit: Unit, spare: Sequence[float]) -> int:
    """Samples that all replicas of a unit can hold for one sync; see above."""
    stages, size = Stages(problem, unit.module, unit.pp), max(unit.microbatches[0])

    def is_too_large(count: int) -> bool:
        order = unit.schedule.kind, unit.schedule.lead
        own = np.array([size * unit.shards / unit.tp])
        active = stages.active_bytes(unit.shards, own, np.array([count]), *order)
        return bool((active[:, 0] > spare).any())

    most = -(-_UNLIMITED // (size * unit.dp))
    count = bisect_left(range(1, most), True, key=is_too_large)
    return _UNLIMITED if count == most - 1 else count * size * unit.dp


def _spare_bytes(problem: Problem, units: Sequence[Unit]) -> dict[str, list[float]]:
    """Bytes for activations on each stage of each unit.

    Units on common devices share what their parameters leave, in proportion to what their
    activations take now.
    """
    fixed: dict[str, list[float]] = {}
    active: dict[str, list[float]] = {}
    for unit in units:
        stages = Stages(problem, unit.module, unit.pp)
        count, tp = np.array([len(unit.microbatches[0])]), unit.shards
        # Where ranks share out items each has so many copies of the parameters.
        dp, size = unit.dp * unit.tp // tp, np.array([max(unit.microbatches[0]) * tp / unit.tp])
        fixed[unit.name] = stages.bytes.fixed_bytes(tp, np.array([dp]))[:, 0].tolist()
        active[unit.name] = stages.active_bytes(tp, size, count, "gpipe")[:, 0].tolist()
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
