"""From a workload and a profile to a plan: solve, compile, simulate the best few, choose."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mmplan.costs.program_costs import CostModel, check_cluster
from mmplan.errors import InvalidInputError
from mmplan.planning.device_limit import useful_devices
from mmplan.planning.measured_trials import Trials, Tried, rank, rounded, run_trials, runner_up
from mmplan.planning.plan_labels import idle_ranks, spans
from mmplan.planning.plan_parts import (
    extrapolations,
    file_reference,
    none_fits,
    other_orders,
    placed_losses,
    planned_tasks,
    straggler_note,
)
from mmplan.planning.split_backward import WHOLE, best_backwards, pinned_backwards, split_notes
from mmplan.processes import rare_collections
from mmplan.program.ties import check_ties
from mmplan.schema.agreement import check_profiled
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Asked, Plan, PlannedTraining, Prediction, SolverReport
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, check_tasks, unused_modules
from mmplan.simulation.peak_memory import memory_lower_bound
from mmplan.simulation.step import prediction
from mmplan.simulation.symmetry import BestSteps, simulated
from mmplan.simulation.symmetry_classes import LoweredPlan, lower_plan
from mmplan.solvers.distmm.largest_sync_batch import largest_of_all_tasks
from mmplan.solvers.problem import Candidate, Request, Solution, first_of_each_kind
from mmplan.solvers.registry import BASELINES as BASELINES
from mmplan.solvers.registry import SOLVERS as SOLVERS
from mmplan.solvers.registry import SearchProgress, solutions_of
from mmplan.wording import counted

# Plans beyond the first of each kind are simulated for at most this many budgets.
SIMULATION_BUDGETS = 10
# Instructions that a quiet core compiles and simulates in a second, and as how many each plan
# counts beside its own. Patience is counted in them, so that a busy machine finds the same plans.
INSTRUCTIONS_PER_S, EACH_PLAN = 100_000, 1_000
# As many times as long while none fits the memory; and on the clock of a slow machine at most.
NOT_YET, LAST_RESORT = 4, 5


@rare_collections()
def solve(
    workload: Workload,
    *,
    workload_path: str | Path,
    profile: Profile,
    profile_path: str | Path,
    plan_path: str | Path,
    cluster: Cluster | None = None,
    devices: int | None = None,
    solver: str = "auto",
    method: str | None = None,
    tasks: Sequence[str] | None = None,
    top: int = 8,
    budget_s: float = 1.0,
    patience_s: float | None = None,
    trials: Trials | None = None,
    steps: BestSteps | None = None,
    progress: SearchProgress = lambda done, total, note: None,
) -> Plan:
    """The plan with the least simulated iteration time among a solver's best few.

    Args:
        workload: what to train.
        workload_path: its file; the plan names it relative to its own folder.
        profile: what it costs.
        profile_path: its file, likewise.
        plan_path: where the plan will be written.
        cluster: whose devices and links to use, default the profile's.
        devices: use the first ones only.
        solver: a name in :data:`SOLVERS` or :data:`BASELINES`, or ``auto`` for the best of
            all that apply.
        method: of the solver.
        tasks: only these; default all, or those that train.tasks_from_step starts with.
        top: candidates to simulate; with 1 the plan is the formula's optimum.
        budget_s: seconds for searches that are not exact.
        patience_s: seconds of a quiet core for simulating plans beyond the first of each kind,
            counted in instructions; default ten budgets; four times as many while none fits the
            memory.
        trials: the least measured time among the best by simulation decides instead.
        steps: keeps the shortest steps that are simulated and fit the memory.
        progress: hears how many of how many searches and simulations are done.

    Raises:
        InvalidInputError: an unknown name, a count below 1, or files that contradict.
        InfeasibleError: no plan fits the devices or their memory.
        RunFailedError: none of the plans that were tried ran.
    """
    started = time.monotonic()
    if top < 1:
        raise InvalidInputError(
            f"--top {top}: at least one plan is simulated", hint="give 1 or more"
        )
    if not 0 <= budget_s < math.inf:
        raise InvalidInputError(
            f"--budget {budget_s:g}: not a number of seconds", hint="give 0 or more, 1 by default"
        )
    check_cluster(profile, cluster)
    check_profiled(profile, workload)
    used = (cluster or profile.cluster).take(devices)
    training = PlannedTraining(
        precision=workload.train.precision,
        zero=workload.train.zero,
        optimizer=workload.train.optimizer,
        seed=workload.train.seed,
        reorder=workload.train.reorder,
    )
    chosen = check_tasks(workload, workload.task_sets[0].tasks if tasks is None else tasks)
    costs = CostModel(profile, used, training)
    devices = devices or used.num_devices
    request = Request(
        workload=workload,
        tasks=chosen,
        costs=costs,
        cluster=used,
        devices=useful_devices(chosen.values(), costs, used, devices),
        method=method,
        top=top,
        budget_s=budget_s,
    )
    asked = Asked(solver=solver, method=method, top=top, budget_s=budget_s)
    drafts = _Drafts(request, workload_path, profile_path, plan_path, training, asked, steps)
    solutions, left_out = solutions_of(request, solver, progress)
    patience_s = SIMULATION_BUDGETS * budget_s if patience_s is None else patience_s
    tried = drafts.try_all(solutions, patience_s=patience_s, progress=progress)
    seconds = time.monotonic() - started
    return drafts.finish(tried, left_out, trials, devices=devices, seconds=seconds)


class _Drafts:
    """Turns candidates into simulated plans."""

    def __init__(
        self,
        request: Request,
        workload_path: str | Path,
        profile_path: str | Path,
        plan_path: str | Path,
        training: PlannedTraining,
        asked: Asked,
        steps: BestSteps | None,
    ) -> None:
        self._request = request
        self._training = training
        self._asked = asked
        self._steps = steps
        folder = Path(plan_path).resolve().parent
        self._workload = file_reference(workload_path, folder)
        self._profile = file_reference(profile_path, folder)
        self._tasks = planned_tasks(request)
        self._costs = {training.zero: request.costs}
        self._too_large: list[float] = []
        self._dropped: list[InvalidInputError] = []
        self._notes_on_search: list[str] = []
        # What was looked at so far, in instructions.
        self._work = 0

    def try_all(
        self, solutions: Sequence[Solution], *, patience_s: float, progress: SearchProgress
    ) -> list[Tried]:
        """Simulate candidates: the best of each kind, then the others, best formula first.

        Those that do not fit the memory drop out. When patience with the others ends before
        they do (it lasts longer while nothing fits), a note says so.

        Raises:
            InfeasibleError: none fits.
        """
        first, others = first_of_each_kind(solutions)
        total, tried = len(first) + len(others), list[Tried]()
        for position, (solution, candidate) in enumerate(first):
            progress(position, total, f"simulated, now {solution.solver}")
            tried += self._try(solution, candidate)
        # What one takes is not begun where less is left.
        each = self._work / max(1, len(first))
        begun, began = self._work, time.monotonic()
        for position, (solution, candidate) in enumerate(others):
            left_s = patience_s if tried else NOT_YET * patience_s
            spent = self._work - begun + each
            if (
                spent > left_s * INSTRUCTIONS_PER_S
                or time.monotonic() - began > LAST_RESORT * left_s
            ):
                self._notes_on_search.append(
                    f"{len(others) - position} of {counted(total, 'plan')} "
                    "were not simulated for lack of time; a larger --budget looks at them"
                )
                break
            progress(len(first) + position, total, f"simulated, now {solution.solver}")
            tried += self._try(solution, candidate)
        else:
            progress(total, total, "simulated")
        if not tried:
            told = "".join(f"; {note}" for note in self._notes_on_search)
            memory_bytes = self._request.cluster.device.memory_bytes
            raise none_fits(self._too_large, self._dropped, memory_bytes, told)
        return tried

    def _try(self, solution: Solution, candidate: Candidate) -> Iterator[Tried]:
        draft = self._plan(solution, candidate)
        memory_bytes = self._request.cluster.device.memory_bytes
        try:
            lowered = lower_plan(draft)
            check_ties(lowered.graph.stages, self._request.costs.profile.ties)
            self._work += EACH_PLAN + sum(
                sum(stage.rounds) for stage in lowered.simulated_graph.stages
            )
            needed = memory_lower_bound(draft, self._costs_of(draft), lowered)
            if needed <= memory_bytes:
                draft = self._simulated(draft, lowered)
                needed = max(draft.predicted.memory_bytes, default=0.0)
        except InvalidInputError as error:
            # Orders of a chain may wait for each other, tied blocks may lie under several tp
            # degrees; the other candidates need not.
            self._dropped.append(error)
            return
        if needed > memory_bytes:
            self._too_large.append(needed)
            return
        if not (solution.closed_form and candidate.closed_form):
            whole_s = max(candidate.objective_s, draft.predicted.iteration_s)
            candidate = replace(candidate, objective_s=whole_s)
        yield Tried(
            solution=solution,
            candidate=candidate,
            plan=draft,
            is_baseline=solution.solver in BASELINES,
        )

    def finish(
        self,
        tried: Sequence[Tried],
        left_out: Sequence[str],
        trials: Trials | None,
        *,
        devices: int,
        seconds: float,
    ) -> Plan:
        """The best plan with the whole report, on all devices that were asked for."""
        ranked = sorted(tried, key=rank)
        firsts: dict[str, Tried] = {}
        for item in ranked:
            firsts.setdefault(item.solution.solver, item)
        reordered = {solver: self._best_order(first) for solver, first in firsts.items()}
        split = {solver: self._best_backwards(whole) for solver, whole in reordered.items()}
        finished = {id(first): split[solver] for solver, first in firsts.items()}
        finalists = [(finished.get(id(t), t), t) for t in ranked]
        finalists.sort(key=lambda pair: rank(pair[0]))
        if trials is not None:
            finalists, told = run_trials(finalists, trials)
            self._notes_on_search += told
        best, origin = finalists[0]
        whole = reordered[best.solution.solver] if id(origin) in finished else best
        objective_s = best.candidate.objective_s
        # Of grids that a solver looks at beside its own plans it may choose those tried only.
        own = (t.candidate.objective_s for t in tried if t.solution is best.solution)
        bound_s = min(best.solution.formula_bound_s, *own)
        plan = self._on(devices, best.plan)
        idle = idle_ranks(plan)
        report = best.plan.solver.model_copy(
            update={
                "seconds": seconds,
                "objective_s": objective_s,
                "formula_bound_s": bound_s,
                "formula_gap": objective_s / bound_s - 1 if bound_s else 0.0,
                "idle_ranks": idle,
                "measured_s": best.measured_s,
                "notes": (
                    *self._notes(best, idle, devices),
                    *split_notes(best.plan, whole.plan),
                    *left_out,
                ),
                "largest_sync_batch": largest_of_all_tasks(self._request, best.plan.units),
                "runners_up": (
                    *([runner_up(whole, WHOLE)] if best.plan is not whole.plan else []),
                    *(runner_up(t) for t, source in finalists if source is not origin),
                ),
            }
        )
        return plan.model_copy(update={"solver": report})

    def _on(self, devices: int, plan: Plan) -> Plan:
        """The plan with the idle devices that were left out of the search."""
        if devices == plan.devices:
            return plan
        return self._simulated(plan.model_copy(update={"devices": devices}))

    def _best_order(self, best: Tried) -> Tried:
        """The chosen plan in the fastest order of its micro-batches that fits the memory."""
        memory_bytes = self._request.cluster.device.memory_bytes
        plans = [best.plan]
        for units in other_orders(best.plan.units):
            if units != best.plan.units:
                with suppress(InvalidInputError):
                    plans.append(self._simulated(best.plan.model_copy(update={"units": units})))
        fitting = [p for p in plans if max(p.predicted.memory_bytes, default=0) <= memory_bytes]
        # The first of equals: a lead that hides nothing only holds memory.
        return replace(best, plan=min(fitting, key=lambda p: rounded(p.predicted.iteration_s)))

    def _best_backwards(self, whole: Tried) -> Tried:
        """Split backwards where they gain; the formula's optimum and baselines stay as they are."""
        request = self._request
        if request.top == 1 or whole.is_baseline:
            return whole
        plan = best_backwards(whole.plan, request.workload, request.cluster, self._simulated)
        return replace(whole, plan=plan)

    def _plan(self, solution: Solution, candidate: Candidate) -> Plan:
        request, training = self._request, self._training
        if candidate.zero is not None:
            training = training.model_copy(update={"zero": candidate.zero})
        return Plan(
            name=request.workload.name,
            workload=self._workload,
            profile=self._profile,
            cluster=request.cluster,
            devices=request.devices,
            training=training,
            tasks=self._tasks,
            solver=SolverReport(
                name=solution.solver,
                method=solution.method,
                seconds=0.0,
                objective_s=candidate.objective_s,
                formula_bound_s=solution.formula_bound_s,
                formula_gap=0.0,
                curves=solution.curves,
                asked=self._asked,
            ),
            units=pinned_backwards(candidate.units, request.workload),
            losses=placed_losses(request, candidate.units),
            waves=candidate.waves,
            in_turn=candidate.in_turn,
            predicted=Prediction(iteration_s=0.0, samples_per_s=0.0),
        )

    def _simulated(self, plan: Plan, lowered: LoweredPlan | None = None) -> Plan:
        found = simulated(plan, self._costs_of(plan), lowered)
        self._work += sum(map(len, found[0].program.instructions))
        predicted = prediction(found[0], plan)
        memory_bytes = self._request.cluster.device.memory_bytes
        if self._steps is not None and max(predicted.memory_bytes, default=0.0) <= memory_bytes:
            self._steps.keep(predicted, found)
        return plan.model_copy(update={"predicted": predicted})

    def _costs_of(self, plan: Plan) -> CostModel:
        """The costs under a plan's own training."""
        zero, given = plan.training.zero, self._request.costs
        if zero not in self._costs:
            self._costs[zero] = CostModel(given.profile, given.cluster, plan.training)
        return self._costs[zero]

    def _notes(self, best: Tried, idle: tuple[int, ...], devices: int) -> list[str]:
        request = self._request
        notes = [*best.solution.notes, *best.candidate.notes]
        notes += [
            f"module {name} is in no task and is left out"
            for name in unused_modules(request.workload)
        ]
        if idle:
            notes.append(
                f"{len(idle)} of {counted(devices, 'device')} stay idle "
                f"({'rank' if len(idle) == 1 else 'ranks'} {spans(idle)}): "
                f"{best.solution.idle_because}"
            )
        gpipe = [unit.name for unit in best.plan.units if unit.schedule.kind == "gpipe"]
        if gpipe:
            notes.append(
                f"{', '.join(gpipe)}: memory does not hold the micro-batches of the batch-sync "
                "order, so each round drains (gpipe)"
            )
        if request.costs.profile.source == "analytic":
            notes.append("the profile is analytic: no time in this plan was measured")
        uneven = straggler_note(best.plan, request.costs)
        if uneven:
            notes.append(uneven)
        beyond = extrapolations(best.plan, request.costs)
        if beyond:
            notes.append(f"beyond what was measured: {'; '.join(beyond)}")
        if self._dropped:
            count = len(self._dropped)
            notes.append(f"{counted(count, 'plan')} dropped out: {self._dropped[0].message}")
        if self._too_large:
            notes.append(
                f"{counted(len(self._too_large), 'simulated plan')} did not fit the memory"
            )
        return [*notes, *self._notes_on_search]
