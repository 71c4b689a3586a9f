"""Scalability curves: how long each block of a MetaOp takes on every valid number of devices.

n devices are tp x dp of them, each replica with its share of the round's samples (uneven where
dp does not divide them), in the micro-batches that take least time.

Shape suffixes: D = numbers of replicas, C = ways to cut a share, P = sizes of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.errors import InfeasibleError
from mmplan.schema.profile import Curve as FittedCurve
from mmplan.schema.workload import Pins
from mmplan.solvers.convex_stages import curve_values
from mmplan.solvers.metaops import MetaOp
from mmplan.solvers.mpsp_bounds import Curve, curve, level_bound
from mmplan.solvers.mpsp_model import Chain, Floats, parts
from mmplan.solvers.partitioner import degree_candidates
from mmplan.solvers.problem import Problem
from mmplan.solvers.shares import replica_counts

Ints = NDArray[np.int64]
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

    def allocation(self, count: int) -> Allocation:
        """The one on so many devices."""
        return next(a for a in self.allocations if a.tp * a.dp == count)


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
        self._curves: dict[tuple[int, int | None], Curve] = {}
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
                    f"{problems[op.task].devices} devices",
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

    def _curve(self, m: int, tp: int | None) -> Curve:
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

    def _best(self, m: int, tables: Mapping[int, dict[int, _Row]]) -> Scaling:
        """The fastest allocation of every number of devices."""
        rows: dict[int, _Row] = {}
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

    def _of_degree(self, op: MetaOp, tp: int) -> dict[int, _Row]:
        problem = self._problems[op.task]
        pins = problem.request.workload.modules[op.module].plan
        pinned = pins.microbatch is not None
        samples = op.batch // self.rounds
        blocks = _Blocks(problem, op.module, tp)
        counts = replica_counts(samples, problem.devices // tp, uneven=True, pins=pins)
        rows: dict[int, _Row] = {}
        for dp, sizes in blocks.fastest(counts, samples, pins, self._least_parts):
            allocation = Allocation(
                tp=tp, dp=dp, size=max(size for _, size in sizes), pinned=pinned
            )
            rows[tp * dp] = _Row(allocation, *blocks.seconds(sizes, dp))
        return rows


def degrees(problem: Problem, module: str) -> list[int]:
    """tp degrees of a module without pipeline stages: slices take their place."""
    return sorted(tp for tp, pp in degree_candidates(problem, module) if pp == 1)


@dataclass(frozen=True, slots=True)
class _Row:
    allocation: Allocation
    forward_s: Floats
    backward_s: Floats

    @property
    def total_s(self) -> float:
        """Of all blocks."""
        return float((self.forward_s + self.backward_s).sum())


Sizes = list[tuple[int, int]]
"""Micro-batches of a replica: how many of which size."""


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

    def fastest(
        self, replicas: Sequence[int], samples: int, pins: Pins, least_parts: int
    ) -> Iterator[tuple[int, Sizes]]:
        """Each number of replicas with the micro-batches of the largest share that take least."""
        dp_D = np.array(replicas, dtype=np.int64)
        share_D = -(-samples // dp_D)
        factor_D = np.array([self._problem.straggler(self._module, dp) for dp in replicas])
        pinned = pins.microbatch
        if pinned is not None:
            yield from self._pinned(dp_D, share_D, [pinned] if isinstance(pinned, int) else pinned)
            return
        if not replicas:
            return  # no number of replicas that the pins allow fits this degree
        # In so many parts, or of so many samples.
        parts = np.minimum(np.arange(1, 9), share_D[:, None])
        sizes = 2 ** np.arange(int(share_D.max()).bit_length())
        count_DC = np.hstack([parts, -(-share_D[:, None] // sizes)])
        count_DC = np.maximum(count_DC, np.minimum(least_parts, share_D)[:, None])
        least_DC, larger_DC = np.divmod(share_D[:, None], count_DC)
        total_DC = (count_DC - larger_DC) * self._total_s(least_DC, factor_D[:, None])
        total_DC += larger_DC * self._total_s(least_DC + 1, factor_D[:, None])
        for d, best in enumerate(total_DC.argmin(axis=1)):
            count, least, more = (int(x[d, best]) for x in (count_DC, least_DC, larger_DC))
            yield (
                replicas[d],
                [(n, own) for n, own in ((more, least + 1), (count - more, least)) if n],
            )

    def _pinned(
        self, dp_D: Ints, share_D: Ints, allowed: Sequence[int]
    ) -> Iterator[tuple[int, Sizes]]:
        for dp, share in zip(dp_D.tolist(), share_D.tolist(), strict=True):
            tried = [
                [(n, own) for n, own in ((share // size, size), (1, share % size)) if own]
                for size in sorted(set(allowed))
                if size <= share
            ]
            if tried:
                yield dp, min(tried, key=lambda sizes: float(np.sum(self.seconds(sizes, dp))))

    def seconds(self, sizes: Sizes, dp: int) -> tuple[Floats, Floats]:
        """Forward and backward ``[L]`` of the busiest of dp replicas' micro-batches."""
        own_P = np.array([size for _, size in sizes])
        times_P = np.array([times for times, _ in sizes])
        worth_P = own_P * self._problem.straggler(self._module, dp)
        forward_s, inputs_s, weights_s = (float(times_P @ x) for x in self._seconds(worth_P))
        forward = forward_s * self._share
        backward = inputs_s * self._passed + weights_s * self._trained
        for loss in self._losses:
            forward[-1] += float(times_P @ _values(loss.forward, own_P))
            backward[-1] += float(times_P @ _values(loss.backward, own_P))
        return forward, backward

    def _total_s(self, size: Ints, factor: Floats) -> Floats:
        """Forward and backward of one micro-batch, all blocks together."""
        forward, inputs, weights = self._seconds(size * factor)
        total = forward * self._share.sum() + inputs * self._passed.sum()
        total += weights * self._trained.sum()
        for loss in self._losses:
            total += _values(loss.forward, size) + _values(loss.backward, size)
        return total

    def _seconds(self, worth: Floats) -> tuple[Floats, Floats, Floats]:
        """Forward, and the backward of inputs and of weights, of the whole module."""
        forward = _values(self._fit.forward, worth)
        inputs = _values(self._fit.backward_input, worth)
        weights = np.maximum(_values(self._fit.backward, worth) - inputs, 0.0)
        return forward, inputs + self._again * forward, weights


def _values(curve_: FittedCurve, sizes: Ints | Floats) -> Floats:
    return curve_values(curve_, sizes.ravel()).reshape(sizes.shape)
