"""Simulate a plan without simulating replicas that do the same.

Replicas that exchange samples or share ranks make a *part*: a pipeline with its encoder,
backbone and generator, say. Parts meet in the reductions at the end of the step, and on the
network interfaces of nodes that they share. Two parts are alike where their micro-batches
have the same sizes and their ranks are spread over nodes in the same way (:mod:`mmplan.alike`
says what that means where several parts are on a node); then every instruction of one has
its twin in the other, at the same time. One part of each kind is compiled and simulated, with
the costs of the whole plan (reductions over all ranks, optimizer state divided by all
replicas, interfaces used by all parts of the kind), and the other ranks get what their twins
have. A plan of 600 equal replicas so takes the time of two.

The ranks of a tensor-parallel group do the same too. Where all units that a rank runs have
the same group there, its first rank is simulated for all, with times and bytes of one rank
of the group, and what it sends counts as often as the group sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mmplan.alike import find_alike, renamed
from mmplan.collection import rare_collections
from mmplan.costs import CostModel, ProgramCosts
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.program.lower import Graph, lower
from mmplan.program.model import Edge, Program, Reduction, Stage
from mmplan.program.network import Traffic, exchange, incoming, outgoing
from mmplan.program.samples import RangeIndex
from mmplan.schema.plan import Plan, Prediction, Unit
from mmplan.simulate import Simulation, prediction, simulate

Replica = tuple[int, int]  # unit's position in the plan, d
Part = tuple[tuple[int, ...], ...]  # per unit, its replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A plan of some parts of another one.

    Attributes:
        plan: only the parts kept, on the ranks that they have in the whole plan.
        twin: rank of the whole plan to the rank of the excerpt that does the same.
        node_kind: node to its kind.
        load: rank of the excerpt to how many parts have a rank on its node that does the
            same at the same time, divided by how many of them are in the excerpt.
        folded: whether one rank stands for its tensor-parallel group.
    """

    plan: Plan
    twin: Mapping[int, int]
    node_kind: Sequence[int]
    load: Mapping[int, float]
    folded: bool


def predict(plan: Plan, costs: CostModel) -> Prediction:
    """What simulating the plan gives, in less time where parts of it are alike.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    return prediction(simulated(plan, costs)[0], plan)


@rare_collections()
def simulated(plan: Plan, costs: CostModel) -> tuple[Simulation, Mapping[int, int]]:
    """One step of the plan, in less time where parts of it are alike.

    Returns:
        The simulation, whose program has rows of some ranks only, and for every rank that is
        used the one of them that does the same.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    graph = lower(plan)
    found = excerpt(plan, graph)
    if found is None:
        program = compile_plan(plan)
        whole_step = simulate(program, ProgramCosts(program, costs, plan))
        return whole_step, {r: r for r in range(plan.devices) if whole_step.used[r]}
    program = compile_plan(found.plan)
    whole = replace(
        program,
        batches={name: task.batch for name, task in plan.tasks.items()},
        stages=tuple(graph.stages),
        edges=tuple(graph.edges),
        losses=tuple(graph.losses),
        reductions=tuple(graph.reductions),
    )
    matching = _matching(program.reductions, graph.reductions)
    simulation = simulate(program, _WholeCosts(whole, costs, plan, found, matching))
    return _expanded(simulation, found, plan), found.twin


