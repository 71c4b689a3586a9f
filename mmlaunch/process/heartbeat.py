"""The state of each worker, in a small file that workers write and the launcher reads.

One slot per local rank, shared through mmap: a worker's beat is one memory write and
needs no thread, so a stopped process and a wedged one both fall silent. Whether a rank
computes or waits for a peer is recorded as well, because only that tells the rank that
hangs from the ranks that wait for it.

The host of a CUDA device runs ahead of it, so there the slot shows the device's place: each
stretch of the program ends with an event on the stream, and a thread writes down the first
stretch that is not over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from mmlaunch.process.process_tree import ProcessId


class WorkerState(IntEnum):
    """The state that a worker reports."""

    NOT_STARTED = 0
    COMPUTING = 1
    WAITING = 2
    DONE = 3


# In the place of an instruction's index: a phase, in one of which a rank may be silent for longer.
_SLOW_PHASE = -1
_PHASE = -2


@dataclass(slots=True, kw_only=True)
class Where:
    """Place in the program, for messages. The executor may set the fields or call ``beat``.

    Attributes:
        module: name of the unit or module that runs; may be empty.
        step: training step; -1 before the first.
        instruction_index: negative in a phase, whose name ``instruction`` then is.
    """

    module: str = ""
    step: int = -1
    instruction_index: int = _SLOW_PHASE
    instruction: str = ""

    @property
    def is_slow(self) -> bool:
        """Whether this part of a run may take longer than a step: start-up, loading and saving."""
        return self.instruction_index == _SLOW_PHASE

    def __str__(self) -> str:
        parts = [f"module {self.module}"] if self.module else []
        if self.step >= 0:
            parts.append(f"step {self.step}")
        if self.instruction:
            is_phase = self.instruction_index < 0
            parts.append(self.instruction if is_phase else f"instruction {self.instruction}")
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
_DUMP_AT = 2
_COMPUTING = int(WorkerState.COMPUTING)
_WAITING = int(WorkerState.WAITING)
# What CUDA and its libraries say when queued work fails; memory is given out by the host.
_DEVICE_ERROR = re.compile(r"CUDA (driver )?error|CU(BLAS|DNN)_STATUS|cuDNN error|\bNCCL\b")
# Between two looks at the device's events; chosen by hand.
_LOOK_S = 0.05


class Mark(Protocol):
    """The end of a stretch of the device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has come to it; does not wait.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


class Heartbeat:
    """A worker's side of its slot. Every call costs about a microsecond.

    Args:
        buffer: the board's memory.
        local_rank: which slot is written.

    Attributes:
        on_wait: called where a wait for peers begins and where it ends.
    """

    def __init__(self, buffer: mmap.mmap | bytearray, local_rank: int) -> None:
        self._buffer = buffer
        self._slot = _HEADER_BYTES + local_rank * _SLOT_BYTES
        self._tick_at = self._slot + _BEAT_AT
        self._peers_at = self._slot + _PEERS_AT
        self._waiting = _Waiting(self)
        self._awaited: tuple[int, ...] = ()
        self._device: _DeviceProgress | None = None
        self.where = Where()
        self.on_wait: Callable[[], None] | None = None

    @classmethod
    def detached(cls) -> Heartbeat:
        """One that nobody reads, for a process that no launcher started."""
        return cls(bytearray(_HEADER_BYTES + _SLOT_BYTES), 0)

    def register(self) -> None:
        """Say which process owns the slot."""
        me = ProcessId.of(os.getpid())
        self.phase("importing")
        self._store(self._slot, _IDENTITY.pack(me.pid, me.start_ticks))

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
        if self._device is None:
            self._write(_COMPUTING, step, instruction_index, instruction, where.module)
        else:
            self._enter(_COMPUTING)

    def phase(self, name: str, step: int = -1, *, slow: bool = True) -> None:
        """Say that this rank begins something that is no instruction.

        Args:
            name: at most 40 bytes, as in "building the model".
            step: to which it belongs; -1 before the first.
            slow: whether it may take longer than a step.
        """
        Heartbeat.beat(self, step, _SLOW_PHASE if slow else _PHASE, name, "")

    def waiting(self, peers: tuple[int, ...] = ()) -> _Waiting:
        """Context in which this rank waits for a message or a collective of ``peers``.

        On CUDA the host comes out at once, and what it queued there is the device's wait.
        """
        self._awaited = peers
        if self._device is None:
            self._write_peers(peers)
        return self._waiting

    def follow(self, mark: Callable[[], Mark], dump: Callable[[], None] = lambda: None) -> None:
        """Show the device's place from now on, as the host runs ahead of it.

        Args:
            mark: marks the end of all work that the device has been given by now.
            dump: writes down what else the launcher wants to know of a rank that hangs.
        """
        self._device = _DeviceProgress(self, mark, dump)

    def place_of(self, error: BaseException) -> Where:
        """The place to which an error belongs that this rank meets now."""
        late = self.lateness(error)
        if not late:
            return self.where
        return replace(self.where, instruction=f"{self.where.instruction} or before; {late}")

    def lateness(self, error: BaseException) -> str:
        """What the device had completed, where it may have met an error before its host did.

        Empty for an error of the host, and where the host waits for each instruction.
        """
        if self._device is None or not _is_of_the_device(error):
            return ""
        last = self._device.completed
        done = f"{last.instruction} of step {last.step}" if last else "no instruction"
        return f"the device had completed {done}"

    def done(self) -> None:
        """Say that the entry returned and its result is stored."""
        if self._device is not None:
            self._device.stop()
        self._store(self._tick_at, _TICK.pack(time.monotonic(), WorkerState.DONE))

    def should_stop(self) -> bool:
        """Whether the launcher was asked to stop."""
        return self._buffer[_STOP_AT] != 0

    def request_stop(self) -> None:
        """Ask every rank of this machine to stop after its step."""
        self._buffer[_STOP_AT] = 1

    def released(self) -> bool:
        """Whether the launcher has every result."""
        return self._buffer[_RELEASED_AT] != 0

    def dump_requested(self) -> bool:
        """Whether the launcher wants to know more of ranks that hang."""
        return self._buffer[_DUMP_AT] != 0

    def _turn(self, state: int) -> None:
        """Begin or end a wait."""
        self._enter(state)
        if self.on_wait is not None:
            self.on_wait()

    def _enter(self, state: int) -> None:
        if self._device is None:
            self._store(self._tick_at, _TICK.pack(time.monotonic(), state))
            return
        where = self.where
        peers = self._awaited if state == _WAITING else ()
        place = where.step, where.instruction_index, where.instruction, where.module
        self._device.enter(_Stretch(state, *place, peers))

    def _write(self, state: int, step: int, index: int, text: str, module: str) -> None:
        now_s = time.monotonic()
        self._store(
            self._tick_at, _BEAT.pack(now_s, state, step, index, text.encode(), module.encode())
        )

    def _write_peers(self, peers: tuple[int, ...]) -> None:
        num = len(peers) if peers else 255
        padded = (*peers[:8], *(-1,) * (8 - len(peers[:8])))
        self._store(self._peers_at, _PEERS.pack(min(num, 255), *padded))

    def _store(self, at: int, packed: bytes) -> None:
        # ``pack_into`` clears the place first: whoever reads in between finds the time 0.
        self._buffer[at : at + len(packed)] = packed


