"""One grid for a whole multimodal model, as baselines: Megatron's plans and DeepSpeed's.

``megatron`` cuts every module into the same number of stages; position p of the pipeline
runs stage p of each. Where a loss takes a whole sync batch there is no PP, which would
leave fewer ranks to share that batch.

``megatron-rigid`` gives the backbone the pipeline and every other module one more position
before or after it, with the backbone's TP and DP: the ranks of a TP group split the module,
or each holds all of it and they share out the samples, whichever is faster. Where modules are many,
all of them are held alike: there would be too many ways.

``deepspeed`` runs all modules on every device, with the workload's stage of ZeRO or the first one
above it that fits, at least 1; several tasks run one after another. What there is to choose are the
micro-batches, whose gradients are accumulated. A batch that N does not divide leaves some devices
one sample more, or devices over where the others have as many samples each: from stage 2 of ZeRO on
that may need less memory. A round of fewer samples than devices leaves devices over too.

Source: Megatron-LM, arXiv:2104.04473; the rigid form is the baseline of MMScale; ZeRO,
arXiv:1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Literal, cast

from mmplan.errors import InfeasibleError
from mmplan.schema.base import ZeroStage
from mmplan.solvers.baselines.one_grid import (
    Layout,
    ModuleGrid,
    OneGrid,
    allowed,
    best_grids,
    colocated_layouts,
    depths,
)
from mmplan.solvers.baselines.sequential_tasks import InTurn
from mmplan.solvers.partitioner import backbone_of, module_cuts, tensor_degrees
from mmplan.solvers.problem import Blocks, NotApplicableError, Problem, Request, Solution
from mmplan.solvers.sample_split import fewest_replicas


def solve_megatron(request: Request) -> Solution:
    """The best TP x DP x PP with all modules on all positions; exact by its formula.

    Several tasks run one after another on one TP x DP x PP of all of them.

    Raises:
        InvalidInputError: a method.
        InfeasibleError: pins, devices or memory leave no grid; names what is missing.
    """
    request.check_exact("megatron")
    if len(request.tasks) > 1:
        return InTurn(request, "megatron", colocated_layouts).solution(on_one_grid=True)
    problem = Problem(request=request, task=request.only_task("megatron"))
    return _solve(problem, "megatron", colocated_layouts(problem))


def solve_megatron_rigid(request: Request) -> Solution:
    """The best pipeline with the backbone's TP and DP for all modules; exact by its formula.

    Of many modules it is the best of those pipelines that hold all but the backbone alike.

    Raises:
        InvalidInputError: a method, or (:class:`NotApplicableError`) several tasks, a
            cross-sample loss, shared parameters or no chain of modules.
        InfeasibleError: pins, devices or memory leave no grid; names what is missing.
    """
    request.check_exact("megatron-rigid")
    problem = Problem(request=request, task=request.only_task("megatron-rigid"))
    _check_chain(problem)
    return _solve(problem, "megatron-rigid", _rigid_layouts(problem))


def _check_chain(problem: Problem) -> None:
    if problem.task.sync_batches or not problem.chained():
        raise NotApplicableError(
            "megatron-rigid puts modules before and after a backbone that takes or gives their "
            f"outputs; {', '.join(problem.task.modules)} are no such chain",
            hint="use --solver megatron",
        )
    shared = [m for m in problem.task.modules if problem.request.workload.modules[m].share]
    if shared:
        raise NotApplicableError(
            "megatron-rigid gives every module positions of its own; "
            f"{', '.join(shared)} uses the parameters of another one",
            hint="use --solver megatron",
        )


def _solve(problem: Problem, solver: str, layouts: Iterable[Layout]) -> Solution:
    fitting = [layout for layout in layouts if allowed(problem, layout)]
    if not fitting:
        raise InfeasibleError(
            f"{solver} has one tp for {', '.join(problem.task.modules)}: none is in the profile "
            "and in the plan of all, with stages that their plans allow",
            hint="loosen tp and pp in the modules' plan, or profile them at a common tp",
        )
    found = best_grids(problem, solver, fitting)
    return Solution(
        solver=solver,
        method="exact",
        candidates=tuple(candidate for candidate, _ in found),
        formula_bound_s=found[0][0].objective_s,
        # Stages that share devices take turns in an order that the formula does not know.
        closed_form=problem.closed_form() and all(g.layout.positions == 1 for _, g in found),
    )


_WayToHold = Literal["cut", "replicated", "items"]
_WAYS_TO_HOLD: tuple[_WayToHold, ...] = ("cut", "replicated", "items")
# Ways to hold all modules beside the backbone: up to so many each combination is tried. Three
# modules have 27, five without items 32.
_MOST_COMBINATIONS = 64


def _rigid_layouts(problem: Problem) -> Iterator[Layout]:
    modules, backbone = problem.task.modules, backbone_of(problem)
    cuts = module_cuts(problem, backbone, problem.blocks(backbone))
    others = [m for m in modules if m != backbone]
    for tp in tensor_degrees(problem, backbone):
        choices = _together([_ways_to_hold(problem, module, tp) for module in others])
        for depth, chosen in product(depths(problem, [backbone]), choices):
            held = dict(zip(others, chosen, strict=True))
            yield _rigid(problem, backbone, cuts[depth - 1], tp, held)


def _rigid(
    problem: Problem, backbone: str, cuts: tuple[Blocks, ...], tp: int, held: dict[str, _WayToHold]
) -> Layout:
    places: dict[str, ModuleGrid] = {}
    position = 0
    for module in problem.task.modules:
        own = cuts if module == backbone else ((0, problem.blocks(module)),)
        how = held.get(module, "cut")
        places[module] = ModuleGrid(
            first=position,
            cuts=own,
            replicated=how != "cut",
            items=tp if how == "items" else 0,
        )
        position += len(own)
    return Layout(tp=tp, positions=position, places=places)


def _together(ways: Sequence[Sequence[_WayToHold]]) -> list[tuple[_WayToHold, ...]]:
    """One way for each module: all combinations, or of many those in which modules are alike."""
    if math.prod(map(len, ways)) <= _MOST_COMBINATIONS:
        return list(product(*ways))
    alike: list[tuple[_WayToHold, ...]] = [
        tuple(how if how in own else own[0] for own in ways) for how in _WAYS_TO_HOLD
    ]
    return list(dict.fromkeys(alike))


def _ways_to_hold(problem: Problem, module: str, tp: int) -> list[_WayToHold]:
    """How a TP group may hold a module.

    It may split it, or hold it whole on each rank, which then have samples of their own or items
    of the same ones.
    """
    known = problem.costs.tp_options(task=problem.task.name, module=module)
    whole = tp > 1 and 1 in known
    items = whole and problem.request.workload.modules[module].items
    possible: dict[_WayToHold, bool] = {"cut": tp in known, "replicated": whole, "items": items}
    return [how for how, fits in possible.items() if fits]


def solve_deepspeed(request: Request) -> Solution:
    """The fastest micro-batches that fit, exact by the formula.

    Raises:
        InvalidInputError: a method.
        InfeasibleError: pins, the profile or memory leave no such plan; names what is missing.
    """
    request.check_exact("deepspeed")
    for zero in range(max(1, request.zero, request.workload.train.zero), 3):
        with suppress(InfeasibleError):
            return _with_zero(request, zero)
    return _with_zero(request, 3)


def _with_zero(request: Request, zero: int) -> Solution:
    """The same with a stage of ZeRO."""
    sharded = replace(request, zero=zero)
    tasks = InTurn(sharded, "deepspeed", _replicated, _most_or_even, is_one_grid=zero > 1)
    solution = tasks.solution()
    stage = cast(ZeroStage, zero)
    return replace(solution, candidates=tuple(replace(c, zero=stage) for c in solution.candidates))


def _most_or_even(grid: OneGrid) -> list[int]:
    """All replicas that there may be, and the fewest that take as long: these may be alike."""
    fewest = fewest_replicas(grid.problem.round_samples, grid.most)
    return list(dict.fromkeys((grid.most, fewest)))


def _replicated(problem: Problem) -> Iterator[Layout]:
    """Every module whole on every device, where the profile knows modules whole."""
    modules = problem.task.modules
    if all(1 in tensor_degrees(problem, module) for module in modules):
        places = {m: ModuleGrid(first=0, cuts=((0, problem.blocks(m)),)) for m in modules}
        yield Layout(tp=1, positions=1, places=places)
