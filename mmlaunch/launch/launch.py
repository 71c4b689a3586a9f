"""Start workers, watch them, and end them all together.

Workers come from a fork server that has imported torch once. torch's elastic agent is no help
here: its rendezvous unpickles bytes from anyone, on every address of the machine; it blames
whichever worker it sees first, waits half a minute for one that is stopped, and never notices one
that hangs (see :mod:`mmlaunch.launch.watch`).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from mmlaunch.launch import failures
from mmlaunch.launch.failures import Blame
from mmlaunch.launch.hosts import SECRET, Meeting
from mmlaunch.launch.note import write_note
from mmlaunch.launch.rendezvous import Rendezvous, Trouble
from mmlaunch.launch.watch import OnEvent, Watch
from mmlaunch.launch.worker_main import Job, WorkerContext, WorkerEntry, worker_main
from mmlaunch.process import fork_server
from mmlaunch.process.process_tree import ProcessId
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.wording import counted

__all__ = ["WorkerContext", "launch"]

# Restarts are counted within so long: what fails once a day is no reason to end a run of weeks.
_COUNTED_S = 3600.0
# Between two looks at the workers: events are to arrive within 0.2 s.
_POLL_S = 0.05
# For the machine whose worker is to blame to say so: it may have been silent since a step less.
_HEAR_S = 10.0


_ALONE = Meeting()


class Launcher(Protocol):
    """Starts the workers of a plan, watches them, and ends them all together: :func:`launch`.

    A launcher for a batch system (Slurm, a Kubernetes JobSet) is another function like it, in a
    file beside it. No worker outlives the call, and a failure is an
    :class:`mmplan.errors.MMPlanError`, whose ``exit_code`` is that of the command.
    """

    def __call__(
        self,
        *,
        entry: WorkerEntry | str,
        args: tuple[Any, ...] = (),
        num_ranks: int,
        run_dir: Path,
        timeout_s: float,
        start_timeout_s: float | None = None,
        max_restarts: int = 0,
        meeting: Meeting = _ALONE,
        per_node: int | None = None,
        on_event: OnEvent | None = None,
        stops_in_order: bool = True,
    ) -> list[Any]:
        """Run ``entry(ctx, *args)`` in one process per rank, as :func:`launch` does."""
        ...


def launch(
    *,
    entry: WorkerEntry | str,
    args: tuple[Any, ...] = (),
    num_ranks: int,
    run_dir: Path,
    timeout_s: float,
    start_timeout_s: float | None = None,
    max_restarts: int = 0,
    meeting: Meeting = _ALONE,
    per_node: int | None = None,
    on_event: OnEvent | None = None,
    stops_in_order: bool = True,
) -> list[Any]:
    """Run ``entry(ctx, *args)`` in one process per rank, and wait for all.

    The first SIGINT, SIGTERM or SIGHUP makes ``ctx.should_stop()`` true, and ends everything at
    once before a worker has begun a step; SIGINT after it ends everything at once. In the main
    thread only: elsewhere signals are the caller's.

    Args:
        entry: function that a fresh process can import, or "package.module:function".
        args: its arguments after the context, picklable.
        num_ranks: ranks in the whole run.
        run_dir: made if absent; one launch at a time may use it on a machine.
        timeout_s: seconds without any progress after which the run ends.
        start_timeout_s: the same while a rank starts, loads or saves; ``timeout_s`` by default.
        max_restarts: how often within an hour all workers are started anew after a failure.
        meeting: the machines; each makes this call with the same arguments but its own number.
        per_node: rank r runs on machine r div ``per_node``; None: as many on each as can be.
        on_event: gets the events of ``ctx.report``, within 0.2 s, and the launcher's own:
            ``{"launcher": "stop-requested"}`` and ``{"launcher": "restart", "cause": line}``.
        stops_in_order: whether the entry asks ``ctx.should_stop()``; where it does not, the
            first signal ends everything.

    Returns:
        Results of the entries in rank order, as JSON has them (a dataclass is a dict): of all
        ranks on machine 0, on the others of their own.

    Raises:
        WorkerFailedError: a worker died or hung; names it, ``detail`` is its traceback.
        InvalidInputError: the arguments contradict each other, or the folder is in use.
        KeyboardInterrupt: SIGINT came after a signal, or a signal that nobody would have heeded.
    """
    if not callable(entry) and not all(entry.partition(":")):
        raise InvalidInputError(
            f"entry is {entry!r}", hint='give a function or "package.module:function"'
        )
    per_node = per_node or -(-num_ranks // meeting.num_nodes)
    base_rank = meeting.node_rank * per_node
    num_local = min(per_node, num_ranks - base_rank)
    _check_nodes(num_local, per_node, num_ranks, meeting)
    with _control_dir(run_dir, meeting.node_rank) as control_dir:
        job = Job(
            entry=entry,
            args=args,
            run_dir=run_dir.absolute(),
            control_dir=control_dir,
            timeout_s=timeout_s,
            start_timeout_s=timeout_s if start_timeout_s is None else start_timeout_s,
            launcher=ProcessId.of(os.getpid()),
            environment={name: os.environ[name] for name in os.environ if name != SECRET},
            num_nodes=meeting.num_nodes,
            base_rank=base_rank,
            num_local=num_local,
            node_rank=meeting.node_rank,
            num_ranks=num_ranks,
        )
        failures.remove_records(job.failures_dir, range(base_rank, base_rank + num_local))
        try:
            watch = Watch(job, on_event=on_event)
        except OSError as error:
            raise UnfitEnvironmentError(
                f"{run_dir}: cannot be written: {error.strerror}",
                hint="make room, or choose another folder with --run-dir",
            ) from error
        try:
            write_note(job)
            with _signals(watch):
                return _run_attempts(job, watch, meeting, max_restarts, stops_in_order)
        finally:
            watch.kill()
            watch.close()


def check_free(run_dir: Path, node_rank: int = 0) -> None:
    """Refuse a folder that a launch on this machine uses now; nothing is written.

    Raises:
        InvalidInputError: another launch is under way there.
    """
    path = _control_path(run_dir, node_rank) / "lock"
    if path.exists():
        with path.open("a") as lock:
            _lock(lock, run_dir)


def _control_path(run_dir: Path, node_rank: int) -> Path:
    return run_dir.absolute() / f"launch-node{node_rank}"


def _lock(lock: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidInputError(
            f"run directory {run_dir} is in use by another launch",
            hint="wait for it, or choose another with --run-dir",
        ) from error


def _check_nodes(num_local: int, per_node: int, num_ranks: int, meeting: Meeting) -> None:
    nodes, node_rank = meeting.num_nodes, meeting.node_rank
    if num_ranks < 1:
        raise InvalidInputError(f"{num_ranks} ranks to start", hint="start at least one")
    if nodes > 1 and not meeting.endpoint:
        raise InvalidInputError(
            f"{nodes} nodes and no rendezvous endpoint",
            hint="give --rdzv-endpoint HOST:PORT of node 0 on every node",
        )
    if not 0 <= node_rank < nodes:
        raise InvalidInputError(
            f"node rank {node_rank} of {counted(nodes, 'node')}",
            hint=f"count nodes from 0 to {nodes - 1}",
        )
    if per_node * nodes < num_ranks or num_local < 1:
        raise InvalidInputError(
            f"{counted(num_ranks, 'rank')} do not fill {counted(nodes, 'node')} with "
            f"{counted(per_node, 'rank')} each",
            hint="change --nnodes to the number of machines that the plan uses",
        )


@contextmanager
def _control_dir(run_dir: Path, node_rank: int) -> Generator[Path]:
    """The launch's own folder, locked against a second launch and removed at the end."""
    control_dir = _control_path(run_dir, node_rank)
    try:
        control_dir.mkdir(parents=True, exist_ok=True)
        lock = (control_dir / "lock").open("w")
    except OSError as error:
        raise InvalidInputError(
            f"cannot write to run directory {run_dir}: {error.strerror}",
            hint="choose another with --run-dir",
        ) from error
    with lock:
        _lock(lock, run_dir)
        for stale in control_dir.iterdir():
            if stale.name != "lock":
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        try:
            yield control_dir
        finally:
            shutil.rmtree(control_dir, ignore_errors=True)


