"""From a schedule to slices for the placement, and from placed slices to units and waves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.block_ranges import Blocks
from mmplan.schema.plan import Schedule, Slice, Unit, Wave
from mmplan.solvers.messages import StageMessages, stage_messages
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment
from mmplan.solvers.mpsp.metaops import MetaOp
from mmplan.solvers.mpsp.placement import Placed, RankRange, UnplacedSlice
from mmplan.solvers.mpsp.scaling_curves import Allocation, Scaling
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import cut, split_evenly

# The largest share of S samples on n <= S replicas, ceil(S / n), is below this many times S / n.
_LARGEST_SHARE_FACTOR = 2.0


class BlockMemory:
    """Bytes of the tasks' blocks on one rank, cached for all emitters."""

    def __init__(self, problems: Mapping[str, Problem]) -> None:
        self._problems = problems
        self.parameters = cache(self._compute_parameters)
        self.activations = cache(self._compute_activations)
        self.messages = cache(self._compute_messages)

    def _compute_parameters(self, op: MetaOp, tp: int, dp: int) -> tuple[Floats, Floats]:
        """``[L]`` fixed bytes (parameters, gradients and optimizer state), and of gradients."""
        problem = self._problems[op.task]
        costs = problem.module_costs(op.module)
        fixed = costs.parameter_bytes(costs.blocks.trained, costs.blocks.frozen, tp=tp, dp=dp)
        return fixed, costs.blocks.trained / tp * costs.gradient_bytes

    def _compute_activations(self, op: MetaOp, tp: int, size: int, blocks: Blocks) -> float:
        """Activations of a micro-batch, and the messages that it carries."""
        costs, sizes = self._problems[op.task].module_costs(op.module), np.array([size])
        own = costs.stages((blocks,))
        held = costs.held_bytes(own.held, own.outputs, tp=tp, size=sizes)
        return float(held[0]) + size * self.messages(op, blocks).carried

    def _compute_messages(self, op: MetaOp, blocks: Blocks) -> StageMessages:
        return stage_messages(self._problems[op.task], op.module, blocks, {})


