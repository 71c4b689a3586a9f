"""A module's blocks cut into stages, and its candidates for tp and pp."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mmplan.arrays import Floats, Indices
from mmplan.solvers.problem import Problem

# Seconds this close are the same.
ROUNDING = 1e-9
# With heavy stages early a stage may have this share more for each stage after it. Chosen by hand:
# less than stages differ by a block, more than rounding.
_EARLIER = 1e-3


# Equal modules of several tasks, solvers and degrees need the same cuts.
@lru_cache(maxsize=64)
def cut_everywhere(
    work: tuple[float, ...], most: int, *, heavy_early: bool = False
) -> list[tuple[tuple[int, int], ...]]:
    """Blocks cut into 1, 2, ... ``most`` consecutive stages with the least maximum of work.

    One recurrence for all numbers of stages, O(most * L^2) in numpy. Of cuts with the same maximum
    the last stages have most blocks: the first ones hold more micro-batches.

    Args:
        work: of each block.
        most: stages.
        heavy_early: as few stages as can be have the maximum, and these come first. Under 1F1B the
            slowest stage has as many forwards more before its first backward as there are stages
            after it, in time in which it waits otherwise.
    """
    if heavy_early:
        work = work[::-1]
    count = len(work)
    total = np.concatenate([[0.0], np.cumsum(work)])
    between = total[None, :] - total[:, None]
    between[np.tril_indices(count + 1)] = np.inf
    best = between[0]
    starts: list[Indices] = []
    cuts: list[tuple[tuple[int, int], ...]] = [((0, count),)]
    for stages in range(2, most + 1):
        own = between * (1 - _EARLIER * (stages - 1)) if heavy_early else between
        largest = np.maximum(best[:, None], own)
        best = largest.min(axis=0)
        # The first start that is as good: sums of equal work differ in their last digits.
        starts.append((largest <= best * (1 + ROUNDING)).argmax(axis=0))
        ends = [count]
        for row in reversed(starts):
            ends.append(int(row[ends[-1]]))
        ends = [0, *reversed(ends)]
        if heavy_early:
            ends = [count - end for end in reversed(ends)]
        cuts.append(tuple((ends[i], ends[i + 1]) for i in range(stages)))
    return cuts


def module_cuts(problem: Problem, module: str, most: int) -> list[tuple[tuple[int, int], ...]]:
    """The module's blocks cut into 1, 2, ... ``most`` stages of nearly equal time."""
    return cut_everywhere(tuple(_block_seconds(problem, module).tolist()), most)


def _block_seconds(problem: Problem, module: str) -> Floats:
    """[L] seconds of a sample in every block, at the least tp."""
    costs, one = problem.module_costs(module), np.ones(1, dtype=np.int64)
    tp = min(problem.costs.tp_options(task=problem.task.name, module=module))
    forward, backward = costs.seconds(tp, one)
    return (costs.blocks.shares @ (forward + backward))[:, 0]


def module_stages(
    problem: Problem, module: str, pp: int, *, heavy_early: bool = False
) -> tuple[tuple[int, int], ...]:
    """The module's blocks cut into ``pp`` stages of nearly equal forward plus backward."""
    work = tuple(_block_seconds(problem, module).tolist())
    return cut_everywhere(work, problem.blocks(module), heavy_early=heavy_early)[pp - 1]


def degree_candidates(problem: Problem, module: str) -> list[tuple[int, int]]:
    """(tp, pp) that pins, profile, node size and number of devices allow.

    The partitioner's order of preference: one device; then TP, the smallest first; then PP, with
    the largest TP.
    """
    pins = problem.request.workload.modules[module].plan
    tps = allowed_tensor_degrees(problem, module)
    most = problem.blocks(module)
    pairs = [
        (tp, pp)
        for tp in tps
        for pp in range(1, min(most, problem.devices // tp) + 1)
        if pins.allows("pp", pp)
    ]
    return sorted(pairs, key=lambda pair: (pair[1], pair[0] if pair[1] == 1 else -pair[0]))


def allowed_tensor_degrees(problem: Problem, module: str) -> list[int]:
    """The degrees of :func:`tensor_degrees` that the module's pins allow."""
    pins = problem.request.workload.modules[module].plan
    return [tp for tp in tensor_degrees(problem, module) if pins.allows("tp", tp)]


def backbone_of(problem: Problem) -> str:
    """The module marked as backbone, or that with the most seconds per sample at its least tp."""
    specs, task = problem.request.workload.modules, problem.task

    def seconds(module: str) -> float:
        return float(_block_seconds(problem, module).sum())

    named = [module for module in task.modules if specs[module].backbone]
    return named[0] if named else max(task.modules, key=seconds)


def tensor_degrees(problem: Problem, module: str) -> list[int]:
    """Profiled degrees whose groups tile a node, or are whole nodes where the cluster lets them."""
    cluster, devices = problem.request.cluster, problem.devices
    node = cluster.devices_per_node

    def has_place(tp: int) -> bool:
        return tp <= devices <= node or node % tp == 0 or cluster.spans_nodes(tp)

    options = problem.costs.tp_options(task=problem.task.name, module=module)
    return [tp for tp in options if tp <= devices and has_place(tp)]
