"""Who is to blame when a run fails.

When one worker dies, the others die of it: their connections close or time out, often
before the launcher has looked once. So every worker that raises leaves a record, and
the launcher ranks the causes: an error of a worker's own, then a worker that vanished
without a word, and errors of the network last; within each, the earliest.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mmlaunch.process.heartbeat import Snapshot, Where, WorkerState
from mmplan.errors import (
    InvalidInputError,
    MMPlanError,
    NotFiniteError,
    RunFailedError,
    UnfitEnvironmentError,
)
from mmplan.schema.base import write_text

# What torch, gloo and NCCL say when the other side is gone or late.
_NETWORK_ERROR = re.compile(
    r"connection (closed|reset|refused)|broken pipe|\bgloo/|\bNCCL\b|socket|recvBytes|sendBytes"
    r"|timed out waiting|wait timeout|timeout after|application timeout|failed to connect",
    re.IGNORECASE,
)


class WorkerFailedError(RunFailedError):
    """A worker died, hung or was stopped, and the run with it.

    Attributes:
        rank: the global rank to blame.
        detail: that worker's traceback, or where it hangs; may be empty.
    """

    def __init__(self, message: str, *, hint: str | None, rank: int, detail: str) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A worker's record of its own failure; one JSON file per attempt and rank.

    Attributes:
        rank: global rank.
        attempt: 0 for the first start, then one more for each restart.
        module: name of the unit or module that ran; may be empty.
        step: training step; -1 before the first.
        instruction: the instruction as printed, or a phase; may be empty.
        instruction_index: negative for a phase.
        kind: class of the exception, whose text is ``message``.
        wall_time_s: when, seconds since the epoch.
        is_network: the other side was gone or late, so somebody else is to blame.
        exit_code: of an error that is meant for the user (a wrong file, a full disk), else None.
        hint: the remedy for such an error.
        detail: shown below such an error: the traceback of a user's block or loss.
    """

    rank: int
    attempt: int
    module: str
    step: int
    instruction: str
    instruction_index: int
    kind: str
    message: str
    traceback: str
    wall_time_s: float
    is_network: bool
    exit_code: int | None = None
    hint: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The one worker to blame, and the message about it.

    Attributes:
        rank: its global rank.
        line: one line for the user.
        hint: a possible remedy.
        detail: traceback, or empty.
        is_hang: it still lives and does not move.
        lost_peer: it only lost another one or waits for it, on another machine perhaps.
        exit_code: 2 or 4 where the input or the machine is at fault, and no worker.
    """

    rank: int
    line: str
    hint: str | None = None
    detail: str = ""
    is_hang: bool = False
    lost_peer: bool = False
    exit_code: int = RunFailedError.exit_code

    def error(self) -> MMPlanError:
        """The exception that ends the run."""
        for kind in (InvalidInputError, UnfitEnvironmentError):
            if self.exit_code == kind.exit_code:
                return kind(self.line, hint=self.hint)
        return WorkerFailedError(self.line, hint=self.hint, rank=self.rank, detail=self.detail)


def _describe(rank: int, where: Where) -> str:
    """``rank 2 (module vision, step 17, instruction 0F3)``."""
    return f"rank {rank} ({where})" if str(where) else f"rank {rank}"


def is_network_error(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that a peer was gone or late."""
    cause: BaseException | None = error
    while cause is not None:
        names = {base.__name__ for base in type(cause).__mro__}
        if "DistError" in names:  # DistNetworkError, DistStoreError, DistBackendError
            return True
        if "RuntimeError" in names and _NETWORK_ERROR.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def write_record(
    folder: Path, *, rank: int, attempt: int, where: Where, error: BaseException
) -> None:
    """Leave a record of ``error``, whole or not at all."""
    record = FailureRecord(
        rank=rank,
        attempt=attempt,
        module=where.module,
        step=where.step,
        instruction=where.instruction,
        instruction_index=where.instruction_index,
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        wall_time_s=time.time(),
        is_network=is_network_error(error),
        exit_code=error.exit_code if isinstance(error, MMPlanError) else None,
        hint=error.hint if isinstance(error, MMPlanError) else None,
        detail=getattr(error, "detail", ""),
    )
    path = folder / f"attempt-{attempt}-rank-{rank}.json"
    write_text(path, json.dumps(asdict(record), indent=1))


