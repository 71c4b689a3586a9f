"""Which ranks run which slice, and when: inside a node first, where flows and parameters are.

Slices are placed in the order in which they start, those of one instant by the bytes that flow
into them; a slice starts when what it takes has come over the links. Of the tensor-parallel
groups that are free, those count as near that hold the slice's parameters already (a task that
shares them, or the slice before), that produced its input, and that hold little else. A slice
whose ranks are not free together waits for them, so the result is a schedule whatever the draft
assumed. A rank holds a block as one shard only, so slices of other tensor-parallel degrees go
elsewhere. When memory does not fit, the placement starts again with memory weighing more, then
with the choices shaken up, until its time is over.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmplan.schema.cluster import Cluster
from mmplan.solvers.mpsp_flows import reductions_s, transfer_s

# Times that differ by less than this share are one instant.
_SAME = 1e-9
# Weights of memory against flows and shared parameters, tried one after another.
_WEIGHTS = (0.3, 3.0, 30.0)
# What a rank is taken to have; the simulation counts them.
_COMMUNICATORS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A slice to be placed.

    Attributes:
        within: the first rank that it may use, and the one after the last.
        start_s: when the draft starts it.
        after: slots that end before it starts, with the bytes a sample that flow from each.
        samples: of a round.
        messages: micro-batches of a replica; all but the last travel while others compute.
        owner: whose parameters; ranks with another tensor-parallel degree hold other shards.
        blocks: the first, and the one after the last.
        block_bytes: parameters, gradient and state of each block on one rank.
        gradient_bytes: of each block on one rank, what is summed at the end of the step.
        held_bytes: activations that each rank holds for it.
    """

    tp: int
    dp: int
    within: tuple[int, int]
    start_s: float
    forward_s: float
    backward_s: float
    after: tuple[tuple[int, float], ...]
    samples: int
    messages: int
    owner: str
    blocks: tuple[int, int]
    block_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    held_bytes: float

    @property
    def mask(self) -> int:
        """Its blocks as bits."""
        return (1 << self.blocks[1]) - (1 << self.blocks[0])

    def bytes_of(self, mask: int) -> float:
        """Parameters, gradient and state of some of its blocks on one rank."""
        if mask == self.mask:
            return sum(self.block_bytes)
        return sum(
            size for block, size in enumerate(self.block_bytes, self.blocks[0]) if mask >> block & 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Slots on ranks.

    Attributes:
        groups: per slot the ranks of each replica.
        starts: of the forwards, seconds.
        forward_s: when the last forward ends; ``backward_s`` how long the backwards take.
        reduce_s: summing the gradients after the last round.
        memory_bytes: per rank, as the placement counts them.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    starts: tuple[float, ...]
    forward_s: float
    backward_s: float
    reduce_s: float
    memory_bytes: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The fullest rank's memory by the mean."""
        mean = sum(self.memory_bytes) / len(self.memory_bytes)
        return max(self.memory_bytes) / mean if mean else 1.0


def place(
    slots: Sequence[Slot],
    cluster: Cluster,
    devices: int,
    *,
    limit_s: float,
    streamed: bool = False,
    seed: int = 0,
) -> Placed | float:
    """Ranks for every slot; or, where none were found, the bytes that a rank lacked at best.

    Args:
        slots: producers before consumers.
        limit_s: seconds for further attempts after the first ones.
        streamed: a slice starts with the first micro-batch that the one before has finished;
            otherwise when all are.
    """
    deadline, rng = time.monotonic() + limit_s, random.Random(seed)
    missing, attempt = float("inf"), 0
    while attempt < len(_WEIGHTS) or time.monotonic() < deadline:
        weight = _WEIGHTS[min(attempt, len(_WEIGHTS) - 1)]
        shake = 0.0 if attempt < len(_WEIGHTS) else 1.0
        found = _Attempt(slots, cluster, devices, weight, shake, rng, streamed).run()
        if isinstance(found, Placed):
            return found
        missing, attempt = min(missing, found), attempt + 1
    return missing


@dataclass(slots=True)
class _Rank:
    free_at: float = 0.0
    held_bytes: float = 0.0
    blocks: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Bits of the blocks held, by owner and tp."""

    def takes(self, slot: Slot) -> bool:
        """Whether it holds none of the slot's blocks as another shard."""
        return not any(
            mask & slot.mask
            for (owner, tp), mask in self.blocks.items()
            if owner == slot.owner and tp != slot.tp
        )

    def missing(self, slot: Slot) -> int:
        """Blocks of the slot that it does not hold yet."""
        return slot.mask & ~self.blocks.get((slot.owner, slot.tp), 0)


class _Attempt:
    def __init__(
        self,
        slots: Sequence[Slot],
        cluster: Cluster,
        devices: int,
        weight: float,
        shake: float,
        rng: random.Random,
        streamed: bool,
    ) -> None:
        self._slots = slots
        device = cluster.device
        self._memory = device.memory_bytes - _COMMUNICATORS * device.communicator_bytes
        self._cluster = cluster
        self._per_node = cluster.devices_per_node
        self._weight, self._shake, self._rng = weight, shake, rng
        self._ranks = [_Rank() for _ in range(devices)]
        self._groups: dict[int, list[tuple[int, ...]]] = {}
        self._placed: dict[int, tuple[set[int], set[int]]] = {}
        self._ends: dict[int, float] = {}
        self._streamed = streamed
        # How long each flow is under way: (consumer, producer), also back.
        self._moves: dict[tuple[int, int], float] = {}
        self._sizes: dict[tuple[int, int], float] = {}

    def run(self) -> Placed | float:
        depth: list[int] = []
        for slot in self._slots:
            depth.append(1 + max((depth[i] for i, _ in slot.after), default=0))
        order = sorted(
            range(len(self._slots)),
            key=lambda i: (
                self._slots[i].start_s,
                depth[i],
                -sum(b for _, b in self._slots[i].after) * self._slots[i].samples,
            ),
        )
        starts = [0.0] * len(self._slots)
        for i in order:
            slot = self._slots[i]
            groups, start = self._choose(i, slot)
            if not groups:
                return start
            starts[i] = start
            self._groups[i], self._ends[i] = groups, start + slot.forward_s
            for rank in (r for group in groups for r in group):
                row, key = self._ranks[rank], (slot.owner, slot.tp)
                row.held_bytes += self._added_bytes(rank, i)
                row.blocks[key] = row.blocks.get(key, 0) | slot.mask
                row.free_at = self._ends[i]
        return Placed(
            groups=tuple(tuple(self._groups[i]) for i in range(len(self._slots))),
            starts=tuple(starts),
            forward_s=max(self._ends.values()),
            backward_s=self._backward_s(),
            reduce_s=self._reduce_s(),
            memory_bytes=tuple(row.held_bytes for row in self._ranks),
        )

    def _added_bytes(self, rank: int, i: int) -> float:
        """Bytes that a slot adds to what a rank holds."""
        slot, missing = self._slots[i], self._ranks[rank].missing(self._slots[i])
        if (i, missing) not in self._sizes:
            self._sizes[i, missing] = slot.bytes_of(missing)
        return slot.held_bytes + self._sizes[i, missing]

    def _choose(self, i: int, slot: Slot) -> tuple[list[tuple[int, ...]], float]:
        """Groups of ranks and the start; without groups, the bytes that a rank lacks."""
        ready = max((self._ready(j, i) for j, _ in slot.after), default=0.0)
        whole = range(slot.within[0], slot.within[1] - slot.tp + 1, slot.tp)
        groups = [tuple(range(first, first + slot.tp)) for first in whole]
        groups = [g for g in groups if all(self._ranks[rank].takes(slot) for rank in g)]
        if len(groups) < slot.dp:
            return [], math.inf
        needed = {
            g: max(self._ranks[rank].held_bytes + self._added_bytes(rank, i) for rank in g)
            for g in groups
        }
        fitting = [g for g in groups if needed[g] <= self._memory]
        if len(fitting) < slot.dp:
            return [], sorted(needed.values())[slot.dp - 1] - self._memory
        free = {g: max(self._ranks[rank].free_at for rank in g) for g in fitting}
        start = max(ready, sorted(free.values())[slot.dp - 1])
        offered = [g for g in fitting if free[g] <= start * (1 + _SAME)]
        chosen = sorted(self._nearest(i, slot, offered))
        arrival = max(
            (self._ready(j, i) + self._move_s(i, j, chosen) for j, _ in slot.after), default=0.0
        )
        return chosen, max(start, arrival)

    def _ready(self, j: int, i: int) -> float:
        """When the forward of one slot may start for what it takes from another."""
        one, other = self._slots[j].forward_s, self._slots[i].forward_s
        return self._follow(self._ends[j], one, other, (i, j))

    def _follow(self, end: float, one: float, other: float, pair: tuple[int, int]) -> float:
        """Start of a slice after one that ends then; none of its micro-batches waits."""
        if not self._streamed:
            return end
        share = 1 / min(self._slots[i].messages for i in pair)
        return max(end - one * (1 - share), end - other * (1 - share))

    def _move_s(self, i: int, j: int, groups: Sequence[tuple[int, ...]]) -> float:
        """Seconds from the end of one slot to the start of the next, for what flows."""
        slot, size = self._slots[i], dict(self._slots[i].after)[j]
        samples = -(-slot.samples // min(slot.messages, self._slots[j].messages))
        self._moves[i, j] = transfer_s(
            self._cluster, self._groups[j], groups, samples=samples, sample_bytes=size
        )
        return self._moves[i, j]

    def _nearest(
        self, i: int, slot: Slot, groups: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The best ``dp`` of the groups: on one node if one has as many, else on few nodes."""
        cost = {group: self._cost(i, slot, group) for group in groups}
        nodes: dict[int, list[tuple[int, ...]]] = {}
        for group in sorted(groups, key=lambda g: cost[g]):
            nodes.setdefault(group[0] // self._per_node, []).append(group)
        large = [own[: slot.dp] for own in nodes.values() if len(own) >= slot.dp]
        if large:
            return min(large, key=lambda own: sum(cost[g] for g in own))
        fullest = sorted(
            nodes.values(), key=lambda own: (-len(own), sum(cost[g] for g in own) / len(own))
        )
        return [group for own in fullest for group in own][: slot.dp]

    def _cost(self, i: int, slot: Slot, group: tuple[int, ...]) -> float:
        """Less is nearer: bytes that come new, bytes held, bytes that flow from elsewhere."""
        new = max(self._added_bytes(r, i) for r in group) - slot.held_bytes
        parameters = self._sizes.setdefault((i, slot.mask), slot.bytes_of(slot.mask))
        held = max(self._ranks[r].held_bytes for r in group)
        far, total = 0.0, 0.0
        for j, size in slot.after:
            sources, nodes = self._places(j)
            total += size
            if sources.isdisjoint(group):
                far += size * (0.5 if group[0] // self._per_node in nodes else 1.0)
        noise = self._shake * self._rng.random()
        return (
            (new / parameters if parameters else 0.0)
            + (far / total if total else 0.0)
            + self._weight * held / self._memory
            + noise
        )

    def _places(self, j: int) -> tuple[set[int], set[int]]:
        """Ranks and nodes of a slot that is placed."""
        if j not in self._placed:
            ranks = {rank for own in self._groups[j] for rank in own}
            self._placed[j] = ranks, {rank // self._per_node for rank in ranks}
        return self._placed[j]

    def _reduce_s(self) -> float:
        holders: dict[tuple[str, int, int], set[tuple[int, ...]]] = {}
        sizes: dict[tuple[str, int, int], float] = {}
        for i, slot in enumerate(self._slots):
            for block, size in enumerate(slot.gradient_bytes, slot.blocks[0]):
                key = slot.owner, block, slot.tp
                holders.setdefault(key, set()).update(self._groups[i])
                sizes[key] = max(sizes.get(key, 0.0), size)
        return reductions_s(self._cluster, holders, sizes)

    def _backward_s(self) -> float:
        """The mirror image on the same ranks: what ended last starts first."""
        free, ends = [0.0] * len(self._ranks), [0.0] * len(self._slots)
        ready = [0.0] * len(self._slots)
        for i in sorted(self._ends, key=lambda i: (-self._ends[i], -i)):
            slot = self._slots[i]
            ranks = [rank for group in self._groups[i] for rank in group]
            start = max(ready[i], *(free[rank] for rank in ranks))
            ends[i] = start + slot.backward_s
            for rank in ranks:
                free[rank] = ends[i]
            for other, _ in slot.after:
                before = self._slots[other].backward_s
                start = self._follow(ends[i], slot.backward_s, before, (i, other))
                ready[other] = max(ready[other], start + self._moves[i, other])
        return max(ends)
