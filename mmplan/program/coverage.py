"""Proof that a program computes the whole step: every sample, every gradient, once.

The program is run on intervals instead of tensors, in an order in which its instructions
can happen. For each micro-batch of a stage the gradient of its output is a sum over losses
of intervals of samples, each with the number of times that it is counted:

- a per-sample loss adds its micro-batch once at the forward that hosts it;
- a cross-sample loss adds the samples of its sync batch once at SYNC_WAIT, if each of its
  features was there at SYNC_START;
- SEND_B carries the part that its range names, and what never arrived is never added;
- a backward adds the sum to the gradient of its rank's parameters (of a split one, ``I``
  makes the sum and ``W`` adds it), REDUCE adds ranks.

In the end each shard of trainable parameters must count every sample of the batch exactly
as often as there are paths from it to the loss in the stage graph, on every rank that
holds it. A loss's weight is a constant factor of its intervals, so counting each sample
that often means that it has the right weight. All is linear in the number of messages but
for sorting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm

from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.intervals import Piece, cut, first_deviation, normal
from mmplan.program.model import Edge, Program, Reduction, Stage
from mmplan.program.structure import touching, untiled, where
from mmplan.program.wiring import Wiring

# Loss to the samples that it counts.
_Gradient = dict[int, list[Piece]]
# (rank, stage, micro-batch)
_Held = tuple[int, int, int]


def coverage_faults(
    program: Program, wiring: Wiring, order: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """Samples that enter a stage, or reach a gradient, not exactly once.

    Args:
        program: one whose references are right (:func:`structure.reference_faults`).
        wiring: the program's.
        order: all (rank, position), each after what it waits for.
    """
    flow = _Flow(program, wiring)
    for rank, position in order:
        flow.run(rank, position)
    yield from flow.faults
    yield from flow.stage_faults()
    yield from _ParameterCheck(program, flow).faults()


def count_paths(program: Program) -> list[dict[int, int]]:
    """Per stage: loss index to the paths by which its gradient reaches the stage's output."""
    paths: list[dict[int, int]] = [{} for _ in program.stages]
    outgoing: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in program.edges:
        outgoing[edge.producer].append(edge)
    # Consumers have higher indices than producers.
    for stage in reversed(program.stages):
        total: defaultdict[int, int] = defaultdict(int)
        for loss in stage.syncs:
            total[loss] += 1
        for loss in stage.hosted:
            total[loss] += any(source.own for source in program.losses[loss].host_inputs)
        for edge in outgoing[stage.index]:
            for loss, times in edge_paths(program, edge, paths[edge.consumer]).items():
                total[loss] += times
        paths[stage.index] = {loss: times for loss, times in total.items() if times}
    return paths


def edge_paths(program: Program, edge: Edge, consumer_paths: dict[int, int]) -> dict[int, int]:
    """Paths that come back along an edge, through the consumer's blocks and its losses."""
    consumer = program.stages[edge.consumer]
    through, direct = _uses(program, consumer, edge)
    total = dict(consumer_paths) if through else {}
    for loss in direct:
        total[loss] = total.get(loss, 0) + 1
    return total


def _uses(program: Program, consumer: Stage, edge: Edge) -> tuple[bool, list[int]]:
    """Whether an edge enters the consumer's blocks, and which hosted losses take it."""
    through = any(source.edge == edge.index for source in consumer.inputs)
    direct = [
        loss
        for loss in consumer.hosted
        if any(source.edge == edge.index for source in program.losses[loss].host_inputs)
    ]
    return through, direct


