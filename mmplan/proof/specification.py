"""What a workload asks a step to compute, made from the workload alone, and a program against it.

A step's loss is a sum over tasks and losses of an exact factor times the loss of some values. A
value is a term (:mod:`mmplan.proof.terms`): blocks applied in order to fields, elements and other
values. A program computes the workload's step where every loss of the workload has, in the
program, the same terms in the same places, the same factor and the same sync batches. Then the
gradients are the right ones as soon as each use of a value returns its gradient once, which
:mod:`mmplan.program.checks` shows.

How many blocks a module has is not in a workload. It comes from the profile of the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mmplan.program.model import (
    CrossSampleLoss,
    Edge,
    Loss,
    PerSampleLoss,
    Program,
    Source,
    Stage,
    Ties,
)
from mmplan.proof.terms import Term, Terms
from mmplan.schema.workload import InputSource, TaskView, Workload, exact, resolve_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecifiedLoss:
    """A term of the step's loss.

    Attributes:
        arguments: of the loss, in order.
        weight: the loss's times the task's.
        sync_batch: samples that it takes at once; None for a loss per sample.
    """

    arguments: tuple[Term, ...]
    weight: Fraction
    sync_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A step, as a workload asks for it.

    Attributes:
        terms: in which the losses' arguments are numbered.
        batches: samples of a step, by task.
        losses: by task and name.
        ties: of the modules, where the model's profile is known: by the module whose parameters
            they are, the blocks of each parameter that several blocks share.
    """

    terms: Terms
    batches: Mapping[str, int]
    losses: Mapping[tuple[str, str], SpecifiedLoss]
    ties: Ties | None


def specify(
    workload: Workload,
    blocks: Mapping[str, int],
    *,
    ties: Ties | None = None,
    tasks: Collection[str] | None = None,
) -> Specification:
    """The specification of some tasks of a workload.

    Args:
        workload: the workload.
        blocks: number of blocks of every module of these tasks.
        ties: of its modules' parameters, by module; None where they are not known.
        tasks: names; default all.
    """
    terms = Terms()
    views = {n: v for n, v in resolve_tasks(workload).items() if tasks is None or n in tasks}
    losses: dict[tuple[str, str], SpecifiedLoss] = {}
    for name, view in views.items():
        outputs = _outputs(terms, workload, view, blocks)
        for loss, sources in view.loss_inputs.items():
            losses[name, loss] = SpecifiedLoss(
                arguments=tuple(_argument(terms, name, source, outputs) for source in sources),
                weight=exact(workload.losses[loss].weight) * exact(view.weight),
                sync_batch=view.sync_batches.get(loss),
            )
    owners = {workload.modules[m].share or m for view in views.values() for m in view.modules}
    return Specification(
        terms=terms,
        batches={name: view.batch for name, view in views.items()},
        losses=losses,
        ties=None if ties is None else {m: ties[m] for m in sorted(owners) if ties.get(m)},
    )


def _outputs(
    terms: Terms, workload: Workload, view: TaskView, blocks: Mapping[str, int]
) -> dict[str, Term]:
    """The output of each of a task's modules."""
    outputs: dict[str, Term] = {}
    for module, sources in view.inputs.items():
        outputs[module] = terms.blocks(
            workload.modules[module].share or module,
            (0, blocks[module]),
            _trained(view.frozen[module], blocks[module]),
            tuple(_argument(terms, view.name, source, outputs) for source in sources),
        )
    return outputs


def _argument(terms: Terms, task: str, source: InputSource, outputs: Mapping[str, Term]) -> Term:
    if source.module is None:
        return terms.field(task, source.field)
    return terms.element(outputs[source.module], source.element)


def _trained(frozen: bool | tuple[tuple[int, int], ...], blocks: int) -> list[tuple[int, int]]:
    """The blocks that train, one by one."""
    if isinstance(frozen, bool):
        return [] if frozen else [(0, blocks)]
    return [
        (block, block + 1)
        for block in range(blocks)
        if not any(low <= block < high for low, high in frozen)
    ]


def specification_faults(program: Program, asked: Specification) -> Iterator[str]:
    """Where the stages and losses of a program compute something else than is specified.

    Each fault is one line. Without one, the program's loss is the specified function of the data
    and the parameters, and gradients may flow wherever they are needed.
    """
    yield from _batch_faults(program, asked)
    yield from _tie_faults(program, asked)
    # Terms of the program get higher numbers, where the workload has none that are equal.
    known = len(asked.terms.forms)
    faults = list(_reference_faults(program))
    order = [] if faults else _producers_first(program)
    if not faults and len(order) < len(program.stages):
        faults = ["stages take each other's output in a circle"]
    yield from faults
    if not faults:
        outputs = _computed(program, asked.terms, order)
        yield from _loss_faults(program, asked, outputs)
        for stage in program.stages:
            if outputs[stage.index] >= known:
                yield (
                    f"stage {stage.index} ({stage.unit}): computes "
                    f"{asked.terms.text(outputs[stage.index])}, which the workload does not"
                )
        yield from _host_faults(program)
        yield from _flow_faults(program, order)


