"""Scaling curves: seconds of each block of a MetaOp on every valid number of devices.

n devices are tp x dp of them. Each replica has its share of the round's samples (uneven where dp
does not divide them), in the micro-batches that take least time.

Shape suffixes: D = numbers of replicas, C = candidate numbers of micro-batches, L = blocks, P = the
two sizes of micro-batches.

Source: the scalability estimator of Spindle, arXiv:2409.03365; here times are of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError
from mmplan.solvers.cost_table import ModuleCosts
from mmplan.solvers.mpsp.bounds import DeviceSecondsCurve, curve, level_bound
from mmplan.solvers.mpsp.instance import Chain
from mmplan.solvers.mpsp.metaops import MetaOp
from mmplan.solvers.partitioner import degree_candidates
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import replica_counts
from mmplan.wording import counted

# Several tp degrees of one module are tried where their bound is below this share of the bound of
# one degree. Chosen by hand: such slices cannot share ranks, which costs time again.
_SEVERAL_DEGREES_GAIN = 0.98
# Shares are cut into 1 to so many micro-batches, or into sizes 1, 2, 4, ... Chosen by hand.
_MAX_EVEN_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Degrees of a MetaOp, and its largest micro-batch; ``pinned`` where the user gave its size."""

    tp: int
    dp: int
    size: int
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaling:
    """A MetaOp's K valid allocations, by ascending number of devices, and their ``[K, L]`` seconds
    in one round."""

    op: MetaOp
    allocations: tuple[Allocation, ...]
    forward_s: Floats
    backward_s: Floats

    def chain(self, task: int) -> Chain:
        """The MetaOp as the scheduler sees it; ``task`` is the index of its task."""
        return Chain(
            name=self.op.name,
            counts=tuple(a.tp * a.dp for a in self.allocations),
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            after=self.op.after,
            task=task,
        )


