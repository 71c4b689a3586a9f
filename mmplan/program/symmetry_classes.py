"""The quotient of a plan: one representative of each class of components.

A *component* is a set of replicas that exchange samples or share ranks. Components meet in syncs,
in reductions and on the network interfaces of nodes. Two components are equivalent where their
micro-batches have the same sizes, order and sync batches, and where their ranks are spread over
nodes in the same way. The quotient keeps one component of each class, with the samples that it has
in the plan.

Components whose ranks lie on several nodes send over the nodes' interfaces and slow each other
down where they share one. Colour refinement computes the classes of components and of nodes
together. In the end, components of one class lie on nodes of the same classes, in the same
slots. Nodes of one class carry equally many components of each class in each slot, and take part
in the same collectives. So each transfer of a component has an equal one in every component of
its class, at interfaces that are equally full. Fair rates are unique, so equal transfers have
equal rates. By induction over time, components of one class do everything at the same time.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mmplan.program.folding import restricted
from mmplan.program.lower import lower
from mmplan.program.model import BlockReduction, Graph, Stage, replica_pairs
from mmplan.program.schedules.plan_order import Orders, order_stages
from mmplan.schema.plan import Plan

Component = tuple[tuple[int, ...], ...]  # per unit, its replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotient:
    """The representatives of a plan.

    Attributes:
        graph: the plan's, without the replicas that are not representatives.
        reductions: index in the whole graph of each reduction of this one.
        representative: rank of the whole plan to the rank that stands for it.
        node_class: node to its class.
        multiplicity: representative rank to the number of components that have a rank on its node
            that does the same at the same time.
        merges_tp: whether one rank stands for its tensor-parallel group.
    """

    graph: Graph
    reductions: Sequence[int]
    representative: Mapping[int, int]
    node_class: Sequence[int]
    multiplicity: Mapping[int, float]
    merges_tp: bool


@dataclass(frozen=True, kw_only=True)
class LoweredPlan:
    """The input of a simulation.

    Attributes:
        plan: the plan.
        graph: of the whole plan.
        quotient: None where it would be the whole plan.
    """

    plan: Plan
    graph: Graph
    quotient: Quotient | None

    @cached_property
    def orders(self) -> Orders:
        """Of the stages of ``simulated_graph``; they take longer to find than the rest."""
        return order_stages(self.plan, self.simulated_graph)

    @property
    def simulated_graph(self) -> Graph:
        """The graph of the quotient, or the whole one."""
        return self.graph if self.quotient is None else self.quotient.graph


def lower_plan(plan: Plan, graph: Graph | None = None) -> LoweredPlan:
    """Lower a plan and take its quotient.

    Args:
        plan: the plan.
        graph: that it lowers to, where that is known.

    Raises:
        InvalidInputError: see :func:`mmplan.program.lower.lower`.
    """
    graph = lower(plan) if graph is None else graph
    return LoweredPlan(plan=plan, graph=graph, quotient=find_quotient(plan, graph))


def alike_components(plan: Plan, graph: Graph) -> list[list[Component]]:
    """The components of each class, in the plan's order."""
    components = _components(plan, graph)
    classes = _classes(plan, graph, components, _ranks_of_each(plan, components))
    found: defaultdict[int, list[Component]] = defaultdict(list)
    for own, component in zip(classes.component_class, components, strict=True):
        found[own].append(component)
    return list(found.values())


def find_quotient(plan: Plan, graph: Graph) -> Quotient | None:
    """One component of each class; None where that is the whole plan."""
    components = _components(plan, graph)
    ranks = _ranks_of_each(plan, components)
    merges_tp = _can_merge_tp(plan, graph)
    classes = _classes(plan, graph, components, ranks)
    kept: dict[int, int] = {}
    for position, own in enumerate(classes.component_class):
        kept.setdefault(own, position)
    if len(kept) == len(components) and not merges_tp:
        return None
    first = list(range(plan.devices))
    if merges_tp:
        for unit in plan.units:
            for _, _, group in unit.grid.groups():
                for rank in group:
                    first[rank] = group[0]
    same = {own: [first[rank] for rank in ranks[position]] for own, position in kept.items()}
    representative: dict[int, int] = {}
    for position, own in enumerate(classes.component_class):
        representative.update(zip(ranks[position], same[own], strict=True))
    cut, reductions = _restrict(
        plan, graph, [components[p] for p in kept.values()], merges_tp=merges_tp
    )
    return Quotient(
        graph=cut,
        reductions=reductions,
        representative=representative,
        node_class=classes.node_class,
        multiplicity={
            rank: number
            for p in kept.values()
            for rank, number in zip(ranks[p], classes.multiplicities(p), strict=True)
        },
        merges_tp=merges_tp,
    )


