"""What the executor itself costs per instruction: a program of empty blocks.

Two programs that differ only in their number of micro-batches give the slope, so what a
step costs once drops out; a plain loop over the same micro-batches is subtracted.
Processor time of the fastest repeat: what others do on the machine only adds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import empty
import torch

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.session.session import Session
from mmplan.planning import planner
from mmplan.schema.base import save_document
from mmplan.schema.cluster import Cluster, Device, Link, Links
from mmplan.schema.load import load_plan
from mmplan.schema.profile import ModuleProfile, Point, Profile
from mmplan.schema.workload import load_workload

BATCH = 256
FEW, MANY = 4, 256
STEPS, WARM_UP = 30, 5
MODULES = ("left", "right")
# Input of the second module: the data, or the first one's output, sent by the rank to itself.
LAYOUTS = {"apart": "x", "chained": "left"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds per instruction.

    Attributes:
        whole_s: an instruction; forwards and backwards have an empty block in them.
        plain_s: the plain loop's share of it.
    """

    whole_s: float
    plain_s: float


def measure_overhead(folder: Path) -> str:
    """The page's paragraph."""
    print("overhead: empty blocks", file=sys.stderr)
    rows = "\n".join(
        f"| {name} | {1e6 * found.whole_s:.0f} | {1e6 * found.plain_s:.0f} "
        f"| {1e6 * (found.whole_s - found.plain_s):.0f} | {found.whole_s / found.plain_s:.1f} |"
        for name, found in ((layout, overhead(folder, layout)) for layout in LAYOUTS)
    )
    text = (
        "### What the executor costs by itself\n\n"
        f"Empty blocks, one process, {FEW} and {MANY} micro-batches of {len(MODULES)} modules: "
        "µs of processor time for each instruction, and what a plain PyTorch loop over the same "
        "micro-batches takes for it. The executor adds slicing the batch, seeding dropout, "
        "gradients of the sync batch cut into micro-batches and the heartbeat; `chained`, where "
        "the second module takes the first one's output, has messages besides.\n\n"
        "| modules | executor | plain loop | added | ratio |\n|---|---|---|---|---|\n" + rows
    )
    print(f"\n{text}", flush=True)
    return text


def overhead(folder: Path, layout: str) -> Overhead:
    """Measure it in one of the layouts; files of the two programs go into ``folder``."""
    torch.set_num_threads(1)
    (few_s, few), (many_s, many) = (_planned(folder, count, layout) for count in (FEW, MANY))
    added = many - few
    plain_s = _plain(MANY, layout) - _plain(FEW, layout)
    return Overhead(whole_s=(many_s - few_s) / added, plain_s=plain_s / added)


def _planned(folder: Path, microbatches: int, layout: str) -> tuple[float, int]:
    """Processor seconds of a step, and the instructions of its program."""
    plan_path = _plan(folder, microbatches, layout)
    workload_path = folder / f"empty-{microbatches}.yaml"

    def train(transport: InProcessTransport) -> tuple[float, int]:
        session = Session(
            plan=load_plan(plan_path),
            workload=load_workload(workload_path),
            folder=Path(__file__).parent,
            transport=transport,
        )
        least_s = _least(lambda: session.step())
        session.close()
        return least_s, len(session.program.instructions[0])

    return InProcessWorld(1).run(train)[0]


def _plan(folder: Path, microbatches: int, layout: str) -> Path:
    """Two empty modules on one device, their micro-batches pinned."""
    workload = folder / f"empty-{microbatches}.yaml"
    pins = {"tp": 1, "microbatch": BATCH // microbatches}
    document = {
        "version": 1,
        "name": "empty",
        "batch": BATCH,
        "modules": {
            name: {"factory": "empty:module", "inputs": [given], "plan": pins}
            for name, given in zip(MODULES, ("x", LAYOUTS[layout]), strict=True)
        },
        "losses": {
            "square": {"factory": "empty:SquareLoss", "inputs": MODULES, "cross_sample": True}
        },
        "data": {"factory": "empty:Numbers", "args": {"samples": BATCH}},
    }
    workload.write_text(json.dumps(document), encoding="utf-8")
    profile = folder / "empty.profile.json"
    save_document(_profile(), profile)
    path = folder / f"empty-{microbatches}.plan.json"
    plan = planner.solve(
        load_workload(workload),
        workload_path=workload,
        profile=_profile(),
        profile_path=profile,
        plan_path=path,
        devices=1,
        solver="colocated",
    )
    save_document(plan, path)
    return path


def _profile() -> Profile:
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    point = Point(microbatch=1, forward_s=1e-5, backward_s=1e-5)
    return Profile(
        name="empty",
        source="given",
        cluster=Cluster(
            name="one",
            nodes=1,
            devices_per_node=1,
            device=Device(name="cpu", memory_bytes=1e9, peak_flops=1e9),
            links=Links(intra_node=link, inter_node=link),
        ),
        modules={name: ModuleProfile(blocks=1, parameters=1, points=(point,)) for name in MODULES},
    )


def _plain(microbatches: int, layout: str) -> float:
    """Processor seconds of the same step without an executor."""
    left, right = (empty.module() for _ in MODULES)
    loss, x, chained = empty.SquareLoss(), empty.Numbers(BATCH).x, layout == "chained"
    rows = x.split(BATCH // microbatches)

    def step() -> None:
        lefts = [left(row) for row in rows]
        # Cut, as between stages: each module has a backward of its own.
        given = [part.detach().requires_grad_() for part in lefts] if chained else rows
        rights = [right(row) for row in given]
        features = [torch.cat(parts).detach().requires_grad_() for parts in (lefts, rights)]
        grads = torch.autograd.grad(loss(*features), features)
        own_left, own_right = (grad.split(BATCH // microbatches) for grad in grads)
        for part, own in zip(rights, own_right, strict=True):
            part.backward(own)
        for part, own, row in zip(lefts, own_left, given, strict=True):
            part.backward(own if row.grad is None else own + row.grad)

    return _least(step)


def _least(step: Callable[[], object]) -> float:
    """Processor seconds of the fastest repeat."""
    times: list[float] = []
    for _ in range(STEPS):
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
    return min(times[WARM_UP:])
