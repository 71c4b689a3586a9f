"""The order of a rank that runs several chunks of one unit: interleaved 1F1B.

A rank at pipeline position q of P holds the chunks q, P + q, 2P + q, ... of its unit. It takes the
micro-batches in groups of P (longer ones, where P does not divide their number): a group's
forwards through its first chunk, then through its second, and so on; its backwards through the
chunks from the last to the first (Narayanan et al., "Efficient Large-Scale Language Model Training
on GPU Clusters", 2021, section 2.2). The chunks of a rank so have one order together, which greedy
merging of their own orders misses: it fills the ramp with the first chunk's micro-batches, and the
last chunk starts late.

As in :mod:`mmplan.program.schedules.stage_order` the whole order is a list ``before[j]``, here of a
rank: how many of its forwards come before its backward j. The last rank alternates as soon as what
hangs on its last chunk lets it, and each rank before it runs ``1 + lead`` forwards more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mmplan.program.schedules.alternating import Alternating
from mmplan.program.schedules.policy import ChunkOrders, Interleaving
from mmplan.schema.plan import Schedule


@dataclass(frozen=True)
class Interleaved1F1B(Alternating):
    """1F1B with several chunks a rank, which have one order together."""

    @property
    def chunk_orders(self) -> ChunkOrders:
        """Its own: group by group."""
        return self

    def interleave(
        self, count: int, pp: int, vpp: int, needs: Sequence[int], schedule: Schedule, extra: int
    ) -> Interleaving:
        """See :class:`~mmplan.program.schedules.policy.ChunkOrders`."""
        groups = _groups(count, pp)
        rows = range(vpp)
        forwards = tuple((row, mb) for group in groups for row in rows for mb in group)
        backwards = tuple((row, mb) for group in groups for row in reversed(rows) for mb in group)
        place = {item: i for i, item in enumerate(forwards)}
        wanted = [place[row, needs[mb] - 1] + 1 if row == vpp - 1 else 0 for row, mb in backwards]
        before = [_last_rank(wanted, extra, len(forwards))]
        # More would let the first rank wait for a chunk that the last has not come to yet.
        step = min(1 + schedule.lead, 2 * len(groups[0]) // (pp - 1)) if pp > 1 else 0
        for _ in range(pp - 1):
            before.insert(0, [min(len(forwards), n + step) for n in before[0]])
        order = Interleaving(
            forwards=forwards, backwards=backwards, before=tuple(tuple(b) for b in before)
        )
        return order if schedule.in_flight is None else _within(order, vpp, schedule.in_flight)

    def group_ends(self, count: int, pp: int) -> list[int]:
        """See :class:`~mmplan.program.schedules.policy.ChunkOrders`."""
        return [group.stop for group in _groups(count, pp) for _ in group]

    def chunks_in_flight(self, position: int, pp: int, vpp: int, group: int, slack: int) -> int:
        """Most chunks' activations that a rank holds, consumers of the unit aside.

        Each stage after the unit adds one, and each group of them, begun, (vpp - 1) groups more:
        that is (vpp - 1) slack beyond the vpp for each that a linear rule counts.
        """
        return (vpp - 1) * (group + slack) + 1 + 2 * (pp - 1 - position)


def largest_group(count: Any, pp: Any) -> Any:
    """Micro-batches of the longest group, arrays as well as numbers; pp where there are fewer."""
    return np.maximum(pp, -(-count // np.maximum(1, count // pp)))


def _groups(count: int, pp: int) -> list[range]:
    """Runs of at least pp micro-batches, as alike as can be, the longer ones first.

    A rank fills the time until its next chunk's input comes back with the group's other
    micro-batches; a short group would leave it idle. After a shorter group a longer one would
    wait for its input too.
    """
    whole, longer = divmod(count, max(1, count // pp))
    sizes = [whole + (i < longer) for i in range(max(1, count // pp))]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _last_rank(wanted: Sequence[int], extra: int, total: int) -> list[int]:
    """One more forward before each next backward, and what is wanted at least."""
    before: list[int] = []
    for need in wanted:
        following = before[-1] + 1 if before else 0
        before.append(min(total, max(following, need + extra if need else 0)))
    return before


def _within(order: Interleaving, vpp: int, in_flight: int) -> Interleaving:
    """At most ``in_flight`` micro-batches of each chunk, but a backward's own forward always."""
    places = [[i for i, (r, _) in enumerate(order.forwards) if r == row] for row in range(vpp)]
    place = {item: i for i, item in enumerate(order.forwards)}
    done = [0] * vpp
    limits: list[int] = []
    for row, mb in order.backwards:
        held = [p[in_flight + n :] for p, n in zip(places, done, strict=True)]
        room = min((p[0] for p in held if p), default=len(order.forwards))
        limits.append(max(room, place[row, mb] + 1))
        done[row] += 1
    before = tuple(tuple(accumulate(map(min, row, limits), max)) for row in order.before)
    return replace(order, before=before)
