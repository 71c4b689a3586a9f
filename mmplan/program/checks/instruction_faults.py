"""Faults of instructions: missing, doubled, misplaced or without a partner."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from mmplan.program.dependencies import POST, SEND, Dependencies
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
    BlockReduction,
    CrossSampleLoss,
    LossReduction,
    PerSampleLoss,
    Program,
    Reduction,
    Stage,
    TieReduction,
)
from mmplan.program.reduction_starts import rounds_of, starting_stages
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
        if item.mb is not None and item.op is not Op.COUNT:
            rounds = _round_numbers(program.reductions[item.index])
            if item.mb not in rounds:
                return f"reduction {item.index} is made {len(rounds)} times"
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


def structure_faults(program: Program, dependencies: Dependencies) -> Iterator[str]:
    """All other faults of the instructions of a program without reference faults.

    Without one, and where no rank waits for ever, each forward has its whole micro-batch of every
    input and each backward the whole gradient of its output: of every edge that brings one, of the
    losses that its stage hosts and of every sync batch that its samples are in. By induction over
    an order in which the instructions can run, no sample's gradient is lost or doubled.

    Args:
        program: the program.
        dependencies: its dependencies.
    """
    edges = _EdgesOf(program)
    started = {
        item.index
        for row in program.instructions
        for item in row
        if isinstance(item, Collective) and item.op is Op.REDUCE_START
    }
    gathered: dict[tuple[int, int, Op, int], list[tuple[int, int, int]]] = {}
    for rank, row in enumerate(program.instructions):
        # Without instructions, and not one of those that a quotient leaves out.
        if not row and not program.stages_of(rank):
            continue
        check = _RankCheck(program, rank, edges, started)
        yield from check.faults()
        for key, messages in check.gathered():
            if gathered.setdefault(key, messages) != messages:
                work = Compute(key[2], key[0], key[3])
                yield f"rank {rank}, {work}: gathers shares of other messages than its group"
    yield from _pairing_faults(program, dependencies)


def stage_faults(program: Program) -> Iterator[str]:
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

    def __init__(
        self, program: Program, rank: int, edges: _EdgesOf, started: Collection[int]
    ) -> None:
        self._program = program
        self._rank = rank
        self._row = program.instructions[rank]
        self._edges = edges
        # Reductions that start on some rank.
        self._started = started
        self._stages = {s.index: s for s in program.stages_of(rank)}
        self._microbatches = {
            index: stage.microbatches[stage.place(rank)[0]] for index, stage in self._stages.items()
        }
        self._backwards = {index: _backward_of(stage) for index, stage in self._stages.items()}
        self._computes: defaultdict[_ComputeOf, list[int]] = defaultdict(list)
        self._syncs: defaultdict[tuple[Op, int, int], list[int]] = defaultdict(list)
        self._collectives: defaultdict[tuple[Op, int, int | None], list[int]] = defaultdict(list)
        # Of sums that are cut, the rounds and the positions of their backwards.
        self._rounds: dict[int, tuple[list[tuple[Stage, int]], list[int]]] = {}
        # (compute, edge) to the ranges received for it, and positions of its messages.
        self._received: defaultdict[tuple[_ComputeOf, int], list[SampleRange]] = defaultdict(list)
        self._messages: list[tuple[int, Message, _ComputeOf]] = []
        for position, item in enumerate(self._row):
            self._record(position, item)

    def _record(self, position: int, item: Instruction) -> None:
        if isinstance(item, Message):
            op = item.op
            forward = op is Op.SEND_F or op is Op.RECV_F
            work = item.stage, Op.FORWARD if forward else self._backwards[item.stage], item.mb
            self._messages.append((position, item, work))
            if op is Op.RECV_F or op is Op.RECV_B:
                self._received[work, item.edge].append((item.start, item.stop))
        elif isinstance(item, Compute):
            self._computes[item.stage, item.op, item.mb].append(position)
        elif isinstance(item, Sync):
            self._syncs[item.op, item.loss, item.batch].append(position)
        elif isinstance(item, Collective):
            self._collectives[item.op, item.index, item.mb].append(position)

    def faults(self) -> Iterator[str]:
        yield from self._compute_faults()
        yield from self._message_faults()
        yield from self._input_faults()
        yield from self._sync_faults()
        yield from self._collective_faults()
        yield from self._step_faults()

    def gathered(self) -> Iterator[tuple[tuple[int, int, Op, int], list[tuple[int, int, int]]]]:
        """Each compute whose group gathers shares: (stage, replica, operation, micro-batch).

        With it the (edge, first sample, end) of its messages, sorted.
        """
        found: defaultdict[_ComputeOf, list[tuple[int, int, int]]] = defaultdict(list)
        for (work, index), spans in self._received.items():
            edge = self._program.edges[index]
            if self._program.shares(edge, backward=work[1] is not Op.FORWARD) > 1:
                found[work] += [(index, *span) for span in spans]
        for (stage, op, mb), messages in found.items():
            replica = self._stages[stage].place(self._rank)[0]
            yield (stage, replica, op, mb), sorted(messages)

    def _expected(self) -> Iterator[_ComputeOf]:
        for stage in self._stages.values():
            for mb in range(len(self._microbatches[stage.index])):
                yield stage.index, Op.FORWARD, mb
                if stage.has_backward:
                    yield stage.index, self._backwards[stage.index], mb
                if stage.has_backward and stage.split:
                    yield stage.index, Op.WEIGHT, mb

    def _compute_faults(self) -> Iterator[str]:
        expected = dict.fromkeys(self._expected())
        for work in [*expected, *(own for own in self._computes if own not in expected)]:
            positions = self._computes.get(work, ())
            if len(positions) != 1 or work not in expected:
                text = str(Compute(work[1], work[0], work[2]))
                yield from self._once(text, positions, int(work in expected))
            if work[1] is not Op.FORWARD and positions:
                needed = Op.INPUT if work[1] is Op.WEIGHT else Op.FORWARD
                earlier = self._computes.get((work[0], needed, work[2]))
                if earlier and earlier[0] > positions[0]:
                    name = "I" if needed is Op.INPUT else "forward"
                    yield f"{self._at(positions[0])}: comes before its {name}"

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
        for position, item, work in self._messages:
            computes = self._computes.get(work)
            start, stop = self._microbatches[item.stage][item.mb]
            if not start <= item.start < item.stop <= stop:
                yield (
                    f"{self._at(position)}: micro-batch {item.mb} of stage {item.stage} holds "
                    f"samples [{start},{stop})"
                )
            if not computes:
                continue
            if item.is_send:
                if position < computes[0]:
                    yield f"{self._at(position)}: sends before {self._row[computes[0]]}"
            elif position > computes[-1]:
                yield f"{self._at(position)}: receives after {self._row[computes[-1]]}"

    def _input_faults(self) -> Iterator[str]:
        """The ranges received for a compute are its whole micro-batch, on every edge."""
        for index, spans in self._microbatches.items():
            ends = [(Op.FORWARD, edge) for edge in self._edges.into[index]]
            ends += [(self._backwards[index], edge) for edge in self._edges.back_to[index]]
            for op, edge in ends:
                for mb, span in enumerate(spans):
                    received = self._received.get(((index, op, mb), edge), ())
                    # Mostly one message brings all of it.
                    if len(received) == 1 and received[0] == span:
                        continue
                    fault = untiled(received, span)
                    if fault:
                        yield (
                            f"rank {self._rank}, {Compute(op, index, mb)}: the messages of edge "
                            f"{edge} {fault}"
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
            for mb in touching(self._microbatches[stage.index], *loss.samples(batch)):
                for position in self._computes[stage.index, Op.FORWARD, mb]:
                    if position > start:
                        yield f"{self._at(start)}: starts before {self._row[position]}"
                for position in self._computes[stage.index, self._backwards[stage.index], mb]:
                    if position < wait:
                        yield f"{self._at(position)}: needs the gradient of {self._row[wait]}"

    def _collective_faults(self) -> Iterator[str]:
        for loss in self._program.losses:
            counts = self._collectives[Op.COUNT, loss.index, None]
            host = loss.host if isinstance(loss, PerSampleLoss) else None
            expected = int(host is not None and self._rank in loss.ranks)
            yield from self._once(f"COUNT:{loss.index}", counts, expected)
            for (stage, op, _), positions in self._computes.items() if counts else ():
                if stage == host and op is Op.FORWARD and positions and positions[0] < counts[0]:
                    yield f"{self._at(positions[0])}: comes before {self._row[counts[0]]}"
        for reduction in self._program.reductions:
            for mb in _round_numbers(reduction):
                positions = self._collectives[Op.REDUCE, reduction.index, mb]
                expected = int(self._rank in reduction.ranks)
                name = str(Collective(Op.REDUCE, reduction.index, mb))
                yield from self._once(name, positions, expected)
                if positions:
                    yield from self._reduce_order_faults(reduction.index, positions[0], mb)
                starts = self._collectives[Op.REDUCE_START, reduction.index, mb]
                expected &= mb is not None or reduction.index in self._started
                name = str(Collective(Op.REDUCE_START, reduction.index, mb))
                yield from self._once(name, starts, expected)
                if starts:
                    yield from self._start_faults(reduction, starts[0], mb)

    def _start_faults(self, reduction: Reduction, start: int, mb: int | None) -> Iterator[str]:
        """A start is directly before the compute that completes the reduction's gradients.

        Of a sum that is cut that is the backward of its micro-batch.
        """
        stages = {stage.index for stage in starting_stages(self._program, reduction)}
        if not stages & self._stages.keys():
            yield f"{self._at(start)}: no backward here completes its gradients"
            return
        row = self._row
        inside = start
        while row[inside].op is Op.REDUCE_START and inside + 1 < len(row):
            inside += 1
        # The operations that add to gradients; the last of them completes these.
        adding = (Op.BACKWARD, Op.INPUT, Op.WEIGHT)
        computes = ((x.stage, x.op, p) for p, x in enumerate(row) if isinstance(x, Compute))
        last = max((p for i, op, p in computes if i in stages and op in adding), default=-1)
        if mb is not None:
            rounds = self._rounds_of(reduction)
            last = -1
            if mb < len(rounds):
                stage, own = rounds[mb]
                last = next(iter(self._computes[stage.index, Op.BACKWARD, own]), -1)
        if inside != last:
            yield (
                f"{self._at(start)}: stands before {row[inside]}, not before the last backward of "
                "its blocks"
            )

    def _reduce_order_faults(self, index: int, reduce: int, round: int | None) -> Iterator[str]:
        """What is in a sum comes before it; see :meth:`_round_faults` for one that is cut."""
        reduction = self._program.reductions[index]
        if round is not None:
            yield from self._round_faults(reduction, reduce, round)
            return
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
            ops = [self._backwards[stage.index]]
            if not isinstance(reduction, LossReduction):
                ops.append(Op.WEIGHT)
            for mb in range(len(self._microbatches[stage.index]) if contributes else 0):
                for late in (self._computes[stage.index, op, mb] for op in ops):
                    if late and late[-1] > reduce:
                        yield f"{self._at(late[-1])}: adds to gradients already reduced at {reduce}"
        if isinstance(reduction, LossReduction):
            for (_, loss, _), positions in self._syncs.items():
                named = self._program.losses[loss].name == reduction.owner
                if named and positions and positions[-1] > reduce:
                    yield f"{self._at(positions[-1])}: adds to gradients already reduced"

    def _rounds_of(self, reduction: Reduction) -> list[tuple[Stage, int]]:
        """The stage and the micro-batch of each round of a sum that is cut."""
        if reduction.index not in self._rounds:
            rounds = [*rounds_of(self._program, reduction)]
            own = (self._computes.get((s.index, Op.BACKWARD, mb), ()) for s, mb in rounds)
            self._rounds[reduction.index] = rounds, sorted(p for found in own for p in found)
        return self._rounds[reduction.index][0]

    def _round_faults(self, reduction: Reduction, reduce: int, number: int) -> Iterator[str]:
        """A sum that is cut has the gradients of one backward: no other one is before it."""
        rounds = self._rounds_of(reduction)
        stage, mb = rounds[number] if number < len(rounds) else (None, 0)
        own = () if stage is None else self._computes.get((stage.index, Op.BACKWARD, mb), ())
        if not own:
            return
        if own[0] > reduce:
            yield f"{self._at(own[0])}: adds to gradients already reduced at {reduce}"
        adding = self._rounds[reduction.index][1]
        for late in adding[bisect_right(adding, own[0]) : bisect_left(adding, reduce)]:
            yield f"{self._at(reduce)}: has gradients of {self._row[late]} in it"

    def _step_faults(self) -> Iterator[str]:
        steps = [i for i, item in enumerate(self._row) if isinstance(item, Step)]
        yield from self._once("STEP", steps, int(bool(self._row or self._stages)))
        if steps and steps[-1] != len(self._row) - 1:
            yield f"{self._at(steps[-1])}: is not the last instruction"


def _round_numbers(reduction: Reduction) -> Sequence[int | None]:
    """The micro-batches after which a sum is made; None for once, after all."""
    rounds = reduction.rounds if isinstance(reduction, BlockReduction) else None
    return (None,) if rounds is None else range(rounds)


def _backward_of(stage: Stage) -> Op:
    """The operation that takes the gradient of a stage's output."""
    return Op.INPUT if stage.split else Op.BACKWARD