class _Flow:
    """The state of the run on intervals."""

    def __init__(self, program: Program, wiring: Wiring) -> None:
        self.faults: list[str] = []
        # (rank, stage) to the gradient of its parameters, with one unsorted list per loss.
        self.gradients: defaultdict[tuple[int, int], _Gradient] = defaultdict(
            lambda: defaultdict(list)
        )
        # (reduction, rank) to the lengths of those lists when it was reduced.
        self.reduced: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        self._program = program
        self._wiring = wiring
        self._uses = {
            edge.index: _uses(program, program.stages[edge.consumer], edge)
            for edge in program.edges
        }
        self._entered: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._done: dict[_Held, tuple[int, int]] = {}
        self._output: defaultdict[_Held, _Gradient] = defaultdict(lambda: defaultdict(list))
        self._backward: dict[_Held, _Gradient] = {}
        self._samples: dict[int, tuple[int, int]] = {}
        self._carried: dict[int, _Gradient] = {}
        # (loss, sync batch) to the features brought: (stage, tp index) to ranges.
        self._features: defaultdict[
            tuple[int, int], defaultdict[tuple[int, int], list[tuple[int, int]]]
        ] = defaultdict(lambda: defaultdict(list))
        self._checked: set[tuple[int, int]] = set()
        self._places = [
            {s.index: p for s in program.stages if (p := s.place(rank)) is not None}
            for rank in range(program.num_ranks)
        ]

    def run(self, rank: int, position: int) -> None:
        """Interpret one instruction."""
        item = self._program.instructions[rank][position]
        if isinstance(item, Compute):
            if item.op is Op.FORWARD:
                self._run_forward(rank, position, item)
            elif item.op is Op.WEIGHT:
                self._add_to_parameters((rank, item.stage, item.mb))
            else:
                self._run_backward(rank, position, item)
        elif isinstance(item, Message):
            if item.op is Op.SEND_F:
                self._send_forward(rank, position, item)
            elif item.op is Op.SEND_B:
                self._send_backward(rank, position, item)
        elif isinstance(item, Sync):
            if item.op is Op.SYNC_START:
                self._start(rank, item)
            else:
                self._wait(rank, position, item)
        elif isinstance(item, Collective) and item.op is Op.REDUCE:
            self._reduce(rank, self._program.reductions[item.index])

    def _span(self, rank: int, stage: int, mb: int) -> tuple[int, int]:
        return self._program.stages[stage].microbatches[self._places[rank][stage][0]][mb]

    def _run_forward(self, rank: int, position: int, item: Compute) -> None:
        stage = self._program.stages[item.stage]
        span = self._span(rank, item.stage, item.mb)
        arrived: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for message in self._wiring.needs[rank].get(position, ()):
            if message in self._samples:
                arrived[self._wiring.messages[message][0]].append(self._samples[message])
        sources = [*stage.inputs]
        for loss in stage.hosted:
            sources += self._program.losses[loss].host_inputs
        for edge in sorted({s.edge for s in sources if s.edge is not None}):
            fault = untiled(arrived[edge], span)
            if fault:
                at = where(self._program, rank, position)
                self.faults.append(f"{at}: the inputs that arrive by edge {edge} {fault}")
        held = rank, item.stage, item.mb
        self._done[held] = span
        self._entered[item.stage, self._places[rank][item.stage][1]].append(span)
        for loss in stage.hosted:
            if any(source.own for source in self._program.losses[loss].host_inputs):
                self._output[held][loss].append((*span, 1))

    def _run_backward(self, rank: int, position: int, item: Compute) -> None:
        held = rank, item.stage, item.mb
        total = self._output[held]
        for message in self._wiring.needs[rank].get(position, ()):
            for loss, pieces in self._carried.pop(message, {}).items():
                total[loss] += pieces
        self._backward[held] = {loss: normal(pieces) for loss, pieces in total.items()}
        if item.op is Op.BACKWARD:
            self._add_to_parameters(held)

    def _add_to_parameters(self, held: _Held) -> None:
        sums = self.gradients[held[0], held[1]]
        for loss, pieces in self._backward.get(held, {}).items():
            sums[loss] += pieces

    def _message(self, rank: int, position: int) -> int:
        return self._wiring.arg[rank][position]

    def _send_forward(self, rank: int, position: int, item: Message) -> None:
        """What arrives is the part of the range that the sender has computed."""
        span = self._done.get((rank, item.stage, item.mb))
        if span is not None and span[0] < item.stop and item.start < span[1]:
            part = max(span[0], item.start), min(span[1], item.stop)
            self._samples[self._message(rank, position)] = part

    def _send_backward(self, rank: int, position: int, item: Message) -> None:
        gradient = self._backward.get((rank, item.stage, item.mb))
        if gradient is None:
            return
        through, direct = self._uses[item.edge]
        carried: _Gradient = {}
        if through:
            carried = {k: cut(pieces, item.start, item.stop) for k, pieces in gradient.items()}
        for loss in direct:
            carried.setdefault(loss, []).append((item.start, item.stop, 1))
        self._carried[self._message(rank, position)] = carried

    def _local_parts(self, rank: int, item: Sync) -> Iterator[tuple[_Held, tuple[int, int]]]:
        """Micro-batches of the sync's stages on a rank, and their part of the sync batch."""
        size = self._program.losses[item.loss].sync_batch or 0
        first, end = item.batch * size, (item.batch + 1) * size
        for index, (d, _) in self._places[rank].items():
            stage = self._program.stages[index]
            if item.loss not in stage.syncs:
                continue
            spans = stage.microbatches[d]
            for mb in touching(spans, first, end):
                yield (rank, index, mb), (max(spans[mb][0], first), min(spans[mb][1], end))

    def _start(self, rank: int, item: Sync) -> None:
        for held, part in self._local_parts(rank, item):
            if held in self._done:
                place = held[1], self._places[rank][held[1]][1]
                self._features[item.loss, item.batch][place].append(part)

    def _wait(self, rank: int, position: int, item: Sync) -> None:
        key = item.loss, item.batch
        if key not in self._checked:
            self._checked.add(key)
            self._check_features(rank, position, item)
        for held, part in self._local_parts(rank, item):
            if held in self._done:
                self._output[held][item.loss].append((*part, 1))

    def _check_features(self, rank: int, position: int, item: Sync) -> None:
        loss = self._program.losses[item.loss]
        size = loss.sync_batch or 0
        whole = item.batch * size, (item.batch + 1) * size
        for index in sorted({x.stage for x in loss.sync_inputs if x.stage is not None}):
            for t in range(self._program.stages[index].tp):
                fault = untiled(self._features[item.loss, item.batch][index, t], whole)
                if fault:
                    at = where(self._program, rank, position)
                    self.faults.append(f"{at}: the features of stage {index} {fault}")

    def _reduce(self, rank: int, reduction: Reduction) -> None:
        self.reduced[reduction.index, rank] = {
            (stage, loss): len(pieces)
            for stage in self._places[rank]
            for loss, pieces in self.gradients[rank, stage].items()
        }

    def stage_faults(self) -> Iterator[str]:
        """Samples that do not enter a stage exactly once."""
        for stage in self._program.stages:
            for t in range(stage.tp):
                spans = self._entered[stage.index, t]
                fault = untiled(spans, (0, self._program.batches[stage.task]))
                if fault:
                    shard = f", tp shard {t}" if stage.tp > 1 else ""
                    yield (
                        f"stage {stage.index} ({stage.unit}{shard}): the micro-batches that "
                        f"enter it {fault}"
                    )


