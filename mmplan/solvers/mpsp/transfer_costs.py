"""What moving data between slices costs: activations to the next slice, gradients to their sum.

Estimates for choosing among schedules, from the links' latency and bandwidth alone; the
simulation of a plan has every message and every wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from mmplan.costs.links import collective, collective_s, message
from mmplan.schema.cluster import Cluster
from mmplan.solvers.sample_split import split_evenly

ChainGroups = Sequence[Sequence[int]]
"""Ranks of each replica, the tensor-parallel ones together."""


def transfer_s(
    cluster: Cluster,
    producers: ChainGroups,
    consumers: ChainGroups,
    *,
    samples: int,
    sample_bytes: float,
) -> float:
    """Seconds until the last replica of a slice has what another slice made of its samples.

    Each rank takes a copy from one rank of every producer that holds some of its samples, from
    all of them at the same time; what it made itself is there. From another node each rank of a
    group takes a share, which the group gathers. Between nodes all that leaves a node, or comes
    to it, goes over one interface.

    Args:
        samples: that travel together: of one micro-batch of every replica.
        sample_bytes: of one of them.
    """
    longest_s, d = 0.0, 0
    interfaces: dict[tuple[int, bool], float] = {}
    ends = list(accumulate(split_evenly(samples, len(producers))))
    first = 0
    for consumer, stop in zip(
        consumers, accumulate(split_evenly(samples, len(consumers))), strict=True
    ):
        while ends[d] <= first and d + 1 < len(ends):
            d += 1
        e = d
        while True:
            part = min(stop, ends[e]) - max(first, ends[e - 1] if e else 0)
            source, target = producers[e][0], consumer[0]
            if part > 0 and source != target:
                num_bytes = part * sample_bytes
                own = message(cluster, source, target, num_bytes)
                gather_s = 0.0
                if own.interface_s:
                    if len(consumer) > 1:
                        gather_s = collective_s(cluster, "all_gather", consumer, num_bytes)
                    for side in ((cluster.node_of(source), True), (cluster.node_of(target), False)):
                        interfaces[side] = interfaces.get(side, 0.0) + own.interface_s
                longest_s = max(longest_s, own.seconds + gather_s)
            if ends[e] >= stop or e + 1 == len(ends):
                break
            e += 1
        first = stop
    return max(longest_s, *interfaces.values(), 0.0)


def spread_s(cluster: Cluster, devices: int, num_bytes: float) -> float:
    """Seconds of moving that many bytes between slices on all devices, ranks not known yet.

    Between nodes half of them is taken to stay where it is, and all interfaces to carry the rest.
    """
    nodes = -(-devices // cluster.devices_per_node)
    links = cluster.links
    if nodes == 1 or links.inter_node is None:
        own = links.intra_node
        return own.latency_s + num_bytes / devices / own.bandwidth_bytes_per_s
    own = links.inter_node
    return own.latency_s + num_bytes / 2 / nodes / own.bandwidth_bytes_per_s


def reductions_s(
    cluster: Cluster,
    holders: Mapping[tuple[str, int, int], set[tuple[int, ...]]],
    gradient_bytes: Mapping[tuple[str, int, int], float],
) -> float:
    """Seconds of summing all gradients over the ranks that hold them, one sum after another.

    Sums of other ranks run at the same time, but share nodes' interfaces.

    Args:
        holders: (owner, block, tp) to the groups of ranks that hold the block's shards.
        gradient_bytes: of each, on one rank.
    """
    together: dict[tuple[frozenset[tuple[int, ...]], int], float] = {}
    for key, groups in holders.items():
        place = frozenset(groups), key[2]
        together[place] = together.get(place, 0.0) + gradient_bytes[key]
    busy: dict[int, float] = {}
    interfaces: dict[int, float] = {}
    for (groups, tp), size in together.items():
        if len(groups) > 1 and size:
            firsts = [group[0] for group in groups]
            own = collective(cluster, "all_reduce", firsts, size, sharers=tp)
            for rank in (rank for group in groups for rank in group):
                busy[rank] = busy.get(rank, 0.0) + own.seconds
            for node in {cluster.node_of(rank) for rank in firsts}:
                interfaces[node] = interfaces.get(node, 0.0) + own.interface_s
    return max(*busy.values(), *interfaces.values(), 0.0, 0.0)
