"""Seconds of messages and collectives on a cluster's links, without other transfers.

Inside a node a collective is the cheaper of

- a *ring*: ``s`` passes over ``(n-1)/n`` of the bytes, each of its ``s (n-1)`` steps costs the
  latency (``s`` is 2 for an all-reduce, 1 for an all-gather);
- a *tree*: ``s ceil(log2 n)`` steps; an all-reduce moves twice the bytes, an all-gather the
  ring's, since its data differ from rank to rank.

Over N nodes of n ranks in all, up to l of them on one node, it is the cheapest of

- *hierarchical*: as above inside each node, then as above between the nodes, one part after
  the other; a node sends its share of the bytes once;
- a flat *ring* through all ranks, several on different ranks where a node has several, so that
  together they fill the node's bandwidth: the ring's bytes at the slower of both links, of its
  ``s (n-1)`` steps ``s N`` go between nodes (``N - 1`` where s is 1);
- a flat *tree*, of an all-reduce only: chains inside the nodes and a tree between them, twice
  the bytes at the slower of both links, ``2 (l - 1)`` steps inside and ``2 ceil(log2 N)``
  between nodes.

NCCL chooses between these algorithms by size; steps and bytes are those of its own model
(``src/graph/tuning.cc``). A measured link of a collective replaces all this on its level:
``latency_s`` for the whole operation and its bandwidth for the ring's bytes.

Where devices have network adapters of their own, a message between nodes uses those of two
devices, and a collective those of all its ranks on a node: together they may carry less than the
node's bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.schema.cluster import Cluster, Link, Links

# So many that a latency beside them loses no digits.
_MANY_BYTES = 2**30

CollectiveKind = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message or a collective, alone.

    Attributes:
        seconds: of the whole transfer.
        interface_s: that its bytes would take with the nodes' whole network interfaces.
        load: the part of these interfaces that it can use; less than 1 where the network
            adapters of its ranks carry less.
    """

    seconds: float
    interface_s: float = 0.0
    load: float = 1.0

    def times(self, factor: float) -> Transfer:
        """The transfer with all its times scaled."""
        return replace(self, seconds=self.seconds * factor, interface_s=self.interface_s * factor)


def message(cluster: Cluster, source: int, target: int, num_bytes: float) -> Transfer:
    """One message; free from a rank to itself."""
    if source == target:
        return Transfer(0.0)
    link = cluster.link_between(source, target)
    carried_s = num_bytes / link.bandwidth_bytes_per_s
    if link is not cluster.links.inter_node:
        return Transfer(link.latency_s + carried_s)
    load = float(_load(cluster.links, 1))
    return Transfer(link.latency_s + carried_s / load, carried_s, load)


def _load(links: Links, adapters: Any) -> Any:
    """The part of a node's bandwidth that so many devices' adapters carry."""
    if links.inter_node is None or links.adapter_bytes_per_s is None:
        return 1.0
    share = adapters * links.adapter_bytes_per_s / links.inter_node.bandwidth_bytes_per_s
    return np.minimum(1.0, share)


def collective(
    cluster: Cluster,
    kind: CollectiveKind,
    ranks: Sequence[int],
    num_bytes: float,
    *,
    sharers: int = 1,
) -> Transfer:
    """A collective by its cheapest algorithm.

    Args:
        cluster: its links carry the transfer.
        kind: all-reduce of ``num_bytes`` on every rank, or all-gather that leaves
            ``num_bytes`` on every rank.
        ranks: of the group.
        num_bytes: size of the result on each rank.
        sharers: groups on these nodes that run the same collective at the same time (the shards
            of a tensor-parallel module) and share a node's bandwidth. For estimates: a
            simulation knows the other transfers.
    """
    return _transfer(cluster, kind, _group(cluster, ranks), num_bytes, sharers)


