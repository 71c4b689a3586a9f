"""From a solver's candidate to a plan: lowered, simulated, held against memory and time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from mmplan.errors import InvalidInputError
from mmplan.planning.measured_trials import SimulatedPlan, peak_bytes
from mmplan.planning.order_search import timed
from mmplan.planning.stage_cuts import StageCuts
from mmplan.planning.unit_schedules import pinned_backwards
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.agreement import depended_on, planned_task
from mmplan.schema.plan import (
    Asked,
    FileReference,
    Plan,
    PlanLoss,
    PlannedTask,
    PlannedTraining,
    Prediction,
    SolverReport,
    Unit,
)
from mmplan.schema.workload import TaskView, Workload
from mmplan.simulation.critical_path import critical_modules
from mmplan.simulation.least_step import least_step_s
from mmplan.simulation.peak_memory import memory_lower_bound
from mmplan.simulation.step import Simulation, prediction
from mmplan.simulation.symmetry import BestSteps, CompiledStep, compiled
from mmplan.solvers.placement import last_stage_ranks
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.solvers.registry import BASELINES

# Instructions that a quiet core compiles and simulates in a second. Patience is counted in
# instructions, so that a busy machine finds the same plans.
INSTRUCTIONS_PER_S = 100_000
# Instructions that each plan counts beside its own: a small one takes time too.
INSTRUCTIONS_PER_PLAN = 1_000
# Ranks of units, and forwards, that are lowered in the time of one instruction.
RANKS_PER_INSTRUCTION = 2
FORWARDS_PER_INSTRUCTION = 4
# Instructions of a plan for each of its forwards, about: it has backwards and messages too.
INSTRUCTIONS_PER_FORWARD = 6
# So many graphs are held for plans that differ from the last ones in their orders only.
_LOWERED = 16
# The first plans of each kind are simulated whatever their formulas say up to so many instructions,
# small plans first; large ones after that where they may be the best. Chosen by hand: of some tens
# of devices all are simulated.
INSTRUCTIONS_OF_FIRST = 100_000


class CandidatePlans:
    """Turns candidates into plans and simulates these; remembers what was simulated.

    Args:
        request: that all plans answer.
        files: the workload's and the profile's.
        training: of the plans.
        asked: what the user asked for.
        steps: keeps the shortest steps that fit the memory.

    Attributes:
        cuts: of the modules, with heavy stages late and early.
        effort: so far, in instructions.
        too_large: peak memory of each candidate that does not fit, bytes.
        dropped: errors of the candidates that cannot run.
    """

    def __init__(
        self,
        request: Request,
        files: tuple[FileReference, FileReference],
        training: PlannedTraining,
        asked: Asked,
        steps: BestSteps | None,
    ) -> None:
        self.request, self.asked, self.cuts = request, asked, StageCuts(request)
        self.effort = 0
        self.too_large: list[float] = []
        self.dropped: list[InvalidInputError] = []
        self._training, self._steps = training, steps
        self._workload, self._profile = files
        self._tasks = planned_tasks(request)
        self._depends_on = depended_on(
            request.workload, request.tasks, working=request.costs.profile.data
        )
        # Several solvers find the same plan.
        self._predicted: dict[Hashable, Prediction] = {}
        self._instructions: dict[Hashable, int] = {}
        # Those used last at the end.
        self._lowered: dict[Hashable, LoweredPlan] = {}
        # What was simulated last.
        self._last: tuple[Prediction, Simulation] | None = None
        # Bytes of plans that were compiled, and then not simulated, for they do not fit.
        self._refused: dict[Hashable, float] = {}

    @property
    def memory_bytes(self) -> float:
        """Memory of a device."""
        return self.request.cluster.device.memory_bytes

    def fits(self, plan: Plan) -> bool:
        """Whether a simulated plan fits the memory."""
        return peak_bytes(plan.predicted) <= self.memory_bytes

    def is_compiled(self, plan: Plan) -> bool:
        """Whether a plan was compiled; not all of these were simulated."""
        return _what_runs(plan) in self._instructions

    def critical_modules(self, plan: Plan) -> frozenset[tuple[str, str]]:
        """:func:`critical_modules` of the plan that was simulated last; of others none."""
        if self._last is None or self._last[0] is not plan.predicted:
            return frozenset()
        return critical_modules(self._last[1])

    def instructions_of(self, plan: Plan) -> int:
        """Of a plan that was compiled."""
        return self._instructions[_what_runs(plan)]

    def lowered(self, plan: Plan) -> LoweredPlan:
        """The plan lowered, with the graph of one before it where only orders differ.

        Raises:
            InvalidInputError: it cannot run.
        """
        key = _what_is_lowered(plan)
        found = self._lowered.pop(key, None) or lower_plan(plan)
        # Its orders are the plan's own.
        self._lowered[key] = replace(found, plan=plan)
        if len(self._lowered) > _LOWERED:
            del self._lowered[next(iter(self._lowered))]
        return replace(found, plan=plan)

    def about_instructions(self, solution: Solution, candidate: Candidate) -> int:
        """Of the candidate's plan, about; 0 where it cannot run."""
        with suppress(InvalidInputError):
            lowered = self.lowered(self.plan(solution, candidate))
            return INSTRUCTIONS_PER_FORWARD * num_forwards(lowered)
        return 0

    def attempt(
        self,
        solution: Solution,
        candidate: Candidate,
        limit_s: float = math.inf,
        most: float = math.inf,
    ) -> Iterator[SimulatedPlan]:
        """The candidate's simulated plan; nothing where it does not fit, run or keep the limits."""
        try:
            plan, needed = self.tried(solution, candidate, limit_s, most)
        except InvalidInputError as error:
            # Stage orders of this candidate may deadlock, or its tied blocks have several tp
            # degrees; other candidates may still run.
            self.dropped.append(error)
            return
        if needed > self.memory_bytes:
            self.too_large.append(needed)
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

    def tried(
        self,
        solution: Solution,
        candidate: Candidate,
        limit_s: float = math.inf,
        most: float = math.inf,
    ) -> tuple[Plan, float]:
        """:meth:`with_bytes` of the candidate's plan, heavy stages early if that fits.

        Raises:
            InvalidInputError: it cannot run.
        """
        plan = self.plan(solution, candidate)
        if (earlier := self.cuts.early(plan)) is not plan:
            earlier, needed = self.with_bytes(*self._timed(earlier, candidate), limit_s, most)
            if needed <= self.memory_bytes:
                return earlier, needed
        return self.with_bytes(*self._timed(plan, candidate), limit_s, most)

    def _timed(self, plan: Plan, candidate: Candidate) -> tuple[Plan, LoweredPlan | None]:
        """The plan with the times of its order, and lowered where these needed it."""
        if not candidate.is_timed:
            return plan, None
        lowered = self.lowered(plan)
        return timed(plan, lowered, self.request.costs), lowered

    def with_bytes(
        self, plan: Plan, lowered: LoweredPlan | None, limit_s: float, most: float
    ) -> tuple[Plan, float]:
        """A plan, and the bytes that it needs at least; of a simulated one all.

        It is simulated where it fits the memory and may take no more than ``limit_s``, with no
        more than ``most`` instructions, about.

        Raises:
            InvalidInputError: it cannot run.
        """
        key = _what_runs(plan)
        if key in self._refused:
            return plan, self._refused[key]
        if key in self._predicted:
            plan = self.simulated(plan)
            return plan, peak_bytes(plan.predicted)
        lowered = lowered or self.lowered(plan)
        forwards = num_forwards(lowered)
        ranks = sum(u.dp * u.pp * u.tp for u in plan.units)
        self.effort += INSTRUCTIONS_PER_PLAN
        self.effort += forwards // FORWARDS_PER_INSTRUCTION + ranks // RANKS_PER_INSTRUCTION
        if INSTRUCTIONS_PER_FORWARD * forwards > most:
            return plan, 0.0
        if limit_s < math.inf:
            least_s = least_step_s(plan, self.request.costs, lowered, as_planned=True)
            if least_s > limit_s:
                return plan, 0.0
        needed = memory_lower_bound(plan, self.request.costs, lowered)
        if needed > self.memory_bytes:
            return plan, needed
        program = self._compiled(plan, lowered)
        if program.peak_bytes > self.memory_bytes:
            self._refused[key] = program.peak_bytes
            return plan, program.peak_bytes
        self._predicted[key] = self._simulate(program)
        return plan.model_copy(update={"predicted": self._predicted[key]}), program.peak_bytes

    def plan(self, solution: Solution, candidate: Candidate) -> Plan:
        """The candidate as a plan that is not simulated yet."""
        request, training = self.request, self._training
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
                asked=self.asked,
            ),
            units=pinned_backwards(units, request.workload),
            losses=placed_losses(request, candidate.units),
            waves=candidate.waves,
            in_turn=candidate.in_turn,
            order=candidate.order,
            predicted=Prediction(iteration_s=0.0, samples_per_s=0.0),
        )

    def simulated(self, plan: Plan) -> Plan:
        """The plan with its prediction.

        Raises:
            InvalidInputError: it cannot run.
        """
        key = _what_runs(plan)
        if key not in self._predicted:
            self._predicted[key] = self._simulate(self._compiled(plan, self.lowered(plan)))
        return plan.model_copy(update={"predicted": self._predicted[key]})

    def _compiled(self, plan: Plan, lowered: LoweredPlan) -> CompiledStep:
        self._last = None  # large steps of large plans are not held beside the next one
        program = compiled(plan, self.request.costs, lowered)
        self._instructions[_what_runs(plan)] = program.num_instructions
        # One price, of what does not fit and is not simulated too: about right for both together.
        self.effort += program.num_instructions
        return program

    def _simulate(self, program: CompiledStep) -> Prediction:
        step = program.simulated()
        predicted = prediction(step[0], program.plan)
        self._last = predicted, step[0]
        if self._steps is not None and peak_bytes(predicted) <= self.memory_bytes:
            self._steps.keep(predicted, step)
        return predicted