def _can_merge_tp(plan: Plan, graph: Graph) -> bool:
    """Whether every rank has one tensor-parallel group, on one node, and some group has two ranks.

    Ranks of a group may have different numbers of communicators, so these must be free. Where
    groups of several sizes hold a module, the ranks of a group have different reductions.
    """
    shares_items = any(unit.items for unit in plan.units)
    has_groups = any(unit.tp > 1 for unit in plan.units)
    if plan.cluster.device.communicator_bytes or shares_items or not has_groups:
        return False
    if any(isinstance(r, BlockReduction) and r.parameters != "all" for r in graph.reductions):
        return False
    groups = {group for unit in plan.units for _, _, group in unit.grid.groups()}
    node_of = plan.cluster.node_of
    if any(node_of(min(group)) != node_of(max(group)) for group in groups):
        return False
    return sum(map(len, groups)) == len(set().union(*groups))


def _classes(
    plan: Plan, graph: Graph, components: Sequence[Component], ranks: Sequence[Sequence[int]]
) -> EquivalenceClasses:
    node_of = list(map(plan.cluster.node_of, range(plan.devices)))
    meetings = [each.ranks for each in (*graph.reductions, *graph.cross_sample_losses)]
    collectives = [set(map(node_of.__getitem__, own)) for own in meetings]
    shapes = _Shapes(plan, graph)
    return refine_classes(
        [shapes.of(*pair) for pair in zip(components, ranks, strict=True)],
        [list(map(node_of.__getitem__, own)) for own in ranks],
        [nodes for nodes in collectives if len(nodes) > 1],
    )


def _components(plan: Plan, graph: Graph) -> list[Component]:
    """The replicas of all units, in connected components."""
    # Replicas are numbered over all units.
    starts = [0, *itertools.accumulate(unit.dp for unit in plan.units)]
    joined = _DisjointSets(starts[-1])
    # Of each rank its first replica.
    first_R = np.full(plan.devices, -1)
    for start, unit in zip(starts, plan.units, strict=False):
        ranks = np.array(unit.ranks).reshape(unit.dp, -1)
        numbers = np.broadcast_to(np.arange(start, start + unit.dp)[:, None], ranks.shape)
        others = first_R[ranks]
        shared = others >= 0
        pairs_N = np.unique(np.stack([numbers[shared], others[shared]]), axis=1)
        for number, other in pairs_N.T.tolist():
            joined.join(number, other)
        first_R[ranks[~shared]] = numbers[~shared]
    start_of = {unit.name: start for start, unit in zip(starts, plan.units, strict=False)}
    pairs = {(edge.producer, edge.consumer) for edge in graph.edges}
    for source, target in ([graph.stages[i] for i in pair] for pair in sorted(pairs)):
        if source.unit != target.unit:
            one, other = start_of[source.unit], start_of[target.unit]
            for d, d2 in replica_pairs(source, target):
                joined.join(one + d, other + d2)
    members: defaultdict[int, list[list[int]]]
    members = defaultdict(lambda: [[] for _ in plan.units])
    for u, (start, end) in enumerate(itertools.pairwise(starts)):
        for number in range(start, end):
            members[joined.root(number)][u].append(number - start)
    return [tuple(map(tuple, own)) for own in members.values()]


class _DisjointSets:
    """Disjoint sets of numbers from 0 on (union-find)."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def root(self, item: int) -> int:
        """The number that names the set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = item = parent[parent[item]]
        return item

    def join(self, one: int, other: int) -> None:
        """Put two numbers into one set."""
        self._parent[self.root(one)] = self.root(other)