class _Waiting:
    """Marks the slot as waiting and back; one object per heartbeat, so that entering is cheap."""

    __slots__ = ("_heartbeat",)

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def __enter__(self) -> None:
        self._heartbeat._turn(_WAITING)

    def __exit__(self, *_: object) -> None:
        self._heartbeat._turn(_COMPUTING)


class _Stretch(NamedTuple):
    """A part of the program in one state: an instruction, or a wait inside it."""

    state: int
    step: int
    position: int
    instruction: str
    module: str
    peers: tuple[int, ...]


class _DeviceProgress:
    """Shows the first stretch that a device has not completed; the last one is the host's own.

    A wait whose mark is not reached is one of the device, or the host is in it still: both are
    the same to whoever looks for the rank that the others wait for.

    Attributes:
        completed: the last instruction that was over at the last look.
    """

    def __init__(
        self, heartbeat: Heartbeat, mark: Callable[[], Mark], dump: Callable[[], None]
    ) -> None:
        self._heartbeat, self._mark, self._dump = heartbeat, mark, dump
        where = heartbeat.where
        self._host = _Stretch(_COMPUTING, where.step, -1, where.instruction, where.module, ())
        self._shown = self._host
        self._behind: deque[tuple[Mark, _Stretch]] = deque()
        self._stopped = threading.Event()
        self.completed: _Stretch | None = None
        self._thread = threading.Thread(target=self._watch, name="mmlaunch-device", daemon=True)
        self._thread.start()

    def enter(self, stretch: _Stretch) -> None:
        """Say that the host begins a stretch; what it has queued by now is the last one's."""
        mark = self._mark()
        ended, self._host = self._host, stretch
        self._behind.append((mark, ended))

    def stop(self) -> None:
        """Let the slot be; the thread has ended on return."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        dumped = False
        while not self._stopped.wait(_LOOK_S):
            # Of a device that has failed the rank's own thread hears as well.
            with contextlib.suppress(RuntimeError):
                self._look()
                if not dumped and self._heartbeat.dump_requested():
                    dumped = True
                    self._dump()

    def _look(self) -> None:
        behind = self._behind
        while behind and behind[0][0].query():
            _, over = behind.popleft()
            following = behind[0][1] if behind else self._host
            over_yet = (over.step, over.position) != (following.step, following.position)
            if over_yet and over.position >= 0:
                self.completed = over
        now = behind[0][1] if behind else self._host
        if now is not self._shown:
            self._shown = now
            self._heartbeat._write_peers(now.peers)
            self._heartbeat._write(*now[:-1])


def _is_of_the_device(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RuntimeError) and _DEVICE_ERROR.search(str(error)):
            return True
        error = error.__cause__
    return False


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

    def request_dump(self) -> None:
        """Ask every rank of this machine to write down what it knows of a hang."""
        self._buffer[_DUMP_AT] = 1

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