def read_records(folder: Path, *, attempt: int) -> list[FailureRecord]:
    """Records of one attempt; a file that is not a record is passed over."""
    records: list[FailureRecord] = []
    for path in sorted(folder.glob(f"attempt-{attempt}-rank-*.json")):
        try:
            records.append(FailureRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return records


def write_start(folder: Path, *, attempt: int, step: int) -> None:
    """Note from which step's checkpoint an attempt goes on."""
    write_text(folder / f"attempt-{attempt}-start.json", json.dumps(step))


def died_on(folder: Path, *, attempt: int, saved: Sequence[int]) -> set[int]:
    """Steps of checkpoints that an attempt should not go on from, since earlier ones died there.

    One attempt that went on from it and met a number that is not finite before it came past the
    next checkpoint, or two that raised something else before that. A checkpoint of this set counts
    for no next one.

    Args:
        folder: of the failure records.
        attempt: the one that is about to start.
        saved: steps of all checkpoints.
    """
    strikes: Counter[int] = Counter()
    for earlier in range(attempt):
        start = _start_of(folder, earlier)
        own = [r for r in read_records(folder, attempt=earlier) if not r.is_network]
        if start is None or not own:
            continue
        first = min(own, key=lambda record: record.wall_time_s)
        if not any(start < step <= first.step and strikes[step] < 2 for step in saved):
            strikes[start] += 2 if first.kind == NotFiniteError.__name__ else 1
    return {step for step, count in strikes.items() if count > 1}


def _start_of(folder: Path, attempt: int) -> int | None:
    try:
        return int(json.loads((folder / f"attempt-{attempt}-start.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remove_records(folder: Path, ranks: Sequence[int]) -> None:
    """Remove the records of an earlier run in the same folder for these ranks."""
    for path in folder.glob("attempt-*-start.json") if 0 in ranks else ():
        path.unlink(missing_ok=True)
    for rank in ranks:
        for path in folder.glob(f"attempt-*-rank-{rank}.json"):
            path.unlink(missing_ok=True)


def blame_death(
    records: Sequence[FailureRecord],
    vanished: Sequence[tuple[int, int | None, Where]],
    *,
    include_network: bool,
) -> Blame | None:
    """Pick the worker whose death explains the others.

    Args:
        records: of workers.
        vanished: (global rank, exit code or None, last place) of each worker that ended
            without a record, in the order in which they were noticed.
        include_network: blame a worker that only lost its peer when there is no other;
            False while a better explanation may still arrive.
    """
    own = [record for record in records if not record.is_network]
    if own:
        return _raised(min(own, key=lambda record: record.wall_time_s))
    if vanished:
        # An abort may be the C++ library's answer to a lost peer; nothing else is.
        rank, exit_code, where = min(vanished, key=lambda gone: gone[1] == -signal.SIGABRT)
        return _vanished(rank, exit_code, where)
    if records and include_network:
        return _lost_peer(min(records, key=lambda record: record.wall_time_s))
    return None


def _raised(record: FailureRecord) -> Blame:
    first_line = record.message.strip().partition("\n")[0]
    if record.exit_code is not None:
        # Worded for the user already: our own frames would only hide what to mend.
        return Blame(
            rank=record.rank,
            line=first_line,
            hint=record.hint,
            detail=record.detail,
            exit_code=record.exit_code,
        )
    said = f"{record.kind}: {first_line}" if first_line else record.kind
    where = Where(
        module=record.module,
        step=record.step,
        instruction_index=record.instruction_index,
        instruction=record.instruction,
    )
    return Blame(
        rank=record.rank,
        line=f"{_describe(record.rank, where)} died: {said}",
        detail=record.traceback,
    )


def _lost_peer(record: FailureRecord) -> Blame:
    verdict = _raised(record)
    return Blame(
        rank=record.rank,
        line=verdict.line.replace(" died: ", " lost a peer: ", 1),
        detail=record.traceback,
        lost_peer=True,
        hint="no worker of this machine died first: look at the other machines and the network",
    )


def blame_fork_server(rank: int, exit_code: int) -> Blame:
    """The process that starts a machine's workers has ended, and they with it.

    Args:
        rank: the first of the machine.
        exit_code: negative for a signal.
    """
    how, hint = f"ended with exit code {exit_code}", "if it wrote to stderr, that stands above"
    if exit_code < 0:
        how, hint = _killed(exit_code)
    return Blame(rank=rank, line=f"the process that starts the workers {how}", hint=hint)


def _killed(exit_code: int) -> tuple[str, str | None]:
    """How a signal ended a process, and a remedy."""
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = "if nobody killed it, memory ran out: use smaller micro-batches or fewer ranks"
    return f"was killed by {name}", hint if name == "SIGKILL" else None


def _vanished(rank: int, exit_code: int | None, where: Where) -> Blame:
    hint = None
    if exit_code is not None and exit_code < 0:
        how, hint = _killed(exit_code)
    elif exit_code is None:
        how = "vanished"
    else:
        how = f"left with exit code {exit_code} before it had finished"
        hint = "if it wrote to stderr, that stands above"
    return Blame(rank=rank, line=f"{_describe(rank, where)} {how}", hint=hint)


def blame_silence(
    snapshots: Sequence[Snapshot], *, base_rank: int, stalled_s: float
) -> Blame | None:
    """Pick the worker that keeps the others waiting.

    In this order: one that is stopped; one that does not wait for anybody (of several the one
    for which most wait, through others too; then the longest silent); one that has finished
    while others wait for it; else they wait for each other or for another machine.

    Args:
        snapshots: every local worker, all silent.
        base_rank: global rank of local rank 0.
        stalled_s: how long nothing has moved, seconds, for the message.

    Returns:
        The verdict; None when every worker has finished.
    """
    unfinished = sorted(
        (shot for shot in snapshots if shot.state is not WorkerState.DONE),
        key=lambda shot: shot.progress_s,
    )
    if not unfinished:
        return None
    for shot in unfinished:
        if shot.process is not None and shot.process.stopped():
            return _silent(base_rank, shot, f"is stopped: no progress for {stalled_s:.1f} s")
    waiting = [shot for shot in unfinished if shot.state is WorkerState.WAITING]
    busy = [shot for shot in unfinished if shot.state is not WorkerState.WAITING]
    if busy:
        shot = max(busy, key=lambda s: len(_waiters(base_rank + s.local_rank, waiting, base_rank)))
        waiters = _ranks(base_rank, waiting)
        tail = f" while {waiters} waited" if waiters else ""
        return _silent(base_rank, shot, f"hangs: no progress for {stalled_s:.1f} s{tail}")
    finished = blame_finished(unfinished, snapshots, base_rank=base_rank)
    if finished is not None:
        return finished
    local = {base_rank + shot.local_rank for shot in snapshots}
    abroad = [shot for shot in waiting if not local.issuperset(shot.peers)]
    first = (abroad or waiting)[0]
    peers = ", ".join(map(str, first.peers))
    of_whom = f" for rank {peers}" if peers else ""
    others = ", which runs on another machine" if abroad else ""
    what = f"waited{of_whom}{others} for {stalled_s:.1f} s, as did every rank of this machine"
    return replace(
        _silent(base_rank, first, what),
        lost_peer=bool(abroad) or not all(shot.peers for shot in waiting),
        hint="they wait for each other (mmplan check finds such plans), or for another machine",
    )


def _waiters(rank: int, waiting: Sequence[Snapshot], base_rank: int) -> set[int]:
    """Ranks that wait for a rank, or for one that does."""
    found: set[int] = set()
    reached = {rank}
    while reached:
        named = {base_rank + s.local_rank for s in waiting if not reached.isdisjoint(s.peers)}
        reached = named - found
        found |= named
    return found


def blame_finished(
    waiting: Sequence[Snapshot], everyone: Sequence[Snapshot], *, base_rank: int
) -> Blame | None:
    """Pick a worker that has finished while one of ``waiting`` still named it as awaited."""
    for shot in everyone:
        rank = base_rank + shot.local_rank
        waiters = [waiter for waiter in waiting if rank in waiter.peers]
        if shot.state is WorkerState.DONE and waiters:
            return Blame(
                rank=rank,
                line=f"{_describe(rank, shot.where)} had finished when "
                f"{_ranks(base_rank, waiters)} still waited for it",
                hint="its program ends too early: see that every receive has its send",
            )
    return None


def own_stack(text: str) -> str:
    """The part of a faulthandler dump that is about the worker's own code.

    Other threads and the frames by which the process was started are left out.
    """
    cause = [line for line in text.splitlines() if line.startswith("Fatal Python error")]
    _, found, current = text.partition("(most recent call first):\n")
    for title in ("Current thread", "Stack"):
        at = text.rfind(title)
        if at >= 0:
            _, found, current = text[at:].partition("(most recent call first):\n")
            break
    if not found:
        return text
    frames: list[str] = []
    for line in current.splitlines():
        if not line.startswith("  File") or "worker_main.py" in line:
            break
        frames.append(line)
    return "\n".join([*cause, "Stack (most recent call first):", *frames])


def _silent(base_rank: int, shot: Snapshot, what: str) -> Blame:
    rank = base_rank + shot.local_rank
    return Blame(
        rank=rank,
        line=f"{_describe(rank, shot.where)} {what}",
        hint="if that may take so long, allow more: "
        + ("--start-timeout" if shot.where.is_slow else "--timeout"),
        is_hang=True,
    )


def _ranks(base_rank: int, shots: Sequence[Snapshot]) -> str:
    ranks = sorted(base_rank + shot.local_rank for shot in shots)
    if not ranks:
        return ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
