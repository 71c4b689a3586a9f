"""Which ranks run which slice, and when: inside a node first, where flows and parameters are.

Slices are placed in the order in which they start, those of one instant by the bytes that flow
into them. Of the tensor-parallel groups that are free, those count as near that hold the slice's
parameters already (a task that shares them, or the slice before), that produced its input, and
that hold little else. A slice whose ranks are not free together waits for them, so the result is
a schedule whatever the draft assumed. When memory does not fit, the placement starts again with
memory weighing more, then with the choices shaken up, until its time is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmplan.schema.cluster import Cluster

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
        start_s: when the draft starts it.
        after: slots that end before it starts, with the bytes that flow from each.
        blocks: keys of its blocks' parameters and the bytes of each on one rank; ranks with
            another tensor-parallel degree hold other shards.
        held_bytes: activations that each rank holds for it.
    """

    tp: int
    dp: int
    start_s: float
    forward_s: float
    backward_s: float
    after: tuple[tuple[int, float], ...]
    blocks: tuple[tuple[object, float], ...]
    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Slots on ranks.

    Attributes:
        groups: per slot the ranks of each replica.
        starts: of the forwards, seconds.
        forward_s: when the last forward ends; ``backward_s`` how long the backwards take.
        memory_bytes: per rank, as the placement counts them.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    starts: tuple[float, ...]
    forward_s: float
    backward_s: float
    memory_bytes: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The fullest rank's memory by the mean."""
        mean = sum(self.memory_bytes) / len(self.memory_bytes)
        return max(self.memory_bytes) / mean if mean else 1.0


def place(
    slots: Sequence[Slot], cluster: Cluster, devices: int, *, limit_s: float, seed: int = 0
) -> Placed | float:
    """Ranks for every slot; or, where none were found, the bytes that a rank lacked at best.

    Args:
        slots: producers before consumers.
        limit_s: seconds for further attempts after the first ones.
    """
    deadline, rng = time.monotonic() + limit_s, random.Random(seed)
    missing, attempt = float("inf"), 0
    while attempt < len(_WEIGHTS) or time.monotonic() < deadline:
        weight = _WEIGHTS[min(attempt, len(_WEIGHTS) - 1)]
        shake = 0.0 if attempt < len(_WEIGHTS) else 1.0
        found = _Attempt(slots, cluster, devices, weight, shake, rng).run()
        if isinstance(found, Placed):
            return found
        missing, attempt = min(missing, found), attempt + 1
    return missing


@dataclass(slots=True)
class _Rank:
    free_at: float = 0.0
    held_bytes: float = 0.0
    blocks: set[object] = field(default_factory=set[object])

    def added_bytes(self, slot: Slot) -> float:
        new = sum(size for key, size in slot.blocks if key not in self.blocks)
        return slot.held_bytes + new


class _Attempt:
    def __init__(
        self,
        slots: Sequence[Slot],
        cluster: Cluster,
        devices: int,
        weight: float,
        shake: float,
        rng: random.Random,
    ) -> None:
        self._slots = slots
        device = cluster.device
        self._memory = device.memory_bytes - _COMMUNICATORS * device.communicator_bytes
        self._per_node = cluster.devices_per_node
        self._weight, self._shake, self._rng = weight, shake, rng
        self._ranks = [_Rank() for _ in range(devices)]
        self._groups: dict[int, list[tuple[int, ...]]] = {}
        self._ends: dict[int, float] = {}

    def run(self) -> Placed | float:
        depth: list[int] = []
        for slot in self._slots:
            depth.append(1 + max((depth[i] for i, _ in slot.after), default=0))
        order = sorted(
            range(len(self._slots)),
            key=lambda i: (
                self._slots[i].start_s,
                depth[i],
                -sum(b for _, b in self._slots[i].after),
            ),
        )
        starts = [0.0] * len(self._slots)
        for i in order:
            slot = self._slots[i]
            groups, start = self._choose(slot)
            if not groups:
                return start
            starts[i] = start
            self._groups[i], self._ends[i] = groups, start + slot.forward_s
            for rank in (r for group in groups for r in group):
                row = self._ranks[rank]
                row.held_bytes += row.added_bytes(slot)
                row.blocks |= {key for key, _ in slot.blocks}
                row.free_at = self._ends[i]
        return Placed(
            groups=tuple(tuple(self._groups[i]) for i in range(len(self._slots))),
            starts=tuple(starts),
            forward_s=max(self._ends.values()),
            backward_s=self._backward_s(),
            memory_bytes=tuple(row.held_bytes for row in self._ranks),
        )

    def _choose(self, slot: Slot) -> tuple[list[tuple[int, ...]], float]:
        """Groups of ranks and the start; without groups, the bytes that a rank lacks."""
        ready = max((self._ends[i] for i, _ in slot.after), default=0.0)
        whole = range(0, len(self._ranks) - slot.tp + 1, slot.tp)
        groups = [tuple(range(first, first + slot.tp)) for first in whole]
        needed = {g: max(self._after(rank, slot) for rank in g) for g in groups}
        fitting = [g for g in groups if needed[g] <= self._memory]
        if len(fitting) < slot.dp:
            return [], sorted(needed.values())[slot.dp - 1] - self._memory
        free = {g: max(self._ranks[rank].free_at for rank in g) for g in fitting}
        start = max(ready, sorted(free.values())[slot.dp - 1])
        offered = [g for g in fitting if free[g] <= start * (1 + _SAME)]
        return sorted(self._nearest(slot, offered)), start

    def _after(self, rank: int, slot: Slot) -> float:
        row = self._ranks[rank]
        return row.held_bytes + row.added_bytes(slot)

    def _nearest(self, slot: Slot, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The best ``dp`` of the groups: on one node if one has as many, else on few nodes."""
        cost = {group: self._cost(slot, group) for group in groups}
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

    def _cost(self, slot: Slot, group: tuple[int, ...]) -> float:
        """Less is nearer: bytes that come new, bytes held, bytes that flow from elsewhere."""
        new = max(self._ranks[r].added_bytes(slot) for r in group) - slot.held_bytes
        parameters = sum(size for _, size in slot.blocks)
        held = max(self._ranks[r].held_bytes for r in group)
        far, total = 0.0, 0.0
        for i, size in slot.after:
            sources = {rank for own in self._groups[i] for rank in own}
            total += size
            if not sources & set(group):
                node = group[0] // self._per_node
                near = any(rank // self._per_node == node for rank in sources)
                far += size * (0.5 if near else 1.0)
        noise = self._shake * self._rng.random()
        return (
            (new / parameters if parameters else 0.0)
            + (far / total if total else 0.0)
            + self._weight * held / self._memory
            + noise
        )

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
                ready[other] = max(ready[other], ends[i])
        return max(ends)
