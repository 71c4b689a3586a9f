"""A plan, a profile and a checkpoint are held against the workload that is to be trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.session.identity import check_same_run, identity_of
from mmplan.errors import InvalidInputError
from mmplan.schema.agreement import belief, check_profiled, fingerprinted
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, edited, given_profile, two_rank_plan
from tests.commands import Done, call, run

Data = dict[str, Any]
MODULES, LOSSES = ("tasks", "default", "modules"), ("tasks", "default", "losses")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agreement")
    copy_workload(made)
    (made / "plans").mkdir()
    two_rank_plan(made / "birds" / "workload.yaml", made / "plans" / "plan.json")
    given_profile(made / "plans" / "given.json")
    return made


def at(data: Data, path: tuple[str, ...]) -> Data:
    for name in path:
        data = data[name]
    return data


def put(*path: str, value: Any) -> Callable[[Data], None]:
    def change(plan: Data) -> None:
        *parents, name = path
        at(plan, tuple(parents))[name] = value

    return change


def half_batch(plan: Data) -> None:
    """A plan that is sound in itself."""
    plan["tasks"]["default"]["batch"] = 8
    for unit in plan["units"]:
        unit["samples"] = [8 for _ in unit["samples"]]


EDITS: dict[str, tuple[Callable[[Data], None], str]] = {
    "loss weight": (put(*LOSSES, "species", "weight", value=1.5), "losses.species.weight"),
    "task weight": (put("tasks", "default", "weight", value=0.5), "tasks.default.weight"),
    "tower frozen": (put(*MODULES, "words", "frozen", value=True), "modules.words.frozen"),
    "half frozen": (put(*MODULES, "sound", "frozen", value=[[0, 2]]), "modules.sound.frozen"),
    "swapped": (put(*LOSSES, "match", "inputs", value=["words", "sound"]), "losses.match.inputs"),
    "itself": (put(*LOSSES, "match", "inputs", value=["sound", "sound"]), "losses.match.inputs"),
    "sync batch": (put(*LOSSES, "match", "sync_batch", value=16), "losses.match.sync_batch"),
    "extra input": (
        put(*MODULES, "words", "inputs", value=["description", "kind"]),
        "modules.words.inputs",
    ),
    "batch": (half_batch, "tasks.default.batch"),
    "loss left out": (lambda plan: at(plan, LOSSES).pop("species"), "losses.species: is missing"),
    "args": (put("depends_on", "modules.sound.args.width", value=8), "sound.args.width was 8"),
    "precision": (put("training", "precision", value="bf16"), "training.precision"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_that_trains_something_else_is_refused(folder: Path, name: str) -> None:
    change, field = EDITS[name]
    plan = json.loads((folder / "plans" / "plan.json").read_text())
    change(plan)
    path = folder / "plans" / "edited.json"
    path.write_text(json.dumps(plan))
    checked = call("mmplan", "check", path)
    assert checked.code == 1
    run_dir = folder / "never"
    started = [
        call("mmlaunch", "verify", path, "--in-process"),
        call("mmlaunch", "run", path, "--run-dir", run_dir),
    ]
    assert [done.code for done in started] == [2, 2]
    for said in (checked.out, started[0].message, started[1].message):
        # A loss too few or a unit that its module does not fit may be a fault of the plan alone.
        assert field in said or "losses" in said
    assert not run_dir.exists()


def test_an_unchanged_plan_agrees(folder: Path) -> None:
    done = call("mmplan", "check", folder / "plans" / "plan.json")
    assert done.code == 0, done.err
    assert "compared with" in done.out


def test_without_its_workload_a_plan_is_compared_with_nothing(folder: Path) -> None:
    lonely = folder / "lonely"
    lonely.mkdir()
    (lonely / "plan.json").write_bytes((folder / "plans" / "plan.json").read_bytes())
    (lonely / "elsewhere").mkdir()
    done = call("mmplan", "check", lonely / "plan.json")
    assert done.code == 0
    # lonely/../birds/workload.yaml is there; from one folder deeper it is not.
    deeper = lonely / "elsewhere" / "plan.json"
    deeper.write_bytes((folder / "plans" / "plan.json").read_bytes())
    done = call("mmplan", "check", deeper)
    assert done.code == 0, done.err
    assert "compared with nothing" in done.out
    assert call("mmplan", "check", deeper, "--json").document["workload"] is None


def test_ranges_of_blocks_may_be_written_in_several_ways(folder: Path) -> None:
    text = (folder / "birds" / "workload.yaml").read_text()
    frozen = folder / "birds" / "frozen.yaml"
    frozen.write_text(
        text.replace("inputs: [description]", "inputs: [description]\n    frozen: [[0, 1], [1, 3]]")
    )
    plan = json.loads((folder / "plans" / "plan.json").read_text())
    path = folder / "plans" / "whole.json"
    for written in (True, [[0, 3]], [[1, 3], [0, 1]]):
        plan["tasks"]["default"]["modules"]["words"]["frozen"] = written
        plan["workload"]["path"] = "../birds/frozen.yaml"
        path.write_text(json.dumps(plan))
        done = call("mmplan", "check", path)
        assert "frozen: the plan has" not in done.out, done.out


def test_memory_is_held_against_the_device(folder: Path) -> None:
    solved = folder / "plans" / "solved.json"
    job = folder / "birds" / "workload.yaml", "--profile", folder / "plans" / "given.json"
    assert call("mmplan", "solve", *job, "-o", solved).code == 0
    plan = json.loads(solved.read_text())
    plan["cluster"]["device"]["memory_bytes"] = 1.0
    path = folder / "plans" / "tight.json"
    path.write_text(json.dumps(plan))
    done = call("mmplan", "check", path)
    assert done.code == 1
    assert "a cpu has 1 B" in done.out
    # Without a profile what the plan says of itself is believed.
    plan["profile"]["path"] = "gone.json"
    path.write_text(json.dumps(plan))
    assert call("mmplan", "check", path).code == 1


# ---- profiles ----


def test_a_profile_of_another_model_is_refused(folder: Path) -> None:
    workload_path = folder / "birds" / "workload.yaml"
    made = folder / "plans" / "analytic.json"
    given = ("--analytic", "--cluster", "cpu", "-o", made)
    assert call("mmplan", "profile", workload_path, *given).code == 0
    assert belief(load_profile(made), "fp32") is None
    assert "is of fp32, training is in bf16" in str(belief(load_profile(made), "bf16"))
    done = call("mmplan", "solve", workload_path, "--profile", made, "-o", folder / "x.json")
    assert done.code == 0, done.err
    assert "does not say" not in done.err
    for old, new, field in [
        ("{layers: 2, width: 12}", "{layers: 2, width: 16}", "modules.sound.args.width was 12"),
        (
            "birds.towers:words",
            "birds.towers:sound",
            "modules.words.factory was birds.towers:words",
        ),
        ("{width: 12, kinds: 5}", "{width: 12, kinds: 6}", "losses.species.args.kinds was 5"),
    ]:
        other = folder / "birds" / "other.yaml"
        other.write_text(workload_path.read_text())
        edited(other, old, new)
        for command in ("solve", "compare"):
            done = call("mmplan", command, other, "--profile", made, "-o", folder / "never.json")
            assert done.code == 2
            assert field in done.message
            assert "mmplan profile" in done.hint
            assert not (folder / "never.json").exists()


def test_a_profile_written_by_hand_is_believed_with_a_note(folder: Path) -> None:
    workload_path, given = folder / "birds" / "workload.yaml", folder / "plans" / "given.json"
    profile = load_profile(given)
    check_profiled(profile, load_workload(workload_path))
    workload = load_workload(workload_path)
    check_profiled(fingerprinted(profile, workload, {}), workload)
    for command in ("solve", "compare"):
        more = ("-o", folder / "y.json") if command == "solve" else ()
        done = call("mmplan", command, workload_path, "--profile", given, *more)
        assert done.code == 0
        assert "does not say of which model it is" in done.err


# ---- checkpoints ----


@pytest.mark.slow
def test_going_on_with_something_else_is_said(tmp_path: Path) -> None:
    workload = copy_workload(tmp_path)
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")

    def run_to(steps: int, *more: object) -> Done:
        where = ["--run-dir", tmp_path / "run", "--save-every", 2, "--steps", steps]
        return run("mmlaunch", "run", plan, *where, *more, cwd=tmp_path)

    assert run_to(2).code == 0
    edited(workload, "lr: 5.0e-2", "lr: 1.0e-2")
    edited(workload, "seed: 3", "seed: 99")
    two_rank_plan(workload, plan)
    done = run_to(4, "--resume-anyway")
    assert done.code == 0, done.err
    assert "resuming anyway: train.seed was 3, the workload has 99" in done.out
    assert "resuming anyway: train.optimizer_args.lr was 0.05, the workload has 0.01" in done.out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch: 16", "batch: 8", "batch was 16, the workload has 8"),
        ("seed: 3", "seed: 4", "train.seed was 3, the workload has 4"),
        ("lr: 5.0e-2", "lr: 0.1", "train.optimizer_args.lr was 0.05, the workload has 0.1"),
        ("momentum: 0.9", "nesterov: true", "train.optimizer_args.nesterov is new"),
        ("weight: 0.5", "weight: 0.25", "losses.species.weight was 0.5, the workload has 0.25"),
        ("count: 80", "count: 90", "data.args.count was 80, the workload has 90"),
        ("steps: 8", "steps: 800", None),
    ],
)
def test_what_makes_it_another_run(tmp_path: Path, old: str, new: str, said: str | None) -> None:
    path = copy_workload(tmp_path)
    saved = json.loads(json.dumps(identity_of(load_workload(path))))
    workload = load_workload(edited(path, old, new))
    assert check_same_run(Path("step-4"), None, workload, anyway=False) == []
    if said is None:
        assert check_same_run(Path("step-4"), saved, workload, anyway=False) == []
        return
    with pytest.raises(InvalidInputError, match="step-4 was saved by a run that trains") as caught:
        check_same_run(Path("step-4"), saved, workload, anyway=False)
    assert said in caught.value.message
    assert "--resume-anyway" in str(caught.value.hint)
    assert said in " ".join(check_same_run(Path("step-4"), saved, workload, anyway=True))
