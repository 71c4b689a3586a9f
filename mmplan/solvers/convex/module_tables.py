"""A module's options in a disaggregated pipeline, for all degrees and micro-batches at once.

Shape suffixes: T = tp degrees, Q = shapes (pp, vpp), S = stages, B = (dp, micro-batch size).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.costs.fit import curve_values
from mmplan.costs.links import all_reduce_s, between_nodes
from mmplan.solvers.convex.branch_and_bound import Options
from mmplan.solvers.convex.stage_tables import (
    FIXED,
    GROUPS,
    HELD,
    HELD_AHEAD,
    HOSTED,
    INNER,
    INNER_BYTES,
    INPUT,
    INPUTS,
    INPUTS_AHEAD,
    LOSS,
    OUTER,
    OUTER_BYTES,
    REDUCED,
    STATE,
    UNLIMITED,
    WEIGHT,
    Shapes,
    module_shapes,
)
from mmplan.solvers.partitioner import allowed_tensor_degrees
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import smallest_divisors

# Quotients of bytes this close to a whole number are it.
ROUNDING = 1e-9
VPP = (1, 2, 4)
# Micro-batches up to this size have their curves computed once.
REMEMBERED = 2048
# Columns of the seconds of a backward.
BACKWARD = slice(INPUT, WEIGHT + 1)
# Less than any activation: bytes divided by it are more than any depth_limit.
TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedOption:
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
        self.tps = allowed_tensor_degrees(problem, module)
        shapes = self._shape_candidates()
        self.shapes: Shapes | None = module_shapes(problem, module, shapes) if shapes else None
        self._remembered: tuple[Floats, Floats] | None = None
        self._tp = np.array(self.tps, dtype=np.int64)[:, None, None]
        if not self.empty:
            scale = self._link_scale()
            self._stages = self.known.seconds * scale[:, :, None]
            self._total = self.known.total * scale

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
        shapes = self.known
        wrong = shapes.vpp > 1
        if interleaved:
            wrong &= steps % shapes.pp != 0
        stage, warm = self.times(size_B, dp_B)
        depth_limit = np.where(wrong[:, None], -1, self.depth_limit(dp_B, size_B, steps))
        devices = self._tp * shapes.pp[:, None] * dp_B
        tp_index, shape, b = np.indices(devices.shape, dtype=np.int64).reshape(3, -1)
        return Table(
            options=Options(
                devices=devices.ravel(),
                warm_s=warm.ravel(),
                stage_s=stage.ravel(),
                reduce_s=self.reduce_s(dp_B, size_B).ravel(),
                depth=shapes.depth[shape],
                depth_limit=depth_limit.ravel(),
            ),
            tp=tp_index,
            shape=shape,
            dp=dp_B[b],
            size=size_B[b],
        )

    def pick(self, table: Table, row: int) -> SelectedOption:
        """The degrees of a row."""
        shapes, q = self.known, int(table.shape[row])
        return SelectedOption(
            tp=self.tps[int(table.tp[row])],
            pp=int(shapes.pp[q]),
            vpp=int(shapes.vpp[q]),
            dp=int(table.dp[row]),
            size=int(table.size[row]),
            cuts=shapes.cuts[q],
        )

    # --- seconds ------------------------------------------------------------------------

    def times(self, size_B: Ints, dp_B: Ints | None = None) -> tuple[Floats, Floats]:
        """[T, Q, B] slowest stage, and one micro-batch through all; messages included.

        Of the busiest replica where ``dp_B`` is given, else a bound on it.
        """
        basis = self.basis(size_B)
        if dp_B is not None and self.problem.varies:
            straggler_B = np.array([self.problem.straggler(self.module, int(n)) for n in dp_B])
            basis = self._at(size_B, size_B * straggler_B)[0]
        stage = (self._stages @ basis[:, None]).max(axis=2)
        compute = self._total[:, :, : LOSS + 1] @ basis[:, : LOSS + 1]
        messages = self._total[:, :, LOSS + 1 :] @ basis[:, LOSS + 1 :]
        # A module with vpp chunks on each rank waits for one chunk where others wait for a stage.
        vpp = self.known.vpp[:, None]
        fill = np.where(vpp == 1, compute, stage + np.maximum(compute - stage, 0.0) / vpp)
        return stage, fill + messages

    def basis(self, size_B: Ints) -> Floats:
        """[T, 8, B]: what the columns of a stage's seconds are multiplied by."""
        return self._curves(size_B)[0]

    def _curves(self, size_B: Ints) -> tuple[Floats, Floats]:
        """The basis, and [T, B] activation bytes; small sizes are computed once."""
        if len(size_B) and int(size_B.max()) <= REMEMBERED:
            if self._remembered is None:
                sizes = np.arange(1, REMEMBERED + 1)
                self._remembered = self._at(sizes, sizes)
            basis, activation = self._remembered
            return basis[:, :, size_B - 1], activation[:, size_B - 1]
        return self._at(size_B, size_B)

    def _at(self, size_B: Ints, worth_B: Ints | Floats) -> tuple[Floats, Floats]:
        """As :meth:`_curves`, for micro-batches worth so many samples of mean work."""
        costs, task = self.problem.costs, self.problem.task.name
        ones, sizes = np.ones(len(size_B)), size_B.astype(np.float64)
        loss = np.zeros(len(size_B))
        for name in self.problem.hosted_losses(self.module):
            own = costs.loss_curves(name)
            if own is not None:
                loss = loss + curve_values(own.forward, size_B) + curve_values(own.backward, size_B)
        basis: list[Floats] = []
        activation: list[Floats] = []
        for tp in self.tps:
            fit = costs.curves(task=task, module=self.module, tp=tp)
            inputs = curve_values(fit.backward_input, worth_B)
            weights = np.maximum(curve_values(fit.backward, worth_B) - inputs, 0.0)
            forward = curve_values(fit.forward, worth_B)
            basis.append(np.stack([forward, inputs, weights, loss, ones, sizes, ones, sizes]))
            activation.append(curve_values(fit.activation_bytes, size_B))
        return np.stack(basis), np.stack(activation)

    def _link_scale(self) -> Floats:
        """[T, Q, 8]: latencies and bandwidths of the links that the message columns use.

        Between nodes the ranks of a TP group receive shares, over one link, and gather them.
        """
        cluster, shapes = self.problem.request.cluster, self.known
        one_node = self.problem.devices <= cluster.devices_per_node
        near = one_node | (cluster.devices_per_node % (self._tp[:, :, 0] * shapes.pp) == 0)
        inside, between = cluster.links.intra_node, between_nodes(cluster)
        inside_byte_s = 1 / inside.bandwidth_bytes_per_s
        gather_s, gather_byte_s = self._gathers_s()
        between_s = between.latency_s + gather_s
        between_byte_s = 1 / between.bandwidth_bytes_per_s + gather_byte_s
        scale = np.ones((len(self.tps), len(shapes.pp), 8))
        scale[:, :, INNER] = np.where(near, inside.latency_s, between_s)
        scale[:, :, INNER_BYTES] = np.where(near, inside_byte_s, between_byte_s)
        scale[:, :, OUTER] = inside.latency_s if one_node else between_s
        scale[:, :, OUTER_BYTES] = inside_byte_s if one_node else between_byte_s
        return scale

    def _gathers_s(self) -> tuple[Floats, Floats]:
        """[T, 1] each: latency and seconds per byte of gathering shares in a TP group."""
        gather_s = self.problem.costs.gather_shares_s
        groups = [range(tp) for tp in self.tps]
        none = np.array([gather_s(ranks=group, num_bytes=0) for group in groups])
        one = np.array([gather_s(ranks=group, num_bytes=1) for group in groups])
        return none[:, None], (one - none)[:, None]

    def reduce_s(self, dp_B: Ints, size_B: Ints) -> Floats:
        """[T, Q, B]: gradient reduction of the stage with most parameters.

        The stages of a replica on one node share its bandwidth, but end their last micro-batch
        one backward after the other: n reductions so end max(one alone, n - (n - 1) backwards)
        after the last stage.
        """
        shapes, cluster = self.known, self.problem.request.cluster
        num_bytes = shapes.gradient_bytes[:, None] / self._tp
        if not shapes.gradient_bytes.any():
            return np.zeros((len(self.tps), len(shapes.pp), len(dp_B)))
        stride, node = self._tp * shapes.pp[:, None], cluster.devices_per_node
        num_local = np.minimum(dp_B, np.maximum(1, -(-node // stride)))
        num_nodes = (dp_B - 1) * stride // node + 1
        group = cluster, dp_B, num_local, num_nodes, num_bytes
        sharers = np.minimum(stride, node)
        alone_s = all_reduce_s(*group, sharers=self._tp)
        together_s = all_reduce_s(*group, sharers=sharers)
        stages = shapes.pp * shapes.vpp
        backward_s = self._total[:, :, BACKWARD] @ self.basis(size_B)[:, BACKWARD]
        apart_s = (sharers // self._tp - 1) * backward_s / stages[:, None]
        return np.where(num_bytes > 0, np.maximum(alone_s, together_s - apart_s), 0.0)

    # --- bytes --------------------------------------------------------------------------

    def depth_limit(self, dp_B: Ints, size_B: Ints, steps: int | Ints) -> Ints:
        """[T, Q, B]: most stages after the module that its memory allows; -1 where none."""
        free, each, ahead = self._bytes(dp_B, size_B, self.problem.memory_bytes)
        # Where nothing is held only the parameters count; all micro-batches are the most held.
        depth_limit = np.floor((free - ahead) / np.maximum(each, TINY) + ROUNDING)
        depth_limit = np.where(free * (1 + ROUNDING) >= each * steps, UNLIMITED, depth_limit)
        depth_limit = np.where(free < 0, -1, depth_limit).min(axis=2)
        return np.clip(depth_limit, -1, UNLIMITED).astype(np.int64)

    def needed_bytes(self, dp_B: Ints, size_B: Ints, steps: int, after: int) -> Floats:
        """[T, Q, B]: bytes of the fullest device with ``after`` stages after the module."""
        free, each, ahead = self._bytes(dp_B, size_B, 0.0)
        return (np.minimum(ahead + each * after, each * steps) - free).max(axis=2)

    def _bytes(
        self, dp_B: Ints, size_B: Ints, memory_bytes: float
    ) -> tuple[Floats, Floats, Floats]:
        """[T, Q, S, B]: what parameters leave, a micro-batch, and those in the module itself."""
        problem, table = self.problem, self.known.bytes[:, :, :, None]
        tp = self._tp[..., None]
        groups = (
            table[:, :, GROUPS]
            + (tp > 1)
            + table[:, :, REDUCED] * (dp_B > 1)
            + table[:, :, HOSTED] * ((dp_B > 1) & (tp > 1))
        )
        fixed = table[:, :, FIXED] / tp
        if problem.costs.training.zero:
            fixed = fixed + table[:, :, STATE] / tp / dp_B
        free = memory_bytes - fixed - groups * problem.request.cluster.device.communicator_bytes
        activation = self._curves(size_B)[1][:, None, None]
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
                dp = self._with_less_state(dp, samples, most, steps)
        size = -(-samples // np.maximum(dp, 1))
        if self.pins.microbatch is not None:
            keep = np.array([self.pins.allows("microbatch", int(b)) for b in size], dtype=np.bool_)
            dp, size = dp[keep], size[keep]
        return dp, size

    def _with_less_state(self, dp: Ints, samples: int, most: int, steps: int) -> Ints:
        last = np.append(dp[1:] - 1, most) if len(dp) else dp
        size = -(-samples // np.maximum(dp, 1))
        low, high = (self.depth_limit(n, size, steps) for n in (dp, last))
        grows = np.any(low != high, axis=(0, 1))
        extra = [np.arange(dp[i], last[i] + 1) for i in np.flatnonzero(grows)]
        return np.unique(np.concatenate([dp, *extra]))
