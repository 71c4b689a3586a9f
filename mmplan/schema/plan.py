"""plan.json: which devices, degrees, shares and schedule each module gets. Pure data."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from mmplan.schema.base import (
    Bool,
    Count,
    Document,
    Float,
    Index,
    Int,
    Name,
    Positive,
    Precision,
    Range,
    Record,
    Size,
    Str,
    ZeroStage,
)
from mmplan.schema.cluster import Cluster
from mmplan.schema.grid import RankGrid
from mmplan.schema.recompute import Recompute, recomputed_blocks


class FileReference(Record):
    """A file this plan stands on.

    Attributes:
        path: relative to the plan.
        sha256: of its bytes, when the plan was made.
    """

    path: Annotated[Str, Field(max_length=1000, pattern=r"^([^/\x00]{0,255}/)*[^/\x00]{0,255}$")]
    sha256: Str


class RunnerUp(Record):
    """Another plan that was simulated.

    Attributes:
        label: solver, degrees and micro-batches.
        objective_s: of its solver's formula.
        iteration_s: simulated.
        measured_s: of a trial, where one was run.
    """

    label: Str
    objective_s: Size
    iteration_s: Size
    measured_s: Size | None = None


class Asked(Record):
    """What ``mmplan solve`` was told; planning for another task set tells it the same.

    Attributes:
        top: how many candidates were simulated.
        budget_s: of searches that are not exact.
    """

    solver: Str
    method: Str | None = None
    top: Count = 8
    budget_s: Size = 1.0


class ScalingCurve(Record):
    """How fast a task's use of a module (a MetaOp) is on more or fewer devices.

    Attributes:
        name: task and module.
        devices: allowed numbers of devices that are faster than all smaller ones, ascending.
        seconds: of a step's forward and backward on each.
    """

    name: Str
    devices: tuple[Count, ...] = Field(min_length=1)
    seconds: tuple[Positive, ...]

    @model_validator(mode="after")
    def _pairs(self) -> ScalingCurve:
        if len(self.seconds) != len(self.devices):
            raise ValueError(f"{len(self.devices)} devices, {len(self.seconds)} seconds")
        if any(b <= a for a, b in pairwise(self.devices)):
            raise ValueError("devices must increase")
        return self


class NeighbourReport(Record):
    """How changes of the solvers' plans were tried in simulation.

    Attributes:
        evaluations: changed plans that were simulated.
        gain: share of the step of the solvers' best plan that the best changed one saves.
    """

    evaluations: Index
    gain: Float


class SolverReport(Record):
    """How the plan was found and how good it is proven to be.

    Attributes:
        seconds: that solving took.
        objective_s: value of the solver's own formula for this plan.
        formula_bound_s: proven for that formula over every plan that the solver may choose from;
            the simulated time may be less.
        formula_gap: ``objective_s / formula_bound_s - 1``.
        lower_bound_s: proven for the simulated ``iteration_s`` of every plan of the workload on
            these devices, whichever solver makes it; null in plans of older versions.
        gap: ``iteration_s / lower_bound_s - 1``; null likewise.
        measured_s: the step's time in the trial that chose the plan (``solve --measure``).
        notes: what else a user should know.
        idle_ranks: that are in no unit.
        largest_sync_batch: of each cross-sample loss, that the memory would hold.
        runners_up: next best first.
        ordinary: the best plan that gives every module the same degrees, as training without
            a planner does; null where none fits, or only the formula's optimum was asked for.
        curves: of every MetaOp, where tasks were planned in waves.
        neighbours: the search among changes of the solvers' plans; null where there was none.
        recompute_auto: modules whose recomputation the workload left to the plan.
        asked: to plan for other task sets in the same way.
    """

    name: Str
    method: Str
    seconds: Size
    objective_s: Size
    formula_bound_s: Size
    formula_gap: Float
    lower_bound_s: Size | None = None
    gap: Float | None = None
    measured_s: Size | None = None
    notes: tuple[Str, ...] = ()
    idle_ranks: tuple[Index, ...] = ()
    largest_sync_batch: dict[Str, Index] = Field(default_factory=dict)
    runners_up: tuple[RunnerUp, ...] = ()
    ordinary: RunnerUp | None = None
    curves: tuple[ScalingCurve, ...] = ()
    neighbours: NeighbourReport | None = None
    recompute_auto: tuple[Str, ...] = ()
    asked: Asked | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_file(cls, data: object) -> object:
        """The bound of a formula was once called a lower bound."""
        if isinstance(data, dict) and "lower_bound_s" in data and "formula_bound_s" not in data:
            given = cast("dict[str, object]", data)
            old = {"formula_bound_s": given["lower_bound_s"], "formula_gap": given.get("gap")}
            rest = {k: v for k, v in given.items() if k not in ("lower_bound_s", "gap")}
            return rest | old
        return data

    @model_serializer(mode="wrap")
    def _with_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """A bound that an older plan lacks is null, not left out: scripts ask for it by name."""
        return handler(self) | {"lower_bound_s": self.lower_bound_s, "gap": self.gap}


ScheduleKind = Literal["batch-sync", "gpipe", "1f1b", "interleaved", "wave"]


class Schedule(Record):
    """Order of a unit's micro-batches.

    Attributes:
        kind: ``gpipe`` runs all forwards of a round, then all backwards; ``1f1b`` and
            ``batch-sync`` alternate after their warm-up (a round is one sync batch);
            ``interleaved`` is 1f1b with vpp chunks a rank; ``wave`` is set by waves.
        lead: how many forwards a stage runs ahead of what its consumer needs; 1 is
            optimal with free links, 0 saves memory and idles.
        sync_lead: forwards of the last stage between the start and the end of a sync.
        in_flight: most micro-batches a stage may hold, None for as many as the order needs.
        split_backward: stages that send gradients on do so before they compute those of
            their weights, which then fill the times in which they would wait.
        even_in_flight: with ``split_backward``, every stage may hold as many micro-batches as the
            fullest of the unit, so that its weight gradients can wait longer.
    """

    kind: ScheduleKind
    lead: Index = 1
    sync_lead: Index = 0
    in_flight: Count | None = None
    split_backward: Bool = False
    even_in_flight: Bool = False


class Unit(Record):
    """A module, or a slice of its blocks, on a grid of ranks ``dp x pp x tp``.

    Attributes:
        name: of the unit; the module's, or ``TASK.MODULE.SLICE``.
        task: that it works for.
        module: that it runs.
        tp: ranks that share a block's matrices.
        pp: pipeline stages.
        vpp: chunks on each stage.
        dp: replicas.
        ranks: ``[dp][pp][tp]``.
        blocks: ``pp * vpp`` half-open chunks; chunk c runs where the schedule says,
            at pipeline position c mod pp.
        samples: per replica, of one optimizer step.
        microbatches: sizes per replica for one round: one sync batch, or the step where
            the task has no cross-sample loss.
        items: the ranks of a tensor-parallel group run whole blocks, each on its share of the rows
            of ragged tensors.
        zero: ZeRO stage of its parameters, ``training.zero`` where absent; the same one for all
            units that use them.
    """

    name: Str
    task: Str
    module: Str
    tp: Count = 1
    pp: Count = 1
    vpp: Count = 1
    dp: Count = 1
    ranks: tuple[tuple[tuple[Index, ...], ...], ...]
    blocks: tuple[Range, ...] = Field(min_length=1)
    samples: tuple[Count, ...]
    microbatches: tuple[tuple[Count, ...], ...]
    schedule: Schedule
    items: Bool = False
    zero: ZeroStage | None = None

    @property
    def grid(self) -> RankGrid:
        """Its ranks, to walk over."""
        return RankGrid(self.ranks)

    @property
    def shards(self) -> int:
        """Parts in which a group holds the parameters that tensor parallelism cuts."""
        return 1 if self.items else self.tp

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank of the grid, in grid order."""
        return self.grid.members


