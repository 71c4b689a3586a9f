"""ZeRO-3 beside torch's ``fully_shard``: seconds of a step of the same model.

    python benchmarks/bench_zero3.py [--pairs 10] [--write-docs]

Two processes train one small decoder as two replicas, under both in turns, with the same weights,
samples, loss and optimizer. Both gather a block before its forward and again before its backward.
On a processor gloo's gathers and reduce-scatters copy between processes on one machine: the
seconds are of these, not of NCCL's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch.distributed as dist
from noise_decoder import BLOCKS, WIDTH, noise_decoder, planned
from page import conditions, table, write_section
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmlaunch.comm.transport import DistTransport
from mmlaunch.data.loader import StepLoader
from mmlaunch.launch.launch import launch
from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.session.optimizer import build_optimizer
from mmlaunch.session.session import Session
from mmplan.errors import RunFailedError
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, resolve_tasks

RANKS = 2
OURS, THEIRS = "zero: 3", "fully_shard"
LENGTH = 128
BATCH = 8


def workload() -> Workload:
    """A decoder on noise, under ZeRO-3."""
    return noise_decoder(
        batch=BATCH,
        length=LENGTH,
        pins={"tp": 1, "pp": 1, "microbatch": BATCH // RANKS},
        train={"zero": 3, "optimizer": "AdamW", "optimizer_args": {"lr": 1e-3}},
    )


class FullyShard:
    """The workload's module as one model under ``fully_shard``, a unit for each block."""

    def __init__(self, ctx: WorkerContext) -> None:
        job = workload()
        rank = dist.get_rank()
        mesh = init_device_mesh(ctx.device.device.type, (RANKS,))
        self._loss = build_loss(job, "next", Path())
        model = cast(nn.Sequential, build_module(job, "llm", Path()))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        self._model: nn.Module = model
        named = [*model.named_parameters()]
        self._optimizer = build_optimizer(job.train, named, sharded=True)
        self._range = rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS
        task = next(iter(resolve_tasks(job).values()))
        self._loader = StepLoader(
            build_dataset(cast(Any, task.data), Path(), seed=job.train.seed),
            batch=BATCH,
            seed=job.train.seed,
            ranges=[self._range],
            fields=["tokens", "labels"],
        )

    def step(self) -> float:
        """One step; the loss of the whole batch."""
        data = next(self._loader)
        tokens, labels = (cast(Tensor, data.get(n, *self._range)) for n in ("tokens", "labels"))
        # A sum over all targets: the last token of a text has none.
        loss = self._loss(self._model(tokens), labels) / (len(labels) * (LENGTH - 1))
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / RANKS


def race(ctx: WorkerContext, pairs: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps by system; the largest difference of their losses.

    Raises:
        RunFailedError: they do not train the same model.
    """
    transport = DistTransport(ctx.device.device, ctx.heartbeat, ctx.timeout_s)
    plan = Plan.model_validate(spec)
    session = Session(plan=plan, workload=workload(), folder=Path(), transport=transport)
    theirs = FullyShard(ctx)
    steps = {OURS: lambda: session.step().loss, THEIRS: theirs.step}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(pairs + 2):
        order = [*steps] if turn % 2 else [*reversed(steps)]
        for name in order:
            ctx.heartbeat.phase(name)
            dist.barrier()
            began_s = time.perf_counter()
            losses[name].append(steps[name]())
            dist.barrier()
            seconds[name].append(time.perf_counter() - began_s)
    differ = max(abs(a - b) for a, b in zip(losses[OURS], losses[THEIRS], strict=True))
    if differ > 1e-3:
        raise RunFailedError(f"losses of {OURS} and {THEIRS} differ by {differ:.1e}")
    # The first two of each warm up.
    return {"seconds": {name: own[2:] for name, own in seconds.items()}, "differ": differ}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="steps of each, in turns")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found: list[dict[str, Any]] = launch(
            entry="bench_zero3:race",
            args=(options.pairs, planned(workload(), ranks=RANKS, solver="deepspeed")),
            num_ranks=RANKS,
            run_dir=Path(folder),
            timeout_s=600.0,
        )
    seconds = found[0]["seconds"]
    ratio = median(a / b for a, b in zip(seconds[OURS], seconds[THEIRS], strict=True))
    rows = [(name, f"{median(own):.3f}", f"{min(own):.3f}") for name, own in seconds.items()]
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_zero3.py --pairs {options.pairs}`. "
            f"{conditions(load_before)} A decoder of {BLOCKS} layers of width {WIDTH}, {BATCH} "
            f"texts of {LENGTH} tokens on {RANKS} replicas, float32, AdamW. Losses differ by "
            f"{found[0]['differ']:.0e} at most. A step of `{OURS}` takes {ratio:.2f} times that of "
            f"`{THEIRS}` (median of pairs).",
            table(("", "step s, median", "least"), rows),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("zero3", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
