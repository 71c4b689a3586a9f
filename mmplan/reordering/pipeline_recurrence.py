"""The makespan of a program as a recurrence, for many vectors of compute times at once.

If messages take no time, a compute starts when its rank has ended the instruction before it and
when the producers of its inputs have ended. So each end is the latest of some other ends, plus
the compute's own time. Nodes of one level do not wait for each other: one numpy operation computes
a level for all candidates.

Shape suffixes used in this file: N = computes, losses and reductions ("nodes"), R = candidates,
S = stages, M = micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Indices
from mmplan.errors import InvalidInputError
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

# (stage, replica, micro-batch, operation) of a compute.
_ComputeKey = tuple[int, int, int, Op]
# The key of losses, reductions and helper nodes.
_NO_COMPUTE: _ComputeKey = -1, 0, 0, Op.FORWARD
# A node with more predecessors than this gets helper nodes in between: rows of a level are as wide
# as its widest node. Chosen by hand.
_MAX_WAITS = 6


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes [start, stop); ``waits[k][i]`` is the k-th predecessor of node i, the last repeated."""

    start: int
    stop: int
    waits: tuple[Indices, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The predecessors of every node of a program; built once by :func:`make_recurrence`.

    Attributes:
        stage: [N], stage of a compute; -1 for a loss or a reduction.
        replica: [N], its replica.
        mb: [N], its micro-batch.
        backward: [N], whether it is a backward, or the ``I`` of a split one.
        weights: [N], whether it is the ``W`` of a split backward.
        share: [N], its part of the whole forward or backward: 1, or half for a split backward.
    """

    stage: Indices
    replica: Indices
    mb: Indices
    backward: NDArray[np.bool_]
    weights: NDArray[np.bool_]
    share: Floats
    _levels: tuple[_Level, ...] = field(repr=False)

    @property
    def num_nodes(self) -> int:
        """Number of computes, losses and reductions."""
        return len(self.stage)

    @property
    def num_levels(self) -> int:
        """Number of nodes on the longest path."""
        return len(self._levels) + 1

    def makespans(self, time_NR: Floats) -> Floats:
        """The end of the last node for each candidate [R], losses and reductions included.

        Args:
            time_NR: time of each node, in any unit; overwritten.
        """
        end_NR = time_NR
        for level in self._levels:
            starts = end_NR.take(level.waits[0], axis=0)
            for predecessors in level.waits[1:]:
                np.maximum(starts, end_NR.take(predecessors, axis=0), out=starts)
            end_NR[level.start : level.stop] += starts
        return end_NR.max(axis=0)


def make_recurrence(program: Program) -> Recurrence:
    """The recurrence of a program: its simulation with messages that take no time.

    Raises:
        InvalidInputError: the program has no computes, or deadlocks.
    """
    nodes = _Nodes(program)
    for rank, row in enumerate(program.instructions):
        nodes.add_row(rank, row)
    nodes.connect()
    levels = _levels(nodes.waits)
    if not levels:
        raise InvalidInputError(
            f"the program {program.name} computes nothing", hint="solve the workload again"
        )
    return _numbered(nodes, levels)


class _Nodes:
    """Collects the nodes of all ranks; a collective of several ranks is one node."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ids: dict[Hashable, int] = {}
        # The node after which each message is sent, and the messages that each node takes.
        self._sent: dict[MessageKey, int] = {}
        self._takes: list[tuple[int, MessageKey]] = []
        self.keys: list[_ComputeKey] = []
        self.waits: list[set[int]] = []

    def add_row(self, rank: int, row: Sequence[Instruction]) -> None:
        replicas = {s.index: s.place(rank)[0] for s in self._program.stages_of(rank)}
        posted: defaultdict[tuple[int, bool, int], list[MessageKey]] = defaultdict(list)
        last = -1
        for item in row:
            if isinstance(item, Message):
                key = item.key(rank)
                if item.is_send:
                    self._sent[key] = last
                else:
                    posted[item.stage, item.op is Op.RECV_B, item.mb].append(key)
                continue
            node = self._node(item, replicas)
            if node < 0:
                continue
            if last >= 0:
                self.waits[node].add(last)
            if isinstance(item, Compute) and item.op is not Op.WEIGHT:
                taken = posted.pop((item.stage, item.is_backward, item.mb), [])
                self._takes += [(node, key) for key in taken]
            last = node

    def _node(self, item: Instruction, replicas: dict[int, int]) -> int:
        """The node of an instruction, new or known; -1 for an instruction that takes no time."""
        key: Hashable = item
        compute = _NO_COMPUTE
        if isinstance(item, Compute):
            key = compute = item.stage, replicas[item.stage], item.mb, item.op
        elif not isinstance(item, Collective | Sync) or item.op in (Op.SYNC_START, Op.REDUCE_START):
            return -1
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.keys)
            self.keys.append(compute)
            self.waits.append(set())
        return known

    def connect(self) -> None:
        """Let each node wait for the senders of its messages, with helpers between many."""
        for node, key in self._takes:
            sender = self._sent.get(key)
            if sender is None:
                raise InvalidInputError(
                    f"the program {self._program.name} waits for a message that nobody sends",
                    hint="mmplan check PLAN lists every fault; solve the workload again",
                )
            if sender >= 0:
                self.waits[node].add(sender)
        for node in range(len(self.waits)):
            while len(self.waits[node]) > _MAX_WAITS:
                self.waits[node] = self._through_helpers(self.waits[node])

    def _through_helpers(self, waits: set[int]) -> set[int]:
        """Helper nodes that take no time, each with a few of ``waits`` as predecessors."""
        rest = sorted(waits)
        helpers: set[int] = set()
        for start in range(0, len(rest), _MAX_WAITS):
            helpers.add(len(self.keys))
            self.keys.append(_NO_COMPUTE)
            self.waits.append(set(rest[start : start + _MAX_WAITS]))
        return helpers


