"""The doctor on this machine, and on machines with one thing wrong each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmplan.doctor import doctor
from mmplan.doctor.doctor import Finding, examine


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def install(folder: Path, name: str, code: str, *, wants: str = "torch") -> None:
    """A package with metadata, as pip leaves it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\nRequires-Dist: {wants}\n"
    )


def test_the_machine_that_runs_the_tests_is_fit(findings: dict[str, Finding]) -> None:
    unfit = [finding for finding in findings.values() if finding.ok is False]
    assert unfit == []
    real = {"torch", "gloo", "loopback", "fork server", "all-reduce"}
    assert {name for name in real if findings[name].ok} == real
    assert findings["all-reduce"].detail == "two processes added up over gloo"


def test_no_name_stands_twice(findings: dict[str, Finding]) -> None:
    assert len(findings) == 17
    assert all(finding.detail for finding in findings.values())


def test_the_doctor_itself_loads_nothing_heavy() -> None:
    code = "import sys, mmplan.doctor.doctor; print({'torch', 'numpy', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("code", "wants", "said"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "torch",
            "RuntimeError: operator torchvision::nms does not exist",
        ),
        ("", "torch==1.13.1", "9.9 wants torch 1.13.1, and torch is "),
        ("", "torch (==1.13.1)", "9.9 wants torch 1.13.1, and torch is "),
        ("import os; os.abort()", "torch", "crashed with SIGABRT"),
        ("import os; os._exit(3)", "torch", "exit code 3"),
        ("import time; time.sleep(60)", "torch", "no answer within 3 s"),
    ],
)
def test_broken_torchvision_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, wants: str, said: str
) -> None:
    install(tmp_path, "torchvision", code, wants=wants)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor._companion("torchvision", timeout_s=3.0)
    assert found.ok is False
    assert said in found.detail
    assert "every vision class of transformers" in found.detail
    assert found.hint is not None
    assert "pip uninstall torchvision" in found.hint


@pytest.mark.parametrize("wants", ["torch", "torchdata==0.1", "torch>=2.0"])
def test_a_sound_companion_is_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wants: str
) -> None:
    install(tmp_path, "torchaudio", "print('hello from an import')", wants=wants)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor._companion("torchaudio", timeout_s=20.0)
    assert found == Finding(name="torchaudio", ok=True, detail="9.9, fits torch")


def test_torch_that_does_not_import_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = doctor._torch(20.0)
    assert found.ok is False
    assert "libcudart.so.12 is missing" in found.detail


def test_all_reduce_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "gone0")
    found = doctor._all_reduce(30.0)
    assert found.ok is False
    assert "gone0" in found.detail
    assert found.hint is not None
    assert "GLOO_SOCKET_IFNAME" in found.hint


@pytest.mark.parametrize(
    ("changes", "has_driver", "ok", "said"),
    [
        ({"cuda": True, "nccl": False}, True, False, "no NCCL"),
        ({"cuda": True, "nccl": True}, True, True, "2 GPUs, CUDA 12.9, NCCL"),
        ({"cuda": False, "cuda_build": None}, True, None, "built for CPU only"),
        ({"cuda": False}, True, None, "built for CUDA 12.9"),
        ({"cuda": False}, False, None, "no GPU"),
    ],
)
def test_cuda(changes: dict[str, Any], has_driver: bool, ok: bool | None, said: str) -> None:
    found = {"cuda": True, "nccl": True, "num_gpus": 2, "cuda_build": "12.9"}
    finding = doctor._cuda({**found, **changes}, has_driver=has_driver)
    assert finding.ok is ok
    assert said in finding.detail


def test_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(doctor.socket, "create_server", refuse)
    found = doctor._loopback()
    assert found.ok is False
    assert "Cannot assign requested address" in found.detail


@pytest.mark.parametrize(
    ("setting", "ok"), [("1", True), ("1,1", True), ("100000", None), ("many", None)]
)
def test_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, setting: str, ok: bool | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert doctor._threads().ok is ok


def test_container_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable:    8388608 kB",
        "/sys/fs/cgroup/memory.max": str(600 * 2**20),
        "/sys/fs/cgroup/memory.current": str(200 * 2**20),
        "/sys/fs/cgroup/cpu.max": "50000 100000",
    }
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor._memory().ok is False
    assert doctor._memory().detail == "400 MiB free"
    assert "0.5 cores" in doctor._threads().detail
    assert doctor._threads().ok is None


@pytest.mark.parametrize(("free", "ok"), [(2**30, True), (2**29, None), (2**20, False)])
def test_little_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, ok: bool | None
) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    found = doctor._disk("disk", tmp_path)
    assert found.ok is ok
    assert (found.hint is None) is (ok is True)


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor._disk("disk", tmp_path).ok is False
    assert doctor._shared_memory().ok is False


@pytest.mark.parametrize(("soft", "ok"), [(4096, True), (-1, True), (512, None), (64, False)])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, ok: bool | None) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (soft, soft))
    assert doctor._open_files().ok is ok
