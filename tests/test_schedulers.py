"""Job scripts: golden texts, the shell's own faults, and the fields that Kubernetes knows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from ruamel.yaml import YAML

from mmlaunch.schedulers.job import SchedulerJob
from mmlaunch.schedulers.jobset import jobset_manifest
from mmlaunch.schedulers.slurm import sbatch_script
from mmplan.errors import InvalidInputError
from tests.birds import copy_workload, two_rank_plan
from tests.commands import Done, Program, call

GOLDEN = Path(__file__).parent / "golden"
SHARED = Path("/shared/birds")
JOB = SchedulerJob(
    name="Birds & words",
    nodes=3,
    devices_per_node=8,
    on_cpu=False,
    plan=SHARED / "plans" / "plan.json",
    run_dir=SHARED / "runs" / "50% of the $data",
    sources=[SHARED / "modules.sh", SHARED / "fabric settings.sh"],
    arguments=["--save-every", "100", "--set", "train.schedule.kind=cosine"],
)
SMALL = replace(JOB, name="birds", nodes=1, devices_per_node=2, on_cpu=True, sources=[])


def batch_script(job: SchedulerJob = JOB, **more: Any) -> str:
    return sbatch_script(job, folder=SHARED, grace_s=300, **more)


def full_batch_script() -> str:
    return batch_script(
        partition="gpu",
        account="birds",
        time="1-00:00:00",
        image="registry/birds:1",
        more=["--qos=high", "--reservation=a b"],
    )


def manifest(job: SchedulerJob = JOB, **more: Any) -> str:
    where = {"image": "registry/birds:1", "claim": "data", "mount": PurePosixPath("/shared")}
    return jobset_manifest(job, **where, grace_s=300, max_restarts=3, **more)


def container(document: Any) -> Any:
    (job,) = document["spec"]["replicatedJobs"]
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    ("name", "text"), [("job.sbatch", full_batch_script()), ("jobset.yaml", manifest())]
)
def test_golden_job(name: str, text: str) -> None:
    if os.environ.get("MMPLAN_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


# ---- the shell ----


def shellcheck(script: str) -> str:
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=beside)
    assert program, "shellcheck is not installed: make install (extra: dev)"
    # A sourced file is the user's; a $ in a folder's name stands there as it is.
    command = [
        program,
        "--shell=bash",
        "--enable=quote-safe-variables",
        "--exclude=SC1091,SC2016",
        "-",
    ]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_shell_has_no_fault_to_find() -> None:
    pods = container(YAML(typ="safe").load(manifest()))["command"]
    scripts = [full_batch_script(), batch_script(SMALL), f"#!/bin/bash\n{pods[2]}"]
    assert [shellcheck(script) for script in scripts] == [""] * 3
    assert "SC2086" in shellcheck("#!/bin/bash\nrm $1")


@pytest.mark.parametrize(
    ("signals", "code", "requeued"), [(0, 75, True), (2, 75, True), (1, 143, False), (0, 1, False)]
)
def test_only_a_job_that_has_saved_is_requeued(
    tmp_path: Path, signals: int, code: int, requeued: bool
) -> None:
    """Slurm's commands are replaced: what they are asked goes to a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "asked"
    term = "kill -s TERM $PPID; sleep 0.05\n" * signals
    commands = {
        "srun": f"{term}exit {code}",
        "scancel": f'echo "scancel $*" >> {log}',
        "scontrol": f'echo "$@" >> {log}; echo n1; echo n2',
        "squeue": "echo 7",
    }
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    more = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(
        ["bash", "-c", batch_script()],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    asked = log.read_text().splitlines()
    assert done.returncode == code
    assert ("requeue 7" in asked) == requeued
    assert asked.count("scancel --signal=TERM 7") == signals


# ---- the manifest ----


def test_kubernetes_knows_every_field() -> None:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet

    def unknown(document: Any) -> bool:
        """Wrong values raise; names that the models lack are left out."""
        found = JobSet.from_dict(document)
        return found is None or found.to_dict() != document

    for text in (manifest(), manifest(SMALL, secret="mine")):
        document = YAML(typ="safe").load(text)
        assert not unknown(document)
        container(document)["imagePullPolice"] = "Always"
        assert unknown(document)
        (job,) = document["spec"]["replicatedJobs"]
        job["template"]["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Fail"
        with pytest.raises(ValueError, match="enum"):
            unknown(document)


@pytest.mark.parametrize("claim", ["on", "null", "1e3", "0x10", "12:30", "a: b", "~", "data-1"])
def test_both_versions_of_yaml_read_what_was_meant(claim: str) -> None:
    text = jobset_manifest(
        SMALL,
        image="birds:1",
        claim=claim,
        mount=PurePosixPath("/shared"),
        grace_s=1,
        max_restarts=0,
    )
    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe")
        reader.version = version
        (job,) = reader.load(text)["spec"]["replicatedJobs"]
        volumes = job["template"]["spec"]["template"]["spec"]["volumes"]
        assert volumes[0]["persistentVolumeClaim"]["claimName"] == claim


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("birds", "birds"),
        ("Birds & words", "birds-words"),
        ("2 towers", "run-2-towers"),
        ("鳥", "run"),
        ("a" * 39 + "-b", "a" * 39),
    ],
)
def test_names_that_kubernetes_takes(name: str, label: str) -> None:
    assert YAML(typ="safe").load(manifest(replace(JOB, name=name)))["metadata"]["name"] == label


