"""Where a module's blocks are cut into stages, and which degrees it may have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from mmplan.schema.workload import Pins
from mmplan.solvers.problem import Problem


def cut_blocks(work: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Consecutive non-empty ranges of blocks whose largest sum of work is least, exactly."""
    return _cuts(tuple(work)).into(stages)


class _Cuts:
    """Cuts of one module's blocks, which are asked for with every number of stages.

    ``best[i]`` for s stages is the least largest sum of the first i blocks: O(stages * L^2), and
    the rows of fewer stages serve all later questions.
    """

    def __init__(self, work: Sequence[float]) -> None:
        self._total = [0.0, *accumulate(work)]
        self._best = [*self._total]
        self._cuts: list[list[int]] = []

    def into(self, stages: int) -> tuple[tuple[int, int], ...]:
        """The ranges of so many stages."""
        while len(self._cuts) < stages - 1:
            self._add_row(len(self._cuts) + 2)
        ends = [len(self._total) - 1]
        for where in reversed(self._cuts[: stages - 1]):
            ends.append(where[ends[-1]])
        return tuple(pairwise([0, *reversed(ends)]))

    def _add_row(self, stage: int) -> None:
        total, best = self._total, self._best
        row, where = [float("inf")] * len(total), [0] * len(total)
        for end in range(stage, len(total)):
            for start in range(stage - 1, end):
                if best[start] >= row[end]:
                    break  # it only grows from here on
                largest = max(best[start], total[end] - total[start])
                if largest < row[end]:
                    row[end], where[end] = largest, start
        self._best = row
        self._cuts.append(where)


# Equal modules of several tasks, solvers and degrees ask the same.
_cuts = lru_cache(maxsize=64)(_Cuts)


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