class Emitter:
    """Makes slices, units and waves of an instance's schedules.

    Args:
        problems: by task.
        memory: of the same problems.
        scalings: of the MetaOps, in the order of the instance's chains.
        rounds: of a step; a slice runs once in each.
    """

    def __init__(
        self,
        problems: Mapping[str, Problem],
        memory: BlockMemory,
        scalings: Sequence[Scaling],
        instance: Instance,
        rounds: int,
    ) -> None:
        self._problems = problems
        self._memory = memory
        self._scalings = scalings
        self.instance = instance
        self._rounds = rounds
        self._allocations = [{a.tp * a.dp: a for a in own.allocations} for own in scalings]

    def slices(
        self,
        schedule: ChainSchedule,
        starts: Sequence[Sequence[float]],
        rank_ranges: Sequence[Sequence[RankRange]] | None = None,
    ) -> list[UnplacedSlice]:
        """A slice for every segment, chain by chain.

        Args:
            starts: start of each segment's forward, per chain.
            rank_ranges: the ranks that each segment may use, per chain; all by default.
        """
        slices: list[UnplacedSlice] = []
        last_of_chain: list[int] = []
        for m, i, segment in _segments(schedule):
            chain, op, (k, first, end, _) = self.instance.chains[m], self._scalings[m].op, segment
            allocation = self._allocation(m, segment)
            if i:
                after = ((len(slices) - 1, self._output_bytes(m, first - 1)),)
            else:
                after = tuple(
                    (last_of_chain[j], self._output_bytes(j, self.instance.chains[j].blocks - 1))
                    for j in op.after
                )
            fixed_bytes, gradient_bytes = self._memory.parameters(op, allocation.tp, allocation.dp)
            slices.append(
                UnplacedSlice(
                    tp=allocation.tp,
                    dp=allocation.dp,
                    rank_range=rank_ranges[m][i] if rank_ranges else (0, self.instance.devices),
                    start_s=starts[m][i],
                    forward_s=float(chain.forward_s[k, first:end].sum()),
                    backward_s=float(chain.backward_s[k, first:end].sum()),
                    after=after,
                    samples=op.batch // self._rounds,
                    num_microbatches=len(self._first_replica(m, allocation)),
                    owner=op.owner,
                    blocks=(first, end),
                    fixed_bytes=fixed_bytes[first:end],
                    gradient_bytes=gradient_bytes[first:end],
                    activation_bytes=self._activation_bytes(m, allocation, (first, end)),
                )
            )
            if end == chain.blocks:
                last_of_chain.append(len(slices) - 1)
        return slices

    def least_activation_bytes(self) -> float:
        """Activations of a round on all devices together: no choice of slices has less."""
        total = 0.0
        for m, (own, chain) in enumerate(zip(self._scalings, self.instance.chains, strict=True)):
            every = (0, chain.blocks)
            needed = (a.tp * a.dp * self._activation_bytes(m, a, every) for a in own.allocations)
            total += min(needed) / _LARGEST_SHARE_FACTOR
        return total

    def least_fixed_bytes(self) -> dict[str, list[float]]:
        """By module, the least fixed bytes of each block on a rank."""
        found: dict[str, Floats] = {}
        for own in self._scalings:
            dp = max(a.dp for a in own.allocations)
            for tp in {a.tp for a in own.allocations}:
                each = self._memory.parameters(own.op, tp, dp)[0]
                found[own.op.owner] = np.minimum(found.get(own.op.owner, each), each)
        return {owner: each.tolist() for owner, each in found.items()}

    def _allocation(self, m: int, segment: ChainSegment) -> Allocation:
        return self._allocations[m][self.instance.chains[m].counts[segment.k]]

    def _output_bytes(self, m: int, after_block: int) -> float:
        """Bytes a sample that leave a block."""
        op = self._scalings[m].op
        return self._problems[op.task].output_bytes(op.module, after_block)

    def _activation_bytes(self, m: int, allocation: Allocation, blocks: Blocks) -> float:
        """Activations and messages of a round on a rank: every forward is before any backward."""
        op, sizes = self._scalings[m].op, Counter(self._first_replica(m, allocation))
        beside = self._memory.messages(op, blocks).bytes_beside(self._rounds * sizes.total())
        return max(sizes) * beside + sum(
            times * self._memory.activations(op, allocation.tp, size, blocks)
            for size, times in sizes.items()
        )

    def _first_replica(self, m: int, allocation: Allocation) -> tuple[int, ...]:
        """Micro-batches of the first replica in a round: it has the largest share."""
        share = -(-(self._scalings[m].op.batch // self._rounds) // allocation.dp)
        return _microbatches(share, allocation, -(-share // allocation.size))

    def units(self, schedule: ChainSchedule, placed: Placed) -> tuple[Unit, ...]:
        """A unit for every slice."""
        units: list[Unit] = []
        for index, (m, i, segment) in enumerate(_segments(schedule)):
            op, allocation = self._scalings[m].op, self._allocation(m, segment)
            count = len(self._first_replica(m, allocation))
            microbatches = [
                _microbatches(share, allocation, count)
                for share in split_evenly(op.batch // self._rounds, allocation.dp)
            ]
            units.append(
                Unit(
                    name=f"{op.name}.{i}",
                    task=op.task,
                    module=op.module,
                    tp=allocation.tp,
                    dp=allocation.dp,
                    ranks=tuple((group,) for group in placed.groups[index]),
                    blocks=((segment.first, segment.end),),
                    samples=tuple(sum(own) * self._rounds for own in microbatches),
                    microbatches=tuple(microbatches),
                    schedule=Schedule(kind="wave", lead=0),
                )
            )
        return tuple(units)


def waves(
    units: Sequence[Unit], slices: Sequence[UnplacedSlice], placed: Placed
) -> tuple[Wave, ...]:
    """Slices that start together are a wave; it lasts until its last slice ends."""
    by_start: dict[float, list[Slice]] = {}
    for unit, own, groups, start_s in zip(units, slices, placed.groups, placed.starts, strict=True):
        by_start.setdefault(start_s, []).append(
            Slice(
                unit=unit.name,
                blocks=own.blocks,
                devices=own.tp * own.dp,
                ranks=tuple(rank for group in groups for rank in group),
                start_s=start_s,
                duration_s=own.forward_s,
            )
        )
    return tuple(
        Wave(
            start_s=start_s,
            duration_s=max(slice_.duration_s for slice_ in own),
            slices=tuple(own),
        )
        for start_s, own in sorted(by_start.items())
    )


def _microbatches(share: int, allocation: Allocation, count: int) -> tuple[int, ...]:
    """Micro-batches of a share: ``count`` of them unless the user gave their size."""
    if allocation.pinned:
        return cut(share, allocation.size, pinned=True)
    return split_evenly(share, min(share, count))


def _segments(schedule: ChainSchedule) -> Iterator[tuple[int, int, ChainSegment]]:
    """(chain, position in it, segment), chain by chain."""
    for m, own in enumerate(schedule.segments):
        for i, segment in enumerate(own):
            yield m, i, segment
