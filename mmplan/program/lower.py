"""From a plan's units to the parts of a program that have no order: its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mmplan.errors import InvalidInputError
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Graph,
    LossInput,
    PerSampleLoss,
    Reduction,
    Source,
    Stage,
    Ties,
    can_split,
    replica_pairs,
)
from mmplan.program.reduction_starts import rounds_of, starting_stages
from mmplan.program.samples import number_samples
from mmplan.program.schedules.registry import POLICIES
from mmplan.program.shards import Ranks
from mmplan.program.sums_and_updates import sums_and_updates
from mmplan.program.ties import check_ties
from mmplan.schema import workload as names
from mmplan.schema.plan import Plan, PlannedLoss, PlannedTask, Unit


def lower(plan: Plan) -> Graph:
    """Build the graph of a plan that has no faults (:func:`mmplan.schema.faults.plan_faults`).

    Raises:
        InvalidInputError: modules feed each other in a circle, a loss is placed on other ranks
            than those that hold its features, or the gradient of a tied parameter cannot be
            summed (:func:`mmplan.program.ties.check_ties`).
    """
    graph = Graph(ties=_ties(plan))
    for name, task in plan.tasks.items():
        last = _add_stages(graph, plan, name, task)
        for loss_name, loss in task.losses.items():
            _add_loss(graph, plan, name, task, loss_name, loss, last)
    _mark_gradients(graph)
    _mark_scattered(plan, graph)
    _number_streams(graph)
    _mark_split(plan, graph)
    check_ties(graph.stages, graph.ties)
    reductions, graph.updates = sums_and_updates(graph, loss_zero=plan.training.zero > 0)
    numbers: dict[Ranks, int] = {}
    graph.reductions = [
        replace(each, communicator=numbers.setdefault(each.ranks, len(numbers)))
        for each in reductions
    ]
    graph.reductions = [_in_rounds(graph, each) for each in graph.reductions]
    cut = {stage.index for x in graph.reductions for stage, _ in rounds_of(graph, x)}
    graph.stages = [replace(s, gathers=s.index in cut and s.zero > 2) for s in graph.stages]
    return graph


def _in_rounds(graph: Graph, reduction: Reduction) -> Reduction:
    """A sum after each micro-batch, where replicas wait for each other in nothing else.

    Elsewhere a replica may need messages of another one that waits for it in a sum. All stages are
    on the same ranks, and each of their micro-batches brings gradients of all of the sum's blocks.
    """
    if not isinstance(reduction, BlockReduction):
        return reduction
    if not any(stage.zero > 1 for stage in graph.stages if stage.owner == reduction.owner):
        return reduction
    stages = starting_stages(graph, reduction)
    if not stages:
        return reduction
    (first, end), ranks = reduction.blocks, stages[0].ranks
    for stage in stages:
        trains = any(a <= first and end <= b for a, b in stage.trainable) or len(stages) == 1
        if stage.zero < 2 or stage.split or stage.ranks != ranks or not trains:
            return reduction
    ends = ((graph.stages[e.producer], graph.stages[e.consumer]) for e in graph.edges)
    even = all(len({*map(len, stage.microbatches)}) == 1 for stage in stages)
    if not even or any(one.microbatches != other.microbatches for one, other in ends):
        return reduction
    return replace(reduction, rounds=sum(len(stage.microbatches[0]) for stage in stages))


def _ties(plan: Plan) -> Ties:
    modules = [item for task in plan.tasks.values() for item in task.modules.items()]
    return {planned.share or name: planned.ties for name, planned in modules if planned.ties}


def modules_in_order(name: str, task: PlannedTask) -> list[str]:
    """The task's modules, producers before consumers.

    Raises:
        InvalidInputError: they take each other's output in a circle.
    """
    sources = {
        module: tuple(names.parse_source(text, task.modules) for text in planned.inputs)
        for module, planned in task.modules.items()
    }
    try:
        return list(names.producers_first(name, sources))
    except ValueError as error:
        raise InvalidInputError(str(error), hint="solve the workload again") from None


def _add_stages(graph: Graph, plan: Plan, name: str, task: PlannedTask) -> dict[str, int]:
    """Append the stages of a task; returns each module's last stage."""
    last: dict[str, int] = {}
    for module in modules_in_order(name, task):
        units = [u for u in plan.units if (u.task, u.module) == (name, module)]
        chunks = sorted(
            ((unit, c) for unit in units for c in range(len(unit.blocks))),
            key=lambda item: item[0].blocks[item[1]],
        )
        for position, (unit, chunk) in enumerate(chunks):
            stage = _stage(len(graph.stages), plan, unit, chunk)
            graph.stages.append(stage)
            if position:
                cut = graph.connect(stage.index - 1, stage.index, None, internal=True)
                inputs = (Source(edge=cut),)
            else:
                inputs = tuple(
                    _source(graph, text, task, last, stage.index)
                    for text in task.modules[module].inputs
                )
            graph.stages[-1] = replace(stage, inputs=inputs)
        last[module] = len(graph.stages) - 1
    return last


