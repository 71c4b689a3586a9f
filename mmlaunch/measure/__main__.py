"""The worker side of ``mmplan profile``: ``python -m mmlaunch.measure FOLDER``.

Loads the libraries, reads a job from stdin, a line of JSON, and forks the job's processes. These
measure the points that follow, a line each, one after another. What the first process finds goes to
stdout: a line ``{"result": {...}}`` for each point, or ``{"error": {...}}`` and a non-zero exit
code. The end of stdin ends the processes. They meet in the folder.

A job is ``{"workload", "folder", "device", "processes", "links", "repeat_s", "max_point_s",
"pool"}``. Several processes measure a point at the same time, as they would run: cores share
caches, memory and often their arithmetic units.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, cast

from mmlaunch.process.process_tree import die_with_parent
from mmplan.errors import MMPlanError, UnfitEnvironmentError

_TIMEOUT = timedelta(minutes=30)
# Longer than the supervisor needs to see a death, which other processes then report too.
_GRACE_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Start a job's processes, and hand on its points, until stdin ends or a process does.

    Returns:
        The exit code of the first process that failed, else 0.
    """
    die_with_parent()
    # Once for all processes, while the other side makes the job. The second is what tensors
    # without storage import at their first use.
    for library in ("mmlaunch.measure.points", "torch._dynamo"):
        import_module(library)

    # Nothing is read ahead: what waits is seen.
    lines = cast(Any, sys.stdin.buffer).raw
    first = lines.readline()
    if not first:
        return 0
    job = json.loads(first)
    os.environ["MMLAUNCH_DEVICE"] = job["device"]
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    ranks: list[BaseProcess] = []
    try:
        for rank in range(_num_ranks(job)):
            receive, send = context.Pipe(duplex=False)
            pipes.append(send)
            given = job, receive.recv, rank, Path(arguments[0]) / "store"
            ranks.append(context.Process(target=_rank_main, args=given))
            ranks[-1].start()
        while True:
            ready = wait([sys.stdin.fileno(), *(process.sentinel for process in ranks)])
            # A rank that fails by itself leaves the others waiting: who is first is the cause.
            for rank, process in enumerate(ranks):
                if process.sentinel in ready:
                    process.join()
                    return _report_death(rank, cast(int, process.exitcode))
            line = lines.readline()
            if not line:
                return 0
            for pipe in pipes:
                pipe.send(json.loads(line))
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _num_ranks(job: dict[str, Any]) -> int:
    """Processes to start: links have two ends, also where points use one process."""
    return max(job["processes"], 2 if job["links"] else 1)


def _report_death(rank: int, code: int) -> int:
    """Say what a rank could not say itself (killed by a signal, often for its memory)."""
    if code < 0:
        message = f"process {rank} was killed by signal {-code}"
        hint = "signal 9 is often too little memory: profile with fewer processes (--nproc)"
        _write(sys.stdout, {"error": {"message": message, "hint": hint, "exit_code": 1}})
        return 1
    return code


def _rank_main(
    job: dict[str, Any], next_point: Callable[[], Any], rank: int, rendezvous: Path
) -> None:
    die_with_parent()
    # What a user's code prints must not get between the lines that the parent parses.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _measure(job, next_point, rank=rank, rendezvous=rendezvous, out=out)
    except MMPlanError as error:
        report = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        _write(out, {"error": report | {"rank": rank}})
        sys.exit(error.exit_code)
    except Exception as error:
        time.sleep(_GRACE_S)  # it may only be that another process died
        lines = str(error).strip().splitlines()
        message = f"process {rank}: {type(error).__name__}: {lines[0] if lines else ''}"
        report = {"message": message, "traceback": traceback.format_exc(), "exit_code": 1}
        _write(out, {"error": report | {"rank": rank}})
        sys.exit(1)


def _measure(
    job: dict[str, Any],
    next_point: Callable[[], Any],
    *,
    rank: int,
    rendezvous: Path,
    out: IO[str],
) -> None:
    import torch.distributed as dist

    from mmlaunch.measure.points import Measurer
    from mmlaunch.process.device import pick

    num_ranks = _num_ranks(job)
    os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    device = pick(rank, local_world_size=num_ranks)
    device.apply(interface="lo")
    if num_ranks > 1:
        dist.init_process_group(
            device.backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=_TIMEOUT,
        )
    measurer = Measurer(job, rank=rank, device=device.device)
    while True:
        result = measurer.measure(next_point())
        if rank == 0:
            _write(out, {"result": result})


def _write(out: IO[str], line: dict[str, Any]) -> None:
    try:
        out.write(json.dumps(line, allow_nan=False) + "\n")
        out.flush()
    except BrokenPipeError:
        raise UnfitEnvironmentError("whoever reads the measurements is gone") from None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # All is said. Torch's threads, some of which are not joined, now and then abort a process that
    # ends in the usual way, after all its points.
    os._exit(code)