class _WholeCosts(ProgramCosts):
    """Costs of a whole plan, of whose program only some rows are there.

    The simulation asks with what the excerpt's program has; the answer is the whole one's. Of
    all nodes of a kind there is one, and on it every rank stands for those that do the same.
    """

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        plan: Plan,
        found: Excerpt,
        matching: Sequence[Reduction],
    ) -> None:
        super().__init__(program, costs, plan)
        self._found = found
        self._matching = matching

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        """What a message and its twins need of the interfaces."""
        alone = super().message_traffic(source, target, edge, samples, backward)
        if alone is None:
            return None
        load, node, kind = self._found.load, self.costs.cluster.node_of, self._found.node_kind
        times = self._messages(edge, backward)
        loads = (
            (outgoing(kind[node(source)]), load[source] * times),
            (incoming(kind[node(target)]), load[target] * times),
        )
        return Traffic(seconds=alone.seconds, loads=loads)

    def _messages(self, edge: Edge, backward: bool) -> int:
        """Messages that groups exchange for one of theirs: each rank that receives takes one."""
        receives = edge.producer if backward else edge.consumer
        return self.program.stages[receives].tp if self._found.folded else 1

    def reduce_traffic(self, reduction: Reduction) -> Traffic | None:
        """What a reduction over all of its ranks needs of the interfaces of each kind of node."""
        whole = self._matching[reduction.index]
        alone = super().reduce_traffic(whole)
        if alone is None:
            return None
        nodes = {self.costs.cluster.node_of(rank) for rank in whole.ranks}
        kinds = {self._found.node_kind[node] for node in nodes}
        # The other shards are reduced at the same time.
        shards = whole.tp if self._found.folded else 1
        return Traffic(seconds=alone.seconds, loads=exchange(kinds, shards))

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        """Seconds of a compute with all replicas of its stage."""
        return super().compute_s(self.program.stages[stage.index], op, samples)

    def activation_bytes(self, stage: Stage, samples: int) -> float:
        """Bytes that a device holds of one micro-batch until its backward has run."""
        return super().activation_bytes(self.program.stages[stage.index], samples)

    def reduce_s(self, reduction: Reduction) -> float:
        """Seconds of the reduction over all of its ranks."""
        return super().reduce_s(self._matching[reduction.index])


def _expanded(simulation: Simulation, found: Excerpt, plan: Plan) -> Simulation:
    """The simulation with every rank of the whole plan in its per-rank values."""

    def expand(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[found.twin.get(rank, rank)] for rank in range(plan.devices))

    return replace(
        simulation,
        busy_s=expand(simulation.busy_s),
        communication_s=expand(simulation.communication_s),
        idle_s=expand(simulation.idle_s),
        used=tuple(rank in found.twin for rank in range(plan.devices)),
        peak_bytes=expand(simulation.peak_bytes),
        samples=sum(task.batch for task in plan.tasks.values()),
    )


