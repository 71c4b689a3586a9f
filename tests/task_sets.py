"""A workload whose tasks come and go, its profile, and one process that does the same steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.schema.base import document_text
from mmplan.schema.factories import build_loss, build_module
from mmplan.schema.workload import Workload
from tests.matrix_models import Samples
from tests.solving import module_profile, profile

MODELS = "tests.matrix_models"
LENGTH, SEED = 40, 3
# Three changes of the modules in use: v alone leaves, u leaves as v returns, w is new.
SETS = {0: ["VT", "UT"], 4: ["UT", "TR"], 12: ["VT", "WR"]}
STEPS = 16
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.1}


def job(**train: Any) -> Workload:
    """Two contrastive tasks over v, t and u; regressions on a part of t that trains, and on w."""

    def tower(blocks: int, field: str, factory: str = "tower") -> dict[str, Any]:
        return {
            "factory": f"{MODELS}:{factory}",
            "args": {"blocks": blocks},
            "inputs": [field],
        }

    def pair(first: str, second: str, sync_batch: int) -> dict[str, Any]:
        return {
            "factory": f"{MODELS}:Contrastive",
            "inputs": [first, second],
            "cross_sample": True,
            "sync_batch": sync_batch,
        }

    def regression(module: str) -> dict[str, Any]:
        return {"factory": f"{MODELS}:Regression", "inputs": [module, "target"]}

    return Workload.model_validate(
        {
            "name": "sets",
            "batch": 12,
            "modules": {
                "v": tower(3, "a"),
                "t": tower(4, "b", "tied"),
                "u": tower(2, "c"),
                "w": tower(2, "a"),
            },
            "losses": {
                "vt": pair("v", "t", 6),
                "ut": pair("u", "t", 8),
                "tr": regression("t"),
                "wr": regression("w"),
            },
            "tasks": {
                "VT": {"modules": ["v", "t"], "losses": ["vt"], "weight": 0.5},
                "UT": {"modules": ["u", "t"], "losses": ["ut"], "batch": 8},
                "TR": {"modules": ["t"], "losses": ["tr"], "frozen": {"t": [[1, 3]]}},
                "WR": {"modules": ["w"], "losses": ["wr"]},
            },
            "data": {"factory": f"{MODELS}:Samples", "args": {"length": LENGTH}},
            "train": {
                "precision": "fp64",
                "seed": SEED,
                "optimizer_args": OPTIMIZER,
                "steps": STEPS,
                "tasks_from_step": SETS,
                **train,
            },
        }
    )


def write_files(folder: Path, workload: Workload, devices: int = 4) -> tuple[Path, Path]:
    """The workload and a profile of it in files."""
    seconds = {"v": (3e-3, 3), "t": (1e-3, 4), "u": (2e-3, 2), "w": (2e-3, 2)}
    tied = [name for name, spec in workload.modules.items() if spec.factory.endswith("tied")]
    costs = profile(
        {
            name: module_profile(each, 2 * each, fixed_s=each, blocks=blocks, tp={1: 1.0, 2: 1.9})
            | ({"tied_blocks": [[0, blocks - 1]]} if name in tied else {})
            for name, (each, blocks) in seconds.items()
        },
        devices,
    )
    text = json.loads(document_text(costs))
    text["cluster"]["device"]["name"] = "cpu"
    (folder / "workload.json").write_text(document_text(workload))
    (folder / "profile.json").write_text(json.dumps(text))
    return folder / "workload.json", folder / "profile.json"


class OneProcess:
    """All modules and losses of the workload, whole, and plain torch: nothing of ours runs."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload = workload
        self.modules = {name: build_module(workload, name, folder) for name in workload.modules}
        self.losses = {name: build_loss(workload, name, folder) for name in workload.losses}
        self.samples = Samples(LENGTH)
        train = workload.train
        kind = getattr(torch.optim, train.optimizer)
        self.optimizer = kind(self.named_parameters().values(), **train.optimizer_args)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        for name, module in self.modules.items():
            found.update({f"{name}.{n}": p for n, p in module.named_parameters()})
        for name, module in self.losses.items():
            found.update({f"losses.{name}.{n}": p for n, p in module.named_parameters()})
        return found

    def train(self, sets: Mapping[int, Sequence[str]], steps: int) -> list[float]:
        """The loss of every step."""
        return [self.step(s, sets[max(t for t in sets if t <= s)]) for s in range(steps)]

    def step(self, step: int, tasks: Sequence[str]) -> float:
        total = sum(
            (self._task(name, step) for name in tasks), torch.zeros((), dtype=torch.float64)
        )
        total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total.detach())

    def _task(self, name: str, step: int) -> Tensor:
        task = self.workload.tasks[name]
        batch = task.batch or self.workload.batch
        epoch, index = divmod(step, LENGTH // batch)
        generator = torch.Generator().manual_seed(SEED + epoch)
        rows = torch.randperm(LENGTH, generator=generator)[index * batch : (index + 1) * batch]
        values: dict[str, Tensor] = {k: x[rows] for k, x in self.samples.values.items()}
        for module in task.modules:
            (field,) = self.workload.modules[module].inputs
            with self._frozen(module, task.frozen.get(module, False)):
                values[module] = self.modules[module](values[str(field)])
        (loss,) = task.losses
        spec = self.workload.losses[loss]
        size = spec.sync_batch or batch
        parts = [
            self.losses[loss](*(values[str(i)][a : a + size] for i in spec.inputs))
            for a in range(0, batch, size)
        ]
        return task.weight * torch.stack(parts).mean()

    @contextlib.contextmanager
    def _frozen(self, module: str, ranges: Any) -> Generator[None]:
        """Blocks that this task does not train."""
        blocks = [b for a, e in ranges or [] for b in range(a, e)]
        parameters = [p for b in blocks for p in self.modules[module][b].parameters()]
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
        for parameter in parameters:
            parameter.requires_grad_(True)
