"""A program: stages, the edges between them, losses, reductions, and one list per rank.

Samples are numbered over the task's batch, micro-batch-major: within a round the first
micro-batches of all replicas come first, then the second ones. All units so walk the batch
in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from mmplan.program.instructions import Instruction, Op
from mmplan.program.samples import RangeIndex, SampleRange
from mmplan.program.shards import Kind, Ranks, ShardSum, Span
from mmplan.schema.plan import Plan

# (stage, position of the micro-batch in its replica).
MicroBatch = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One argument of a stage or a loss: exactly one of edge, field and own output, or None.

    Attributes:
        edge: index of the edge that brings it.
        field: data field.
        own: True for the hosting stage's own output (losses only).
        element: element of the own output's tuple, or None for all of it.
    """

    edge: int | None = None
    field: str | None = None
    own: bool = False
    element: int | None = None

    @property
    def takes_first_output(self) -> bool:
        """Whether it is the hosting stage's output or the first element of it."""
        return self.own and not self.element


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Output of one stage into another.

    Attributes:
        element: element of the producer's output tuple, None for all of it.
        internal: both ends are chunks of one unit (a cut between two blocks).
        carries_gradient: whether gradients travel it backwards.
        scattered: each rank of a consumer's tensor-parallel group receives a share of the
            output only, and the group gathers them.
        scattered_back: each rank of a producer's group receives a share of the gradient.
        streams: of its messages, forward and backward. A stream is what one set of ranks sends
            to another; its messages have one order (:mod:`mmplan.program.communicators`).
    """

    index: int
    producer: int
    consumer: int
    element: int | None
    internal: bool
    carries_gradient: bool
    scattered: bool = False
    scattered_back: bool = False
    streams: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline position of a unit.

    Attributes:
        owner: module under whose name the parameters live (``share`` followed).
        blocks: half-open range of the module's blocks.
        trainable: ranges of its blocks that train.
        ranks: ``[dp][tp]``.
        microbatches: ``[dp][mb]``, global sample ranges of one whole step.
        rounds: ``[dp]``, micro-batches of replica d in one round.
        inputs: arguments of the first block.
        hosted: indices of the per-sample losses computed with its forward.
        syncs: indices of the cross-sample losses that take its output.
        has_backward: something before, in, or hosted by the stage takes a gradient.
        zero: ZeRO stage of its parameters.
        items: ranks of a group run whole blocks, each on its share of the rows of ragged tensors.
        split: its backward is ``I`` and ``W`` instead of ``B``.
        even_in_flight: its rank may hold as much as the fullest of the unit, so that ``W``
            can wait.
        gathers: ZeRO-3: each replica keeps a part of the trained blocks' parameters. Its computes
            meet those of the other replicas: they gather one block after the other.
    """

    index: int
    unit: str
    task: str
    module: str
    owner: str
    chunk: int
    blocks: tuple[int, int]
    trainable: tuple[tuple[int, int], ...]
    tp: int
    ranks: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[SampleRange, ...], ...]
    rounds: tuple[int, ...]
    inputs: tuple[Source, ...]
    hosted: tuple[int, ...]
    syncs: tuple[int, ...]
    input_gradient: bool
    has_backward: bool
    zero: int = 0
    items: bool = False
    split: bool = False
    even_in_flight: bool = False
    gathers: bool = False
    # Not given on: a stage that is replaced may have other ranks.
    _places: dict[int, tuple[int, int]] = field(
        default_factory=dict[int, tuple[int, int]], init=False, repr=False, compare=False
    )
    _meetings: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]], init=False, repr=False, compare=False
    )

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """Every rank that runs it, once, replica by replica."""
        return tuple(dict.fromkeys(rank for group in self.ranks for rank in group))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that hold its parameters once and add to their gradient once."""
        return tuple((rank,) for rank in self.members) if self.items else self.ranks

    @property
    def shards(self) -> int:
        """Parts in which a group holds the parameters that it cuts."""
        return 1 if self.items else self.tp

    def first_round(self) -> list[tuple[SampleRange, ...]]:
        """Micro-batches of each replica in the first round; later ones repeat it."""
        return [spans[:count] for spans, count in zip(self.microbatches, self.rounds, strict=True)]

    def meeting(self, op: Op, replica: int) -> tuple[int, ...]:
        """Ranks, ascending, that exchange tensors in a replica's compute; none where it is alone.

        Those of the replica's tensor-parallel group, or of all replicas of a stage that gathers.
        """
        # Weight gradients are computed alone.
        if op is Op.WEIGHT or not (self.gathers or self.tp > 1):
            return ()
        where = 0 if self.gathers else replica
        if where not in self._meetings:
            ranks = self.members if self.gathers else self.ranks[replica]
            self._meetings[where] = tuple(sorted(ranks))
        return self._meetings[where]

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, tp index) of a rank that runs the stage.

        Raises:
            KeyError: it does not.
        """
        found = self.find_place(rank)
        if found is None:
            raise KeyError(f"rank {rank} does not run stage {self.index} ({self.unit})")
        return found

    def find_place(self, rank: int) -> tuple[int, int] | None:
        """(replica, tp index) of a rank, None where it does not run the stage."""
        if not self._places:
            for d, group in enumerate(self.ranks):
                for t, member in enumerate(group):
                    self._places.setdefault(member, (d, t))
        return self._places.get(rank)


