"""A module's options in a disaggregated pipeline, for all degrees and micro-batches at once.

Shape suffixes: Q = shapes (pp, vpp), S = stages, B = (dp, micro-batch size), H = corners of a
lower hull.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmplan.schema.cluster import Cluster, CollectiveLinks, Link
from mmplan.solvers.convex_core import Options
from mmplan.solvers.convex_stages import (
    FIXED,
    GROUPS,
    HELD,
    HELD_AHEAD,
    HOSTED,
    INNER,
    INNER_BYTES,
    INPUTS,
    INPUTS_AHEAD,
    LOSS,
    OUTER,
    OUTER_BYTES,
    REDUCED,
    STATE,
    UNLIMITED,
    Floats,
    Ints,
    Shapes,
    curve_values,
    module_shapes,
)
from mmplan.solvers.problem import Problem

# Quotients of bytes this close to a whole number are it.
ROUNDING = 1e-9
VPP = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One option, as degrees."""

    tp: int
    pp: int
    vpp: int
    dp: int
    size: int
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Options of a module, and what their rows mean.

    Attributes:
        options: the core's columns.
        tp: index into the module's degrees of each row.
        shape: index of its (pp, vpp).
        dp: replicas.
        size: largest micro-batch.
    """

    options: Options
    tp: Ints
    shape: Ints
    dp: Ints
    size: Ints


class ModuleTables:
    """Everything the options of one module are made of.

    Args:
        backbone: the module whose replicas set the micro-batches.
        interleaved: whether it may have vpp > 1.
    """

    def __init__(self, problem: Problem, module: str, *, backbone: bool, interleaved: bool) -> None:
        self.problem, self.module, self.backbone = problem, module, backbone
        self._interleaved = interleaved
        self.pins = problem.request.workload.modules[module].plan
        self.tps = _tensor_degrees(problem, module)
        shapes = self._shape_candidates()
        self.shapes: Shapes | None = module_shapes(problem, module, shapes) if shapes else None
        self._seconds: dict[int, tuple[Floats, Floats]] = {}

    @property
    def empty(self) -> bool:
        """Whether pins, profile and devices leave no degrees at all."""
        return self.shapes is None or not self.tps

    @property
    def known(self) -> Shapes:
        """The shapes of a module that has any."""
        if self.shapes is None:
            raise ValueError(f"module {self.module} has no shapes")
        return self.shapes

    @property
    def parameter_bytes(self) -> Floats:
        """[9]: columns of all stages' bytes, of which FIXED and STATE mean something here."""
        return self.known.total_bytes

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

    def table(self, dp_B: Ints, size_B: Ints, *, steps: int, interleaved: bool) -> Table:
        """All options with given replicas and micro-batches.

        Args:
            dp_B: replicas.
            size_B: their largest micro-batch.
            steps: micro-batches of a step.
            interleaved: whether vpp > 1 is possible with these steps.
        """
        shapes, count = self.known, len(dp_B)
        columns: list[list[Floats]] = [[] for _ in range(6)]
        grid = np.indices((len(self.tps), len(shapes.pp), count), dtype=np.int64)
        for tp in self.tps:
            stage, warm = self.times(tp, size_B)
            room = self.room(tp, dp_B, size_B, steps)
            devices = tp * shapes.pp[:, None] * dp_B
            wrong = shapes.vpp > 1
            if interleaved:
                wrong &= steps % shapes.pp != 0
            room = np.where(wrong[:, None], -1, room)
            depth = np.broadcast_to(shapes.depth[:, None], devices.shape)
            for column, values in zip(
                columns, (devices, warm, stage, self.reduce_s(tp, dp_B), depth, room), strict=True
            ):
                column.append(values.astype(np.float64))
        devices, warm, stage, reduce, depth, room = (np.stack(c).ravel() for c in columns)
        tp_index, shape, b = (axis.ravel() for axis in grid)
        return Table(
            options=Options(
                devices=devices.astype(np.int64),
                warm_s=warm,
                stage_s=stage,
                reduce_s=reduce,
                depth=depth.astype(np.int64),
                room=room.astype(np.int64),
            ),
            tp=tp_index,
            shape=shape,
            dp=dp_B[b],
            size=size_B[b],
        )

    def pick(self, table: Table, row: int) -> Pick:
        """The degrees of a row."""
        shapes, q = self.known, int(table.shape[row])
        return Pick(
            tp=self.tps[int(table.tp[row])],
            pp=int(shapes.pp[q]),
            vpp=int(shapes.vpp[q]),
            dp=int(table.dp[row]),
            size=int(table.size[row]),
            cuts=shapes.cuts[q],
        )

    # --- seconds ------------------------------------------------------------------------

    def times(self, tp: int, size_B: Ints) -> tuple[Floats, Floats]:
        """([Q, B] slowest stage, [Q, B] one micro-batch through all), messages included."""
        stages, total = self._linked(tp)
        basis = self.basis(tp, size_B)
        stage = (stages @ basis).max(axis=1)
        compute = total[:, : LOSS + 1] @ basis[: LOSS + 1]
        messages = total[:, LOSS + 1 :] @ basis[LOSS + 1 :]
        # A module with vpp chunks on each rank waits for one chunk where others wait for a stage.
        vpp = self.known.vpp[:, None]
        ramp = np.where(vpp == 1, compute, stage + np.maximum(compute - stage, 0.0) / vpp)
        return stage, ramp + messages

    def basis(self, tp: int, size_B: Ints) -> Floats:
        """[8, B]: what the columns of a stage's seconds are multiplied by."""
        costs, task = self.problem.costs, self.problem.task.name
        fit = costs.curves(task=task, module=self.module, tp=tp)
        backward = curve_values(fit.backward, size_B)
        inputs = curve_values(fit.backward_input, size_B)
        loss = np.zeros(len(size_B))
        for name in self.problem.hosted_losses(self.module):
            own = costs.loss_curves(name)
            if own is not None:
                loss = loss + curve_values(own.forward, size_B) + curve_values(own.backward, size_B)
        ones = np.ones(len(size_B))
        return np.stack(
            [
                curve_values(fit.forward, size_B),
                inputs,
                np.maximum(backward - inputs, 0.0),
                loss,
                ones,
                size_B.astype(np.float64),
                ones,
                size_B.astype(np.float64),
            ]
        )

    def _linked(self, tp: int) -> tuple[Floats, Floats]:
        """Seconds of stages and totals with the links' latencies and bandwidths in them."""
        if tp not in self._seconds:
            shapes, cluster = self.known, self.problem.request.cluster
            inner = [
                cluster.links.intra_node
                if cluster.devices_per_node % (tp * pp) == 0 or self._one_node
                else _between_nodes(cluster)
                for pp in shapes.pp
            ]
            outer = cluster.links.intra_node if self._one_node else _between_nodes(cluster)
            scale = np.ones((len(inner), 8))
            scale[:, INNER] = [link.latency_s for link in inner]
            scale[:, INNER_BYTES] = [1 / link.bandwidth_bytes_per_s for link in inner]
            scale[:, OUTER] = outer.latency_s
            scale[:, OUTER_BYTES] = 1 / outer.bandwidth_bytes_per_s
            self._seconds[tp] = shapes.seconds * scale[:, None], shapes.total * scale
        return self._seconds[tp]

    @property
    def _one_node(self) -> bool:
        return self.problem.devices <= self.problem.request.cluster.devices_per_node

    def reduce_s(self, tp: int, dp_B: Ints) -> Floats:
        """[Q, B]: gradient reduction of the stage with most parameters."""
        shapes, cluster = self.known, self.problem.request.cluster
        stride = (tp * shapes.pp)[:, None]
        node = cluster.devices_per_node
        num_local = np.minimum(dp_B, np.maximum(1, -(-node // stride)))
        num_nodes = (dp_B - 1) * stride // node + 1
        num_bytes = (shapes.gradient_bytes / tp)[:, None]
        reduced = all_reduce_s(cluster, num_local, num_nodes, num_bytes, sharers=tp)
        return np.where(num_bytes > 0, reduced, 0.0)

    # --- bytes --------------------------------------------------------------------------

    def room(
        self,
        tp: int,
        dp_B: Ints,
        size_B: Ints,
        steps: int | Ints,
        *,
        memory_bytes: float | None = None,
    ) -> Ints:
        """[Q, B]: most stages after the module that its memory allows; -1 where none."""
        free, each, ahead = self._bytes(tp, dp_B, size_B, memory_bytes)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.floor((free - ahead) / each + ROUNDING)
        unlimited = free * (1 + ROUNDING) >= each * steps
        room = np.where(
            each > 0, np.where(unlimited, UNLIMITED, room), np.where(free >= 0, UNLIMITED, -1)
        )
        return np.maximum(np.minimum(room.min(axis=1), UNLIMITED), -1).astype(np.int64)

    def needed_bytes(self, tp: int, dp_B: Ints, size_B: Ints, steps: int, after: int) -> Floats:
        """[Q, B]: bytes of the fullest device with ``after`` stages after the module."""
        free, each, ahead = self._bytes(tp, dp_B, size_B, 0.0)
        return (np.minimum(ahead + each * after, each * steps) - free).max(axis=1)

    def _bytes(
        self, tp: int, dp_B: Ints, size_B: Ints, memory_bytes: float | None
    ) -> tuple[Floats, Floats, Floats]:
        """[Q, S, B]: what parameters leave, a micro-batch, and those in the module itself."""
        problem = self.problem
        memory = problem.memory_bytes if memory_bytes is None else memory_bytes
        table = self.known.bytes[:, :, :, None]
        shards = dp_B if problem.costs.training.zero else np.ones_like(dp_B)
        groups = (
            table[:, :, GROUPS]
            + float(tp > 1)
            + table[:, :, REDUCED] * (dp_B > 1)
            + table[:, :, HOSTED] * ((dp_B > 1) & (tp > 1))
        )
        free = (
            memory
            - table[:, :, FIXED] / tp
            - table[:, :, STATE] / tp / shards
            - groups * problem.request.cluster.device.communicator_bytes
        )
        fit = problem.costs.curves(task=problem.task.name, module=self.module, tp=tp)
        activation = curve_values(fit.activation_bytes, size_B)
        each, ahead = table[:, :, HELD] * activation, table[:, :, HELD_AHEAD] * activation
        if problem.request.workload.modules[self.module].recompute == "full":
            each = np.minimum(each, table[:, :, INPUTS] * size_B)
            ahead = np.minimum(ahead, table[:, :, INPUTS_AHEAD] * size_B)
        return free, each, ahead

    # --- replicas -----------------------------------------------------------------------

    def replicas(self, samples: int, steps: int) -> tuple[Ints, Ints]:
        """(dp, micro-batch size) worth trying for the samples of one step of the pipeline.

        Of the numbers that leave the slowest replica the same micro-batch the smallest is
        kept; under ZeRO-1 also those where more fits.
        """
        most = min(samples, self.problem.devices // min(self.tps))
        if self.pins.dp is not None:
            dp = np.array(
                [n for n in range(1, most + 1) if self.pins.allows("dp", n)], dtype=np.int64
            )
        else:
            dp = smallest_divisors(samples)
            dp = dp[dp <= most]
            if self.problem.costs.training.zero:
                dp = self._with_more_room(dp, samples, most, steps)
        size = -(-samples // np.maximum(dp, 1))
        if self.pins.microbatch is not None:
            keep = np.array([self.pins.allows("microbatch", int(b)) for b in size], dtype=np.bool_)
            dp, size = dp[keep], size[keep]
        return dp, size

    def _with_more_room(self, dp: Ints, samples: int, most: int, steps: int) -> Ints:
        last = np.append(dp[1:] - 1, most) if len(dp) else dp
        size = -(-samples // np.maximum(dp, 1))
        grows = np.zeros(len(dp), dtype=np.bool_)
        for tp in self.tps:
            low, high = (self.room(tp, n, size, steps) for n in (dp, last))
            grows |= (low != high).any(axis=0)
        extra = [np.arange(dp[i], last[i] + 1) for i in np.flatnonzero(grows)]
        return np.unique(np.concatenate([dp, *extra]))


def smallest_divisors(samples: int) -> Ints:
    """Numbers of replicas n, ascending, each the smallest with its ceil(samples / n)."""
    root = int(samples**0.5) + 1
    few = np.arange(1, root + 1, dtype=np.int64)
    size = np.concatenate([-(-samples // few), few])
    return np.unique(-(-samples // size[size <= samples]))


def all_reduce_s(
    cluster: Cluster, num_local: Ints, num_nodes: Ints, num_bytes: Floats, *, sharers: int
) -> Floats:
    """:func:`mmplan.links.collective_s` for many groups of ranks at once."""
    links = cluster.links
    inside = _phase_s(num_local, num_bytes, links.intra_node, links.intra_node_collectives)
    between = _phase_s(
        num_nodes, num_bytes * sharers, _between_nodes(cluster), links.inter_node_collectives
    )
    return inside + between


def _phase_s(num: Ints, num_bytes: Floats, link: Link, measured: CollectiveLinks | None) -> Floats:
    ring_bytes = 2 * (num - 1) / num * num_bytes
    if measured is not None and measured.all_reduce is not None:
        own = measured.all_reduce
        seconds = own.latency_s + ring_bytes / own.bandwidth_bytes_per_s
    else:
        ring = 2 * (num - 1) * link.latency_s + ring_bytes / link.bandwidth_bytes_per_s
        steps = 2 * np.ceil(np.log2(np.maximum(num, 1)))
        seconds = np.minimum(
            ring, steps * link.latency_s + 2 * num_bytes / link.bandwidth_bytes_per_s
        )
    return np.where(num > 1, seconds, 0.0)


def _between_nodes(cluster: Cluster) -> Link:
    return cluster.links.inter_node or cluster.links.intra_node


def _tensor_degrees(problem: Problem, module: str) -> list[int]:
    """Profiled, allowed, and groups of one size tile a node."""
    node, devices = problem.request.cluster.devices_per_node, problem.devices
    pins = problem.request.workload.modules[module].plan
    return [
        tp
        for tp in problem.costs.tp_options(task=problem.task.name, module=module)
        if tp <= min(node, devices)
        and pins.allows("tp", tp)
        and (devices <= node or node % tp == 0)
    ]
