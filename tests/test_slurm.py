"""The batch script, run by Slurm over two nodes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mmplan.schema.base import document_text
from mmplan.schema.load import load_plan
from tests.birds import copy_workload, two_rank_plan
from tests.commands import call, command, environment, run
from tests.slurm_nodes import Slurm, two_nodes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 400


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with two_nodes() as cluster:
        yield cluster


class Job:
    """The third person's workload on two nodes of one device, submitted."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self._slurm = slurm
        (folder / "plans").mkdir()
        self.plan = two_rank_plan(copy_workload(folder), folder / "plans" / "plan.json")
        plan = load_plan(self.plan)
        nodes = plan.cluster.model_copy(update={"nodes": 2, "devices_per_node": 1})
        self.plan.write_text(document_text(plan.model_copy(update={"cluster": nodes})))
        self.run_dir = folder / "run of 100%"
        script, settings = folder / "job.sh", folder / "settings.sh"
        settings.write_text(_settings(folder / "bin"))
        done = call(
            *("mmlaunch", "slurm", self.plan, "-o", script, "--run-dir", self.run_dir),
            *("--source", settings, "--", "--steps", STEPS),
        )
        assert done.code == 0, done.err
        self.id = slurm.call("sbatch", "--parsable", script)

    @property
    def steps(self) -> list[int]:
        """Steps in the metrics so far."""
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    @property
    def said(self) -> str:
        return (self.run_dir / f"slurm-{self.id}.out").read_text()

    def wait(self, state: str, within_s: float) -> None:
        def told() -> str:
            return self._slurm.call("scontrol", "show", "job", self.id) + self.said

        wait_until(lambda: self._slurm.field(self.id, "JobState") == state, within_s, told)

    def wait_for_steps(self) -> None:
        wait_until(lambda: len(self.steps) > 2, 300, lambda: self.said)


def _settings(folder: Path) -> str:
    """Puts this checkout's mmlaunch where a node's shell finds it."""
    folder.mkdir()
    program = folder / "mmlaunch"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command("mmlaunch"))} "$@"\n')
    program.chmod(0o755)
    names = ("PYTHONPATH", "OMP_NUM_THREADS")
    lines = [f"export {name}={shlex.quote(environment()[name])}" for name in names]
    return "\n".join([f"export PATH={shlex.quote(f'{folder}:{os.defpath}')}", *lines, ""])


def test_a_signalled_job_is_requeued_and_ends_as_an_unbroken_one(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.wait_for_steps()
    slurm.call("scancel", "--signal=TERM", "--full", job.id)
    wait_until(lambda: slurm.field(job.id, "Restarts") == "1", 120, lambda: job.said)
    (saved,) = (job.run_dir / "checkpoints").glob("step-*")
    stopped = int(saved.name.removeprefix("step-"))
    assert 0 < stopped < STEPS
    assert f"stopped on request after step {stopped}" in job.said
    job.wait("COMPLETED", 400)
    assert job.steps == [*range(STEPS)]
    alone = tmp_path / "alone"
    done = run(
        *("mmlaunch", "run", job.plan, "--steps", STEPS, "--run-dir", alone),
        cwd=tmp_path,
        timeout_s=300,
    )
    assert done.code == 0, done.err
    got, wanted = (load_file(folder / "final.safetensors") for folder in (job.run_dir, alone))
    assert got.keys() == wanted.keys()
    assert all((got[name] == wanted[name]).all() for name in wanted)


def test_a_cancelled_job_saves_and_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.wait_for_steps()
    slurm.call("scancel", job.id)
    job.wait("CANCELLED", 120)
    assert slurm.field(job.id, "Restarts") == "0"
    assert list((job.run_dir / "checkpoints").glob("step-*"))
