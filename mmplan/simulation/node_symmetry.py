"""Equivalence classes of a plan's components and of the nodes that they run on.

Components whose ranks lie on several nodes send over the nodes' interfaces and slow each other
down where they share one. Colour refinement computes the classes of components and of nodes
together. In the end, components of one class lie on nodes of the same classes, in the same
slots. Nodes of one class carry equally many components of each class in each slot, and take part
in the same collectives. So each transfer of a component has an equal one in every component of
its class, at interfaces that are equally full. Fair rates are unique, so equal transfers have
equal rates. By induction over time, components of one class do everything at the same time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceClasses:
    """Classes of components and nodes.

    Attributes:
        component_class: of each component.
        node_class: of each node; -1 for a node without components.
        slots: of each component, for each of its ranks the node, and that node's number among
            the component's nodes.
        on_node: for each node, how many components of a class have a slot there.
    """

    component_class: Sequence[int]
    node_class: Sequence[int]
    slots: Sequence[Sequence[tuple[int, int]]]
    on_node: Sequence[Counter[tuple[int, int]]]

    def multiplicities(self, component: int) -> list[int]:
        """For each rank, how many components of the class have the same slot on its node."""
        own = self.component_class[component]
        return [self.on_node[node][own, slot] for node, slot in self.slots[component]]


def refine_classes(
    shapes: Sequence[Hashable],
    nodes: Sequence[Sequence[int]],
    collectives: Sequence[Collection[int]],
) -> EquivalenceClasses:
    """The coarsest classes.

    Args:
        shapes: of each component; components of different shapes are of different classes.
        nodes: of each component, the node of each of its ranks.
        collectives: the nodes of each collective.
    """
    slots = [list(zip(own, by_appearance(own), strict=True)) for own in nodes]
    num_nodes = 1 + max((node for own in (*nodes, *collectives) for node in own), default=-1)
    takes_part: defaultdict[int, list[int]] = defaultdict(list)
    for index, members in enumerate(collectives):
        for node in members:
            takes_part[node].append(index)
    node_class = by_appearance(tuple(takes_part[node]) for node in range(num_nodes))
    component_class = by_appearance(
        (shape, tuple(slot for _, slot in own)) for shape, own in zip(shapes, slots, strict=True)
    )
    while True:
        on_node = _on_nodes(component_class, slots, num_nodes)
        finer_nodes = by_appearance(
            (own, frozenset(there.items())) for own, there in zip(node_class, on_node, strict=True)
        )
        finer_components = by_appearance(
            (own, tuple(finer_nodes[node] for node, _ in _interfaces(taken)))
            for own, taken in zip(component_class, slots, strict=True)
        )
        if (finer_nodes, finer_components) == (node_class, component_class):
            return EquivalenceClasses(
                component_class=component_class, node_class=node_class, slots=slots, on_node=on_node
            )
        node_class, component_class = finer_nodes, finer_components


def _on_nodes(
    component_class: Sequence[int], slots: Sequence[Sequence[tuple[int, int]]], num_nodes: int
) -> list[Counter[tuple[int, int]]]:
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_nodes)]
    for own, taken in zip(component_class, slots, strict=True):
        for node, slot in _interfaces(taken):
            counts[node][own, slot] += 1
    return counts


def _interfaces(slots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (node, slot) pairs whose interfaces a component uses: none where it has one node."""
    distinct = list(dict.fromkeys(slots))
    return distinct if len(distinct) > 1 else []


def by_appearance(names: Iterable[Hashable]) -> list[int]:
    """The number of each name, in the order in which the names first appear."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(name, len(known)) for name in names]