def _cut_units(candidate: Candidate, workload: Workload, zero: int) -> Iterator[Unit]:
    """The units, with their ZeRO stage where it is another one than the plan's."""
    for unit in candidate.units:
        least = max(workload.zero_of(unit.module), candidate.zero or 0)
        own = least if unit.zero is None else unit.zero
        wanted = None if own == zero else own
        yield unit if unit.zero == wanted else unit.model_copy(update={"zero": wanted})


def _what_runs(plan: Plan) -> Hashable:
    """What of a solver's plan decides its step."""
    order = None if plan.order is None else plan.order.model_dump_json()
    settings = plan.devices, plan.training.zero, plan.in_turn, order
    return settings, plan.units, plan.losses, plan.waves


def _what_is_lowered(plan: Plan) -> Hashable:
    """What of a solver's plan decides its graph and its quotient: no times and no leads."""
    units = (
        (
            *(unit.name, unit.task, unit.module, unit.tp, unit.pp, unit.ranks, unit.blocks),
            *(unit.microbatches, unit.items, unit.zero, unit.schedule.kind),
            *(unit.schedule.split_backward, unit.schedule.even_in_flight),
        )
        for unit in plan.units
    )
    return plan.devices, plan.training.zero, plan.in_turn, plan.losses, *units


def num_forwards(lowered: LoweredPlan) -> int:
    """Forwards of all ranks that are simulated."""
    return sum(
        len(group) * len(row)
        for stage in lowered.simulated_graph.stages
        for group, row in zip(stage.ranks, stage.microbatches, strict=True)
    )


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
