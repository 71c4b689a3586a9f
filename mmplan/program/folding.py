"""Plans of very many replicas: neighbours that do the same are compiled as one.

Neighbouring replicas of a unit whose micro-batches have the same sizes hold neighbouring samples:
their k-th micro-batches together are one range. A *folded* plan has one replica in place of some
such neighbours, whose micro-batches are these ranges. It is a plan like any other, of the same
batch, and is compiled like any other. Each neighbour's row is the folded one's, with the messages
of its own samples. What comes after what in a folded program holds for each neighbour, so where
the folded program runs to its end the unfolded one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from mmplan.program.instructions import Instruction, Message
from mmplan.program.model import Graph, LossReduction, Program, Reduction, Stage
from mmplan.program.samples import RangeIndex, SampleRange
from mmplan.schema.plan import Plan, Unit

# Plans of more ranks are folded to about as many as follow. The compiler and the checks take about
# 20 microseconds an instruction, a rank some thousand instructions. Chosen by hand.
FOLDED_FROM = 16_384
FOLDED_TO = 2_048


def fold(plan: Plan, graph: Graph, neighbours: int) -> tuple[Plan, Graph] | None:
    """The plan and its graph with up to so many neighbouring replicas in one.

    The ranks are those of the first neighbours. The others are in no unit of the folded plan.

    Args:
        plan: the plan.
        graph: that it lowers to.
        neighbours: most replicas that become one.

    Returns:
        None where units share ranks or work in waves: what their ranks do depends on each other.
    """
    ranks = [rank for unit in plan.units for rank in unit.all_ranks]
    if plan.waves or len(ranks) > len(set(ranks)):
        return None
    runs = {unit.name: list(_runs(unit, neighbours)) for unit in plan.units}
    units = tuple(_folded(unit, runs[unit.name]) for unit in plan.units)
    stages = [
        replace(
            stage,
            ranks=tuple(stage.ranks[run[0]] for run in runs[stage.unit]),
            microbatches=tuple(_together(stage, run) for run in runs[stage.unit]),
            rounds=tuple(stage.rounds[run[0]] for run in runs[stage.unit]),
        )
        for stage in graph.stages
    ]
    return plan.model_copy(update={"units": units}), restricted(graph, stages)


def fold_large(plan: Plan, graph: Graph) -> tuple[Plan, Graph] | None:
    """A folded plan in place of one of very many ranks; None where the plan is compiled itself."""
    if plan.devices <= FOLDED_FROM:
        return None
    return fold(plan, graph, -(-plan.devices // FOLDED_TO))


def restricted(graph: Graph, stages: list[Stage]) -> Graph:
    """The graph with stages of fewer ranks; reductions are of those that are left.

    Updates are left out: no instruction differs with them.
    """
    kept = {rank for stage in stages for rank in stage.members}

    def left(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in kept)

    reductions: list[Reduction] = []
    for whole in graph.reductions:
        part = replace(whole, ranks=left(whole.ranks))
        if not isinstance(part, LossReduction):
            part = replace(part, contributors=left(part.contributors))
        reductions.append(part)
    losses = [replace(loss, ranks=left(loss.ranks)) for loss in graph.losses]
    return Graph(
        stages=stages, edges=graph.edges, losses=losses, ties=graph.ties, reductions=reductions
    )


def _runs(unit: Unit, neighbours: int) -> Iterator[tuple[int, ...]]:
    """The replicas that become one, in order."""
    for _, equal in groupby(range(unit.dp), key=lambda d: unit.microbatches[d]):
        run = tuple(equal)
        yield from (run[i : i + neighbours] for i in range(0, len(run), neighbours))


def _together(stage: Stage, run: Sequence[int]) -> tuple[SampleRange, ...]:
    """The micro-batches of neighbouring replicas, k-th ones as one."""
    first, last = stage.microbatches[run[0]], stage.microbatches[run[-1]]
    return tuple((a, b) for (a, _), (_, b) in zip(first, last, strict=True))


def _folded(unit: Unit, runs: Sequence[Sequence[int]]) -> Unit:
    return unit.model_copy(
        update={
            "dp": len(runs),
            "ranks": tuple(unit.ranks[run[0]] for run in runs),
            "samples": tuple(len(run) * unit.samples[run[0]] for run in runs),
            "microbatches": tuple(
                tuple(len(run) * size for size in unit.microbatches[run[0]]) for run in runs
            ),
        }
    )


def unfold(plan: Plan, graph: Graph, folded: Program) -> list[tuple[Instruction, ...]]:
    """The rows of all ranks of a plan, from those of its folded plan.

    Receives may stand in another order than the sends of their route.

    Args:
        plan: not folded.
        graph: of the plan.
        folded: program of the folded plan.
    """
    indices = [RangeIndex(stage.microbatches) for stage in graph.stages]
    rows: list[tuple[Instruction, ...]] = [()] * plan.devices
    kept = {rank for stage in folded.stages for rank in stage.members}
    for unit in plan.units:
        first: tuple[int, ...] = ()
        for d in range(unit.dp):
            ranks = unit.grid.replica(d)
            # The first of the neighbours is in the folded plan, the others follow it.
            first = ranks if ranks[0] in kept else first
            for rank, alike in zip(ranks, first, strict=True):
                row = folded.instructions[alike]
                rows[rank] = tuple(_unfolded(graph, indices, folded, rank, row))
    return rows


def _unfolded(
    graph: Graph,
    indices: Sequence[RangeIndex],
    folded: Program,
    rank: int,
    row: Sequence[Instruction],
) -> Iterator[Instruction]:
    for item in row:
        if not isinstance(item, Message):
            yield item
            continue
        edge = graph.edges[item.edge]
        other = edge.consumer if item.stage == edge.producer else edge.producer
        start, stop = _microbatch(graph.stages[item.stage], rank, item.mb)
        start, stop = max(start, item.start), min(stop, item.stop)
        _, t = folded.stages[other].place(item.peer)
        for span, d, _ in indices[other].overlapping((start, stop)) if start < stop else ():
            peer = graph.stages[other].ranks[d][t]
            yield Message(item.op, item.stage, item.mb, item.edge, peer, *span)


def _microbatch(stage: Stage, rank: int, mb: int) -> tuple[int, int]:
    return stage.microbatches[stage.place(rank)[0]][mb]