def test_one_node_needs_no_rendezvous() -> None:
    document = container(YAML(typ="safe").load(manifest(SMALL)))
    assert "env" not in document
    assert "--rdzv-endpoint" not in document["command"][2]
    assert "--nnodes" not in batch_script(SMALL)


# ---- the commands ----


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "plans").mkdir()
    two_rank_plan(copy_workload(folder), folder / "plans" / "plan.json")
    return folder


@pytest.fixture
def here(planned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(planned)
    return planned


PODS = ("k8s", "plans/plan.json", "--image", "birds:1", "--claim", "data")


def mmlaunch(*args: object) -> Done:
    program: Program = "mmlaunch"
    return call(program, *args)


def test_commands_write_what_the_plan_needs(here: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    done = mmlaunch("slurm", "plans/plan.json", "-o", script, "--", "--steps", "5", "--json")
    assert done.code == 0, done.err
    text = script.read_text()
    assert f"exec mmlaunch run {here}/plans/plan.json \\" in text
    assert f"#SBATCH --output={here}/runs/birds/slurm-%j.out" in text
    assert "--steps 5 --json" in text
    assert (here / "runs" / "birds").is_dir()
    shown = mmlaunch(*PODS, "--", "--max-restarts", "4")
    document = YAML(typ="safe").load(shown.out)
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 4
    assert "exec mmlaunch run plans/plan.json" in container(document)["command"][2]
    assert mmlaunch(*PODS, "--json").document["text"].startswith("apiVersion: jobset")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slurm", "plans/plan.json", "--", "--stops", "3"), "no such option: --stops"),
        (("slurm", "plans/plan.json", "--", "--steps", "all"), "--steps"),
        (("slurm", "plans/plan.json", "--", "--run-dir", "a"), "--run-dir"),
        (("slurm", "plans/plan.json", "--", "--nnodes=2"), "--nnodes=2"),
        (("slurm", "plans/plan.json", "--source", "gone.sh"), "gone.sh"),
        (("slurm", "plans/plan.json", "--sbatch", "qos=high"), "'qos=high'"),
        (("slurm", "plans/plan.json", "--account", "a\n#b"), "no option of sbatch"),
        (("slurm", "plans/plan.json", "--time", "soon:"), "no time of Slurm's"),
        (("slurm", "plans/plan.json", "--time", "6"), "asked to save at once, 300 s before"),
        ((*PODS, "--run-dir", "../elsewhere"), "../elsewhere is not below this folder"),
    ],
)
@pytest.mark.usefixtures("here")
def test_mistakes_are_named_before_the_job_waits(arguments: tuple[str, ...], said: str) -> None:
    done = mmlaunch(*arguments)
    assert done.code == 2
    assert said in done.message


def test_a_folder_that_is_none_or_holds_a_run_is_said(here: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = mmlaunch("slurm", here / "plans" / "plan.json", "--run-dir", tmp_path)
    assert f"hint: {tmp_path} holds a run already" in done.err
    done = mmlaunch("slurm", here / "plans" / "plan.json", "--run-dir", tmp_path / "run.json")
    assert done.code == 4
    assert done.message == f"{tmp_path / 'run.json'}: cannot be made: File exists"


@pytest.mark.parametrize("time", ["7", "6:01", "0:06:01", "0-1", "0-0:7", "0-0:6:1", "UNLIMITED"])
def test_limits_that_leave_time_to_train(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in batch_script(time=time)


def test_an_option_of_sbatch_stays_on_its_line() -> None:
    with pytest.raises(InvalidInputError, match="no option of sbatch"):
        batch_script(replace(JOB, run_dir=Path("/a\nscancel --me")))
