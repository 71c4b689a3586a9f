"""Tasks one after another, each on one grid of all devices with its modules colocated.

Every task has its options (:mod:`.task_options`); a combination of them is chosen by
:mod:`.combine`. Tasks differ in their grids, or run on one grid of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mmplan.errors import InfeasibleError
from mmplan.solvers.baselines.combine_tasks import Combination, CombinationResult, fastest
from mmplan.solvers.baselines.grid_search import nothing_allowed
from mmplan.solvers.baselines.one_grid import Layout
from mmplan.solvers.baselines.shared_parameters import Ledger
from mmplan.solvers.baselines.task_options import (
    Replicas,
    TaskOption,
    grid_options,
    halvings,
    named,
)
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.wording import missing, size

TaskOptions = list[list[TaskOption]]
# Share of the budget for a search among grids that differ from task to task.
_SEARCH = 0.2
# Grids of all tasks that are offered too, where there are pipelines.
_GRIDS = 3
# What fits this share of the memory is offered too: the formula's bytes are estimates.
_ROOM = 0.9


class InTurn:
    """A request's tasks with their options.

    Args:
        layouts: to choose from, of one task.
        replicas: to try on a grid.

    Raises:
        InfeasibleError: devices or pins leave a task without any option.
    """

    def __init__(
        self,
        request: Request,
        solver: str,
        layouts: Callable[[Problem], Iterable[Layout]],
        replicas: Replicas = halvings,
    ) -> None:
        self._request, self._solver = request, solver
        self._problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._ledger = Ledger(self._problems)
        self._options = [self._of(p, list(layouts(p)), replicas) for p in self._problems.values()]

    def _of(
        self, problem: Problem, layouts: Sequence[Layout], replicas: Replicas
    ) -> list[TaskOption]:
        options = grid_options(problem, self._ledger, layouts, replicas)
        if not options:
            raise nothing_allowed(problem, self._solver, layouts)
        return options

    def on_own_grids(self) -> Solution:
        """Every task on its own best grid.

        Raises:
            InfeasibleError: no combination fits the memory; names what is missing.
        """
        return self._solution(self._best_of_all)

    def on_one_grid(self) -> Solution:
        """All tasks with the same tp and pipeline positions, and replicas as far as samples go.

        Raises:
            InfeasibleError: no grid fits the memory; names what is missing.
        """
        return self._solution(self._best_uniform)

    # --- the searches ------------------------------------------------------------------

    def _best_of_all(self, options: TaskOptions, memory_bytes: float) -> CombinationResult:
        # One grid for all is quickly found where the memory is tight, and bounds the search.
        uniform = self._best_uniform(options, memory_bytes)
        limit_s = self._request.budget_s * _SEARCH
        found = self._fastest(options, memory_bytes, uniform.best, limit_s)
        return (
            found
            if found.best is not None
            else CombinationResult(
                best=uniform.best,
                bound_s=found.bound_s,
                least_bytes=min(uniform.least_bytes, found.least_bytes),
            )
        )

    def _best_uniform(self, options: TaskOptions, memory_bytes: float) -> CombinationResult:
        best: Combination | None = None
        least_bytes = float("inf")
        for own in _uniform(options):
            found = self._fastest(own, memory_bytes, best)
            best, least_bytes = found.best or best, min(least_bytes, found.least_bytes)
        bound_s = best.time_s if best is not None else float("inf")
        return CombinationResult(best=best, bound_s=bound_s, least_bytes=least_bytes)

    def _best_grids(self, memory_bytes: float) -> dict[str, Combination]:
        """The best grids of all tasks, by what they are."""
        found: dict[str, Combination] = {}
        for own in _uniform(self._options):
            tp, positions, _ = own[0][0].shape
            grid = f"tp {tp}, {positions} positions"
            best = self._fastest(own, memory_bytes, found.get(grid)).best
            found |= {} if best is None else {grid: best}
        return dict(sorted(found.items(), key=lambda pair: pair[1].time_s)[:_GRIDS])

    def _fastest(
        self,
        options: TaskOptions,
        memory_bytes: float,
        known: Combination | None,
        limit_s: float = float("inf"),
    ) -> CombinationResult:
        return fastest(
            self._ledger,
            options,
            memory_bytes=memory_bytes,
            communicator_bytes=self._request.cluster.device.communicator_bytes,
            better_than_s=known.time_s if known is not None else float("inf"),
            limit_s=limit_s,
        )

    # --- the answer --------------------------------------------------------------------

    def _solution(self, search: Callable[[TaskOptions, float], CombinationResult]) -> Solution:
        memory_bytes = self._request.cluster.device.memory_bytes
        found = search(self._options, memory_bytes)
        if found.best is None:
            raise self._too_large(found.least_bytes)
        chosen = {"": found.best}
        if any(option.shape[1] > 1 for option in found.best.options):
            # Stages of one device wait for each other in ways that the formula does not know.
            flat = [[o for o in own if o.shape[1] == 1] for own in self._options]
            if all(flat) and (plain := search(flat, memory_bytes).best) is not None:
                chosen["no pipeline"] = plain
            chosen |= self._best_grids(memory_bytes)
        if found.best.fullest_bytes > _ROOM * memory_bytes:
            roomy = search(self._options, _ROOM * memory_bytes).best
            chosen |= {} if roomy is None else {"room to spare": roomy}
        candidates = [self._candidate(kind, item) for kind, item in _distinct(chosen).items()]
        return Solution(
            solver=self._solver,
            method="exact",
            candidates=tuple(sorted(candidates, key=lambda c: c.objective_s)),
            formula_bound_s=found.bound_s,
            # A device may begin a task before others have ended the last one, and parameters
            # that tasks hold in different shards are summed in pieces.
            closed_form=False,
            idle_because="no task gets faster with them",
        )

    def _candidate(self, kind: str, found: Combination) -> Candidate:
        units = tuple(unit for option in found.options for unit in option.make())
        return Candidate(
            units=named(units) if len(self._problems) > 1 else units,
            objective_s=found.time_s,
            closed_form=False,
            kind=kind,
            in_turn=tuple(self._problems) if len(self._problems) > 1 else (),
        )

    def _too_large(self, needed_bytes: float) -> InfeasibleError:
        memory, tasks = self._request.cluster.device.memory_bytes, list(self._problems)
        what = f" for {', '.join(tasks)} one after another" if len(tasks) > 1 else ""
        return InfeasibleError(
            f"{self._solver} needs at least {size(needed_bytes)} on a device{what}, "
            f"{missing(needed_bytes, memory)}",
            hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
        )


def _distinct(chosen: Mapping[str, Combination]) -> dict[str, Combination]:
    """Without those whose options others before them have."""
    found: dict[tuple[TaskOption, ...], str] = {}
    for kind, item in chosen.items():
        found.setdefault(item.options, kind)
    return {kind: chosen[kind] for kind in found.values()}


def _uniform(options: TaskOptions) -> Iterator[TaskOptions]:
    """The options of every grid that all tasks have."""
    grids = [{option.shape[:2] for option in own} for own in options]
    for grid in sorted(set.intersection(*grids)):
        same = [[o for o in own if o.shape[:2] == grid] for own in options]
        most = [max(o.shape[2] for o in own) for own in same]
        for dp in sorted({o.shape[2] for own in same for o in own}, reverse=True):
            chosen = [
                [o for o in own if o.shape[2] == min(dp, limit)]
                for own, limit in zip(same, most, strict=True)
            ]
            if all(chosen):
                yield chosen
