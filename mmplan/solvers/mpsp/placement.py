"""Which ranks run which slice, and when: inside a node first, near its input and its parameters.

Slices are placed in the order of their starts in the schedule, those of one instant by the bytes
that they receive. A slice starts when its input has come over the links. Tensor-parallel groups
that are free are compared by three costs: new parameters (a group may hold the slice's blocks
already, for another task), input from other ranks, and memory in use. A slice whose ranks are not
free together waits for them, so the result is a valid schedule whatever times the input has. A rank
holds a block as one shard only, so slices of other tensor-parallel degrees go to other ranks. Where
memory is too small, the placement starts again with a larger weight of memory; at last it takes the
ranks that :mod:`mmplan.solvers.mpsp.memory_packing` finds.
Spindle's device placement (arXiv:2409.03365) has the same aims; these costs are our own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.arrays import Floats, Indices, Ints
from mmplan.schema.cluster import Cluster
from mmplan.solvers.mpsp.memory_packing import pack
from mmplan.solvers.mpsp.slices import RankGroups, UnplacedSlice, block_shards
from mmplan.solvers.mpsp.transfer_costs import reductions_s, transfer_s

# Times that differ by less than this share are one instant: sums of times are rounded.
_SAME_INSTANT = 1e-9
# Weights of memory in use against input and new parameters, in the order of tries. By hand.
_MEMORY_WEIGHTS = (0.3, 3.0, 30.0)
# Communicators that a rank is assumed to have; the simulation counts them. Chosen by hand.
_ASSUMED_COMMUNICATORS = 8
# Cost of input from another rank of the same node, as a share of that from another node.
_SAME_NODE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Slices on ranks.

    Attributes:
        groups: per slice the ranks of each replica.
        starts: start of each slice's forward, seconds.
        forward_s: end of the last forward.
        backward_s: seconds of all backwards.
        reduce_s: seconds of the reduction of the gradients after the last round.
        memory_bytes: per rank, parameters and activations of its slices.
    """

    groups: tuple[RankGroups, ...]
    starts: tuple[float, ...]
    forward_s: float
    backward_s: float
    reduce_s: float
    memory_bytes: tuple[float, ...]

    @property
    def memory_imbalance(self) -> float:
        """Memory of the peak rank over the mean."""
        mean = sum(self.memory_bytes) / len(self.memory_bytes)
        return max(self.memory_bytes) / mean if mean else 1.0


def place(
    slices: Sequence[UnplacedSlice],
    cluster: Cluster,
    devices: int,
    *,
    limit_s: float,
    streamed: bool = False,
) -> Placed | float:
    """Ranks for every slice.

    Args:
        slices: producers before consumers.
        limit_s: seconds for the search by memory alone, where no choice in the order of time fits.
        streamed: a slice starts with the first micro-batch that its producer has finished;
            otherwise when all micro-batches are finished.

    Returns:
        The placement; where none was found, the least memory shortfall of a rank in bytes.
    """
    deadline, shortfall_bytes = time.monotonic() + limit_s, math.inf
    for weight in _MEMORY_WEIGHTS:
        found = _Attempt(slices, cluster, devices, weight, streamed).run()
        if isinstance(found, Placed):
            return found
        shortfall_bytes = min(shortfall_bytes, found)
    if limit_s > 0:
        packed = pack(slices, devices, _memory_bytes(cluster), deadline=deadline)
        if packed:
            weight = _MEMORY_WEIGHTS[0]
            found = _Attempt(slices, cluster, devices, weight, streamed, packed).run()
            if isinstance(found, Placed):
                return found
    return shortfall_bytes


def _memory_bytes(cluster: Cluster) -> float:
    """Memory of a rank that is left for its slices."""
    device = cluster.device
    return device.memory_bytes - _ASSUMED_COMMUNICATORS * device.communicator_bytes


