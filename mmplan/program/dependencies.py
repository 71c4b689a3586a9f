"""The dependencies between the instructions of a program, as flat arrays.

The checks use them for an order in which the instructions can run, the simulator for their times.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from mmplan.program.instructions import (
    Collective,
    Compute,
    Instruction,
    Message,
    MessageKey,
    Op,
    Sync,
)
from mmplan.program.model import Program
from mmplan.program.shards import Ranks

# Kinds of instructions. A GROUP instruction starts on all ranks of its group together.
POST = 0
SEND = 1
ALONE = 2
GROUP = 3
START = 4
STEP = 5
# The start of a reduction, which begins in the next compute of its rank.
START_INSIDE = 6

# What carries started collectives: the number of a reductions' communicator, or the ranks of a loss
# and its number among those of the same ranks.
_Channel = int | tuple[Ranks, int]


@dataclass(slots=True)
class Dependencies:
    """Instruction i of rank r is ``kind[r][i]``; ``arg[r][i]`` depends on its kind.

    Attributes:
        arg: POST and SEND: message; GROUP: group; START, START_INSIDE: started; ALONE, STEP: 0.
        input_messages: by position, the messages that a compute waits for: those posted before it.
        messages: their keys, by first appearance.
        link: per message, an index of its (source, target) pair.
        group_size: number of ranks of a group.
        gate: per group, the started collective that it also waits for, or -1: its own, or the last
            one of its ranks before it on their communicator.
        reduction: per group, its reduction, or -1; -1 too where that has started before.
        started: the start of each collective that runs beside what its ranks do: of a sync or of a
            reduction.
        channel: per started, an index of its communicator, which carries one at a time.
        started_size: number of ranks that start it.
        started_groups: per started, the groups that wait for it.
    """

    kind: list[list[int]] = field(default_factory=list[list[int]])
    arg: list[list[int]] = field(default_factory=list[list[int]])
    input_messages: list[dict[int, tuple[int, ...]]] = field(
        default_factory=list[dict[int, tuple[int, ...]]]
    )
    messages: list[MessageKey] = field(default_factory=list[MessageKey])
    link: list[int] = field(default_factory=list[int])
    num_links: int = 0
    group_size: list[int] = field(default_factory=list[int])
    gate: list[int] = field(default_factory=list[int])
    reduction: list[int] = field(default_factory=list[int])
    started: list[Sync | Collective] = field(default_factory=list[Sync | Collective])
    channel: list[int] = field(default_factory=list[int])
    started_size: list[int] = field(default_factory=list[int])
    started_groups: list[set[int]] = field(default_factory=list[set[int]])


def find_dependencies(program: Program) -> Dependencies:
    """The dependencies of a program whose indices are all in range."""
    builder = _Builder(program)
    for rank, row in enumerate(program.instructions):
        builder.add_row(rank, row)
    return builder.dependencies


class _Builder:
    def __init__(self, program: Program) -> None:
        self.dependencies = Dependencies()
        self._program = program
        self._message_ids: dict[MessageKey, int] = {}
        self._link_ids: dict[tuple[int, int], int] = {}
        self._group_ids: dict[tuple[object, ...], int] = {}
        self._started_ids: dict[Sync | Collective, int] = {}
        self._channel_ids: dict[_Channel, int] = {}
        # Of the row that is added, by the number of the communicator.
        self._last_start: dict[int, int] = {}

    def add_row(self, rank: int, row: tuple[Instruction, ...]) -> None:
        if not row:
            # Most ranks, where one stands for many.
            self._append([], [], {})
            return
        self._last_start.clear()
        replicas = {s.index: (s, s.place(rank)[0]) for s in self._program.stages_of(rank)}
        posted: defaultdict[tuple[int, bool, int], list[int]] = defaultdict(list)
        kinds: list[int] = []
        args: list[int] = []
        inputs: dict[int, tuple[int, ...]] = {}
        for position, item in enumerate(row):
            kind, arg = STEP, 0
            if isinstance(item, Message):
                kind, arg = self._message(rank, item)
                if kind == POST:
                    posted[item.stage, item.op is Op.RECV_B, item.mb].append(arg)
            elif isinstance(item, Compute):
                stage, replica = replicas[item.stage]
                weights = item.op is Op.WEIGHT
                if not weights:
                    taken = posted.pop((item.stage, item.is_backward, item.mb), ())
                    inputs[position] = tuple(taken)
                ranks = stage.meeting(item.op, replica)
                if ranks:
                    key = stage.index, item.op, ranks[0], item.mb
                    kind, arg = GROUP, self._group(key, len(ranks))
                else:
                    kind = ALONE
            elif isinstance(item, Sync):
                kind, arg = self._sync(item)
            elif isinstance(item, Collective):
                kind, arg = self._collective(item)
            kinds.append(kind)
            args.append(arg)
        self._append(kinds, args, inputs)

    def _append(
        self, kinds: list[int], args: list[int], inputs: dict[int, tuple[int, ...]]
    ) -> None:
        self.dependencies.kind.append(kinds)
        self.dependencies.arg.append(args)
        self.dependencies.input_messages.append(inputs)

    def _message(self, rank: int, item: Message) -> tuple[int, int]:
        key = item.key(rank)
        known = self._message_ids.get(key)
        if known is None:
            known = self._message_ids[key] = len(self.dependencies.messages)
            self.dependencies.messages.append(key)
            pair = self._link_ids.setdefault(key[2:4], len(self._link_ids))
            self.dependencies.link.append(pair)
            self.dependencies.num_links = len(self._link_ids)
        return (SEND if item.is_send else POST), known

    def _collective(self, item: Collective) -> tuple[int, int]:
        if item.op is Op.COUNT:
            return GROUP, self._group(
                (item.op, item.index), len(self._program.losses[item.index].ranks)
            )
        reduction = self._program.reductions[item.index]
        # Not by ranks: of some of a plan's ranks, different sets may be one.
        number = reduction.communicator
        if item.op is Op.REDUCE_START:
            self._last_start[number] = self._started(item, number, len(reduction.ranks))
            return START_INSIDE, self._last_start[number]
        group = self._group((item.op, item.index, item.mb), len(reduction.ranks))
        if item.op is Op.REDUCE:
            own = self._started_ids.get(Collective(Op.REDUCE_START, item.index, item.mb))
            start = self._last_start.get(number) if own is None else own
            if own is None:
                self.dependencies.reduction[group] = item.index
            if start is not None:
                self._wait(group, start)
        return GROUP, group

    def _sync(self, item: Sync) -> tuple[int, int]:
        loss = self._program.cross_sample(item.loss)
        on = loss.ranks, loss.channel
        start = self._started(Sync(Op.SYNC_START, item.loss, item.batch), on, len(loss.ranks))
        if item.op is Op.SYNC_START:
            return START, start
        group = self._group((Op.SYNC_WAIT, item.loss, item.batch), len(loss.ranks))
        self._wait(group, start)
        return GROUP, group

    def _started(self, start: Sync | Collective, on: _Channel, size: int) -> int:
        known = self._started_ids.get(start)
        if known is None:
            known = self._started_ids[start] = len(self.dependencies.started)
            channel = self._channel_ids.setdefault(on, len(self._channel_ids))
            self.dependencies.started.append(start)
            self.dependencies.channel.append(channel)
            self.dependencies.started_size.append(size)
            self.dependencies.started_groups.append(set())
        return known

    def _wait(self, group: int, start: int) -> None:
        self.dependencies.gate[group] = start
        self.dependencies.started_groups[start].add(group)

    def _group(self, key: tuple[object, ...], size: int) -> int:
        known = self._group_ids.get(key)
        if known is None:
            known = self._group_ids[key] = len(self.dependencies.group_size)
            self.dependencies.group_size.append(size)
            self.dependencies.gate.append(-1)
            self.dependencies.reduction.append(-1)
        return known
