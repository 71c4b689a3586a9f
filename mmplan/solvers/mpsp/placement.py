"""Which ranks run which slice, and when: inside a node first, where flows and parameters are.

Slices are placed in the order in which they start, those of one instant by the bytes that flow
into them; a slice starts when what it takes has come over the links. Of the tensor-parallel
groups that are free, those count as near that hold the slice's parameters already (a task that
shares them, or the slice before), that produced its input, and that hold little else. A slice
whose ranks are not free together waits for them, so the result is a schedule whatever the draft
assumed. A rank holds a block as one shard only, so slices of other tensor-parallel degrees go
elsewhere. When memory does not fit, the placement starts again with memory weighing more, then
takes the ranks that :mod:`mmplan.solvers.mpsp.memory_packing` finds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.schema.cluster import Cluster
from mmplan.solvers.mpsp.memory_packing import Groups, pack
from mmplan.solvers.mpsp.slices import Holdings, Slot, stretches
from mmplan.solvers.mpsp.transfer_costs import reductions_s, transfer_s

# Times that differ by less than this share are one instant.
_SAME = 1e-9
# Weights of memory against flows and shared parameters, tried one after another.
_WEIGHTS = (0.3, 3.0, 30.0)
# What a rank is taken to have; the simulation counts them.
_COMMUNICATORS = 8


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

    groups: tuple[Groups, ...]
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
) -> Placed | float:
    """Ranks for every slot; or, where none were found, the bytes that a rank lacked at best.

    Args:
        slots: producers before consumers.
        limit_s: seconds for the search where no choice in the order of time fits.
        streamed: a slice starts with the first micro-batch that the one before has finished;
            otherwise when all are.
    """
    deadline, missing = time.monotonic() + limit_s, math.inf
    for weight in _WEIGHTS:
        found = _Attempt(slots, cluster, devices, weight, streamed).run()
        if isinstance(found, Placed):
            return found
        missing = min(missing, found)
    packed = limit_s > 0 and pack(slots, devices, memory_bytes(cluster), deadline=deadline)
    if packed:
        found = _Attempt(slots, cluster, devices, _WEIGHTS[0], streamed, packed).run()
        if isinstance(found, Placed):
            return found
    return missing


def memory_bytes(cluster: Cluster) -> float:
    """What a rank has for its slices."""
    device = cluster.device
    return device.memory_bytes - _COMMUNICATORS * device.communicator_bytes


class _Attempt:
    def __init__(
        self,
        slots: Sequence[Slot],
        cluster: Cluster,
        devices: int,
        weight: float,
        streamed: bool,
        given: Sequence[Groups] | None = None,
    ) -> None:
        self._slots = slots
        self._memory = memory_bytes(cluster)
        self._cluster = cluster
        self._weight = weight
        self._given = given
        self._holdings = Holdings(slots, devices)
        self._free_at: Floats = np.zeros(devices)
        self._node = np.arange(devices) // cluster.devices_per_node
        self._groups: dict[int, Groups] = {}
        self._ranks: dict[int, NDArray[np.intp]] = {}
        self._ends: dict[int, float] = {}
        self._streamed = streamed
        # How long each flow is under way: (consumer, producer), also back.
        self._moves: dict[tuple[int, int], float] = {}

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
            new_bytes = self._holdings.new_bytes(slot)
            groups, start = self._choose(i, slot, new_bytes)
            if not groups:
                return start
            ranks = np.array(groups, dtype=np.intp).ravel()
            starts[i], self._ends[i] = start, start + slot.forward_s
            self._groups[i], self._ranks[i] = groups, ranks
            self._holdings.add(slot, ranks, new_bytes)
            self._free_at[ranks] = self._ends[i]
        return Placed(
            groups=tuple(self._groups[i] for i in range(len(self._slots))),
            starts=tuple(starts),
            forward_s=max(self._ends.values()),
            backward_s=self._backward_s(),
            reduce_s=self._reduce_s(),
            memory_bytes=tuple(self._holdings.held_bytes.tolist()),
        )

    def _choose(self, i: int, slot: Slot, new_bytes: Floats) -> tuple[Groups, float]:
        """Groups of ranks and the start; without groups, the bytes that a rank lacks."""
        ready = max((self._ready(j, i) for j, _ in slot.after), default=0.0)
        if self._given is not None:
            chosen = self._given[i]
            start = max(ready, float(self._free_at[np.array(chosen)].max()))
            return chosen, max(start, self._arrival(i, slot, chosen))
        takes = slot.by_group(self._holdings.clashes(slot)) == 0
        if np.count_nonzero(takes) < slot.dp:
            return (), math.inf
        needed = slot.by_group(self._holdings.held_bytes + new_bytes) + slot.held_bytes
        fitting = takes & (needed <= self._memory)
        if np.count_nonzero(fitting) < slot.dp:
            return (), float(np.sort(needed[takes])[slot.dp - 1]) - self._memory
        free = slot.by_group(self._free_at)
        start = max(ready, float(np.sort(free[fitting])[slot.dp - 1]))
        offered = np.flatnonzero(fitting & (free <= start * (1 + _SAME)))
        nearest = self._nearest(i, slot, offered, new_bytes)
        chosen = tuple(slot.group(index) for index in sorted(nearest))
        return chosen, max(start, self._arrival(i, slot, chosen))

    def _arrival(self, i: int, slot: Slot, chosen: Groups) -> float:
        """When all that a slot takes is on its ranks."""
        return max(
            (self._ready(j, i) + self._move_s(i, j, chosen) for j, _ in slot.after), default=0.0
        )

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

    def _move_s(self, i: int, j: int, groups: Groups) -> float:
        """Seconds from the end of one slot to the start of the next, for what flows."""
        slot, size = self._slots[i], dict(self._slots[i].after)[j]
        samples = -(-slot.samples // min(slot.messages, self._slots[j].messages))
        self._moves[i, j] = transfer_s(
            self._cluster, self._groups[j], groups, samples=samples, sample_bytes=size
        )
        return self._moves[i, j]

    def _nearest(
        self, i: int, slot: Slot, offered: NDArray[np.intp], new_bytes: Floats
    ) -> list[int]:
        """The best ``dp`` of the groups: on one node if one has as many, else on few nodes."""
        cost = self._costs(slot, new_bytes)
        node = self._node[slot.reach][:: slot.tp]
        nodes: dict[int, list[int]] = {}
        for index in offered[np.argsort(cost[offered], kind="stable")].tolist():
            nodes.setdefault(int(node[index]), []).append(index)
        large = [own[: slot.dp] for own in nodes.values() if len(own) >= slot.dp]
        if large:
            return min(large, key=lambda own: float(cost[own].sum()))
        fullest = sorted(nodes.values(), key=lambda own: (-len(own), float(cost[own].mean())))
        return [index for own in fullest for index in own][: slot.dp]

    def _costs(self, slot: Slot, new_bytes: Floats) -> Floats:
        """Of each group; less is nearer: bytes that come new, held, and flow from elsewhere."""
        held = slot.by_group(self._holdings.held_bytes)
        cost = self._weight * held / self._memory
        parameters = float(slot.block_bytes.sum())
        if parameters:
            cost = cost + slot.by_group(new_bytes) / parameters
        total = sum(size for _, size in slot.after)
        for j, size in slot.after:
            if size:
                is_source = np.zeros(len(self._node))
                is_source[self._ranks[j]] = 1.0
                is_near = np.zeros(self._node[-1] + 1)
                is_near[self._node[self._ranks[j]]] = 1.0
                near = is_near[self._node[slot.reach][:: slot.tp]]
                cost = cost + size / total * (1 - slot.by_group(is_source)) * (1 - 0.5 * near)
        return cost

    def _reduce_s(self) -> float:
        holders: dict[tuple[str, int, int], set[tuple[int, ...]]] = {}
        sizes: dict[tuple[str, int, int], float] = {}
        for own in stretches(self._slots):
            key = own.owner, own.blocks[0], own.tp
            holders[key] = {group for i in own.slots for group in self._groups[i]}
            sizes[key] = own.gradient_bytes
        return reductions_s(self._cluster, holders, sizes)

    def _backward_s(self) -> float:
        """The mirror image on the same ranks: what ended last starts first."""
        free, ends = np.zeros(len(self._node)), [0.0] * len(self._slots)
        ready = [0.0] * len(self._slots)
        for i in sorted(self._ends, key=lambda i: (-self._ends[i], -i)):
            slot, ranks = self._slots[i], self._ranks[i]
            start = max(ready[i], float(free[ranks].max()))
            ends[i] = start + slot.backward_s
            free[ranks] = ends[i]
            for other, _ in slot.after:
                before = self._slots[other].backward_s
                start = self._follow(ends[i], slot.backward_s, before, (i, other))
                ready[other] = max(ready[other], start + self._moves[i, other])
        return max(ends)
