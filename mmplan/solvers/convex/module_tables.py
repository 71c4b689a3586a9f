"""A module's options in a disaggregated pipeline, for all degrees and micro-batches at once.

Everything about a stage is a sum over its blocks, times curves over the micro-batch size
that do not know the blocks.

Shape suffixes: L = blocks, T = tp degrees, Q = shapes (pp, vpp), S = stages of a shape that can be
its slowest, K = stages of all shapes that can be the fullest, B = (dp, micro-batch size),
R = options: those of T, Q and B together that have devices enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Ints, NumberT
from mmplan.program.schedules.interleaved_1f1b import largest_group
from mmplan.solvers.convex.branch_and_bound import Options, QuickOptions
from mmplan.solvers.cost_table import LOSSES, StageCosts, reduction_s
from mmplan.solvers.messages import stage_messages
from mmplan.solvers.partitioner import allowed_tensor_degrees, module_cuts
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import smallest_divisors
from mmplan.solvers.stage_rows import (
    HELD,
    HELD_AHEAD,
    HELD_LONGER,
    TRAINED_NUMBERS,
    StageBytes,
    largest_rows,
    stage_rows,
    summed_by_position,
)

# Columns of a stage's seconds after its shares in the module's: messages inside the module and
# to others, latency and seconds per sample (times a link's own numbers).
INNER, INNER_BYTES, OUTER, OUTER_BYTES = range(LOSSES + 1, LOSSES + 5)
# More stages after a module than any pipeline has: memory sets no limit.
UNLIMITED = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Pipeline degrees of a module, cut into stages.

    Attributes:
        pp: [Q].
        vpp: [Q].
        cuts: the chunks of each shape.
        seconds: [Q, S, 8], columns above; the last stages repeat where there are fewer.
        total: [Q, 8], the same, summed over all stages.
        bytes: [K, 19], columns of :mod:`mmplan.solvers.stage_rows`, at tp 1: the stages of each
            shape that can be its fullest, one shape after the other.
        first: [Q], row of ``bytes`` where those of a shape begin.
        gradient_bytes: [Q], of the stage that has the most, at tp 1.
        feeds: whether other modules take the module's output.
    """

    pp: Ints
    vpp: Ints
    cuts: tuple[tuple[tuple[int, int], ...], ...]
    seconds: Floats
    total: Floats
    bytes: Floats
    first: Ints
    gradient_bytes: Floats
    feeds: bool

    def depth(self, group: Ints, shape: Ints) -> Ints:
        """[R] micro-batches that it takes in before the first of them leaves backwards.

        Interleaved, its first chunk takes in two groups, and for the stages after it, beyond
        what is linear in them, all but one of a third.

        Args:
            group: [R] micro-batches of the longest group.
            shape: [R] index of (pp, vpp).
        """
        longer = 2 * group + self.feeds * (group - 1)
        return np.where(self.vpp[shape] > 1, longer, self.pp[shape])


def module_shapes(problem: Problem, module: str, shapes: Sequence[tuple[int, int]]) -> Shapes:
    """Tables of a module's stages for some (pp, vpp)."""
    all_cuts = module_cuts(problem, module, max(pp * vpp for pp, vpp in shapes))
    cuts = [all_cuts[pp * vpp - 1] for pp, vpp in shapes]
    seconds: list[Floats] = []
    for own, (pp, _) in zip(cuts, shapes, strict=True):
        stages = problem.module_costs(module).stages(own)
        columns = np.hstack([stages.shares, _sent(problem, module, stages)])
        seconds.append(summed_by_position(columns, pp))
    # Many shapes have the same stages.
    messages = cache(partial(stage_messages, problem, module, placed={}))
    rows = [
        stage_rows(problem, module, own, pp, of_stage=messages)
        for own, (pp, _) in zip(cuts, shapes, strict=True)
    ]
    numbers = np.array([own[:, TRAINED_NUMBERS].max() for own in rows])
    fullest = [own[largest_rows(own)] for own in rows]
    return Shapes(
        pp=np.array([pp for pp, _ in shapes], dtype=np.int64),
        vpp=np.array([vpp for _, vpp in shapes], dtype=np.int64),
        cuts=tuple(cuts),
        seconds=_padded([own[largest_rows(own)] for own in seconds]),
        total=np.array([own.sum(axis=0) for own in seconds]),
        bytes=np.concatenate(fullest),
        first=np.cumsum([0, *map(len, fullest[:-1])]),
        gradient_bytes=numbers * problem.module_costs(module).gradient_bytes,
        feeds=bool(problem.consumers(module)),
    )


