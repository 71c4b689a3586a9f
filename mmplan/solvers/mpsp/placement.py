"""Which ranks run which slice, and when: inside a node first, near its input and its parameters.

Slices are placed in the order of their starts in the schedule, those of one instant by the bytes
that they receive. A slice starts when its input has come over the links. Tensor-parallel groups
that are free are compared by three costs: new parameters (a group may hold the slice's blocks
already, for another task), input from other ranks, and memory in use. A slice whose ranks are not
free together waits for them, so the result is a valid schedule whatever times the input has. A rank
holds a block as one shard only, so slices of other tensor-parallel degrees go to other ranks. Where
memory is too small, the placement starts again with a larger weight of memory; at last it takes the
ranks that a search by memory alone finds (:func:`pack`).
Spindle's device placement (arXiv:2409.03365) has the same aims; these costs are our own.

Shape suffixes: N = ranks; B = blocks of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np

from mmplan.arrays import Floats, Indices, Ints
from mmplan.costs.links import collective, collective_s, message
from mmplan.schema.cluster import Cluster
from mmplan.solvers.sample_split import split_evenly
from mmplan.solvers.search_budget import SearchBudget


def transfer_s(
    cluster: Cluster,
    producers: Sequence[Sequence[int]],
    consumers: Sequence[Sequence[int]],
    *,
    samples: int,
    sample_bytes: float,
) -> float:
    """Seconds until every replica of the consumer has its samples' activations.

    A rank receives from one rank of every producer that holds some of its samples, from all of them
    at the same time; its own activations need no message. From another node each rank of a
    tensor-parallel group receives a part, and the group gathers the parts. All messages that leave
    a node share one interface, and so do all that come to it.

    Args:
        producers: ranks of each replica of the slice that sends.
        consumers: ranks of each replica of the slice that receives.
        samples: samples that travel together, one micro-batch of every replica.
        sample_bytes: bytes of one sample.
    """
    longest_s, sender = 0.0, 0
    interfaces: dict[tuple[int, bool], float] = {}
    # By bytes and the nodes of a group's ranks, counted from that of its first.
    gathers_s: dict[tuple[float, tuple[int, ...]], float] = {}
    node_of = cluster.node_of
    ends = list(accumulate(split_evenly(samples, len(producers))))
    first = 0
    for consumer, stop in zip(
        consumers, accumulate(split_evenly(samples, len(consumers))), strict=True
    ):
        while ends[sender] <= first and sender + 1 < len(ends):
            sender += 1
        target = consumer[0]
        for p in range(sender, len(ends)):
            part = min(stop, ends[p]) - max(first, ends[p - 1] if p else 0)
            source = producers[p][0]
            if part > 0 and source != target:
                num_bytes = part * sample_bytes
                own = message(cluster, source, target, num_bytes)
                gather_s = 0.0
                if own.interface_s:
                    if len(consumer) > 1:
                        nodes = tuple([node_of(rank) - node_of(target) for rank in consumer])
                        if (num_bytes, nodes) not in gathers_s:
                            own_s = collective_s(cluster, "all_gather", consumer, num_bytes)
                            gathers_s[num_bytes, nodes] = own_s
                        gather_s = gathers_s[num_bytes, nodes]
                    for side in ((node_of(source), True), (node_of(target), False)):
                        interfaces[side] = interfaces.get(side, 0.0) + own.interface_s
                longest_s = max(longest_s, own.seconds + gather_s)
            if ends[p] >= stop:
                break
        first = stop
    return max([longest_s, *interfaces.values()])


def spread_s(cluster: Cluster, devices: int, num_bytes: float) -> float:
    """Seconds of moving bytes between slices on all devices, before their ranks are known.

    With several nodes, half of the bytes is assumed to stay inside its node; all interfaces carry
    the rest.
    """
    nodes = -(-devices // cluster.devices_per_node)
    links = cluster.links
    if nodes == 1 or links.inter_node is None:
        own = links.intra_node
        return own.latency_s + num_bytes / devices / own.bandwidth_bytes_per_s
    own = links.inter_node
    return own.latency_s + num_bytes / 2 / nodes / own.bandwidth_bytes_per_s


def reductions_s(
    cluster: Cluster, shards: Iterable[tuple[frozenset[tuple[int, ...]], float]]
) -> float:
    """Seconds of all reductions of gradients.

    The reductions of one rank run one after another. Those of different ranks run at the same
    time, but share the interfaces of their nodes.

    Args:
        shards: of every block shard the tensor-parallel groups that hold it, and the bytes of
            gradients that one rank contributes.
    """
    bytes_of: dict[frozenset[tuple[int, ...]], float] = {}
    for groups, num_bytes in shards:
        bytes_of[groups] = bytes_of.get(groups, 0.0) + num_bytes
    busy: dict[int, float] = {}
    interfaces: dict[int, float] = {}
    for groups, num_bytes in bytes_of.items():
        if len(groups) > 1 and num_bytes:
            firsts = [group[0] for group in groups]
            tp = len(next(iter(groups)))
            own = collective(cluster, "all_reduce", firsts, num_bytes, sharers=tp)
            for rank in (rank for group in groups for rank in group):
                busy[rank] = busy.get(rank, 0.0) + own.seconds
            for node in {cluster.node_of(rank) for rank in firsts}:
                interfaces[node] = interfaces.get(node, 0.0) + own.interface_s
    return max([0.0, *busy.values(), *interfaces.values()])


# Times that differ by less than this share are one instant: sums of times are rounded.
_SAME_INSTANT = 1e-9
# Weights of memory in use against input and new parameters, in the order of tries. By hand.
_MEMORY_WEIGHTS = (0.3, 3.0, 30.0)
# Communicators that a rank is assumed to have; the simulation counts them. Chosen by hand.
_ASSUMED_COMMUNICATORS = 8
# Seconds of a quiet core for a search by memory that finds ranks, and for one that does not, for
# each variable. Measured.
_FOUND_S = 1e-4
_IN_VAIN_S = 2e-3
# Cost of input from another rank of the same node, as a share of that from another node.
_SAME_NODE = 0.5

RankRange = tuple[int, int]
"""The first rank, and the one after the last."""

RankGroups = tuple[tuple[int, ...], ...]
"""Ranks of each replica; those of one tensor-parallel group together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnplacedSlice:
    """A segment of a MetaOp with its degrees, times and bytes, to be given ranks.

    Attributes:
        rank_range: ranks that it may use.
        start_s: its start in the schedule.
        after: the slices that end before it starts, each with the bytes a sample that it sends.
        samples: of a round.
        num_microbatches: of a replica; all but the last travel while others are computed.
        owner: the module whose parameters it uses.
        blocks: the first, and the one after the last.
        fixed_bytes: ``[B]`` parameters, gradients and optimizer state of each block on one rank.
        gradient_bytes: ``[B]`` what each rank contributes to the reduction of the gradients.
        activation_bytes: of a round, on one rank.
    """

    tp: int
    dp: int
    rank_range: RankRange
    start_s: float
    forward_s: float
    backward_s: float
    after: tuple[tuple[int, float], ...]
    samples: int
    num_microbatches: int
    owner: str
    blocks: tuple[int, int]
    fixed_bytes: Floats
    gradient_bytes: Floats
    activation_bytes: float

    @property
    def num_groups(self) -> int:
        """Tensor-parallel groups among which its replicas are chosen."""
        return (self.rank_range[1] - self.rank_range[0]) // self.tp

    @property
    def group_ranks(self) -> slice:
        """Ranks of these groups."""
        return slice(self.rank_range[0], self.rank_range[0] + self.num_groups * self.tp)

    def group_max(self, value_N: Floats) -> Floats:
        """The largest value in each of these groups."""
        own = value_N[self.group_ranks]
        return own if self.tp == 1 else own.reshape(-1, self.tp).max(axis=1)

    def group(self, index: int) -> tuple[int, ...]:
        """Ranks of a group."""
        first = self.rank_range[0] + index * self.tp
        return tuple(range(first, first + self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShard:
    """Blocks that the same slices (by index) run at one degree, and their bytes on one rank."""

    owner: str
    tp: int
    blocks: tuple[int, int]
    slices: tuple[int, ...]
    fixed_bytes: float
    gradient_bytes: float


def block_shards(slices: Sequence[UnplacedSlice]) -> Iterator[BlockShard]:
    """All blocks of the slices, cut wherever a slice of that module and degree begins or ends."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, slice_ in enumerate(slices):
        members.setdefault((slice_.owner, slice_.tp), []).append(i)
    for (owner, tp), own in members.items():
        for a, b in pairwise(sorted({edge for i in own for edge in slices[i].blocks})):
            users = [i for i in own if slices[i].blocks[0] <= a < slices[i].blocks[1]]
            if users:
                cuts = [
                    (slices[i], a - slices[i].blocks[0], b - slices[i].blocks[0]) for i in users
                ]
                yield BlockShard(
                    owner=owner,
                    tp=tp,
                    blocks=(a, b),
                    slices=tuple(users),
                    fixed_bytes=max(float(x.fixed_bytes[c:d].sum()) for x, c, d in cuts),
                    gradient_bytes=max(float(x.gradient_bytes[c:d].sum()) for x, c, d in cuts),
                )


def pack(
    slices: Sequence[UnplacedSlice], devices: int, memory_bytes: float, *, budget: SearchBudget
) -> list[RankGroups] | None:
    """Groups of ranks for every slice, with which no rank has more than its memory.

    Time does not matter here: a slice can wait for any ranks. A rank has parameters (each block
    once and as one shard, however many slices run it) and activations. One variable says whether a
    slice has a group, another whether a rank holds a shard; HiGHS looks for any values that fit.

    None where there is no such placement, or none was found before the budget was over.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import dok_array

    shards = list(block_shards(slices))
    # The first variable of each slice's groups, then of each shard's ranks.
    groups = [0, *accumulate(own.num_groups for own in slices)]
    ranks = [groups[-1] + k * devices for k in range(len(shards) + 1)]
    if budget.left_s < 2 * _FOUND_S * ranks[-1]:
        return None
    rows: list[dict[int, float]] = [{} for _ in range(devices)]
    least, most = [-math.inf] * devices, [1.0] * devices
    for own, first in zip(slices, groups, strict=False):
        for index in range(own.num_groups):
            for rank in own.group(index):
                rows[rank][first + index] = own.activation_bytes / memory_bytes
        rows.append(dict.fromkeys(range(first, first + own.num_groups), 1.0))
        least.append(own.dp)
        most.append(own.dp)
    for shard, first in zip(shards, ranks, strict=False):
        for rank in range(devices):
            rows[rank][first + rank] = shard.fixed_bytes / memory_bytes
        rows += [
            {groups[i] + index: 1.0, first + rank: -1.0}
            for i in shard.slices
            for index in range(slices[i].num_groups)
            for rank in slices[i].group(index)
        ]
        most += [0.0] * (len(rows) - len(most))
        for other, start in zip(shards, ranks, strict=False):
            meet = shard.blocks[0] < other.blocks[1] and other.blocks[0] < shard.blocks[1]
            if meet and shard.owner == other.owner and shard.tp < other.tp:
                rows += [{first + rank: 1.0, start + rank: 1.0} for rank in range(devices)]
        most += [1.0] * (len(rows) - len(most))
    matrix = dok_array((len(rows), ranks[-1]))
    for place, row in enumerate(rows):
        for variable, value in row.items():
            matrix[place, variable] = value
    least += [-math.inf] * (len(rows) - len(least))
    found = milp(
        np.zeros(ranks[-1]),
        integrality=np.arange(ranks[-1]) < groups[-1],
        bounds=Bounds(0.0, 1.0),
        constraints=cast(Any, LinearConstraint)(matrix.tocsr(), least, most),
        # Ranks are found in the first node, or after very many.
        options={"node_limit": max(1, int(budget.left_s / (_IN_VAIN_S * ranks[-1])))},
    )
    budget.spend(ranks[-1] * (_IN_VAIN_S if found.x is None else _FOUND_S))
    if found.x is None:
        return None
    return [
        tuple(own.group(index) for index in np.flatnonzero(found.x[a:b] > 0.5).tolist())
        for own, a, b in zip(slices, groups, groups[1:], strict=False)
    ]


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


def place(
    slices: Sequence[UnplacedSlice],
    cluster: Cluster,
    devices: int,
    *,
    budget: SearchBudget,
    streamed: bool = False,
) -> Placed | float:
    """Ranks for every slice.

    Args:
        slices: producers before consumers.
        budget: of the search by memory alone, where no choice in the order of time fits.
        streamed: a slice starts with the first micro-batch that its producer has finished;
            otherwise when all micro-batches are finished.

    Returns:
        The placement; where none was found, the least memory shortfall of a rank in bytes.
    """
    shortfall_bytes = math.inf
    for weight in _MEMORY_WEIGHTS:
        found = _Attempt(slices, cluster, devices, weight, streamed).run()
        if isinstance(found, Placed):
            return found
        shortfall_bytes = min(shortfall_bytes, found)
    if not budget.is_over:
        packed = pack(slices, devices, _memory_bytes(cluster), budget=budget)
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
