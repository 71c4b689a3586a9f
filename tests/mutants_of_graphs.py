"""Mutants of the stage graph: what is computed from what, and what trains.

The rows stay as they were compiled, so that messages and order hold: these are mistakes of
meaning, which a check of samples and order alone does not see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mmplan.program.instructions import Collective, Instruction, Op
from mmplan.program.model import (
    CrossSampleLoss,
    Edge,
    Loss,
    LossInput,
    PerSampleLoss,
    Program,
    Source,
    Stage,
)
from tests.mutants import mutator, one_of, with_stage
from tests.plants import without


def with_loss(program: Program, loss: Loss, **changes: Any) -> Program:
    """One loss changed."""
    losses = list(program.losses)
    losses[loss.index] = replace(loss, **changes)
    return replace(program, losses=tuple(losses))


def with_edge(program: Program, edge: Edge, **changes: Any) -> Program:
    """One edge changed."""
    edges = list(program.edges)
    edges[edge.index] = replace(edge, **changes)
    return replace(program, edges=tuple(edges))


def _stages(program: Program, test: Callable[[Stage], bool] = lambda _: True) -> list[Stage]:
    return [stage for stage in program.stages if test(stage)]


def _cross(program: Program) -> list[CrossSampleLoss]:
    return program.cross_sample_losses


def _hosted(program: Program) -> list[PerSampleLoss]:
    return [loss for loss in program.losses if isinstance(loss, PerSampleLoss)]


def _means(program: Program) -> list[Loss]:
    """Losses whose divisor is used: the others count their targets."""
    return [loss for loss in program.losses if not loss.name.startswith("counted")]


def _fields(program: Program) -> list[str]:
    """All data fields that a program takes."""
    found = {s.field for stage in program.stages for s in stage.inputs}
    found |= {s.field for loss in program.losses for s in loss.inputs}
    return sorted(name for name in found if name is not None)


# --- weights and normalisers ---------------------------------------------------------------


@mutator("graph")
def loss_weight_three_times(program: Program, rng: random.Random) -> Program | None:
    loss = rng.choice(program.losses)
    return with_loss(program, loss, weight=loss.weight * 3)


@mutator("graph")
def loss_weight_a_millionth_more(program: Program, rng: random.Random) -> Program | None:
    loss = rng.choice(program.losses)
    return with_loss(program, loss, weight=loss.weight * Fraction(1000001, 1000000))


@mutator("graph")
def divisor_of_a_loss_double(program: Program, rng: random.Random) -> Program | None:
    """A mean over twice as many samples, or sync batches."""
    loss = one_of(rng, _means(program))
    return with_loss(program, loss, divisor=loss.divisor * 2) if loss else None


@mutator("graph")
def divisor_of_a_loss_by_replica(program: Program, rng: random.Random) -> Program | None:
    """A mean by rank in place of one by sample."""
    loss = one_of(rng, [x for x in _means(program) if len(x.ranks) > 1])
    return with_loss(program, loss, divisor=loss.divisor * len(loss.ranks)) if loss else None


@mutator("graph")
def loss_weight_zero(program: Program, rng: random.Random) -> Program | None:
    return with_loss(program, rng.choice(program.losses), weight=Fraction(0))


@mutator("graph")
def loss_weight_negative(program: Program, rng: random.Random) -> Program | None:
    loss = rng.choice(program.losses)
    return with_loss(program, loss, weight=-loss.weight)


@mutator("graph")
def task_weight_half(program: Program, rng: random.Random) -> Program | None:
    """All losses of a task."""
    task = rng.choice(sorted(program.batches))
    losses = tuple(
        replace(loss, weight=loss.weight / 2) if loss.task == task else loss
        for loss in program.losses
    )
    return replace(program, losses=losses)


@mutator("graph")
def weights_of_two_losses_exchanged(program: Program, rng: random.Random) -> Program | None:
    pairs = [(a, b) for a in program.losses for b in program.losses if a.weight < b.weight]
    pair = one_of(rng, pairs)
    if pair is None:
        return None
    a, b = pair
    return with_loss(with_loss(program, a, weight=b.weight), b, weight=a.weight)


@mutator("graph")
def sync_batch_half(program: Program, rng: random.Random) -> Program | None:
    loss = one_of(rng, [x for x in _cross(program) if x.sync_batch % 2 == 0])
    return with_loss(program, loss, sync_batch=loss.sync_batch // 2) if loss else None


@mutator("graph")
def sync_batch_double(program: Program, rng: random.Random) -> Program | None:
    loss = one_of(rng, _cross(program))
    return with_loss(program, loss, sync_batch=loss.sync_batch * 2) if loss else None


# --- losses ------------------------------------------------------------------------------


@mutator("graph")
def loss_takes_its_inputs_in_another_order(program: Program, rng: random.Random) -> Program | None:
    loss = one_of(rng, [x for x in program.losses if len(x.inputs) > 1])
    if loss is None:
        return None
    inputs: list[Any] = list(loss.inputs)
    inputs[0], inputs[1] = inputs[1], inputs[0]
    return with_loss(program, loss, inputs=tuple(inputs))


@mutator("graph")
def loss_takes_one_input_twice(program: Program, rng: random.Random) -> Program | None:
    """Vision against vision."""
    loss = one_of(rng, [x for x in program.losses if len(x.inputs) > 1])
    if loss is None:
        return None
    inputs: list[Any] = list(loss.inputs)
    inputs[1] = inputs[0]
    return with_loss(program, loss, inputs=tuple(inputs))


@mutator("graph")
def loss_without_its_last_input(program: Program, rng: random.Random) -> Program | None:
    loss = one_of(rng, [x for x in program.losses if len(x.inputs) > 2])
    return with_loss(program, loss, inputs=loss.inputs[:-1]) if loss else None


@mutator("graph")
def loss_takes_another_field(program: Program, rng: random.Random) -> Program | None:
    found = [
        (loss, n)
        for loss in program.losses
        for n, source in enumerate(loss.inputs)
        if source.field is not None
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    loss, n = pick
    inputs: list[Any] = list(loss.inputs)
    field = one_of(rng, [f for f in _fields(program) if f != inputs[n].field])
    if field is None:
        return None
    inputs[n] = replace(inputs[n], field=field)
    return with_loss(program, loss, inputs=tuple(inputs))


@mutator("graph")
def loss_takes_a_field_in_place_of_a_feature(
    program: Program, rng: random.Random
) -> Program | None:
    loss = one_of(rng, [x for x in _cross(program) if len(x.inputs) > 1])
    field = one_of(rng, _fields(program))
    if loss is None or field is None:
        return None
    return with_loss(program, loss, inputs=(*loss.inputs[:-1], LossInput(field=field)))


@mutator("graph")
def loss_takes_another_stage(program: Program, rng: random.Random) -> Program | None:
    """Whose features all of its ranks have: the loss holds it already."""
    loss = one_of(rng, _cross(program))
    if loss is None:
        return None
    n = rng.randrange(len(loss.inputs))
    stage = one_of(rng, [s.index for s in program.stages if s.index != loss.inputs[n].stage])
    if stage is None:
        return None
    inputs = list(loss.inputs)
    inputs[n] = replace(inputs[n], stage=stage, field=None)
    return with_loss(program, loss, inputs=tuple(inputs))


@mutator("graph")
def loss_takes_another_element(program: Program, rng: random.Random) -> Program | None:
    found = [
        (loss, n)
        for loss in program.losses
        for n, source in enumerate(loss.inputs)
        if source.element is not None
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    loss, n = pick
    inputs: list[Any] = list(loss.inputs)
    inputs[n] = replace(inputs[n], element=1 - inputs[n].element)
    return with_loss(program, loss, inputs=tuple(inputs))


@mutator("graph")
def hosted_loss_forgotten(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: bool(s.hosted)))
    if stage is None:
        return None
    lost = rng.choice(stage.hosted)
    return with_stage(program, stage, hosted=tuple(x for x in stage.hosted if x != lost))


@mutator("graph")
def hosted_loss_twice(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: bool(s.hosted)))
    if stage is None:
        return None
    return with_stage(program, stage, hosted=(*stage.hosted, rng.choice(stage.hosted)))


@mutator("graph")
def hosted_loss_forgotten_with_its_count(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: bool(s.hosted)))
    if stage is None:
        return None
    lost = rng.choice(stage.hosted)
    changed = with_stage(program, stage, hosted=tuple(x for x in stage.hosted if x != lost))
    return without(changed, lambda _, x: x == Collective(Op.COUNT, lost))


@mutator("graph")
def hosted_loss_on_another_stage(program: Program, rng: random.Random) -> Program | None:
    loss = one_of(rng, _hosted(program))
    if loss is None:
        return None
    host = program.stages[loss.host]
    others = _stages(program, lambda s: s.task == host.task and s is not host)
    other = one_of(rng, others)
    if other is None:
        return None
    changed = with_stage(program, host, hosted=tuple(x for x in host.hosted if x != loss.index))
    changed = with_stage(changed, other, hosted=(*other.hosted, loss.index))
    return with_loss(changed, loss, host=other.index)


@mutator("graph")
def cross_sample_loss_forgotten(program: Program, rng: random.Random) -> Program | None:
    """No stage feeds it and no rank runs it."""
    loss = one_of(rng, _cross(program))
    if loss is None:
        return None
    stages = tuple(
        replace(s, syncs=tuple(x for x in s.syncs if x != loss.index)) for s in program.stages
    )

    def gone(_: int, item: Instruction) -> bool:
        return getattr(item, "loss", None) == loss.index

    return without(replace(program, stages=stages), gone)


@mutator("graph")
def stage_does_not_keep_its_features(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: bool(s.syncs)))
    if stage is None:
        return None
    lost = rng.choice(stage.syncs)
    return with_stage(program, stage, syncs=tuple(x for x in stage.syncs if x != lost))


@mutator("graph")
def loss_of_another_name(program: Program, rng: random.Random) -> Program | None:
    """Another factory and other parameters."""
    loss = rng.choice(program.losses)
    name = one_of(rng, sorted({x.name for x in program.losses} - {loss.name}))
    return None if name is None else with_loss(program, loss, name=name)


# --- inputs and edges --------------------------------------------------------------------


@mutator("graph")
def inputs_of_a_stage_in_another_order(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: len(s.inputs) > 1))
    if stage is None:
        return None
    return with_stage(program, stage, inputs=(*stage.inputs[1:], stage.inputs[0]))


@mutator("graph")
def input_of_a_stage_dropped(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: len(s.inputs) > 1))
    if stage is None:
        return None
    lost = rng.randrange(len(stage.inputs))
    return with_stage(program, stage, inputs=stage.inputs[:lost] + stage.inputs[lost + 1 :])


@mutator("graph")
def input_of_a_stage_made_null(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: len(s.inputs) > 1))
    if stage is None:
        return None
    lost = rng.randrange(len(stage.inputs))
    inputs = (*stage.inputs[:lost], Source(), *stage.inputs[lost + 1 :])
    return with_stage(program, stage, inputs=inputs) if inputs != stage.inputs else None


@mutator("graph")
def input_of_a_stage_twice(program: Program, rng: random.Random) -> Program | None:
    stage = rng.choice(program.stages)
    return with_stage(program, stage, inputs=(*stage.inputs, stage.inputs[0]))


@mutator("graph")
def stage_takes_another_field(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: any(x.field for x in s.inputs)))
    if stage is None:
        return None
    n = rng.choice([n for n, x in enumerate(stage.inputs) if x.field])
    field = one_of(rng, [f for f in _fields(program) if f != stage.inputs[n].field])
    if field is None:
        return None
    inputs = (*stage.inputs[:n], Source(field=field), *stage.inputs[n + 1 :])
    return with_stage(program, stage, inputs=inputs)


@mutator("graph")
def stage_takes_a_field_in_place_of_an_edge(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: any(x.edge is not None for x in s.inputs)))
    field = one_of(rng, _fields(program))
    if stage is None or field is None:
        return None
    n = rng.choice([n for n, x in enumerate(stage.inputs) if x.edge is not None])
    inputs = (*stage.inputs[:n], Source(field=field), *stage.inputs[n + 1 :])
    return with_stage(program, stage, inputs=inputs)


@mutator("graph")
def two_edges_into_a_stage_exchanged(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: sum(x.edge is not None for x in s.inputs) > 1))
    if stage is None:
        return None
    inputs = list(stage.inputs)
    a, b = rng.sample([n for n, x in enumerate(inputs) if x.edge is not None], 2)
    inputs[a], inputs[b] = inputs[b], inputs[a]
    return with_stage(program, stage, inputs=tuple(inputs))


@mutator("graph")
def edge_of_another_element(program: Program, rng: random.Random) -> Program | None:
    edge = one_of(rng, [e for e in program.edges if not e.internal])
    if edge is None:
        return None
    element = rng.choice(sorted({None, 0, 1} - {edge.element}, key=str))
    return with_edge(program, edge, element=element)


@mutator("graph")
def element_of_a_cut(program: Program, rng: random.Random) -> Program | None:
    edge = one_of(rng, [e for e in program.edges if e.internal])
    return with_edge(program, edge, element=rng.choice([0, 1])) if edge else None


@mutator("graph")
def edge_carries_no_gradient(program: Program, rng: random.Random) -> Program | None:
    """And nobody sends one."""
    edge = one_of(rng, [e for e in program.edges if e.carries_gradient])
    if edge is None:
        return None
    backward = (Op.SEND_B, Op.RECV_B)
    changed = with_edge(program, edge, carries_gradient=False)
    return without(changed, lambda _, x: x.op in backward and getattr(x, "edge", -1) == edge.index)


@mutator("graph")
def edge_said_to_carry_no_gradient(program: Program, rng: random.Random) -> Program | None:
    edge = one_of(rng, [e for e in program.edges if e.carries_gradient])
    return with_edge(program, edge, carries_gradient=False) if edge else None


@mutator("graph")
def edge_scattered_otherwise(program: Program, rng: random.Random) -> Program | None:
    edge = one_of(rng, program.edges)
    if edge is None:
        return None
    name = rng.choice(["scattered", "scattered_back"])
    return with_edge(program, edge, **{name: not getattr(edge, name)})


@mutator("graph")
def edge_called_a_cut_or_not(program: Program, rng: random.Random) -> Program | None:
    edge = one_of(rng, program.edges)
    return with_edge(program, edge, internal=not edge.internal) if edge else None


@mutator("graph")
def edge_from_another_producer(program: Program, rng: random.Random) -> Program | None:
    """Of the same ranks and micro-batches, and its messages with it: right shape, wrong stage."""
    found = [
        (edge, other)
        for edge in program.edges
        for other in program.stages
        if other.index not in (edge.producer, edge.consumer)
        and other.ranks == program.stages[edge.producer].ranks
        and other.microbatches == program.stages[edge.producer].microbatches
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    edge, other = pick

    def rewired(item: Any) -> Any:
        end = getattr(item, "edge", None) == edge.index and item.op in (Op.SEND_F, Op.RECV_B)
        return replace(item, stage=other.index) if end else item

    rows = tuple(tuple(map(rewired, row)) for row in program.instructions)
    return replace(with_edge(program, edge, producer=other.index), instructions=rows)


# --- stages ------------------------------------------------------------------------------


def _cuts(program: Program) -> list[tuple[Stage, Stage]]:
    """Stages that run consecutive blocks of a module."""
    return [
        (program.stages[e.producer], program.stages[e.consumer])
        for e in program.edges
        if e.internal
    ]


@mutator("graph")
def block_skipped_at_a_cut(program: Program, rng: random.Random) -> Program | None:
    pair = one_of(rng, [p for p in _cuts(program) if p[1].blocks[1] - p[1].blocks[0] > 1])
    if pair is None:
        return None
    low, high = pair[1].blocks
    trainable = tuple((max(a, low + 1), b) for a, b in pair[1].trainable if b > low + 1)
    return with_stage(program, pair[1], blocks=(low + 1, high), trainable=trainable)


@mutator("graph")
def first_or_last_block_of_a_module_skipped(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.blocks[1] - s.blocks[0] > 1))
    if stage is None:
        return None
    low, high = stage.blocks
    low, high = rng.choice([(low + 1, high), (low, high - 1)])
    trainable = tuple((max(a, low), min(b, high)) for a, b in stage.trainable)
    kept = tuple((a, b) for a, b in trainable if a < b)
    return with_stage(program, stage, blocks=(low, high), trainable=kept)


@mutator("graph")
def block_run_on_both_sides_of_a_cut(program: Program, rng: random.Random) -> Program | None:
    pair = one_of(rng, _cuts(program))
    if pair is None:
        return None
    low, high = pair[1].blocks
    return with_stage(program, pair[1], blocks=(low - 1, high))


@mutator("graph")
def two_stages_exchange_their_blocks(program: Program, rng: random.Random) -> Program | None:
    pair = one_of(rng, _cuts(program))
    if pair is None:
        return None
    a, b = pair
    changed = with_stage(program, a, blocks=b.blocks, trainable=b.trainable)
    return with_stage(changed, b, blocks=a.blocks, trainable=a.trainable)


@mutator("graph")
def blocks_of_another_stage(program: Program, rng: random.Random) -> Program | None:
    """The same blocks run twice."""
    pair = one_of(rng, _cuts(program))
    if pair is None:
        return None
    a, b = rng.sample(pair, 2)
    return with_stage(program, b, blocks=a.blocks, trainable=a.trainable)


@mutator("graph")
def trainable_forgotten(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: bool(s.trainable)))
    return with_stage(program, stage, trainable=()) if stage else None


@mutator("graph")
def one_trainable_block_forgotten(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: any(b - a > 1 for a, b in s.trainable)))
    if stage is None:
        return None
    a, b = next((a, b) for a, b in stage.trainable if b - a > 1)
    rest = tuple(span for span in stage.trainable if span != (a, b))
    return with_stage(program, stage, trainable=tuple(sorted((*rest, (a + 1, b)))))


@mutator("graph")
def trainable_forgotten_in_a_whole_module(program: Program, rng: random.Random) -> Program | None:
    module = rng.choice(sorted({s.module for s in program.stages if s.trainable} or {""}))
    stages = tuple(replace(s, trainable=()) if s.module == module else s for s in program.stages)
    return replace(program, stages=stages)


@mutator("graph")
def frozen_blocks_trained(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.trainable != (s.blocks,)))
    return with_stage(program, stage, trainable=(stage.blocks,)) if stage else None


@mutator("graph")
def stage_of_another_module(program: Program, rng: random.Random) -> Program | None:
    """Another tower's parameters in its place."""
    stage = rng.choice(program.stages)
    owner = one_of(rng, sorted({s.owner for s in program.stages} - {stage.owner}))
    return None if owner is None else with_stage(program, stage, owner=owner)


