"""The solvers by name, and which of them ``auto`` looks at."""

from __future__ import annotations

from collections.abc import Callable

from mmplan.errors import InfeasibleError, InvalidInputError, MMPlanError
from mmplan.solvers.baselines.colocated import solve_colocated
from mmplan.solvers.baselines.deepspeed import solve_deepspeed
from mmplan.solvers.baselines.distmm_mt import solve_distmm_mt
from mmplan.solvers.baselines.megatron import solve_megatron, solve_megatron_rigid
from mmplan.solvers.baselines.ratio import solve_ratio
from mmplan.solvers.baselines.spindle import solve_spindle_optimus, solve_spindle_seq
from mmplan.solvers.convex.solver import solve_convex
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.mpsp.solver import solve_mpsp
from mmplan.solvers.problem import NotApplicableError, Request, Solution

Solver = Callable[[Request], Solution]
# Hears how many of how many are done, and a word on what comes now.
SearchProgress = Callable[[int, int, str], None]
# Of equals the first is taken: of one task waves are another word for colocation.
SOLVERS: dict[str, Solver] = {
    "distmm": solve_distmm,
    "convex": solve_convex,
    "colocated": solve_colocated,
    "mpsp": solve_mpsp,
}
# What plans are held against. ``auto`` looks at them too, so that no plan of its is worse than
# any of theirs; a tie goes to the others.
BASELINES: dict[str, Solver] = {
    "megatron": solve_megatron,
    "megatron-rigid": solve_megatron_rigid,
    "deepspeed": solve_deepspeed,
    "ratio": solve_ratio,
    "spindle-seq": solve_spindle_seq,
    "spindle-optimus": solve_spindle_optimus,
    "distmm-mt": solve_distmm_mt,
}
# Of one task they plan what another baseline plans: ``auto`` looks at them where there are several.
OF_SEVERAL_TASKS = frozenset({"spindle-seq", "spindle-optimus", "distmm-mt"})


def solutions_of(
    request: Request, name: str, progress: SearchProgress
) -> tuple[list[Solution], list[str]]:
    """Every solution of the solvers that apply, and why ``auto`` left others out.

    Raises:
        InvalidInputError: an unknown name, or a method without a solver's name.
        InfeasibleError: none has a plan.
    """
    if name != "auto":
        known = SOLVERS | BASELINES
        if name not in known:
            raise InvalidInputError(
                f"--solver {name}: this version has auto, {', '.join(known)}",
                hint="choose one of these",
            )
        progress(0, 1, f"searched, now {name}")
        return [known[name](request)], []
    if request.method is not None:
        raise InvalidInputError(
            f"--method {request.method} is a solver's", hint="name the solver with --solver"
        )
    solutions: list[Solution] = []
    refused: dict[str, MMPlanError] = {}
    several = len(request.tasks) > 1
    asked = {
        solver: function
        for solver, function in (SOLVERS | BASELINES).items()
        if several or solver not in OF_SEVERAL_TASKS
    }
    for solver, function in asked.items():
        progress(len(solutions) + len(refused), len(asked), f"searched, now {solver}")
        try:
            solutions.append(function(request))
        except (InfeasibleError, NotApplicableError) as error:
            if solver in SOLVERS:
                refused[solver] = error
    if not solutions:
        reasons = "; ".join(f"{solver}: {error.message}" for solver, error in refused.items())
        short = [error for error in refused.values() if isinstance(error, InfeasibleError)]
        if not short:
            raise InvalidInputError(reasons, hint=next(iter(refused.values())).hint)
        # Those that share devices come last: what they lack is the least that is missing.
        raise InfeasibleError(reasons, hint=short[-1].hint)
    return solutions, [
        f"{solver} does not apply: {error.message}"
        for solver, error in refused.items()
        if isinstance(error, InfeasibleError)
    ]