class _Shapes:
    """The properties by which components differ, apart from the nodes that they are on."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan = plan
        # The last stage of each unit: the one that losses take the output of.
        self._stages = {stage.unit: stage for stage in graph.stages}
        self._sizes = {loss.index: loss.sync_batch for loss in graph.cross_sample_losses}
        # Of each unit's replicas, a number for the sizes of their micro-batches.
        numbers: dict[object, int] = {}
        self._microbatches = [
            [numbers.setdefault(sizes, len(numbers)) for sizes in unit.microbatches]
            for unit in plan.units
        ]
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}
        # Among tasks that do not wait for each other, the earlier sample comes first.
        self._in_turn = set(plan.in_turn) >= set(plan.tasks) or len(plan.tasks) == 1

    def of(self, component: Component, ranks: Sequence[int]) -> object:
        """Sizes, order and sync batches of the micro-batches, and ranks by first appearance."""
        sizes = tuple(
            [
                tuple([own[d] for d in replicas])
                for own, replicas in zip(self._microbatches, component, strict=True)
            ]
        )
        syncs = self._syncs(component) if self._sizes else ()
        alone = len(set(ranks)) == len(ranks)
        return sizes, self._orders(component), syncs, alone or tuple(by_appearance(ranks))

    def _orders(self, component: Component) -> object:
        """Each micro-batch's rank by its first sample, within the component.

        Where tasks run in turn, the rank is within the first round of its task.
        """
        starts: defaultdict[str, list[int]] = defaultdict(list)
        for stage, d in self._replicas(component):
            count = stage.rounds[d] if self._in_turn else None
            starts[stage.task if self._in_turn else ""] += [
                start for start, _ in stage.microbatches[d][:count]
            ]
        return tuple([(task, self._places_of(own)) for task, own in starts.items()])

    def _places_of(self, starts: Sequence[int]) -> tuple[int, ...]:
        """The place of each number among the different ones: the same wherever they begin."""
        first = starts[0]
        after = tuple([start - first for start in starts])
        if after not in self._places:
            place = {start: i for i, start in enumerate(sorted({*after}))}
            self._places[after] = tuple([place[start] for start in after])
        return self._places[after]

    def _syncs(self, component: Component) -> object:
        """First and last sync batch of the micro-batches of a round."""
        return tuple(
            tuple(
                (start // size, (stop - 1) // size)
                for start, stop in stage.microbatches[d][: stage.rounds[d]]
            )
            for stage, d in self._replicas(component)
            for size in sorted({self._sizes[index] for index in stage.syncs})
        )

    def _replicas(self, component: Component) -> Iterator[tuple[Stage, int]]:
        for unit, replicas in zip(self._plan.units, component, strict=True):
            for d in replicas:
                yield self._stages[unit.name], d


def _ranks_of_each(plan: Plan, components: Sequence[Component]) -> list[list[int]]:
    """Every rank of each component, once for each of its units."""
    grids: list[list[list[int]]] = [
        np.array(unit.ranks).reshape(unit.dp, -1).tolist() for unit in plan.units
    ]
    return [
        [
            rank
            for grid, replicas in zip(grids, component, strict=True)
            for d in replicas
            for rank in grid[d]
        ]
        for component in components
    ]


def _restrict(
    plan: Plan, graph: Graph, components: Sequence[Component], *, merges_tp: bool
) -> tuple[Graph, list[int]]:
    """The graph of some components, and the indices of its reductions in the whole graph."""
    kept = {
        unit.name: sorted(d for component in components for d in component[u])
        for u, unit in enumerate(plan.units)
    }
    stages = [
        _some_replicas(stage, kept[stage.unit], merges_tp=merges_tp) for stage in graph.stages
    ]
    cut = restricted(graph, stages)
    chosen = [reduction for reduction in cut.reductions if reduction.ranks]
    cut.reductions = [replace(part, index=index) for index, part in enumerate(chosen)]
    return cut, [reduction.index for reduction in chosen]


def _some_replicas(stage: Stage, replicas: Sequence[int], *, merges_tp: bool) -> Stage:
    taken = 1 if merges_tp else stage.tp
    return replace(
        stage,
        tp=taken,
        ranks=tuple(stage.ranks[d][:taken] for d in replicas),
        microbatches=tuple(stage.microbatches[d] for d in replicas),
        rounds=tuple(stage.rounds[d] for d in replicas),
    )


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
    interfaces = [_interfaces(own) for own in slots]
    num_nodes = 1 + max((node for own in (*nodes, *collectives) for node in own), default=-1)
    takes_part: defaultdict[int, list[int]] = defaultdict(list)
    for index, members in enumerate(collectives):
        for node in members:
            takes_part[node].append(index)
    node_class = by_appearance(tuple(takes_part[node]) for node in range(num_nodes))
    component_class = by_appearance(
        (shape, tuple([slot for _, slot in own])) for shape, own in zip(shapes, slots, strict=True)
    )
    while True:
        on_node = _on_nodes(component_class, interfaces, num_nodes)
        finer_nodes = by_appearance(
            (own, frozenset(there.items())) for own, there in zip(node_class, on_node, strict=True)
        )
        finer_components = by_appearance(
            (own, tuple([finer_nodes[node] for node, _ in taken]))
            for own, taken in zip(component_class, interfaces, strict=True)
        )
        if (finer_nodes, finer_components) == (node_class, component_class):
            return EquivalenceClasses(
                component_class=component_class, node_class=node_class, slots=slots, on_node=on_node
            )
        node_class, component_class = finer_nodes, finer_components


def _on_nodes(
    component_class: Sequence[int],
    interfaces: Sequence[Sequence[tuple[int, int]]],
    num_nodes: int,
) -> list[Counter[tuple[int, int]]]:
    counts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_nodes)]
    for own, taken in zip(component_class, interfaces, strict=True):
        for node, slot in taken:
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