class _ParameterCheck:
    """What every shard of trainable parameters has counted after the reductions."""

    def __init__(self, program: Program, flow: _Flow) -> None:
        self._program = program
        self._flow = flow
        self._paths = count_paths(program)
        self._known: dict[tuple[object, ...], list[str]] = {}

    def faults(self) -> Iterator[str]:
        for owner in dict.fromkeys(stage.owner for stage in self._program.stages):
            stages = [s for s in self._program.stages if s.owner == owner]
            reductions = [
                r for r in self._program.reductions if r.kind == "blocks" and r.owner == owner
            ]
            spans = [s.blocks for s in stages] + [r.blocks for r in reductions]
            spans += [span for s in stages for span in s.trainable]
            for a, b in pairwise(sorted({x for span in spans for x in span})):
                holders = [s for s in stages if _inside(a, b, s.blocks)]
                trained = [s for s in holders if any(_inside(a, b, t) for t in s.trainable)]
                if trained:
                    covering = [r for r in reductions if _inside(a, b, r.blocks)]
                    yield from self._segment_faults((a, b), holders, trained, covering)

    def _segment_faults(
        self,
        blocks: tuple[int, int],
        holders: Sequence[Stage],
        trained: Sequence[Stage],
        reductions: Sequence[Reduction],
    ) -> Iterator[str]:
        """Faults of a range of blocks with one set of holders."""
        groups = list(dict.fromkeys(group for s in holders for group in s.ranks))
        tp = lcm(*map(len, groups), *(r.tp for r in reductions))
        ends = {i * (tp // len(g)) for g in groups for i in range(len(g) + 1)}
        ends |= {end * (tp // r.tp) for r in reductions for end in r.shards}
        name = f"blocks [{blocks[0]},{blocks[1]}) of {trained[0].owner}"
        for part in pairwise(sorted(ends)):
            ranks = sorted({group[part[0] * len(group) // tp] for group in groups})
            within = [r for r in reductions if _covers(r, part, tp)]
            for kind in ("cut", "whole"):
                sums = [r for r in within if r.parameters in ("all", kind)]
                what = f"{name}{_part_name(part, tp, kind, sums)}"
                yield from self._part_faults(what, kind, (part, tp), ranks, trained, sums)

    def _part_faults(
        self,
        what: str,
        kind: str,
        part: tuple[tuple[int, int], int],
        ranks: Sequence[int],
        trained: Sequence[Stage],
        sums: Sequence[Reduction],
    ) -> Iterator[str]:
        """Faults of the parameters of one part, cut or whole, on all its holders."""
        stages = tuple(s.index for s in trained)
        for item in sums if kind == "cut" else ():
            strangers = sorted(set(item.ranks) - set(ranks))
            if strangers:
                yield f"reduction {item.index}: ranks {strangers} do not hold {what}"
        for rank in ranks:
            over = [r for r in sums if rank in r.ranks]
            if len(over) > 1:
                yield f"rank {rank}: {what} is reduced {len(over)} times"
                continue
            adding = _adding(over[0], kind) if over else (rank,)
            key = stages, part, adding, over[0].index if over else None
            if key not in self._known:
                self._known[key] = list(self._sum_faults(trained, part, kind, over, adding))
                for fault in self._known[key]:
                    yield f"{what}: after reduction on rank {rank}, {fault}"

    def _sum_faults(
        self,
        trained: Sequence[Stage],
        part: tuple[tuple[int, int], int],
        kind: str,
        over: Sequence[Reduction],
        ranks: Sequence[int],
    ) -> Iterator[str]:
        (first, _), tp = part
        for stage in trained:
            batch = self._program.batches[stage.task]
            shard = first * stage.tp // tp
            for loss, times in self._paths[stage.index].items():
                pieces: list[Piece] = []
                for other in ranks:
                    place = stage.place(other)
                    # Whole parameters have their whole gradient on every rank of a group.
                    if place is not None and (kind == "whole" or place[1] == shard):
                        pieces += self._counted(other, stage.index, loss, over)
                off = first_deviation(normal(pieces), 0, batch, times)
                if off:
                    name = self._program.losses[loss].name
                    yield (
                        f"loss {name} counts samples [{off[0]},{off[1]}) of stage {stage.index} "
                        f"{off[2]} times instead of {times}"
                    )

    def _counted(
        self, rank: int, stage: int, loss: int, over: Sequence[Reduction]
    ) -> Sequence[Piece]:
        pieces = self._flow.gradients[rank, stage].get(loss, [])
        if not over:
            return pieces
        return pieces[: self._flow.reduced.get((over[0].index, rank), {}).get((stage, loss), 0)]


def _adding(reduction: Reduction, kind: str) -> tuple[int, ...]:
    """Ranks whose gradients a reduction sums, of cut or of whole parameters."""
    return reduction.adds if kind == "whole" else reduction.ranks


def _part_name(part: tuple[int, int], tp: int, kind: str, sums: Sequence[Reduction]) -> str:
    if kind == "whole" and not any(r.parameters == "all" for r in sums):
        return f", parameters that tp leaves whole (shards [{part[0]},{part[1]}) of {tp})"
    if tp == 1:
        return ""
    shards = f"shard {part[0]}" if part[1] == part[0] + 1 else f"shards [{part[0]},{part[1]})"
    return f", tp {shards} of {tp}"


def _covers(reduction: Reduction, part: tuple[int, int], tp: int) -> bool:
    """Whether a reduction sums a part, which is counted in shards of ``tp``."""
    (a, b), (first, end) = part, reduction.shards
    return first * tp <= a * reduction.tp and b * reduction.tp <= end * tp


def _inside(a: int, b: int, span: tuple[int, int]) -> bool:
    return span[0] <= a and b <= span[1]
