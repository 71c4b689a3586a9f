"""Faults of instructions: missing, doubled, misplaced or without a partner."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from mmplan.program.instructions import (
    Collective,
    Compute,
    Instruction,
    Message,
    MessageKey,
    Op,
    Step,
    Sync,
)
from mmplan.program.model import (
    CrossSampleLoss,
    LossReduction,
    PerSampleLoss,
    Program,
    Stage,
    TieReduction,
)
from mmplan.program.samples import SampleRange

# (stage, operation, micro-batch) of a compute
_ComputeOf = tuple[int, Op, int]


def where(program: Program, rank: int, position: int) -> str:
    """The name of an instruction's place in faults."""
    return f"rank {rank}, instruction {position} ({program.instructions[rank][position]})"


def reference_faults(program: Program) -> Iterator[str]:
    """Instructions that name a missing stage, micro-batch, edge, loss or rank.

    The other checks need a program without such faults.
    """
    for rank, row in enumerate(program.instructions):
        counts = {
            stage.index: len(stage.microbatches[place[0]])
            for stage in program.stages
            if (place := stage.find_place(rank)) is not None
        }
        for position, item in enumerate(row):
            fault = _reference_fault(program, counts, item)
            if fault:
                yield f"{where(program, rank, position)}: {fault}"


def _reference_fault(program: Program, counts: dict[int, int], item: Instruction) -> str | None:
    if isinstance(item, Compute | Message):
        if item.stage not in counts:
            return f"this rank does not run stage {item.stage}"
        if item.mb >= counts[item.stage]:
            return f"stage {item.stage} has {counts[item.stage]} micro-batches here"
    if isinstance(item, Message):
        return _message_reference_fault(program, item)
    if isinstance(item, Sync):
        if item.loss >= len(program.losses):
            return f"there is no loss {item.loss}"
        loss = program.losses[item.loss]
        if not isinstance(loss, CrossSampleLoss) or item.batch >= _num_batches(program, loss):
            return f"loss {loss.name} has no sync batch {item.batch}"
    if isinstance(item, Collective):
        known = program.losses if item.op is Op.COUNT else program.reductions
        if item.index >= len(known):
            return f"there is no {item.op} {item.index}"
    return None


def _message_reference_fault(program: Program, item: Message) -> str | None:
    if item.edge >= len(program.edges):
        return f"there is no edge {item.edge}"
    if item.peer >= program.num_ranks:
        return f"there is no rank {item.peer}"
    edge = program.edges[item.edge]
    expected, other = edge.producer, edge.consumer
    if item.op in (Op.RECV_F, Op.SEND_B):
        expected, other = other, expected
    if item.stage != expected:
        return f"edge {edge.index} goes from stage {edge.producer} to {edge.consumer}"
    if program.stages[other].find_place(item.peer) is None:
        return f"rank {item.peer} does not run stage {other}"
    if item.op in (Op.SEND_B, Op.RECV_B) and not edge.carries_gradient:
        return f"edge {edge.index} carries no gradient"
    return None


def structure_faults(program: Program) -> Iterator[str]:
    """All other faults of the instructions of a program without reference faults."""
    yield from _stage_faults(program)
    for rank in range(program.num_ranks):
        yield from _RankCheck(program, rank).faults()
    yield from _pairing_faults(program)
    yield from _order_faults(program)
    yield from _placement_faults(program)


def _stage_faults(program: Program) -> Iterator[str]:
    """Micro-batches that do not tile the batch."""
    for stage in program.stages:
        spans = (span for replica in stage.microbatches for span in replica)
        fault = untiled(spans, (0, program.batches[stage.task]))
        if fault:
            yield f"stage {stage.index} ({stage.unit}): its micro-batches {fault}"
        for d, replica in enumerate(stage.microbatches):
            if any(b < a for a, b in pairwise(replica)):
                yield (
                    f"stage {stage.index} ({stage.unit}): the micro-batches of replica {d} are "
                    "not in the order of their samples"
                )


def touching(spans: Sequence[SampleRange], first: int, end: int) -> range:
    """Micro-batches, in the order of their samples, that overlap ``[first, end)``."""
    return range(
        bisect_right(spans, first, key=lambda span: span[1]),
        bisect_left(spans, end, key=lambda span: span[0]),
    )


