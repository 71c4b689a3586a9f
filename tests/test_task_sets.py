"""Tasks that come and go during a run: every step is what one process would do."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmlaunch.checkpoint.restore import open_checkpoint
from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.planning.planner import solve
from mmplan.schema.factories import build_module
from mmplan.schema.plan import Plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import Workload
from tests.commands import Done, call, kill_all, run, start
from tests.programs import trained_as
from tests.task_sets import SETS, STEPS, OneProcess, job, write_files

TOLERANCE = 1e-10
# What the solver is asked for each set, and the degrees that its modules are pinned to.
HOW_OF_PART: dict[int, dict[str, Any]] = {
    0: {"devices": 4, "solver": "auto"},
    4: {"devices": 3, "solver": "mpsp", "method": "wavefront"},
    12: {"devices": 2, "solver": "mpsp"},
}
PINS_OF_PART: dict[int, dict[str, Any]] = {
    0: {"v": {"tp": 2}, "u": {"tp": 2}, "t": {"tp": 1}},
    4: {"u": {"tp": 1}, "t": {"tp": 1, "dp": 2}},
    12: {"v": {"tp": 2}, "w": {"tp": 2}, "t": {"dp": 2}},
}


def worst(got: dict[str, Tensor], alone: OneProcess) -> float:
    """Largest difference of any weight; the names must be the same."""
    wanted = alone.named_parameters()
    assert got.keys() == wanted.keys()
    return max((got[name] - wanted[name]).abs().max().item() for name in wanted)


def with_pins(workload: Workload, pins: dict[str, Any]) -> Workload:
    """The workload with degrees pinned; what is trained stays the same."""
    data = workload.model_dump(mode="json", exclude_none=True)
    for module, own in pins.items():
        data["modules"][module]["plan"] = own
    return Workload.model_validate(data)


def plan_for(folder: Path, workload: Workload, tasks: list[str], **how: Any) -> Plan:
    """A plan of the files in a folder."""
    return solve(
        workload,
        workload_path=folder / "workload.json",
        profile=load_profile(folder / "profile.json"),
        profile_path=folder / "profile.json",
        plan_path=folder / "plan.json",
        tasks=tasks,
        budget_s=0.05,
        **how,
    )


def train_part(
    plan: Plan, workload: Workload, folder: Path, checkpoint: Path | None, until: int
) -> Path:
    """Steps up to one, on threads; the checkpoint and the weights are in the folder."""

    def entry(transport: Any) -> Path:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=folder, transport=transport
        )
        if checkpoint is not None:
            session.load(checkpoint)
        list(session.steps(until))
        session.write_weights(folder / "final.safetensors")
        return session.save(folder)

    return InProcessWorld(plan.devices).run(entry)[0]


@pytest.mark.parametrize(
    ("zero", "pinned"),
    [
        (0, False),
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(0, True, marks=pytest.mark.slow),
    ],
)
def test_parts_under_other_sets_and_rank_counts_equal_one_process(
    tmp_path: Path, zero: int, pinned: bool
) -> None:
    """Every set has other devices, another solver, other degrees and another module missing."""
    workload = job(zero=zero)
    write_files(tmp_path, workload)
    alone = OneProcess(workload, tmp_path)
    alone.train(SETS, STEPS)
    checkpoint = None
    ends = [*list(SETS)[1:], STEPS]
    for (step, tasks), end in zip(SETS.items(), ends, strict=True):
        asked = with_pins(workload, PINS_OF_PART[step] if pinned else {})
        plan = plan_for(tmp_path, asked, tasks, **HOW_OF_PART[step])
        degrees = {unit.tp for unit in plan.units}
        assert not pinned or degrees == ({1} if step == 4 else {1, 2})
        checkpoint = train_part(plan, workload, tmp_path, checkpoint, end)
    assert worst(load_file(tmp_path / "final.safetensors"), alone) < TOLERANCE
    # Momentum and step counts of what is not active now are as in one process too.
    assert checkpoint is not None
    state = {alone.named_parameters()[n]: n for n in alone.named_parameters()}
    saved = open_checkpoint(checkpoint)
    for parameter, name in state.items():
        for key, value in alone.optimizer.state[parameter].items():
            kept = saved.load_whole(name, f"optim.{key}")
            assert (kept - value).abs().max().item() < TOLERANCE
        assert len(saved.kinds(name)) == 1 + len(alone.optimizer.state[parameter])
    modules: Any = alone.modules
    assert alone.optimizer.state[modules["u"][0].up.weight]["step"] == 12
    assert alone.optimizer.state[modules["v"][0].up.weight]["step"] == 8
    assert alone.optimizer.state[modules["w"][0].up.weight]["step"] == 4
    saved.close()


def test_absent_weights_are_shared_out_over_the_ranks(tmp_path: Path) -> None:
    workload = job()
    write_files(tmp_path, workload)
    plan = plan_for(tmp_path, workload, ["TR"], devices=3)
    train_part(plan, workload, tmp_path, None, 0)
    alone = OneProcess(workload, tmp_path)
    assert worst(load_file(tmp_path / "final.safetensors"), alone) == 0.0
    sizes = [(tmp_path / "step-0" / f"rank-{r}.safetensors").stat().st_size for r in range(3)]
    assert min(sizes) > 2000


ODD = "tests.deferred_models"


@pytest.mark.parametrize(
    ("factory", "args"),
    [("seeds", {}), ("looks", {}), ("hides", {}), ("undefined", {}), ("usual", {"blocks": 3})],
)
def test_absent_modules_of_every_kind_have_their_initial_weights(
    tmp_path: Path, factory: str, args: dict[str, Any]
) -> None:
    """Factories that cannot be put off, buffers, tied weights, and a module of another's."""
    data = job(tasks_from_step={}).model_dump(mode="json", exclude_none=True)
    data["modules"]["w"] |= {"factory": f"{ODD}:{factory}", "args": args}
    data["modules"]["x"] = {**data["modules"]["w"], "share": "w"}
    data["tasks"]["WR"] |= {"modules": ["x"], "inputs": {"wr": ["x", "target"]}}
    workload = Workload.model_validate(data)
    write_files(tmp_path, job())
    plan = plan_for(tmp_path, job(), ["TR"], devices=3)
    checkpoint = train_part(plan, workload, tmp_path, None, 0)
    alone = build_module(workload, "w", tmp_path).state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(alone.items())}
    got = load_file(tmp_path / "final.safetensors")
    mine = {name for name in got if name.startswith("w.")}
    assert mine == {f"w.{name}" for name in first.values()}
    for name in first.values():
        assert torch.equal(got[f"w.{name}"], alone[name].detach())
    # Saved and loaded again they are the same, on other ranks.
    plan = plan_for(tmp_path, job(), ["TR"], devices=2)
    train_part(plan, workload, tmp_path, checkpoint, 0)
    again = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(again[name], got[name]) for name in got)