@mutator("graph")
def module_no_longer_shared(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.owner != s.module))
    if stage is None:
        return None
    stages = tuple(
        replace(s, owner=s.module) if s.module == stage.module else s for s in program.stages
    )
    return replace(program, stages=stages)


@mutator("graph")
def stage_without_a_backward(program: Program, rng: random.Random) -> Program | None:
    """Its backwards and the gradients that it would send and take are gone."""
    stage = one_of(rng, _stages(program, lambda s: s.has_backward))
    if stage is None:
        return None
    edges = {e.index for e in program.edges if stage.index in (e.producer, e.consumer)}
    gone = (Op.BACKWARD, Op.INPUT, Op.WEIGHT)

    def lost(_: int, item: Instruction) -> bool:
        if item.op in gone:
            return getattr(item, "stage", -1) == stage.index
        return item.op in (Op.SEND_B, Op.RECV_B) and getattr(item, "edge", -1) in edges

    changed = with_stage(program, stage, has_backward=False, input_gradient=False, split=False)
    changed = replace(
        changed,
        edges=tuple(
            replace(e, carries_gradient=False) if e.index in edges else e for e in changed.edges
        ),
    )
    return without(changed, lost)


@mutator("graph")
def stage_said_to_have_no_backward(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.has_backward))
    return with_stage(program, stage, has_backward=False) if stage else None