def excerpt(plan: Plan, graph: Graph) -> Excerpt | None:
    """One part of each kind, two where there is one kind only; None where that is no less.

    Two, so that every reduction of the whole plan is there.
    """
    if not _suited(plan):
        return None
    parts = _parts(plan, graph)
    if not all(all(part) for part in parts):
        return None
    alike = find_alike(
        [_shape(plan, part) for part in parts],
        [[rank // plan.cluster.devices_per_node for rank in _ranks(plan, p)] for p in parts],
        _meetings(plan, graph),
    )
    kinds: defaultdict[int, list[int]] = defaultdict(list)
    for position, kind in enumerate(alike.part_kind):
        kinds[kind].append(position)
    kept = [positions[0] for positions in kinds.values()]
    if len(kinds) == 1:
        kept = next(iter(kinds.values()))[:2]
    folds = _can_fold(plan)
    if len(kept) == len(parts) and not folds:
        return None
    groups = [group for unit in plan.units for stages in unit.ranks for group in stages]
    first = {rank: group[0] if folds else rank for group in groups for rank in group}
    twin: dict[int, int] = {}
    for positions in kinds.values():
        own = [first[rank] for rank in _ranks(plan, parts[positions[0]])]
        for position in positions:
            twin.update(zip(_ranks(plan, parts[position]), own, strict=True))
    # Kept parts stand for themselves: sums over ranks do not care, rows must be there.
    copies = len(kept) // len(kinds)
    load = {
        rank: count / copies
        for position in kept
        for rank, count in zip(_ranks(plan, parts[position]), alike.loads(position), strict=True)
    }
    return Excerpt(
        plan=_cut_out(plan, [parts[position] for position in kept], folds=folds),
        twin=twin,
        node_kind=alike.node_kind,
        load=load,
        folded=folds,
    )


def _can_fold(plan: Plan) -> bool:
    """Whether every rank has one tensor-parallel group, on one node, and some have others in it.

    Ranks of a group may have different numbers of communicators, so these must be free.
    """
    if plan.cluster.device.communicator_bytes or all(unit.tp == 1 for unit in plan.units):
        return False
    group_of: dict[int, tuple[int, ...]] = {}
    for unit in plan.units:
        for group in (group for stages in unit.ranks for group in stages):
            if len({plan.cluster.node_of(rank) for rank in group}) > 1:
                return False
            if any(group_of.setdefault(rank, group) != group for rank in group):
                return False
    return True


def _matching(own: Sequence[Reduction], whole: Sequence[Reduction]) -> list[Reduction]:
    """For each reduction of an excerpt the one of the whole plan that it is a part of."""
    places = {(r.kind, r.owner, r.blocks, rank): r for r in whole for rank in r.ranks}
    return [places[r.kind, r.owner, r.blocks, r.ranks[0]] for r in own]


def _meetings(plan: Plan, graph: Graph) -> list[set[int]]:
    """The nodes of every reduction over several of them."""
    per_node = plan.cluster.devices_per_node
    nodes = [{rank // per_node for rank in reduction.ranks} for reduction in graph.reductions]
    return [found for found in nodes if len(found) > 1]


def _suited(plan: Plan) -> bool:
    """One task of modules with parameters of their own, losses per sample, a unit each."""
    if len(plan.tasks) > 1 or plan.waves:
        return False
    (task,) = plan.tasks.values()
    return (
        len(plan.units) == len(task.modules)
        and not any(module.share for module in task.modules.values())
        and all(loss.sync_batch is None for loss in task.losses.values())
    )


def _parts(plan: Plan, graph: Graph) -> list[Part]:
    """The replicas of all units, those together that share ranks or exchange samples."""
    together = _Together()
    first: dict[int, Replica] = {}
    for u, unit in enumerate(plan.units):
        for d, stages in enumerate(unit.ranks):
            for rank in (rank for group in stages for rank in group):
                together.join((u, d), first.setdefault(rank, (u, d)))
    position = {unit.name: u for u, unit in enumerate(plan.units)}
    for edge in graph.edges:
        producer, consumer = graph.stages[edge.producer], graph.stages[edge.consumer]
        u, u2 = position[producer.unit], position[consumer.unit]
        if u == u2:
            continue
        index = RangeIndex(producer.microbatches)
        for d2, spans in enumerate(consumer.microbatches):
            for d in {d for span in spans for _, d, _ in index.overlapping(span)}:
                together.join((u, d), (u2, d2))
    found: defaultdict[Replica, list[Replica]] = defaultdict(list)
    for u, unit in enumerate(plan.units):
        for d in range(unit.dp):
            found[together.root((u, d))].append((u, d))
    return [
        tuple(tuple(d for v, d in replicas if v == u) for u in range(len(plan.units)))
        for replicas in found.values()
    ]


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


def _shape(plan: Plan, part: Part) -> object:
    """Sizes of the micro-batches, and ranks by first appearance.

    Sizes fix the ranges that a part's micro-batches have among its own samples, and with
    them its messages.
    """
    sizes = tuple(
        tuple(unit.microbatches[d] for d in replicas)
        for unit, replicas in zip(plan.units, part, strict=True)
    )
    return sizes, renamed(list(_ranks(plan, part)))


def _ranks(plan: Plan, part: Part) -> Iterator[int]:
    """Every rank of a part, as often as it is in one of its units."""
    for unit, replicas in zip(plan.units, part, strict=True):
        for d in replicas:
            yield from (rank for group in unit.ranks[d] for rank in group)


def _cut_out(plan: Plan, parts: Sequence[Part], *, folds: bool) -> Plan:
    """The plan of some parts; samples keep their order."""
    units = tuple(
        _some_replicas(unit, sorted(d for part in parts for d in part[u]), folds=folds)
        for u, unit in enumerate(plan.units)
    )
    ((name, task),) = plan.tasks.items()
    whole, kept = plan.units[0], units[0]
    rounds = task.batch // sum(map(sum, whole.microbatches))
    ranks = {rank for unit in units for rank in unit.all_ranks}
    return plan.model_copy(
        update={
            "units": units,
            "tasks": {
                name: task.model_copy(update={"batch": rounds * sum(map(sum, kept.microbatches))})
            },
            "losses": tuple(
                loss.model_copy(update={"ranks": tuple(r for r in loss.ranks if r in ranks)})
                for loss in plan.losses
            ),
        }
    )


def _some_replicas(unit: Unit, replicas: Sequence[int], *, folds: bool) -> Unit:
    taken = 1 if folds else unit.tp
    return unit.model_copy(
        update={
            "tp": taken,
            "dp": len(replicas),
            "ranks": tuple(tuple(group[:taken] for group in unit.ranks[d]) for d in replicas),
            "samples": tuple(unit.samples[d] for d in replicas),
            "microbatches": tuple(unit.microbatches[d] for d in replicas),
        }
    )
