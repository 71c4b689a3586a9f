"""Rows as a certificate has them: what a rank executes, in words that fit its whole class.

A canonical row names stages, micro-batches, edges, losses and sums of the graph, and no rank. A
message carries samples that are counted from the start of the row's own micro-batch. Its other end
is implied: the replica of the edge's other stage that holds these samples, and in it

- a rank with tp index t of n sends to the ranks t, t + n, t + 2 n, ... of the receiving group;
- a rank with tp index t receives from rank t mod n of the sending group of n.

So each rank of the receiving group gets a message from exactly one rank. A message to another rank
stands in the row with that rank and an exclamation mark, which no certificate has.

The hash of a row covers the graph too: stages with blocks and ranks, edges, losses with weights,
sums, and the samples of every micro-batch. Ranks with equal hashes execute the same row in their
own places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from mmplan.errors import RunFailedError
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Graph,
    Loss,
    LossInput,
    LossReduction,
    Program,
    Reduction,
    Source,
    Stage,
    TieReduction,
)
from mmplan.program.samples import RangeIndex
from mmplan.program.shards import Ranks
from mmplan.schema.base import Json


def row_hash(program: Program, rank: int) -> str:
    """SHA-256 of the canonical row of a rank of a whole program, in hex."""
    sums = sum_indices(program.reductions)
    return hash_row(hash_graph(describe_graph(program)), RowWriter(program, sums).row(rank))


def check_row(program: Program, rank: int, row_sha256: str) -> None:
    """Refuse to execute another row than the one that was proven.

    Args:
        program: of a whole plan, that the rank has compiled.
        rank: of the program.
        row_sha256: of the row that the plan's certificate has for the rank.

    Raises:
        RunFailedError: the rank's row is another.
    """
    if row_hash(program, rank) != row_sha256:
        raise RunFailedError(
            f"rank {rank} would execute another row than the plan's certificate has for it",
            hint="install one version of mmplan on all machines; mmplan check PLAN proves anew",
        )


def hash_graph(graph: Json) -> str:
    """SHA-256 of a described graph, in hex."""
    text = json.dumps(graph, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def hash_row(graph_sha256: str, row: str) -> str:
    """SHA-256 of a canonical row of a graph, in hex."""
    return hashlib.sha256(f"{graph_sha256}\n{row}".encode()).hexdigest()


def describe_graph(graph: Graph | Program) -> Json:
    """The stages, edges, losses and sums of a whole plan as plain data."""
    microbatches: Json = {}
    for stage in graph.stages:
        # Chunks of a unit have the same ones. Others would stand under a name that no unit has.
        known = microbatches.setdefault(stage.unit, stage.microbatches)
        if known != stage.microbatches:
            microbatches[f"{stage.unit}, chunk {stage.chunk}"] = stage.microbatches
    return {
        "stages": [
            {
                "task": stage.task,
                "unit": stage.unit,
                "module": stage.module,
                "owner": stage.owner,
                "chunk": stage.chunk,
                "blocks": stage.blocks,
                "trained": [b for first, end in stage.trainable for b in range(first, end)],
                "inputs": [_term(graph, source, stage) for source in stage.inputs],
                "ranks": stage.ranks,
                **({"gathers": True} if stage.gathers else {}),
            }
            for stage in graph.stages
        ],
        "edges": [
            {
                "producer": edge.producer,
                "consumer": edge.consumer,
                "term": _output(graph, edge.producer, edge.element),
                "gradient": edge.carries_gradient,
                "shares": edge.scattered,
                "gradient_shares": edge.scattered_back,
            }
            for edge in graph.edges
        ],
        "losses": [_loss(graph, loss) for loss in graph.losses],
        "sums": _sums(graph.reductions),
        "microbatches": microbatches,
    }


def _loss(graph: Graph | Program, loss: Loss) -> Json:
    is_cross = isinstance(loss, CrossSampleLoss)
    host = None if is_cross else graph.stages[loss.host]
    return {
        "name": loss.name,
        "task": loss.task,
        "weight": float(loss.weight),
        "sync_batch": loss.sync_batch if is_cross else None,
        "inputs": [_term(graph, source, host) for source in loss.inputs],
        "stages": [
            stage.index
            for stage in graph.stages
            if loss.index in (stage.syncs if is_cross else stage.hosted)
        ],
        "ranks": loss.ranks,
    }


def _output(graph: Graph | Program, index: int, element: int | None) -> str:
    """The name of a stage's output: its module, or the blocks so far, and an element of it."""
    stage = graph.stages[index]
    end = stage.blocks[1]
    same = (s for s in graph.stages if (s.task, s.module) == (stage.task, stage.module))
    is_last = end == max(s.blocks[1] for s in same)
    name = stage.module if is_last else f"{stage.module}[0,{end})"
    return name if element is None else f"{name}.{element}"