@mutator("graph")
def stage_said_to_be_split_or_not(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.has_backward))
    return with_stage(program, stage, split=not stage.split) if stage else None


@mutator("graph")
def stage_of_another_task(program: Program, rng: random.Random) -> Program | None:
    stage = rng.choice(program.stages)
    task = one_of(rng, sorted(set(program.batches) - {stage.task}))
    return None if task is None else with_stage(program, stage, task=task)


@mutator("graph")
def ranks_of_a_tp_group_exchanged(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.tp > 1))
    if stage is None:
        return None
    ranks = list(stage.ranks)
    d = rng.randrange(len(ranks))
    ranks[d] = ranks[d][::-1]
    return with_stage(program, stage, ranks=tuple(ranks))


@mutator("graph")
def replicas_of_a_stage_exchanged(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.dp > 1))
    if stage is None:
        return None
    return with_stage(program, stage, ranks=(*stage.ranks[1:], stage.ranks[0]))


@mutator("graph")
def replica_dropped(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.dp > 1))
    if stage is None:
        return None
    return with_stage(
        program,
        stage,
        ranks=stage.ranks[:-1],
        microbatches=stage.microbatches[:-1],
        rounds=stage.rounds[:-1],
    )


@mutator("graph")
def micro_batches_of_two_replicas_exchanged(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, lambda s: s.dp > 1))
    if stage is None:
        return None
    return with_stage(program, stage, microbatches=(*stage.microbatches[1:], stage.microbatches[0]))


