"""DeepSpeed's plans, as a baseline: data parallelism with ZeRO over all devices.

Every device holds all modules whole, its optimizer state is cut by ZeRO-1, which is what the
runtime has, and several tasks run one after another. What there is to choose are the micro-batches,
whose gradients are accumulated. A batch that N does not divide leaves some devices one sample
more; a round of fewer samples than devices leaves devices over.

Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from mmplan.costs.program_costs import CostModel
from mmplan.solvers.baselines.grid_search import check_exact
from mmplan.solvers.baselines.one_grid import Layout, ModuleGrid
from mmplan.solvers.baselines.sequential_tasks import InTurn
from mmplan.solvers.partitioner import tensor_degrees
from mmplan.solvers.problem import Problem, Request, Solution

# Of the runtime's stages the one that holds least; it moves as many bytes as none.
_ZERO: Literal[1] = 1


def solve_deepspeed(request: Request) -> Solution:
    """The fastest micro-batches that fit, exact by the formula.

    Raises:
        InvalidInputError: a method.
        InfeasibleError: pins, the profile or memory leave no such plan; names what is missing.
    """
    check_exact(request, "deepspeed")
    training = request.costs.training.model_copy(update={"zero": _ZERO})
    costs = CostModel(request.costs.profile, request.cluster, training)
    sharded = replace(request, costs=costs)
    solution = InTurn(sharded, "deepspeed", _replicated, lambda grid: [grid.most]).on_own_grids()
    candidates = tuple(replace(c, zero=_ZERO) for c in solution.candidates)
    return replace(solution, candidates=candidates)


def _replicated(problem: Problem) -> Iterator[Layout]:
    """Every module whole on every device, where the profile knows modules whole."""
    modules = problem.task.modules
    if all(1 in tensor_degrees(problem, module) for module in modules):
        places = {m: ModuleGrid(first=0, cuts=((0, problem.blocks(m)),)) for m in modules}
        yield Layout(tp=1, positions=1, places=places)