def _batch_faults(program: Program, asked: Specification) -> Iterator[str]:
    for task in sorted({*program.batches, *asked.batches}):
        has, wanted = program.batches.get(task, 0), asked.batches.get(task, 0)
        if has != wanted:
            yield f"task {task}: a step has {has} samples, the workload's {wanted}"


def _tie_faults(program: Program, asked: Specification) -> Iterator[str]:
    if asked.ties is None:
        return
    for owner in sorted({*program.ties, *asked.ties}):
        has = sorted(map(tuple, program.ties.get(owner, ())))
        wanted = sorted(map(tuple, asked.ties.get(owner, ())))
        if has != wanted:
            yield f"module {owner}: blocks that share a parameter: {has}, in its profile {wanted}"


def _reference_faults(program: Program) -> Iterator[str]:
    """Parts of the graph that name what is not there."""
    parts: tuple[Sequence[Stage | Edge | Loss], ...]
    parts = program.stages, program.edges, program.losses
    for kind, items in zip(("stage", "edge", "loss"), parts, strict=True):
        for place, item in enumerate(items):
            if item.index != place:
                yield f"{kind} {place}: is called {item.index}"
    stages = range(len(program.stages))
    for edge in program.edges:
        if edge.producer not in stages or edge.consumer not in stages:
            yield f"edge {edge.index}: there are {len(stages)} stages"
    for stage in program.stages:
        where = f"stage {stage.index} ({stage.unit})"
        if stage.blocks[0] >= stage.blocks[1]:
            yield f"{where}: runs no block"
        if any(index >= len(program.losses) for index in (*stage.hosted, *stage.syncs)):
            yield f"{where}: there are {len(program.losses)} losses"
        yield from _source_faults(program, where, stage.index, stage.inputs)
    for loss in program.losses:
        where = f"loss {loss.index} ({loss.name})"
        taken = [loss.host] if isinstance(loss, PerSampleLoss) else loss.stages
        if any(index not in stages for index in taken):
            yield f"{where}: there are {len(stages)} stages"
        elif isinstance(loss, PerSampleLoss):
            yield from _source_faults(program, where, loss.host, loss.inputs)


def _source_faults(
    program: Program, where: str, consumer: int, sources: Sequence[Source]
) -> Iterator[str]:
    for source in sources:
        if source.edge is None:
            continue
        if source.edge >= len(program.edges):
            yield f"{where}: there is no edge {source.edge}"
        elif program.edges[source.edge].consumer != consumer:
            yield f"{where}: edge {source.edge} does not lead to stage {consumer}"


def _producers_first(program: Program) -> list[Stage]:
    """Stages, each after those that feed it; without those that are in a circle."""
    waits_for = Counter(edge.consumer for edge in program.edges)
    outgoing: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in program.edges:
        outgoing[edge.producer].append(edge)
    ready = [stage for stage in program.stages if not waits_for[stage.index]]
    for stage in ready:
        for edge in outgoing[stage.index]:
            waits_for[edge.consumer] -= 1
            if not waits_for[edge.consumer]:
                ready.append(program.stages[edge.consumer])
    return ready


def _computed(program: Program, terms: Terms, order: Sequence[Stage]) -> dict[int, Term]:
    """The output of each stage."""
    outputs: dict[int, Term] = {}
    for stage in order:
        outputs[stage.index] = terms.blocks(
            stage.owner,
            stage.blocks,
            stage.trainable,
            tuple(_value(program, terms, stage, source, outputs) for source in stage.inputs),
        )
    return outputs


def _value(
    program: Program,
    terms: Terms,
    stage: Stage,
    source: Source,
    outputs: Mapping[int, Term],
) -> Term:
    """An argument of a stage, or of a loss that it hosts."""
    if source.edge is not None:
        edge = program.edges[source.edge]
        return terms.element(outputs[edge.producer], edge.element)
    if source.own:
        return terms.element(outputs[stage.index], source.element)
    return terms.field(stage.task, source.field)


