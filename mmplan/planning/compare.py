"""Every solver's plan for the same work, on one or several numbers of devices and batches.

Solvers do not depend on each other: they run in processes, one per core. The time for simulating
is bounded, so that a comparison ends in seconds; ``mmplan solve`` takes more time and may find
a better plan of the same solver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmplan.costs.cost_model import CostModel
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.planning import planner
from mmplan.processes import in_processes
from mmplan.program.trace import trace_events
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan, RunnerUp
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, check_tasks, with_batch
from mmplan.simulation.symmetry import BestSteps, simulated
from mmplan.simulation.utilisation import ModuleUse, module_uses
from mmplan.solvers.registry import (
    BASELINES,
    OF_SEVERAL_TASKS,
    SOLVERS,
    UNIFORM,
    no_plan,
    unknown_solver,
)

# Seconds of each solver's search.
BUDGET_S = 0.5
# Solvers that take longest, longest first: a long one begun last would run alone.
LONGEST = ("distmm-mt", "megatron", "distmm", "convex", "megatron-rigid", "ratio", "mpsp")
# Search budgets for simulating plans beyond the first of each kind; chosen by hand.
PATIENCE = 1
# The same where several settings make curves: a point that is too low would mislead.
SWEEP_PATIENCE = 8
# The reason for a baseline among them.
UNIFORM_REASON = "the fastest that gives every module the same degrees"
# Most rows of a plan's timeline in a picture.
SHOWN_RANKS = 12
# Least number of rows, where a few ranks show every set of stages already.
FEWEST_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSetting:
    """A number of devices, and the workload's ``batch``; tasks' batches change in proportion."""

    devices: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Data of a plan's pictures, small enough to travel between processes.

    Attributes:
        events: Chrome trace slices of some ranks of its simulated step.
        uses: utilisation of its modules, most work first.
    """

    events: tuple[dict[str, Any], ...]
    uses: tuple[ModuleUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One solver's plan at one setting."""

    solver: str
    setting: ComparedSetting
    plan: Plan
    details: Details | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A solver without a plan at a setting, and why."""

    solver: str
    setting: ComparedSetting
    error: MMPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every solver's plans.

    Attributes:
        main: the setting of the comparison: the most devices, the workload's batch.
        tasks: samples of each task in a step of the main setting.
        settings: the main one, then the others in the order of the options.
        refused: solvers without a plan.
        omitted: sentences on solvers left out and batches that the workload cannot have.
        baseline: solver that ratios refer to; it has a plan at ``main``.
        baseline_is: the reason for this baseline, in words.
        plan_path: paths in the plans are relative to its folder.
    """

    name: str
    main: ComparedSetting
    tasks: Mapping[str, int]
    settings: tuple[ComparedSetting, ...]
    solved: tuple[Solved, ...]
    refused: tuple[Refused, ...]
    omitted: tuple[str, ...]
    baseline: str
    baseline_is: str
    plan_path: Path

    def at(self, setting: ComparedSetting) -> list[Solved]:
        """A setting's plans, most samples per second first."""
        return _best_first(item for item in self.solved if item.setting == setting)

    @property
    def best_first(self) -> list[Solved]:
        """The main setting's plans."""
        return self.at(self.main)

    @property
    def plans(self) -> list[Plan]:
        """Plans of the main setting, then of the others, best first in each."""
        return [item.plan for setting in self.settings for item in self.at(setting)]

    def batches(self, setting: ComparedSetting) -> dict[str, int]:
        """Samples of each task in a step."""
        return {
            name: batch * setting.batch // self.main.batch for name, batch in self.tasks.items()
        }

    @property
    def has_own_batches(self) -> bool:
        """Whether there are several tasks, or one with another batch than the workload's."""
        return [*self.tasks.values()] != [self.main.batch]

    def ratio(self, plan: Plan) -> float:
        """Samples per second over those of the baseline at the main setting."""
        base = next(item for item in self.best_first if item.solver == self.baseline)
        return _rate(plan) / _rate(base.plan) if _rate(base.plan) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One solver at one setting."""

    solver: str
    setting: ComparedSetting
    workload: Workload
    tasks: tuple[str, ...]
    with_details: bool


def compare(
    workload: Workload,
    *,
    workload_path: Path | None,
    profile: Profile,
    profile_path: Path | None,
    cluster: Cluster | None = None,
    devices: Sequence[int] = (),
    batches: Sequence[int] = (),
    solvers: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    baseline: str | None = None,
    budget_s: float = BUDGET_S,
    with_details: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Comparison:
    """Plan the workload with every solver.

    Args:
        workload: what to train.
        workload_path: its file, None for one that has none.
        profile: what it costs.
        profile_path: its file, likewise.
        cluster: whose devices to use, default the profile's.
        devices: numbers of its first devices; default all. The largest is the main setting.
        batches: more batches, on the main setting's devices.
        solvers: names; default all that are for as many tasks.
        tasks: only these; default all, or those that train.tasks_from_step starts with.
        baseline: solver that ratios refer to; default the fastest of :data:`UNIFORM`, else the
            slowest of all.
        budget_s: seconds of each solver for searching, and as many for simulating.
        with_details: add the data of pictures to the main setting's plans.
        processes: number of planning processes, default one per core.
        progress: called with plans done, all plans, and the solver of the last one.

    Raises:
        InvalidInputError: an unknown name, a count that the cluster does not have, a named
            solver that is not for such a workload, or a baseline without a plan.
        InfeasibleError: no solver has a plan at the main setting.
        RunFailedError: a process that planned was killed.
    """
    chosen_tasks = check_tasks(workload, workload.task_sets[0].tasks if tasks is None else tasks)
    names, omitted = _names(len(chosen_tasks), solvers, baseline)
    machine = cluster or profile.cluster
    counts = [machine.take(n) and n for n in devices] or [machine.num_devices]
    main = ComparedSetting(devices=max(counts), batch=workload.batch)
    jobs, impossible = _jobs(
        workload, tuple(chosen_tasks), names, main, counts, batches, with_details=with_details
    )
    plan_path = (workload_path or Path(workload.name)).with_suffix(".plan.json")
    solve = partial(
        _solved,
        workload_path=workload_path,
        profile=profile,
        profile_path=profile_path,
        plan_path=plan_path,
        cluster=machine,
        budget_s=budget_s,
        patience_s=budget_s * (SWEEP_PATIENCE if len({j.setting for j in jobs}) > 1 else PATIENCE),
    )
    results: dict[tuple[str, ComparedSetting], Solved | Refused] = {}
    for item in in_processes(solve, _longest_first(jobs), processes=processes):
        asked = item.solver in (solvers or ()) and item.setting == main
        if isinstance(item, Refused) and isinstance(item.error, InvalidInputError) and asked:
            raise item.error
        results[item.solver, item.setting] = item
        progress(len(results), len(jobs), item.solver)
    ordered = [results[job.solver, job.setting] for job in jobs]
    solved = _against_one([item for item in ordered if isinstance(item, Solved)])
    refused = tuple(item for item in ordered if isinstance(item, Refused))
    chosen, reason = _baseline(main, solved, refused, baseline)
    return Comparison(
        name=workload.name,
        main=main,
        tasks={name: view.batch for name, view in chosen_tasks.items()},
        settings=tuple(dict.fromkeys(job.setting for job in jobs)),
        solved=solved,
        refused=refused,
        omitted=(*omitted, *impossible),
        baseline=chosen,
        baseline_is=reason,
        plan_path=plan_path,
    )


def _names(
    num_tasks: int, solvers: Sequence[str] | None, baseline: str | None
) -> tuple[tuple[str, ...], list[str]]:
    """Solvers to run, and a sentence on those left out."""
    known = (*SOLVERS, *BASELINES)
    for option, asked in (("--solvers", solvers or ()), ("--baseline", (baseline,))):
        for name in asked:
            if name is not None and name not in known:
                raise unknown_solver(option, name, known)
    fitting = (name for name in known if not (num_tasks == 1 and name in OF_SEVERAL_TASKS))
    # A ratio needs both sides.
    names = tuple(dict.fromkeys((*(solvers or fitting), *((baseline,) if baseline else ()))))
    left_out = [] if solvers else [name for name in known if name not in names]
    reason = "are left out: they are for several tasks, unless --solvers names them"
    return names, [f"{', '.join(left_out)} {reason}"] if left_out else []


def _jobs(
    workload: Workload,
    tasks: tuple[str, ...],
    names: Sequence[str],
    main: ComparedSetting,
    counts: Sequence[int],
    batches: Sequence[int],
    *,
    with_details: bool,
) -> tuple[list[_Job], list[str]]:
    """Jobs of the main setting, then of other numbers of devices, then of other batches."""
    settings = {main: workload}
    for count in dict.fromkeys(counts):
        settings.setdefault(ComparedSetting(devices=count, batch=main.batch), workload)
    impossible: list[str] = []
    for batch in dict.fromkeys(batches):
        try:
            changed = with_batch(workload, batch)
        except InvalidInputError as error:
            impossible.append(f"left out: {error.message}")
        else:
            settings.setdefault(ComparedSetting(devices=main.devices, batch=batch), changed)
    return [
        _Job(
            solver=name,
            setting=setting,
            workload=changed,
            tasks=tasks,
            with_details=with_details and setting == main,
        )
        for setting, changed in settings.items()
        for name in names
    ], impossible


def _longest_first(jobs: Sequence[_Job]) -> list[_Job]:
    """Jobs by their expected time, main setting first."""

    def order(job: _Job) -> tuple[bool, int]:
        known = job.solver in LONGEST
        return job.setting != jobs[0].setting, LONGEST.index(job.solver) if known else len(LONGEST)

    return sorted(jobs, key=order)


def _solved(job: _Job, *, profile: Profile, **setting: Any) -> Solved | Refused:
    """The plan of a job; ``setting`` is that of :func:`mmplan.planning.planner.solve`."""
    steps = BestSteps() if job.with_details else None
    try:
        plan = planner.solve(
            job.workload,
            profile=profile,
            devices=job.setting.devices,
            solver=job.solver,
            tasks=job.tasks,
            steps=steps,
            **setting,
        )
    except MMPlanError as error:
        return Refused(solver=job.solver, setting=job.setting, error=error)
    details = None if steps is None else _details(plan, profile, steps)
    return Solved(solver=job.solver, setting=job.setting, plan=plan, details=details)


def _against_one(solved: Sequence[Solved]) -> tuple[Solved, ...]:
    """The plans of a setting against the same ordinary way: the best that any solver found."""
    best: dict[ComparedSetting, RunnerUp] = {}
    for item in solved:
        found = item.plan.solver.ordinary
        known = best.get(item.setting, found)
        if found is not None and known is not None:
            best[item.setting] = min(known, found, key=lambda one: one.iteration_s)
    reports = (
        item.plan.solver.model_copy(update={"ordinary": best.get(item.setting)}) for item in solved
    )
    return tuple(
        replace(item, plan=item.plan.model_copy(update={"solver": report}))
        for item, report in zip(solved, reports, strict=True)
    )


def _baseline(
    main: ComparedSetting, solved: Sequence[Solved], refused: Sequence[Refused], asked: str | None
) -> tuple[str, str]:
    """The solver that ratios refer to, and why that one.

    Raises:
        InvalidInputError: the one asked for has no plan.
        InfeasibleError: none has one.
    """
    ordered = _best_first(item for item in solved if item.setting == main)
    names = [item.solver for item in ordered]
    reasons = {item.solver: item.error for item in refused if item.setting == main}
    if not names:
        raise no_plan(reasons)
    if asked is None:
        uniform = [name for name in names if name in UNIFORM]
        return (uniform[0], UNIFORM_REASON) if uniform else (names[-1], "the slowest of these")
    if asked not in names:
        raise InvalidInputError(
            f"--baseline {asked} has no plan: {reasons[asked].message}",
            hint=f"choose among {', '.join(names)}",
        )
    return asked, "as asked"


def _best_first(items: Iterable[Solved]) -> list[Solved]:
    return sorted(items, key=lambda item: -_rate(item.plan))


def _rate(plan: Plan) -> float:
    return plan.predicted.samples_per_s


def _details(plan: Plan, profile: Profile, steps: BestSteps) -> Details:
    """Details of a plan's step: of those that planning simulated, or simulated again."""
    step = steps.of(plan)
    if step is None:
        step = simulated(plan, CostModel(profile, plan.cluster, plan.training))
    simulation, representative = step
    shown = sorted({representative[rank] for rank in _shown_ranks(plan)})
    timed = (event for rank in shown for event in simulation.events_of(rank))
    events = trace_events(simulation.program, timed, process_name=plan.solver.name)
    return Details(
        events=tuple(event for event in events if event["ph"] == "X" and event["dur"] > 0),
        uses=tuple(module_uses(simulation, plan.cluster.device.peak_flops, representative)),
    )


def _shown_ranks(plan: Plan) -> list[int]:
    """A rank of each set of stages that ranks run; where these are few, second ranks too."""
    stages: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for unit in plan.units:
        for _, p, group in unit.grid.groups():
            stages[group[0]].append((unit.name, p))
    by_stages: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank, run in stages.items():
        by_stages[tuple(run)].append(rank)
    ordered = [rank for row in zip_longest(*by_stages.values()) for rank in row if rank is not None]
    if len(by_stages) <= SHOWN_RANKS:
        return ordered[: max(FEWEST_RANKS, len(by_stages))]
    return evenly(ordered[: len(by_stages)], SHOWN_RANKS)


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the items at equal distances, the first and the last among them."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