def untiled(spans: Iterable[SampleRange], whole: SampleRange) -> str | None:
    """The first fault of ranges that should cover ``whole`` exactly once, or None."""
    position = whole[0]
    for start, stop in sorted(spans):
        if start > position:
            return f"leave out samples [{position},{start})"
        if start < position:
            return f"hold samples [{start},{min(stop, position)}) twice"
        position = stop
    if position < whole[1]:
        return f"leave out samples [{position},{whole[1]})"
    if position > whole[1]:
        return f"go on to sample {position} of {whole[1]}"
    return None


class _RankCheck:
    """The checks of a single rank's row."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._row = program.instructions[rank]
        self._stages = {s.index: s for s in program.stages_of(rank)}
        self._computes: defaultdict[_ComputeOf, list[int]] = defaultdict(list)
        self._syncs: defaultdict[tuple[Op, int, int], list[int]] = defaultdict(list)
        self._collectives: defaultdict[tuple[Op, int], list[int]] = defaultdict(list)
        # (compute, edge) to the ranges received for it, and positions of its messages.
        self._received: defaultdict[tuple[_ComputeOf, int], list[SampleRange]] = defaultdict(list)
        self._messages: list[tuple[int, Message]] = []
        for position, item in enumerate(self._row):
            self._record(position, item)

    def _record(self, position: int, item: Instruction) -> None:
        if isinstance(item, Compute):
            self._computes[item.stage, item.op, item.mb].append(position)
        elif isinstance(item, Message):
            self._messages.append((position, item))
            if not item.is_send:
                work = item.stage, _op_of(item, self._stages[item.stage]), item.mb
                self._received[work, item.edge].append((item.start, item.stop))
        elif isinstance(item, Sync):
            self._syncs[item.op, item.loss, item.batch].append(position)
        elif isinstance(item, Collective):
            self._collectives[item.op, item.index].append(position)

    def faults(self) -> Iterator[str]:
        yield from self._compute_faults()
        yield from self._message_faults()
        yield from self._input_faults()
        yield from self._sync_faults()
        yield from self._collective_faults()
        yield from self._step_faults()

    def _expected(self) -> Iterator[_ComputeOf]:
        for stage in self._stages.values():
            for mb in range(len(self._spans(stage))):
                yield stage.index, Op.FORWARD, mb
                if stage.has_backward:
                    yield stage.index, _backward_of(stage), mb
                if stage.has_backward and stage.split:
                    yield stage.index, Op.WEIGHT, mb

    def _spans(self, stage: Stage) -> Sequence[SampleRange]:
        return stage.microbatches[stage.place(self._rank)[0]]

    def _compute_faults(self) -> Iterator[str]:
        expected = set(self._expected())
        for work in sorted(expected | set(self._computes)):
            text = str(Compute(work[1], work[0], work[2]))
            yield from self._once(text, self._computes[work], int(work in expected))
            if work[1] is not Op.FORWARD and self._computes[work]:
                needed = Op.INPUT if work[1] is Op.WEIGHT else Op.FORWARD
                earlier = self._computes[work[0], needed, work[2]]
                if earlier and earlier[0] > self._computes[work][0]:
                    name = "I" if needed is Op.INPUT else "forward"
                    yield f"{self._at(self._computes[work][0])}: comes before its {name}"

    def _once(self, text: str, positions: Sequence[int], expected: int) -> Iterator[str]:
        if not positions and expected:
            yield f"rank {self._rank}: {text} is missing"
        elif positions and not expected:
            yield f"{self._at(positions[0])}: does not belong here"
        for position in positions[1:]:
            yield f"{self._at(position)}: stands {len(positions)} times, first at {positions[0]}"

    def _at(self, position: int) -> str:
        return where(self._program, self._rank, position)

    def _message_faults(self) -> Iterator[str]:
        """Receives stand before their compute, sends after it; ranges lie inside it."""
        for position, item in self._messages:
            stage = self._stages[item.stage]
            computes = self._computes[item.stage, _op_of(item, stage), item.mb]
            start, stop = self._spans(stage)[item.mb]
            if not start <= item.start < item.stop <= stop:
                yield (
                    f"{self._at(position)}: micro-batch {item.mb} of stage {item.stage} holds "
                    f"samples [{start},{stop})"
                )
            if computes and item.is_send and position < computes[0]:
                yield f"{self._at(position)}: sends before {self._row[computes[0]]}"
            if computes and not item.is_send and position > computes[-1]:
                yield f"{self._at(position)}: receives after {self._row[computes[-1]]}"

    def _input_faults(self) -> Iterator[str]:
        """The ranges received for a compute are its whole micro-batch, on every edge."""
        for edge in self._program.edges:
            ends = [(edge.consumer, Op.FORWARD)]
            if edge.carries_gradient:
                ends.append((edge.producer, _backward_of(self._program.stages[edge.producer])))
            for index, op in ends:
                stage = self._stages.get(index)
                for mb, span in enumerate(self._spans(stage) if stage else ()):
                    fault = untiled(self._received[(index, op, mb), edge.index], span)
                    if fault:
                        work = Compute(op, index, mb)
                        yield (
                            f"rank {self._rank}, {work}: the messages of edge {edge.index} {fault}"
                        )

    def _sync_faults(self) -> Iterator[str]:
        for loss in self._program.cross_sample_losses:
            expected = _num_batches(self._program, loss) if self._rank in loss.ranks else 0
            known = {key[2] for key in self._syncs if key[1] == loss.index}
            for batch in sorted(known | set(range(expected))):
                start = self._syncs[Op.SYNC_START, loss.index, batch]
                wait = self._syncs[Op.SYNC_WAIT, loss.index, batch]
                once = int(batch < expected)
                yield from self._once(str(Sync(Op.SYNC_START, loss.index, batch)), start, once)
                yield from self._once(str(Sync(Op.SYNC_WAIT, loss.index, batch)), wait, once)
                if start and wait:
                    yield from self._sync_order_faults(loss, batch, start[0], wait[0])

    def _sync_order_faults(
        self, loss: CrossSampleLoss, batch: int, start: int, wait: int
    ) -> Iterator[str]:
        if wait < start:
            yield f"{self._at(wait)}: waits before the sync is started"
        for stage in self._stages.values():
            if loss.index not in stage.syncs:
                continue
            for mb in touching(self._spans(stage), *loss.samples(batch)):
                for position in self._computes[stage.index, Op.FORWARD, mb]:
                    if position > start:
                        yield f"{self._at(start)}: starts before {self._row[position]}"
                for position in self._computes[stage.index, _backward_of(stage), mb]:
                    if position < wait:
                        yield f"{self._at(position)}: needs the gradient of {self._row[wait]}"

    def _collective_faults(self) -> Iterator[str]:
        for loss in self._program.losses:
            counts = self._collectives[Op.COUNT, loss.index]
            host = loss.host if isinstance(loss, PerSampleLoss) else None
            expected = int(host is not None and self._rank in loss.ranks)
            yield from self._once(f"COUNT:{loss.index}", counts, expected)
            for (stage, op, _), positions in self._computes.items() if counts else ():
                if stage == host and op is Op.FORWARD and positions and positions[0] < counts[0]:
                    yield f"{self._at(positions[0])}: comes before {self._row[counts[0]]}"
        for reduction in self._program.reductions:
            positions = self._collectives[Op.REDUCE, reduction.index]
            expected = int(self._rank in reduction.ranks)
            yield from self._once(f"REDUCE:{reduction.index}", positions, expected)
            if positions:
                yield from self._reduce_order_faults(reduction.index, positions[0])

    def _reduce_order_faults(self, index: int, reduce: int) -> Iterator[str]:
        reduction = self._program.reductions[index]
        for stage in self._stages.values():
            if isinstance(reduction, LossReduction):
                names = {self._program.losses[i].name for i in stage.hosted}
                contributes = reduction.owner in names
            elif isinstance(reduction, TieReduction):
                held = any(a <= block < b for block in reduction.blocks for a, b in [stage.blocks])
                contributes = stage.owner == reduction.owner and held
            else:
                a, b = reduction.blocks
                overlaps = stage.blocks[0] < b and a < stage.blocks[1]
                contributes = stage.owner == reduction.owner and overlaps
            # In a split backward, I makes the gradients of some parameters and W those of the rest.
            ops = [_backward_of(stage)]
            if not isinstance(reduction, LossReduction):
                ops.append(Op.WEIGHT)
            for mb in range(len(self._spans(stage)) if contributes else 0):
                for late in (self._computes[stage.index, op, mb] for op in ops):
                    if late and late[-1] > reduce:
                        yield f"{self._at(late[-1])}: adds to gradients already reduced at {reduce}"
        if isinstance(reduction, LossReduction):
            for (_, loss, _), positions in self._syncs.items():
                named = self._program.losses[loss].name == reduction.owner
                if named and positions and positions[-1] > reduce:
                    yield f"{self._at(positions[-1])}: adds to gradients already reduced"

    def _step_faults(self) -> Iterator[str]:
        steps = [i for i, item in enumerate(self._row) if isinstance(item, Step)]
        yield from self._once("STEP", steps, int(bool(self._row or self._stages)))
        if steps and steps[-1] != len(self._row) - 1:
            yield f"{self._at(steps[-1])}: is not the last instruction"


def _backward_of(stage: Stage) -> Op:
    """The operation that takes the gradient of a stage's output."""
    return Op.INPUT if stage.split else Op.BACKWARD