def test_absent_modules_start_from_init(tmp_path: Path) -> None:
    workload = job()
    write_files(tmp_path, workload)
    stored = {
        f"w.{name}": tensor.detach() + 1.0
        for name, tensor in build_module(workload, "w", tmp_path).named_parameters()
    }
    save_file(stored, tmp_path / "start.safetensors")
    data = workload.model_dump(mode="json", exclude_none=True)
    data["modules"]["w"]["init"] = "start.safetensors"
    plan = plan_for(tmp_path, workload, ["TR"], devices=2)
    train_part(plan, Workload.model_validate(data), tmp_path, None, 0)
    got = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())


def test_groups_of_parameters_that_only_other_tasks_train_are_known(tmp_path: Path) -> None:
    groups = [
        {"match": match, "optimizer_args": {"lr": 0.001}}
        for match in ("w.*", "t.1.*", "losses.vt*")
    ]
    workload = job(groups=groups)
    write_files(tmp_path, workload)
    plan = plan_for(tmp_path, workload, ["TR"], devices=1)
    train_part(plan, workload, tmp_path, None, 1)
    wrong = job(groups=[*groups, {"match": "x.*", "optimizer_args": {"lr": 0.1}}])
    with pytest.raises(InvalidInputError, match=r"'x\.\*' matches no trained parameter"):
        train_part(plan, wrong, tmp_path, None, 1)


