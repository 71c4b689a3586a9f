"""Proof that a program computes the whole step: every sample, every gradient, once.

The program runs on intervals instead of tensors, in an order in which its instructions can run.
For each micro-batch of a stage, the gradient of its output is a sum over losses of intervals of
samples, each with a count:

- a per-sample loss adds its micro-batch once at the forward that hosts it;
- a cross-sample loss adds the samples of its sync batch once at SYNC_WAIT, if all its features
  were there at SYNC_START;
- SEND_B carries the part of its range, and a gradient that does not arrive is not added;
- where a tensor-parallel group gathers scattered messages, all its ranks receive the same ranges;
- a backward adds the sum to the gradient of its rank's parameters (of a split one, ``I``
  makes the sum and ``W`` adds it), REDUCE adds ranks.

In the end, on every rank that holds it, each shard of trainable parameters must count every sample
of the batch as often as there are paths from it to the loss in the stage graph. A loss's weight is
a constant factor of its intervals, so the right counts mean the right weights. The time is
linear in the number of messages, apart from sorting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from mmplan.program.checks.instruction_faults import touching, untiled, where
from mmplan.program.dependencies import Dependencies
from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import BlockReduction, Edge, Program, Reduction, Stage
from mmplan.program.shards import held_shards, is_crowded

# (first sample, end of samples, count)
CountedInterval = tuple[int, int, int]
# Loss to the samples that the gradient counts.
Gradient = dict[int, list[CountedInterval]]
# (rank, stage, micro-batch)
_MicroBatchKey = tuple[int, int, int]


def coverage_faults(
    program: Program, dependencies: Dependencies, order: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """Samples that enter a stage, or reach a gradient, not exactly once.

    Args:
        program: one whose references are right (:func:`instruction_faults.reference_faults`).
        dependencies: the program's.
        order: all (rank, position), each after its dependencies.
    """
    flow = _Flow(program, dependencies)
    for rank, position in order:
        flow.run(rank, position)
    yield from flow.faults
    yield from flow.stage_faults()
    yield from _ParameterCheck(program, flow).faults()


def count_paths(program: Program) -> list[dict[int, int]]:
    """Per stage: loss index to the number of paths from the loss to the stage's output."""
    paths: list[dict[int, int]] = [{} for _ in program.stages]
    outgoing: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in program.edges:
        outgoing[edge.producer].append(edge)
    # Consumers have higher indices than producers.
    for stage in reversed(program.stages):
        total = Counter(stage.syncs)
        total.update(
            loss
            for loss in stage.hosted
            if any(source.own for source in program.per_sample(loss).inputs)
        )
        for edge in outgoing[stage.index]:
            through, direct = _uses(program, edge)
            if through:
                total.update(paths[edge.consumer])
            total.update(direct)
        paths[stage.index] = total
    return paths


def _uses(program: Program, edge: Edge) -> tuple[bool, list[int]]:
    """Whether an edge enters the consumer's blocks, and the hosted losses that take it."""
    consumer = program.stages[edge.consumer]
    through = any(source.edge == edge.index for source in consumer.inputs)
    direct = [
        loss
        for loss in consumer.hosted
        if any(source.edge == edge.index for source in program.per_sample(loss).inputs)
    ]
    return through, direct


