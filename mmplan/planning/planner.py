"""From a workload and a profile to a plan: solve, compile, simulate the best few, choose."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmplan.costs.program_costs import CostModel, check_cluster
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.candidate_plans import (
    INSTRUCTIONS_OF_FIRST,
    INSTRUCTIONS_PER_S,
    CandidatePlans,
)
from mmplan.planning.largest_sync_batch import largest_sync_batches
from mmplan.planning.lower_bound import lower_bound
from mmplan.planning.measured_trials import (
    SimulatedPlan,
    Trials,
    as_fast_as,
    merit,
    plainest_first,
    run_trials,
    runner_up,
)
from mmplan.planning.neighbours.search import UNIFORM_SHARE, NeighbourSearch
from mmplan.planning.neighbours.trials import LayoutTrials
from mmplan.planning.order_search import order_notes, sums_notes
from mmplan.planning.recomputation import best_recomputation, free_modules
from mmplan.planning.refinement import NEIGHBOURS, RefinedPlan, Refinement, of_neighbours
from mmplan.planning.uneven_shares import shares_notes
from mmplan.planning.unit_polish import polish_notes
from mmplan.planning.unit_schedules import split_notes
from mmplan.processes import rare_collections
from mmplan.schema.agreement import check_profiled
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
    PlannedTraining,
    RunnerUp,
)
from mmplan.schema.profile import Profile
from mmplan.schema.workload import TaskView, Workload, check_tasks, unused_modules
from mmplan.simulation.symmetry import BestSteps
from mmplan.solvers.problem import (
    Candidate,
    NotApplicableError,
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
# End of the label of the same plan with fused backwards.
FUSED = ", fused backwards"
# Plans beyond the first of each kind are simulated for at most this many search budgets.
SIMULATION_BUDGETS = 3
# Of those large ones a formula's value may be more than the best step by this factor; chosen by
# hand: where formulas are wrong they promise too much.
FORMULA_SLACK = 1.25
# Of it, what a plan takes that the memory refuses before it is compiled.
REFUSED_PRICE = 0.3
# Patience is longer by this factor while no plan fits the memory; chosen by hand.
PATIENCE_WITHOUT_PLAN = 4
# Up to this many devices the search looks at all of them; chosen by hand.
ALWAYS_SEARCHED = 2_048
# A plan's file lists the peak memory of each of its devices.
MOST_DEVICES = 1_000_000
# Plans that take up to this times the best step are all refined; chosen by hand.
NEARLY_AS_FAST = 1.02
# Where the bound leaves more than this to gain, and the budget is for so many trials of neighbours,
# there are other searches by other estimates. Chosen by hand.
GAP_OF_OTHERS = 0.1
TRIALS_OF_OTHERS = 20
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
            memory. ``auto`` changes plans with what is left, up to three budgets.
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
        search = _PlanSearch(CandidatePlans(request, files, training, asked, steps))
        left_out: list[str] = []
        try:
            solutions, left_out = solutions_of(request, solver, progress)
            plans = search.simulate_all(
                solutions, patience_s=patience_s, all_of_them=trials is not None, progress=progress
            )
        except InfeasibleError:
            plans = [] if solver != "auto" or top == 1 else search.first_fit(budget_s=budget_s)
            if not plans:
                raise
        if solver == "auto" and top > 1:
            spare_s = min(search.patience_left_s, SIMULATION_BUDGETS * budget_s)
            own_s = NEIGHBOUR_BUDGETS * budget_s + max(0.0, spare_s)
            plans += search.neighbours(plans, budget_s=own_s)
        plan = search.choose(plans, left_out, trials, devices=wanted)
        ordinary = None if top == 1 else search.ordinary(plans)
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


class _PlanSearch:
    """Simulates what the solvers offer, changes it, and chooses."""

    def __init__(self, plans: CandidatePlans) -> None:
        self._plans, self._request = plans, plans.request
        self._refinement = Refinement(plans)
        self._search_notes: list[str] = []
        self._neighbours: NeighbourReport | None = None
        # What is left of the patience for the solvers' plans.
        self.patience_left_s = 0.0

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
        sizes = [self._plans.about_instructions(*pair) for pair in first]
        by_size = sorted(range(len(first)), key=sizes.__getitem__)
        for position, place in enumerate(by_size):
            solution, candidate = first[place]
            progress(position, total, f"simulated, now {solution.solver}")
            is_large = self._plans.effort + sizes[place] > INSTRUCTIONS_OF_FIRST
            own_s = limit_s() if is_large else math.inf
            if candidate.objective_s <= FORMULA_SLACK * own_s:
                found = [*self._plans.attempt(solution, candidate, own_s)]
                plans += found
                places += [(place, item) for item in found]
        # Of equal plans the first solver's is taken.
        plans[:] = [item for _, item in sorted(places, key=lambda pair: pair[0])]
        # No plan is begun for which too little patience is left.
        each = self._plans.effort / max(1, len(first))
        effort_before = min(self._plans.effort, INSTRUCTIONS_OF_FIRST)
        for position, (solution, candidate) in enumerate(others):
            patient_s = patience_s if plans else PATIENCE_WITHOUT_PLAN * patience_s
            left = patient_s * INSTRUCTIONS_PER_S - (self._plans.effort - effort_before)
            if left < each:
                self._search_notes.append(
                    f"{len(others) - position} of {counted(total, 'plan')} "
                    "were not simulated for lack of time; a larger --budget looks at them"
                )
                break
            progress(len(first) + position, total, f"simulated, now {solution.solver}")
            plans += self._plans.attempt(solution, candidate, limit_s(), left)
        else:
            progress(total, total, "simulated")
        if not plans:
            raise _none_fits(self._plans, self._search_notes)
        spent = self._plans.effort - effort_before
        self.patience_left_s = patience_s - spent / INSTRUCTIONS_PER_S
        return plans

    def ordinary(self, plans: Sequence[SimulatedPlan]) -> RunnerUp | None:
        """The best plan that gives every module the same degrees; None where none fits.

        It is refined unless it is large.
        """
        uniform = [item for item in plans if item.solution.solver in UNIFORM]
        if not uniform:
            with suppress(InfeasibleError, NotApplicableError):
                request = replace(self._request, method=None)
                solutions, _ = solutions_of(request, UNIFORM[0], lambda done, total, note: None)
                first, _ = first_of_each_kind(solutions)
                uniform = [item for pair in first for item in self._plans.attempt(*pair)]
        if not uniform:
            return None
        firsts = _best_of_each(sorted(uniform, key=merit))
        refined = self._refinement.run(firsts, all_of_them=False, both=False, is_best_first=False)
        return runner_up(min((own.final for own in refined), key=merit))

    def first_fit(self, *, budget_s: float) -> list[SimulatedPlan]:
        """A plan that fits where those of the solvers do not; nothing where none is found."""
        solution = of_neighbours(0.0)
        found = self._neighbour_search(solution, 1, budget_s=budget_s).first_fit()
        if found is None:
            return []
        self._search_notes.append("no solver has a plan that fits: this one comes from the search")
        candidate, plan = found
        candidate = replace(candidate, objective_s=plan.predicted.iteration_s)
        return [SimulatedPlan(solution=solution, candidate=candidate, plan=plan)]

    def _neighbour_search(
        self, solution: Solution, plans: int, *, budget_s: float, gap: float = 0.0
    ) -> NeighbourSearch:
        budget = SearchBudget(budget_s)

        def trial(candidate: Candidate) -> tuple[Plan | None, float]:
            before, plan, needed = self._plans.effort, None, math.inf
            with suppress(InvalidInputError):
                left = budget.left_s * INSTRUCTIONS_PER_S
                plan, needed = self._plans.tried(solution, candidate, most=left)
            is_compiled = plan is not None and self._plans.is_compiled(plan)
            fits = needed <= self._plans.memory_bytes
            # Others were lowered only; those that are too large, for more than a small one takes.
            price = 1.0 if is_compiled or fits else REFUSED_PRICE
            budget.spend(price * (self._plans.effort - before) / INSTRUCTIONS_PER_S)
            return plan if is_compiled and fits else None, needed

        trial_s = self._plans.effort / plans / INSTRUCTIONS_PER_S
        trials = LayoutTrials(
            self._request,
            trial=trial,
            critical_modules=self._plans.critical_modules,
            trial_s=trial_s,
            budget=budget,
        )
        again = gap > GAP_OF_OTHERS and budget_s > TRIALS_OF_OTHERS * trial_s
        return NeighbourSearch(trials, least_s=solution.formula_bound_s, again=again)

    def neighbours(
        self, plans: Sequence[SimulatedPlan], *, budget_s: float
    ) -> Iterator[SimulatedPlan]:
        """The best plan of each search that is made from another by changes.

        Args:
            plans: simulated.
            budget_s: seconds of a quiet core for simulating changes of these; plans that are
                unlike all of them have their share beside it.
        """
        ranked = sorted(plans, key=merit)
        first = ranked[0].plan
        least_s = lower_bound(first, self._request.costs).seconds
        solution = of_neighbours(least_s)
        gap = first.predicted.iteration_s / least_s - 1 if least_s else math.inf
        all_s = budget_s / (1 - UNIFORM_SHARE)
        search = self._neighbour_search(solution, len(plans), budget_s=all_s, gap=gap)
        found = search.run([item.plan for item in ranked])
        first_s = first.predicted.iteration_s
        gain = 1 - found[0].plan.predicted.iteration_s / first_s
        self._neighbours = NeighbourReport(evaluations=search.evaluations, gain=gain)
        for best in found:
            if best.candidate is None:
                continue
            origin = next(item for item in ranked if item.plan is best.start)
            step_s = best.plan.predicted.iteration_s
            more = f"{abs(step_s / first_s - 1):.1%} {'more' if step_s > first_s else 'less'}"
            note = (
                f"changed in simulation from {origin.label}, which takes "
                f"{origin.plan.predicted.iteration_s:.4g} s: {search.evaluations} plans were "
                f"simulated, and the step takes {more} than the best of those before"
            )
            yield SimulatedPlan(
                solution=replace(solution, notes=(note,)),
                candidate=replace(best.candidate, objective_s=step_s),
                plan=best.plan,
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
        firsts = _best_of_each(ranked)
        both = self._plans.asked.solver == "auto" and self._request.top > 1 and trials is None
        results = self._refinement.run(firsts, all_of_them=trials is not None, both=both)
        refined = {id(item): result for item, result in zip(firsts, results, strict=True)}
        finalists = [(refined[id(t)].final if id(t) in refined else t, t) for t in ranked]
        # Of equals, one that a solver found is easier to explain than a change of it.
        finalists.sort(key=lambda pair: (*merit(pair[0]), pair[0].solution.solver == NEIGHBOURS))
        if trials is not None:
            finalists, trial_notes = run_trials(finalists, trials)
            self._search_notes += trial_notes
        elif self._plans.asked.solver == "auto":
            finalists, plain_notes = plainest_first(finalists)
            self._search_notes += plain_notes
        best, origin = finalists[0]
        own = refined.get(id(origin)) or RefinedPlan(plain=best, reordered=best, split=best)
        splits = own.split.plan is not own.reordered.plan
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
                    *self._notes(best, own.split.plan, idle, devices),
                    *order_notes(own.reordered.plan, own.plain.plan),
                    *split_notes(own.split.plan, own.reordered.plan),
                    *shares_notes(own.unpolished.plan, own.split.plan),
                    *polish_notes(own.computed.plan, own.unpolished.plan),
                    *sums_notes(own.final.plan, own.computed.plan),
                    *left_out,
                ),
                "neighbours": self._neighbours,
                "largest_sync_batch": largest_sync_batches(self._request, best.plan.units),
                "runners_up": (
                    *([runner_up(own.reordered, FUSED)] if splits else []),
                    *(runner_up(t) for t, source in finalists if source is not origin),
                ),
            }
        )
        return plan.model_copy(update={"solver": report})

    def _on(self, devices: int, plan: Plan) -> Plan:
        """The plan with the idle devices that were left out of the search."""
        if devices == plan.devices:
            return plan
        return self._plans.simulated(plan.model_copy(update={"devices": devices}))

    def _notes(
        self, best: SimulatedPlan, searched: Plan, idle: tuple[int, ...], devices: int
    ) -> list[str]:
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
        gpipe = [unit.name for unit in searched.units if unit.schedule.kind == "gpipe"]
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
        if self._plans.dropped:
            reason = self._plans.dropped[0].message
            notes.append(f"{counted(len(self._plans.dropped), 'plan')} dropped out: {reason}")
        if self._plans.too_large:
            notes.append(
                f"{counted(len(self._plans.too_large), 'simulated plan')} did not fit the memory"
            )
        return [*notes, *self._search_notes]


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


def _best_of_each(ranked: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """The first plan of each solution, and those that are about as fast as the first of all."""
    best_of: dict[int, SimulatedPlan] = {}
    limit_s = NEARLY_AS_FAST * ranked[0].plan.predicted.iteration_s
    return [
        item
        for item in ranked
        if best_of.setdefault(id(item.solution), item) is item
        or item.plan.predicted.iteration_s <= limit_s
    ]


def _none_fits(plans: CandidatePlans, notes: Sequence[str]) -> InfeasibleError | InvalidInputError:
    """The error for a search without a plan, with remarks on the search."""
    if not plans.too_large:
        return plans.dropped[0]
    least = min(plans.too_large)
    return InfeasibleError(
        f"the smallest of {counted(len(plans.too_large), 'plan')} holds {size(least)} "
        f"on a device, {'; '.join((missing(least, plans.memory_bytes), *notes))}",
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
