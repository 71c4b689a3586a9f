"""The input and output of solvers, and one task on one cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from mmplan.costs.block_ranges import Blocks, gradient_blocks
from mmplan.costs.program_costs import CostModel
from mmplan.errors import InvalidInputError
from mmplan.program.lower import trainable_ranges
from mmplan.schema.base import ZeroStage
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Order, ScalingCurve, Unit, Wave
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import TaskView, Workload
from mmplan.solvers.cost_table import ModuleCosts


class NotApplicableError(InvalidInputError):
    """The solver does not support this workload; ``auto`` goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of ``solve``.

    Attributes:
        devices: ranks 0..devices-1 of the cluster.
        method: of the solver, None for its default.
        top: number of candidates to return, best first.
        budget_s: seconds for searches that are not exact.
        zero: least ZeRO stage of all modules, where a solver wants more than the workload.
        solved: answers of other solvers to this request, by name, as far as they are known.
    """

    workload: Workload
    tasks: Mapping[str, TaskView]
    costs: CostModel
    cluster: Cluster
    devices: int
    method: str | None = None
    top: int = 8
    budget_s: float = 1.0
    zero: int = 0
    solved: Mapping[str, Solution] = field(default_factory=dict[str, "Solution"])

    def only_task(self, solver: str) -> TaskView:
        """The workload's task, for solvers of a single one.

        Raises:
            NotApplicableError: there are several.
        """
        if len(self.tasks) > 1:
            raise NotApplicableError(
                f"{solver} plans one task, this workload has {', '.join(self.tasks)}",
                hint="choose one with --tasks, or plan them together with --solver mpsp",
            )
        return next(iter(self.tasks.values()))

    def check_exact(self, solver: str) -> None:
        """Refuse a method of a solver that has one only.

        Raises:
            InvalidInputError: another one than exact.
        """
        if self.method not in (None, "exact"):
            raise InvalidInputError(
                f"--method {self.method}: {solver} knows exact", hint="leave --method out"
            )

    def check_not_interleaved(self, solver: str) -> None:
        """Refuse a workload that asks for interleaved chunks, for solvers without them.

        Raises:
            NotApplicableError: a module's plan does not allow vpp 1.
        """
        for task in self.tasks.values():
            for name in task.modules:
                if not self.workload.modules[name].plan.allows("vpp", 1):
                    raise NotApplicableError(
                        f"modules.{name}.plan.vpp: {solver} does not interleave chunks",
                        hint="leave vpp out, or use --solver convex",
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Units with their ranks, and the value of the solver's formula for them.

    Attributes:
        closed_form: as :attr:`Solution.closed_form`, for this plan.
        kind: of plan, where a solver has several; the first of each kind is always simulated.
        waves: order of the units' forwards, where units are slices.
        in_turn: tasks that run one after another.
        zero: ZeRO stage of this plan, None for the workload's; of units whose own is absent the
            least one.
        order: on ranks that several units share, None for the usual one.
        is_timed: the nominal times of this order are the profile's.
    """

    units: tuple[Unit, ...]
    objective_s: float
    notes: tuple[str, ...] = ()
    closed_form: bool = True
    kind: str = ""
    waves: tuple[Wave, ...] = ()
    in_turn: tuple[str, ...] = ()
    zero: ZeroStage | None = None
    order: Order | None = None
    is_timed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's candidates, best formula value first, and its proof.

    Attributes:
        formula_bound_s: no plan of the solver's search space has a smaller formula value; of
            candidates without a closed form, only the simulated ones count.
        closed_form: whether the formula has every wait of the plan's order. It lacks some where
            modules take each other's outputs in different micro-batches, or where losses have
            sync batches of different sizes. The objective of such a plan is the larger of its
            formula and its simulated time.
        idle_because: the reason for idle devices, if there are some.
        curves: scaling curve of each MetaOp, where the solver computes them.
    """

    solver: str
    method: str
    candidates: tuple[Candidate, ...]
    formula_bound_s: float
    closed_form: bool = True
    notes: tuple[str, ...] = ()
    idle_because: str = "no module gets faster with them"
    curves: tuple[ScalingCurve, ...] = ()


def first_of_each_kind(
    solutions: Sequence[Solution],
) -> tuple[list[tuple[Solution, Candidate]], list[tuple[Solution, Candidate]]]:
    """The first candidate of each kind of each solver, and the other candidates, best first."""
    seen: set[tuple[str, str]] = set()
    first: list[tuple[Solution, Candidate]] = []
    others: list[tuple[Solution, Candidate]] = []
    for solution in solutions:
        for candidate in solution.candidates:
            key = solution.solver, candidate.kind
            (others if key in seen else first).append((solution, candidate))
            seen.add(key)
    return first, sorted(others, key=lambda pair: pair[1].objective_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProperties:
    """Properties of a stage that do not depend on degrees and micro-batches.

    Attributes:
        trainable: the parts of the stage that train.
        input_gradient: whether it sends gradients back, since something before it trains.
        passed: the blocks that a gradient passes; None where no gradient does.
        hosted: per-sample losses computed with it.
    """

    trainable: tuple[Blocks, ...]
    input_gradient: bool
    passed: Blocks | None
    hosted: tuple[str, ...]


class Problem:
    """One task: its rounds, and its modules' stages, times and bytes.

    Attributes:
        devices: N.
        round_samples: of one sync batch, or of the batch.
        rounds: per optimizer step, G.
        memory_bytes: of a device.
    """

    def __init__(self, *, request: Request, task: TaskView) -> None:
        self.request, self.task, self.costs = request, task, request.costs
        self.devices = request.devices
        self.round_samples = task.period
        self.rounds = task.batch // task.period
        self.memory_bytes = request.cluster.device.memory_bytes
        self._stages: dict[tuple[str, Blocks], StageProperties] = {}
        self.hosted_losses = cache(self._hosted_losses)
        self.module_costs = cache(self._module_costs)

    def _module_costs(self, module: str) -> ModuleCosts:
        """A module's rows of the cost table."""
        blocks = [self.stage(module, (b, b + 1)) for b in range(self.blocks(module))]
        return ModuleCosts(
            self.costs,
            task=self.task.name,
            module=module,
            passed=[block.passed is not None for block in blocks],
            trains=[bool(block.trainable) for block in blocks],
            losses=self.hosted_losses(module),
            recompute=cast(Recompute, self.request.workload.modules[module].recompute),
            round_samples=self.round_samples,
            zero=self.zero_of(module),
        )

    def zero_of(self, module: str) -> int:
        """ZeRO stage of a module's parameters."""
        return max(self.request.workload.zero_of(module), self.request.zero)

    def blocks(self, module: str) -> int:
        """Blocks of a module."""
        return self.costs.num_blocks(task=self.task.name, module=module)

    def producers(self, module: str) -> tuple[str, ...]:
        """Modules whose outputs a module, or a loss computed with it, takes."""
        return tuple(dict.fromkeys((*self.into_first(module), *self.into_last(module))))

    def into_first(self, module: str) -> list[str]:
        """Modules whose outputs the first block takes."""
        return [s.module for s in self.task.inputs[module] if s.module]

    def into_last(self, module: str) -> list[str]:
        """Other modules whose outputs the losses of the last stage take."""
        return [
            s.module
            for loss in self.hosted_losses(module)
            for s in self.task.loss_inputs[loss]
            if s.module and s.module != module
        ]

    def consumers(self, module: str) -> tuple[str, ...]:
        """Modules that take a module's output."""
        return tuple(m for m in self.task.modules if module in self.producers(m))

    def chained(self) -> bool:
        """Whether some module takes another's output."""
        return any(self.producers(module) for module in self.task.modules)

    def closed_form(self) -> bool:
        """Whether the formulas have every wait: no chains, and one size of sync batch."""
        sizes = set(self.task.sync_batches.values())
        return not self.chained() and len(sizes) <= 1

    def _hosted_losses(self, module: str) -> tuple[str, ...]:
        """Per-sample losses whose latest input is the module; its last stage computes them."""
        order = self.task.modules
        return tuple(
            loss
            for loss, sources in self.task.loss_inputs.items()
            if loss not in self.task.sync_batches
            and max((order.index(s.module) for s in sources if s.module), default=-1)
            == order.index(module)
        )

    def synced_modules(self, loss: str) -> tuple[str, ...]:
        """Modules whose features a cross-sample loss takes."""
        return tuple(dict.fromkeys(s.module for s in self.task.loss_inputs[loss] if s.module))

    def stage(self, module: str, blocks: Blocks) -> StageProperties:
        """The properties of a stage; cached."""
        key = module, blocks
        if key not in self._stages:
            trainable = self.trainable(module, blocks)
            takes = self._takes_gradient(module, blocks)
            last = blocks[1] == self.blocks(module)
            self._stages[key] = StageProperties(
                trainable=trainable,
                input_gradient=takes,
                passed=gradient_blocks(blocks, trainable, input_gradient=takes),
                hosted=self.hosted_losses(module) if last else (),
            )
        return self._stages[key]

    def trainable(self, module: str, blocks: Blocks) -> tuple[Blocks, ...]:
        """The parts of a stage that train."""
        return tuple(trainable_ranges(blocks, self.task.frozen[module]))

    def makes_gradient(self, module: str) -> bool:
        """Whether anything in a module or before it trains."""
        return bool(self.trainable(module, (0, self.blocks(module)))) or any(
            self.makes_gradient(producer) for producer in self.producers(module)
        )

    def _takes_gradient(self, module: str, blocks: Blocks) -> bool:
        if blocks[0] > 0 and self.trainable(module, (0, blocks[0])):
            return True
        sources = self.into_first(module)
        if blocks[1] == self.blocks(module):
            sources += self.into_last(module)
        return any(self.makes_gradient(source) for source in sources)

    def has_backward(self, module: str, blocks: Blocks) -> bool:
        """Whether a stage has a backward; a stage with a hosted loss always has."""
        stage = self.stage(module, blocks)
        return bool(stage.hosted) or stage.passed is not None

    @property
    def varies(self) -> bool:
        """Whether the profile has the varying work of samples."""
        return self.costs.sampled_work(self.task.name) is not None

    @property
    def sums_in_rounds(self) -> bool:
        """Whether one grid for all modules could sum gradients after each micro-batch.

        Then ZeRO-2 cuts them, but where another stage uses a module too.
        """
        shared = [self.request.workload.modules[m].share for m in self.task.modules]
        return len(self.request.tasks) == 1 and not any(shared)

    def gathered_bytes(self, module: str, blocks: Blocks) -> float:
        """What a rank has whole of a stage's blocks where it gathers them; 0 without ZeRO-3."""
        if self.zero_of(module) < 3:
            return 0.0
        return self.costs.gathered_bytes(
            task=self.task.name,
            module=module,
            blocks=blocks,
            trainable=self.trainable(module, blocks),
        )

    def output_bytes(self, module: str, after_block: int) -> float:
        """Bytes per sample that cross a cut."""
        return self.costs.cut_bytes(task=self.task.name, module=module, after_block=after_block)

    def sync_s(self, ranks: Mapping[str, tuple[int, ...]]) -> float:
        """Seconds of all batch-syncs of one round.

        Args:
            ranks: module to the ranks of its last stage.
        """
        total = 0.0
        for loss, size in self.task.sync_batches.items():
            modules = self.synced_modules(loss)
            members = sorted({rank for module in modules for rank in ranks[module]})
            inputs = [s.module for s in self.task.loss_inputs[loss] if s.module is not None]
            held = [
                (ranks[m], self.output_bytes(m, self.blocks(m) - 1) / inputs.count(m))
                for m in inputs
            ]
            gather = self.costs.features(loss=loss, samples=size, held=held).seconds
            own = self.costs.loss_s(loss=loss, samples=size, shards=len(members))
            statistics = self.costs.statistics_s(
                loss=loss, samples=size, holders=[ranks[m] for m in inputs]
            )
            total += self.round_samples // size * (gather + statistics + sum(own))
        return total

    def least_sync_s(self) -> float:
        """A lower bound of :meth:`sync_s`: all devices share the losses, features are free."""
        return sum(
            self.round_samples
            // size
            * sum(self.costs.loss_s(loss=loss, samples=size, shards=self.devices))
            for loss, size in self.task.sync_batches.items()
        )