@mutator("graph")
def sample_moved_to_the_next_micro_batch(program: Program, rng: random.Random) -> Program | None:
    found = [
        (stage, d, m)
        for stage in program.stages
        for d, spans in enumerate(stage.microbatches)
        for m in range(len(spans) - 1)
        if spans[m][1] == spans[m + 1][0] and spans[m][1] - spans[m][0] > 1
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    stage, d, m = pick
    spans = list(stage.microbatches[d])
    spans[m], spans[m + 1] = (spans[m][0], spans[m][1] - 1), (spans[m][1] - 1, spans[m + 1][1])
    return _with_spans(program, stage, d, spans)


def _with_spans(
    program: Program, stage: Stage, replica: int, spans: list[tuple[int, int]]
) -> Program:
    microbatches = list(stage.microbatches)
    microbatches[replica] = tuple(spans)
    return with_stage(program, stage, microbatches=tuple(microbatches))


def _reads_samples(stage: Stage) -> bool:
    """Whether it takes fields or gives features: others take what their messages bring."""
    return bool(stage.syncs or stage.hosted or any(source.field for source in stage.inputs))


@mutator("graph")
def sample_left_out(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, _reads_samples))
    if stage is None:
        return None
    d = rng.randrange(stage.dp)
    spans = list(stage.microbatches[d])
    m = rng.randrange(len(spans))
    spans[m] = spans[m][0], spans[m][1] - 1
    return _with_spans(program, stage, d, spans) if spans[m][0] < spans[m][1] else None