def _arguments(
    program: Program, terms: Terms, loss: Loss, outputs: Mapping[int, Term]
) -> tuple[Term, ...]:
    if isinstance(loss, PerSampleLoss):
        host = program.stages[loss.host]
        return tuple(_value(program, terms, host, source, outputs) for source in loss.inputs)
    return tuple(
        terms.field(loss.task, item.field)
        if item.stage is None
        else terms.element(outputs[item.stage], item.element)
        for item in loss.inputs
    )


def _loss_faults(
    program: Program, asked: Specification, outputs: Mapping[int, Term]
) -> Iterator[str]:
    """Losses that are missing, doubled, or of other values than the specified ones."""
    found = Counter((loss.task, loss.name) for loss in program.losses)
    for task, name in asked.losses:
        if found[task, name] != 1:
            yield f"loss {name} of task {task}: stands {found[task, name]} times instead of once"
    for loss in program.losses:
        where = f"loss {loss.index} ({loss.name})"
        wanted = asked.losses.get((loss.task, loss.name))
        if wanted is None:
            yield f"{where}: task {loss.task} of the workload has no such loss"
            continue
        size = loss.sync_batch if isinstance(loss, CrossSampleLoss) else None
        if size != wanted.sync_batch:
            yield f"{where}: has {_taken(size)}, the workload has {_taken(wanted.sync_batch)}"
        parts = asked.batches[loss.task] // (wanted.sync_batch or 1)
        if loss.weight / loss.divisor != wanted.weight / parts:
            yield (
                f"{where}: its factor is {loss.weight}/{loss.divisor}, the workload's is "
                f"{wanted.weight}/{parts}"
            )
        terms = asked.terms
        has = _arguments(program, terms, loss, outputs)
        if len(has) != len(wanted.arguments):
            yield f"{where}: takes {len(has)} arguments, in the workload {len(wanted.arguments)}"
            continue
        for position, (one, other) in enumerate(zip(has, wanted.arguments, strict=True)):
            if one != other:
                yield (
                    f"{where}: argument {position} is {terms.text(one)}, in the workload "
                    f"{terms.text(other)}"
                )


def _taken(sync_batch: int | None) -> str:
    return "no sync batches" if sync_batch is None else f"sync batches of {sync_batch} samples"


def _host_faults(program: Program) -> Iterator[str]:
    """Stages that do not know of a loss of theirs, or know of another's."""
    for loss in program.losses:
        stages = (loss.host,) if isinstance(loss, PerSampleLoss) else loss.stages
        for stage in program.stages:
            known = stage.hosted if isinstance(loss, PerSampleLoss) else stage.syncs
            if known.count(loss.index) != int(stage.index in stages):
                yield (
                    f"stage {stage.index} ({stage.unit}): loss {loss.index} ({loss.name}) stands "
                    f"{known.count(loss.index)} times in it, its values are of stages "
                    f"{list(stages)}"
                )


def _flow_faults(program: Program, order: Sequence[Stage]) -> Iterator[str]:
    """Gradients that are needed, and that the program does not carry."""
    through = {source.edge for stage in program.stages for source in stage.inputs}
    to_losses = {
        source.edge
        for loss in program.losses
        if isinstance(loss, PerSampleLoss)
        for source in loss.inputs
    }
    trains = {stage.index: bool(stage.trainable) for stage in program.stages}
    reaches = {s.index: bool(s.syncs) or bool(s.hosted) for s in program.stages}
    position = {stage.index: place for place, stage in enumerate(order)}
    for edge in sorted(program.edges, key=lambda e: position[e.consumer]):
        trains[edge.consumer] |= trains[edge.producer]
    for edge in sorted(program.edges, key=lambda e: -position[e.producer]):
        passes = edge.index in through and reaches[edge.consumer]
        reaches[edge.producer] |= passes or edge.index in to_losses
    for edge in program.edges:
        passes = edge.index in through and reaches[edge.consumer]
        used = passes or edge.index in to_losses
        if trains[edge.producer] and used and not edge.carries_gradient:
            yield f"edge {edge.index}: carries no gradient, stage {edge.producer} needs one"
        if edge.carries_gradient and not program.stages[edge.producer].has_backward:
            yield f"edge {edge.index}: carries a gradient, stage {edge.producer} has no backward"
    inward = {edge.consumer for edge in program.edges if edge.carries_gradient}
    for stage in program.stages:
        needed = (trains[stage.index] and reaches[stage.index]) or bool(stage.hosted)
        if needed and not stage.has_backward:
            yield f"stage {stage.index} ({stage.unit}): has no backward, and needs one"
        if stage.index in inward and not stage.input_gradient:
            yield f"stage {stage.index} ({stage.unit}): makes no gradient of its inputs"