def _levels(waits: Sequence[set[int]]) -> list[list[int]]:
    """Nodes by the length of the longest path before them.

    Raises:
        InvalidInputError: some nodes form a cycle.
    """
    after: list[list[int]] = [[] for _ in waits]
    missing = [len(item) for item in waits]
    for node, item in enumerate(waits):
        for other in item:
            after[other].append(node)
    level = [node for node, count in enumerate(missing) if count == 0]
    levels: list[list[int]] = []
    while level:
        levels.append(level)
        freed: list[int] = []
        for node in level:
            for other in after[node]:
                missing[other] -= 1
                if missing[other] == 0:
                    freed.append(other)
        level = freed
    if any(missing):
        raise InvalidInputError(
            "the program deadlocks: some of its computes wait for each other",
            hint="mmplan check PLAN lists every fault; solve the workload again",
        )
    return levels


def _numbered(nodes: _Nodes, levels: Sequence[Sequence[int]]) -> Recurrence:
    """Number the nodes level by level, so that each level is a slice."""
    flat = [node for level in levels for node in level]
    number = np.empty(len(flat), np.intp)
    number[flat] = np.arange(len(flat))
    rows: list[_Level] = []
    start = len(levels[0])
    for level in levels[1:]:
        waits = [number[sorted(nodes.waits[node])].tolist() for node in level]
        width = max(map(len, waits))
        padded = [item + item[-1:] * (width - len(item)) for item in waits]
        columns = tuple(np.array(column, np.intp) for column in zip(*padded, strict=True))
        rows.append(_Level(start, start + len(level), columns))
        start += len(level)
    stage, replica, mb, op = zip(*(nodes.keys[node] for node in flat), strict=True)
    parts = [item in (Op.INPUT, Op.WEIGHT) for item in op]
    return Recurrence(
        stage=np.array(stage, np.intp),
        replica=np.array(replica, np.intp),
        mb=np.array(mb, np.intp),
        backward=np.array([item in (Op.BACKWARD, Op.INPUT) for item in op], np.bool_),
        weights=np.array([item is Op.WEIGHT for item in op], np.bool_),
        share=np.where(parts, 0.5, 1.0),
        _levels=tuple(rows),
    )