@mutator("graph")
def sample_taken_twice(program: Program, rng: random.Random) -> Program | None:
    stage = one_of(rng, _stages(program, _reads_samples))
    if stage is None:
        return None
    d = rng.randrange(stage.dp)
    spans = list(stage.microbatches[d])
    m = rng.randrange(len(spans))
    spans[m] = spans[m][0] - 1, spans[m][1]
    return _with_spans(program, stage, d, spans) if spans[m][0] >= 0 else None


@mutator("graph")
def sample_left_out_in_a_whole_module(program: Program, rng: random.Random) -> Program | None:
    """The last sample of the batch, in every stage of a task, and in its messages."""
    task = rng.choice(sorted(program.batches))
    last = program.batches[task]
    stages = tuple(
        replace(
            s,
            microbatches=tuple(
                tuple((a, b - 1) if b == last and b - a > 1 else (a, b) for a, b in spans)
                for spans in s.microbatches
            ),
        )
        if s.task == task
        else s
        for s in program.stages
    )
    if stages == program.stages:
        return None
    tasks = {e.index: program.stages[e.producer].task for e in program.edges}

    def shorter(item: Any) -> Any:
        if getattr(item, "edge", None) is None or tasks[item.edge] != task:
            return item
        if item.stop == last and item.stop - item.start > 1:
            return replace(item, stop=last - 1)
        return item

    rows = tuple(tuple(map(shorter, row)) for row in program.instructions)
    return replace(program, stages=stages, instructions=rows)