def _sent(problem: Problem, module: str, own: StageCosts) -> Floats:
    """[C, 4] messages after each stage, there and back: numbers and bytes per sample."""
    cuts = own.cuts
    back = [problem.stage(module, cut).input_gradient for cut in cuts[1:]]
    number = 1.0 + np.array([*back, problem.makes_gradient(module)])
    sent = np.stack([number, number * own.cut_bytes], axis=1)
    last = np.arange(len(cuts))[:, None] == len(cuts) - 1
    outer = last & bool(problem.consumers(module))
    return np.hstack([np.where(last, 0.0, sent), np.where(outer, sent, 0.0)])


def _padded(rows: Sequence[Floats]) -> Floats:
    most = max(map(len, rows))
    return np.stack([row[np.minimum(np.arange(most), len(row) - 1)] for row in rows])


# A number of replicas that leaves no optimizer state to any of them.
MANY = 2**40
# Quotients of bytes this close to a whole number are it.
ROUNDING = 1e-9
VPP = (1, 2, 4)
# Micro-batches up to this size have their curves computed once.
REMEMBERED = 2048
# Less than any activation: bytes divided by it are more than any depth_limit.
TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedOption:
    """One option, as degrees."""

    tp: int
    pp: int
    vpp: int
    dp: int
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Options of a module, and what their rows mean.

    Attributes:
        options: the core's columns, the quick ones first.
        tp: index into the module's degrees of each row.
        shape: index of its (pp, vpp).
        dp: replicas.
    """

    options: QuickOptions
    tp: Ints
    shape: Ints
    dp: Ints


class OptionRows(NamedTuple):
    """Options of a module.

    Attributes:
        tp: [R], index into the module's degrees.
        shape: [R], index of the (pp, vpp).
        b: [R], index of the replicas and their micro-batch.
        dp: [R], replicas.
        devices: [R], of all replicas.
    """

    tp: Ints
    shape: Ints
    b: Ints
    dp: Ints
    devices: Ints

    def where(self, kept: NDArray[np.bool_ | np.intp]) -> OptionRows:
        """Some of them."""
        return OptionRows(*(column[kept] for column in self))


class _SizeCosts(NamedTuple):
    """Of micro-batches by size.

    Attributes:
        basis: [T, 8, B], what the columns of a stage's seconds are multiplied by.
        backward: [T, 4, B], the backward's part of it.
        activation: [T, B] bytes of the whole module.
    """

    basis: Floats
    backward: Floats
    activation: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldBytes:
    """Bytes of the stages that can be each option's fullest, one option after the other.

    Attributes:
        stages: their bytes.
        first: [R], where those of an option begin.
        at: [P], option of each stage.
        tp: [P], of the stage.
        steps: [P], its micro-batches in a step.
        each: [P], of a micro-batch.
        ahead: [P], of those in flight in the module itself.
        beside: [P], messages beside those in flight.
    """

    stages: StageBytes
    first: Ints
    at: Ints
    tp: Ints
    steps: Ints
    each: Floats
    ahead: Floats
    beside: Floats

    def free(self, dp_R: Ints, memory_bytes: float) -> Floats:
        """[P], what is left of the memory beside parameters."""
        return memory_bytes - self.stages.fixed_bytes(self.tp, dp_R[self.at]) - self.beside

    def depth_limit(self, free: Floats) -> Ints:
        """[R], most stages after the module; -1 where none."""
        # Where nothing is held only the parameters count; all micro-batches are the most held.
        after = np.where(
            free * (1 + ROUNDING) >= self.each * self.steps,
            UNLIMITED,
            np.where(free < 0, -1.0, (free - self.ahead) / np.maximum(self.each, TINY) + ROUNDING),
        )
        least = np.minimum.reduceat(after, self.first) if len(self.first) else after
        return np.clip(np.floor(least), -1, UNLIMITED).astype(np.int64)


class ModuleTables:
    """Everything the options of one module are made of.

    Args:
        backbone: the module whose replicas set the micro-batches.
        interleaved: whether it may have vpp > 1.

    Attributes:
        empty: whether pins, profile and devices leave no degrees at all; it then has no ``shapes``.
    """

    def __init__(self, problem: Problem, module: str, *, backbone: bool, interleaved: bool) -> None:
        self.problem, self.module, self.backbone = problem, module, backbone
        self._interleaved = interleaved
        self.pins = problem.request.workload.modules[module].plan
        self.tps = allowed_tensor_degrees(problem, module)
        shapes = self._shape_candidates()
        self.empty = not (shapes and self.tps)
        self._remembered: _SizeCosts | None = None
        self._tp = np.array(self.tps, dtype=np.int64)[:, None, None]
        if not self.empty:
            self.costs = problem.module_costs(module)
            self.shapes = module_shapes(problem, module, shapes)
            self._bytes_of_stages = StageBytes(problem, module, self.shapes.bytes)
            scale = self._link_scale()
            self._stages = self.shapes.seconds * scale[:, :, None]
            self._total = self.shapes.total * scale

    def _shape_candidates(self) -> list[tuple[int, int]]:
        blocks = self.problem.blocks(self.module)
        most = min(blocks, self.problem.devices // min(self.tps, default=1))
        vpps = [v for v in VPP if self.pins.vpp is None] or [
            v for v in range(1, blocks + 1) if self.pins.allows("vpp", v)
        ]
        if not self._interleaved:
            vpps = [v for v in vpps if v == 1]
        return [
            (pp, vpp)
            for pp in range(1, most + 1)
            if self.pins.allows("pp", pp)
            for vpp in vpps
            if pp * vpp <= blocks and (vpp == 1 or pp > 1)
        ]

    # --- options ------------------------------------------------------------------------

    def rows(self, dp_B: Ints, most: int) -> OptionRows:
        """The options that take at most so many devices, by tp, shape and replicas."""
        devices = self._tp * self.shapes.pp[:, None] * dp_B
        tp, shape, b = np.nonzero(devices <= most)
        return OptionRows(tp, shape, b, dp_B[b], devices[tp, shape, b])

    def table(
        self,
        dp_B: Ints,
        size_B: Ints,
        *,
        steps: int,
        fewest: int,
        most: int,
    ) -> Table:
        """All options with given replicas and micro-batches.

        Args:
            dp_B: replicas.
            size_B: their largest micro-batch.
            steps: micro-batches of a step.
            fewest: of the replica that has the fewest.
            most: devices that an option may take.
        """
        rows = self.rows(dp_B, most)
        stage, warm = self.times(rows, size_B, steps, dp_B=dp_B)

        def complete(some: NDArray[np.intp]) -> Options:
            chosen = rows.where(some)
            return Options(
                devices=chosen.devices,
                warm_s=warm[some],
                stage_s=stage[some],
                reduce_s=self.reduce_s(chosen, size_B),
                depth=self.shapes.depth(self._group(chosen, steps, fewest), chosen.shape),
                depth_limit=self.depth_limit(chosen, size_B, steps, fewest),
            )

        return Table(
            options=QuickOptions(
                devices=rows.devices, warm_s=warm, stage_s=stage, complete=complete
            ),
            tp=rows.tp,
            shape=rows.shape,
            dp=rows.dp,
        )

    def pick(self, table: Table, row: int) -> SelectedOption:
        """The degrees of a row."""
        shapes, q = self.shapes, int(table.shape[row])
        return SelectedOption(
            tp=self.tps[int(table.tp[row])],
            pp=int(shapes.pp[q]),
            vpp=int(shapes.vpp[q]),
            dp=int(table.dp[row]),
            cuts=shapes.cuts[q],
        )

    # --- seconds ------------------------------------------------------------------------

    def times(
        self,
        rows: OptionRows,
        size_B: Ints,
        steps: int | Ints = UNLIMITED,
        *,
        dp_B: Ints | None = None,
    ) -> tuple[Floats, Floats]:
        """[R] slowest stage, and the ramp up and down; messages included.

        Args:
            rows: options.
            size_B: samples of a micro-batch; one where all are alike.
            steps: micro-batches, of all rows or [R]. Fewer than pp leave the ranks of an
                interleaved module idle until the first of them comes back to the next chunk.
            dp_B: replicas, where the busiest one counts; else a bound on it.
        """
        basis = self.basis(size_B)
        if dp_B is not None and self.problem.varies:
            basis = self._at(size_B, dp_B).basis
        stage = at_rows((self._stages @ basis[:, None]).max(axis=2), rows)
        compute = at_rows(self._total[:, :, :INNER] @ basis[:, :INNER], rows)
        messages = at_rows(self._total[:, :, INNER:] @ basis[:, INNER:], rows)
        if not self._interleaved:
            return stage, compute + messages
        # A module with vpp chunks on each rank waits for one chunk where others wait for a stage.
        vpp = self.shapes.vpp[rows.shape]
        fill = np.where(vpp == 1, compute, stage + np.maximum(compute - stage, 0.0) / vpp)
        idle = np.maximum(compute - steps * stage, 0.0) * (1 - 1 / vpp)
        return stage, fill + idle + messages

    def basis(self, size_B: Ints) -> Floats:
        """[T, 8, B]: what the columns of a stage's seconds are multiplied by."""
        costs, place = self._of_sizes(size_B)
        return costs.basis[..., place]

    def _of_sizes(self, size_B: Ints) -> tuple[_SizeCosts, Ints]:
        """Costs of many sizes, and the places of these among them; small ones are computed once."""
        if not len(size_B) or int(size_B.max()) > REMEMBERED:
            return self._at(size_B), np.arange(len(size_B))
        if self._remembered is None:
            self._remembered = self._at(np.arange(1, REMEMBERED + 1))
        return self._remembered, size_B - 1

    def _at(self, size_B: Ints, dp_B: Ints | None = None) -> _SizeCosts:
        """Costs of some sizes, of the busiest of so many replicas."""
        each = [self.costs.seconds(tp, size_B, dp_B) for tp in self.tps]
        ones, sizes = np.ones(len(size_B)), size_B.astype(np.float64)
        links = [ones, sizes, ones, sizes]
        return _SizeCosts(
            basis=np.array([[*(forward + backward), *links] for forward, backward in each]),
            backward=np.array([backward for _, backward in each]),
            activation=np.array([self.costs.activation_bytes(tp, size_B) for tp in self.tps]),
        )

    def _link_scale(self) -> Floats:
        """[T, Q, 8]: latencies and bandwidths of the links that the message columns use.

        Between nodes the ranks of a TP group receive shares, over one link, and gather them.
        """
        cluster, shapes = self.problem.request.cluster, self.shapes
        one_node = self.problem.devices <= cluster.devices_per_node
        near = one_node | (cluster.devices_per_node % (self._tp[:, :, 0] * shapes.pp) == 0)
        costs = self.problem.costs
        gathers = np.array([costs.gather_line(tp) for tp in self.tps]).T[..., None]
        inside, between = (costs.message_line(apart=apart) for apart in (False, True))
        scale = np.ones((len(self.tps), len(shapes.pp), OUTER_BYTES + 1))
        for i, gather in enumerate(gathers):
            scale[:, :, INNER + i] = np.where(near, inside[i], between[i] + gather)
            scale[:, :, OUTER + i] = inside[i] if one_node else between[i] + gather
        return scale

    def reduce_s(self, rows: OptionRows, size_B: Ints) -> Floats:
        """[R]: gradient reductions (:func:`mmplan.solvers.cost_table.reduction_s`)."""
        shapes = self.shapes
        if not shapes.gradient_bytes.any():
            return np.zeros(len(rows.dp))
        costs, place = self._of_sizes(size_B)
        b = rows.b if len(size_B) > 1 else np.zeros_like(rows.b)
        each = costs.backward[rows.tp, :, place[b]]
        backward_s = (shapes.total[rows.shape, :INNER] * each).sum(axis=1)
        tp, pp = self._tp[rows.tp, 0, 0], shapes.pp[rows.shape]
        return reduction_s(
            self.problem.request.cluster,
            tp=tp,
            pp=pp,
            dp=rows.dp,
            num_bytes=shapes.gradient_bytes[rows.shape] / tp,
            backward_s=backward_s / (pp * shapes.vpp[rows.shape]),
        )

    # --- bytes --------------------------------------------------------------------------

    def depth_limit(
        self, rows: OptionRows, size_B: Ints, steps: int | Ints, fewest: int | Ints | None = None
    ) -> Ints:
        """[R]: most stages after the module that its memory allows; -1 where none.

        Args:
            rows: options.
            size_B: micro-batches; one where they are all alike.
            steps: their number in a step: of all rows, or [R].
            fewest: of the replica that has the fewest.
        """
        held = self._held(rows, size_B, steps, fewest)
        return held.depth_limit(held.free(rows.dp, self.problem.memory_bytes))

    def most_after(self, rows: OptionRows, size_B: Ints) -> Ints:
        """[R]: :meth:`depth_limit` with one micro-batch, and replicas that need least memory."""
        held = self._held(rows, size_B, 1)
        dp_R = (np.full_like(rows.dp, dp) for dp in (1, MANY))
        each = (held.depth_limit(held.free(dp, self.problem.memory_bytes)) for dp in dp_R)
        return np.maximum(*each)

    def needed_bytes(self, dp: int, size: int, steps: int, after: int) -> float:
        """The least bytes of the fullest device with ``after`` stages after the module."""
        rows = self.rows(np.array([dp]), UNLIMITED)
        held = self._held(rows, np.array([size]), steps)
        active = np.minimum(held.ahead + held.each * after, held.each * steps)
        return float(np.maximum.reduceat(active - held.free(rows.dp, 0.0), held.first).min())

    def _held(
        self, rows: OptionRows, size_B: Ints, steps: int | Ints, fewest: int | Ints | None = None
    ) -> _HeldBytes:
        first = self.shapes.first
        number_R = np.diff(first, append=len(self.shapes.bytes))[rows.shape]
        first_R = np.cumsum(number_R) - number_R
        at = np.repeat(np.arange(len(number_R)), number_R)
        stages = self._bytes_of_stages.of(np.arange(len(at)) - (first_R - first[rows.shape])[at])
        b = rows.b if len(size_B) > 1 else np.zeros_like(rows.b)
        costs, place = self._of_sizes(size_B)
        activation = costs.activation[rows.tp, place[b]][at]
        steps_R = np.broadcast_to(steps, rows.dp.shape)
        tp, size, steps_P = self._tp[rows.tp, 0, 0][at], size_B[b][at], steps_R[at]
        each, ahead = (
            stages.held_bytes(tp, size, activation, first=column) for column in (HELD, HELD_AHEAD)
        )
        if self._interleaved:
            longer = self._group(rows, steps_R, fewest) - self.shapes.pp[rows.shape]
            ahead = ahead + longer[at] * stages.held_bytes(tp, size, activation, first=HELD_LONGER)
        return _HeldBytes(
            stages=stages,
            first=first_R,
            at=at,
            tp=tp,
            steps=steps_P,
            each=each,
            ahead=ahead,
            beside=stages.bytes_beside(size, steps_P),
        )

    def _group(self, rows: OptionRows, steps_R: int | Ints, fewest: int | Ints | None) -> Ints:
        """[R] the longest group of any replica; one may have a micro-batch less."""
        pp = self.shapes.pp[rows.shape]
        return np.maximum(
            largest_group(steps_R, pp), largest_group(steps_R if fewest is None else fewest, pp)
        )

    # --- replicas -----------------------------------------------------------------------

    def replicas(self, samples: int, steps: int, devices: int) -> tuple[Ints, Ints]:
        """(dp, micro-batch size) worth trying for the samples of one step of the pipeline.

        Of the numbers that leave the slowest replica the same micro-batch the smallest is
        kept; under ZeRO-1 also those where more fits.
        """
        most = min(samples, devices // min(self.tps))
        if self.pins.dp is not None:
            dp = np.array(
                [n for n in range(1, most + 1) if self.pins.allows("dp", n)], dtype=np.int64
            )
        else:
            dp = smallest_divisors(samples)
            dp = dp[dp <= most]
            if self.problem.zero_of(self.module):
                dp = self._with_less_state(dp, samples, most, steps, devices)
        size = -(-samples // np.maximum(dp, 1))
        if self.pins.microbatch is not None:
            keep = np.array([self.pins.allows("microbatch", int(b)) for b in size], dtype=np.bool_)
            dp, size = dp[keep], size[keep]
        return dp, size

    def _with_less_state(self, dp: Ints, samples: int, most: int, steps: int, devices: int) -> Ints:
        """These numbers, and those up to the next one where more of some option fits."""
        last = np.append(dp[1:] - 1, most) if len(dp) else dp
        first, last = dp[last > dp], last[last > dp]
        rows, memory_bytes = self.rows(first, devices), self.problem.memory_bytes
        held = self._held(rows, -(-samples // first), steps)
        low, high = (held.depth_limit(held.free(n[rows.b], memory_bytes)) for n in (first, last))
        grows = np.bincount(rows.b, low != high, len(first)) > 0
        extra = [np.arange(a, b + 1) for a, b in zip(first[grows], last[grows], strict=True)]
        return np.unique(np.concatenate([dp, *extra]))


def at_rows(value: NDArray[NumberT], rows: OptionRows) -> NDArray[NumberT]:
    """[R] of [T, Q, B], or of [T, Q, 1] where all micro-batches are alike."""
    return value[rows.tp, rows.shape, 0 if value.shape[2] == 1 else rows.b]