class _Flow:
    """The run on intervals, and its state."""

    def __init__(self, program: Program, dependencies: Dependencies) -> None:
        self.faults: list[str] = []
        # (rank, stage) to the gradient of its parameters, with one unsorted list per loss.
        self.gradients: defaultdict[tuple[int, int], Gradient] = defaultdict(
            lambda: defaultdict(list)
        )
        # (reduction, rank) to the lengths of those lists when it was reduced.
        self.reduced: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        self._program = program
        self._dependencies = dependencies
        self._uses = {edge.index: _uses(program, edge) for edge in program.edges}
        self._entered: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._done: dict[_MicroBatchKey, tuple[int, int]] = {}
        self._output: defaultdict[_MicroBatchKey, Gradient] = defaultdict(lambda: defaultdict(list))
        self._backward: dict[_MicroBatchKey, Gradient] = {}
        self._samples: dict[int, tuple[int, int]] = {}
        self._carried: dict[int, Gradient] = {}
        # (loss, sync batch) to the gathered features: (stage, tp index) to ranges.
        self._features: defaultdict[
            tuple[int, int], defaultdict[tuple[int, int], list[tuple[int, int]]]
        ] = defaultdict(lambda: defaultdict(list))
        self._checked: set[tuple[int, int]] = set()
        # Compute of a replica (stage, replica, micro-batch, backward) to its scattered messages.
        self._gathers: dict[tuple[int, int, int, bool], list[tuple[int, int, int]]] = {}
        self._scattered = any(e.scattered or e.scattered_back for e in program.edges)
        self._places = [
            {stage.index: stage.place(rank) for stage in program.stages_of(rank)}
            for rank in range(program.num_ranks)
        ]

    def run(self, rank: int, position: int) -> None:
        item = self._program.instructions[rank][position]
        if isinstance(item, Compute):
            if self._scattered and item.op is not Op.WEIGHT:
                self._check_gathers(rank, position, item)
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

    def _check_gathers(self, rank: int, position: int, item: Compute) -> None:
        """All ranks of a group gather the same messages."""
        gathered: list[tuple[int, int, int]] = []
        for message in self._dependencies.input_messages[rank].get(position, ()):
            index, backward, _, _, start, stop = self._dependencies.messages[message]
            if self._program.shares(self._program.edges[index], backward=backward) > 1:
                gathered.append((index, start, stop))
        gathered.sort()
        replica = self._places[rank][item.stage][0]
        key = item.stage, replica, item.mb, item.is_backward
        if self._gathers.setdefault(key, gathered) != gathered:
            at = where(self._program, rank, position)
            self.faults.append(f"{at}: gathers shares of other messages than its group")

    def _run_forward(self, rank: int, position: int, item: Compute) -> None:
        stage = self._program.stages[item.stage]
        span = self._span(rank, item.stage, item.mb)
        arrived: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for message in self._dependencies.input_messages[rank].get(position, ()):
            if message in self._samples:
                arrived[self._dependencies.messages[message][0]].append(self._samples[message])
        sources = [*stage.inputs]
        for loss in stage.hosted:
            sources += self._program.per_sample(loss).inputs
        for edge in sorted({s.edge for s in sources if s.edge is not None}):
            fault = untiled(arrived[edge], span)
            if fault:
                at = where(self._program, rank, position)
                self.faults.append(f"{at}: the inputs that arrive by edge {edge} {fault}")
        microbatch = rank, item.stage, item.mb
        self._done[microbatch] = span
        self._entered[item.stage, self._places[rank][item.stage][1]].append(span)
        for loss in stage.hosted:
            if any(source.own for source in self._program.per_sample(loss).inputs):
                self._output[microbatch][loss].append((*span, 1))

    def _run_backward(self, rank: int, position: int, item: Compute) -> None:
        microbatch = rank, item.stage, item.mb
        total = self._output[microbatch]
        for message in self._dependencies.input_messages[rank].get(position, ()):
            for loss, intervals in self._carried.pop(message, {}).items():
                total[loss] += intervals
        self._backward[microbatch] = {loss: normal(intervals) for loss, intervals in total.items()}
        if item.op is Op.BACKWARD:
            self._add_to_parameters(microbatch)

    def _add_to_parameters(self, microbatch: _MicroBatchKey) -> None:
        sums = self.gradients[microbatch[0], microbatch[1]]
        for loss, intervals in self._backward.get(microbatch, {}).items():
            sums[loss] += intervals

    def _send_forward(self, rank: int, position: int, item: Message) -> None:
        """Send the part of the range that the sender has computed."""
        span = self._done.get((rank, item.stage, item.mb))
        if span is not None and span[0] < item.stop and item.start < span[1]:
            part = max(span[0], item.start), min(span[1], item.stop)
            self._samples[self._dependencies.arg[rank][position]] = part

    def _send_backward(self, rank: int, position: int, item: Message) -> None:
        gradient = self._backward.get((rank, item.stage, item.mb))
        if gradient is None:
            return
        through, direct = self._uses[item.edge]
        carried: Gradient = {}
        if through:
            carried = {
                k: cut(intervals, item.start, item.stop) for k, intervals in gradient.items()
            }
        for loss in direct:
            carried.setdefault(loss, []).append((item.start, item.stop, 1))
        self._carried[self._dependencies.arg[rank][position]] = carried

    def _local_parts(
        self, rank: int, item: Sync
    ) -> Iterator[tuple[_MicroBatchKey, tuple[int, int]]]:
        """Micro-batches of the sync's stages on a rank, and their part of the sync batch."""
        first, end = self._program.cross_sample(item.loss).samples(item.batch)
        for index, (d, _) in self._places[rank].items():
            stage = self._program.stages[index]
            if item.loss not in stage.syncs:
                continue
            spans = stage.microbatches[d]
            for mb in touching(spans, first, end):
                yield (rank, index, mb), (max(spans[mb][0], first), min(spans[mb][1], end))

    def _start(self, rank: int, item: Sync) -> None:
        for microbatch, part in self._local_parts(rank, item):
            if microbatch in self._done:
                place = microbatch[1], self._places[rank][microbatch[1]][1]
                self._features[item.loss, item.batch][place].append(part)

    def _wait(self, rank: int, position: int, item: Sync) -> None:
        key = item.loss, item.batch
        if key not in self._checked:
            self._checked.add(key)
            self._check_features(rank, position, item)
        for microbatch, part in self._local_parts(rank, item):
            if microbatch in self._done:
                self._output[microbatch][item.loss].append((*part, 1))

    def _check_features(self, rank: int, position: int, item: Sync) -> None:
        loss = self._program.cross_sample(item.loss)
        for index in loss.stages:
            for t in range(self._program.stages[index].tp):
                fault = untiled(
                    self._features[item.loss, item.batch][index, t], loss.samples(item.batch)
                )
                if fault:
                    at = where(self._program, rank, position)
                    self.faults.append(f"{at}: the features of stage {index} {fault}")

    def _reduce(self, rank: int, reduction: Reduction) -> None:
        self.reduced[reduction.index, rank] = {
            (stage, loss): len(intervals)
            for stage in self._places[rank]
            for loss, intervals in self.gradients[rank, stage].items()
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
    """The check that every parameter counts every sample as often as it should, on all its ranks.

    Args:
        flow: all instructions of the program have run.
    """

    def __init__(self, program: Program, flow: _Flow) -> None:
        self._program, self._flow = program, flow
        self._paths = count_paths(program)
        self._known: set[tuple[object, ...]] = set()

    def faults(self) -> Iterator[str]:
        for owner in dict.fromkeys(stage.owner for stage in self._program.stages):
            stages = [s for s in self._program.stages if s.owner == owner]
            reductions = [r for r in self._program.block_reductions if r.owner == owner]
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
        reductions: Sequence[BlockReduction],
    ) -> Iterator[str]:
        """Faults of a range of blocks with one set of holders."""
        groups = list(dict.fromkeys(group for s in holders for group in s.ranks))
        tp = lcm(*map(len, groups), *(r.tp for r in reductions))
        ends = {i * (tp // len(g)) for g in groups for i in range(len(g) + 1)}
        ends |= {end * (tp // r.tp) for r in reductions for end in r.shards}
        name = f"blocks [{blocks[0]},{blocks[1]}) of {trained[0].owner}"
        held = held_shards(groups)
        crowded = is_crowded(groups)
        for part in pairwise(sorted(ends)):
            ranks = sorted(rank for rank, (i, n) in held.items() if part[0] * n // tp == i)
            within = [r for r in reductions if _covers(r, part, tp)]
            for kind in ("cut", "whole"):
                sums = [r for r in within if r.parameters in ("all", kind)]
                what = f"{name}{_part_name(part, tp, kind, sums)}"
                contributors = _Contributors(kind=kind, first=part[0], tp=tp, crowded=crowded)
                yield from self._part_faults(what, contributors, ranks, trained, sums)

    def _part_faults(
        self,
        what: str,
        contributors: _Contributors,
        ranks: Sequence[int],
        trained: Sequence[Stage],
        sums: Sequence[BlockReduction],
    ) -> Iterator[str]:
        """Faults of the parameters of one part, cut or whole, on all its holders."""
        stages = tuple(s.index for s in trained)
        for item in sums if contributors.kind == "cut" else ():
            others = sorted(set(item.ranks) - set(ranks))
            if others:
                yield f"reduction {item.index}: ranks {others} do not hold {what}"
        for rank in ranks:
            over = [r for r in sums if rank in r.ranks]
            if len(over) > 1:
                yield f"rank {rank}: {what} is reduced {len(over)} times"
                continue
            adding = (rank,)
            if over:
                whole = contributors.kind == "whole"
                adding = over[0].contributors if whole else over[0].ranks
            key = stages, contributors.key, adding, over[0].index if over else None
            if key not in self._known:
                self._known.add(key)
                for fault in self._sum_faults(trained, contributors, over, adding):
                    yield f"{what}: after reduction on rank {rank}, {fault}"

    def _sum_faults(
        self,
        trained: Sequence[Stage],
        contributors: _Contributors,
        over: Sequence[BlockReduction],
        ranks: Sequence[int],
    ) -> Iterator[str]:
        for stage in trained:
            batch = self._program.batches[stage.task]
            for loss, times in self._paths[stage.index].items():
                intervals: list[CountedInterval] = []
                for other in ranks:
                    place = stage.find_place(other)
                    if place is not None and contributors.include(place[1], stage.tp):
                        intervals += self._counted(other, stage.index, loss, over)
                off = first_deviation(normal(intervals), 0, batch, times)
                if off:
                    name = self._program.losses[loss].name
                    yield (
                        f"loss {name} counts samples [{off[0]},{off[1]}) of stage {stage.index} "
                        f"{off[2]} times instead of {times}"
                    )

    def _counted(
        self, rank: int, stage: int, loss: int, over: Sequence[BlockReduction]
    ) -> Sequence[CountedInterval]:
        intervals = self._flow.gradients.get((rank, stage), {}).get(loss, [])
        if not over:
            return intervals
        return intervals[: self._flow.reduced.get((over[0].index, rank), {}).get((stage, loss), 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contributors:
    """The ranks of a stage that have a gradient of the parameters of one part.

    Attributes:
        kind: of the parameters, "cut" (sharded) or "whole" (replicated).
        first: the part's first shard of ``tp``.
        crowded: see :mod:`mmplan.program.shards`.
    """

    kind: str
    first: int
    tp: int
    crowded: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal sets of ranks."""
        return self.first, self.tp, self.crowded and self.kind

    def include(self, index: int, count: int) -> bool:
        """Whether shard ``index`` of a stage's ``count`` is one of them."""
        if self.kind == "whole":
            # Every rank of a group has the whole gradient of replicated parameters.
            return index == 0 or not self.crowded
        return index == self.first * count // self.tp


def _part_name(part: tuple[int, int], tp: int, kind: str, sums: Sequence[BlockReduction]) -> str:
    if kind == "whole" and not any(r.parameters == "all" for r in sums):
        return f", parameters that tp leaves whole (shards [{part[0]},{part[1]}) of {tp})"
    if tp == 1:
        return ""
    shards = f"shard {part[0]}" if part[1] == part[0] + 1 else f"shards [{part[0]},{part[1]})"
    return f", tp {shards} of {tp}"


def _covers(reduction: BlockReduction, part: tuple[int, int], tp: int) -> bool:
    """Whether a reduction sums a part, given in shards of ``tp``."""
    (a, b), (first, end) = part, reduction.shards
    return first * tp <= a * reduction.tp and b * reduction.tp <= end * tp


def _inside(a: int, b: int, span: tuple[int, int]) -> bool:
    return span[0] <= a and b <= span[1]


def normal(intervals: Iterable[CountedInterval]) -> list[CountedInterval]:
    """The same sum as sorted, disjoint, merged intervals with counts other than zero."""
    changes: dict[int, int] = {}
    for start, stop, times in intervals:
        changes[start] = changes.get(start, 0) + times
        changes[stop] = changes.get(stop, 0) - times
    result: list[CountedInterval] = []
    times, previous = 0, 0
    for position in sorted(changes):
        if not changes[position]:
            continue
        if times and previous < position:
            result.append((previous, position, times))
        times += changes[position]
        previous = position
    return result


def cut(intervals: Iterable[CountedInterval], start: int, stop: int) -> list[CountedInterval]:
    """The part of disjoint intervals inside ``[start, stop)``."""
    return [
        (max(a, start), min(b, stop), times) for a, b, times in intervals if a < stop and b > start
    ]


def first_deviation(
    intervals: Iterable[CountedInterval], start: int, stop: int, times: int
) -> CountedInterval | None:
    """The first samples of a sum that are not counted ``times`` in ``[start, stop)``.

    Samples outside should be counted 0 times.
    """
    expected = (start, stop, -times)
    difference = normal([*intervals, expected] if times else intervals)
    if not difference:
        return None
    a, b, off = difference[0]
    return a, b, off + (times if start <= a < stop else 0)
