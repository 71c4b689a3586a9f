"""Seconds that messages and collectives take on a cluster's links.

A collective over ranks of one node is the cheaper of a ring (each link carries
``2(n-1)/n`` of the bytes, each of the ``2(n-1)`` steps costs the latency) and a tree
(``2 log2 n`` steps, twice the bytes), as NCCL chooses. Over several nodes it is
hierarchical: inside each node first, then between nodes, where the ranks of a node that
take part share the node's bandwidth: the node sends its ``2(N-1)/N`` of the bytes once.
A measured link of a collective replaces both: ``latency_s`` for the whole operation and
its bandwidth for the ring's bytes, ``2(n-1)/n`` (all-reduce) or ``(n-1)/n`` (all-gather).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from mmplan.schema.cluster import Cluster, CollectiveLinks, Link

Kind = Literal["all_reduce", "all_gather"]


def message_s(cluster: Cluster, source: int, target: int, num_bytes: float) -> float:
    """Seconds of one message; a rank gives to itself for nothing."""
    if source == target:
        return 0.0
    link = cluster.link_between(source, target)
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def collective_s(
    cluster: Cluster, kind: Kind, ranks: Sequence[int], num_bytes: float, *, sharers: int = 1
) -> float:
    """Seconds of a collective.

    Args:
        cluster: whose links carry it.
        kind: all-reduce of ``num_bytes`` on every rank, or all-gather that leaves
            ``num_bytes`` on every rank.
        ranks: who takes part.
        num_bytes: size of the result on each rank.
        sharers: groups on these nodes that do the same at the same time (the shards of
            a tensor-parallel module); they share a node's bandwidth.
    """
    per_node = Counter(cluster.node_of(rank) for rank in set(ranks))
    num_local, num_nodes = max(per_node.values(), default=1), len(per_node)
    links = cluster.links
    inter = links.inter_node or links.intra_node
    inside = _phase_s(kind, num_local, num_bytes, links.intra_node, links.intra_node_collectives)
    between = _phase_s(kind, num_nodes, num_bytes * sharers, inter, links.inter_node_collectives)
    return inside + between


def _phase_s(
    kind: Kind, num: int, num_bytes: float, link: Link, measured: CollectiveLinks | None
) -> float:
    """One level of a collective among ``num`` equals."""
    if num <= 1:
        return 0.0
    passes = 2 if kind == "all_reduce" else 1
    ring_bytes = passes * (num - 1) / num * num_bytes
    own: Link | None = None if measured is None else getattr(measured, kind)
    if own is not None:
        return own.latency_s + ring_bytes / own.bandwidth_bytes_per_s
    ring = passes * (num - 1) * link.latency_s + ring_bytes / link.bandwidth_bytes_per_s
    tree_steps = passes * math.ceil(math.log2(num))
    # An all-gather's data differ from rank to rank: doubling sends no byte twice.
    tree_bytes = passes * num_bytes if kind == "all_reduce" else ring_bytes
    tree = tree_steps * link.latency_s + tree_bytes / link.bandwidth_bytes_per_s
    return min(ring, tree)