def _op_of(item: Message, stage: Stage) -> Op:
    """The compute of ``stage`` that a message belongs to."""
    return Op.FORWARD if item.op in (Op.SEND_F, Op.RECV_F) else _backward_of(stage)


def _pairing_faults(program: Program) -> Iterator[str]:
    """Each send has one receive with the same edge, samples and ranks."""
    sends: defaultdict[MessageKey, list[str]] = defaultdict(list)
    receives: defaultdict[MessageKey, list[str]] = defaultdict(list)
    for rank, row in enumerate(program.instructions):
        for position, item in enumerate(row):
            if isinstance(item, Message):
                ends = sends if item.is_send else receives
                ends[item.key(rank)].append(where(program, rank, position))
    for key in sorted(sends.keys() | receives.keys()):
        out, back = sends.get(key, []), receives.get(key, [])
        if not back:
            yield f"{out[0]}: rank {key[3]} never receives it"
        elif not out:
            yield f"{back[0]}: rank {key[2]} never sends it"
        for place in out[1:]:
            yield f"{place}: is sent {len(out)} times"
        for place in back[1:]:
            yield f"{place}: is received {len(back)} times"


def _order_faults(program: Program) -> Iterator[str]:
    """Between two ranks and for each direction, sends and receives match in order.

    NCCL ignores tags: the n-th receive takes the n-th send.
    """
    sent: defaultdict[tuple[int, int, bool], list[MessageKey]] = defaultdict(list)
    received: defaultdict[tuple[int, int, bool], list[MessageKey]] = defaultdict(list)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Message):
                key = item.key(rank)
                (sent if item.is_send else received)[key[2], key[3], key[1]].append(key)
    for route in sorted(sent.keys() | received.keys()):
        for n, (out, back) in enumerate(zip(sent[route], received[route], strict=False)):
            if out != back:
                yield (
                    f"ranks {route[0]} > {route[1]}: message {n} is sent as edge {out[0]} "
                    f"[{out[4]},{out[5]}) and received as edge {back[0]} [{back[4]},{back[5]})"
                )
                break


