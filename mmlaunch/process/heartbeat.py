"""The state of each worker, in a small file that workers write and the launcher reads.

One slot per local rank, shared through mmap: a worker's beat is one memory write and
needs no thread, so a stopped process and a wedged one both fall silent. Whether a rank
computes or waits for a peer is recorded as well, because only that tells the rank that
hangs from the ranks that wait for it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mmlaunch.process.process_tree import ProcessId


class WorkerState(IntEnum):
    """The state that a worker reports."""

    NOT_STARTED = 0
    COMPUTING = 1
    WAITING = 2
    DONE = 3


@dataclass(slots=True, kw_only=True)
class Where:
    """Place in the program, for messages. The executor may set the fields or call ``beat``."""

    module: str = ""
    step: int = -1
    instruction_index: int = -1
    instruction: str = ""

    def __str__(self) -> str:
        parts = [f"module {self.module}"] if self.module else []
        if self.step >= 0:
            parts.append(f"step {self.step}")
        if self.instruction:
            parts.append(f"instruction {self.instruction}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A slot as the launcher reads it.

    Attributes:
        local_rank: whose slot it is.
        process: the worker's process; None before it has registered.
        state: the last one that it reported.
        progress_s: the time of that report, seconds of ``time.monotonic`` (the same clock in
            every process of a machine).
        where: the last reported place in the program.
        peers: global ranks it waits for; empty when it does not say.
    """

    local_rank: int
    process: ProcessId | None
    state: WorkerState
    progress_s: float
    where: Where
    peers: tuple[int, ...]


# Native byte order and alignment: then a time is written in one store and never read by half.
_IDENTITY = struct.Struct("@qq")  # pid, start ticks
_BEAT = struct.Struct("@dBqq40s40s")  # time, state, step, instruction index, instruction, module
_TICK = struct.Struct("@dB")  # the front of _BEAT
_PEERS = struct.Struct("@B8h")  # how many (255: unknown), the first eight
_BEAT_AT = _IDENTITY.size
_PEERS_AT = _BEAT_AT + _BEAT.size
_SLOT_BYTES = 160
_HEADER_BYTES = 64
_STOP_AT = 0
_RELEASED_AT = 1
_COMPUTING = int(WorkerState.COMPUTING)
_WAITING = int(WorkerState.WAITING)


class Heartbeat:
    """A worker's side of its slot. Every call costs about a microsecond.

    Args:
        buffer: the board's memory.
        local_rank: which slot is written.
    """

    def __init__(self, buffer: mmap.mmap | bytearray, local_rank: int) -> None:
        self._buffer = buffer
        self._slot = _HEADER_BYTES + local_rank * _SLOT_BYTES
        self._tick_at = self._slot + _BEAT_AT
        self._peers_at = self._slot + _PEERS_AT
        self._waiting = _Waiting(self)
        self.where = Where()

    @classmethod
    def detached(cls) -> Heartbeat:
        """One that nobody reads, for a process that no launcher started."""
        return cls(bytearray(_HEADER_BYTES + _SLOT_BYTES), 0)

    def register(self) -> None:
        """Say which process owns the slot."""
        me = ProcessId.of(os.getpid())
        self.beat(-1, -1, "")
        _IDENTITY.pack_into(self._buffer, self._slot, me.pid, me.start_ticks)

    def beat(
        self, step: int, instruction_index: int, instruction: str, module: str | None = None
    ) -> None:
        """Say that this rank begins an instruction; ``module`` stays when it is None."""
        where = self.where
        where.step = step
        where.instruction_index = instruction_index
        where.instruction = instruction
        if module is not None:
            where.module = module
        _BEAT.pack_into(
            self._buffer,
            self._tick_at,
            time.monotonic(),
            _COMPUTING,
            step,
            instruction_index,
            instruction.encode(),
            where.module.encode(),
        )

    def waiting(self, peers: tuple[int, ...] = ()) -> _Waiting:
        """Context in which this rank waits for a message or a collective of ``peers``."""
        num = len(peers) if peers else 255
        padded = (*peers[:8], *(-1,) * (8 - len(peers[:8])))
        _PEERS.pack_into(self._buffer, self._peers_at, min(num, 255), *padded)
        return self._waiting

    def done(self) -> None:
        """Say that the entry returned and its result is stored."""
        self._tick(int(WorkerState.DONE))

    def should_stop(self) -> bool:
        """Whether the launcher was asked to stop."""
        return self._buffer[_STOP_AT] != 0

    def request_stop(self) -> None:
        """Ask every rank of this machine to stop after its step."""
        self._buffer[_STOP_AT] = 1

    def released(self) -> bool:
        """Whether the launcher has every result."""
        return self._buffer[_RELEASED_AT] != 0

    def _tick(self, state: int) -> None:
        _TICK.pack_into(self._buffer, self._tick_at, time.monotonic(), state)


class _Waiting:
    """Marks the slot as waiting and back; one object per heartbeat, so that entering is cheap."""

    __slots__ = ("_heartbeat",)

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def __enter__(self) -> None:
        self._heartbeat._tick(_WAITING)

    def __exit__(self, *_: object) -> None:
        self._heartbeat._tick(_COMPUTING)


class Board:
    """All slots of one machine, as a file.

    Args:
        path: file to map.
        num_slots: local ranks.
        create: make the file (the launcher) instead of opening it (a worker).

    Raises:
        OSError: the file cannot be made; a full disk shows here and not as a bus error later.
    """

    def __init__(self, path: Path, *, num_slots: int, create: bool = False) -> None:
        self._num_slots = num_slots
        num_bytes = _HEADER_BYTES + num_slots * _SLOT_BYTES
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, num_bytes)
            self._buffer = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)

    def heartbeat(self, local_rank: int) -> Heartbeat:
        """The worker's side of one slot."""
        return Heartbeat(self._buffer, local_rank)

    def clear(self) -> None:
        """Forget the workers of the last attempt; a wish to stop stays."""
        self._buffer[_RELEASED_AT:] = bytes(len(self._buffer) - _RELEASED_AT)

    def request_stop(self) -> None:
        """Make ``should_stop`` true on every rank of this machine."""
        self._buffer[_STOP_AT] = 1

    def release(self) -> None:
        """Tell workers that every result has arrived."""
        self._buffer[_RELEASED_AT] = 1

    def snapshots(self) -> list[Snapshot]:
        """Every slot, in rank order."""
        return [self._snapshot(local_rank) for local_rank in range(self._num_slots)]

    def _snapshot(self, local_rank: int) -> Snapshot:
        slot = _HEADER_BYTES + local_rank * _SLOT_BYTES
        pid, start_ticks = _IDENTITY.unpack_from(self._buffer, slot)
        progress_s, state, step, index, text, module = _BEAT.unpack_from(
            self._buffer, slot + _BEAT_AT
        )
        num_peers, *peers = _PEERS.unpack_from(self._buffer, slot + _PEERS_AT)
        return Snapshot(
            local_rank=local_rank,
            process=ProcessId(pid=pid, start_ticks=start_ticks) if pid else None,
            state=WorkerState(state),
            progress_s=progress_s,
            where=Where(
                module=_text(module),
                step=step if pid else -1,
                instruction_index=index if pid else -1,
                instruction=_text(text),
            ),
            peers=tuple(peers[: min(num_peers, 8)]) if num_peers != 255 else (),
        )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