class _Attempt:
    """One placement in the order of time; with ``packed`` the ranks are given."""

    def __init__(
        self,
        slices: Sequence[UnplacedSlice],
        cluster: Cluster,
        devices: int,
        memory_weight: float,
        streamed: bool,
        packed: Sequence[RankGroups] | None = None,
    ) -> None:
        self._slices = slices
        self._cluster = cluster
        self._memory_bytes = _memory_bytes(cluster)
        self._memory_weight = memory_weight
        self._streamed = streamed
        self._packed = packed
        self._used_bytes: Floats = np.zeros(devices)
        # Per module ``[N, L]``: the tensor-parallel degree of the shard of a block, 0 for none.
        self._degree: dict[str, Ints] = {}
        for owner in {slice_.owner for slice_ in slices}:
            blocks = max(slice_.blocks[1] for slice_ in slices if slice_.owner == owner)
            self._degree[owner] = np.zeros((devices, blocks), dtype=np.int64)
        self._free_at: Floats = np.zeros(devices)
        self._node = np.arange(devices) // cluster.devices_per_node
        self._groups: dict[int, RankGroups] = {}
        self._ranks: dict[int, Indices] = {}
        self._ends: dict[int, float] = {}
        # Seconds from a producer to a consumer: of the activations, and of their gradients back.
        self._transfers_s: dict[tuple[int, int], float] = {}

    def run(self) -> Placed | float:
        """The placement, or the memory shortfall of a rank in bytes."""
        depth: list[int] = []
        for slice_ in self._slices:
            depth.append(1 + max((depth[i] for i, _ in slice_.after), default=0))
        order = sorted(
            range(len(self._slices)),
            key=lambda i: (
                self._slices[i].start_s,
                depth[i],
                -sum(b for _, b in self._slices[i].after) * self._slices[i].samples,
            ),
        )
        starts = [0.0] * len(self._slices)
        for i in order:
            slice_ = self._slices[i]
            degree = self._degree[slice_.owner][:, slice(*slice_.blocks)]
            # The slice's fixed bytes that each rank does not hold yet.
            new_bytes = (degree != slice_.tp) @ slice_.fixed_bytes
            choice = self._choose(i, new_bytes)
            if not isinstance(choice, tuple):
                return choice
            groups, start = choice
            ranks = np.array(groups, dtype=np.intp).ravel()
            start = max(start, self._arrival_s(i, groups))
            starts[i], self._ends[i] = start, start + slice_.forward_s
            self._groups[i], self._ranks[i] = groups, ranks
            self._used_bytes[ranks] += new_bytes[ranks] + slice_.activation_bytes
            degree[ranks] = slice_.tp
            self._free_at[ranks] = self._ends[i]
        return Placed(
            groups=tuple(self._groups[i] for i in range(len(self._slices))),
            starts=tuple(starts),
            forward_s=max(self._ends.values()),
            backward_s=self._backward_s(),
            reduce_s=self._reduce_s(),
            memory_bytes=tuple(self._used_bytes.tolist()),
        )

    def _choose(self, i: int, new_bytes: Floats) -> tuple[RankGroups, float] | float:
        """Ranks for a slice and when they are free for it, or a rank's memory shortfall."""
        slice_ = self._slices[i]
        ready = max((self._ready_s(j, i) for j, _ in slice_.after), default=0.0)
        if self._packed is not None:
            groups = self._packed[i]
            return groups, max(ready, float(self._free_at[np.array(groups)].max()))
        degree = self._degree[slice_.owner][:, slice(*slice_.blocks)]
        has_other_shard = ((degree != 0) & (degree != slice_.tp)).any(axis=1).astype(np.float64)
        is_allowed = slice_.group_max(has_other_shard) == 0
        if np.count_nonzero(is_allowed) < slice_.dp:
            return math.inf
        needed = slice_.group_max(self._used_bytes + new_bytes) + slice_.activation_bytes
        fits = is_allowed & (needed <= self._memory_bytes)
        if np.count_nonzero(fits) < slice_.dp:
            return float(np.sort(needed[is_allowed])[slice_.dp - 1]) - self._memory_bytes
        free = slice_.group_max(self._free_at)
        start = max(ready, float(np.sort(free[fits])[slice_.dp - 1]))
        offered = np.flatnonzero(fits & (free <= start * (1 + _SAME_INSTANT)))
        chosen = self._nearest(slice_, offered, new_bytes)
        return tuple(slice_.group(index) for index in sorted(chosen)), start

    def _arrival_s(self, i: int, groups: RankGroups) -> float:
        """When all input of a slice is on its ranks; keeps how long each transfer takes."""
        slice_, arrival = self._slices[i], 0.0
        for j, sample_bytes in slice_.after:
            messages = min(slice_.num_microbatches, self._slices[j].num_microbatches)
            samples = -(-slice_.samples // messages)
            self._transfers_s[i, j] = transfer_s(
                self._cluster, self._groups[j], groups, samples=samples, sample_bytes=sample_bytes
            )
            arrival = max(arrival, self._ready_s(j, i) + self._transfers_s[i, j])
        return arrival

    def _ready_s(self, j: int, i: int) -> float:
        """Earliest start of slice i's forward after that of its producer j, without transfers."""
        one_s, other_s = self._slices[j].forward_s, self._slices[i].forward_s
        return self._earliest_start_s(self._ends[j], one_s, other_s, (i, j))

    def _earliest_start_s(
        self, end_s: float, one_s: float, other_s: float, pair: tuple[int, int]
    ) -> float:
        """Start after a slice that ends then, so that no micro-batch waits for its input."""
        if not self._streamed:
            return end_s
        share = 1 / min(self._slices[i].num_microbatches for i in pair)
        return max(end_s - one_s * (1 - share), end_s - other_s * (1 - share))

    def _nearest(self, slice_: UnplacedSlice, offered: Indices, new_bytes: Floats) -> list[int]:
        """The cheapest ``dp`` of the groups: on one node where one has enough, else on few."""
        cost = self._costs(slice_, new_bytes)
        node = self._node[slice_.group_ranks][:: slice_.tp]
        by_node: dict[int, list[int]] = {}
        for index in offered[np.argsort(cost[offered], kind="stable")].tolist():
            by_node.setdefault(int(node[index]), []).append(index)
        enough = [own[: slice_.dp] for own in by_node.values() if len(own) >= slice_.dp]
        if enough:
            return min(enough, key=lambda own: float(cost[own].sum()))
        largest = sorted(by_node.values(), key=lambda own: (-len(own), float(cost[own].mean())))
        return [index for own in largest for index in own][: slice_.dp]

    def _costs(self, slice_: UnplacedSlice, new_bytes: Floats) -> Floats:
        """Cost of each group: its memory in use, new parameters, and input from elsewhere.

        Each is a share: of the memory, of the slice's parameters, and of its input.
        """
        used = slice_.group_max(self._used_bytes)
        cost = self._memory_weight * used / self._memory_bytes
        fixed_bytes = float(slice_.fixed_bytes.sum())
        if fixed_bytes:
            cost = cost + slice_.group_max(new_bytes) / fixed_bytes
        total = sum(size for _, size in slice_.after)
        for j, size in slice_.after:
            if size:
                is_source = np.zeros(len(self._node))
                is_source[self._ranks[j]] = 1.0
                is_near = np.zeros(self._node[-1] + 1)
                is_near[self._node[self._ranks[j]]] = 1.0
                near = is_near[self._node[slice_.group_ranks][:: slice_.tp]]
                share = size / total * (1 - slice_.group_max(is_source))
                cost = cost + share * (1 - (1 - _SAME_NODE) * near)
        return cost

    def _reduce_s(self) -> float:
        shards = (
            (frozenset({g for i in own.slices for g in self._groups[i]}), own.gradient_bytes)
            for own in block_shards(self._slices)
        )
        return reductions_s(self._cluster, shards)

    def _backward_s(self) -> float:
        """Seconds of the mirror image on the same ranks: what ended last starts first."""
        free_at, ends = np.zeros(len(self._node)), [0.0] * len(self._slices)
        ready = [0.0] * len(self._slices)
        for i in sorted(self._ends, key=lambda i: (-self._ends[i], -i)):
            slice_, ranks = self._slices[i], self._ranks[i]
            start = max(ready[i], float(free_at[ranks].max()))
            ends[i] = start + slice_.backward_s
            free_at[ranks] = ends[i]
            for other, _ in slice_.after:
                before_s = self._slices[other].backward_s
                start = self._earliest_start_s(ends[i], slice_.backward_s, before_s, (i, other))
                ready[other] = max(ready[other], start + self._transfers_s[i, other])
        return max(ends)