def _group(cluster: Cluster, ranks: Sequence[int] | Ints) -> _Group:
    """The group of some ranks, of an array different ones. This is called very often."""
    each = cluster.devices_per_node
    if isinstance(ranks, np.ndarray):
        there = np.bincount(ranks // each)
        return _Group(len(ranks), int(there.max()), int(np.count_nonzero(there)))
    per_node = Counter([rank // each for rank in set(ranks)])
    most = max(per_node.values(), default=1)
    return _Group(max(sum(per_node.values()), 1), most, max(len(per_node), 1))


def collective_s(
    cluster: Cluster,
    kind: CollectiveKind,
    ranks: Sequence[int],
    num_bytes: float,
    *,
    sharers: int = 1,
) -> float:
    """Seconds of :func:`collective`."""
    return collective(cluster, kind, ranks, num_bytes, sharers=sharers).seconds


class _Group(NamedTuple):
    """Ranks in all, most ranks on one node, and nodes; numbers, or arrays of many groups."""

    ranks: Any
    local: Any
    nodes: Any

    @property
    def fewest(self) -> Any:
        """No node has fewer ranks: what is left for one where all others have the most."""
        return np.maximum(1, self.ranks - (self.nodes - 1) * self.local)


def _transfer(
    cluster: Cluster, kind: CollectiveKind, group: _Group, num_bytes: float, sharers: int
) -> Transfer:
    return Transfer(*map(float, _of_groups(cluster, kind, group, num_bytes, sharers)))


def _of_groups(
    cluster: Cluster, kind: CollectiveKind, group: _Group, num_bytes: Any, sharers: Any
) -> tuple[Any, Any, Any]:
    """Seconds, interface seconds and load of one group or of arrays of groups."""
    links = cluster.links
    # Of groups that are whole nodes each node has a rank of so many.
    sharers = np.minimum(sharers, cluster.devices_per_node)
    inside, between = links.intra_node, links.inter_node or links.intra_node
    apart = links.intra_node_collectives, links.inter_node_collectives
    measured: list[Link | None] = [level and getattr(level, kind) for level in apart]
    # Adapters are a part of what was measured.
    load = 1.0 if measured[1] else _load(links, group.fewest * sharers)
    inside_s, _ = _phase(kind, group.local, num_bytes, inside, measured[0])
    between_s, carried_s = _phase(
        kind, group.nodes, num_bytes * sharers, between, measured[1], load
    )
    best_s = inside_s + between_s
    several = np.greater(group.nodes, 1)
    if not any(measured):
        for flat_s, flat_carried_s in _flat(kind, group, num_bytes, inside, between, sharers, load):
            better = several & (flat_s < best_s)
            best_s = np.where(better, flat_s, best_s)
            carried_s = np.where(better, flat_carried_s, carried_s)
    return best_s, np.where(several & (links.inter_node is not None), carried_s, 0.0), load


def _passes(kind: CollectiveKind) -> int:
    return 2 if kind == "all_reduce" else 1


def _phase(
    kind: CollectiveKind,
    num: Any,
    num_bytes: Any,
    link: Link,
    measured: Link | None,
    load: Any = 1.0,
) -> tuple[Any, Any]:
    """One level of a collective among ``num`` members.

    Returns:
        Its seconds with a part ``load`` of the link's bandwidth, and those of its bytes alone with
        the whole bandwidth.
    """
    passes = _passes(kind)
    ring_bytes = passes * (num - 1) / num * num_bytes
    if measured is not None:
        carried_s = ring_bytes / measured.bandwidth_bytes_per_s
        seconds = measured.latency_s + carried_s
    else:
        # In an all-gather, recursive doubling sends no byte twice.
        tree_bytes = passes * num_bytes if kind == "all_reduce" else ring_bytes
        steps = passes * np.ceil(np.log2(num))
        rate = link.bandwidth_bytes_per_s * load
        ring_s = passes * (num - 1) * link.latency_s + ring_bytes / rate
        tree_s = steps * link.latency_s + tree_bytes / rate
        seconds = np.minimum(ring_s, tree_s)
        carried_s = np.where(tree_s < ring_s, tree_bytes, ring_bytes) / link.bandwidth_bytes_per_s
    some = np.greater(num, 1)
    return np.where(some, seconds, 0.0), np.where(some, carried_s, 0.0)


def _flat(
    kind: CollectiveKind,
    group: _Group,
    num_bytes: Any,
    inside: Link,
    between: Link,
    sharers: Any,
    load: Any,
) -> Iterator[tuple[Any, Any]]:
    """Algorithms that use links of both levels at the same time: as :func:`_phase`."""
    passes, nodes = _passes(kind), group.nodes
    steps = passes * (group.ranks - 1)
    across = np.minimum(steps, passes * nodes if kind == "all_reduce" else nodes - 1)
    ring_s = (steps - across) * inside.latency_s + across * between.latency_s
    options = [(ring_s, passes * (group.ranks - 1) / group.ranks * num_bytes)]
    if kind == "all_reduce":
        chain, levels = group.local - 1, np.ceil(np.log2(nodes))
        options.append((2 * (chain * inside.latency_s + levels * between.latency_s), 2 * num_bytes))
    for latency_s, size in options:
        carried_s = size * sharers / between.bandwidth_bytes_per_s
        inside_s = size / inside.bandwidth_bytes_per_s
        yield latency_s + np.maximum(carried_s / load, inside_s), carried_s


class LinkCosts:
    """Costs of transfers between a cluster's ranks: a part of the cost model.

    Args:
        cluster: its links carry them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._collectives: dict[tuple[CollectiveKind, _Group, float, int], Transfer] = {}
        # By whether a message is between nodes; by the ranks of a group.
        self._message_lines: dict[bool, tuple[float, float]] = {}
        self._gather_lines: dict[int, tuple[float, float]] = {}

    def message(self, *, source: int, target: int, num_bytes: float) -> Transfer:
        """One message between two ranks, without other transfers."""
        return message(self.cluster, source, target, num_bytes)

    def all_reduce(self, *, ranks: Sequence[int], num_bytes: float, sharers: int = 1) -> Transfer:
        """An all-reduce of ``num_bytes`` on each rank."""
        return self._collective("all_reduce", ranks, num_bytes, sharers)

    def all_gather(self, *, ranks: Sequence[int], num_bytes: float, sharers: int = 1) -> Transfer:
        """An all-gather that leaves ``num_bytes`` on each rank."""
        return self._collective("all_gather", ranks, num_bytes, sharers)

    def _collective(
        self,
        kind: CollectiveKind,
        ranks: Sequence[int] | Ints,
        num_bytes: float,
        sharers: int = 1,
    ) -> Transfer:
        """See :func:`collective`; cached, for solvers need the same numbers often."""
        key = kind, _group(self.cluster, ranks), num_bytes, sharers
        if key not in self._collectives:
            self._collectives[key] = _transfer(self.cluster, *key)
        return self._collectives[key]

    def gather_shares_s(self, *, ranks: Sequence[int], num_bytes: float) -> float:
        """Seconds of the all-gather after a scatter: each rank of the group receives 1/n."""
        return self._collective("all_gather", ranks, num_bytes).seconds

    def message_line(self, *, apart: bool) -> tuple[float, float]:
        """Seconds, and seconds per byte, of a message inside a node or between two."""
        if apart not in self._message_lines:
            link = between_nodes(self.cluster) if apart else self.cluster.links.intra_node
            self._message_lines[apart] = link.latency_s, 1 / link.bandwidth_bytes_per_s
        return self._message_lines[apart]

    def gather_line(self, tp: int) -> tuple[float, float]:
        """Seconds, and seconds per byte, of gathering shares in a tensor-parallel group."""
        if tp not in self._gather_lines:
            none, many = (
                self.gather_shares_s(ranks=range(tp), num_bytes=n) for n in (0, _MANY_BYTES)
            )
            self._gather_lines[tp] = none, (many - none) / _MANY_BYTES
        return self._gather_lines[tp]

    def message_s(self, *, source: int, target: int, num_bytes: float) -> float:
        """Seconds of one message between two ranks; 0 to itself."""
        return self.message(source=source, target=target, num_bytes=num_bytes).seconds

    def all_reduce_s(
        self, *, ranks: Sequence[int] | Ints, num_bytes: float, sharers: int = 1
    ) -> float:
        """Seconds of an all-reduce of ``num_bytes`` on each rank."""
        return self._collective("all_reduce", ranks, num_bytes, sharers).seconds


def all_reduce_s(
    cluster: Cluster,
    num: int | Ints,
    num_local: int | Ints,
    num_nodes: int | Ints,
    num_bytes: float | Floats,
    *,
    sharers: int | Ints,
) -> Floats:
    """:func:`collective_s` of an all-reduce, for many groups of ranks at once.

    Args:
        cluster: its links carry the transfer.
        num: ranks of a group.
        num_local: most of them on one node.
        num_nodes: nodes on which they are.
        num_bytes: on every rank.
        sharers: groups that share a node's bandwidth.
    """
    group = _Group(num, num_local, num_nodes)
    return _of_groups(cluster, "all_reduce", group, num_bytes, sharers)[0]


def between_nodes(cluster: Cluster) -> Link:
    """The link of one message between nodes; on a single node the link inside."""
    link = cluster.links.inter_node or cluster.links.intra_node
    rate = link.bandwidth_bytes_per_s * _load(cluster.links, 1)
    return link.model_copy(update={"bandwidth_bytes_per_s": float(rate)})
