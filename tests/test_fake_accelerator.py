"""Sessions on a device without hardware: nothing of the CPU beside it, and planted faults."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlaunch.execute.batch_sync import BatchSync
from mmlaunch.process.fake_accelerator import DeviceMismatchError, FakeAccelerator, register
from mmlaunch.session.accelerator_check import AcceleratorVerdict, check_on_accelerator
from mmplan.planning.planner import solve
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.workload import ModuleSpec, Pins, Workload, load_workload
from tests.matrix_models import Block
from tests.mllm_cases import MllmCase
from tests.pairwise import pairwise_rows
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.test_mllm_matrix import FACTORS
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
# Widths of an MLLM of 15B in small.
NARROW: dict[str, dict[str, int]] = {
    "vision": {"width": 64, "outputs": 80},
    "llm": {"width": 80, "ffn": 216},
    "generator": {"width": 48, "hidden": 80},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Torch loads it on the way: here once for every fork."""
    import_module("torch._dynamo")


def _try_operations() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    device = register()
    for name, operation in OPERATIONS.items():
        accelerator = FakeAccelerator()
        with accelerator:
            x = torch.randn(3, 4).to(device)
            ids = torch.tensor([[1], [2], [3]]).to(device)
            accelerator.in_step = True
            with suppress(DeviceMismatchError):
                operation(x, ids)
        found[name] = {fault.kind for fault in accelerator.faults.values()}
        assert all(__file__ in fault.place for fault in accelerator.faults.values())
    return found


def test_what_a_real_device_would_refuse_or_wait_for() -> None:
    with ProcessPoolExecutor(1, mp_context=FORK) as child:
        found = child.submit(_try_operations).result()
    assert found == {name: FOUND.get(name, set()) for name in OPERATIONS}


def _towers(batch: int, *units: UnitSpec, **train: Any) -> tuple[Plan, Workload]:
    """Two towers with a contrastive loss; gated blocks on the one, plain ones on the other."""
    losses = [loss("contrastive", "v", "t", sync_batch=4), loss("regression", "t", "target")]
    workload = make_workload(
        list(units),
        losses,
        batch=batch,
        factories={"v": "gated"},
        train={"clip_grad_norm": 1.0, **train},
    )
    return trained_as(make_plan(*units, losses=losses, batch=batch), workload), workload


def _two_ranks() -> tuple[Plan, Workload]:
    return _towers(4, unit("v", "a", blocks=1), unit("t", "b", blocks=1), zero=1)


def _step(plan: Plan, workload: Workload, folder: Path = HERE) -> AcceleratorVerdict:
    verdict = check_on_accelerator(plan, workload, folder)
    assert verdict.failure is None, (verdict.failure, verdict.faults)
    assert verdict.most_synchronisations <= 4
    return verdict


def test_nothing_of_the_cpu_is_beside_the_device() -> None:
    verdict = _step(*_two_ranks())
    assert not verdict.faults
    assert verdict.ranks == 2


def test_nothing_of_the_cpu_is_beside_it_in_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMLAUNCH_WARM_UP", "1")
    assert not _step(*_two_ranks()).faults


def test_a_cpu_tensor_in_a_block_is_found_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Block.forward

    def forward(self: Block, *inputs: Tensor) -> Tensor:
        return plain(self, *inputs) + torch.zeros(8)

    monkeypatch.setattr(Block, "forward", forward)
    verdict = check_on_accelerator(*_two_ranks(), HERE)
    assert verdict.failure is not None
    (fault,) = verdict.faults
    assert fault.kind == "mixed devices"
    assert fault.place == f"{__file__}:{forward.__code__.co_firstlineno + 1}"


def test_a_cpu_tensor_of_the_runtime_is_found_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = BatchSync.begin

    def planted(self: BatchSync, step: int) -> None:
        begin(self, step)
        self.terms = torch.zeros(1, dtype=torch.float64)

    monkeypatch.setattr(BatchSync, "begin", planted)
    (fault,) = check_on_accelerator(*_two_ranks(), HERE).faults
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
    (fault,) = _step(*_two_ranks()).faults
    assert fault.kind == "host synchronisation"
    assert fault.place == f"{__file__}:{forward.__code__.co_firstlineno + 1}"
    assert "F0" in fault.instruction


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_stages_replicas_and_groups(zero: int, split: bool) -> None:
    verdict = _step(
        *_towers(
            8,
            unit("v", "a", blocks=2, tp=2, k=2, kind="1f1b", split=split),
            unit("t", "b", blocks=2, pp=2, dp=2, k=2, kind="1f1b", split=split),
            zero=zero,
        )
    )
    assert not verdict.faults
    assert verdict.ranks == 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", pairwise_rows(FACTORS, seed=2), ids=str)
def test_the_multimodal_llm(row: dict[str, Any]) -> None:
    case = MllmCase(**row)
    assert not _step(trained_as(case.plan(), case.workload()), case.workload()).faults


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "solver"),
    [
        ("clip-digits", "distmm"),
        ("mllm-digits", "convex"),
        ("multitask-digits", "mpsp"),
        ("val-digits", "mpsp"),
    ],
)
def test_plans_of_the_demos(tmp_path: Path, example: str, solver: str) -> None:
    path = EXAMPLES / example / "workload.yaml"
    workload = load_workload(path)
    plan = _planned(workload, path, tmp_path, cluster="cpu-4", devices=4, solver=solver)
    assert not _step(plan, workload, path.parent).faults


def _planned(
    workload: Workload, path: Path, folder: Path, *, cluster: str, devices: int, solver: str
) -> Plan:
    """A plan from an analytic profile."""
    profile = analytic_profile(workload, path.parent, load_cluster(cluster))
    save_document(profile, folder / "profile.json")
    return solve(
        workload,
        workload_path=path,
        profile=profile,
        profile_path=folder / "profile.json",
        plan_path=folder / "plan.json",
        devices=devices,
        solver=solver,
        top=1,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plan_of_an_mllm_of_15b_narrowed(tmp_path: Path) -> None:
    """Its plan for 96 devices; the modules have all of their blocks."""
    path = EXAMPLES / "papers" / "mllm-15b.yaml"
    stated = load_workload(path)
    full = stated.model_copy(
        update={"batch": 24, "modules": {n: _pinned(n, m) for n, m in stated.modules.items()}}
    )
    plan = _planned(full, path, tmp_path, cluster="a800-12", devices=96, solver="convex")
    assert {unit.module: (unit.pp, unit.tp) for unit in plan.units}["llm"] == (4, 2)
    narrow = full.model_copy(
        update={
            "modules": {
                name: spec.model_copy(update={"args": {**spec.args, **NARROW[name]}})
                for name, spec in full.modules.items()
            }
        }
    )
    verdict = _step(trained_as(plan, narrow), narrow, path.parent)
    assert not verdict.faults
    # Of eight equal replicas two stay: encoder, four stages and generator, each a group of two.
    assert verdict.ranks == 24


def _pinned(name: str, spec: ModuleSpec) -> ModuleSpec:
    """The llm in stages of groups."""
    pins = Pins(tp=2, pp=4) if name == "llm" else spec.plan
    return spec.model_copy(update={"plan": pins})
