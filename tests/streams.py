"""Training that writes down the samples it sees: a source of every kind, each with its own task.

A module's first block has a weight that every step of SGD lowers by one, so it knows the step, in
whichever process, under whichever plan and after whichever resume.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import tarfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmlaunch.data.loader import step_indices
from mmplan.ragged import Ragged
from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.factories import build_dataset
from mmplan.schema.plan import FileReference
from mmplan.schema.workload import Workload, load_workload
from mmplan.zoo.decoder import has_values
from tests.programs import loss, make_plan, trained_as, unit

HERE = "tests.streams"
SEED, STEPS, BATCH = 7, 24, 6
# Where the samples are written, and how long a block takes for each micro-batch.
LOG, PAUSE = "MMPLAN_TEST_STREAM", "MMPLAN_TEST_PAUSE"
# A step's samples of a task: each item's ids, in any order.
Seen = list[list[int]]


class Numbers:
    """Samples of one number."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(self.first + index)}


class Told(Numbers):
    """Numbers whose work is known: each step's batch is put in another order by each plan."""

    def work(self, index: int) -> dict[str, float]:
        return {"numbers": 1.0 + index % 7}


class Recorder(nn.Module):
    """Writes down what it is given."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task
        self.clock = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor | Ragged) -> Tensor:
        values, lengths = ids if isinstance(ids, Ragged) else (ids, torch.ones_like(ids))
        # The launcher's dry run is no training.
        if has_values(values) and dist.is_initialized():
            self._write([part.tolist() for part in values.split(lengths.tolist())])
        return self.clock.repeat(len(lengths))

    def _write(self, items: Seen) -> None:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        line = [self.task, -round(self.clock.item()), items]
        file = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)


class Pass(nn.Module):
    """A block that only gives a pipeline a second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.idle


def recorder(task: str) -> nn.Sequential:
    return nn.Sequential(Recorder(task), Pass())


