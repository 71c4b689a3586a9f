"""profile.json: what modules, losses and links cost."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from mmplan.errors import InvalidInputError
from mmplan.schema.base import (
    Bool,
    Count,
    Document,
    Index,
    Positive,
    Range,
    Record,
    Size,
    Str,
    load_document,
)
from mmplan.schema.cluster import Cluster
from mmplan.schema.made import Args


class Point(Record):
    """Time of ``blocks`` blocks (default: all) for one micro-batch on ``tp`` devices.

    Communication inside the TP group is included.

    Attributes:
        tp: ranks of the group.
        microbatch: samples.
        blocks: how many of the module's were timed; absent: all.
        backward_s: without recomputation, which is added where a workload asks for it.
        backward_input_s: the part that computes input gradients; absent: half of ``backward_s``.
        activation_bytes: what one device holds for the micro-batch.
        forward_only_bytes: most at once in a forward that keeps nothing for a backward, its
            output included.
        forward_extra_bytes: most at once in any other forward, beside what it leaves.
        backward_extra_bytes: most at once in the backward, beside what the forward left; its
            parameters have gradients already.
        forward_spread_s: half-width of the middle half of the repeats.
        backward_spread_s: likewise.
        repeats: that the time is the median of.
    """

    tp: Count = 1
    microbatch: Count
    blocks: Count | None = None
    forward_s: Size
    backward_s: Size
    backward_input_s: Size | None = None
    activation_bytes: Size = 0
    forward_only_bytes: Size | None = None
    forward_extra_bytes: Size | None = None
    backward_extra_bytes: Size | None = None
    forward_spread_s: Size | None = None
    backward_spread_s: Size | None = None
    repeats: Count | None = None


# A size in the text of a shape, not in that of a type.
_SIZES = re.compile(r"\b\d+\b")
# Type and sizes of a tensor: "float32 (512, 128)".
TensorShape = Annotated[Str, Field(pattern=r"^[a-z][a-z0-9_]* \([0-9, ]*\)$")]


class BlockRun(Record):
    """Consecutive blocks that have equal parameters and do the same.

    Attributes:
        parameters: index of their parameters.
        operations: index of their operations; absent where they could not be traced.
        trace: digest of the operations in their order, with arguments and shapes.
        count: how many blocks.
    """

    parameters: Index
    operations: Index | None = None
    trace: Str | None = None
    count: Count = 1


class BuiltPart(Record):
    """What a factory built: blocks, their parameters, and what they compute.

    Attributes:
        parameters: each different set of a block's parameters, by name in the block.
        frozen: parameters that the factory itself takes no gradient of, by full name.
        operations: each different set of a block's operations of torch, and how often.
        blocks: first to last; a loss has one.
        ties: parameters that are one: name in the block to ranges of blocks that have it.
        inputs: of the first block when it was traced, on the meta device with two samples:
            shapes; a list is a tuple, a pair of ``values`` and ``lengths`` is ragged.
        torch: version whose operations these are.
        untraced: why some or all blocks have no operations.
    """

    parameters: tuple[dict[Str, TensorShape], ...]
    frozen: tuple[Str, ...] = ()
    operations: tuple[dict[Str, Count], ...] = ()
    blocks: tuple[BlockRun, ...] = Field(min_length=1)
    ties: tuple[dict[Str, tuple[Range, ...]], ...] = ()
    inputs: tuple[Any, ...] = ()
    torch: Str | None = None
    untraced: Str | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return sum(run.count for run in self.blocks)

    @property
    def tied_blocks(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each parameter that several blocks share; equal ones once."""
        of_each = (
            {block for ranges in tie.values() for low, high in ranges for block in range(low, high)}
            for tie in self.ties
        )
        return tuple(sorted({tuple(sorted(blocks)) for blocks in of_each if len(blocks) > 1}))

    @property
    def shared_parameters(self) -> dict[tuple[int, ...], int]:
        """Blocks, ascending, to the number of parameters that all of them share."""
        runs = [run for run in self.blocks for _ in range(run.count)]
        numbers: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for tie in self.ties:
            places = {(b, name) for name, own in tie.items() for r in own for b in range(*r)}
            blocks = tuple(sorted({block for block, _ in places}))
            if len(blocks) > 1:
                block, name = min(places)
                sizes = _SIZES.findall(self.parameters[runs[block].parameters][name])
                numbers[blocks] += math.prod(map(int, sizes))
        return dict(numbers)

    @model_validator(mode="after")
    def _indices_fit(self) -> BuiltPart:
        for i, run in enumerate(self.blocks):
            if run.parameters >= len(self.parameters):
                raise ValueError(f"blocks.{i}.parameters: {run.parameters} is not listed")
            if run.operations is not None and run.operations >= len(self.operations):
                raise ValueError(f"blocks.{i}.operations: {run.operations} is not listed")
        for i, tie in enumerate(self.ties):
            for name, ranges in tie.items():
                if any(not low < high <= self.num_blocks for low, high in ranges):
                    raise ValueError(f"ties.{i}.{name}: is of blocks that there are not")
        return self


