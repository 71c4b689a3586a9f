"""Scalability curves: how long each block of a MetaOp takes on every valid number of devices.

n devices are tp x dp of them, each replica with its share of the round's samples (uneven where
dp does not divide them), in the micro-batches that take least time.

Shape suffixes: D = numbers of replicas, C = ways to cut a share, P = sizes of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.costs.curves import curve_values
from mmplan.errors import InfeasibleError
from mmplan.solvers.mpsp.bounds import DeviceSecondsCurve, curve, level_bound
from mmplan.solvers.mpsp.instance import Chain, parts
from mmplan.solvers.mpsp.metaops import MetaOp
from mmplan.solvers.partitioner import degree_candidates
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import replica_counts
from mmplan.wording import counted

# Several degrees of one module are tried where their bound is less than this share of one's.
_GAIN = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Degrees of a slice.

    Attributes:
        size: largest micro-batch; ``pinned`` where it is the user's.
    """

    tp: int
    dp: int
    size: int
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaling:
    """A MetaOp's allocations and the seconds of its blocks, for one round.

    Attributes:
        allocations: by ascending number of devices, K of them.
        forward_s: ``[K, L]``; ``backward_s`` likewise.
    """

    op: MetaOp
    allocations: tuple[Allocation, ...]
    forward_s: Floats
    backward_s: Floats

    def chain(self, group: int) -> Chain:
        """As the scheduler sees it."""
        return Chain(
            name=self.op.name,
            counts=tuple(a.tp * a.dp for a in self.allocations),
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            after=self.op.after,
            group=group,
        )


