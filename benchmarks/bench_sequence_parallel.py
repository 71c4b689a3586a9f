"""Tensor parallelism with and without sequence parallelism: seconds of a step, bytes kept for it.

    python benchmarks/bench_sequence_parallel.py [--steps 10] [--ranks 2 4] [--write-docs]

The processes train one small decoder as a tensor-parallel group, step by step in turns. On a
processor rows and sums go over gloo between processes on one machine: the seconds are of these, not
of NCCL's. The bytes are those of any device.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from noise_decoder import BLOCKS, WIDTH, noise_decoder, planned
from page import conditions, table, write_section
from torch import Tensor

from mmlaunch.comm.transport import DistTransport
from mmlaunch.launch.launch import launch
from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.session.session import Session
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload

KINDS = ("tensor parallelism", "with sequence parallelism")
LENGTH = 512
BATCH = 4


def workload(rows: bool, ranks: int) -> Workload:
    """A decoder on noise that only a tensor-parallel group may run."""
    return noise_decoder(
        batch=BATCH,
        length=LENGTH,
        pins={"tp": ranks, "pp": 1, "microbatch": BATCH},
        train={"sequence_parallel": rows},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of each kind")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="degrees")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    raced = {ranks: raced_by(ranks, options.steps) for ranks in options.ranks}
    rows = [row for ranks, found in raced.items() for row in rows_of(ranks, found)]
    differ = max(found[0]["differ"] for found in raced.values())
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_sequence_parallel.py --steps {options.steps}`. "
            f"{conditions(load_before)} A decoder of {BLOCKS} layers of width {WIDTH}, {BATCH} "
            f"texts of {LENGTH} tokens, float32; medians of {options.steps} steps in "
            "turns, of pairs of them, and of the processor time of rank 0. "
            f"Losses differ by {differ:.0e} at most.",
            table(("", "tp", "step s", "of without", "busy s", "kept MB", "of without"), rows),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("sequence-parallel", text)
    return 0


def raced_by(ranks: int, steps: int) -> list[dict[str, Any]]:
    """What :func:`race` finds on each rank."""
    plans = [planned(workload(rows, ranks), ranks=ranks) for rows in (False, True)]
    with tempfile.TemporaryDirectory() as folder:
        return launch(
            entry="bench_sequence_parallel:race",
            args=(steps, plans),
            num_ranks=ranks,
            run_dir=Path(folder),
            timeout_s=600.0,
        )


def rows_of(ranks: int, found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of each kind a row of the table."""
    seconds, busy = found[0]["seconds"], found[0]["busy"]
    kept = {kind: max(f["kept"][kind] for f in found) for kind in KINDS}
    for kind in KINDS:
        pairs = zip(seconds[kind], seconds[KINDS[0]], strict=True)
        yield (
            kind,
            f"{ranks}",
            f"{median(seconds[kind]):.3f}",
            f"{median(mine / other for mine, other in pairs):.2f}",
            f"{median(busy[kind]):.3f}",
            f"{kept[kind] / 1e6:.1f}",
            f"{kept[kind] / kept[KINDS[0]]:.2f}",
        )


def race(ctx: WorkerContext, steps: int, plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of steps and bytes kept, by kind; the largest difference of losses."""
    transport = DistTransport(ctx.device.device, ctx.heartbeat, ctx.timeout_s)
    sessions: dict[str, Session] = {}
    for kind, rows, spec in zip(KINDS, (False, True), plans, strict=True):
        plan, job = Plan.model_validate(spec), workload(rows, dist.get_world_size())
        sessions[kind] = Session(plan=plan, workload=job, folder=Path(), transport=transport)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    busy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    kept: dict[str, int] = {}
    for turn in range(steps + 1):
        for kind, session in sessions.items():
            ctx.heartbeat.phase(kind)
            dist.barrier()
            began_s, began_busy_s = time.perf_counter(), time.process_time()
            if turn == 0:
                kept[kind] = _kept_bytes(session)
                continue
            losses[kind].append(session.step().loss)
            dist.barrier()
            seconds[kind].append(time.perf_counter() - began_s)
            busy[kind].append(time.process_time() - began_busy_s)
    differ = max(abs(a - b) for a, b in zip(losses[KINDS[0]], losses[KINDS[1]], strict=True))
    return {"seconds": seconds, "busy": busy, "kept": kept, "differ": differ}


def _kept_bytes(session: Session) -> int:
    """Bytes of what autograd keeps in a step, without parameters; each storage once."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        session.step()
    for tensor in session.model.tensors():
        sizes.pop(cast(Any, tensor).untyped_storage().data_ptr(), None)
    return sum(sizes.values())


if __name__ == "__main__":
    sys.exit(main())