@pytest.mark.parametrize("tasks", [["WR"], ["TR"]])
def test_a_checkpoint_that_lacks_a_module_is_refused(tmp_path: Path, tasks: list[str]) -> None:
    """Missing is missing, whether the module's task is active or not."""
    data = job().model_dump(mode="json", exclude_none=True)
    del data["modules"]["w"], data["losses"]["wr"], data["tasks"]["WR"]
    data["train"]["tasks_from_step"] = {}
    before = Workload.model_validate(data)
    write_files(tmp_path, before)
    plan = plan_for(tmp_path, before, ["VT", "TR"], devices=1)
    checkpoint = train_part(plan, before, tmp_path, None, 0)
    write_files(tmp_path, job())
    plan = plan_for(tmp_path, job(), tasks, devices=1)
    with pytest.raises(InvalidInputError, match=r"step-0 holds no w\.0.* of module w") as caught:
        train_part(plan, job(), tmp_path, checkpoint, 1)
    assert "init:" in str(caught.value.hint)


def test_a_checkpoint_with_another_shape_of_an_absent_module_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, job())
    plan = plan_for(tmp_path, job(), ["TR"], devices=1)
    checkpoint = train_part(plan, job(), tmp_path, None, 0)
    data = job().model_dump(mode="json", exclude_none=True)
    data["modules"]["w"]["factory"] = "tests.matrix_models:tied"
    other = Workload.model_validate(data)
    with pytest.raises(InvalidInputError, match=r"w\.0\.0\.weight"):
        train_part(plan, other, tmp_path, checkpoint, 1)


