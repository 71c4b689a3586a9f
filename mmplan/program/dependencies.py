"""What the instructions of a program wait for, as flat arrays.

Built once and shared by the checks, which ask in which order instructions can happen, and
by the simulator, which asks when they do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import Program, Stage

# Kinds of instructions. A gang happens on several ranks at once.
POST, SEND, ALONE, GANG, START, STEP = range(6)

# (edge, is backward, source rank, target rank, first sample, end of samples)
MessageKey = tuple[int, bool, int, int, int, int]


@dataclass(slots=True)
class Wiring:
    """Instruction i of rank r is ``kind[r][i]``; ``arg[r][i]`` depends on its kind.

    Attributes:
        arg: POST and SEND: message; GANG: gang; START: sync; ALONE and STEP: 0.
        needs: messages that a compute waits for, those posted before it.
        messages: their keys, in the order in which they are met.
        link: per message, an index of its (source, target) pair.
        gang_size: ranks that must meet.
        gate: per gang, the sync whose gather it also waits for, or -1.
        reduction: per gang, the reduction that it is, or -1.
        sync_size: ranks that start the sync.
        sync_gang: per sync, the gang of its waits, or -1.
    """

    kind: list[list[int]] = field(default_factory=list[list[int]])
    arg: list[list[int]] = field(default_factory=list[list[int]])
    needs: list[dict[int, tuple[int, ...]]] = field(
        default_factory=list[dict[int, tuple[int, ...]]]
    )
    messages: list[MessageKey] = field(default_factory=list[MessageKey])
    link: list[int] = field(default_factory=list[int])
    num_links: int = 0
    gang_size: list[int] = field(default_factory=list[int])
    gate: list[int] = field(default_factory=list[int])
    reduction: list[int] = field(default_factory=list[int])
    syncs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    sync_size: list[int] = field(default_factory=list[int])
    sync_gang: list[int] = field(default_factory=list[int])


def wire(program: Program) -> Wiring:
    """The wiring of a program whose indices are all in range."""
    builder = _Builder(program)
    for rank, row in enumerate(program.instructions):
        builder.add_row(rank, row)
    return builder.wiring


class _Builder:
    def __init__(self, program: Program) -> None:
        self.wiring = Wiring()
        self._program = program
        self._message_ids: dict[MessageKey, int] = {}
        self._link_ids: dict[tuple[int, int], int] = {}
        self._gang_ids: dict[tuple[object, ...], int] = {}
        self._sync_ids: dict[tuple[int, int], int] = {}

    def add_row(self, rank: int, row: tuple[Instruction, ...]) -> None:
        places = {s.index: (s, s.place(rank)) for s in self._program.stages_of(rank)}
        posted: defaultdict[tuple[int, bool, int], list[int]] = defaultdict(list)
        kinds: list[int] = []
        args: list[int] = []
        needs: dict[int, tuple[int, ...]] = {}
        for position, item in enumerate(row):
            kind, arg = STEP, 0
            if isinstance(item, Message):
                kind, arg = self._message(rank, item)
                if kind == POST:
                    posted[item.stage, item.op is Op.RECV_B, item.mb].append(arg)
            elif isinstance(item, Compute):
                stage, place = places[item.stage]
                weights = item.op is Op.WEIGHT
                if not weights:
                    key = item.stage, item.is_backward, item.mb
                    needs[position] = tuple(posted.pop(key, ()))
                # Weight gradients need no other rank of a tensor-parallel group.
                alone = stage.tp == 1 or weights
                kind, arg = (ALONE, 0) if alone else self._group(stage, place, item)
            elif isinstance(item, Sync):
                kind, arg = self._sync(item)
            elif isinstance(item, Collective):
                kind, arg = GANG, self._collective(item)
            kinds.append(kind)
            args.append(arg)
        self.wiring.kind.append(kinds)
        self.wiring.arg.append(args)
        self.wiring.needs.append(needs)

    def _message(self, rank: int, item: Message) -> tuple[int, int]:
        backward = item.op is Op.SEND_B or item.op is Op.RECV_B
        sends = item.is_send
        source, target = (rank, item.peer) if sends else (item.peer, rank)
        key = (item.edge, backward, source, target, item.start, item.stop)
        known = self._message_ids.get(key)
        if known is None:
            known = self._message_ids[key] = len(self.wiring.messages)
            self.wiring.messages.append(key)
            pair = self._link_ids.setdefault((source, target), len(self._link_ids))
            self.wiring.link.append(pair)
            self.wiring.num_links = len(self._link_ids)
        return (SEND if sends else POST), known

    def _group(self, stage: Stage, place: tuple[int, int] | None, item: Compute) -> tuple[int, int]:
        replica = place[0] if place else 0
        return GANG, self._gang((stage.index, item.op, replica, item.mb), stage.tp)

    def _collective(self, item: Collective) -> int:
        owner = self._program.losses if item.op is Op.COUNT else self._program.reductions
        gang = self._gang((item.op, item.index), len(owner[item.index].ranks))
        if item.op is Op.REDUCE:
            self.wiring.reduction[gang] = item.index
        return gang

    def _sync(self, item: Sync) -> tuple[int, int]:
        key = item.loss, item.batch
        size = len(self._program.losses[item.loss].ranks)
        sync = self._sync_ids.get(key)
        if sync is None:
            sync = self._sync_ids[key] = len(self.wiring.syncs)
            self.wiring.syncs.append(key)
            self.wiring.sync_size.append(size)
            self.wiring.sync_gang.append(-1)
        if item.op is Op.SYNC_START:
            return START, sync
        gang = self._gang((Op.SYNC_WAIT, *key), size)
        self.wiring.gate[gang] = sync
        self.wiring.sync_gang[sync] = gang
        return GANG, gang

    def _gang(self, key: tuple[object, ...], size: int) -> int:
        known = self._gang_ids.get(key)
        if known is None:
            known = self._gang_ids[key] = len(self.wiring.gang_size)
            self.wiring.gang_size.append(size)
            self.wiring.gate.append(-1)
            self.wiring.reduction.append(-1)
        return known
