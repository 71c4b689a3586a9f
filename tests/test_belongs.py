"""A plan belongs to the fields of its workload that it depends on, and to no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.transport import Transport
from mmlaunch.run.options import RunOptions
from mmlaunch.run.run import Prepared, prepare
from mmlaunch.session.identity import check_same_workload
from mmplan.errors import InvalidInputError
from mmplan.schema.agreement import plan_differences
from mmplan.schema.factories import build_module
from mmplan.schema.load import load_plan
from mmplan.schema.settings import parse_settings, with_settings
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, edited, given_profile
from tests.commands import Done, call


def _knows_work(document: dict[str, Any]) -> None:
    document["data"] = {"default": {"work": {"sound": [1.0, 2.0, 3.0]}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workload, a plan for it, and one made from a profile that knows its data's work."""
    root = tmp_path_factory.mktemp("belongs")
    workload = copy_workload(root)
    for name, change in (("plan", None), ("worked", _knows_work)):
        profile = given_profile(root / f"{name}.profile.json", change)
        done = call(
            *("mmplan", "solve", workload, "--profile", profile, "--top", 1),
            *("-o", root / f"{name}.json"),
        )
        assert done.code == 0, done.err
    return root


def other_workload(folder: Path, old: str, new: str) -> Path:
    """The workload with a change, beside the one that was planned."""
    path = folder / "birds" / "other.yaml"
    path.write_text((folder / "birds" / "workload.yaml").read_text())
    return edited(path, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version: 1\n", "version: 1  # a comment\n"),
        ("batch: 16\n", "batch: 16\n\n"),
        ("steps: 8", "steps: 9"),
        ("lr: 5.0e-2", "lr: 1.0e-2"),
        ("seed: 3", "seed: 4"),
        ("momentum: 0.9}", "momentum: 0.9}, clip_grad_norm: 1.0"),
        ("momentum: 0.9}", "momentum: 0.9}, schedule: {kind: cosine}"),
        ("{count: 80}", "{count: 96}"),
    ],
)
def test_what_a_plan_does_not_depend_on_may_change(folder: Path, old: str, new: str) -> None:
    given = RunOptions(plan=folder / "plan.json", workload=other_workload(folder, old, new))
    assert prepare(given).workload_path.name == "other.yaml"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch: 16\n", "batch: 32\n", "tasks.default.batch: the plan has 16, the workload 32"),
        ("sync_batch: 8", "sync_batch: 16", "losses.match.sync_batch: the plan has 8"),
        ("weight: 0.5", "weight: 0.25", "losses.species.weight: the plan has 0.5"),
        ("[sound, words]", "[words, sound]", "losses.match.inputs"),
        ("[description]", "[description]\n    frozen: true", "modules.words.frozen"),
        ("[description]", "[description]\n    recompute: full", "modules.words.recompute"),
        ("[description]", "[description]\n    plan: {tp: 1}", "modules.words.plan.tp is new"),
        ("{layers: 1, width: 12}", "{layers: 1, width: 16}", "words.args.width was 12, the work"),
        ("{layers: 1, width: 12}", "{layers: 1}", "modules.words.args.width is gone, it was 12"),
        ("birds.towers:words", "birds.towers:sound", "modules.words.factory was another one"),
        ("birds.losses:Species", "birds.losses:Kinds", "losses.species.factory was another one"),
        ("kinds: 5", "kinds: 6", "losses.species.args.kinds was 5, the workload has 6"),
        ("optimizer: SGD", "optimizer: AdamW", "training.optimizer: the plan has"),
        ("seed: 3", "seed: 3, precision: bf16", "training.precision: the plan has"),
        ("seed: 3", "seed: 3, zero: 1", "training.zero: the plan has 0, the workload 1"),
    ],
)
def test_what_a_plan_depends_on_is_named(folder: Path, old: str, new: str, said: str) -> None:
    workload = other_workload(folder, old, new)
    run_dir = folder / "never"
    done = call(
        "mmlaunch", "run", folder / "plan.json", "--workload", workload, "--run-dir", run_dir
    )
    assert done.code == 2
    assert said in done.message
    assert "mmplan solve" in done.hint
    assert not run_dir.exists()
    found = plan_differences(load_plan(folder / "plan.json"), load_workload(workload))
    assert any(said in line for line in found)


def test_a_plan_made_from_the_works_of_samples_depends_on_their_data(folder: Path) -> None:
    workload = other_workload(folder, "{count: 80}", "{count: 96}")
    done = call("mmlaunch", "verify", folder / "worked.json", "--workload", workload)
    assert done.code == 2
    assert "tasks.default.data.args.count was 80, the workload has 96" in done.message


def test_an_older_plan_is_held_against_the_fields_that_it_has(folder: Path) -> None:
    old = json.loads((folder / "plan.json").read_text())
    del old["depends_on"]
    path = folder / "older.json"
    path.write_text(json.dumps(old))
    assert prepare(RunOptions(plan=path, workload=other_workload(folder, "steps: 8", "steps: 9")))
    workload = other_workload(folder, "batch: 16\n", "batch: 32\n")
    done = call("mmlaunch", "verify", path, "--workload", workload)
    assert done.code == 2
    assert "tasks.default.batch" in done.message


