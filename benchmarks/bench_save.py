"""What a checkpoint costs training: written in a step, and while training goes on.

    python benchmarks/bench_save.py [--megabytes 200] [--pairs 5] [--write-docs]

Two ranks hold some state each and compute on one core each; a step is matrix products of some
100 ms. Blocks of steps are timed in turns: without a save, with one that the ranks wait for, and
with one that other processes write. A save's stall is the time of its call. What it takes from the
steps besides is the whole block's time over that of a block without a save: here the writing
processes share the two cores with the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from page import conditions, table, write_section

from mmlaunch.checkpoint.background import BackgroundSaves
from mmlaunch.checkpoint.save import Content, Entry, save
from mmlaunch.comm.transport import DistTransport
from mmlaunch.launch.launch import launch
from mmlaunch.launch.worker_main import WorkerContext

RANKS = 2
BLOCK = 40
SIDE = 768
KINDS = ("no save", "waited for", "while training goes on")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of state on a rank")
    parser.add_argument("--pairs", type=int, default=5, help="turns of every kind")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[list[float]]] = launch(
            entry="bench_save:race",
            args=(options.megabytes, options.pairs),
            num_ranks=RANKS,
            run_dir=Path(folder),
            timeout_s=300.0,
        )[0]
    alone_s = median(whole_s for _, whole_s in found["no save"])
    waited_s = median(stall_s for stall_s, _ in found["waited for"])
    rows: list[tuple[str, ...]] = []
    for kind in KINDS[1:]:
        stall_s = median(stall_s for stall_s, _ in found[kind])
        besides_s = median(whole_s for _, whole_s in found[kind]) - alone_s - stall_s
        rows.append((kind, f"{stall_s:.3f}", f"{stall_s / waited_s:.2f}", f"{besides_s:.3f}"))
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_save.py --megabytes {options.megabytes} --pairs "
            f"{options.pairs}`. {conditions(load_before)} Medians of {options.pairs} blocks of "
            f"{BLOCK} steps ({alone_s:.2f} s without a save).",
            table(("save", "stall s", "of waiting", "taken from steps besides s"), rows),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("saves", text)
    return 0


def race(ctx: WorkerContext, megabytes: int, pairs: int) -> dict[str, list[list[float]]]:
    """Stall and whole seconds of each block, by kind; as the slower rank sees them."""
    transport = DistTransport(ctx.device.device, ctx.heartbeat, ctx.timeout_s)
    rows = megabytes * 10**6 // 4 // 1000
    state = torch.rand(rows, 1000)
    entry = Entry(
        name=f"tower.{ctx.rank}",
        kind="param",
        full_shape=(rows, 1000),
        boxes=[((0, 0), state)],
        trained=True,
    )
    saves = BackgroundSaves(transport)
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    factor = torch.rand(SIDE, SIDE) / SIDE
    for turn in range(pairs + 1):
        for number, kind in enumerate(KINDS):
            ctx.heartbeat.phase(kind)
            content = Content(
                root=ctx.run_dir / "saves", step=turn * len(KINDS) + number, state={}, meta={}
            )
            dist.barrier()
            began_s = time.perf_counter()
            if kind == KINDS[1]:
                save(content, [entry], rank=ctx.rank, gather=transport.gather_objects)
            elif kind == KINDS[2]:
                saves.begin(content, [entry])
            stall_s = time.perf_counter() - began_s
            for _ in range(BLOCK):
                _step(state, factor)
            saved = saves.ended(wait=True)
            times = torch.tensor([stall_s, time.perf_counter() - began_s])
            if saved is not None and saved.error is not None:
                raise saved.error
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            if turn:  # the first ones find no memory and no process yet
                found[kind].append(times.tolist())
    saves.close()
    return found


def _step(state: torch.Tensor, factor: torch.Tensor) -> Any:
    value = factor
    for _ in range(8):
        value = value @ factor
    state[:SIDE, :SIDE].add_(value, alpha=1e-3)
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    sys.exit(main())
