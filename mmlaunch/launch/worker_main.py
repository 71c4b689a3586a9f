"""The worker's side of a launch: set up, call the entry, leave a result or a record."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmlaunch.launch import failures
from mmlaunch.launch.store import Address, Store
from mmlaunch.process import process_group, process_tree
from mmlaunch.process.device import RankDevice, pick
from mmlaunch.process.heartbeat import Board, Heartbeat

FAILURES = "failures"
# Called in every worker with its context, then with the arguments of the launch.
WorkerEntry = Callable[..., Any]

# The launcher looks at heartbeats first: its verdict names the culprit, a timed-out
# collective only the rank that waited.
_COLLECTIVE_GRACE_S = 2.0
# Characters of a text in a report, at most six bytes each: then a line is written to the pipe
# whole (PIPE_BUF, 4096 bytes), and those of several ranks do not mix.
_TEXT = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A launch, as each of its workers is told.

    Attributes:
        entry: function, or "module:function", called as ``entry(ctx, *args)``.
        run_dir: the run's folder; failure records go to its ``failures``.
        control_dir: the launch's own folder inside it: board, events, results.
        timeout_s: longest silence of all ranks in a step, seconds.
        start_timeout_s: and while one starts, loads or saves.
        launcher: the process without which a worker must not live.
        environment: the launcher's, which the fork server may have been started without.
        base_rank: global rank of this machine's first worker.
        num_local: workers on this machine.
        num_ranks: in the whole run.
        attempt: 0, then one more for each restart.
        store: address of the run's store.
        store_prefix: keeps the attempts' keys in the one store apart.
        secret: of the store.
        interface: of this machine, to which torch's and NCCL's sockets are bound.
    """

    entry: WorkerEntry | str
    args: tuple[Any, ...]
    run_dir: Path
    control_dir: Path
    timeout_s: float
    start_timeout_s: float
    launcher: process_tree.ProcessId
    environment: Mapping[str, str]
    num_nodes: int
    base_rank: int
    num_local: int
    node_rank: int
    num_ranks: int
    attempt: int = 0
    store: Address = ("127.0.0.1", 0)
    store_prefix: str = ""
    secret: bytes = field(default=b"", repr=False)
    interface: str = "lo"

    @property
    def failures_dir(self) -> Path:
        """Folder of the workers' failure records."""
        return self.run_dir / FAILURES

    @property
    def board_path(self) -> Path:
        """The heartbeats' file."""
        return self.control_dir / "board"

    @property
    def events_path(self) -> Path:
        """A pipe, one line of JSON per report: a full disk takes none away or apart."""
        return self.control_dir / "events"

    @property
    def peer_timeout_s(self) -> float:
        """Longest wait for a peer: the launcher's verdict comes first, and names the culprit."""
        return max(self.timeout_s, self.start_timeout_s) + _COLLECTIVE_GRACE_S

    def result_path(self, local_rank: int) -> Path:
        """File of a worker's result."""
        return self.control_dir / f"attempt-{self.attempt}-result-{local_rank}"

    def stack_path(self, local_rank: int) -> Path:
        """File of a worker's stack when it crashes, or when the launcher asks for it."""
        return self.control_dir / f"attempt-{self.attempt}-stack-{local_rank}"


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """The first argument of an entry.

    Attributes:
        local_rank: position on this machine; ``rank`` is the global one.
        attempt: 0, then one more for each restart.
        device: the rank's device and backend.
        heartbeat: ``beat`` at each instruction, ``phase`` before anything else that takes time,
            ``waiting`` around each wait for peers; ranks that are silent for too long end the run.
        timeout_s: longest wait for a peer, seconds.
    """

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    device: RankDevice
    run_dir: Path
    timeout_s: float
    heartbeat: Heartbeat
    events_fd: int

    @property
    def failures_dir(self) -> Path:
        """Folder of the workers' failure records."""
        return self.run_dir / FAILURES

    def should_stop(self) -> bool:
        """Whether a stop was asked for on this machine. Ranks must agree before they act on it."""
        return self.heartbeat.should_stop()

    def report(self, event: Mapping[str, Any]) -> None:
        """Send an event (JSON) to the launcher's ``on_event``; long texts in it are cut."""
        short = {k: v[:_TEXT] if isinstance(v, str) else v for k, v in event.items()}
        os.write(self.events_fd, json.dumps(short).encode() + b"\n")


