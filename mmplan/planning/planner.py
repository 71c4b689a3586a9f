"""From a workload and a profile to a plan: solve, compile, simulate the best few, choose."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmplan.costs.program_costs import CostModel, check_cluster
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.largest_sync_batch import largest_sync_batches
from mmplan.planning.lower_bound import lower_bound
from mmplan.planning.measured_trials import (
    AS_FAST,
    SimulatedPlan,
    Trials,
    merit,
    peak_bytes,
    plainest_first,
    rounded,
    run_trials,
    runner_up,
)
from mmplan.planning.neighbours.search import NeighbourSearch
from mmplan.planning.order_search import LEADS, best_order, order_notes
from mmplan.planning.recomputation import best_recomputation, free_modules
from mmplan.planning.unit_schedules import (
    best_backwards,
    fused_backwards,
    other_orders,
    pinned_backwards,
    split_notes,
)
from mmplan.processes import rare_collections
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.agreement import check_profiled, depended_on, planned_task
from mmplan.schema.base import (
    Document,
    document_text,
    file_sha256,
    relative_path,
    text_sha256,
)
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import (
    Asked,
    FileReference,
    NeighbourReport,
    Plan,
    PlanLoss,
    PlannedTask,
    PlannedTraining,
    Prediction,
    RunnerUp,
    SolverReport,
    Unit,
)
from mmplan.schema.profile import Profile
from mmplan.schema.workload import TaskView, Workload, check_tasks, unused_modules
from mmplan.simulation.least_step import least_step_s
from mmplan.simulation.peak_memory import memory_lower_bound
from mmplan.simulation.step import prediction
from mmplan.simulation.symmetry import BestSteps, simulated
from mmplan.solvers.placement import last_stage_ranks
from mmplan.solvers.problem import (
    Candidate,
    NotApplicableError,
    Problem,
    Request,
    Solution,
    first_of_each_kind,
)
from mmplan.solvers.registry import BASELINES as BASELINES
from mmplan.solvers.registry import SOLVERS as SOLVERS
from mmplan.solvers.registry import UNIFORM, SearchProgress, solutions_of
from mmplan.solvers.search_budget import NEIGHBOUR_BUDGETS, SearchBudget
from mmplan.wording import counted, missing, rank_ranges, size

# Straggler factors below it are not worth a note.
_LEAST_STRAGGLER = 1.005
# Who found a plan that is a change of solvers' plans.
NEIGHBOURS = "neighbours"
# End of the label of the same plan with fused backwards.
FUSED = ", fused backwards"
# Plans beyond the first of each kind are simulated for at most this many search budgets.
SIMULATION_BUDGETS = 3
# Instructions that a quiet core compiles and simulates in a second. Patience is counted in
# instructions, so that a busy machine finds the same plans.
INSTRUCTIONS_PER_S = 100_000
# Instructions that each plan counts beside its own: a small one takes time too.
INSTRUCTIONS_PER_PLAN = 1_000
# Instructions of a plan for each of its computes, about: some are messages.
INSTRUCTIONS_PER_COMPUTE = 6
# The first plans of each kind are simulated whatever their formulas say up to so many instructions,
# small plans first; large ones after that where they may be the best. Chosen by hand: of some tens
# of devices all are simulated.
INSTRUCTIONS_OF_FIRST = 100_000
# Of those large ones a formula's value may be more than the best step by this factor; chosen by
# hand: where formulas are wrong they promise too much.
FORMULA_SLACK = 1.25
# Of it, what a plan takes that the memory refuses before it is simulated.
REFUSED_PRICE = 0.3
# Patience is longer by this factor while no plan fits the memory; chosen by hand.
PATIENCE_WITHOUT_PLAN = 4
# Other orders and backwards are tried of plans that take up to this times the best step; chosen by
# hand: orders alone may gain a quarter.
REFINED_WITHIN = 2
# Up to this many devices the search looks at all of them; chosen by hand.
ALWAYS_SEARCHED = 2_048
# A plan's file lists the peak memory of each of its devices.
MOST_DEVICES = 1_000_000
# Tensor-parallel groups leave devices idle on nodes that they do not fill; chosen by hand.
NODE_SLACK = 2


@rare_collections()
def solve(
    workload: Workload,
    *,
    workload_path: str | Path | None,
    profile: Profile,
    profile_path: str | Path | None,
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
        workload_path: its file, which the plan names relative to its own folder; None for one
            that has none.
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
            counted in instructions; default three budgets; four times as many while none fits the
            memory.
        trials: the least measured time among the best by simulation decides instead.
        steps: keeps the shortest steps that are simulated and fit the memory.
        progress: hears how many of how many searches and simulations are done.

    Raises:
        InvalidInputError: an unknown name, a count below 1, or files that contradict.
        InfeasibleError: no plan fits the devices or their memory.
        RunFailedError: none of the plans that were tried ran.
    """
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
    started = time.monotonic()
    used = (cluster or profile.cluster).take(devices)
    training = PlannedTraining(
        precision=workload.train.precision,
        zero=workload.train.zero,
        narrow_gradients=workload.train.narrow_gradients,
        sequence_parallel=workload.train.sequence_parallel,
        optimizer=workload.train.optimizer,
        seed=workload.train.seed,
        reorder=workload.train.reorder,
    )
    chosen = check_tasks(workload, workload.task_sets[0].tasks if tasks is None else tasks)
    costs = CostModel(profile, used, training)
    wanted = devices or used.num_devices
    asked = Asked(solver=solver, method=method, top=top, budget_s=budget_s)
    folder = Path(plan_path).resolve().parent
    files = (
        file_reference(workload, workload_path, folder),
        file_reference(profile, profile_path, folder),
    )
    patience_s = SIMULATION_BUDGETS * budget_s if patience_s is None else patience_s

    def plan_of(settled: Workload, trials: Trials | None = None) -> Plan:
        request = Request(
            workload=settled,
            tasks=chosen,
            costs=costs,
            cluster=used,
            devices=useful_devices(chosen.values(), costs, used, wanted),
            method=method,
            top=top,
            budget_s=budget_s,
        )
        candidates = _CandidatePlans(request, files, training, asked, steps)
        left_out: list[str] = []
        try:
            solutions, left_out = solutions_of(request, solver, progress)
            plans = candidates.simulate_all(
                solutions, patience_s=patience_s, all_of_them=trials is not None, progress=progress
            )
        except InfeasibleError:
            plans = [] if solver != "auto" or top == 1 else candidates.first_fit(budget_s=budget_s)
            if not plans:
                raise
        if solver == "auto" and top > 1:
            plans += candidates.neighbours(plans, budget_s=NEIGHBOUR_BUDGETS * budget_s)
        ordinary = None if top == 1 else candidates.ordinary(plans)
        plan = candidates.choose(plans, left_out, trials, devices=wanted)
        return _reported(plan, ordinary=ordinary, seconds=time.monotonic() - started)

    free = free_modules(workload)
    if not free:
        return _bounded(plan_of(workload, trials), costs)
    found = best_recomputation(workload, plan_of)
    plan = found.plan if trials is None else plan_of(found.workload, trials)
    notes = (*plan.solver.notes, found.note)
    plan = _reported(plan, notes=notes, recompute_auto=free, seconds=time.monotonic() - started)
    return _bounded(plan, costs)


