"""Which plan trains which steps, and which plans are made anew, without any process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmlaunch.run import segments
from mmlaunch.run.run import RunRecord
from mmlaunch.run.segments import first_step, make_segments
from mmplan.errors import UnfitEnvironmentError
from mmplan.schema.base import save_document
from mmplan.schema.plan import Asked, Plan
from mmplan.schema.settings import with_settings
from mmplan.schema.train import TaskSet, task_sets
from mmplan.schema.workload import Workload
from tests.programs import LossSpec, UnitSpec, loss, make_plan, trained_as, unit
from tests.verification import make_workload

SETS = task_sets({0: ["a", "b"], 4: ["b"], 6: ["a"], 8: ["b"]}, ["a", "b"])


def parts(*tasks: str) -> tuple[list[UnitSpec], list[LossSpec]]:
    units = [unit(f"m{task}", "x", task=task) for task in tasks]
    return units, [loss(f"l{task}", f"m{task}", "y", task=task) for task in tasks]


LOSS = "tests.matrix_models:regression"
WORKLOAD = make_workload(*parts("a", "b"), batch=8, factories={"la": LOSS, "lb": LOSS})


def plan_of(*tasks: str, devices: int = 2, top: int = 8) -> Plan:
    units, losses = parts(*tasks)
    plan = trained_as(make_plan(*units, losses=losses, devices=devices), WORKLOAD)
    report = plan.solver.model_copy(update={"asked": Asked(solver="mpsp", top=top)})
    return plan.model_copy(update={"solver": report})


class Run:
    """A run's folder, and a planner that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, ...]] = []

    def segments(
        self,
        plan: Plan,
        *,
        workload: Workload = WORKLOAD,
        start: int = 0,
        steps: int = 10,
        first: bool = True,
    ) -> str:
        """``from-until:tasks`` of each segment."""

        def planner(tasks: tuple[str, ...], output: Path) -> Plan:
            self.asked.append(tasks)
            assert plan.solver.asked is not None
            return plan_of(*tasks, devices=plan.devices, top=plan.solver.asked.top)

        self.made = make_segments(
            SETS,
            start=start,
            steps=steps,
            plan=plan,
            workload=workload,
            path=self.folder / "given.json",
            run_dir=self.folder,
            planner=planner,
            is_first_node=first,
        )
        return " ".join(f"{s.from_step}-{s.until}:{''.join(s.plan.tasks)}" for s in self.made)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_set_is_planned_once_and_the_given_plan_serves_its_own(run: Run) -> None:
    assert run.segments(plan_of("a", "b")) == "0-4:ab 4-6:b 6-8:a 8-10:b"
    assert run.asked == [("b",), ("a",)]
    names = [s.path.relative_to(run.folder).as_posix() for s in run.made]
    assert names == ["given.json", "plans/step-4.json", "plans/step-6.json", "plans/step-4.json"]


@pytest.mark.parametrize(
    ("start", "steps", "expected"),
    [
        (0, 0, "0-0:ab"),
        (0, 3, "0-3:ab"),
        (0, 4, "0-4:ab"),
        (0, 5, "0-4:ab 4-5:b"),
        (3, 10, "0-4:ab 4-6:b 6-8:a 8-10:b"),
        (4, 10, "4-6:b 6-8:a 8-10:b"),
        (7, 10, "6-8:a 8-10:b"),
        (10, 10, "8-10:b"),
        (12, 10, "8-10:b"),
        (8, 6, "4-6:b"),
        (0, 99, "0-4:ab 4-6:b 6-8:a 8-99:b"),
    ],
)
def test_only_what_is_left_is_planned(run: Run, start: int, steps: int, expected: str) -> None:
    assert run.segments(plan_of("a", "b"), start=start, steps=steps) == expected
    assert len(run.asked) == len(set(run.asked))


def test_plans_of_an_earlier_start_are_taken_while_they_fit(run: Run) -> None:
    run.segments(plan_of("a", "b"))
    run.segments(plan_of("a", "b"))
    assert len(run.asked) == 2
    # What no plan depends on.
    run.segments(plan_of("a", "b"), workload=with_settings(WORKLOAD, {"train.seed": 5}))
    assert len(run.asked) == 2
    run.segments(plan_of("a", "b", devices=3))  # other devices
    assert len(run.asked) == 4
    run.segments(plan_of("a", "b", devices=3, top=1))  # the solver is asked for something else
    assert len(run.asked) == 6
    (run.folder / "plans" / "step-4.json").write_text("{")  # cut off by hand: files are whole
    run.segments(plan_of("a", "b", devices=3, top=1))
    assert run.asked[6:] == [("b",)]
    recomputed = with_settings(WORKLOAD, {"modules.mb.recompute": "full"})
    run.segments(plan_of("a", "b", devices=3, top=1), workload=recomputed)
    assert run.asked[7:] == [("b",)]


def test_other_machines_take_what_the_first_one_planned(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run.segments(plan_of("a", "b"))
    assert run.segments(plan_of("a", "b"), first=False) == expected
    assert len(run.asked) == 2
    monkeypatch.setattr(segments, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(segments, "_POLL_S", 0.01)
    with pytest.raises(UnfitEnvironmentError, match=r"step-4\.json has not come"):
        run.segments(plan_of("a", "b", devices=3), first=False)


def test_a_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    for name in ("step-4", "step-12", ".step-14.tmp", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert first_step(tmp_path, "checkpoints", resume=True) == 12
    assert first_step(tmp_path, "checkpoints", resume=False) == 0
    assert first_step(tmp_path / "nothing", "checkpoints", resume=True) == 0


def test_the_record_has_what_was_trained_and_forgets_what_is_done_again(run: Run) -> None:
    given = plan_of("a", "b")
    save_document(given, run.folder / "given.json")
    run.segments(given)
    folder = run.folder / "run"

    def history() -> list[tuple[int, int]]:
        entries = json.loads((folder / "run.json").read_text())["segments"]
        return [(entry["from_step"], len(entry["tasks"])) for entry in entries]

    record = RunRecord(folder, run.folder / "workload.yaml")
    record.write(run.made[0])
    assert history() == []
    record.write(run.made[0], step=0)
    record.write(run.made[1], step=4)
    assert history() == [(0, 2), (4, 1)]
    # Started anew in the second segment, with the same plan: one entry.
    again = RunRecord(folder, run.folder / "workload.yaml")
    again.write(run.made[1])
    again.write(run.made[1], step=5)
    again.write(run.made[2], step=6)
    assert history() == [(0, 2), (4, 1), (6, 1)]
    # Back to an older checkpoint.
    again.write(run.made[0], step=2)
    assert history() == [(0, 2)]
    (folder / "run.json").write_text('{"segments": [{"from_step": "x"}]}')
    again.write(run.made[0], step=2)
    assert history() == [(2, 2)]


def test_sets_keep_the_workloads_order() -> None:
    assert task_sets({0: ["b", "a"]}, ["a", "b"]) == (TaskSet(from_step=0, tasks=("a", "b")),)
