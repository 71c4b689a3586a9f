"""Scalability curves: how long each block of a MetaOp takes on every valid number of devices.

n devices are tp x dp of them, each replica with its share of the round's samples (uneven where
dp does not divide them), in the micro-batches that take least time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.solvers.metaops import MetaOp
from mmplan.solvers.mpsp_bounds import curve, level_bound
from mmplan.solvers.mpsp_model import Chain, Floats, parts
from mmplan.solvers.partitioner import degree_candidates
from mmplan.solvers.problem import Problem
from mmplan.solvers.shares import cut, microbatch_sizes, replica_counts


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
    """

    def __init__(self, ops: Sequence[MetaOp], problems: Mapping[str, Problem], rounds: int) -> None:
        self._ops = ops
        self._problems = problems
        self.rounds = rounds
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
        """Ways to give modules that several MetaOps share one tp each, most promising first.

        A block that two tasks run has one tp degree in a plan; a module of a single MetaOp may
        change it from slice to slice.
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
        return [self._fixed(tps) for tps in fixed]

    def _bound_s(self, tps: Mapping[str, int]) -> float:
        chains = [own.chain(0) for own in self._fixed(tps)]
        curves = [curve(c.counts, parts(c.both_s)) for c in chains]
        return level_bound(curves, self._problems[self._ops[0].task].devices)

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
        samples = op.batch // self.rounds
        blocks = _Blocks(problem, op.module, tp)
        rows: dict[int, _Row] = {}
        for dp in replica_counts(samples, problem.devices // tp, uneven=True, pins=pins):
            share = -(-samples // dp)
            tried = [
                _Row.of(
                    Allocation(tp=tp, dp=dp, size=size, pinned=pins.microbatch is not None),
                    *blocks.seconds(cut(share, size, pinned=pins.microbatch is not None), dp),
                )
                for size in microbatch_sizes(share, pins)
            ]
            if tried:
                rows[tp * dp] = min(tried, key=lambda row: row.total_s)
        return rows


def degrees(problem: Problem, module: str) -> list[int]:
    """tp degrees of a module without pipeline stages: slices take their place."""
    return sorted(tp for tp, pp in degree_candidates(problem, module) if pp == 1)


@dataclass(frozen=True, slots=True)
class _Row:
    allocation: Allocation
    forward_s: Floats
    backward_s: Floats
    total_s: float

    @classmethod
    def of(cls, allocation: Allocation, forward_s: Floats, backward_s: Floats) -> _Row:
        return cls(allocation, forward_s, backward_s, float((forward_s + backward_s).sum()))


class _Blocks:
    """Seconds of every block of a module at one tp."""

    def __init__(self, problem: Problem, module: str, tp: int) -> None:
        self._problem, self._module, self._tp = problem, module, tp
        task, blocks = problem.task.name, range(problem.blocks(module))
        share = [
            problem.costs.work_share(task=task, module=module, blocks=(b, b + 1)) for b in blocks
        ]
        facts = [problem.stage(module, (b, b + 1)) for b in blocks]
        self._share = np.array(share)
        self._passed = self._share * [fact.passed is not None for fact in facts]
        self._trained = self._share * [bool(fact.trainable) for fact in facts]
        self._losses = facts[-1].hosted
        self._known: dict[tuple[int, float], tuple[Floats, Floats]] = {}

    def seconds(self, sizes: Iterable[int], dp: int) -> tuple[Floats, Floats]:
        """Forward and backward ``[L]`` of the busiest of dp replicas' micro-batches."""
        factor = self._problem.straggler(self._module, dp)
        forward, backward = np.zeros_like(self._share), np.zeros_like(self._share)
        for size, times in Counter(sizes).items():
            key = size, factor
            if key not in self._known:
                self._known[key] = self._micro_batch(size, size * factor)
            own = self._known[key]
            forward, backward = forward + times * own[0], backward + times * own[1]
        return forward, backward

    def _micro_batch(self, samples: int, worth: float) -> tuple[Floats, Floats]:
        problem, costs = self._problem, self._problem.costs
        task, module, tp = problem.task.name, self._module, self._tp
        recompute = problem.request.workload.modules[module].recompute
        forward_s = costs.forward_s(task=task, module=module, tp=tp, samples=worth)
        inputs_s, whole_s = (
            costs.backward_s(
                task=task,
                module=module,
                tp=tp,
                samples=worth,
                trainable=trainable,
                recompute=recompute,
            )
            for trainable in ((), None)
        )
        forward = forward_s * self._share
        backward = inputs_s * self._passed + (whole_s - inputs_s) * self._trained
        for loss in self._losses:
            own = costs.loss_s(loss=loss, samples=samples)
            forward[-1], backward[-1] = forward[-1] + own[0], backward[-1] + own[1]
        return forward, backward
