"""Three small trainings that write down the samples of every step: towers, a chain, two tasks.

A block that records has a weight with a gradient of one, which Adam lowers by the learning rate in
every step: so the block knows the step, under any plan and after any resume.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx

from mmlaunch.data.loader import step_indices
from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.factories import build_dataset
from mmplan.schema.plan import FileReference
from mmplan.schema.workload import Workload, load_workload
from mmplan.zoo.decoder import has_values
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.streams import LOG, PAUSE, Seen

HERE = "tests.fault_jobs"
SEED, STEPS, BATCH, LR = 3, 40, 8, 0.01
# A file; as long as it is there, local rank 3 dies.
BROKEN = "MMPLAN_TEST_BROKEN"


class Points:
    """Samples with a number of their own."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        values = torch.randn(3, 4, generator=draw, dtype=torch.float64)
        return {"id": torch.tensor(self.first + index), "x": values[0], "y": values[1]}


class _Tick(Function):
    """The values as they are; to the clock a share of one for each sample."""

    @staticmethod
    def forward(ctx: FunctionCtx, clock: Tensor, x: Tensor) -> Tensor:
        del clock
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient.new_full((), len(gradient) / BATCH), gradient


class Recorder(nn.Module):
    """Writes down the samples that it is given, then a linear map."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.clock = nn.Parameter(torch.zeros(()))
        self.linear = nn.Linear(4, 6)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        # The launcher's dry run is no training.
        if has_values(ids) and dist.is_initialized():
            self._write(ids.tolist())
        tick: Tensor = _Tick.apply(self.clock, self.linear(x))  # type: ignore[assignment]
        return tick

    def _write(self, ids: list[int]) -> None:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        line = [self.name, round(-self.clock.item() / LR), [[i] for i in ids]]
        ranks, restarts = os.environ["WORLD_SIZE"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        path = f"{os.environ[LOG]}-{ranks}-{restarts:02}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)


class Bend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        # A device that is broken ends every process that uses it.
        if os.environ.get("LOCAL_RANK") == "3" and os.path.exists(os.environ.get(BROKEN, "")):
            os.kill(os.getpid(), signal.SIGKILL)
        return x + self.linear(x).tanh()


class Near(nn.Module):
    """Squares of what is left of y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x[:, :4] - y).square().mean()


def reader(name: str) -> nn.Sequential:
    return nn.Sequential(Recorder(name), Bend())


def head() -> nn.Sequential:
    return nn.Sequential(Bend(), Bend())


def _reader(name: str, field: str = "x") -> dict[str, Any]:
    return {"factory": f"{HERE}:reader", "args": {"name": name}, "inputs": ["id", field]}


def _points(first: int = 0) -> dict[str, Any]:
    return {"factory": f"{HERE}:Points", "args": {"first": first}}


def _head(source: str) -> dict[str, Any]:
    return {"factory": f"{HERE}:head", "inputs": [source]}


_NEAR = {"factory": f"{HERE}:Near"}
WORKLOADS: dict[str, dict[str, Any]] = {
    "towers": {
        "modules": {"image": _reader("image"), "text": _reader("text", "y")},
        "losses": {
            "clip": {
                "factory": "mmplan.zoo.losses:clip",
                "inputs": ["image", "text"],
                "cross_sample": True,
                "sync_batch": BATCH,
            }
        },
        "data": _points(),
    },
    "chain": {
        "modules": {"encoder": _reader("encoder"), "decoder": _head("encoder")},
        "losses": {"near": {**_NEAR, "inputs": ["decoder", "y"]}},
        "data": _points(),
    },
    "tasks": {
        "modules": {
            "encoder": _reader("encoder"),
            "talker": _head("encoder"),
            "finder": _head("encoder"),
        },
        "losses": {
            "talk": {**_NEAR, "inputs": ["talker", "y"]},
            "find": {**_NEAR, "inputs": ["finder", "y"]},
        },
        "tasks": {
            "talk": {"modules": ["encoder", "talker"], "losses": ["talk"], "data": _points()},
            "find": {"modules": ["encoder", "finder"], "losses": ["find"], "data": _points(100)},
        },
    },
}


