"""A program: stages, the edges between them, losses, reductions, and one list per rank.

Samples are numbered over the task's batch, micro-batch-major: within a round the first
micro-batches of all replicas come first, then the second ones. All units so walk the batch
in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmplan.program.instructions import Instruction

SampleRange = tuple[int, int]


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
    """

    index: int
    producer: int
    consumer: int
    element: int | None
    internal: bool
    carries_gradient: bool
    scattered: bool = False
    scattered_back: bool = False


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
        split: its backward is ``I`` and ``W`` instead of ``B``.
        even_in_flight: its rank may hold as much as the fullest of the unit, so that ``W``
            can wait.
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
    split: bool = False
    even_in_flight: bool = False
    # Not given on: a stage that is replaced may have other ranks.
    _places: dict[int, tuple[int, int]] = field(
        default_factory=dict[int, tuple[int, int]], init=False, repr=False, compare=False
    )

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    def place(self, rank: int) -> tuple[int, int] | None:
        """(replica, tp index) of a rank, None where it does not run the stage."""
        if not self._places:
            for d, group in enumerate(self.ranks):
                for t, member in enumerate(group):
                    self._places.setdefault(member, (d, t))
        return self._places.get(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One argument of a cross-sample loss: a stage's output, or a data field, or None."""

    stage: int | None = None
    element: int | None = None
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A term of the step's loss.

    Attributes:
        weight: the loss's weight times the task's.
        ranks: cross-sample: every rank of the last stages it takes features from, sorted.
            Per sample: the host's.
        sync_batch: samples of one sync batch, None for a per-sample loss.
        sync_inputs: arguments of a cross-sample loss.
        host: stage whose forward computes a per-sample loss.
        host_inputs: its arguments there.
    """

    index: int
    name: str
    task: str
    weight: float
    ranks: tuple[int, ...]
    sync_batch: int | None
    sync_inputs: tuple[LossInput, ...] = ()
    host: int | None = None
    host_inputs: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Gradients that are summed over ranks (:mod:`mmplan.program.shards` says which).

    Attributes:
        kind: blocks of a module, or the parameters of a loss.
        owner: module (``share`` followed) or loss name.
        blocks: half-open range of blocks; (0, 0) for a loss.
        tp: shards of which every cut parameter has so many.
        shards: half-open range of the shards that are summed.
        parameters: those that tensor parallelism cuts, those that it leaves whole, or both.
        ranks: sorted; one only where a part of its shard is held by no other.
        adds: those of them that bring the gradients of whole parameters; the others, which
            have the same ones, only take the sum.
    """

    index: int
    kind: Literal["blocks", "loss"]
    owner: str
    blocks: tuple[int, int]
    tp: int
    shards: tuple[int, int]
    parameters: Literal["all", "cut", "whole"]
    ranks: tuple[int, ...]
    adds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything that a plan makes its ranks do in one optimizer step.

    Attributes:
        batches: samples of a step, by task.
        instructions: one row per rank; a rank without work has an empty row.
        predicted_s: seconds of a step as the plan predicts them; 0 where it does not.
    """

    name: str
    batches: dict[str, int]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    losses: tuple[Loss, ...]
    reductions: tuple[Reduction, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    predicted_s: float = 0.0
    # Not given on, as a stage's.
    _stages_of: dict[int, list[Stage]] = field(
        default_factory=dict[int, list[Stage]], init=False, repr=False, compare=False
    )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, idle ones included."""
        return len(self.instructions)

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages that a rank runs, in index order."""
        if not self._stages_of:
            for stage in self.stages:
                for member in dict.fromkeys(rank for group in stage.ranks for rank in group):
                    self._stages_of.setdefault(member, []).append(stage)
        return tuple(self._stages_of.get(rank, ()))

    def shares(self, edge: Edge, *, backward: bool) -> int:
        """Parts in which an edge's messages come, one for each rank of the group that takes them.

        1 where every rank receives all of them.
        """
        scattered = edge.scattered_back if backward else edge.scattered
        return self.stages[edge.producer if backward else edge.consumer].tp if scattered else 1
