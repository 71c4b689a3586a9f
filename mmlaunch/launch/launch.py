"""Start workers, watch them, and end them all together.

Workers come from a fork server that has imported torch once. torch's elastic agent is no help
here: its rendezvous unpickles bytes from anyone, on every address of the machine; it blames
whichever worker it sees first, waits half a minute for one that is stopped, and never notices one
that hangs (see :mod:`mmlaunch.launch.watch`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mmlaunch.launch import failures
from mmlaunch.launch.agent import Agent
from mmlaunch.launch.launcher import OnEvent, WorkerEntry
from mmlaunch.launch.rendezvous import Rendezvous
from mmlaunch.launch.watch import Watch
from mmlaunch.launch.worker_main import Job, WorkerContext, check_entry
from mmlaunch.process.process_tree import ProcessId
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.wording import counted

__all__ = ["WorkerContext", "launch"]

# Time for the machines of a run to come together: a batch system may start them minutes apart.
_JOIN_S = 900.0


def launch(
    *,
    entry: WorkerEntry | str,
    args: tuple[Any, ...] = (),
    num_ranks: int,
    run_dir: Path,
    timeout_s: float,
    max_restarts: int = 0,
    nnodes: int = 1,
    node_rank: int = 0,
    ranks_per_node: int | None = None,
    rdzv_endpoint: str | None = None,
    on_event: OnEvent | None = None,
    stops_in_order: bool = True,
) -> list[Any]:
    """Launch processes of this machine; see :class:`mmlaunch.launch.launcher.Launcher`."""
    check_entry(entry)
    per_node = ranks_per_node or -(-num_ranks // nnodes)
    base_rank = node_rank * per_node
    num_local = min(per_node, num_ranks - base_rank)
    _check_nodes(num_local, per_node, num_ranks, nnodes, node_rank, rdzv_endpoint)
    with _control_dir(run_dir, node_rank) as control_dir:
        job = Job(
            entry=entry,
            args=args,
            run_dir=run_dir.absolute(),
            control_dir=control_dir,
            timeout_s=timeout_s,
            launcher=ProcessId.of(os.getpid()),
            environment=dict(os.environ),
            num_nodes=nnodes,
            base_rank=base_rank,
            num_local=num_local,
            node_rank=node_rank,
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
            _run_agent(
                job,
                watch,
                max_restarts=max_restarts,
                endpoint=rdzv_endpoint if nnodes > 1 else None,
                stops_in_order=stops_in_order,
            )
            return watch.results()
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


def _check_nodes(
    num_local: int,
    per_node: int,
    num_ranks: int,
    nnodes: int,
    node_rank: int,
    endpoint: str | None,
) -> None:
    if num_ranks < 1:
        raise InvalidInputError(f"{num_ranks} ranks to start", hint="start at least one")
    if nnodes > 1 and not endpoint:
        raise InvalidInputError(
            f"{nnodes} nodes and no rendezvous endpoint",
            hint="give --rdzv-endpoint HOST:PORT of node 0 on every node",
        )
    if not 0 <= node_rank < nnodes:
        raise InvalidInputError(
            f"node rank {node_rank} of {counted(nnodes, 'node')}",
            hint=f"count nodes from 0 to {nnodes - 1}",
        )
    if per_node * nnodes < num_ranks or num_local < 1:
        raise InvalidInputError(
            f"{counted(num_ranks, 'rank')} do not fill {counted(nnodes, 'node')} with "
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


def _run_agent(
    job: Job,
    watch: Watch,
    *,
    max_restarts: int,
    endpoint: str | None,
    stops_in_order: bool,
) -> None:
    def check_stop() -> None:
        # Nothing has been trained by then that could be saved.
        if watch.stop_requested:
            raise KeyboardInterrupt

    with _signals(watch):
        try:
            rendezvous = Rendezvous(
                num_nodes=job.num_nodes,
                node_rank=job.node_rank,
                endpoint=endpoint,
                join_s=_JOIN_S,
                check_stop=check_stop,
            )
            agent = Agent(
                job=job,
                watch=watch,
                rendezvous=rendezvous,
                max_restarts=max_restarts,
                stops_in_order=stops_in_order,
            )
            agent.run()
        except (EOFError, ConnectionError) as error:
            # The fork server is gone. Until it has left our group Ctrl-C reaches it too.
            check_stop()
            raise RunFailedError(
                "the process that starts the workers has ended",
                hint="look for a lack of memory: mmplan doctor",
            ) from error


@contextmanager
def _signals(watch: Watch) -> Generator[None]:
    """First signal: ask for a stop. Second: end everything. Restores what was there before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_signum: int, _frame: object) -> None:
        if watch.stop_requested:
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