class Scalings:
    """All MetaOps' curves for rounds of a part of the batch.

    Args:
        problems: by task.
        rounds: of a step.
        least_parts: micro-batches that a share is cut into at least, where it has as many samples.
    """

    def __init__(
        self,
        ops: Sequence[MetaOp],
        problems: Mapping[str, Problem],
        rounds: int,
        *,
        least_parts: int = 1,
    ) -> None:
        self._ops = ops
        self._problems = problems
        self.rounds = rounds
        self._least_parts = least_parts
        self._curves: dict[tuple[int, int | None], DeviceSecondsCurve] = {}
        self._tables = [
            {
                tp: rows
                for tp in degrees(problems[op.task], op.module)
                if (rows := self._of_degree(op, tp))
            }
            for op in ops
        ]
        for op, tables in zip(ops, self._tables, strict=True):
            if not tables:
                raise InfeasibleError(
                    f"{op.name}: no degrees that its plan and profile allow fit "
                    f"{counted(problems[op.task].devices, 'device')}",
                    hint=f"loosen modules.{op.module}.plan, or use more devices",
                )

    def free(self) -> list[Scaling]:
        """Every MetaOp on its own best degrees: no plan is faster anywhere."""
        return [self._best(m, self._tables[m]) for m in range(len(self._ops))]

    def choices(self) -> list[list[Scaling]]:
        """Ways to choose tp for modules that several MetaOps share, most promising first.

        One degree for each module in most of them: a rank holds a block as one shard, so slices
        of one module with several degrees need ranks of their own. Where that could gain, every
        MetaOp on its own best degrees is tried as well.
        """
        shared: dict[str, list[int]] = {}
        for m, op in enumerate(self._ops):
            shared.setdefault(op.owner, []).append(m)
        common = {
            owner: sorted(set.intersection(*({*self._tables[m]} for m in members)))
            for owner, members in shared.items()
            if len(members) > 1
        }
        for owner, options in common.items():
            if not options:
                raise InfeasibleError(
                    f"module {owner}: the tasks that share it allow no tp degree in common",
                    hint=f"loosen modules.{owner}.plan, or profile it at one tp for all tasks",
                )
        best = {owner: options[0] for owner, options in common.items()}
        for _ in range(2 if len(common) > 1 else 1):
            for owner, options in common.items():
                best[owner] = min(options, key=lambda tp: self._bound_s({**best, owner: tp}))
        fixed = [best]
        for least in sorted({tp for options in common.values() for tp in options}):
            # Larger degrees need less memory of each device.
            raised = {
                owner: min((tp for tp in options if tp >= least), default=options[-1])
                for owner, options in common.items()
            }
            fixed += [raised] if raised not in fixed else []
        ways = [self._fixed(tps) for tps in fixed]
        if common and self._bound_s({}) < _GAIN * self._bound_s(best):
            ways.insert(1, self.free())
        return ways

    def _bound_s(self, tps: Mapping[str, int]) -> float:
        curves = [self._curve(m, tps.get(op.owner)) for m, op in enumerate(self._ops)]
        return level_bound(curves, self._problems[self._ops[0].task].devices)

    def _curve(self, m: int, tp: int | None) -> DeviceSecondsCurve:
        """Of a MetaOp at one tp, or on its own best degrees."""
        if (m, tp) not in self._curves:
            tables = self._tables[m] if tp is None else {tp: self._tables[m][tp]}
            chain = self._best(m, tables).chain(0)
            self._curves[m, tp] = curve(chain.counts, parts(chain.both_s))
        return self._curves[m, tp]

    def _fixed(self, tps: Mapping[str, int]) -> list[Scaling]:
        return [
            self._best(
                m,
                self._tables[m]
                if op.owner not in tps
                else {tps[op.owner]: self._tables[m][tps[op.owner]]},
            )
            for m, op in enumerate(self._ops)
        ]

    def _best(self, m: int, tables: Mapping[int, dict[int, _CurveRow]]) -> Scaling:
        """The fastest allocation of every number of devices."""
        rows: dict[int, _CurveRow] = {}
        for own in tables.values():
            for count, row in own.items():
                if count not in rows or row.total_s < rows[count].total_s:
                    rows[count] = row
        ordered = [rows[count] for count in sorted(rows)]
        return Scaling(
            op=self._ops[m],
            allocations=tuple(row.allocation for row in ordered),
            forward_s=np.array([row.forward_s for row in ordered]),
            backward_s=np.array([row.backward_s for row in ordered]),
        )

    def _of_degree(self, op: MetaOp, tp: int) -> dict[int, _CurveRow]:
        problem = self._problems[op.task]
        pins = problem.request.workload.modules[op.module].plan
        samples = op.batch // self.rounds
        replicas = replica_counts(samples, problem.devices // tp, uneven=True, pins=pins)
        if not replicas:
            return {}  # no number of replicas that the pins allow fits this degree
        blocks = _Blocks(problem, op.module, tp)
        dp_D = np.array(replicas, dtype=np.int64)
        pinned = pins.microbatch
        if pinned is None:
            cut = blocks.fastest(dp_D, samples, self._least_parts)
        else:
            allowed = [pinned] if isinstance(pinned, int) else sorted(set(pinned))
            cut = blocks.pinned(dp_D, samples, allowed)
        forward_DL, backward_DL = blocks.seconds(cut)
        return {
            tp * int(dp): _CurveRow(
                Allocation(tp=tp, dp=int(dp), size=int(size), pinned=pinned is not None),
                forward_DL[d],
                backward_DL[d],
            )
            for d, (dp, size) in enumerate(zip(cut.dp, cut.size.max(axis=1), strict=True))
        }


def degrees(problem: Problem, module: str) -> list[int]:
    """tp degrees of a module without pipeline stages: slices take their place."""
    return sorted(tp for tp, pp in degree_candidates(problem, module) if pp == 1)


@dataclass(frozen=True, slots=True)
class _CurveRow:
    allocation: Allocation
    forward_s: Floats
    backward_s: Floats

    @property
    def total_s(self) -> float:
        """Of all blocks."""
        return float((self.forward_s + self.backward_s).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """Micro-batches of the largest share of each number of replicas.

    Attributes:
        dp: ``[D]``.
        size: ``[D, 2]`` samples of a micro-batch, of two sizes at most.
        count: ``[D, 2]`` micro-batches of that size.
    """

    dp: Ints
    size: Ints
    count: Ints


class _Blocks:
    """Seconds of every block of a module at one tp."""

    def __init__(self, problem: Problem, module: str, tp: int) -> None:
        self._problem, self._module = problem, module
        task, blocks = problem.task.name, range(problem.blocks(module))
        costs = problem.costs
        share = [costs.work_share(task=task, module=module, blocks=(b, b + 1)) for b in blocks]
        facts = [problem.stage(module, (b, b + 1)) for b in blocks]
        self._share = np.array(share)
        self._passed = self._share * [fact.passed is not None for fact in facts]
        self._trained = self._share * [bool(fact.trainable) for fact in facts]
        self._fit = costs.curves(task=task, module=module, tp=tp)
        losses = (costs.loss_curves(name) for name in facts[-1].hosted)
        self._losses = [own for own in losses if own is not None]
        self._again = float(problem.request.workload.modules[module].recompute == "full")

    def fastest(self, dp_D: Ints, samples: int, least_parts: int) -> _Cut:
        """Each number of replicas with the micro-batches that take least time."""
        share_D = -(-samples // dp_D)
        # In so many parts, or of so many samples.
        parts = np.minimum(np.arange(1, 9), share_D[:, None])
        sizes = 2 ** np.arange(int(share_D.max()).bit_length())
        count_DC = np.hstack([parts, -(-share_D[:, None] // sizes)])
        count_DC = np.maximum(count_DC, np.minimum(least_parts, share_D)[:, None])
        least_DC, larger_DC = np.divmod(share_D[:, None], count_DC)
        factor_D = self._factors(dp_D)[:, None]
        total_DC = (count_DC - larger_DC) * self._total_s(least_DC, factor_D)
        total_DC += larger_DC * self._total_s(least_DC + 1, factor_D)
        best = np.arange(len(dp_D)), total_DC.argmin(axis=1)
        count_D, least_D, larger_D = count_DC[best], least_DC[best], larger_DC[best]
        return _sorted_out(
            dp_D,
            np.stack([least_D + 1, least_D], axis=1),
            np.stack([larger_D, count_D - larger_D], axis=1),
        )

    def pinned(self, dp_D: Ints, samples: int, allowed: Sequence[int]) -> _Cut:
        """Each number of replicas with the allowed size that takes least, where one fits."""
        share_D = -(-samples // dp_D)
        found: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
        for dp, share in zip(dp_D.tolist(), share_D.tolist(), strict=True):
            sizes = [size for size in allowed if size <= share]
            if sizes:
                tried = _sorted_out(
                    np.full(len(sizes), dp),
                    np.array([(size, share % size) for size in sizes]),
                    np.array([(share // size, 1) for size in sizes]),
                )
                forward, backward = self.seconds(tried)
                best = int((forward.sum(axis=1) + backward.sum(axis=1)).argmin())
                found.append((dp, tuple(tried.size[best]), tuple(tried.count[best])))
        return _Cut(
            dp=np.array([dp for dp, _, _ in found], dtype=np.int64),
            size=np.array([sizes for _, sizes, _ in found], dtype=np.int64).reshape(-1, 2),
            count=np.array([counts for _, _, counts in found], dtype=np.int64).reshape(-1, 2),
        )

    def seconds(self, cut: _Cut) -> tuple[Floats, Floats]:
        """Forward and backward ``[D, L]`` of the busiest replica's micro-batches."""
        worth_DP = cut.size * self._factors(cut.dp)[:, None]
        forward_D, inputs_D, weights_D = (
            (cut.count * x).sum(axis=1) for x in self._seconds(worth_DP)
        )
        forward = np.outer(forward_D, self._share)
        backward = np.outer(inputs_D, self._passed) + np.outer(weights_D, self._trained)
        for loss in self._losses:
            forward[:, -1] += (cut.count * curve_values(loss.forward, cut.size)).sum(axis=1)
            backward[:, -1] += (cut.count * curve_values(loss.backward, cut.size)).sum(axis=1)
        return forward, backward

    def _factors(self, dp_D: Ints) -> Floats:
        """Work of the busiest of so many replicas by the mean's."""
        return np.array([self._problem.straggler(self._module, dp) for dp in dp_D.tolist()])

    def _total_s(self, size: Ints, factor: Floats) -> Floats:
        """Forward and backward of one micro-batch, all blocks together."""
        forward, inputs, weights = self._seconds(size * factor)
        total = forward * self._share.sum() + inputs * self._passed.sum()
        total += weights * self._trained.sum()
        for loss in self._losses:
            total += curve_values(loss.forward, size) + curve_values(loss.backward, size)
        return total

    def _seconds(self, worth: Floats) -> tuple[Floats, Floats, Floats]:
        """Forward, and the backward of inputs and of weights, of the whole module."""
        forward = curve_values(self._fit.forward, worth)
        inputs = curve_values(self._fit.backward_input, worth)
        weights = np.maximum(curve_values(self._fit.backward, worth) - inputs, 0.0)
        return forward, inputs + self._again * forward, weights


def _sorted_out(dp_D: Ints, size_DP: Ints, count_DP: Ints) -> _Cut:
    """Without micro-batches of no samples, or none of a size: both are then 0."""
    some = (size_DP > 0) & (count_DP > 0)
    return _Cut(dp=dp_D, size=size_DP * some, count=count_DP * some)
