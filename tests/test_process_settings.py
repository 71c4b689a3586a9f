"""Settings of a rank's process: cores, garbage, numerics, the variables that CUDA reads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmlaunch.process import affinity
from mmlaunch.process.device import garbage_steps, pick, set_numerics
from mmlaunch.process.garbage import PacedGarbage
from mmlaunch.process.process_group import check_planned
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from tests.test_session import ADAMW, plan_of, run_ranks

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A machine of two NUMA nodes; the GPU is on the second."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    (tmp_path / "devices/system/node/has_cpu").write_text("0-1\n")
    place = tmp_path / "bus/pci/devices/0000:4b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    return tmp_path


def test_a_rank_runs_near_its_gpu(two_nodes: Path) -> None:
    near = frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert affinity.near_gpu(GPU, system=two_nodes) == near
    (two_nodes / "bus/pci/devices/0000:4b:00.0/numa_node").write_text("-1\n")
    assert not affinity.near_gpu(GPU, system=two_nodes)
    assert not affinity.near_gpu(SimpleNamespace(), system=two_nodes)


def test_ranks_without_a_gpu_share_the_nodes_evenly(two_nodes: Path) -> None:
    own = [affinity.near_memory(rank, 4, system=two_nodes) for rank in range(4)]
    assert own[0] == own[1] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert own[2] == own[3] == {4, 5, 6, 7, 12, 13, 14, 15}
    (two_nodes / "devices/system/node/has_cpu").write_text("0\n")
    assert not affinity.near_memory(1, 2, system=two_nodes)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux binds")
def test_a_process_is_bound_to_its_own_cores_only() -> None:
    text = (
        "import os; from mmlaunch.process.affinity import bind; own = os.sched_getaffinity(0);"
        "bind(frozenset({10_000})); assert os.sched_getaffinity(0) == own;"
        "bind(frozenset({10_000, min(own)})); assert os.sched_getaffinity(0) == {min(own)}"
    )
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[1])


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_after_every_so_many_steps_and_python_collects_afterwards() -> None:
    with PacedGarbage(3) as garbage:
        assert not gc.isenabled()
        alive = weakref.ref(Ring())
        garbage.after_step(2)
        assert alive()
        garbage.after_step(3)
        assert not alive()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    with PacedGarbage(0):
        assert gc.isenabled()


def test_a_step_leaves_no_tensor_to_the_collector() -> None:
    """Else memory would grow between two collections."""

    def steps(session: Session) -> list[type]:
        session.step()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for _ in range(2):
            session.step()
        gc.collect()
        return [type(item) for item in gc.garbage if isinstance(item, torch.Tensor)]

    gc.disable()
    try:
        assert run_ranks(plan_of("one rank"), ADAMW, steps) == [[]]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_settings_are_said_and_the_environment_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("THREADS", "GC_STEPS", "BIND"):
        monkeypatch.delenv(f"MMLAUNCH_{name}", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cpu")
    assert "cpu over gloo, 1 thread, on any core, garbage collected every 50" in pick().settings()
    monkeypatch.setenv("MMLAUNCH_THREADS", "2")
    monkeypatch.setenv("MMLAUNCH_GC_STEPS", "0")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    note = pick().settings()
    assert "2 threads" in note
    assert "garbage collected by Python" in note
    assert "malloc as chosen" in note
    monkeypatch.setenv("MMLAUNCH_GC_STEPS", "often")
    with pytest.raises(InvalidInputError, match="MMLAUNCH_GC_STEPS is 'often'"):
        garbage_steps()
    monkeypatch.setenv("MMLAUNCH_BIND", "yes")
    with pytest.raises(InvalidInputError, match="MMLAUNCH_BIND is 'yes'"):
        pick()


def test_variables_of_cuda_are_set_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("CUDA_MODULE_LOADING"))
        return True

    names = ("MMLAUNCH_DEVICE", "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "MMLAUNCH_BIND")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    note = pick(1, local_world_size=2).settings()
    assert seen == ["EAGER"]
    assert "CUDA_MODULE_LOADING=EAGER" in note
    assert "PYTORCH_ALLOC_CONF=max_split_size_mb:64" in note, "the user's own stays"


def test_a_plan_for_gpus_runs_on_a_cpu_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MMLAUNCH_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitEnvironmentError, match=r"CUDA is not available.*plan is for H100"):
        check_planned(pick(), "H100")
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cpu")
    check_planned(pick(), "H100")


def test_numerics_are_set_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        assert set_numerics(deterministic=False, tf32=False, device=cpu).endswith("s off")
        assert not torch.are_deterministic_algorithms_enabled()
        note = set_numerics(deterministic=True, tf32=True, device=gpu)
        assert note == "numerics: deterministic algorithms on, TF32 on"
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.get_float32_matmul_precision() == "high"
        set_numerics(deterministic=True, tf32=False, device=gpu)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
