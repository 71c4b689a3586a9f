"""What reductions of many groups of ranks take, all at once: :mod:`mmplan.links` on arrays."""

from __future__ import annotations

import numpy as np

from mmplan.schema.cluster import Cluster, CollectiveLinks, Link
from mmplan.solvers.convex_stages import Floats, Ints


def all_reduce_s(
    cluster: Cluster,
    num: Ints,
    num_local: Ints,
    num_nodes: Ints,
    num_bytes: Floats,
    *,
    sharers: int | Ints,
) -> Floats:
    """:func:`mmplan.links.collective_s` for many groups of ranks at once.

    Args:
        cluster: whose links carry it.
        num: ranks of a group.
        num_local: most of them on one node.
        num_nodes: nodes on which they are.
        num_bytes: on every rank.
        sharers: groups that share a node's bandwidth.
    """
    links, between = cluster.links, between_nodes(cluster)
    inside_s = _phase_s(num_local, num_bytes, links.intra_node, links.intra_node_collectives)
    between_s = _phase_s(num_nodes, num_bytes * sharers, between, links.inter_node_collectives)
    levels = links.intra_node_collectives, links.inter_node_collectives
    if any(own is not None and own.all_reduce is not None for own in levels):
        return inside_s + between_s
    inside = links.intra_node
    byte_s = np.maximum(1 / inside.bandwidth_bytes_per_s, sharers / between.bandwidth_bytes_per_s)
    across = 2 * np.minimum(num - 1, num_nodes)
    ring_s = (2 * (num - 1) - across) * inside.latency_s + across * between.latency_s
    ring_s = ring_s + 2 * (num - 1) / num * num_bytes * byte_s
    steps = np.ceil(np.log2(np.maximum(num_nodes, 1)))
    tree_s = 2 * ((num_local - 1) * inside.latency_s + steps * between.latency_s)
    tree_s = tree_s + 2 * num_bytes * byte_s
    flat_s = np.minimum(ring_s, tree_s)
    return np.where(num_nodes > 1, np.minimum(inside_s + between_s, flat_s), inside_s)


def _phase_s(num: Ints, num_bytes: Floats, link: Link, measured: CollectiveLinks | None) -> Floats:
    ring_bytes = 2 * (num - 1) / num * num_bytes
    if measured is not None and measured.all_reduce is not None:
        own = measured.all_reduce
        seconds = own.latency_s + ring_bytes / own.bandwidth_bytes_per_s
    else:
        ring = 2 * (num - 1) * link.latency_s + ring_bytes / link.bandwidth_bytes_per_s
        steps = 2 * np.ceil(np.log2(np.maximum(num, 1)))
        seconds = np.minimum(
            ring, steps * link.latency_s + 2 * num_bytes / link.bandwidth_bytes_per_s
        )
    return np.where(num > 1, seconds, 0.0)


def between_nodes(cluster: Cluster) -> Link:
    """The link between nodes; the one inside where there is only one node."""
    return cluster.links.inter_node or cluster.links.intra_node
