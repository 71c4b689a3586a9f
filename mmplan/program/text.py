"""A whole program as text: its stages, edges, losses and reductions, then a row per rank."""

from __future__ import annotations

from mmplan.program.instructions import format_row
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Edge,
    Loss,
    Program,
    Reduction,
    Stage,
    TieReduction,
)
from mmplan.program.shards import ShardSum


def format_program(program: Program) -> str:
    """Comment lines that start with ``#``, then ``rank N: instructions``; ends in a newline."""
    batches = ", ".join(f"{task} {batch}" for task, batch in program.batches.items())
    lines = [f"# program {program.name}: {program.num_ranks} ranks, batch of {batches}"]
    lines += map(_stage, program.stages)
    lines += map(_edge, program.edges)
    lines += map(_loss, program.losses)
    lines += map(_reduction, program.reductions)
    for rank, row in enumerate(program.instructions):
        lines.append(f"rank {rank}: {format_row(row)}".rstrip())
    return "\n".join(lines) + "\n"


def _span(blocks: tuple[int, int]) -> str:
    return f"[{blocks[0]},{blocks[1]})"


def _stage(stage: Stage) -> str:
    grid = " ".join("+".join(map(str, group)) for group in stage.ranks)
    sizes = " ".join(_sizes(spans) for spans in stage.microbatches)
    trained = "".join(map(_span, stage.trainable)) or "none"
    return (
        f"# stage {stage.index}: {stage.task}.{stage.unit} chunk {stage.chunk}, blocks "
        f"{_span(stage.blocks)} of {stage.owner}, trains {trained}, ranks {grid}, "
        f"micro-batches {sizes}{', split backward' if stage.split else ''}"
        f"{', gathers its blocks' if stage.gathers else ''}"
    )


def _sizes(spans: tuple[tuple[int, int], ...]) -> str:
    """Sizes, runs shortened: 4x8 is four micro-batches of 8."""
    runs: list[list[int]] = []
    for start, stop in spans:
        if runs and runs[-1][1] == stop - start:
            runs[-1][0] += 1
        else:
            runs.append([1, stop - start])
    return "+".join(f"{count}x{size}" for count, size in runs)


def _edge(edge: Edge) -> str:
    element = "" if edge.element is None else f" element {edge.element}"
    shares = ", in shares" if edge.scattered else ""
    gradient = "gradient back" if edge.carries_gradient else "no gradient"
    gradient += " in shares" if edge.scattered_back else ""
    return (
        f"# edge {edge.index}: stage {edge.producer}{element} > {edge.consumer}{shares}, {gradient}"
    )


def _loss(loss: Loss) -> str:
    if isinstance(loss, CrossSampleLoss):
        kind = f"sync batch {loss.sync_batch}"
    else:
        kind = f"in stage {loss.host}"
    ranks, weight = " ".join(map(str, loss.ranks)), float(loss.weight)
    return f"# loss {loss.index}: {loss.task}.{loss.name} x {weight:g}, {kind}, ranks {ranks}"


def _reduction(reduction: Reduction) -> str:
    what = f"loss {reduction.owner}"
    if isinstance(reduction, BlockReduction):
        what = f"blocks {_span(reduction.blocks)} of {reduction.owner}{_shards(reduction)}"
    elif isinstance(reduction, TieReduction):
        blocks = " ".join(map(str, reduction.blocks))
        what = f"what blocks {blocks} of {reduction.owner} share{_shards(reduction)}"
    return f"# reduction {reduction.index}: {what}, ranks {' '.join(map(str, reduction.ranks))}"


def _shards(reduction: ShardSum) -> str:
    """The part of the parameters that is summed."""
    if reduction.parameters == "whole":
        return f" uncut, from ranks {' '.join(map(str, reduction.contributors))}"
    first, end = reduction.shards
    if reduction.tp == 1:
        return ""
    name = f"shard {first}" if end == first + 1 else f"shards {_span(reduction.shards)}"
    return f" {name}/{reduction.tp}" + (" cut" if reduction.parameters == "cut" else "")