def test_a_plan_names_no_code(folder: Path) -> None:
    text = (folder / "worked.json").read_text()
    assert "sha256:" in text
    assert "birds.towers" not in text
    assert "birds.data" not in text


# ---- --set ----


def prepared(folder: Path, *settings: str) -> Prepared:
    return prepare(RunOptions(plan=folder / "plan.json", settings=parse_settings(settings)))


def test_values_are_set(folder: Path) -> None:
    made = prepared(
        folder,
        "train.optimizer_args.lr=1e-3",
        "train.optimizer_args.nesterov = true",
        "train.schedule={kind: cosine, warmup_steps: 2}",
        "train.schedule.final_ratio=0.5",
        "train.groups=[{match: '*', optimizer_args: {lr: 1}}]",
        "train.seed=7",
    )
    train = made.workload.train
    assert train.optimizer_args == {"lr": 1e-3, "momentum": 0.9, "nesterov": True}
    assert (train.schedule.kind, train.schedule.warmup_steps) == ("cosine", 2)
    assert train.schedule.final_ratio == 0.5
    assert train.groups[0].optimizer_args == {"lr": 1}
    assert train.seed == 7
    again = with_settings(made.workload, {"train.groups.0.optimizer_args.lr": 2})
    assert again.train.groups[0].optimizer_args == {"lr": 2}


@pytest.mark.parametrize(
    ("setting", "said", "hint"),
    [
        ("batch=32", "--set batch: the plan depends on it: tasks.default.batch", "solve again"),
        ("modules.sound.args.width=16", "modules.sound.args.width was 12", "solve again"),
        ("train.precision=bf16", "training.precision", "solve again"),
        ("train.learning_rate=1", "train has no field 'learning_rate'", "optimizer_args, groups"),
        ("train.step=1", "train has no field 'step'", "did you mean steps?"),
        ("modules.vision.args.width=1", "modules has no field 'vision'", "has sound, words"),
        ("trian.seed=1", "the workload has no field 'trian'", "did you mean train?"),
        ("train.steps.more=1", "train.steps has no field 'more'", "has no fields"),
        ("train.groups.0.match=x", "train.groups has no field '0'", "has no fields"),
        ("train.steps=many", "--set: train.steps: must be a whole number, got 'many'", "workload"),
        ("train.steps", "--set train.steps: is not KEY=VALUE", "lr=1e-3"),
        ("train.steps=[1", "--set train.steps: not valid YAML", "mend"),
        ("train.optimizer_args.rl=1", "train.optimizer_args", "lr"),
    ],
)
def test_what_cannot_be_set(folder: Path, setting: str, said: str, hint: str) -> None:
    where = ("--run-dir", folder / "never")
    done = call("mmlaunch", "run", folder / "plan.json", "--set", setting, *where)
    assert done.code == 2
    assert said in done.message
    assert hint in done.hint
    assert not (folder / "never").exists()


def test_ranks_that_read_other_workloads_are_refused(folder: Path) -> None:
    stated = load_workload(folder / "birds" / "workload.yaml")

    def compare(transport: Transport) -> str:
        changed: Mapping[str, Any] = {"train.optimizer_args.lr": 1.0} if transport.rank else {}
        check_same_workload(stated, transport)
        with pytest.raises(InvalidInputError, match="rank 1 has another workload") as caught:
            check_same_workload(with_settings(stated, changed), transport)
        return caught.value.message

    for message in InProcessWorld(2).run(compare):
        assert message.endswith("train.optimizer_args.lr differs")


def trained(folder: Path, run_dir: Path, *more: object) -> tuple[Done, bool]:
    """A run of the plan, and whether its weights are still those of the factory."""
    where = ("--run-dir", run_dir, "--save-every", 1)
    done = call("mmlaunch", "run", folder / "plan.json", *where, *more)
    workload = folder / "birds" / "workload.yaml"
    made = build_module(load_workload(workload), "words", workload.parent).state_dict()
    found = load_file(run_dir / "final.safetensors")
    return done, all(found[f"words.{name}"].equal(value) for name, value in made.items())


@pytest.mark.slow
def test_a_run_trains_with_what_is_set(folder: Path, tmp_path: Path) -> None:
    rate = "train.optimizer_args.lr=0"
    done, as_made = trained(folder, tmp_path / "run", "--steps", 1, "--set", rate)
    assert done.code == 0, done.err
    assert as_made
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["set"] == {"train.optimizer_args.lr": 0}


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_set(folder: Path, tmp_path: Path) -> None:
    run_dir, rate = tmp_path / "run", "train.optimizer_args.lr"
    trained(folder, run_dir, "--steps", 1, "--set", f"{rate}=0")
    done, as_made = trained(folder, run_dir, "--steps", 2, "--resume")
    assert done.code == 0, done.err
    assert as_made
    done, _ = trained(folder, run_dir, "--steps", 3, "--resume", "--set", f"{rate}=0.1")
    assert done.code == 2
    assert f"{rate} was 0, the workload has 0.1" in done.message
    assert "--resume-anyway" in done.hint
    more = ("--steps", 3, "--resume-anyway", "--set", f"{rate}=0.1")
    done, as_made = trained(folder, run_dir, *more)
    assert done.code == 0, done.err
    assert not as_made
    assert json.loads((run_dir / "run.json").read_text())["set"] == {rate: 0.1}
