"""The solvers by name, and the solvers of ``auto``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from mmplan.errors import InfeasibleError, InvalidInputError, MMPlanError
from mmplan.solvers.baselines.colocated import solve_colocated
from mmplan.solvers.baselines.distmm_mt import solve_distmm_mt
from mmplan.solvers.baselines.megatron import solve_deepspeed, solve_megatron, solve_megatron_rigid
from mmplan.solvers.baselines.ratio import solve_ratio
from mmplan.solvers.baselines.spindle import solve_spindle_optimus, solve_spindle_seq
from mmplan.solvers.convex.solver import solve_convex
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.mpsp.solver import solve_mpsp
from mmplan.solvers.problem import NotApplicableError, Request, Solution

Solver = Callable[[Request], Solution]
# Takes the number of solvers done, the number of all, and a word on the next step.
SearchProgress = Callable[[int, int, str], None]
# Of equal plans, the first solver's is taken: with one task, waves are often colocation. They may
# be better where modules differ, so that ``mpsp`` is asked for one task too.
SOLVERS: dict[str, Solver] = {
    "distmm": solve_distmm,
    "convex": solve_convex,
    "colocated": solve_colocated,
    "mpsp": solve_mpsp,
}
# ``auto`` runs the baselines too, so that its plan is never worse than any of theirs. A tie goes
# to the solvers above.
BASELINES: dict[str, Solver] = {
    "megatron": solve_megatron,
    "megatron-rigid": solve_megatron_rigid,
    "deepspeed": solve_deepspeed,
    "ratio": solve_ratio,
    "spindle-seq": solve_spindle_seq,
    "spindle-optimus": solve_spindle_optimus,
    "distmm-mt": solve_distmm_mt,
}
# Solvers that give the whole model the same degrees: what people run who have no planner.
UNIFORM = ("megatron", "megatron-rigid", "deepspeed", "colocated")
# With one task, each of these makes the plan of another entry; ``auto`` runs them for several.
OF_SEVERAL_TASKS = frozenset({"spindle-seq", "spindle-optimus", "distmm-mt"})


def solutions_of(
    request: Request, name: str, progress: SearchProgress
) -> tuple[list[Solution], list[str]]:
    """The solutions of all applicable solvers, and the reasons for which ``auto`` left some out.

    Raises:
        InvalidInputError: an unknown name, or a method without a solver's name.
        InfeasibleError: no solver has a plan.
    """
    if name != "auto":
        known = SOLVERS | BASELINES
        if name not in known:
            raise unknown_solver("--solver", name, ("auto", *known))
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
            solved = {solution.solver: solution for solution in solutions}
            solutions.append(function(replace(request, solved=solved)))
        except (InfeasibleError, NotApplicableError) as error:
            if solver in SOLVERS:
                refused[solver] = error
    if not solutions:
        raise no_plan(refused)
    return solutions, [
        f"{solver} does not apply: {error.message}"
        for solver, error in refused.items()
        if isinstance(error, InfeasibleError)
    ]


# Systems that people ask for by another name than the solver's that plans like them.
_KNOWN_AS = {
    "ddp": "--solver megatron, which is data parallelism with the pins plan: {tp: 1, pp: 1}; with "
    "ZeRO it is deepspeed",
    "fsdp": "--solver deepspeed, data parallelism with ZeRO; FSDP is its stage 3, and "
    "docs/baselines.md says which stages there are",
}


def unknown_solver(option: str, name: str, known: Sequence[str]) -> InvalidInputError:
    """The error for a name that is no solver's, with what is meant perhaps."""
    similar = get_close_matches(name.lower(), known, n=1)
    meant = _KNOWN_AS.get(name.lower()) or (f"did you mean {similar[0]}?" if similar else None)
    return InvalidInputError(
        f"{option} {name}: this version has {', '.join(known)}",
        hint=meant or "choose one of these",
    )


def no_plan(refused: Mapping[str, MMPlanError]) -> MMPlanError:
    """The error where every solver refused: infeasible where that is one solver's reason."""
    by_message: defaultdict[str, list[str]] = defaultdict(list)
    short: dict[str, InfeasibleError] = {}
    for solver, error in refused.items():
        first, _, rest = error.message.partition(" ")
        reason = rest if first in refused else error.message
        by_message[reason].append(solver)
        if isinstance(error, InfeasibleError):
            short.setdefault(reason, error)
    # A reason of all solvers needs none of their names.
    same = len({error.message for error in refused.values()}) == 1
    message = "; ".join(
        next(iter(refused.values())).message if same else f"{', '.join(solvers)}: {message}"
        for message, solvers in by_message.items()
    )
    if not short:
        return InvalidInputError(message, hint=next(iter(refused.values())).hint)
    # Solvers that share devices come last: their shortfall is the smallest.
    return InfeasibleError(message, hint=list(short.values())[-1].hint)