class Fingerprint(Record):
    """What a part of the model was made from: a profile is true of that alone.

    Attributes:
        factory: the workload's, when it was profiled.
        args: that it was called with.
        built: what it gave; absent in older profiles.
    """

    factory: Str
    args: Args = Field(default_factory=dict)
    built: BuiltPart | None = None


class ModuleProfile(Record):
    """One module; per-block lists are relative weights, equal when absent.

    Attributes:
        fingerprint: of the module that was profiled; absent in profiles written by hand.
        blocks: how many.
        block_work: share of each block in the module's time.
        block_parameters: share in its parameters.
        block_activation_bytes: share in its activations.
        parameters: how many.
        flops_per_sample: of the forward.
        output_bytes_per_sample: what crosses a cut after the last block.
        boundary_bytes_per_sample: what crosses a cut between two blocks.
        tied_blocks: the blocks of each parameter that several blocks share.
        points: the times; a ``tp`` without points is not an option for the solver.
    """

    fingerprint: Fingerprint | None = None
    blocks: Count = Field(le=100_000)
    block_work: tuple[Size, ...] | None = None
    block_parameters: tuple[Size, ...] | None = None
    block_activation_bytes: tuple[Size, ...] | None = None
    block_boundary_bytes: tuple[Size, ...] | None = Field(
        default=None,
        description="bytes per sample after block i; replaces boundary_bytes_per_sample",
    )
    tied_blocks: tuple[tuple[Index, ...], ...] | None = Field(
        default=None, description="blocks, ascending, of each parameter that several share"
    )
    parameters: Size
    flops_per_sample: Size = 0
    output_bytes_per_sample: Size = 0
    boundary_bytes_per_sample: Size = 0
    points: tuple[Point, ...] = Field(min_length=1)

    @property
    def shared_parameters(self) -> dict[tuple[int, ...], int]:
        """Blocks, ascending, to the number of parameters that all of them share.

        ``parameters`` and ``block_parameters`` count these once, in their first block. A profile
        without a fingerprint does not know them.
        """
        built = self.fingerprint.built if self.fingerprint else None
        return built.shared_parameters if built else {}

    @model_validator(mode="after")
    def _lists_fit(self) -> ModuleProfile:
        for name in (
            "block_work",
            "block_parameters",
            "block_activation_bytes",
            "block_boundary_bytes",
        ):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != self.blocks:
                raise ValueError(f"{name} has {len(values)} values for {self.blocks} blocks")
            if not sum(values) and name == "block_work":
                raise ValueError("block_work adds up to 0")
        self._check_fingerprint()
        for i, tied in enumerate(self.tied_blocks or ()):
            if len(tied) < 2 or list(tied) != sorted(set(tied)) or tied[-1] >= self.blocks:
                raise ValueError(
                    f"tied_blocks.{i}: {list(tied)} are not several of the blocks "
                    f"0..{self.blocks - 1}, ascending"
                )
        for i, point in enumerate(self.points):
            if point.blocks is not None and point.blocks > self.blocks:
                raise ValueError(f"points.{i}.blocks: {point.blocks} of {self.blocks} blocks")
        return self

    def _check_fingerprint(self) -> None:
        """Refuse other blocks than those of the module that was profiled."""
        built = self.fingerprint.built if self.fingerprint else None
        if built is None:
            return
        if built.num_blocks != self.blocks:
            raise ValueError(f"blocks is {self.blocks}, the fingerprint has {built.num_blocks}")
        if tuple(sorted(set(self.tied_blocks or ()))) != built.tied_blocks:
            raise ValueError(
                f"tied_blocks is {[*map(list, self.tied_blocks or ())]}, the fingerprint has "
                f"{[*map(list, built.tied_blocks)]}"
            )