def _placement_faults(program: Program) -> Iterator[str]:
    """Losses run on the ranks of their features; a loss's own parameters are reduced over them."""
    for loss in program.losses:
        stages = loss.stages if isinstance(loss, CrossSampleLoss) else (loss.host,)
        ranks = {rank for s in stages for rank in program.stages[s].members}
        if sorted(ranks) != list(loss.ranks):
            yield (
                f"loss {loss.index} ({loss.name}): its ranks are {list(loss.ranks)}, its "
                f"features are on {sorted(ranks)}"
            )
    for loss in program.cross_sample_losses:
        yield from _gather_order_faults(program, loss)
    for name in sorted({loss.name for loss in program.losses}):
        losses = [loss for loss in program.losses if loss.name == name]
        holders = sorted({rank for loss in losses for rank in loss.ranks})
        reduced = [
            r.ranks for r in program.reductions if isinstance(r, LossReduction) and r.owner == name
        ]
        if len(holders) > 1 and reduced != [tuple(holders)]:
            yield f"loss {name}: its parameters on ranks {holders} are not reduced over them once"


def _num_batches(program: Program, loss: CrossSampleLoss) -> int:
    return program.batches[loss.task] // loss.sync_batch


def _gather_order_faults(program: Program, loss: CrossSampleLoss) -> Iterator[str]:
    """A loss's gathers share a communicator, so all ranks must start them in one order."""
    started = {
        rank: [
            item.batch
            for item in program.instructions[rank]
            if isinstance(item, Sync) and item.op is Op.SYNC_START and item.loss == loss.index
        ]
        for rank in loss.ranks
    }
    first = started[loss.ranks[0]]
    for rank, batches in started.items():
        if batches != first:
            yield (
                f"rank {rank}: starts the sync batches of loss {loss.index} ({loss.name}) in the "
                f"order {batches}, rank {loss.ranks[0]} in {first}"
            )
