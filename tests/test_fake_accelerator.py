"""Sessions on a device without hardware: nothing of the CPU beside it, and planted faults."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlaunch.execute.batch_sync import BatchSync
from mmlaunch.process.fake_accelerator import FakeAccelerator, register
from mmlaunch.session.accelerator_check import AcceleratorVerdict, check_on_accelerator
from mmplan.planning.planner import solve
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, load_workload
from tests.matrix_models import Block
from tests.programs import LossSpec, UnitSpec, loss, make_plan, trained_as, unit
from tests.verification import HERE, make_workload

EXAMPLES = HERE.parent / "examples"
FORK = multiprocessing.get_context("fork")
OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a sum": lambda x, ids: x + ids,
    "a CPU number": lambda x, ids: x * torch.tensor(2.0),
    "a CPU tensor": lambda x, ids: torch.where(x > 0, x, torch.zeros(3, 4)),
    "CPU indices": lambda x, ids: x[torch.tensor([0, 1])],
    "a value": lambda x, ids: x.sum().item(),
    "a list": lambda x, ids: ids.tolist() == [[1], [2], [3]] or 1 / 0,
    "a branch": lambda x, ids: 1 if x.any() else 0,
    "a copy back": lambda x, ids: x.cpu(),
    "a constant": lambda x, ids: x.new_tensor([1.0]),
    "a constant made there": lambda x, ids: x.new_zeros(1),
    "pinned data": lambda x, ids: torch.zeros(2).to(x.device, non_blocking=True),
    "a mask of values": lambda x, ids: x[x > 0],
    "a known mask": lambda x, ids: ids[ids > 1].shape == (2,) or 1 / 0,
    "repeats": lambda x, ids: x.repeat_interleave(ids[:, 0], dim=0),
    "counted repeats": lambda x, ids: x.repeat_interleave(ids[:, 0], dim=0, output_size=6),
}
FOUND = {
    "a CPU tensor": {"mixed devices"},
    "a value": {"host synchronisation"},
    "a list": {"host synchronisation"},
    "a branch": {"host synchronisation"},
    "a copy back": {"host synchronisation"},
    "a constant": {"host synchronisation"},
    "a mask of values": {"host synchronisation", "unknown shape"},
    "a known mask": {"host synchronisation"},
    "repeats": {"host synchronisation"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def _try_operations() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    device = register()
    for name, operation in OPERATIONS.items():
        accelerator = FakeAccelerator()
        with accelerator:
            x = torch.randn(3, 4).to(device)
            ids = torch.tensor([[1], [2], [3]]).to(device)
            accelerator.in_step = True
            try:
                operation(x, ids)
            except RuntimeError as error:
                assert "two devices" in str(error)
        found[name] = {fault.kind for fault in accelerator.faults.values()}
        assert all(__file__ in fault.place for fault in accelerator.faults.values())
    return found


def test_what_a_real_device_would_refuse_or_wait_for() -> None:
    with ProcessPoolExecutor(1, mp_context=FORK) as child:
        found = child.submit(_try_operations).result()
    assert found == {name: FOUND.get(name, set()) for name in OPERATIONS}


def _towers(**train: Any) -> tuple[Plan, Workload]:
    """Two towers that share a loss, one of them cut, the other one of two replicas and stages."""
    units = [
        unit("v", "a", blocks=2, tp=2, k=2, kind="1f1b"),
        unit("t", "b", blocks=2, pp=2, dp=2, k=2, kind="1f1b"),
    ]
    losses = [loss("contrastive", "v", "t", sync_batch=4), loss("regression", "t", "target")]
    workload = make_workload(
        units,
        losses,
        batch=8,
        factories={"v": "gated"},
        train={"clip_grad_norm": 1.0, **train},
    )
    plan = make_plan(*units, losses=losses, batch=8)
    return trained_as(plan, workload), workload


def _checked(plan: Plan, workload: Workload, folder: Path = HERE) -> AcceleratorVerdict:
    verdict = check_on_accelerator(plan, workload, folder)
    assert verdict.failure is None, (verdict.failure, verdict.faults)
    return verdict


@pytest.mark.parametrize("train", [{"zero": 1}])
def test_nothing_of_the_cpu_is_beside_the_device(train: dict[str, Any]) -> None:
    verdict = _checked(*_towers(**train))
    assert not verdict.faults
    assert verdict.ranks == 6


def test_a_cpu_tensor_in_a_block_is_found_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Block.forward

    def forward(self: Block, *inputs: Tensor) -> Tensor:
        return plain(self, *inputs) + torch.zeros(8)

    monkeypatch.setattr(Block, "forward", forward)
    verdict = check_on_accelerator(*_towers(), HERE)
    assert verdict.failure is not None
    (fault,) = verdict.faults
    assert fault.kind == "mixed devices"
    assert fault.place == f"{__file__}:{forward.__code__.co_firstlineno + 1}"


def test_a_cpu_tensor_of_the_runtime_is_found_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = BatchSync.begin

    def planted(self: BatchSync, step: int) -> None:
        begin(self, step)
        self.loss = torch.zeros((), dtype=torch.float64)

    monkeypatch.setattr(BatchSync, "begin", planted)
    (fault,) = check_on_accelerator(*_towers(), HERE).faults
    assert fault.kind == "mixed devices"
    assert "batch_sync.py" in fault.place
    assert "WAIT" in fault.instruction


def test_a_value_read_between_computes_is_found_at_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Block.forward

    def forward(self: Block, *inputs: Tensor) -> Tensor:
        return plain(self, *inputs) * float(self.up.weight.abs().max())

    monkeypatch.setattr(Block, "forward", forward)
    (fault,) = _checked(*_towers()).faults
    assert fault.kind == "host synchronisation"
    assert fault.place == f"{__file__}:{forward.__code__.co_firstlineno + 1}"
    assert "F0" in fault.instruction