def _units(job: str, plan: str) -> list[UnitSpec]:
    """By the plan's name: on two ranks, or spread over three."""
    wide = plan == "three"
    if job == "towers":
        shares, ranks = ([5, 3], [[[0]], [[2]]]) if wide else ([BATCH], [[[0]]])
        return [
            unit("image", "id", "x", blocks=2, k=2, dp=len(ranks), shares=shares, ranks=ranks),
            unit("text", "id", "y", blocks=2, k=2, ranks=[[[1]]]),
        ]
    if job == "chain":
        last = [[[1], [2]]] if wide else [[[1]]]
        return [
            unit("encoder", "id", "x", blocks=2, k=4, kind="1f1b", ranks=[[[0]]]),
            unit("decoder", "encoder", pp=len(last[0]), blocks=2, k=4, kind="1f1b", ranks=last),
        ]
    found: list[UnitSpec] = []
    for task, name, rank in (("talk", "talker", 0), ("find", "finder", 1)):
        both = [[[0]], [[1]]] if wide else [[[rank]]]
        found += [
            unit("encoder", "id", "x", task=task, blocks=2, k=2, dp=len(both), ranks=both),
            unit(name, "encoder", task=task, blocks=2, k=2, ranks=[[[2 if wide else rank]]]),
        ]
    return found


_LOSSES = {
    "towers": [loss("clip", "image", "text", sync_batch=BATCH)],
    "chain": [loss("near", "decoder", "y")],
    "tasks": [
        loss("talk", "talker", "y", task="talk"),
        loss("find", "finder", "y", task="find"),
    ],
}


def workload(job: str) -> Workload:
    """A job's, in float64."""
    train = {
        "precision": "fp64",
        "seed": SEED,
        "optimizer": "AdamW",
        "optimizer_args": {"lr": LR, "weight_decay": 0.0},
        "steps": STEPS,
    }
    return Workload.model_validate({"name": job, "batch": BATCH, "train": train, **WORKLOADS[job]})


def write_job(folder: Path, job: str, *, nodes: int = 1) -> dict[str, Path]:
    """A job's workload and plans in a folder.

    Args:
        nodes: with two, rank 0 is on the first.

    Returns:
        The plans, ``two`` and ``three`` by their ranks.
    """
    path = folder / "workload.json"
    path.write_text(document_text(workload(job)))
    batch = dict.fromkeys(workload(job).tasks, BATCH) or BATCH
    found: dict[str, Path] = {}
    for name in ("two", "three"):
        plan = make_plan(
            *_units(job, name),
            losses=_LOSSES[job],
            batch=batch,
            seed=SEED,
            name=name,
            per_node=1 if nodes > 1 else None,
        )
        named = {"workload": FileReference(path=path.name, sha256=file_sha256(path))}
        plan = trained_as(plan, load_workload(path), folder=None).model_copy(update=named)
        found[name] = folder / f"{name}.json"
        found[name].write_text(document_text(plan))
    return found


def expected(job: str, folder: Path) -> dict[str, list[Seen]]:
    """By module that records, the samples of every step, as seed and step say."""
    made, found = workload(job), defaultdict[str, list[Seen]](lambda: [[] for _ in range(STEPS)])
    for task in made.tasks.values() or [made]:
        data_spec, modules = task.data, list(task.modules)
        assert data_spec is not None
        data = build_dataset(data_spec, folder, seed=SEED)
        for name in modules:
            if made.modules[name].factory == f"{HERE}:reader":
                for step, seen in enumerate(found[name]):
                    ids = step_indices(data, BATCH, SEED, step)
                    seen += [[int(data[i]["id"])] for i in ids]
    return {name: [sorted(seen) for seen in steps] for name, steps in found.items()}