class LossPoint(Record):
    """Time of a loss on ``samples`` samples (of a sync batch, or of a micro-batch).

    Attributes:
        samples: of a sync batch, or of a micro-batch.
        activation_bytes: that it holds from its forward to its backward.
        cut_bytes: the same of all ranks of a tensor-parallel group together that cuts the
            vocabulary: each of them computes its own part; absent where they compute all.
    """

    samples: Count
    forward_s: Size
    backward_s: Size
    activation_bytes: Size = 0
    cut_bytes: Size | None = None


class LossProfile(Record):
    """One loss; points are the whole loss on one device.

    Attributes:
        fingerprint: of the loss that was profiled.
        sharded: its work is spread evenly over the ranks that take part (DistMM section 5.3);
            false where every one of them computes all of it.
        exchanged_per_row: numbers that a sharded loss exchanges for each row of each input,
            besides the features; default: the number of its inputs, as CLIP does.
        others_only: whether a sharded loss compares rows with those of other inputs alone, as CLIP
            does: then a rank reads the features of those only.
        trains: whether it has parameters that train, whose gradients its ranks sum.
    """

    fingerprint: Fingerprint | None = None
    sharded: Bool = True
    exchanged_per_row: Index | None = None
    others_only: Bool = True
    trains: Bool = True
    points: tuple[LossPoint, ...] = Field(min_length=1)

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether ranks of a tensor-parallel group share out its work."""
        return all(point.cut_bytes is not None for point in self.points)


class Curve(Record):
    """A continuous piecewise-linear time: ``alpha + sum of slope_i * length in piece i``.

    Piece i of the size x lies between ``knots[i-1]`` and ``knots[i]``; all coefficients
    are non-negative.

    Attributes:
        alpha: fixed part.
        knots: where the slope changes.
        slopes: one more than knots.
        residual_median: of the points, relative.
        residual_p90: of the points, relative.
        points: that it was fitted to.
        lowest: smallest size among them.
        highest: largest size among them.
    """

    alpha: Size
    knots: tuple[Positive, ...] = ()
    slopes: tuple[Size, ...]
    residual_median: Size = 0
    residual_p90: Size = 0
    points: Count = 1
    lowest: Positive
    highest: Positive

    @model_validator(mode="after")
    def _pieces_fit(self) -> Curve:
        if len(self.slopes) != len(self.knots) + 1:
            raise ValueError(f"{len(self.slopes)} slopes for {len(self.knots)} knots")
        if any(b <= a for a, b in pairwise(self.knots)):
            raise ValueError("knots must increase")
        return self

    def at(self, size: float) -> float:
        """The curve's value at a size."""
        value, start = self.alpha, 0.0
        for slope, end in zip(self.slopes, (*self.knots, float("inf")), strict=True):
            value += slope * max(0.0, min(size, end) - start)
            start = end
        return value


class ModuleFit(Record):
    """Whole-module curves over the micro-batch size, for one tp."""

    forward: Curve
    backward: Curve
    backward_input: Curve
    activation_bytes: Curve


class LossFit(Record):
    """Curves over the number of samples."""

    forward: Curve
    backward: Curve


class Fits(Record):
    """Fitted curves: module, then tp (as text) to curves; losses likewise."""

    modules: dict[Str, dict[Str, ModuleFit]] = Field(default_factory=dict)
    losses: dict[Str, LossFit] = Field(default_factory=dict)


# Points are timed on the first samples of the first step in which every modality has a row,
# among so many; chosen by hand.
TIMED_STEPS = 8