# Of a unit's chunks the same, so that they are one object: compared at once.
_numbered = lru_cache(maxsize=64)(number_samples)


def _stage(index: int, plan: Plan, unit: Unit, chunk: int) -> Stage:
    task = plan.tasks[unit.task]
    planned = task.modules[unit.module]
    position = POLICIES[unit.schedule.kind].position(chunk, unit.pp)
    return Stage(
        index=index,
        unit=unit.name,
        task=unit.task,
        module=unit.module,
        owner=planned.share or unit.module,
        chunk=chunk,
        blocks=unit.blocks[chunk],
        trainable=tuple(trainable_ranges(unit.blocks[chunk], planned.frozen)),
        tp=unit.tp,
        ranks=unit.grid.stage(position),
        microbatches=_numbered(unit.microbatches, task.batch),
        rounds=tuple(map(len, unit.microbatches)),
        inputs=(),
        hosted=(),
        syncs=(),
        input_gradient=False,
        has_backward=False,
        zero=plan.zero_of(unit),
        items=unit.items and unit.tp > 1,
    )


def trainable_ranges(
    blocks: tuple[int, int], frozen: bool | tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int]]:
    """The parts of ``blocks`` that no frozen range covers."""
    if frozen is True:
        return
    start, end = blocks
    for a, b in sorted(frozen or ()):
        if b <= start or a >= end:
            continue
        if a > start:
            yield start, a
        start = max(start, b)
    if start < end:
        yield start, end


def _source(
    graph: Graph, text: str | None, task: PlannedTask, last: Mapping[str, int], consumer: int
) -> Source:
    source = names.parse_source(text, task.modules)
    if source.module is None:
        return Source(field=source.field)
    producer = last[source.module]
    return Source(edge=graph.connect(producer, consumer, source.element, internal=False))


def _add_loss(
    graph: Graph,
    plan: Plan,
    task_name: str,
    task: PlannedTask,
    name: str,
    loss: PlannedLoss,
    last: Mapping[str, int],
) -> None:
    index = len(graph.losses)
    sources = [names.parse_source(text, task.modules) for text in loss.inputs]
    stages = sorted({last[s.module] for s in sources if s.module is not None})
    # A per-sample loss is computed on the last stage that it takes something from.
    hosts = stages if loss.sync_batch else stages[-1:]
    ranks = tuple(sorted({rank for s in hosts for rank in graph.stages[s].members}))
    common: dict[str, Any] = {
        "index": index,
        "name": name,
        "task": task_name,
        "weight": names.exact(loss.weight) * names.exact(task.weight),
        "divisor": task.batch // (loss.sync_batch or 1),
        "ranks": ranks,
    }
    if loss.sync_batch is None:
        host = stages[-1]
        inputs = tuple(
            Source(own=True, element=s.element)
            if s.module is not None and last[s.module] == host
            else _source(graph, text, task, last, host)
            for s, text in zip(sources, loss.inputs, strict=True)
        )
        made = PerSampleLoss(**common, host=host, inputs=inputs)
        graph.stages[host] = replace(graph.stages[host], hosted=(*graph.stages[host].hosted, index))
    else:
        made = CrossSampleLoss(
            **common,
            sync_batch=loss.sync_batch,
            inputs=tuple(
                LossInput(
                    stage=None if s.module is None else last[s.module],
                    element=s.element,
                    field=s.field,
                )
                for s in sources
            ),
        )
        for stage in stages:
            graph.stages[stage] = replace(
                graph.stages[stage], syncs=(*graph.stages[stage].syncs, index)
            )
    _check_placement(plan, task_name, name, ranks)
    graph.losses.append(made)