def worker_main(job: Job, local_rank: int) -> None:
    """Run the entry in a worker that the agent started. Does not return after a failure."""
    heartbeat = Board(job.board_path, num_slots=job.num_local).heartbeat(local_rank)
    process_tree.isolate_worker(job.launcher, on_terminate=heartbeat.request_stop)
    process_tree.watch_launcher(job.launcher, released=heartbeat.released)
    heartbeat.register()
    _dump_stack_on_demand(job.stack_path(local_rank))
    # Modules live as long as the process: looking through them takes a collection's whole time.
    gc.freeze()
    try:
        _run_entry(job, local_rank, heartbeat)
    except BaseException:
        # The record is written; it has everything that multiprocessing would print.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    heartbeat.done()


def _dump_stack_on_demand(path: Path) -> None:
    """A crash in C leaves the Python stack in the file; so does SIGUSR1, even in a wedged call."""
    file = path.open("w", encoding="utf-8")
    faulthandler.enable(file=file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    _kept_open.append(file)


_kept_open: list[Any] = []  # faulthandler keeps the descriptor only


def _context(job: Job, local_rank: int, heartbeat: Heartbeat) -> WorkerContext:
    _take_environment(job, local_rank)
    device = pick(local_rank, local_world_size=job.num_local)
    device.apply(interface=job.interface)
    return WorkerContext(
        rank=job.base_rank + local_rank,
        local_rank=local_rank,
        world_size=job.num_ranks,
        attempt=job.attempt,
        device=device,
        run_dir=job.run_dir,
        timeout_s=job.peer_timeout_s,
        heartbeat=heartbeat,
        # Read by this side too: a launcher that ends takes its workers with it, not by an error.
        events_fd=os.open(job.events_path, os.O_RDWR),
    )


def _take_environment(job: Job, local_rank: int) -> None:
    """Make this process's variables the launcher's (the fork server may be older), and torchrun's.

    Scripts of users ask for torchrun's.
    """
    os.environ.clear()
    os.environ.update(job.environment)
    host, port = job.store
    numbers = {
        "RANK": job.base_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.num_ranks,
        "LOCAL_WORLD_SIZE": job.num_local,
        "GROUP_RANK": job.node_rank,
        "GROUP_WORLD_SIZE": job.num_nodes,
        "TORCHELASTIC_RESTART_COUNT": job.attempt,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in numbers.items()})


def _run_entry(job: Job, local_rank: int, heartbeat: Heartbeat) -> None:
    """Call the entry; the record is written before the group falls and peers notice."""
    try:
        context = _context(job, local_rank, heartbeat)
        _join_process_group(job, context)
        if context.device.device.type == "cuda":
            heartbeat.follow(
                context.device.mark,
                dump=lambda: process_group.dump_flights(job.failures_dir, context.rank),
            )
        entry = job.entry
        heartbeat.phase("importing")
        if not callable(entry):
            module, _, name = entry.partition(":")
            entry = getattr(importlib.import_module(module), name)
        heartbeat.phase("")
        result = entry(context, *job.args)
        path = job.result_path(local_rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, default=asdict), encoding="utf-8")
        temporary.replace(path)
        process_group.leave(failed=False)
    except BaseException as error:
        failures.write_record(
            job.failures_dir,
            rank=job.base_rank + local_rank,
            attempt=job.attempt,
            where=heartbeat.place_of(error),
            error=error,
        )
        process_group.leave(failed=True)
        raise


def _join_process_group(job: Job, context: WorkerContext) -> None:
    timeout = timedelta(seconds=job.peer_timeout_s)
    context.heartbeat.phase("joining")
    with context.heartbeat.waiting():
        # The launcher's store, bound since before any worker started: no port to race for.
        store = Store(job.store, job.secret, timeout)
        _kept_open.append(store)  # torch keeps its own half of it only
        process_group.join(
            context.device,
            store=dist.PrefixStore(job.store_prefix, store),  # pyright: ignore[reportPrivateImportUsage]
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
        )