class Files:
    """A folder with workload, profile and a plan for four devices."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.folder, self.workload = folder, workload
        self.paths = write_files(folder, workload)
        assert self.solve("plan.json").code == 0

    def solve(self, name: str, *more: object) -> Done:
        workload, profile = self.paths
        where = ["--profile", profile, "--budget", 0.1, "-o", self.folder / name]
        return call("mmplan", "solve", workload, *where, *more)

    def arguments(self, plan: str, *more: object) -> list[object]:
        where = ["--run-dir", self.folder / "run", "--timeout", 60]
        return ["run", self.folder / plan, *where, *more]

    def run(self, plan: str, *more: object) -> Done:
        done = run("mmlaunch", *self.arguments(plan, *more), cwd=self.folder)
        assert done.code == 0, done.err
        return done

    def kill_after(self, plan: str, steps: int, *more: object, more_s: float = 0.0) -> None:
        """Start a run and end it with SIGKILL when so many steps are done."""
        process = start("mmlaunch", *self.arguments(plan, *more), cwd=self.folder)
        try:
            wait_until(lambda: len(self.rows()) >= steps, process)
            time.sleep(more_s)
        finally:
            kill_all(process)

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "run" / "run.json").read_text())

    def assert_equals_one_process(self, sets: dict[int, list[str]], steps: int) -> None:
        alone = OneProcess(self.workload, self.folder)
        losses = alone.train(sets, steps)
        rows = self.rows()
        assert [row["step"] for row in rows] == list(range(steps))
        assert [row["loss"] for row in rows] == pytest.approx(losses, rel=TOLERANCE)
        weights = load_file(self.folder / "run" / "final.safetensors")
        assert worst(weights, alone) < TOLERANCE


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_changes_a_kill_and_four_ranks_to_three(tmp_path: Path) -> None:
    files = Files(tmp_path, job())
    files.kill_after("plan.json", 7, "--save-every", 3)
    assert len(files.rows()) < STEPS
    assert not (tmp_path / "run" / "final.safetensors").exists()
    assert files.solve("three.json", "--devices", 3).code == 0
    done = files.run("three.json", "--resume")
    assert "until step 12: tasks UT, TR" in done.out
    assert "until step 16: tasks VT, WR" in done.out
    files.assert_equals_one_process(SETS, STEPS)
    # The record says what ran when, on how many ranks, and what was predicted for it.
    segments = files.record()["segments"]
    assert [s["devices"] for s in segments] == [4, 4, 3, 3]
    assert [s["from_step"] for s in segments] in ([0, 4, 6, 12], [0, 4, 9, 12])
    assert [s["tasks"] for s in segments] == [SETS[0], SETS[4], SETS[4], SETS[12]]
    assert files.record()["devices"] == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_around_every_change(tmp_path: Path) -> None:
    """Just before a change, while it happens, and just after it; twice in one run."""
    for number, (steps, more_s) in enumerate([(3, 0.0), (4, 0.0), (4, 0.3), (5, 0.0), (12, 0.1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = Files(folder, job())
        files.kill_after("plan.json", steps, more_s=more_s)
        files.kill_after("plan.json", min(steps + 2, 13), "--resume")
        files.run("plan.json", "--resume")
        files.assert_equals_one_process(SETS, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_dies_in_a_later_part_is_started_again_there(tmp_path: Path) -> None:
    """Whichever rank first loads a sample of step 6 dies, once."""
    (tmp_path / "dying.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from tests.matrix_models import Samples\n"
        "class Dying(Samples):\n"
        "    def __getitem__(self, index):\n"
        "        mark = Path(__file__).with_name('died')\n"
        "        if metrics().count(b'\\n') == 6 and not mark.exists():\n"
        "            mark.touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().__getitem__(index)\n"
        "def metrics():\n"
        "    path = Path(__file__).parent / 'run' / 'metrics.jsonl'\n"
        "    return path.read_bytes() if path.exists() else b''\n"
    )
    data = job().model_dump(mode="json", exclude_none=True)
    data["data"]["factory"] = "dying:Dying"
    files = Files(tmp_path, Workload.model_validate(data))
    assert files.solve("two.json", "--devices", 2).code == 0
    done = files.run("two.json", "--max-restarts", 1)
    assert (tmp_path / "died").exists()
    assert "starting all workers again" in done.out
    # Saved at the change only, so the second start begins there.
    assert done.out.count("until step 12: tasks UT, TR") == 2
    assert done.out.count("until step 4: tasks VT, UT") == 1
    files.assert_equals_one_process(SETS, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_of_chosen_tasks_goes_on_with_all_the_others(tmp_path: Path) -> None:
    files = Files(tmp_path, job())
    done = files.run("plan.json", "--tasks", "TR", "--steps", 2, "--save-every", 2)
    assert "planning for the tasks TR" in done.out
    assert json.loads((tmp_path / "run/plan.json").read_text())["tasks"].keys() == {"TR"}
    assert files.solve("two.json", "--devices", 2, "--solver", "mpsp").code == 0
    files.run("two.json", "--resume")
    files.assert_equals_one_process({0: ["TR"], 2: SETS[0], 4: SETS[4], 12: SETS[12]}, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_request_to_stop_around_a_change(tmp_path: Path) -> None:
    files = Files(tmp_path, job())
    assert files.solve("two.json", "--devices", 2).code == 0
    for _ in range(2):
        process = start("mmlaunch", *files.arguments("two.json"), cwd=tmp_path)
        try:
            wait_until(lambda: len(files.rows()) >= 3, process)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            kill_all(process) if process.poll() is None else None
        assert process.returncode == 75, err
        steps = len(files.rows())
        assert steps < STEPS
        assert (tmp_path / "run" / "checkpoints" / f"step-{steps}").is_dir()
        files.run("two.json", "--resume")
        files.assert_equals_one_process(SETS, STEPS)
        shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_run_changes_its_tasks_by_itself(tmp_path: Path) -> None:
    sets = {0: ["TR"], 2: ["WR"]}
    files = Files(tmp_path, job(tasks_from_step=sets, steps=4))
    assert json.loads((tmp_path / "plan.json").read_text())["tasks"].keys() == {"TR"}
    assert files.solve("two.json", "--devices", 2).code == 0
    done = files.run("two.json")
    files.assert_equals_one_process(sets, 4)
    assert (tmp_path / "run/plans/step-2.proof.json").is_file()
    predicted = json.loads((tmp_path / "run/plans/step-2.json").read_text())["predicted"]
    shown = f"until step 4: tasks WR, predicted {1e3 * predicted['iteration_s']:.1f} ms"
    assert shown in done.out
    assert f"(predicted {1e3 * predicted['iteration_s']:.1f})" in done.err
    # What lies in the folder is the plan that ran last; every command reads it.
    assert json.loads((tmp_path / "run/plan.json").read_text())["tasks"].keys() == {"WR"}
    assert call("mmplan", "check", tmp_path / "run/plans/step-2.json").code == 0
    assert call("mmplan", "simulate", tmp_path / "run/plans/step-2.json").code == 0
