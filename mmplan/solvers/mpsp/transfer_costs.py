"""What moving data costs: activations to the next slice, gradients to their reduction.

Estimates for choosing among schedules, from the links' latency and bandwidth alone; the
simulation of a plan has every message and every wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from mmplan.costs.links import collective, collective_s, message
from mmplan.schema.cluster import Cluster
from mmplan.solvers.sample_split import split_evenly


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
                        gather_s = collective_s(cluster, "all_gather", consumer, num_bytes)
                    for side in ((cluster.node_of(source), True), (cluster.node_of(target), False)):
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