class PlanLoss(Record):
    """Where a loss is computed: the ranks of the last stages it takes features from."""

    name: Str
    task: Str
    ranks: tuple[Index, ...] = Field(min_length=1)


class Slice(Record):
    """A unit's forward in a wave; times from the step's start, of the forward pass.

    Attributes:
        blocks: half-open range of the module's.
        devices: how many.
    """

    unit: Str
    blocks: Range
    devices: Count
    ranks: tuple[Index, ...]
    start_s: Size
    duration_s: Size


class Wave(Record):
    """Slices that start together."""

    start_s: Size
    duration_s: Size
    slices: tuple[Slice, ...]


OrderRule = Literal["backward-first", "forward-first", "longest-path"]


class ChunkTimes(Record):
    """Nominal times of a chunk's computes per sample, in one scale for a whole plan.

    Attributes:
        forward: 1 or more.
        backward: of the whole one; 1 or more, whether the chunk has one or not.
        input_backward: of the input gradients alone, which a split backward computes first.
    """

    forward: Count
    backward: Count
    input_backward: Count


class Order(Record):
    """How a rank of several units chooses among the computes that could begin.

    Each unit's own order is its schedule's. Computes begin as soon as nominal times let them;
    of those that could begin at one time the rule chooses.

    Attributes:
        rule: ``backward-first`` takes backwards before forwards, and earlier samples first;
            ``forward-first`` takes forwards before backwards, forwards of producers and backwards
            of consumers first, so that every unit runs as far ahead as its schedule lets it;
            ``longest-path`` takes what most work waits for, one piece after the other.
        times: by unit, of each chunk; without them each block's forward takes 1 for every
            sample, and its backward 2.
        sums: by module, of the sum of a block's gradients, in the scale of ``times``. Of sums that
            could begin at one time the longest does. Without them sums take no time, and begin in
            the order of their blocks.
    """

    rule: OrderRule = "backward-first"
    times: dict[Str, tuple[ChunkTimes, ...]] = Field(default_factory=dict)
    sums: dict[Str, Count] = Field(default_factory=dict)