def _check_placement(plan: Plan, task: str, name: str, ranks: tuple[int, ...]) -> None:
    placed = next(x for x in plan.losses if (x.task, x.name) == (task, name))
    if tuple(sorted(placed.ranks)) != ranks:
        raise InvalidInputError(
            f"losses.{name}.ranks: {sorted(placed.ranks)}, its features are on {list(ranks)}",
            hint="list the ranks of the last stages of the modules that it takes",
        )


def _mark_gradients(graph: Graph) -> None:
    """Where gradients flow: from losses back to the first trainable block, and no further."""
    makes_gradient = [bool(stage.trainable) for stage in graph.stages]
    for edge in sorted(graph.edges, key=lambda e: e.consumer):
        makes_gradient[edge.consumer] |= makes_gradient[edge.producer]
    reaches_loss = [bool(stage.hosted or stage.syncs) for stage in graph.stages]
    for edge in sorted(graph.edges, key=lambda e: -e.producer):
        reaches_loss[edge.producer] |= reaches_loss[edge.consumer]
    graph.edges = [
        replace(e, carries_gradient=makes_gradient[e.producer] and reaches_loss[e.consumer])
        for e in graph.edges
    ]
    inward = {e.consumer for e in graph.edges if e.carries_gradient}
    graph.stages = [
        replace(
            stage,
            input_gradient=stage.index in inward,
            # A loss may own parameters, so a stage that hosts one always has a backward.
            has_backward=(makes_gradient[stage.index] and reaches_loss[stage.index])
            or bool(stage.hosted),
        )
        for stage in graph.stages
    ]


def _mark_scattered(plan: Plan, graph: Graph) -> None:
    """Which messages come in shares: those from other nodes to several ranks of a group on one.

    Between nodes a whole copy for every rank of a group would be so many times the bytes; in
    a node copies are faster than a gather after each message.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
    """
    node_of = plan.cluster.node_of

    def nodes(stage: Stage, d: int) -> set[int]:
        return {node_of(rank) for rank in stage.ranks[d]}

    # All groups of the stage have ranks on one node that bring shares together.
    gathers = [
        stage.tp > 1
        and all(
            node_of(group[0]) == node_of(group[1]) or len(nodes(stage, d)) < stage.tp
            for d, group in enumerate(stage.ranks)
        )
        for stage in graph.stages
    ]
    for edge in graph.edges:
        producer, consumer = graph.stages[edge.producer], graph.stages[edge.consumer]
        forward, backward = gathers[edge.consumer], edge.carries_gradient and gathers[edge.producer]
        if (forward or backward) and any(
            nodes(producer, d) != nodes(consumer, d2) for d, d2 in replica_pairs(producer, consumer)
        ):
            graph.edges[edge.index] = replace(edge, scattered=forward, scattered_back=backward)


def _mark_split(plan: Plan, graph: Graph) -> None:
    """Where backwards have two parts: in the stages of units that ask for it."""
    for stage in graph.stages:
        schedule = plan.unit(stage.unit).schedule
        split = schedule.split_backward and can_split(stage)
        even = split and schedule.even_in_flight
        graph.stages[stage.index] = replace(stage, split=split, even_in_flight=even)


def _number_streams(graph: Graph) -> None:
    """Number the pairs of sets of ranks that messages go from and to."""
    members = [frozenset(stage.members) for stage in graph.stages]
    numbers: dict[tuple[frozenset[int], frozenset[int]], int] = {}

    def number(source: int, target: int) -> int:
        return numbers.setdefault((members[source], members[target]), len(numbers))

    for edge in graph.edges:
        streams = number(edge.producer, edge.consumer), number(edge.consumer, edge.producer)
        graph.edges[edge.index] = replace(edge, streams=streams)