class Mean(nn.Module):
    """Its gradient is one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def sources() -> dict[str, dict[str, Any]]:
    """The data of every task: each kind alone, then three kinds mixed, by two sets of weights."""
    shards = {"shards": "part-{0..2}.tar"}
    tar = "mmplan.sources.tar_shards:tar_shards"
    disk = {"factory": "mmplan.sources.hf_datasets:on_disk", "args": {"path": "disk"}}
    chats = {**disk, "args": {"path": "chats"}}
    parts = [
        {"factory": f"{HERE}:Numbers", "args": {"first": 200, "count": 9}},
        {"factory": tar, "args": {**shards, "window": 3}},
        disk,
    ]

    def mixed(*weights: float) -> dict[str, Any]:
        own = [{**part, "weight": w} for part, w in zip(parts, weights, strict=True)]
        args = {"parts": own, "epoch": 17}
        return {"factory": "mmplan.sources.mixture:mixture", "args": args}

    return {
        "numbers": {"factory": f"{HERE}:Told", "args": {"first": 0, "count": 20}},
        "shards": {"factory": tar, "args": shards},
        "nearby": {"factory": tar, "args": {**shards, "window": 4}},
        "disk": disk,
        "packed": {
            "factory": "mmplan.sources.packing:packed",
            "args": {"source": chats, "field": "id", "budget": 6},
        },
        "mixed": mixed(3, 2, 1),
        "turned": mixed(1, 1, 2.5),
    }


def workload() -> Workload:
    tasks = sources()
    return Workload.model_validate(
        {
            "name": "streams",
            "batch": BATCH,
            "modules": {
                task: {"factory": f"{HERE}:recorder", "args": {"task": task}, "inputs": ["id"]}
                for task in tasks
            },
            "losses": {f"{t}_mean": {"factory": f"{HERE}:Mean", "inputs": [t]} for t in tasks},
            "tasks": {
                task: {"modules": [task], "losses": [f"{task}_mean"], "data": data}
                for task, data in tasks.items()
            },
            "train": {
                "precision": "fp64",
                "seed": SEED,
                "optimizer": "SGD",
                "optimizer_args": {"lr": 1.0},
                "steps": STEPS,
            },
        }
    )


def write_data(folder: Path) -> None:
    """The files that the sources read; ids tell the sources apart."""
    numbers = itertools.count(100)
    for shard, size in enumerate((5, 1, 7)):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for number in itertools.islice(numbers, size):
                member = tarfile.TarInfo(f"{number}.id.cls")
                member.size = len(text := str(number).encode())
                tar.addfile(member, io.BytesIO(text))
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"id": list(range(300, 315))}).save_to_disk(folder / "disk")
    rows = [[number] * (1 + number % 4) for number in range(400, 440)]
    datasets.Dataset.from_dict({"id": rows}).save_to_disk(folder / "chats")


# Every module's degrees, in turn: one rank, replicas of uneven shares, pipelines beside them.
PLANS: dict[str, list[dict[str, Any]]] = {
    "one": [{"k": 2, "ranks": [[[0]]]}],
    "replicas": [{"dp": 2, "k": 1, "shares": [4, 2], "ranks": [[[0]], [[1]]]}],
    "spread": [
        {"pp": 2, "k": 3, "kind": "1f1b", "ranks": [[[0], [1]]]},
        {"dp": 3, "k": 2, "ranks": [[[0]], [[1]], [[2]]]},
        {"k": 1, "ranks": [[[2]]]},
        {"pp": 2, "k": 2, "kind": "gpipe", "ranks": [[[2], [0]]]},
    ],
}


def write_plan(folder: Path, name: str) -> Path:
    """A plan of the workload in a folder."""
    path = folder / "workload.json"
    degrees = PLANS[name]
    tasks = list(sources())
    plan = make_plan(
        *(
            unit(task, "id", name=task, task=task, blocks=2, **degrees[k % len(degrees)])
            for k, task in enumerate(tasks)
        ),
        losses=[loss(f"{task}_mean", task, task=task) for task in tasks],
        batch=dict.fromkeys(tasks, BATCH),
        seed=SEED,
        name=name,
    )
    named = {"workload": FileReference(path=path.name, sha256=file_sha256(path))}
    plan = trained_as(plan, load_workload(path), folder=None).model_copy(update=named)
    (folder / f"{name}.json").write_text(document_text(plan))
    return folder / f"{name}.json"


def expected(folder: Path) -> dict[str, list[Seen]]:
    """By task, the samples of every step, as seed and step say."""
    found: dict[str, list[Seen]] = {}
    for task, spec in workload().tasks.items():
        assert spec.data is not None
        data = build_dataset(spec.data, folder, seed=SEED)
        found[task] = [
            sorted(_ids(data[i]["id"]) for i in step_indices(data, BATCH, SEED, step))
            for step in range(STEPS)
        ]
    return found


def recorded(logs: Sequence[Path], steps: int = STEPS) -> dict[str, list[Seen]]:
    """By task, what a run saw in every step.

    Args:
        logs: of the run and its resumes, one after another; the last to begin a step counts, and
            what earlier ones saw of it before they were killed must be among that.
    """
    attempts: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    for log in logs:
        own: dict[tuple[str, int], Seen] = defaultdict(list)
        for line in log.read_text().splitlines():
            task, step, items = json.loads(line)
            own[task, step] += items
        for place, items in own.items():
            attempts[place].append(sorted(items))
    found: dict[str, list[Seen]] = {task: [[]] * steps for task, _ in attempts}
    for (task, step), (*killed, last) in attempts.items():
        for seen in killed:
            assert all(seen.count(item) <= last.count(item) for item in seen), (task, step)
        found[task][step] = last
    return found


def steps_of(log: Path) -> list[int]:
    """The steps that a run's blocks began; a line that is being written is none."""
    whole = log.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line)[1] for line in whole]


def _ids(value: Tensor | Ragged) -> list[int]:
    return value.values.tolist() if isinstance(value, Ragged) else [int(value)]
