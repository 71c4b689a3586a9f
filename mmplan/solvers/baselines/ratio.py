"""Devices in proportion to FLOPs, as a baseline: each module then has its best degrees on them.

The shares come first and know no degrees: a module gets N F_m / F devices, rounded by
largest remainder, at least one. Inside its share a module chooses as under ``convex`` where
that applies (losses per sample), else as under ``distmm``; what it cannot use stays idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.solvers.convex.backbone_groups import Pipelines
from mmplan.solvers.convex.branch_and_bound import FormulaPlan, best_plans
from mmplan.solvers.convex.solver import candidates_of
from mmplan.solvers.distmm.solver import METHODS, best_candidates, check_feasible, make_options
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.wording import counted


def solve_ratio(request: Request) -> Solution:
    """The ``top`` best plans of the formula on shares in proportion to FLOPs.

    Raises:
        InvalidInputError: several tasks (:class:`NotApplicableError`), or a method.
        InfeasibleError: fewer devices than modules, or a module that does not fit its share.
    """
    request.check_exact("ratio")
    problem = Problem(request=request, task=request.only_task("ratio"))
    weights, measure = module_weights(problem)
    if len(weights) > request.devices:
        raise InfeasibleError(
            f"ratio gives each of {len(weights)} modules devices of its own, there are "
            f"{request.devices}: {len(weights) - request.devices} missing",
            hint="use --solver megatron, which shares them",
        )
    shares = dict(zip(weights, proportional(list(weights.values()), request.devices), strict=True))
    disjoint = not any(request.workload.modules[m].share for m in weights)
    pipeline = disjoint and not problem.task.sync_batches
    candidates, bound_s = (_pipelines if pipeline else _apart)(problem, shares)
    return Solution(
        solver="ratio",
        method="exact",
        candidates=tuple(candidates),
        formula_bound_s=bound_s,
        closed_form=pipeline or problem.closed_form(),
        notes=(f"devices in proportion to {measure}: {_listed(shares)}",),
        idle_because="their modules cannot use all of their shares",
    )


def module_weights(problem: Problem) -> tuple[dict[str, float], str]:
    """Every module's FLOPs of a sample, gradients included, and what was counted.

    Where the profile has no FLOPs of some module: the parameters of all.
    """
    costs, task = problem.costs, problem.task
    flops = {m: _flops(problem, m) for m in task.modules}
    if all(flops.values()):
        return flops, "FLOPs"
    return {m: costs.parameters(task=task.name, module=m) for m in task.modules}, "parameters"


def _flops(problem: Problem, module: str) -> float:
    """A forward, and as much again for each of the gradients, where they are computed."""
    facts = problem.stage(module, (0, problem.blocks(module)))
    ranges = [(0, problem.blocks(module)), *facts.trainable]
    ranges += [facts.passed] if facts.passed else []
    task, costs = problem.task.name, problem.costs
    share = sum(costs.work_share(task=task, module=module, blocks=r) for r in ranges)
    return share * costs.flops_per_sample(task=task, module=module)


def proportional(weights: Sequence[float], total: int) -> list[int]:
    """``total`` in whole parts, at least one each, nearest to the weights.

    Parts below one are raised to it and the rest is divided again, by largest remainder;
    ties go to the first. Weights that are all 0 are equal.
    """
    weights = weights if sum(weights) else [1.0] * len(weights)
    small: set[int] = set()
    while True:
        rest = total - len(small)
        weight = sum(w for i, w in enumerate(weights) if i not in small)
        quota = [
            1.0 if i in small or not weight else rest * w / weight for i, w in enumerate(weights)
        ]
        below = {i for i, q in enumerate(quota) if q < 1}
        if not below:
            break
        small |= below
    parts = [int(q) for q in quota]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - quota[i], i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _apart(problem: Problem, shares: Mapping[str, int]) -> tuple[list[Candidate], float]:
    """The optimum of distmm's formula with every module inside its share."""
    modules = make_options(problem, METHODS["exact"])
    check_feasible(problem, modules)
    for name, own in modules.items():
        fewest = min(option.devices for option in own.options)
        own.options = [option for option in own.options if option.devices <= shares[name]]
        if not own.options:
            raise InfeasibleError(
                f"module {name} gets {shares[name]} of {counted(problem.devices, 'device')} by "
                f"its share ({_listed(shares)}), it needs {fewest}: {fewest - shares[name]} "
                "missing",
                hint="use more devices, or --solver distmm, which chooses the shares",
            )
    return best_candidates(problem, modules)


def _pipelines(problem: Problem, shares: Mapping[str, int]) -> tuple[list[Candidate], float]:
    """The optimum of convex's formula with every module inside its share."""
    top = problem.request.top
    # As under convex: what interleaved chunks wait for is for the simulation to say.
    pinned = any(problem.request.workload.modules[module].plan.vpp for module in shares)
    candidates, bound_s = _pipelines_of(problem, shares, top, interleaved=top > 1 or pinned)
    if not candidates:
        raise _shares_too_small(problem, shares)
    if any(unit.vpp > 1 for c in candidates for unit in c.units):
        plain, _ = _pipelines_of(problem, shares, top // 2, interleaved=False)
        seen = {c.units for c in candidates}
        candidates += [c for c in plain if c.units not in seen]
    return candidates, bound_s


def _pipelines_of(
    problem: Problem, shares: Mapping[str, int], top: int, *, interleaved: bool
) -> tuple[list[Candidate], float]:
    """The ``top`` best plans that can be placed, and a bound; nothing where there is none."""
    pipelines = Pipelines(problem, interleaved=interleaved, shares=shares)
    found = _best(pipelines, 2 * top)
    candidates = list(islice(candidates_of(pipelines, found), top))
    if not candidates:
        return [], np.inf
    return candidates, min(found[0].value_s, candidates[0].objective_s)


def _best(pipelines: Pipelines, top: int) -> list[FormulaPlan]:
    devices = pipelines.problem.devices
    return best_plans(pipelines.groups(), pipelines.edges, devices=devices, top=top)


def _shares_too_small(problem: Problem, shares: Mapping[str, int]) -> InfeasibleError:
    """What the optimum with free shares takes, if there is any plan at all."""
    pipelines = Pipelines(problem)
    free = list(candidates_of(pipelines, _best(pipelines, 1)))
    if not free:
        return InfeasibleError(
            f"no plan fits {counted(problem.devices, 'device')}, whatever the shares "
            f"({_listed(shares)})",
            hint="--solver convex says how many devices or bytes are missing",
        )
    taken = {unit.module: len(unit.all_ranks) for unit in free[0].units}
    return InfeasibleError(
        f"the shares of {counted(problem.devices, 'device')} ({_listed(shares)}) hold no plan; a "
        f"plan of free shares takes {_listed(taken)}",
        hint="use more devices, or --solver convex, which chooses the shares",
    )


def _listed(shares: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in shares.items())