def replica_pairs(producer: Stage, consumer: Stage) -> set[tuple[int, int]]:
    """Replicas of two stages of a task that have samples in common, in one round as in all."""
    if producer.microbatches == consumer.microbatches:
        return {(d, d) for d in range(producer.dp)}
    one, other = producer.first_round(), consumer.first_round()
    if _num_samples(one) != _num_samples(other):
        one, other = producer.microbatches, consumer.microbatches
    index = RangeIndex(one)
    return {
        (d, d2)
        for d2, spans in enumerate(other)
        for span in spans
        for _, d, _ in index.overlapping(span)
    }


def _num_samples(microbatches: Sequence[Sequence[SampleRange]]) -> int:
    return sum(stop - start for spans in microbatches for start, stop in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One argument of a cross-sample loss: a stage's output, or a data field, or None."""

    stage: int | None = None
    element: int | None = None
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossTerm:
    """A term of the step's loss.

    A step's loss is the sum of its terms. A term is the sum of its parts' values times their
    factors, which are exact.

    Attributes:
        weight: the loss's weight times the task's.
        divisor: of the weight. A sync batch's value counts weight / divisor times, and so does a
            sample's of a loss per sample. A loss that counts its targets is divided by their
            number instead.
        ranks: every rank of the last stages it takes features from, or of its host; sorted.
    """

    index: int
    name: str
    task: str
    weight: Fraction
    divisor: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSampleLoss(_LossTerm):
    """A term of the step's loss over whole sync batches.

    Attributes:
        sync_batch: samples of one sync batch.
    """

    sync_batch: int
    inputs: tuple[LossInput, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages whose outputs it takes, ascending."""
        return tuple(sorted({item.stage for item in self.inputs if item.stage is not None}))

    @property
    def channel(self) -> int:
        """Of its gathers, their own: ranks start them between other collectives, as they come."""
        return self.index + 1

    def samples(self, batch: int) -> SampleRange:
        """The samples of a sync batch."""
        return batch * self.sync_batch, (batch + 1) * self.sync_batch

    def batches_of(self, span: SampleRange) -> range:
        """The sync batches that take samples of a range."""
        return range(span[0] // self.sync_batch, -(-span[1] // self.sync_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSampleLoss(_LossTerm):
    """A term of the step's loss that a stage's forward computes, micro-batch by micro-batch.

    Attributes:
        host: the stage.
    """

    host: int
    inputs: tuple[Source, ...]


Loss = CrossSampleLoss | PerSampleLoss


class _HasLosses(Protocol):
    @property
    def losses(self) -> Sequence[Loss]: ...


class LossTable:
    """The losses of a program or a graph, by the kind that an index must be of."""

    __slots__ = ()

    def cross_sample(self: _HasLosses, index: int) -> CrossSampleLoss:
        """A loss that an instruction or a stage names as one across samples.

        Raises:
            TypeError: it has no sync batches.
        """
        loss = self.losses[index]
        if not isinstance(loss, CrossSampleLoss):
            raise TypeError(f"loss {index} ({loss.name}) has no sync batches")
        return loss

    def per_sample(self: _HasLosses, index: int) -> PerSampleLoss:
        """A loss that a stage hosts.

        Raises:
            TypeError: it has no host.
        """
        loss = self.losses[index]
        if not isinstance(loss, PerSampleLoss):
            raise TypeError(f"loss {index} ({loss.name}) has no host")
        return loss

    @property
    def cross_sample_losses(self: _HasLosses) -> list[CrossSampleLoss]:
        """Those with sync batches, by index."""
        return [loss for loss in self.losses if isinstance(loss, CrossSampleLoss)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReduction(ShardSum):
    """Gradients of blocks that are summed over ranks.

    Attributes:
        owner: module (``share`` followed).
        blocks: half-open range of blocks.
        rounds: ZeRO-2: it is made after each of so many micro-batches, of all stages that run the
            blocks, and each rank keeps its part of the sums only; None where gradients add up over
            a step first.
        communicator: number of that of its ranks.
    """

    index: int
    owner: str
    blocks: tuple[int, int]
    rounds: int | None = None
    communicator: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TieReduction(ShardSum):
    """Gradients of the parameters that some blocks share, summed over ranks.

    Attributes:
        owner: module (``share`` followed).
        blocks: all blocks that share them, ascending.
        communicator: number of that of its ranks.
    """

    index: int
    owner: str
    blocks: tuple[int, ...]
    communicator: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReduction:
    """Gradients of a loss's parameters, summed over all ranks that compute it.

    Attributes:
        owner: the loss's name.
        ranks: sorted.
        communicator: number of that of its ranks.
    """

    index: int
    owner: str
    ranks: tuple[int, ...]
    communicator: int = field(default=0, compare=False)


Reduction = BlockReduction | TieReduction | LossReduction


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdatedAlike:
    """Parameters that are updated alike.

    Attributes:
        owner: module (``share`` followed), or the loss's name.
        ranks: every rank that holds them and sums their gradient with the others; sorted.
        sharded: ZeRO-1: each rank updates an equal flat part of what they sum, in the order of
            ranks, and all gather the parts after it. Else each rank updates all of them.
        counted: ranks whose updated elements enter the norm of all gradients, and whose optimizer
            state is saved.
    """

    owner: str
    ranks: Ranks
    sharded: bool
    counted: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardUpdate(_UpdatedAlike):
    """The update of parameters that tensor parallelism may cut.

    Attributes:
        parameters: of which kind.
        tp: shards are of this size: a cut parameter has so many.
        shards: half-open range of the shards of cut parameters; all of them for whole ones.
    """

    parameters: Kind
    tp: int
    shards: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdate(_ShardUpdate):
    """The update of blocks' parameters, without those that several blocks share.

    Attributes:
        blocks: half-open range of blocks.
    """

    blocks: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieUpdate(_ShardUpdate):
    """The update of the parameters that some blocks share.

    Attributes:
        blocks: all of them, ascending.
    """

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossUpdate(_UpdatedAlike):
    """The update of a loss's parameters, if it has any."""


ParameterUpdate = BlockUpdate | TieUpdate | LossUpdate
# Module to the blocks, ascending, of each set of blocks that share a parameter.
Ties = Mapping[str, Sequence[tuple[int, ...]]]


@dataclass(slots=True)
class Graph(LossTable):
    """Stages, edges, losses, reductions and updates of a plan: a program without an order."""

    stages: list[Stage] = field(default_factory=list[Stage])
    edges: list[Edge] = field(default_factory=list[Edge])
    losses: list[Loss] = field(default_factory=list[Loss])
    ties: Ties = field(default_factory=dict[str, Sequence[tuple[int, ...]]])
    reductions: list[Reduction] = field(default_factory=list[Reduction])
    updates: list[ParameterUpdate] = field(default_factory=list[ParameterUpdate])

    def connect(self, producer: int, consumer: int, element: int | None, *, internal: bool) -> int:
        """The edge between two stages for that element, new or already there."""
        for edge in self.edges:
            if (edge.producer, edge.consumer, edge.element) == (producer, consumer, element):
                return edge.index
        self.edges.append(
            Edge(
                index=len(self.edges),
                producer=producer,
                consumer=consumer,
                element=element,
                internal=internal,
                carries_gradient=False,
            )
        )
        return self.edges[-1].index


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(LossTable):
    """Everything that a plan makes its ranks do in one optimizer step.

    Attributes:
        batches: samples of a step, by task.
        ties: of its modules, frozen ones too.
        instructions: one row per rank; a rank without work has an empty row.
        predicted_s: seconds of a step as the plan predicts them; 0 where it does not.
    """

    name: str
    batches: dict[str, int]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    losses: tuple[Loss, ...]
    ties: Ties
    reductions: tuple[Reduction, ...]
    updates: tuple[ParameterUpdate, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    predicted_s: float = 0.0
    # Not given on, as a stage's.
    _stages_of: dict[int, list[Stage]] = field(
        default_factory=dict[int, list[Stage]], init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls, plan: Plan, graph: Graph, instructions: Iterable[tuple[Instruction, ...]]
    ) -> Program:
        """The program of a plan with a graph and the rows of its ranks."""
        return cls(
            name=plan.name,
            batches={name: task.batch for name, task in plan.tasks.items()},
            stages=tuple(graph.stages),
            edges=tuple(graph.edges),
            losses=tuple(graph.losses),
            ties=graph.ties,
            reductions=tuple(graph.reductions),
            updates=tuple(graph.updates),
            instructions=tuple(instructions),
            predicted_s=plan.predicted.iteration_s,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, idle ones included."""
        return len(self.instructions)

    @property
    def block_reductions(self) -> list[BlockReduction]:
        """The reductions of modules' gradients, by index."""
        return [r for r in self.reductions if isinstance(r, BlockReduction)]

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages that a rank runs, in index order."""
        if not self._stages_of:
            for stage in self.stages:
                for member in stage.members:
                    self._stages_of.setdefault(member, []).append(stage)
        return tuple(self._stages_of.get(rank, ()))

    def shares(self, edge: Edge, *, backward: bool) -> int:
        """Parts in which an edge's messages come, one for each rank of the group that takes them.

        1 where every rank receives all of them.
        """
        scattered = edge.scattered_back if backward else edge.scattered
        return self.stages[edge.producer if backward else edge.consumer].tp if scattered else 1


def can_split(stage: Stage) -> bool:
    """Whether a stage's backward has two parts: a gradient to send on, and one of weights."""
    return stage.has_backward and stage.input_gradient and bool(stage.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of a program's computes, for emulated runs, which wait instead of computing.

    Attributes:
        computes: (stage, op, samples of the micro-batch) to seconds, hosted losses included.
        losses: cross-sample losses to seconds after their gather.
    """

    computes: Mapping[tuple[int, Op, int], float]
    losses: Mapping[str, float]
