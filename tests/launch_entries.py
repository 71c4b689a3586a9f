"""Entries that tests launch: module-level functions that a fresh process can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mmlaunch.launch.launch import WorkerContext, launch


def rank_and_sum(ctx: WorkerContext, scale: int) -> tuple[int, float, int]:
    """Every rank's number, and their sum over the real backend."""
    total = torch.tensor([float(ctx.rank * scale)])
    dist.all_reduce(total)
    return ctx.rank, total.item(), torch.get_num_threads()


def raise_at_step(ctx: WorkerContext, culprit: int) -> None:
    """One rank raises in its third step; the others lose it in a collective."""
    for step in range(100):
        ctx.heartbeat.beat(step, 0, f"0F{step}", "vision")
        if ctx.rank == culprit and step == 3:
            raise ValueError("the sample is bad")
        _all_reduce(ctx)


def reduce_forever(ctx: WorkerContext) -> int:
    """Steps until told to stop; ranks agree on stopping through the collective."""
    step = 0
    while True:
        ctx.heartbeat.beat(step, 0, f"0F{step % 4}", "text")
        if ctx.rank == 0:
            ctx.report({"step": step, "pid": os.getpid()})
        wish = torch.tensor([float(ctx.should_stop())])
        with ctx.heartbeat.waiting():
            dist.all_reduce(wish)
        if wish.item() > 0:
            return step
        step += 1
        time.sleep(0.01)


def signal_self(ctx: WorkerContext, culprit: int, signum: int) -> None:
    """One rank sends itself a signal after two steps."""
    for step in range(1000):
        ctx.heartbeat.beat(step, 0, f"0B{step}", "text")
        if ctx.rank == culprit and step == 2:
            os.kill(os.getpid(), signum)
        _all_reduce(ctx)


def hang_in_compute(ctx: WorkerContext, culprit: int) -> None:
    """One rank never comes back from its own code."""
    for step in range(1000):
        ctx.heartbeat.beat(step, 0, f"0F{step}", "vision")
        if ctx.rank == culprit and step == 2:
            _never_returns()
        _all_reduce(ctx)


def hang_in_save(ctx: WorkerContext, culprit: int) -> None:
    """One rank never comes back from saving its second step."""
    for step in range(1000):
        ctx.heartbeat.beat(step, 0, f"0F{step}", "vision")
        if step == 2:
            ctx.heartbeat.phase("saving", step)
        if ctx.rank == culprit and step == 2:
            _never_returns()
        _all_reduce(ctx)


def interrupt_in_start(ctx: WorkerContext, launcher: int) -> None:
    """Ctrl-C for the launcher while no rank has begun a step."""
    if ctx.rank == 0:
        os.kill(launcher, signal.SIGINT)
    _never_returns()


def raise_while_others_compute(ctx: WorkerContext, culprit: int) -> None:
    """One rank raises; no other one meets it in the network."""
    ctx.heartbeat.beat(0, 0, "0F0", "vision")
    dist.barrier()
    if ctx.rank == culprit:
        raise ValueError("the sample is bad")
    _never_returns()


def _never_returns() -> None:
    while True:
        time.sleep(60)


def leave_early(ctx: WorkerContext, leaver: int) -> None:
    """One rank returns while another still waits for it."""
    if ctx.rank != leaver:
        with ctx.heartbeat.waiting((leaver,)):
            dist.recv(torch.zeros(1), src=leaver)


def wait_for_each_other(ctx: WorkerContext) -> None:
    """Both receive before they send."""
    peer = 1 - ctx.rank
    ctx.heartbeat.beat(0, 0, f"RECV{peer}")
    with ctx.heartbeat.waiting((peer,)):
        dist.recv(torch.zeros(1), src=peer)


def fail_first_attempt(ctx: WorkerContext) -> int:
    """Rank 1 dies without a word in the first attempt only."""
    if ctx.attempt == 0 and ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _all_reduce(ctx)
    return ctx.attempt


def fail_attempts(ctx: WorkerContext, count: int) -> int:
    """The first attempts die."""
    if ctx.attempt < count:
        raise ValueError(f"attempt {ctx.attempt}")
    return ctx.attempt


def report_pid_with_child(ctx: WorkerContext) -> None:
    """Report this worker and a child of its own (as data loading has), then stay."""
    child = os.fork()
    if child == 0:
        from mmlaunch.process.process_tree import die_with_parent

        die_with_parent()
        time.sleep(600)
    ctx.heartbeat.beat(0, 0, "0F0")
    ctx.report({"pids": [os.getpid(), child]})
    while True:
        ctx.heartbeat.beat(0, 0, "0F0")
        time.sleep(0.05)


def report_times(ctx: WorkerContext) -> None:
    for index in range(5):
        ctx.report({"index": index, "sent_s": time.monotonic(), "said": "so " * 400})
        time.sleep(0.15)


def _all_reduce(ctx: WorkerContext) -> None:
    with ctx.heartbeat.waiting():
        dist.all_reduce(torch.ones(1))


def main() -> None:
    """A launcher as a process of its own: ENTRY RANKS RUN_DIR TIMEOUT [INT...]."""
    entry, ranks, run_dir, timeout, *args = sys.argv[1:]

    def show(event: dict[str, object]) -> None:
        print(event, flush=True)  # noqa: T201  the parent test reads it

    results = launch(
        entry=f"tests.launch_entries:{entry}",
        args=tuple(map(int, args)),
        num_ranks=int(ranks),
        run_dir=Path(run_dir),
        timeout_s=float(timeout),
        on_event=show,
    )
    print({"results": results}, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