class Scalings:
    """Scaling curves of all MetaOps.

    Args:
        problems: by task.
        rounds: of a step; the curves are of one round.
        least_microbatches: of every share that has as many samples.

    Raises:
        InfeasibleError: no degrees of a MetaOp fit the devices.
    """

    def __init__(
        self,
        ops: Sequence[MetaOp],
        problems: Mapping[str, Problem],
        rounds: int,
        least_microbatches: int = 1,
    ) -> None:
        self._ops = ops
        self._problems = problems
        self._rounds = rounds
        self._least_microbatches = least_microbatches
        self._curve = cache(self._compute_curve)
        # Per MetaOp and tp, the rows by number of devices.
        self._rows: list[dict[int, dict[int, _Row]]] = []
        for op in ops:
            # Slices take the place of pipeline stages.
            degrees = degree_candidates(problems[op.task], op.module)
            rows = {tp: self._rows_at(op, tp) for tp in sorted(tp for tp, pp in degrees if pp == 1)}
            self._rows.append({tp: own for tp, own in rows.items() if own})
            if not self._rows[-1]:
                raise InfeasibleError(
                    f"{op.name}: no degrees that its plan and profile allow fit "
                    f"{counted(problems[op.task].devices, 'device')}",
                    hint=f"loosen modules.{op.module}.plan, or use more devices",
                )

    def at_own_best(self) -> list[Scaling]:
        """Every MetaOp on its own best degrees: no plan is faster anywhere."""
        return self._at({})

    def tp_choices(self) -> list[list[Scaling]]:
        """Ways to choose tp for modules that several MetaOps share, most promising first.

        Most of them have one degree for each module: a rank holds a block as one shard, so slices
        of one module with several degrees need different ranks. Every MetaOp on its own best
        degrees is a choice where that could gain.

        Raises:
            InfeasibleError: the tasks of a shared module have no tp degree in common.
        """
        shared: dict[str, list[int]] = {}
        for m, op in enumerate(self._ops):
            shared.setdefault(op.owner, []).append(m)
        common = {
            owner: sorted(set.intersection(*({*self._rows[m]} for m in members)))
            for owner, members in shared.items()
            if len(members) > 1
        }
        for owner, degrees in common.items():
            if not degrees:
                raise InfeasibleError(
                    f"module {owner}: the tasks that share it allow no tp degree in common",
                    hint=f"loosen modules.{owner}.plan, or profile it at one tp for all tasks",
                )
        best = {owner: degrees[0] for owner, degrees in common.items()}
        for _ in range(2 if len(common) > 1 else 1):
            for owner, degrees in common.items():
                best[owner] = min(degrees, key=lambda tp: self._bound_s({**best, owner: tp}))
        choices = [best]
        for least in sorted({tp for degrees in common.values() for tp in degrees}):
            # Larger degrees need less memory of each device.
            raised = {
                owner: min((tp for tp in degrees if tp >= least), default=degrees[-1])
                for owner, degrees in common.items()
            }
            if raised not in choices:
                choices.append(raised)
        scalings = [self._at(tps) for tps in choices]
        if common and self._bound_s({}) < _SEVERAL_DEGREES_GAIN * self._bound_s(best):
            scalings.insert(1, self.at_own_best())
        return scalings

    def _bound_s(self, tps: Mapping[str, int]) -> float:
        curves = [self._curve(m, tps.get(op.owner)) for m, op in enumerate(self._ops)]
        return level_bound(curves, self._problems[self._ops[0].task].devices)

    def _compute_curve(self, m: int, tp: int | None) -> DeviceSecondsCurve:
        """Curve of a MetaOp at one tp, or on its own best degrees."""
        chain = self._scaling(m, tp).chain(0)
        return curve(chain.counts, chain.both_s)

    def _at(self, tps: Mapping[str, int]) -> list[Scaling]:
        """The MetaOps with the tp of their modules, or on their own best degrees."""
        return [self._scaling(m, tps.get(op.owner)) for m, op in enumerate(self._ops)]

    def _scaling(self, m: int, tp: int | None) -> Scaling:
        """The fastest allocation of every number of devices, at one tp or at any."""
        at_tps = list(self._rows[m].values()) if tp is None else [self._rows[m][tp]]
        best = (
            min((rows[n] for rows in at_tps if n in rows), key=lambda row: (row[1] + row[2]).sum())
            for n in sorted({n for rows in at_tps for n in rows})
        )
        allocations, forward, backward = zip(*best, strict=True)
        return Scaling(
            op=self._ops[m],
            allocations=allocations,
            forward_s=np.array(forward),
            backward_s=np.array(backward),
        )

    def _rows_at(self, op: MetaOp, tp: int) -> dict[int, _Row]:
        """Allocations at one tp by number of devices; none where the pins allow no dp."""
        problem = self._problems[op.task]
        pins = problem.request.workload.modules[op.module].plan
        samples = op.batch // self._rounds
        replicas = replica_counts(samples, problem.devices // tp, uneven=True, pins=pins)
        if not replicas:
            return {}
        times = _ModuleTimes(problem.module_costs(op.module), tp)
        dp_D = np.array(replicas, dtype=np.int64)
        pinned = pins.microbatch
        if pinned is None:
            split = times.fastest(dp_D, samples, self._least_microbatches)
        else:
            sizes = [pinned] if isinstance(pinned, int) else sorted(set(pinned))
            split = times.pinned(dp_D, samples, sizes)
        forward_DL, backward_DL = times.seconds(split)
        return {
            tp * int(dp): (
                Allocation(tp=tp, dp=int(dp), size=int(size), pinned=pinned is not None),
                forward_L,
                backward_L,
            )
            for dp, size, forward_L, backward_L in zip(
                split.dp, split.size.max(axis=1), forward_DL, backward_DL, strict=True
            )
        }


_Row = tuple[Allocation, Floats, Floats]
"""An allocation with its ``[L]`` seconds, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShareSplit:
    """Micro-batches of the largest share of each number of replicas.

    Attributes:
        dp: ``[D]``.
        size: ``[D, P]`` samples of a micro-batch; 0 where there is only one size.
        count: ``[D, P]`` micro-batches of that size.
    """

    dp: Ints
    size: Ints
    count: Ints


class _ModuleTimes:
    """Seconds of every block of a module at one tp."""

    def __init__(self, costs: ModuleCosts, tp: int) -> None:
        self._costs, self._tp = costs, tp

    def fastest(self, dp_D: Ints, samples: int, least_microbatches: int) -> _ShareSplit:
        """Each number of replicas with the micro-batches that take least time."""
        share_D = -(-samples // dp_D)
        even_DC = np.minimum(np.arange(1, _MAX_EVEN_MICROBATCHES + 1), share_D[:, None])
        sizes = 2 ** np.arange(int(share_D.max()).bit_length())
        count_DC = np.hstack([even_DC, -(-share_D[:, None] // sizes)])
        count_DC = np.maximum(count_DC, np.minimum(least_microbatches, share_D)[:, None])
        smaller_DC, num_larger_DC = np.divmod(share_D[:, None], count_DC)
        total_DC = (count_DC - num_larger_DC) * self._total_s(smaller_DC, dp_D)
        total_DC += num_larger_DC * self._total_s(smaller_DC + 1, dp_D)
        best = np.arange(len(dp_D)), total_DC.argmin(axis=1)
        count_D, smaller_D, num_larger_D = count_DC[best], smaller_DC[best], num_larger_DC[best]
        return _without_empty(
            dp_D,
            np.stack([smaller_D + 1, smaller_D], axis=1),
            np.stack([num_larger_D, count_D - num_larger_D], axis=1),
        )

    def pinned(self, dp_D: Ints, samples: int, allowed: Sequence[int]) -> _ShareSplit:
        """Each number of replicas with the fastest allowed size; left out where none fits."""
        share_D = -(-samples // dp_D)
        found: list[tuple[int, ...]] = []
        for dp, share in zip(dp_D.tolist(), share_D.tolist(), strict=True):
            sizes = [size for size in allowed if size <= share]
            if sizes:
                tried = _without_empty(
                    np.full(len(sizes), dp),
                    np.array([(size, share % size) for size in sizes]),
                    np.array([(share // size, 1) for size in sizes]),
                )
                forward, backward = self.seconds(tried)
                best = int((forward.sum(axis=1) + backward.sum(axis=1)).argmin())
                found.append((dp, *tried.size[best], *tried.count[best]))
        table = np.array(found, dtype=np.int64).reshape(-1, 5)
        return _ShareSplit(dp=table[:, 0], size=table[:, 1:3], count=table[:, 3:])

    def seconds(self, split: _ShareSplit) -> tuple[Floats, Floats]:
        """Forward and backward ``[D, L]`` of the busiest replica's micro-batches."""
        forward, backward = (
            (split.count * each).sum(axis=2).T @ self._costs.blocks.shares.T
            for each in self._seconds(split.size, split.dp)
        )
        return forward, backward

    def _total_s(self, size_DC: Ints, dp_D: Ints) -> Floats:
        """[D, C] forward and backward of one micro-batch, all blocks together."""
        forward, backward = self._seconds(size_DC, dp_D)
        shares = self._costs.blocks.shares.sum(axis=0)
        return np.einsum("i,idc->dc", shares, forward + backward)

    def _seconds(self, size_DC: Ints, dp_D: Ints) -> tuple[Floats, Floats]:
        """[4, D, C] (:meth:`mmplan.solvers.cost_table.ModuleCosts.seconds`)."""
        return self._costs.seconds(self._tp, size_DC, dp_D[:, None])


def _without_empty(dp_D: Ints, size_DP: Ints, count_DP: Ints) -> _ShareSplit:
    """A split whose size and count are 0 where either is."""
    exists = (size_DP > 0) & (count_DP > 0)
    return _ShareSplit(dp=dp_D, size=size_DP * exists, count=count_DP * exists)
