"""The parts of a plan that do different things: what must be simulated for all of it.

Replicas that exchange samples or share ranks make a *part*. Parts meet in syncs, in reductions and
on the network interfaces of nodes that they share. Two parts are alike where the micro-batches of
both have the same sizes, stand in the same order and in the same sync batches, and where their
ranks are spread over nodes in the same way (:mod:`mmplan.simulation.node_symmetry` says what that
means where several parts are on a node). Of each kind one part is kept, samples and all, as it is
in the whole plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mmplan.program.lower import lower
from mmplan.program.model import BlockReduction, Graph, Reduction, Stage
from mmplan.program.samples import RangeIndex
from mmplan.program.schedules.plan_order import Orders, order_stages
from mmplan.schema.plan import Plan
from mmplan.simulation.node_symmetry import Alike, find_alike, renamed

Replica = tuple[int, int]  # unit's position in the plan, d
RankSet = tuple[tuple[int, ...], ...]  # per unit, its replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Some parts of a plan.

    Attributes:
        graph: the plan's, without the replicas of the other parts.
        reductions: index in the whole graph of each reduction of this one.
        twin: rank of the whole plan to the rank of the excerpt that does the same.
        node_kind: node to its kind.
        load: rank of the excerpt to how many parts have a rank on its node that does the
            same at the same time.
        folded: whether one rank stands for its tensor-parallel group.
    """

    graph: Graph
    reductions: Sequence[int]
    twin: Mapping[int, int]
    node_kind: Sequence[int]
    load: Mapping[int, float]
    folded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What simulating a plan begins with.

    Attributes:
        graph: of the whole plan.
        found: what is enough of it, None where that is all.
        orders: of the stages in that.
    """

    graph: Graph
    found: Excerpt | None
    orders: Orders

    @property
    def enough(self) -> Graph:
        """The graph of the excerpt, or the whole one."""
        return self.graph if self.found is None else self.found.graph


def outline(plan: Plan) -> Outline:
    """Lower a plan, leave out what does the same as something else, and order the rest.

    Raises:
        InvalidInputError: see :func:`mmplan.program.lower.lower`.
    """
    graph = lower(plan)
    found = excerpt(plan, graph)
    enough = graph if found is None else found.graph
    return Outline(graph=graph, found=found, orders=order_stages(plan, enough))


def excerpt(plan: Plan, graph: Graph) -> Excerpt | None:
    """One part of each kind; None where that is no less than the whole plan."""
    parts = _parts(plan, graph)
    folds = _can_fold(plan, graph)
    alike = _alike(plan, graph, parts)
    kept: dict[int, int] = {}
    for position, kind in enumerate(alike.part_kind):
        kept.setdefault(kind, position)
    if len(kept) == len(parts) and not folds:
        return None
    groups = [group for unit in plan.units for _, _, group in unit.grid.groups()]
    first = {rank: group[0] if folds else rank for group in groups for rank in group}
    ranks = [list(_ranks(plan, part)) for part in parts]
    twin: dict[int, int] = {}
    for position, kind in enumerate(alike.part_kind):
        own = (first[rank] for rank in ranks[kept[kind]])
        twin.update(zip(ranks[position], own, strict=True))
    cut, reductions = _cut_out(plan, graph, [parts[p] for p in kept.values()], folds=folds)
    return Excerpt(
        graph=cut,
        reductions=reductions,
        twin=twin,
        node_kind=alike.node_kind,
        load={r: n for p in kept.values() for r, n in zip(ranks[p], alike.loads(p), strict=True)},
        folded=folds,
    )


def _can_fold(plan: Plan, graph: Graph) -> bool:
    """Whether every rank has one tensor-parallel group, on one node, and some have others in it.

    Ranks of a group may have different numbers of communicators, so these must be free. Where
    groups of several sizes hold a module, ranks of a group sum different parts with others.
    """
    if plan.cluster.device.communicator_bytes or all(unit.tp == 1 for unit in plan.units):
        return False
    if any(isinstance(r, BlockReduction) and r.parameters != "all" for r in graph.reductions):
        return False
    group_of: dict[int, tuple[int, ...]] = {}
    for unit in plan.units:
        for _, _, group in unit.grid.groups():
            if len({plan.cluster.node_of(rank) for rank in group}) > 1:
                return False
            if any(group_of.setdefault(rank, group) != group for rank in group):
                return False
    return True


def _alike(plan: Plan, graph: Graph, parts: Sequence[RankSet]) -> Alike:
    """Kinds of parts and nodes."""
    node = plan.cluster.node_of
    meetings = [{node(rank) for rank in r.ranks} for r in graph.reductions]
    meetings += [{node(rank) for rank in loss.ranks} for loss in graph.cross_sample_losses]
    shapes = _Shapes(plan, graph)
    return find_alike(
        [shapes.of(part) for part in parts],
        [[node(rank) for rank in _ranks(plan, part)] for part in parts],
        [nodes for nodes in meetings if len(nodes) > 1],
    )


def _parts(plan: Plan, graph: Graph) -> list[RankSet]:
    """The replicas of all units, those together that share ranks or exchange samples."""
    together = _Together()
    first: dict[int, Replica] = {}
    for u, unit in enumerate(plan.units):
        for d in range(unit.dp):
            for rank in unit.grid.replica(d):
                together.join((u, d), first.setdefault(rank, (u, d)))
    position = {unit.name: u for u, unit in enumerate(plan.units)}
    pairs = {(edge.producer, edge.consumer) for edge in graph.edges}
    for source, target in ([graph.stages[i] for i in pair] for pair in sorted(pairs)):
        if source.unit == target.unit:
            continue
        index = RangeIndex(_one_round(source))
        for d2, spans in enumerate(_one_round(target)):
            for d in {d for span in spans for _, d, _ in index.overlapping(span)}:
                together.join((position[source.unit], d), (position[target.unit], d2))
    found: defaultdict[Replica, list[Replica]] = defaultdict(list)
    for u, unit in enumerate(plan.units):
        for d in range(unit.dp):
            found[together.root((u, d))].append((u, d))
    return [
        tuple(tuple(d for v, d in replicas if v == u) for u in range(len(plan.units)))
        for replicas in found.values()
    ]


def _one_round(stage: Stage) -> list[tuple[tuple[int, int], ...]]:
    """The micro-batches of the first round; those of the others follow each other alike."""
    return [spans[:count] for spans, count in zip(stage.microbatches, stage.rounds, strict=True)]


class _Together:
    """Disjoint sets of replicas."""

    def __init__(self) -> None:
        self._parent: dict[Replica, Replica] = {}

    def root(self, item: Replica) -> Replica:
        """The replica that names the set."""
        while (parent := self._parent.setdefault(item, item)) != item:
            self._parent[item] = item = self._parent[parent]
        return item

    def join(self, one: Replica, other: Replica) -> None:
        """Put two replicas into one set."""
        self._parent[self.root(one)] = self.root(other)


class _Shapes:
    """What tells parts apart but for the nodes they are on."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan = plan
        # The last stage of each unit: the one that losses take the output of.
        self._stages = {stage.unit: stage for stage in graph.stages}
        self._sizes = {loss.index: loss.sync_batch for loss in graph.cross_sample_losses}
        # Of tasks that do not wait for each other the one with the earlier sample comes first.
        self._in_turn = set(plan.in_turn) >= set(plan.tasks) or len(plan.tasks) == 1

    def of(self, part: RankSet) -> object:
        """Sizes, order and sync batches of the micro-batches, and ranks by first appearance."""
        sizes = tuple(
            tuple(unit.microbatches[d] for d in replicas)
            for unit, replicas in zip(self._plan.units, part, strict=True)
        )
        return sizes, self._orders(part), self._syncs(part), renamed(list(_ranks(self._plan, part)))

    def _orders(self, part: RankSet) -> object:
        """The places of the micro-batches among those of the part; of one round each task's."""
        starts: defaultdict[str, list[int]] = defaultdict(list)
        for stage, d in self._places(part):
            count = stage.rounds[d] if self._in_turn else None
            starts[stage.task if self._in_turn else ""] += [
                start for start, _ in stage.microbatches[d][:count]
            ]
        return tuple((task, renamed_by_size(own)) for task, own in starts.items())

    def _syncs(self, part: RankSet) -> object:
        """First and last sync batch of the micro-batches of a round."""
        return tuple(
            tuple(
                (start // size, (stop - 1) // size)
                for start, stop in stage.microbatches[d][: stage.rounds[d]]
            )
            for stage, d in self._places(part)
            for size in sorted({self._sizes[index] for index in stage.syncs})
        )

    def _places(self, part: RankSet) -> Iterator[tuple[Stage, int]]:
        for unit, replicas in zip(self._plan.units, part, strict=True):
            for d in replicas:
                yield self._stages[unit.name], d


def renamed_by_size(values: Sequence[int]) -> tuple[int, ...]:
    """Each value's place among the distinct ones."""
    place = {value: index for index, value in enumerate(sorted(set(values)))}
    return tuple(place[value] for value in values)


def _ranks(plan: Plan, part: RankSet) -> Iterator[int]:
    """Every rank of a part, as often as it is in one of its units."""
    for unit, replicas in zip(plan.units, part, strict=True):
        for d in replicas:
            yield from unit.grid.replica(d)


def _cut_out(
    plan: Plan, graph: Graph, parts: Sequence[RankSet], *, folds: bool
) -> tuple[Graph, list[int]]:
    """The graph of some parts, and which of the whole one's reductions it has."""
    kept = {
        unit.name: sorted(d for part in parts for d in part[u]) for u, unit in enumerate(plan.units)
    }
    stages = [_some_replicas(stage, kept[stage.unit], folds=folds) for stage in graph.stages]
    here = {rank for stage in stages for rank in stage.members}

    def left(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in here)

    chosen = [reduction for reduction in graph.reductions if left(reduction.ranks)]
    reductions: list[Reduction] = []
    for index, whole in enumerate(chosen):
        part = replace(whole, index=index, ranks=left(whole.ranks))
        if isinstance(part, BlockReduction):
            part = replace(part, contributors=left(part.contributors))
        reductions.append(part)
    losses = [replace(loss, ranks=left(loss.ranks)) for loss in graph.losses]
    cut = Graph(stages=stages, edges=graph.edges, losses=losses, reductions=reductions)
    return cut, [reduction.index for reduction in chosen]


def _some_replicas(stage: Stage, replicas: Sequence[int], *, folds: bool) -> Stage:
    taken = 1 if folds else stage.tp
    return replace(
        stage,
        tp=taken,
        ranks=tuple(stage.ranks[d][:taken] for d in replicas),
        microbatches=tuple(stage.microbatches[d] for d in replicas),
        rounds=tuple(stage.rounds[d] for d in replicas),
    )