class DataWork(Record):
    """What the samples of a random subset of one task's data cost, relative to each other.

    Times of the profile are for samples of mean work; a micro-batch takes the time of as many
    such samples as its own work adds up to. A module that is absent costs the same for all.
    """

    source: Literal["work", "lengths"] = Field(
        default="work",
        description="the dataset's work(index), or the lengths of the module's ragged fields",
    )
    dataset: Count | None = Field(default=None, description="samples of the whole data set")
    work: dict[Str, tuple[Size, ...]] = Field(
        min_length=1,
        description="module to the work of each sample, in any unit; place i is the same sample",
    )
    at: dict[Str, Positive] = Field(
        default_factory=dict,
        description="mean work of the samples on which a module's points were taken; "
        "default the mean of work",
    )

    @property
    def samples(self) -> int:
        """Samples of the subset."""
        return len(next(iter(self.work.values())))

    @model_validator(mode="after")
    def _columns_fit(self) -> DataWork:
        first = next(iter(self.work))
        for name, values in self.work.items():
            if len(values) != self.samples:
                raise ValueError(
                    f"work.{name} has {len(values)} samples, work.{first} has {self.samples}"
                )
            if not sum(values):
                raise ValueError(f"work.{name} adds up to 0")
        for name in self.at:
            if name not in self.work:
                raise ValueError(f"at.{name}: work has no {name}")
        return self


class Profile(Document):
    """Costs of a workload on a cluster.

    Attributes:
        source: measured on devices, analytic from FLOPs and bytes, or given by hand.
        cluster: of the devices that the times are for.
        tasks: task to module to fields that differ from ``modules`` for that task.
        losses: one that is absent is free.
        sequence_parallel: whether tensor-parallel groups shared out rows at its points.
        fits: fitted again where absent.
        provenance: where, when and how it was made; read by people only.
    """

    kind: ClassVar[str] = "profile"

    name: Str
    source: Literal["measured", "analytic", "given"]
    cluster: Cluster
    modules: dict[Str, ModuleProfile] = Field(min_length=1)
    tasks: dict[Str, dict[Str, dict[Str, Any]]] = Field(default_factory=dict)
    losses: dict[Str, LossProfile] = Field(default_factory=dict)
    data: dict[Str, DataWork] = Field(
        default_factory=dict, description="per task, how much work its samples are"
    )
    sequence_parallel: Bool = False
    fits: Fits | None = None
    provenance: dict[Str, Any] = Field(default_factory=dict)

    @property
    def ties(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Module to the blocks of each parameter that several of its blocks share."""
        return {name: own.tied_blocks for name, own in self.modules.items() if own.tied_blocks}

    @model_validator(mode="after")
    def _overrides_are_valid(self) -> Profile:
        for task, modules in self.tasks.items():
            for module in modules:
                if module not in self.modules:
                    raise ValueError(f"tasks.{task}.{module} differs from no module of the profile")
                try:
                    self.module(module, task)
                except ValidationError as error:
                    fault = error.errors(include_url=False)[0]
                    place = ".".join(map(str, ("tasks", task, module, *fault["loc"])))
                    raise ValueError(f"{place}: {fault['msg']}") from None
        return self

    @model_validator(mode="after")
    def _data_are_of_modules(self) -> Profile:
        for task, data in self.data.items():
            for module in data.work:
                if module not in self.modules:
                    raise ValueError(f"data.{task}.work.{module} is no module of the profile")
        return self

    def module(self, name: str, task: str | None = None) -> ModuleProfile:
        """The profile of a module as one task uses it.

        Raises:
            InvalidInputError: the profile has no such module.
        """
        if name not in self.modules:
            raise InvalidInputError(
                f"profile {self.name} has no module {name!r}; it has {', '.join(self.modules)}",
                hint="profile this workload again: mmplan profile WORKLOAD -o PROFILE",
            )
        base = self.modules[name]
        changes = self.tasks.get(task or "", {}).get(name)
        if not changes:
            return base
        return ModuleProfile.model_validate(base.model_dump(exclude_none=True) | changes)


def load_profile(path: str | Path) -> Profile:
    """Read profile.json.

    Raises:
        InvalidInputError: the file or its contents are wrong; names file and field.
    """
    return load_document(Profile, path)
