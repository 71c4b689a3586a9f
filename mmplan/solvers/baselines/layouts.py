"""Pipelines that every module of a task runs through: what one grid may look like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmplan.solvers.baselines.one_grid import Layout, ModuleGrid
from mmplan.solvers.partitioner import module_cuts, tensor_degrees
from mmplan.solvers.problem import Blocks, Problem
from mmplan.solvers.sample_split import smallest_divisors

# Numbers of pipeline positions up to this are all tried.
ALL_DEPTHS = 16


def colocated_layouts(problem: Problem) -> Iterator[Layout]:
    """Every tp and number of positions; with a loss over sync batches one position only."""
    modules, specs = problem.task.modules, problem.request.workload.modules
    degrees = set.intersection(*(set(tensor_degrees(problem, m)) for m in modules))
    whole = problem.task.sync_batches or any(specs[m].share for m in modules)
    cuts = {m: module_cuts(problem, m, 1 if whole else problem.blocks(m)) for m in modules}
    for positions in [1] if whole else depths(problem, modules):
        places = {m: _place(problem, m, cuts[m], positions) for m in modules}
        for tp in sorted(degrees):
            yield Layout(tp=tp, positions=positions, places=places)


def _place(
    problem: Problem, module: str, cuts: Sequence[tuple[Blocks, ...]], positions: int
) -> ModuleGrid:
    """A stage on every position; with fewer blocks, on the first or, after others, the last."""
    stages = min(positions, len(cuts))
    first = positions - stages if problem.producers(module) else 0
    return ModuleGrid(first=first, cuts=cuts[stages - 1])


def depths(problem: Problem, modules: Sequence[str]) -> list[int]:
    """Numbers of stages: all small ones, of larger ones those that make a largest stage smaller."""
    found = set(range(1, ALL_DEPTHS + 1))
    for module in modules:
        found |= {int(n) for n in smallest_divisors(problem.blocks(module))}
        pinned = problem.request.workload.modules[module].plan.pp
        if pinned is not None:
            found |= {pinned} if isinstance(pinned, int) else set(pinned)
    most = max(problem.blocks(module) for module in modules)
    return sorted(n for n in found if n <= most)
