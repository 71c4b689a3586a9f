"""The worker side of ``mmplan profile``: ``python -m mmlaunch.measure JOB.json``.

Starts the job's processes, which measure its points one after another, and passes on
what the first of them finds: one JSON line on stdout per finished point,
``{"index": 0, "result": {...}}``, or ``{"error": {...}}`` and a non-zero exit code.

A job is ``{"workload", "folder", "processes", "links", "repeat_s", "max_point_s",
"points"}``. Several processes measure a point at the same time, as they would run: cores
share caches, memory and often their arithmetic units.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

from mmlaunch.process.process_tree import die_with_parent
from mmplan.errors import MMPlanError, UnfitEnvironmentError

_TIMEOUT = timedelta(minutes=30)
# Longer than the supervisor needs to see a death, which other processes then report too.
_GRACE_S = 1.0
# Delays the end of a job by as much at most; chosen by hand.
_POLL_S = 0.02


def main(arguments: Sequence[str]) -> int:
    """Measure a job's points; with ``RANK`` set, as one of its processes.

    Returns:
        The exit code of the first process that failed, else 0.
    """
    die_with_parent()
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if "RANK" in os.environ:
        return _rank_main(job, rank=int(os.environ["RANK"]), rendezvous=arguments[1])
    return _supervise(Path(arguments[0]), num_ranks=_num_ranks(job))


def _num_ranks(job: dict[str, Any]) -> int:
    """Processes to start: links have two ends, also where points use one process."""
    return max(job["processes"], 2 if job["links"] else 1)


def _supervise(job_path: Path, *, num_ranks: int) -> int:
    """Start all ranks, end all when one fails; the first failure is the one that counts."""
    # The job's folder is its owner's to remove, also where this process is killed.
    store = job_path.parent / "store"
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            env = os.environ | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
            command = [
                sys.executable,
                "-P",
                "-m",
                "mmlaunch.measure",
                str(job_path),
                str(store),
            ]
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL))
        return _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # A rank that fails by itself leaves the others waiting: who is first is the cause.
            return _report_death(failed[0], cast(int, codes[failed[0]]))
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


def _report_death(rank: int, code: int) -> int:
    """Say what a rank could not say itself (killed by a signal, often for its memory)."""
    if code < 0:
        message = f"process {rank} was killed by signal {-code}"
        hint = "signal 9 is often too little memory: profile with fewer processes (--nproc)"
        _write(sys.stdout, {"error": {"message": message, "hint": hint, "exit_code": 1}})
        return 1
    return code


def _rank_main(job: dict[str, Any], *, rank: int, rendezvous: str) -> int:
    # What a user's code prints must not get between the lines that the parent parses.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _measure(job, rank=rank, rendezvous=rendezvous, out=out)
    except MMPlanError as error:
        report = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        _write(out, {"error": report | {"rank": rank}})
        return error.exit_code
    except Exception as error:
        time.sleep(_GRACE_S)  # it may only be that another process died
        lines = str(error).strip().splitlines()
        message = f"process {rank}: {type(error).__name__}: {lines[0] if lines else ''}"
        report = {"message": message, "traceback": traceback.format_exc(), "exit_code": 1}
        _write(out, {"error": report | {"rank": rank}})
        return 1
    return 0


def _measure(job: dict[str, Any], *, rank: int, rendezvous: str, out: IO[str]) -> None:
    import torch.distributed as dist

    from mmlaunch.measure.points import Measurer
    from mmlaunch.process.device import pick

    num_ranks = _num_ranks(job)
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
    try:
        measurer = Measurer(job, rank=rank, device=device.device)
        for index, point in enumerate(job["points"]):
            result = measurer.measure(point)
            if rank == 0:
                _write(out, {"index": index, "result": result})
        if num_ranks > 1:
            dist.barrier()
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


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
