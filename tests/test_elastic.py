"""A run that loses a device and wins two, under a plan for each number."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmlaunch.process.process_tree import ProcessId
from mmlaunch.run.elastic import DEVICES, Wanted, resize
from mmplan.errors import InvalidInputError
from mmplan.schema.base import document_text
from mmplan.schema.cluster import Cluster, Device, Link, Links
from mmplan.schema.profile import ModuleProfile, Point, Profile
from tests import commands
from tests.fault_jobs import BROKEN, STEPS, expected, workload
from tests.processes import named
from tests.streams import LOG, PAUSE, recorded

LIMIT_S = 120


def test_a_number_is_asked_of_a_run_that_heeds_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no run with --elastic is under way there"):
        resize(tmp_path, 3)
    here = ProcessId.of(os.getpid())
    Wanted(devices=4, launcher=here).write(tmp_path)
    assert resize(tmp_path, 3) == 4
    assert Wanted.read(tmp_path) == Wanted(devices=3, launcher=here)
    Wanted(devices=4, launcher=ProcessId(pid=here.pid, start_ticks=1)).write(tmp_path)
    with pytest.raises(InvalidInputError, match="no run with --elastic is under way there"):
        resize(tmp_path, 3)
    (tmp_path / DEVICES).write_text("{")
    assert Wanted.read(tmp_path) is None


@pytest.mark.parametrize("more", [["--nnodes", 2, "--rdzv-endpoint", "a:1"], ["--emulate"]])
def test_only_training_on_one_machine(tmp_path: Path, more: list[object]) -> None:
    done = commands.call("mmlaunch", "run", tmp_path / "plan.json", "--elastic", *more)
    assert done.code == 2
    assert "--elastic: only for training on one machine" in done.err


def write_files(folder: Path) -> None:
    """Workload and profile of two towers; no time is measured."""
    (folder / "workload.json").write_text(document_text(workload("towers")))
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    point = Point(microbatch=1, forward_s=0.01, backward_s=0.02)
    module = ModuleProfile(blocks=2, parameters=80, points=(point,))
    profile = Profile(
        name="towers",
        source="given",
        cluster=Cluster(
            name="one",
            nodes=1,
            devices_per_node=4,
            device=Device(name="cpu", memory_bytes=1e9, peak_flops=1e9),
            links=Links(intra_node=link, inter_node=link),
        ),
        modules={"image": module, "text": module},
    )
    (folder / "profile.json").write_text(document_text(profile))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_then_three_then_five_devices(tmp_path: Path) -> None:
    write_files(tmp_path)
    plan = tmp_path / "plan.json"
    command = ["solve", tmp_path / "workload.json", "--profile", tmp_path / "profile.json"]
    done = commands.run("mmplan", *command, "--devices", 4, "-o", plan, cwd=tmp_path)
    assert done.code == 0, done.err
    command = ["run", plan, "--run-dir", tmp_path / "unbroken-run"]
    own = {LOG: str(tmp_path / "unbroken")}
    done = commands.run("mmlaunch", *command, cwd=tmp_path, timeout_s=110, **own)
    assert done.code == 0, done.err

    run_dir, broken = tmp_path / "run", tmp_path / "broken"
    env = {LOG: str(tmp_path / "log"), BROKEN: str(broken), PAUSE: "0.2"}
    command = ["run", plan, "--run-dir", run_dir, "--elastic", "--max-restarts", 1]
    command += ["--save-every", 3, "--async-save"]
    launcher = commands.start("mmlaunch", *command, cwd=tmp_path, **env)

    def come_to(step: int) -> None:
        until_s = time.monotonic() + LIMIT_S
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.02)

    try:
        come_to(8)
        broken.touch()
        until_s = time.monotonic() + LIMIT_S
        while (found := Wanted.read(run_dir)) is None or found.devices == 4:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        come_to(14)
        broken.unlink()
        done = commands.run("mmlaunch", "resize", run_dir, "--devices", 5, cwd=tmp_path)
        assert done.code == 0, done.err
        out, err = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 0, err
        assert "3 devices in place of 4 (rank 3" in out
        assert "5 devices in place of 3 (asked for)" in out
    finally:
        if launcher.poll() is None:
            commands.kill_all(launcher)

    record = json.loads((run_dir / "run.json").read_text())
    assert [(entry["from"], entry["to"]) for entry in record["resizes"]] == [(4, 3), (3, 5)]
    for entry in record["resizes"]:
        phases = [entry[f"{name}_s"] for name in ("stopped", "planned", "started", "first_step")]
        assert min(phases) >= 0
        logging.getLogger(__name__).warning("%s: %s", entry["why"], phases)
    assert [segment["devices"] for segment in record["segments"]] == [4, 3, 5]
    assert len({segment["plan_sha256"] for segment in record["segments"]}) == 3
    logs = [path for ranks in (4, 3, 5) for path in sorted(tmp_path.glob(f"log-{ranks}-*"))]
    assert recorded(logs, STEPS) == expected("towers", tmp_path)
    weights = load_file(run_dir / "final.safetensors")
    for name, tensor in load_file(tmp_path / "unbroken-run" / "final.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)
    assert not named(str(tmp_path / "log"))
    assert not (run_dir / DEVICES).exists()
