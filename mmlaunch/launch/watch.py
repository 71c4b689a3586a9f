"""The launcher's eye on its workers: events, deaths, silence; and the end of them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from mmlaunch.launch import failures
from mmlaunch.launch.failures import Blame, FailureRecord
from mmlaunch.launch.worker_main import Job
from mmlaunch.process import fork_server, process_tree
from mmlaunch.process.heartbeat import Board, Snapshot, Where, WorkerState

OnEvent = Callable[[dict[str, Any]], None]
# How long a better explanation than "lost its peer" may take to arrive.
_SETTLE_S = 1.0
# For a hanging worker to write its stack after SIGUSR1; chosen by hand.
_STACK_S = 0.3
# For killed workers to be reaped; chosen by hand.
_REAP_S = 2.0
# A worker ends itself sooner, see process_tree.watch_launcher.
_LEAVE_S = 10.0
# Read at once of what the workers report.
_PIPE_BYTES = 1 << 16


class Watch:
    """Watches one machine's workers, attempt after attempt.

    Args:
        job: the launch; its ``control_dir`` exists.
        on_event: see :func:`mmlaunch.launch.launch.launch`.
    """

    def __init__(self, job: Job, *, on_event: OnEvent | None) -> None:
        self._job = job
        self._on_event = on_event
        self._board = Board(job.board_path, num_slots=job.num_local, create=True)
        os.mkfifo(job.events_path, 0o600)
        self._events = os.open(job.events_path, os.O_RDONLY | os.O_NONBLOCK)
        self._partial = b""
        self._processes: dict[int, BaseProcess] = {}
        self._process_ids: dict[int, process_tree.ProcessId] = {}
        self._vanished: dict[int, int] = {}
        self._started_s = time.monotonic()
        self._trouble_s: float | None = None
        self.stop_requested = False
        self._stop_announced = False

    def close(self) -> None:
        """Deliver the last events and close the files."""
        try:
            self._deliver()
        finally:
            os.close(self._events)

    def begin(self, job: Job) -> None:
        """Forget the last attempt; called before the workers of the next one start."""
        self._job = job
        self._board.clear()
        self._processes, self._process_ids, self._vanished = {}, {}, {}
        self._trouble_s = None

    def adopt(self, processes: Sequence[BaseProcess]) -> None:
        """Take note of the workers' processes, by local rank; their time runs from here."""
        self._started_s = time.monotonic()
        self._processes = dict(enumerate(processes))
        self._process_ids = {
            rank: process_tree.ProcessId.of(process.pid)
            for rank, process in self._processes.items()
            if process.pid is not None
        }

    def starting(self) -> bool:
        """Whether no worker has begun a step, so that there is nothing to save."""
        return all(shot.where.step < 0 for shot in self._board.snapshots())

    def request_stop(self) -> None:
        """Ask the workers to stop after their step; safe in a signal handler."""
        self.stop_requested = True
        self._board.request_stop()

    def announce(self, event: dict[str, Any]) -> None:
        """Hand an event to the user."""
        if self._on_event is not None:
            self._on_event(event)

    def poll(self) -> Blame | None:
        """Deliver events and look for trouble; the verdict once there is one."""
        if self.stop_requested and not self._stop_announced:
            self._stop_announced = True
            self.announce({"launcher": "stop-requested"})
        self._deliver()
        # In this order: what a worker says before it ends is there once its end is seen.
        exits = {
            local_rank: process.exitcode
            for local_rank, process in self._processes.items()
            if process.exitcode is not None
        }
        shots = self._snapshots()
        # Those of other machines lie in the same folder: their launchers judge them.
        own = range(self._job.base_rank, self._job.base_rank + self._job.num_local)
        found = failures.read_records(self._job.failures_dir, attempt=self._job.attempt)
        records = [record for record in found if record.rank in own]
        recorded = {record.rank - self._job.base_rank for record in records}
        for local_rank, exit_code in exits.items():
            finished = shots[local_rank].state is WorkerState.DONE and exit_code == 0
            if not finished and local_rank not in recorded:
                self._vanished.setdefault(local_rank, exit_code)
        if records or self._vanished:
            return self._judge_death(shots, records, recorded)
        return self._judge_silence(shots)

    def all_done(self) -> bool:
        """Whether every worker's result is stored."""
        return all(shot.state is WorkerState.DONE for shot in self._board.snapshots())

    def release(self) -> None:
        """Let the workers exit."""
        self._board.release()

    def join(self) -> None:
        """Wait until the workers have left, within a limit."""
        deadline_s = time.monotonic() + _LEAVE_S
        for process in self._processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))

    def results(self) -> list[Any]:
        """Results of the entries, JSON, by local rank."""
        paths = [self._job.result_path(rank) for rank in range(self._job.num_local)]
        return [json.loads(path.read_bytes()) for path in paths]

    def kill(self) -> None:
        """End every worker, and its children, now.

        SIGKILL at once: nobody saves on the way out (checkpoints are whole or absent at
        any moment), and a worker that waits in a collective would not hear anything else.
        """
        # A second Ctrl-C may come between starting workers and adopting them.
        registered = {
            shot.process.pid
            for shot in self._board.snapshots()
            if shot.process is not None and shot.process.alive()
        }
        for pid in registered | {process_id.pid for process_id in self._process_ids.values()}:
            process_tree.kill_group(pid)
        deadline_s = time.monotonic() + _REAP_S
        for process in self._processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
        self._process_ids = {}

    def keep_flights(self) -> None:
        """Let workers on GPUs write down their messages: a hang shows in those of all machines."""
        self._board.request_dump()
        time.sleep(_STACK_S)

    def _deliver(self) -> None:
        # With nothing to read: an error where a worker may still write, else nothing.
        with contextlib.suppress(BlockingIOError):
            while told := os.read(self._events, _PIPE_BYTES):
                self._partial += told
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            self.announce(json.loads(line))

    def _snapshots(self) -> list[Snapshot]:
        """The board, with the process ids of workers that have not registered yet."""
        return [
            shot
            if shot.process is not None
            else replace(
                shot,
                progress_s=self._started_s,
                where=Where(instruction="starting"),
                process=self._process_ids.get(shot.local_rank),
            )
            for shot in self._board.snapshots()
        ]

    def _judge_death(
        self, shots: list[Snapshot], records: list[FailureRecord], recorded: set[int]
    ) -> Blame | None:
        now_s = time.monotonic()
        self._trouble_s = self._trouble_s or now_s
        vanished = [
            (self._job.base_rank + rank, code, shots[rank].where)
            for rank, code in self._vanished.items()
            if rank not in recorded
        ]
        ended = fork_server.exit_code()
        if ended is not None:
            # The kernel ends the workers with it.
            return failures.blame_fork_server(self._job.base_rank, ended)
        verdict = failures.blame_death(records, vanished, include_network=False)
        if verdict is not None:
            return self._with_stack(verdict)
        if now_s - self._trouble_s < _SETTLE_S:
            return None
        lost = [shots[rank] for rank in recorded if 0 <= rank < len(shots)]
        return (
            self._blame_survivor(shots)
            or failures.blame_finished(lost, shots, base_rank=self._job.base_rank)
            or failures.blame_death(records, vanished, include_network=True)
        )

    def _blame_survivor(self, shots: list[Snapshot]) -> Blame | None:
        """A rank whose peers timed out, because it is stopped or hangs."""
        now_s = time.monotonic()
        busy = (WorkerState.COMPUTING, WorkerState.NOT_STARTED)
        late_s = self._job.timeout_s / 2
        silent = [
            shot
            for shot in shots
            if shot.process is not None
            and shot.process.alive()
            and (
                shot.process.stopped() or (shot.state in busy and now_s - shot.progress_s > late_s)
            )
        ]
        if not silent:
            return None
        stalled_s = now_s - min(shot.progress_s for shot in silent)
        verdict = failures.blame_silence(silent, base_rank=self._job.base_rank, stalled_s=stalled_s)
        return verdict and self._with_stack(verdict)

    def _judge_silence(self, shots: list[Snapshot]) -> Blame | None:
        active = [shot for shot in shots if shot.state is not WorkerState.DONE]
        if not active:
            return None
        stalled_s = time.monotonic() - max(shot.progress_s for shot in active)
        slow = any(shot.where.is_slow for shot in active)
        if stalled_s <= (self._job.start_timeout_s if slow else self._job.timeout_s):
            return None
        verdict = failures.blame_silence(shots, base_rank=self._job.base_rank, stalled_s=stalled_s)
        return verdict and self._with_stack(verdict)

    def _with_stack(self, verdict: Blame) -> Blame:
        """Add the worker's own stack where it left one, asking for it where it hangs."""
        local_rank = verdict.rank - self._job.base_rank
        if verdict.detail or local_rank not in self._process_ids:
            return verdict
        if verdict.is_hang and self._process_ids[local_rank].alive():
            os.kill(self._process_ids[local_rank].pid, signal.SIGUSR1)
            self.keep_flights()
        path = self._job.stack_path(local_rank)
        stack = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return replace(verdict, detail=failures.own_stack(stack))