def _term(graph: Graph | Program, source: Source | LossInput, host: Stage | None) -> str | None:
    """The name of a value that a stage or a loss takes, as the workload would write it."""
    if source.field is not None:
        return f"field:{source.field}"
    if isinstance(source, LossInput):
        return None if source.stage is None else _output(graph, source.stage, source.element)
    if source.edge is not None:
        edge = graph.edges[source.edge]
        return _output(graph, edge.producer, edge.element)
    return _output(graph, host.index, source.element) if source.own and host else None


def _sum_of(reduction: Reduction) -> tuple[object, ...]:
    """Equal for the reductions of a sum: the shards that groups of one size cut blocks into."""
    if not isinstance(reduction, LossReduction):
        alone = None if reduction.parameters == "all" else reduction.index
        return reduction.owner, reduction.blocks, type(reduction), alone
    return reduction.owner, reduction.index


def sum_indices(reductions: Iterable[Reduction]) -> list[int]:
    """The index of each reduction's sum."""
    known: dict[tuple[object, ...], int] = {}
    return [known.setdefault(_sum_of(reduction), len(known)) for reduction in reductions]


def _sums(reductions: Sequence[Reduction]) -> list[Json]:
    sums: list[Json] = []
    for reduction, index in zip(reductions, sum_indices(reductions), strict=True):
        part: Json = {"ranks": reduction.ranks}
        if isinstance(reduction, LossReduction):
            own: Json = {"loss": reduction.owner}
        else:
            part = {"tp": reduction.tp, "shards": reduction.shards, **part}
            part["contributors"] = reduction.contributors
            named = "tie" if isinstance(reduction, TieReduction) else "owner"
            own = {named: reduction.owner, "blocks": reduction.blocks}
            own["parameters"] = reduction.parameters
            if isinstance(reduction, BlockReduction) and reduction.rounds is not None:
                own["rounds"] = reduction.rounds
        if index == len(sums):
            sums.append({**own, "parts": []})
        sums[index]["parts"].append(part)
    return sums


class RowWriter:
    """Writes the canonical rows of a program.

    Args:
        program: of a whole plan, or of some of its replicas.
        sums: the index of each of its reductions' sum.
    """

    def __init__(self, program: Program, sums: Sequence[int]) -> None:
        self._program, self._sums = program, sums
        # Of a stage: by samples, the group that holds them.
        self._indices: dict[int, RangeIndex] = {}

    def row(self, rank: int) -> str:
        """The canonical row of a rank; empty where it is idle."""
        row = self._program.instructions[rank]
        places = {stage.index: stage.place(rank) for stage in self._program.stages_of(rank)}
        tokens: list[str] = []
        position = 0
        while position < len(row):
            item = row[position]
            taken = 1
            if isinstance(item, Message):
                token, taken = self._message(row, position, item, places)
            elif isinstance(item, Collective):
                index = item.index if item.op is Op.COUNT else self._sums[item.index]
                token = f"{item.op}:{index}.{item.mb or 0}"
            elif isinstance(item, Compute):
                token = f"{item.op}:{item.stage}.{item.mb}"
            else:
                token = str(item)
            tokens.append(token)
            position += taken
        return " ".join(tokens)

    def _message(
        self,
        row: Sequence[Instruction],
        position: int,
        item: Message,
        places: Mapping[int, tuple[int, int]],
    ) -> tuple[str, int]:
        """A token, and the instructions that it stands for: a rank sends to several of a group."""
        own = self._program.stages[item.stage]
        d, t = places[item.stage]
        first = own.microbatches[d][item.mb][0]
        group = self._group(item)
        peers = group[t :: own.tp] if item.is_send else group[t % len(group) :][:1] if group else ()
        sent = row[position : position + len(peers)]
        if [_end(other) for other in sent] != [_end(item, peer) for peer in peers] or not peers:
            return f"{item}!", 1
        span = f"{item.start - first}.{item.stop - first}"
        return f"{item.op}:{item.stage}.{item.mb}.{item.edge}.{span}", len(peers)

    def _group(self, item: Message) -> Ranks:
        """The group at a message's other end; none where no replica holds all of its samples."""
        edge = self._program.edges[item.edge]
        other = edge.consumer if edge.producer == item.stage else edge.producer
        stage = self._program.stages[other]
        index = self._indices.get(other)
        if index is None:
            index = self._indices[other] = RangeIndex(stage.microbatches)
        span = item.start, item.stop
        found = [d for held, d, _ in index.overlapping(span) if held == span]
        return stage.ranks[found[0]] if found else ()


def _end(item: Instruction, peer: int | None = None) -> tuple[object, ...]:
    """Equal for messages of the same samples to the same rank."""
    if not isinstance(item, Message):
        return ()
    to = item.peer if peer is None else peer
    return item.op, item.stage, item.mb, item.edge, item.start, item.stop, to
