"""From a draft to slots for the placement, and from placed slots to units and waves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mmplan.arrays import Floats
from mmplan.schema.plan import Schedule, Slice, Unit, Wave
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, SchedulePiece
from mmplan.solvers.mpsp.metaops import MetaOp
from mmplan.solvers.mpsp.placement import Placed
from mmplan.solvers.mpsp.scaling_curves import Allocation, Scaling
from mmplan.solvers.mpsp.slices import Slot
from mmplan.solvers.problem import Blocks, Problem
from mmplan.solvers.sample_split import cut, split_evenly

# The largest share of n replicas, ceil(S / n), is less than so many times the mean, S / n.
_UNEVEN = 2.0


class Sizes:
    """Bytes of the tasks' blocks, remembered for all emitters.

    Args:
        problems: by task.
    """

    def __init__(self, problems: Mapping[str, Problem]) -> None:
        self._problems = problems
        self._parameters: dict[tuple[str, str, int, int], tuple[Floats, Floats]] = {}
        self._held: dict[tuple[str, str, int, int, Blocks], float] = {}

    def parameters(self, op: MetaOp, tp: int, dp: int) -> tuple[Floats, Floats]:
        """``[L]`` all that a rank holds of each block's parameters, and their gradient alone."""
        problem = self._problems[op.task]
        key = op.task, op.module, tp, dp if problem.costs.training.zero else 1
        if key not in self._parameters:
            each = [(b, b + 1) for b in range(problem.blocks(op.module))]
            self._parameters[key] = (
                np.array([problem.fixed_bytes(op.module, block, tp, key[3]) for block in each]),
                np.array([problem.gradient_bytes(op.module, block, tp) for block in each]),
            )
        return self._parameters[key]

    def held(self, op: MetaOp, tp: int, size: int, blocks: Blocks) -> float:
        """Activations of a micro-batch on one rank."""
        key = op.task, op.module, tp, size, blocks
        if key not in self._held:
            self._held[key] = self._problems[op.task].held_bytes(op.module, blocks, tp, size)
        return self._held[key]


