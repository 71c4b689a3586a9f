"""Where a module's blocks are cut into stages, and which degrees it may have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from mmplan.schema.workload import Pins
from mmplan.solvers.problem import Problem


def cut_blocks(work: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Consecutive non-empty ranges of blocks whose largest sum of work is least, exactly.

    ``best[i]`` for s stages is the least largest sum of the first i blocks: O(stages * L^2).
    """
    total = [0.0, *accumulate(work)]
    count = len(work)
    best = [*total]
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        row, where = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                largest = max(best[start], total[end] - total[start])
                if largest < row[end]:
                    row[end], where[end] = largest, start
        best = row
        cuts.append(where)
    ends = [count]
    for where in reversed(cuts):
        ends.append(where[ends[-1]])
    return tuple(pairwise([0, *reversed(ends)]))


def module_stages(problem: Problem, module: str, pp: int) -> tuple[tuple[int, int], ...]:
    """The module's blocks cut into ``pp`` stages of nearly equal forward plus backward."""
    tp = min(problem.costs.tp_options(task=problem.task.name, module=module))
    blocks = problem.blocks(module)
    work = [sum(problem.stage_s(module, (b, b + 1), tp, 1)) for b in range(blocks)]
    return cut_blocks(work, pp)


def degree_candidates(problem: Problem, module: str) -> list[tuple[int, int]]:
    """(tp, pp) that pins, profile, node size and number of devices allow.

    In the order in which the partitioner prefers them: one device; then TP inside a node,
    the smallest first; then PP, over nodes with the largest TP.
    """
    pins = problem.request.workload.modules[module].plan
    tps = _tensor_degrees(problem, module, pins)
    most = problem.blocks(module)
    pairs = [
        (tp, pp)
        for tp in tps
        for pp in range(1, min(most, problem.devices // tp) + 1)
        if pins.allows("pp", pp)
    ]
    return sorted(pairs, key=lambda pair: (pair[1], pair[0] if pair[1] == 1 else -pair[0]))


def _tensor_degrees(problem: Problem, module: str, pins: Pins) -> list[int]:
    """TP never crosses nodes, and groups of one size tile a node."""
    cluster = problem.request.cluster
    per_node = min(cluster.devices_per_node, problem.devices)
    return [
        tp
        for tp in problem.costs.tp_options(task=problem.task.name, module=module)
        if tp <= per_node
        and pins.allows("tp", tp)
        and (problem.devices <= cluster.devices_per_node or per_node % tp == 0)
    ]