def _bounded(plan: Plan, costs: CostModel) -> Plan:
    """The plan with what no plan of the workload takes less than."""
    least_s = lower_bound(plan, costs).seconds
    gap = plan.predicted.iteration_s / least_s - 1 if least_s else 0.0
    return _reported(plan, lower_bound_s=least_s, gap=gap)


def _reported(plan: Plan, **facts: Any) -> Plan:
    """The plan with other facts about its search."""
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=facts)})


def useful_devices(
    tasks: Iterable[TaskView], costs: CostModel, cluster: Cluster, devices: int
) -> int:
    """An upper bound of the devices that a plan can use; the search looks at no more.

    A device runs a shard of at least one block with at least one sample: no module can use more
    devices than its blocks, times its task's samples, times its largest tensor-parallel group.

    Raises:
        InvalidInputError: more than a plan's file could list.
    """
    if devices > MOST_DEVICES:
        raise InvalidInputError(
            f"--devices {devices}: a plan is for at most {counted(MOST_DEVICES, 'device')}",
            hint="ask for fewer devices, or name a smaller --cluster",
        )
    most = sum(
        costs.num_blocks(task=task.name, module=module)
        * task.batch
        * max(costs.tp_options(task=task.name, module=module), default=1)
        for task in tasks
        for module in task.modules
    )
    node = cluster.devices_per_node
    if cluster.nodes > 1:
        most = -(-NODE_SLACK * most // node) * node
    return min(devices, max(most, ALWAYS_SEARCHED))


class _CandidatePlans:
    """Turns candidates into simulated plans, and chooses among these."""

    def __init__(
        self,
        request: Request,
        files: tuple[FileReference, FileReference],
        training: PlannedTraining,
        asked: Asked,
        steps: BestSteps | None,
    ) -> None:
        self._request = request
        self._training = training
        self._asked = asked
        self._steps = steps
        self._workload, self._profile = files
        self._tasks = planned_tasks(request)
        self._depends_on = depended_on(
            request.workload, request.tasks, working=request.costs.profile.data
        )
        self._too_large: list[float] = []
        self._dropped: list[InvalidInputError] = []
        self._search_notes: list[str] = []
        self._neighbours: NeighbourReport | None = None
        # Several solvers find the same plan.
        self._predicted: dict[Hashable, Prediction] = {}
        self._instructions: dict[Hashable, int] = {}
        # Effort so far, in instructions.
        self._effort = 0

    def simulate_all(
        self,
        solutions: Sequence[Solution],
        *,
        patience_s: float,
        all_of_them: bool,
        progress: SearchProgress,
    ) -> list[SimulatedPlan]:
        """Simulate candidates: the best of each kind, then the others, best formula first.

        Candidates that do not fit the memory drop out, and others whose computes alone take longer
        than the best step. Of the best of each kind those drop out too once much has been
        simulated, and with them what promises little. A note counts those for which patience did
        not last.

        Args:
            solutions: of the solvers.
            patience_s: seconds of a quiet core for the others.
            all_of_them: those too that are slower by their computes alone.
            progress: hears of each candidate.

        Raises:
            InfeasibleError: none fits.
        """
        first, others = first_of_each_kind(solutions)
        total, plans = len(first) + len(others), list[SimulatedPlan]()

        def limit_s() -> float:
            # The best has a runner-up.
            return math.inf if all_of_them or len(plans) < 2 else as_fast_as(plans)

        places: list[tuple[int, SimulatedPlan]] = []
        by_size = sorted(range(len(first)), key=lambda i: _computes_of(first[i][1].units))
        for position, place in enumerate(by_size):
            solution, candidate = first[place]
            progress(position, total, f"simulated, now {solution.solver}")
            own_s = limit_s() if self._effort > INSTRUCTIONS_OF_FIRST else math.inf
            if candidate.objective_s <= FORMULA_SLACK * own_s:
                found = [*self._try(solution, candidate, own_s)]
                plans += found
                places += [(place, item) for item in found]
        # Of equal plans the first solver's is taken.
        plans[:] = [item for _, item in sorted(places, key=lambda pair: pair[0])]
        # No plan is begun for which too little patience is left.
        each = self._effort / max(1, len(first))
        effort_before = min(self._effort, INSTRUCTIONS_OF_FIRST)
        for position, (solution, candidate) in enumerate(others):
            patient_s = patience_s if plans else PATIENCE_WITHOUT_PLAN * patience_s
            left = patient_s * INSTRUCTIONS_PER_S - (self._effort - effort_before)
            if left < each:
                self._search_notes.append(
                    f"{len(others) - position} of {counted(total, 'plan')} "
                    "were not simulated for lack of time; a larger --budget looks at them"
                )
                break
            progress(len(first) + position, total, f"simulated, now {solution.solver}")
            plans += self._try(solution, candidate, limit_s(), left)
        else:
            progress(total, total, "simulated")
        if not plans:
            raise none_fits(self._too_large, self._dropped, self._memory_bytes, self._search_notes)
        return plans

    def ordinary(self, plans: Sequence[SimulatedPlan]) -> RunnerUp | None:
        """The best plan that gives every module the same degrees; None where none fits."""
        uniform = [item for item in plans if item.solution.solver in UNIFORM]
        if not uniform:
            with suppress(InfeasibleError, NotApplicableError):
                request = replace(self._request, method=None)
                solutions, _ = solutions_of(request, UNIFORM[0], lambda done, total, note: None)
                first, _ = first_of_each_kind(solutions)
                uniform = [item for pair in first for item in self._try(*pair)]
        return runner_up(min(uniform, key=merit)) if uniform else None

    def _try(
        self,
        solution: Solution,
        candidate: Candidate,
        limit_s: float = math.inf,
        most: float = math.inf,
    ) -> Iterator[SimulatedPlan]:
        """The candidate's simulated plan; nothing where it does not fit, run or keep the limits."""
        plan = self._plan(solution, candidate)
        try:
            plan, needed = self._with_bytes(plan, limit_s, most)
        except InvalidInputError as error:
            # Stage orders of this candidate may deadlock, or its tied blocks have several tp
            # degrees; other candidates may still run.
            self._dropped.append(error)
            return
        if needed > self._memory_bytes:
            self._too_large.append(needed)
            return
        if min(limit_s, most) < math.inf and not plan.predicted.iteration_s:
            return
        if not (solution.closed_form and candidate.closed_form):
            objective_s = max(candidate.objective_s, plan.predicted.iteration_s)
            candidate = replace(candidate, objective_s=objective_s)
        yield SimulatedPlan(
            solution=solution,
            candidate=candidate,
            plan=plan,
            is_baseline=solution.solver in BASELINES,
        )

    def _with_bytes(
        self, plan: Plan, limit_s: float = math.inf, most: float = math.inf
    ) -> tuple[Plan, float]:
        """The bytes that a plan needs at least; of a simulated one all of them.

        It is simulated where it may fit the memory and may take no more than ``limit_s``, with no
        more than ``most`` instructions, about.

        Raises:
            InvalidInputError: it cannot run.
        """
        if _what_runs(plan) in self._predicted:
            plan = self._simulated(plan)
            return plan, peak_bytes(plan.predicted)
        lowered = lower_plan(plan)
        computes = sum(sum(stage.rounds) for stage in lowered.simulated_graph.stages)
        self._effort += INSTRUCTIONS_PER_PLAN + computes
        if INSTRUCTIONS_PER_COMPUTE * computes > most:
            return plan, 0.0
        needed = memory_lower_bound(plan, self._request.costs, lowered)
        if needed > self._memory_bytes:
            return plan, needed
        if limit_s < math.inf:
            least_s = least_step_s(plan, self._request.costs, lowered, as_planned=True)
            if least_s > limit_s:
                return plan, needed
        plan = self._simulated(plan, lowered)
        return plan, peak_bytes(plan.predicted)

    def first_fit(self, *, budget_s: float) -> list[SimulatedPlan]:
        """A plan that fits where those of the solvers do not; nothing where none is found."""
        solution = _of_neighbours(0.0)
        found = self._neighbour_search(solution, 1, budget_s=budget_s).first_fit()
        if found is None:
            return []
        self._search_notes.append("no solver has a plan that fits: this one comes from the search")
        candidate, plan = found
        candidate = replace(candidate, objective_s=plan.predicted.iteration_s)
        return [SimulatedPlan(solution=solution, candidate=candidate, plan=plan)]

    def _neighbour_search(
        self, solution: Solution, plans: int, *, budget_s: float
    ) -> NeighbourSearch:
        budget = SearchBudget(budget_s)

        def trial(candidate: Candidate) -> Plan | None:
            before, plan, needed = self._effort, None, math.inf
            with suppress(InvalidInputError):
                left = budget.left_s * INSTRUCTIONS_PER_S
                plan, needed = self._with_bytes(self._plan(solution, candidate), most=left)
            is_simulated = plan is not None and plan.predicted.iteration_s > 0
            fits = needed <= self._memory_bytes
            # Others were lowered only; those that are too large, for more than a small one takes.
            price = 1.0 if is_simulated or fits else REFUSED_PRICE
            budget.spend(price * (self._effort - before) / INSTRUCTIONS_PER_S)
            return plan if is_simulated and fits else None

        return NeighbourSearch(
            self._request,
            trial=trial,
            trial_s=self._effort / plans / INSTRUCTIONS_PER_S,
            budget=budget,
            least_s=solution.formula_bound_s,
        )

    def neighbours(
        self, plans: Sequence[SimulatedPlan], *, budget_s: float
    ) -> Iterator[SimulatedPlan]:
        """A plan that is better than all others, and made from one by changes.

        Args:
            plans: simulated.
            budget_s: seconds of a quiet core for simulating changes.
        """
        ranked = sorted(plans, key=merit)
        first = ranked[0].plan
        least_s = lower_bound(first, self._request.costs).seconds
        solution = _of_neighbours(least_s)
        search = self._neighbour_search(solution, len(plans), budget_s=budget_s)
        found = search.run([item.plan for item in ranked])
        gain = 1 - found.plan.predicted.iteration_s / first.predicted.iteration_s
        self._neighbours = NeighbourReport(evaluations=found.evaluations, gain=gain)
        if found.candidate is not None:
            origin = next(item for item in ranked if item.plan is found.start)
            note = (
                f"changed in simulation from {origin.label}, which takes "
                f"{origin.plan.predicted.iteration_s:.4g} s: {found.evaluations} plans were "
                f"simulated, and the step takes {gain:.1%} less than the best of those before"
            )
            step_s = found.plan.predicted.iteration_s
            yield SimulatedPlan(
                solution=replace(solution, notes=(note,)),
                candidate=replace(found.candidate, objective_s=step_s),
                plan=found.plan,
            )

    def choose(
        self,
        plans: Sequence[SimulatedPlan],
        left_out: Sequence[str],
        trials: Trials | None,
        *,
        devices: int,
    ) -> Plan:
        """The best plan, refined, with its report, on all devices that were asked for."""
        ranked = sorted(plans, key=merit)
        best_of: dict[str, SimulatedPlan] = {}
        for item in ranked:
            best_of.setdefault(item.solution.solver, item)
        usual, reordered, split = dict(best_of), dict(best_of), dict(best_of)
        effort_before = self._effort
        for solver, first in best_of.items():
            limit_s = math.inf if trials is not None else as_fast_as(split.values())
            spent = self._effort - effort_before
            each = self._instructions[_what_runs(first.plan)]
            if spent and spent + each > INSTRUCTIONS_OF_FIRST:
                continue  # it is large, and was not the best
            least_s = least_step_s(first.plan, self._request.costs)
            if least_s > limit_s or _step_s(first) > REFINED_WITHIN * limit_s:
                continue  # no order of it is the best
            usual[solver] = self._best_order(self._fused(first))
            reordered[solver] = self._on_shared_ranks(usual[solver])
            refined = self._best_backwards(reordered[solver])
            if _step_s(refined) <= _step_s(first):  # else a search has found more
                split[solver] = refined

        def is_refined(item: SimulatedPlan) -> bool:
            return item is best_of[item.solution.solver]

        finalists = [(split[t.solution.solver] if is_refined(t) else t, t) for t in ranked]
        # Of equals, one that a solver found is easier to explain than a change of it.
        finalists.sort(key=lambda pair: (*merit(pair[0]), pair[0].solution.solver == NEIGHBOURS))
        if trials is not None:
            finalists, trial_notes = run_trials(finalists, trials)
            self._search_notes += trial_notes
        elif self._asked.solver == "auto":
            finalists, plain_notes = plainest_first(finalists)
            self._search_notes += plain_notes
        best, origin = finalists[0]
        solver = best.solution.solver
        plain, fused = (usual[solver], reordered[solver]) if is_refined(origin) else (best, best)
        if self._asked.solver == "auto" and self._request.top > 1 and trials is None:
            best = self._both_changed(best)
        objective_s = best.candidate.objective_s
        # The solver's bound leaves out grids beside its own plans; simulated ones count.
        simulated_s = (t.candidate.objective_s for t in plans if t.solution is best.solution)
        bound_s = min((best.solution.formula_bound_s, *simulated_s))
        plan = self._on(devices, best.plan)
        used = {rank for unit in plan.units for rank in unit.all_ranks}
        idle = tuple(rank for rank in range(plan.devices) if rank not in used)
        report = best.plan.solver.model_copy(
            update={
                "name": best.solution.solver,
                "method": best.solution.method,
                "objective_s": objective_s,
                "formula_bound_s": bound_s,
                "formula_gap": objective_s / bound_s - 1 if bound_s else 0.0,
                "idle_ranks": idle,
                "measured_s": best.measured_s,
                "notes": (
                    *self._notes(best, idle, devices),
                    *order_notes(fused.plan, plain.plan),
                    *split_notes(best.plan, fused.plan),
                    *left_out,
                ),
                "neighbours": self._neighbours,
                "largest_sync_batch": largest_sync_batches(self._request, best.plan.units),
                "runners_up": (
                    *([runner_up(fused, FUSED)] if best.plan is not fused.plan else []),
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

    @property
    def _memory_bytes(self) -> float:
        """Memory of a device."""
        return self._request.cluster.device.memory_bytes

    def _best_order(self, best: SimulatedPlan) -> SimulatedPlan:
        """The chosen plan in the fastest order of its micro-batches that fits the memory."""
        plans = [best.plan]
        for units in other_orders(best.plan.units):
            if units != best.plan.units:
                with suppress(InvalidInputError):
                    plans.append(self._simulated(best.plan.model_copy(update={"units": units})))
        fitting = [p for p in plans if peak_bytes(p.predicted) <= self._memory_bytes]
        # The first of equals: forwards issued early that hide nothing only take memory.
        return replace(best, plan=min(fitting, key=lambda p: rounded(p.predicted.iteration_s)))

    def _on_shared_ranks(self, item: SimulatedPlan) -> SimulatedPlan:
        """The plan with the order in which its shared ranks idle least."""
        plan = self._ordered(item.plan)
        return item if plan is item.plan else replace(item, plan=plan)

    def _ordered(self, plan: Plan, leads: Sequence[int] = LEADS) -> Plan:
        """A simulated plan in its best order."""
        return best_order(
            plan,
            self._request.costs,
            simulated=self._simulated,
            fits=lambda plan: peak_bytes(plan.predicted) <= self._memory_bytes,
            leads=leads,
        )

    def _both_changed(self, best: SimulatedPlan) -> SimulatedPlan:
        """The best plan, or it with split backwards in an order that is found for them.

        Each alone may gain nothing. A baseline that is changed is a baseline no more.
        """
        request = self._request
        plan = best_backwards(
            best.plan,
            request.workload,
            request.cluster,
            lambda plan: self._ordered(self._simulated(plan), leads=()),
        )
        if plan is best.plan:
            return best
        solution = best.solution
        if best.is_baseline:
            note = f"changed in simulation from {best.label}"
            solution = replace(_of_neighbours(solution.formula_bound_s), notes=(note,))
        return replace(best, plan=plan, solution=solution, is_baseline=False)

    def _fused(self, item: SimulatedPlan) -> SimulatedPlan:
        """The plan with fused backwards, if these fit and can run."""
        units = fused_backwards(item.plan.units, self._request.workload)
        if units != item.plan.units:
            with suppress(InvalidInputError):
                plan = self._simulated(item.plan.model_copy(update={"units": units}))
                if peak_bytes(plan.predicted) <= self._memory_bytes:
                    objective_s = plan.predicted.iteration_s
                    candidate = replace(item.candidate, objective_s=objective_s)
                    return replace(item, plan=plan, candidate=candidate)
        return item

    def _best_backwards(self, fused: SimulatedPlan) -> SimulatedPlan:
        """Split backwards where they gain; the formula's optimum and baselines stay as they are."""
        request = self._request
        if request.top == 1 or fused.is_baseline:
            return fused
        plan = best_backwards(fused.plan, request.workload, request.cluster, self._simulated)
        return replace(fused, plan=plan)

    def _plan(self, solution: Solution, candidate: Candidate) -> Plan:
        request, training = self._request, self._training
        if candidate.zero is not None:
            training = training.model_copy(update={"zero": candidate.zero})
        units = tuple(_cut_units(candidate, request.workload, training.zero))
        return Plan(
            name=request.workload.name,
            workload=self._workload,
            profile=self._profile,
            cluster=request.cluster,
            devices=request.devices,
            training=training,
            depends_on=self._depends_on,
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
            units=pinned_backwards(units, request.workload),
            losses=placed_losses(request, candidate.units),
            waves=candidate.waves,
            in_turn=candidate.in_turn,
            order=candidate.order,
            predicted=Prediction(iteration_s=0.0, samples_per_s=0.0),
        )

    def _simulated(self, plan: Plan, lowered: LoweredPlan | None = None) -> Plan:
        key = _what_runs(plan)
        if key not in self._predicted:
            self._predicted[key] = self._simulate(plan, lowered)
        return plan.model_copy(update={"predicted": self._predicted[key]})

    def _simulate(self, plan: Plan, lowered: LoweredPlan | None) -> Prediction:
        step = simulated(plan, self._request.costs, lowered)
        self._instructions[_what_runs(plan)] = sum(map(len, step[0].program.instructions))
        self._effort += self._instructions[_what_runs(plan)]
        predicted = prediction(step[0], plan)
        if self._steps is not None and peak_bytes(predicted) <= self._memory_bytes:
            self._steps.keep(predicted, step)
        return predicted

    def _notes(self, best: SimulatedPlan, idle: tuple[int, ...], devices: int) -> list[str]:
        request = self._request
        notes = [*best.solution.notes, *best.candidate.notes]
        notes += [
            f"module {name} is in no task and is left out"
            for name in unused_modules(request.workload)
        ]
        if idle:
            notes.append(
                f"{len(idle)} of {counted(devices, 'device')} stay idle "
                f"({'rank' if len(idle) == 1 else 'ranks'} {rank_ranges(idle, ', ')}): "
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
        stragglers = straggler_note(best.plan, request.costs)
        if stragglers:
            notes.append(stragglers)
        beyond = extrapolations(best.plan, request.costs)
        if beyond:
            notes.append(f"beyond what was measured: {'; '.join(beyond)}")
        if self._dropped:
            reason = self._dropped[0].message
            notes.append(f"{counted(len(self._dropped), 'plan')} dropped out: {reason}")
        if self._too_large:
            notes.append(
                f"{counted(len(self._too_large), 'simulated plan')} did not fit the memory"
            )
        return [*notes, *self._search_notes]


def _cut_units(candidate: Candidate, workload: Workload, zero: int) -> Iterator[Unit]:
    """The units, with their ZeRO stage where it is another one than the plan's."""
    for unit in candidate.units:
        least = max(workload.zero_of(unit.module), candidate.zero or 0)
        own = least if unit.zero is None else unit.zero
        wanted = None if own == zero else own
        yield unit if unit.zero == wanted else unit.model_copy(update={"zero": wanted})


def _of_neighbours(least_s: float) -> Solution:
    return Solution(
        solver=NEIGHBOURS,
        method="simulation",
        candidates=(),
        formula_bound_s=least_s,
        closed_form=False,
    )


def _what_runs(plan: Plan) -> Hashable:
    """What of a solver's plan decides its step."""
    order = None if plan.order is None else plan.order.model_dump_json()
    settings = plan.devices, plan.training.zero, plan.in_turn, order
    return settings, plan.units, plan.losses, plan.waves


def _computes_of(units: Sequence[Unit]) -> int:
    """Forwards of a round, on all stages of all replicas."""
    return sum(len(unit.blocks) * sum(map(len, unit.microbatches)) for unit in units)


def as_fast_as(plans: Iterable[SimulatedPlan]) -> float:
    """Seconds of the longest step that is as good as the best of some plans."""
    return AS_FAST * min(map(_step_s, plans))


def _step_s(item: SimulatedPlan) -> float:
    return rounded(item.plan.predicted.iteration_s)


def file_reference(document: Document, path: str | Path | None, folder: Path) -> FileReference:
    """A file's path relative to the plan's folder, and its hash.

    Args:
        document: in that file.
        path: None where it has none: the hash is that of the file it would be saved in.
        folder: of the plan.
    """
    if path is None:
        return FileReference(path="", sha256=text_sha256(document_text(document)))
    return FileReference(path=relative_path(path, folder), sha256=file_sha256(path))


def planned_tasks(request: Request) -> dict[str, PlannedTask]:
    """The workload's tasks as the plan's file has them, for compiling and simulating.

    Raises:
        InvalidInputError: blocks are frozen that a module does not have.
    """
    planned: dict[str, PlannedTask] = {}
    for name, task in request.tasks.items():
        blocks = {m: request.costs.num_blocks(task=name, module=m) for m in task.modules}
        _check_frozen(task, blocks)
        owners = {m: request.workload.modules[m].share or m for m in task.modules}
        ties = {m: request.costs.profile.ties.get(owner, ()) for m, owner in owners.items()}
        planned[name] = planned_task(request.workload, task, blocks, ties)
    return planned


def _check_frozen(task: TaskView, blocks: Mapping[str, int]) -> None:
    """Only the profile knows how many blocks there are."""
    for module, frozen in task.frozen.items():
        for a, b in () if isinstance(frozen, bool) else frozen:
            if b > blocks[module]:
                raise InvalidInputError(
                    f"modules.{module}.frozen: [{a}, {b}] ends beyond its {blocks[module]} blocks",
                    hint=f"blocks count from 0, the last range may end at {blocks[module]}; if the "
                    "module has changed, profile it again",
                )


def placed_losses(request: Request, units: Sequence[Unit]) -> tuple[PlanLoss, ...]:
    """Cross-sample losses on all ranks that have their features, others on their host module's."""
    placed: list[PlanLoss] = []
    for name, task in request.tasks.items():
        problem = Problem(request=request, task=task)
        last = {
            module: max(
                (u for u in units if (u.task, u.module) == (name, module)),
                key=lambda u: u.blocks[-1],
            )
            for module in task.modules
        }
        for loss in task.loss_inputs:
            modules = (
                problem.synced_modules(loss)
                if loss in task.sync_batches
                else [m for m in task.modules if loss in problem.hosted_losses(m)]
            )
            ranks = sorted({rank for module in modules for rank in last_stage_ranks(last[module])})
            placed.append(PlanLoss(name=loss, task=name, ranks=tuple(ranks)))
    return tuple(placed)


def none_fits(
    too_large: Sequence[float],
    dropped: Sequence[InvalidInputError],
    memory_bytes: float,
    notes: Sequence[str],
) -> InfeasibleError | InvalidInputError:
    """The error for a search without a plan.

    Args:
        too_large: peak memory of each candidate that does not fit, bytes.
        dropped: errors of the candidates that cannot run.
        memory_bytes: memory of a device.
        notes: remarks on the search.
    """
    if not too_large:
        return dropped[0]
    return InfeasibleError(
        f"the smallest of {counted(len(too_large), 'plan')} holds {size(min(too_large))} "
        f"on a device, {'; '.join((missing(min(too_large), memory_bytes), *notes))}",
        hint="raise --top, use more devices, recompute: full, or a smaller sync_batch",
    )


def extrapolations(plan: Plan, costs: CostModel) -> list[str]:
    """Sizes of this plan beyond those that were measured."""
    asked = CostModel(costs.profile, costs.cluster, costs.training)
    for unit in plan.units:
        for samples in sorted({number for sizes in unit.microbatches for number in sizes}):
            # Of shares of a sample's items there are no points.
            own = max(1, samples * unit.shards / unit.tp)
            asked.forward_s(task=unit.task, module=unit.module, tp=unit.shards, samples=own)
    for task in plan.tasks.values():
        for name, loss in task.losses.items():
            if loss.sync_batch is not None:
                asked.loss_s(loss=name, samples=loss.sync_batch)
    return asked.extrapolations()


def straggler_note(plan: Plan, costs: CostModel) -> str | None:
    """The predicted work of the busiest replicas; None where all samples cost the same."""
    factors: list[str] = []
    for unit in plan.units:
        samples = plan.tasks[unit.task].period
        factor = costs.straggler(task=unit.task, module=unit.module, dp=unit.dp, samples=samples)
        if factor >= _LEAST_STRAGGLER:
            factors.append(f"{factor:.3g} x the mean of {unit.name}'s {unit.dp}")
    if not factors:
        return None
    return f"by the profile's data the busiest replicas have {', '.join(factors)}"
