"""Tasks one after another, each planned by ``distmm`` on all devices, as a baseline.

The formula is the sum of the tasks' own, each with its own reductions. Tasks share modules and
devices, so a device may hold modules of several: what a task leaves of the memory is less the
more the others hold, and where the best plans do not fit together they are searched for again
with less memory for each task.

Source: DistMM, NSDI 2024, for each task; Spindle, arXiv:2409.03365, where it is a baseline.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from mmplan.arrays import Floats
from mmplan.errors import InfeasibleError
from mmplan.schema.plan import Unit
from mmplan.solvers.baselines.sequential_tasks import (
    Combination,
    CombinationSearch,
    Ledger,
    TaskOption,
    by_owner,
    named,
)
from mmplan.solvers.communicators import PlacedModule, communicators
from mmplan.solvers.distmm.module_options import Stages
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.wording import missing, size

# Shares of the memory that a task may be planned for, tried in turn; then finer ones of less.
_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
# Share of the budget for the search of a task at least.
_TASK = 0.3
# Plans of each task among which a combination is chosen.
_EACH = 8


def solve_distmm_mt(request: Request) -> Solution:
    """The best combination of the tasks' plans that fits the memory; of one task ``distmm``'s.

    Raises:
        InvalidInputError: a method, or a pinned vpp (:class:`NotApplicableError`).
        InfeasibleError: a task has no plan, or the tasks' plans do not fit together.
    """
    request.check_exact("distmm-mt")
    if len(request.tasks) == 1:
        return replace(solve_distmm(request), solver="distmm-mt")
    planning = _TaskPlans(request)
    least_bytes = np.inf
    for share in _SHARES:
        found = planning.combined(share)
        if isinstance(found, Combination):
            return planning.solution(found)
        least_bytes = min(least_bytes, found)
    raise InfeasibleError(
        f"distmm-mt: the plans of {', '.join(request.tasks)} hold {size(least_bytes)} on a device "
        f"together, {missing(least_bytes, request.cluster.device.memory_bytes)}",
        hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
    )


class _TaskPlans:
    """The tasks, what each was planned as, and the bound of the sum of their formulas."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._ledger = Ledger(self._problems)
        self._bound_s: float | None = None
        self._options: list[list[TaskOption]] = [[] for _ in request.tasks]

    def combined(self, share: float) -> Combination | float:
        """The best combination with plans for that share of the memory; else the bytes needed.

        Raises:
            InfeasibleError: the first share is all of it, and a task has no plan.
        """
        device = self._request.cluster.device
        solutions = [self._planned(name, share) for name in self._request.tasks]
        if self._bound_s is None:
            self._bound_s = sum(s.formula_bound_s for s in solutions if s is not None)
        for own, problem, solution in zip(
            self._options, self._problems.values(), solutions, strict=True
        ):
            if solution is not None:
                own += [_option(problem, self._ledger, c) for c in solution.candidates]
        search = CombinationSearch(
            self._ledger,
            self._options,
            memory_bytes=device.memory_bytes,
            communicator_bytes=device.communicator_bytes,
        )
        found = search.run(self._request.budget_s / len(_SHARES))
        return found.best if found.best is not None else found.least_bytes

    def _planned(self, name: str, share: float) -> Solution | None:
        """A task's plans; None where less than all of the memory holds none."""
        request = self._request
        device = request.cluster.device
        less = device.model_copy(update={"memory_bytes": share * device.memory_bytes})
        try:
            return solve_distmm(
                replace(
                    request,
                    tasks={name: request.tasks[name]},
                    cluster=request.cluster.model_copy(update={"device": less}),
                    top=_EACH,
                    budget_s=request.budget_s * max(1 / len(request.tasks), _TASK),
                )
            )
        except InfeasibleError as error:
            if share == 1:
                raise type(error)(f"task {name}: {error.message}", hint=error.hint) from None
            return None

    def solution(self, found: Combination) -> Solution:
        """The plan of a combination."""
        return Solution(
            solver="distmm-mt",
            method="exact",
            candidates=(
                Candidate(
                    units=named(unit for option in found.options for unit in option.make()),
                    objective_s=found.time_s,
                    closed_form=False,
                    in_turn=tuple(self._problems),
                ),
            ),
            formula_bound_s=self._bound_s or 0.0,
            closed_form=False,
            idle_because="no task gets faster with them",
        )


def _option(problem: Problem, ledger: Ledger, candidate: Candidate) -> TaskOption:
    return TaskOption(
        task=problem.task.name,
        time_s=candidate.objective_s,
        reduce_s=None,
        held_bytes=sum(
            (_held(problem, unit) for unit in candidate.units), np.zeros(problem.devices)
        ),
        communicators={0: _communicators(problem, candidate.units)},
        holdings=by_owner(problem, ledger, ((u.module, u.blocks, u.grid) for u in candidate.units)),
        shape=(0, 0, 0),
        make=lambda: candidate.units,
    )


def _held(problem: Problem, unit: Unit) -> Floats:
    """[D] activations and messages."""
    stages, sizes = Stages(problem, unit.module, unit.pp), unit.microbatches[0]
    active = stages.active_bytes(
        unit.tp, np.array([max(sizes)]), np.array([len(sizes)]), unit.schedule.kind
    )
    held_D = np.zeros(problem.devices)
    for p in range(unit.pp):
        held_D[[rank for group in unit.grid.stage(p) for rank in group]] = active[p, 0]
    return held_D


def _communicators(problem: Problem, units: Sequence[Unit]) -> frozenset[Hashable]:
    """As many as the device with the most; none is another task's but that of all devices."""
    placed = {
        unit.module: PlacedModule(
            stages=tuple(((unit.module, p), blocks) for p, blocks in enumerate(unit.blocks)),
            tp=unit.tp,
            dp=unit.dp,
        )
        for unit in units
    }
    most = max(communicators(problem, placed).values(), key=len)
    return frozenset(
        name if name == "all" else (problem.task.name, i) for i, name in enumerate(most)
    )