class PlannedModule(Record):
    """What compiling and simulating need to know of a module in a task.

    Attributes:
        blocks: how many.
        frozen: true, or half-open ranges of blocks.
        recompute: none, full, or the number of blocks that run their forward again.
        items: whether several ranks may share out the rows of one sample's ragged tensors.
        ties: the blocks, ascending, of each parameter that several blocks share; equal ones once.
    """

    inputs: tuple[Str | None, ...]
    blocks: Count = Field(le=100_000)
    frozen: Bool | tuple[Range, ...] = False
    share: Str | None = None
    recompute: Recompute = "none"
    backbone: Bool = False
    items: Bool = False
    ties: tuple[tuple[Index, ...], ...] = ()


class PlannedLoss(Record):
    """What compiling and simulating need to know of a loss in a task."""

    inputs: tuple[Str | None, ...]
    sync_batch: Count | None = None
    weight: Float = 1.0


class PlannedTask(Record):
    """A task as planned; ``inputs`` name modules of this task, all else is a data field."""

    batch: Count
    weight: Float = 1.0
    modules: dict[Str, PlannedModule]
    losses: dict[Str, PlannedLoss]

    @property
    def period(self) -> int:
        """Samples after which all sync batches begin anew; the batch when there are none."""
        sizes = [loss.sync_batch for loss in self.losses.values() if loss.sync_batch is not None]
        return math.lcm(*sizes) if sizes else self.batch


class PlannedTraining(Record):
    """What memory and time need to know of the training."""

    precision: Precision = "fp32"
    zero: ZeroStage = 0
    narrow_gradients: Bool = False
    sequence_parallel: Bool = False
    optimizer: Str = "AdamW"
    seed: Int = 0
    reorder: Bool = True


class Prediction(Record):
    """From simulating the plan's program: one optimizer step without its update.

    Attributes:
        iteration_s: seconds of the step.
        samples_per_s: of all tasks together.
        mfu: the model's FLOP/s over the peak of all devices of the plan.
        bubble_fraction: share of the used devices' time in which they wait.
        communication_fraction: share of it in which they only communicate.
        memory_bytes: most that each rank holds.
        devices_used: ranks that compute something.
    """

    iteration_s: Size
    samples_per_s: Size
    mfu: Size = 0
    bubble_fraction: Size = 0
    communication_fraction: Size = 0
    memory_bytes: tuple[Size, ...] = ()
    devices_used: Index = 0


class Plan(Document):
    """A whole plan; it names no code.

    Attributes:
        name: the workload's.
        workload: that it was made for.
        profile: that it was made from.
        cluster: that it was made for.
        training: what memory and time need to know of it.
        tasks: as planned.
        solver: how it was found.
        units: every module, or slices of it, on its ranks.
        losses: where they are computed.
        waves: when each slice starts, where tasks were planned in waves.
        predicted: the step, simulated.
    """

    kind: ClassVar[str] = "plan"

    name: Name
    workload: FileReference
    profile: FileReference
    cluster: Cluster
    devices: Count = Field(description="ranks of the run; those in no unit stay idle")
    training: PlannedTraining = PlannedTraining()
    depends_on: dict[Str, Any] = Field(
        default_factory=dict,
        description="fields of the workload, beside those in tasks and training, without which "
        "it would be another plan: a run is refused when one differs. Factories stand there as "
        "hashes; older plans have none of it",
    )
    tasks: dict[Str, PlannedTask] = Field(min_length=1)
    solver: SolverReport
    units: tuple[Unit, ...] = Field(min_length=1)
    losses: tuple[PlanLoss, ...] = Field(min_length=1)
    waves: tuple[Wave, ...] = ()
    in_turn: tuple[Str, ...] = Field(
        default=(),
        description="tasks that run one after another, in this order: a rank ends all forwards "
        "and backwards of one before it begins the next",
    )
    order: Order | None = Field(
        default=None,
        description="how ranks that several units share choose what to run next; null is "
        "backward-first without times",
    )
    predicted: Prediction

    @property
    def cuts_parameters(self) -> bool:
        """Whether a rank may hold, or update, a part of a parameter."""
        stages = self.training.zero, *map(self.zero_of, self.units)
        return any(unit.tp > 1 for unit in self.units) or any(stages)

    def zero_of(self, unit: Unit) -> ZeroStage:
        """ZeRO stage of the parameters of a unit."""
        return self.training.zero if unit.zero is None else unit.zero

    @property
    def recomputing(self) -> dict[str, Recompute]:
        """Modules with blocks that run their forward again in backward, and how many do."""
        return {
            name: module.recompute
            for task in self.tasks.values()
            for name, module in task.modules.items()
            if module.recompute != "none"
        }

    @property
    def recomputed_blocks(self) -> frozenset[tuple[str, int]]:
        """The blocks that do, by module and index."""
        return frozenset(
            (name, block)
            for task in self.tasks.values()
            for name, module in task.modules.items()
            for part in recomputed_blocks(module.recompute, module.blocks)
            for block in range(*part)
        )

    def unit(self, name: str) -> Unit:
        """The unit of that name.

        Raises:
            KeyError: there is none.
        """
        return next(u for u in self.units if u.name == name)