class _EdgesOf:
    """The edges of each stage.

    Attributes:
        into: that bring inputs of its blocks or of losses that it hosts.
        back_to: that bring gradients of its output.
    """

    def __init__(self, program: Program) -> None:
        self.into: list[list[int]] = [[] for _ in program.stages]
        self.back_to: list[list[int]] = [[] for _ in program.stages]
        for edge in program.edges:
            self.into[edge.consumer].append(edge.index)
            if edge.carries_gradient:
                self.back_to[edge.producer].append(edge.index)


def _pairing_faults(program: Program, dependencies: Dependencies) -> Iterator[str]:
    """Each message is sent once and received once."""
    ends = [[0, 0] for _ in dependencies.messages]
    for kinds, args in zip(dependencies.kind, dependencies.arg, strict=True):
        for kind, arg in zip(kinds, args, strict=True):
            if kind in (SEND, POST):
                ends[arg][kind == POST] += 1
    for message, (sent, received) in enumerate(ends):
        if sent == received == 1:
            continue
        key = dependencies.messages[message]
        out = [where(program, key[2], i) for i in _ends(program, key, key[2], sends=True)]
        back = [where(program, key[3], i) for i in _ends(program, key, key[3], sends=False)]
        if not back:
            yield f"{out[0]}: rank {key[3]} never receives it"
        elif not out:
            yield f"{back[0]}: rank {key[2]} never sends it"
        for place in out[1:]:
            yield f"{place}: is sent {len(out)} times"
        for place in back[1:]:
            yield f"{place}: is received {len(back)} times"


def _ends(program: Program, key: MessageKey, rank: int, *, sends: bool) -> list[int]:
    """Positions of a message's ends on a rank."""
    return [
        position
        for position, item in enumerate(program.instructions[rank])
        if isinstance(item, Message) and item.is_send == sends and item.key(rank) == key
    ]


def _num_batches(program: Program, loss: CrossSampleLoss) -> int:
    return program.batches[loss.task] // loss.sync_batch