class Emitter:
    """Knows which MetaOp and which degrees a piece of a draft stands for.

    Args:
        problems: by task.
        sizes: of the same problems.
        scalings: of the MetaOps, in the order of the instance's chains.
        rounds: of a step; a slice runs once in each.
    """

    def __init__(
        self,
        problems: Mapping[str, Problem],
        sizes: Sizes,
        scalings: Sequence[Scaling],
        instance: Instance,
        rounds: int,
    ) -> None:
        self._problems = problems
        self._sizes = sizes
        self._scalings = scalings
        self._instance = instance
        self._rounds = rounds
        self._allocations = [{a.tp * a.dp: a for a in own.allocations} for own in scalings]
        self._cut: dict[tuple[int, int, int], tuple[int, ...]] = {}

    # --- before the placement --------------------------------------------------------

    def slots(
        self,
        draft: ChainSchedule,
        starts: Sequence[Sequence[float]],
        within: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> list[Slot]:
        """A slot for every piece, chain by chain.

        Args:
            starts: of each chain's pieces, as the draft's decoder has them.
            within: the ranks that each may use, from the first to the last; all by default.
        """
        slots: list[Slot] = []
        last: list[int] = []
        for m, i, piece in _pieces(draft):
            if i:
                flows = ((len(slots) - 1, self._flow(m, piece[1] - 1)),)
            else:
                after = self._scalings[m].op.after
                flows = tuple((last[j], self._flow(j, self._last_block(j))) for j in after)
            ranks = within[m][i] if within else (0, self._instance.devices)
            slots.append(self._slot(m, piece, starts[m][i], flows, ranks))
            if i + 1 == len(draft.pieces[m]):
                last.append(len(slots) - 1)
        return slots

    def least_bytes(self) -> float:
        """Activations of a round on all devices together, however its slices are chosen."""
        return sum(
            min(a.tp * a.dp * self._held_bytes(m, a, (0, chain.blocks)) for a in own.allocations)
            / _UNEVEN
            for m, (own, chain) in enumerate(
                zip(self._scalings, self._instance.chains, strict=True)
            )
        )

    def block_bytes(self) -> dict[str, list[float]]:
        """Least parameters, gradient and state of each block on one rank, by owner."""
        found: dict[str, Floats] = {}
        for own in self._scalings:
            dp = max(a.dp for a in own.allocations)
            for tp in {a.tp for a in own.allocations}:
                each = self._sizes.parameters(own.op, tp, dp)[0]
                found[own.op.owner] = np.minimum(found.get(own.op.owner, each), each)
        return {owner: each.tolist() for owner, each in found.items()}

    def _slot(
        self,
        m: int,
        piece: SchedulePiece,
        start_s: float,
        after: tuple[tuple[int, float], ...],
        within: tuple[int, int],
    ) -> Slot:
        chain, (k, a, b, _) = self._instance.chains[m], piece
        allocation, op = self._allocation(m, piece), self._scalings[m].op
        fixed, gradient = self._sizes.parameters(op, allocation.tp, allocation.dp)
        return Slot(
            tp=allocation.tp,
            dp=allocation.dp,
            within=within,
            start_s=start_s,
            forward_s=float(chain.forward_s[k, a:b].sum()),
            backward_s=float(chain.backward_s[k, a:b].sum()),
            after=after,
            samples=op.batch // self._rounds,
            messages=len(self._largest(m, allocation)),
            owner=op.owner,
            blocks=(a, b),
            block_bytes=fixed[a:b],
            gradient_bytes=gradient[a:b],
            held_bytes=self._held_bytes(m, allocation, (a, b)),
        )

    def _allocation(self, m: int, piece: SchedulePiece) -> Allocation:
        return self._allocations[m][self._instance.chains[m].counts[piece[0]]]

    def _problem(self, m: int) -> Problem:
        return self._problems[self._scalings[m].op.task]

    def _last_block(self, m: int) -> int:
        return self._instance.chains[m].blocks - 1

    def _flow(self, m: int, after_block: int) -> float:
        """Bytes a sample that leave a block."""
        op = self._scalings[m].op
        return self._problem(m).output_bytes(op.module, after_block)

    def _held_bytes(self, m: int, allocation: Allocation, blocks: Blocks) -> float:
        """All micro-batches of the largest share: every forward comes before any backward."""
        op = self._scalings[m].op
        sizes = Counter(self._largest(m, allocation))
        return sum(
            times * self._sizes.held(op, allocation.tp, size, blocks)
            for size, times in sizes.items()
        )

    def _largest(self, m: int, allocation: Allocation) -> tuple[int, ...]:
        """Micro-batches of the first replica in a round, which has the largest share."""
        key = m, allocation.tp, allocation.dp
        if key not in self._cut:
            samples = self._scalings[m].op.batch // self._rounds
            share = -(-samples // allocation.dp)
            self._cut[key] = _cut(share, allocation, -(-share // allocation.size))
        return self._cut[key]

    def _microbatches(self, m: int, allocation: Allocation) -> list[tuple[int, ...]]:
        """Sizes of each replica in a round."""
        shares = split_evenly(self._scalings[m].op.batch // self._rounds, allocation.dp)
        count = len(self._largest(m, allocation))
        return [_cut(share, allocation, count) for share in shares]

    # --- after it --------------------------------------------------------------------

    def units(self, draft: ChainSchedule, placed: Placed) -> tuple[Unit, ...]:
        """A unit for every slice."""
        units: list[Unit] = []
        for index, (m, i, piece) in enumerate(_pieces(draft)):
            op, allocation = self._scalings[m].op, self._allocation(m, piece)
            sizes = self._microbatches(m, allocation)
            units.append(
                Unit(
                    name=f"{op.name}.{i}",
                    task=op.task,
                    module=op.module,
                    tp=allocation.tp,
                    dp=allocation.dp,
                    ranks=tuple((group,) for group in placed.groups[index]),
                    blocks=((piece[1], piece[2]),),
                    samples=tuple(sum(own) * self._rounds for own in sizes),
                    microbatches=tuple(sizes),
                    schedule=Schedule(kind="wave", lead=0),
                )
            )
        return tuple(units)

    def waves(self, draft: ChainSchedule, placed: Placed) -> tuple[Wave, ...]:
        """The slices by the instant at which they start; a wave lasts until its last one ends."""
        rows: dict[float, list[Slice]] = {}
        for index, (m, i, piece) in enumerate(_pieces(draft)):
            chain, groups = self._instance.chains[m], placed.groups[index]
            start_s = placed.starts[index]
            rows.setdefault(start_s, []).append(
                Slice(
                    unit=f"{self._scalings[m].op.name}.{i}",
                    blocks=(piece[1], piece[2]),
                    devices=chain.counts[piece[0]],
                    ranks=tuple(rank for group in groups for rank in group),
                    start_s=start_s,
                    duration_s=float(chain.forward_s[piece[0], piece[1] : piece[2]].sum()),
                )
            )
        return tuple(
            Wave(
                start_s=start_s,
                duration_s=max(item.duration_s for item in own),
                slices=tuple(own),
            )
            for start_s, own in sorted(rows.items())
        )


def _cut(share: int, allocation: Allocation, count: int) -> tuple[int, ...]:
    """Micro-batches of a share, so many unless their size is the user's."""
    if allocation.pinned:
        return cut(share, allocation.size, pinned=True)
    return split_evenly(share, min(share, count))


def _pieces(draft: ChainSchedule) -> Iterator[tuple[int, int, SchedulePiece]]:
    """(chain, index in it, piece), chain by chain."""
    for m, own in enumerate(draft.pieces):
        for i, piece in enumerate(own):
            yield m, i, piece
