"""Which parts of a plan do the same at the same time, and which nodes carry the same.

Parts whose ranks lie on several nodes send over the nodes' interfaces and slow each other down
where they share one. Kinds of parts and of nodes are refined together, as graphs are coloured:
parts of one kind lie on nodes of the same kinds, in the same places; nodes of one kind carry
equally many parts of each kind in each place, and take part in the same reductions. When no
kind can be split any more, each transfer of a part has its twin in every part of the kind, at
interfaces that are equally full: fair rates are unique, so twins flow alike, and by induction
over time all that parts of one kind do happens at the same time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Kinds of parts and nodes.

    Attributes:
        part_kind: of each part.
        node_kind: of each node; of one without parts, -1.
        places: of each part, for each of its ranks the node and its place among the part's.
        on_node: node to how many parts of a kind have it in a place.
    """

    part_kind: Sequence[int]
    node_kind: Sequence[int]
    places: Sequence[Sequence[tuple[int, int]]]
    on_node: Sequence[Counter[tuple[int, int]]]

    def loads(self, part: int) -> list[int]:
        """For each rank of a part, how many parts on its node have a twin of it there."""
        kind = self.part_kind[part]
        return [self.on_node[node][kind, place] for node, place in self.places[part]]


def find_alike(
    shapes: Sequence[Hashable],
    nodes: Sequence[Sequence[int]],
    meetings: Sequence[Collection[int]],
) -> Alike:
    """The coarsest kinds.

    Args:
        shapes: of each part; parts of different shapes are of different kinds.
        nodes: of each part, the node of each of its ranks.
        meetings: the nodes of each reduction.
    """
    places = [list(zip(own, renamed(own), strict=True)) for own in nodes]
    num_nodes = 1 + max((node for own in (*nodes, *meetings) for node in own), default=-1)
    met: defaultdict[int, list[int]] = defaultdict(list)
    for index, meeting in enumerate(meetings):
        for node in meeting:
            met[node].append(index)
    node_kind = _numbered(tuple(met[node]) for node in range(num_nodes))
    part_kind = _numbered(
        (shape, tuple(place for _, place in own)) for shape, own in zip(shapes, places, strict=True)
    )
    while True:
        on_node = _on_nodes(part_kind, places, num_nodes)
        finer_nodes = _numbered(
            (kind, frozenset(there.items())) for kind, there in zip(node_kind, on_node, strict=True)
        )
        finer_parts = _numbered(
            (kind, _around(own, finer_nodes)) for kind, own in zip(part_kind, places, strict=True)
        )
        if (finer_nodes, finer_parts) == (node_kind, part_kind):
            return Alike(part_kind=part_kind, node_kind=node_kind, places=places, on_node=on_node)
        node_kind, part_kind = finer_nodes, finer_parts


def _on_nodes(
    part_kind: Sequence[int], places: Sequence[Sequence[tuple[int, int]]], num_nodes: int
) -> list[Counter[tuple[int, int]]]:
    """Of each node, how many parts of a kind send and receive there in which place."""
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_nodes)]
    for kind, own in zip(part_kind, places, strict=True):
        for node, place in dict.fromkeys(own) if _sends(own) else ():
            counts[node][kind, place] += 1
    return counts


def _around(places: Sequence[tuple[int, int]], node_kind: Sequence[int]) -> tuple[int, ...]:
    """Kinds of the nodes over whose interfaces a part sends."""
    return tuple(node_kind[node] for node in dict.fromkeys(n for n, _ in places)) * _sends(places)


def _sends(places: Sequence[tuple[int, int]]) -> bool:
    """Whether a part lies on several nodes; one that does not leaves the interfaces alone."""
    return len({node for node, _ in places}) > 1


def _numbered(names: Iterable[Hashable]) -> list[int]:
    """Names by first appearance."""
    return list(renamed(names))


def renamed(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Names by first appearance."""
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(name, len(known)) for name in names)