def _run_attempts(
    job: Job, watch: Watch, meeting: Meeting, max_restarts: int, stops_in_order: bool
) -> list[Any]:
    def check_stop() -> None:
        # Nothing has been trained by then that could be saved.
        if watch.stop_requested:
            raise KeyboardInterrupt

    rendezvous = Rendezvous(
        meeting, folder=job.run_dir, silent_s=job.timeout_s, check_stop=check_stop
    )
    try:
        rendezvous.meet(job.num_local)
        _Agent(job, watch, rendezvous, max_restarts, stops_in_order).run()
        return rendezvous.results
    except (EOFError, ConnectionError) as error:
        # The fork server is gone. Until it has left our group Ctrl-C reaches it too.
        check_stop()
        raise RunFailedError(
            "the process that starts the workers has ended",
            hint="look for a lack of memory: mmplan doctor",
        ) from error
    finally:
        rendezvous.close()


@dataclass(frozen=True, slots=True)
class _Agent:
    """Starts, restarts and ends one machine's workers.

    Attributes:
        job: the launch; its attempt, store and prefix are set for each attempt.
        watch: judges, and kills.
        rendezvous: with the other machines of the run.
        max_restarts: how often within an hour all workers are started anew.
        stops_in_order: whether workers heed a request to stop; otherwise it ends them.
        restarted_s: when they were.
    """

    job: Job
    watch: Watch
    rendezvous: Rendezvous
    max_restarts: int
    stops_in_order: bool
    restarted_s: list[float] = field(default_factory=list[float])

    def run(self) -> None:
        """Run attempts until one succeeds on all machines.

        Raises:
            MMPlanError: the last one failed; the verdict on a worker of this machine, or what
                another machine has announced.
            KeyboardInterrupt: a stop was asked for that nobody would have heeded.
        """
        attempt = 0
        try:
            while not self._succeeds(attempt):
                attempt += 1
        except BaseException as error:
            # Whatever it was: where the others have not heard of it they would wait.
            line = f"its launcher has ended: {error or type(error).__name__}"
            trouble = Trouble(node=self.job.node_rank, line=line, restart=False)
            self.rendezvous.announce(attempt, trouble)
            raise

    def _succeeds(self, attempt: int) -> bool:
        prefix, rendezvous = self.rendezvous.join(attempt), self.rendezvous
        job = replace(
            self.job,
            attempt=attempt,
            store=rendezvous.address,
            store_prefix=prefix,
            secret=rendezvous.secret,
            interface=rendezvous.interface,
        )
        self.watch.begin(job)
        self.watch.adopt(_start(job))
        verdict, remote = self._wait(attempt)
        if verdict is None and remote is None:
            self.watch.release()
            remote = self.rendezvous.leave(attempt, self.watch.results())
            if remote is None:
                self.watch.join()
                return True
        # The others hear of it before the workers here are gone, which may take seconds.
        said = remote or self.rendezvous.announce(attempt, self._trouble(verdict))
        if remote is not None:
            self.watch.keep_flights()
        self.watch.kill()
        if not said.restart:
            self.rendezvous.part(attempt)
            # A lost peer explains nothing where its own machine has spoken.
            if verdict is not None and (said.node == self.job.node_rank or not verdict.lost_peer):
                raise verdict.error()
            raise RunFailedError(
                f"{self.rendezvous.who(said.node)}: {said.line}", hint="look at the launcher there"
            )
        self.restarted_s.append(time.monotonic())
        self.watch.announce({"launcher": "restart", "cause": said.line})
        return False

    def _wait(self, attempt: int) -> tuple[Blame | None, Trouble | None]:
        """Until all workers of this machine have finished, or there is trouble somewhere."""
        while True:
            time.sleep(_POLL_S)
            if self.watch.stop_requested and (not self.stops_in_order or self.watch.starting()):
                # Here, not in the signal's handler: all workers are known, so none is left behind.
                self._stop_now(attempt)
            verdict = self.watch.poll()
            if verdict is not None and verdict.lost_peer:
                return verdict, self._hear()
            if verdict is not None or self.watch.all_done():
                return verdict, None
            remote = self.rendezvous.trouble()
            if remote is not None:
                return None, remote

    def _stop_now(self, attempt: int) -> NoReturn:
        """End what nobody would save.

        Raises:
            KeyboardInterrupt: always.
        """
        line = "it was stopped before its first step"
        trouble = Trouble(node=self.job.node_rank, line=line, restart=False)
        self.rendezvous.announce(attempt, trouble)
        self.watch.kill()
        self.rendezvous.part(attempt)
        raise KeyboardInterrupt

    def _hear(self) -> Trouble | None:
        """What another machine says where no worker of this one is to blame."""
        deadline_s = time.monotonic() + _HEAR_S
        while self.job.num_nodes > 1 and time.monotonic() < deadline_s:
            remote = self.rendezvous.trouble()
            if remote is not None:
                return remote
            time.sleep(_POLL_S)
        return None

    def _trouble(self, verdict: Blame | None) -> Trouble:
        wrong_input = verdict is not None and verdict.exit_code != RunFailedError.exit_code
        # Wrong input would fail in the same way again.
        counted_from_s = time.monotonic() - _COUNTED_S
        spent = sum(when_s > counted_from_s for when_s in self.restarted_s)
        again = not wrong_input and not self.watch.stop_requested and spent < self.max_restarts
        line = verdict.line if verdict else "its workers have ended"
        return Trouble(node=self.job.node_rank, line=line, restart=again)


def _start(job: Job) -> list[BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    fork_server.start(fork_server.RANK_MODULES)
    processes = [
        context.Process(target=worker_main, args=(job, rank)) for rank in range(job.num_local)
    ]
    # An entry that is told by its name comes from a module of its own.
    with fork_server.main_left_out() if isinstance(job.entry, str) else nullcontext():
        for process in processes:
            process.start()
    return list(processes)


@contextmanager
def _signals(watch: Watch) -> Generator[None]:
    """First signal: ask for a stop. Ctrl-C after it: end everything.

    Schedulers may say SIGTERM several times and mean one stop. Restores what was there before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, _frame: object) -> None:
        if watch.stop_requested and signum == signal.SIGINT:
            watch.kill()
            raise KeyboardInterrupt
        watch.request_stop()

    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {sig: signal.getsignal(sig) for sig in ours}
    for sig in ours:
        signal.signal(sig, handle)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
