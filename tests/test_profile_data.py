"""``mmplan profile --data``: the work of real samples, from the data to the simulated step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmlaunch.measure.sample_work import WorkSampler
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError
from mmplan.profiling.data import profile_data
from mmplan.program.compile import compile_plan
from mmplan.reporting.sections.data import bin_edges, histograms
from mmplan.reporting.source import load_source
from mmplan.schema.base import save_document
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.simulation.sampled_batches import sample_steps
from mmplan.simulation.step import simulate
from tests.commands import Done, call
from tests.solving import cluster, module_profile, run_solve
from tests.solving import profile as given

USER_FILE = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from mmplan import Ragged

LOG = Path(__file__).with_name("asked.txt")


def linear(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


class Data(Dataset):
    def __init__(self, size=100):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rows = index % 5
        return {
            "x": torch.ones(4),
            "images": Ragged(torch.ones(rows, 4), torch.tensor([rows])),
            "sounds": Ragged(torch.ones(2, 4), torch.tensor([2])),
        }


class Telling(Data):
    def work(self, index):
        with LOG.open("a") as file:
            file.write(f"{index}\\n")
        return {"vision": float(index % 5), "llm": 1 + index % 2}


class Wrong(Data):
    def __init__(self, answer, size=100):
        super().__init__(size)
        self.answer = answer

    def work(self, index):
        if self.answer == "raise":
            raise ValueError("no idea")
        return self.answer


class Dense(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"x": torch.ones(4), "images": torch.ones(4)}
"""


def workload_dict(factory: str = "Telling", **args: Any) -> dict[str, Any]:
    linear = {"factory": "counted:linear"}
    return {
        "name": "skewed",
        "batch": 10,
        "modules": {
            "vision": linear | {"inputs": ["images"]},
            "projector": linear | {"inputs": ["vision"]},
            "llm": linear | {"inputs": ["x", "projector"]},
        },
        "losses": {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["llm", "x"]}},
        "data": {"factory": f"counted:{factory}", "args": args},
        "train": {"seed": 3},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "counted.py").write_text(USER_FILE)
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    return tmp_path


def workload(**changes: Any) -> Workload:
    return Workload.model_validate(workload_dict() | changes)


def data(factory: str, **args: Any) -> dict[str, Any]:
    return {"data": {"factory": f"counted:{factory}", "args": args}}


def asked(folder: Path, **changes: Any) -> dict[str, Any]:
    point = {"task": "default", "order": "random", "samples": 20, "piece": 1}
    return WorkSampler(workload(**changes), folder).work(point)


def order_of_first_epoch() -> list[int]:
    import torch

    return torch.randperm(100, generator=torch.Generator().manual_seed(3)).tolist()


# --- asking the data -----------------------------------------------------------------


def test_the_dataset_s_word_counts(folder: Path) -> None:
    indices = order_of_first_epoch()[20:40]
    found = asked(folder)
    assert found["source"] == "work"
    assert (found["dataset"], found["samples"]) == (100, 20)
    assert found["work"] == {
        "vision": [float(i % 5) for i in indices],
        "llm": [float(1 + i % 2) for i in indices],
    }


def test_without_it_lengths_count_and_follow_what_feeds_a_module(folder: Path) -> None:
    rows = [float(i % 5) for i in order_of_first_epoch()[20:40]]
    found = asked(folder, **data("Data"))
    assert found["source"] == "lengths"
    # The projector is fed with images alone, the llm takes a field that is not ragged.
    assert found["work"] == {"vision": rows, "projector": rows}
    modules = workload_dict()["modules"]
    modules["vision"]["inputs"] = ["images", "sounds"]
    found = asked(folder, **data("Data"), modules=modules)
    assert found["work"]["vision"] == [row + 2 for row in rows]


def test_data_that_say_nothing_have_no_work(folder: Path) -> None:
    assert asked(folder, **data("Dense"))["work"] == {}


def test_pieces_past_the_end_are_empty(folder: Path) -> None:
    sampler = WorkSampler(workload(), folder)
    point = {"task": "default", "order": "random", "samples": 64, "piece": 1}
    assert sampler.work(point) | {"source": ""} == {
        "dataset": 100,
        "samples": 0,
        "source": "",
        "work": {},
    }


@pytest.mark.parametrize(
    ("answer", "kind", "parts"),
    [
        ("raise", RunFailedError, ("raised ValueError: no idea",)),
        ([1.0], InvalidInputError, ("is a list, not a dict",)),
        ({"audio": 1.0}, InvalidInputError, ("names 'audio', which is not a module",)),
        ({"vision": -1.0}, InvalidInputError, ("gives vision -1.0, not a finite number from 0",)),
        ({"vision": "much"}, InvalidInputError, ("gives vision 'much'",)),
    ],
)
def test_wrong_answers_are_named(
    folder: Path, answer: Any, kind: type[MMPlanError], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        asked(folder, **data("Wrong", answer=answer))
    assert all(part in caught.value.message for part in parts)
    assert caught.value.hint


# --- into the profile ----------------------------------------------------------------


MODULES = {name: module_profile(blocks=2) for name in ("vision", "projector", "llm")}


def test_an_interrupted_subset_goes_on_and_knows_where_points_were_taken(folder: Path) -> None:
    job, state = workload(), folder / ".profile.json.partial"
    done: list[int] = []

    def stop(count: int, *_: object) -> None:
        done.append(count)
        if count == 3:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"samples": 55, "state_path": state}
    with pytest.raises(KeyboardInterrupt):
        profile_data(given(MODULES, 1), job, folder, progress=stop, **arguments)
    made = profile_data(
        given(MODULES, 1), job, folder, progress=lambda n, *_: done.append(n), **arguments
    )
    # Six pieces of ten samples; the first three were asked for once.
    assert done == [1, 2, 3, 4, 5, 6]
    log = [int(line) for line in (folder / "asked.txt").read_text().split()]
    order = order_of_first_epoch()
    assert log.count(order[0]) == 1
    found = made.data["default"]
    assert found.samples == 55
    assert found.dataset == 100
    assert found.work["vision"] == tuple(float(i % 5) for i in order[:55])
    # Points of a measured profile are taken on the first samples of a batch.
    assert found.at["vision"] == pytest.approx(np.mean([i % 5 for i in order[:10]]))


def test_data_that_say_nothing_leave_the_profile_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = workload(**data("Dense"))
    sampler = WorkSampler(job, folder)

    def in_process(_setting: Any, points: list[Any], _state: Any, *_: Any, **__: Any) -> list[Any]:
        return [sampler.work(point) for point in points]

    monkeypatch.setattr("mmplan.profiling.data.measure_points", in_process)
    made = profile_data(given(MODULES, 1), job, folder, state_path=folder / "state")
    assert made.data == {}
    assert made.provenance["data"] == {"samples": 512, "equal": ["default"]}


# --- into the simulated step ---------------------------------------------------------


def simulated(plan: Plan, costs: Profile) -> tuple[ProgramCosts, float]:
    program = compile_plan(plan)
    program_costs = ProgramCosts(program, CostModel(costs, plan.cluster, plan.training), plan)
    return program_costs, simulate(program, program_costs).iteration_s


@pytest.mark.parametrize("reorder", [True, False])
def test_drawn_steps_spread_around_the_prediction(tmp_path: Path, reorder: bool) -> None:
    rows = [float(x) for x in np.random.default_rng(0).lognormal(0, 0.8, 300)]
    costs = Profile.model_validate(
        given({"a": module_profile(1.0, 2.0, blocks=1)}, 4).model_dump()
        | {"data": {"default": {"work": {"a": rows}}}}
    )
    job = Workload.model_validate(
        {
            "name": "one",
            "batch": 32,
            "modules": {"a": {"factory": "x:y", "inputs": ["x"], "plan": {"microbatch": 1}}},
            "losses": {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["a", "x"]}},
            "train": {"reorder": reorder},
        }
    )
    plan = run_solve(tmp_path, job, costs, solver="distmm")
    assert plan.units[0].dp == 4
    program_costs, predicted_s = simulated(plan, costs)
    sampled = sample_steps(program_costs, draws=200)
    assert sampled is not None
    # Eight samples a replica, a second forward and two backward each, no messages.
    assert sampled.alike_s == pytest.approx(24)
    known = program_costs.costs.sampled_work("default")
    assert known is not None
    busiest = [known.draw(32, number=i)["a"] for i in range(200)]
    # Position p of the batch goes to replica p mod 4: micro-batches of one sample in turn.
    expected = [3 * work.reshape(8, 4).sum(axis=0).max() for work in busiest]
    assert sampled.drawn.mean_s == pytest.approx(np.mean(expected))
    assert sampled.drawn.p90_s == pytest.approx(np.quantile(expected, 0.9))
    assert sampled.drawn.p10_s < sampled.drawn.p50_s < sampled.drawn.p90_s
    if not reorder:
        assert sampled.reordered is None
        assert predicted_s == pytest.approx(sampled.drawn.mean_s, rel=0.03)
        return
    assert sampled.reordered is not None
    assert sampled.reordered.mean_s < 0.9 * sampled.drawn.mean_s
    assert predicted_s == pytest.approx(sampled.reordered.mean_s, rel=0.05)


def test_a_profile_without_data_draws_nothing(tmp_path: Path) -> None:
    costs = given({"a": module_profile(blocks=1)}, 2)
    job = Workload.model_validate(
        {
            "name": "one",
            "batch": 8,
            "modules": {"a": {"factory": "x:y", "inputs": ["x"]}},
            "losses": {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["a", "x"]}},
        }
    )
    program_costs, _ = simulated(run_solve(tmp_path, job, costs, solver="distmm"), costs)
    assert sample_steps(program_costs) is None


# --- pictures ------------------------------------------------------------------------


def test_histograms_count_every_sample_and_say_what_solve_takes(tmp_path: Path) -> None:
    rows = [float(x) for x in np.random.default_rng(0).lognormal(0, 0.8, 300)]
    costs = Profile.model_validate(
        given({n: module_profile(blocks=1) for n in "ab"}, 5).model_dump()
        | {"data": {"default": {"work": {"a": rows, "b": [1.0, 2.0, 4.0] * 100}}}}
    )
    job = Workload.model_validate(
        {
            "name": "two",
            "batch": 40,
            "modules": {
                "a": {"factory": "x:y", "inputs": ["x"], "plan": {"dp": 4}},
                "b": {"factory": "x:y", "inputs": ["a"], "plan": {"dp": 1}},
            },
            "losses": {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "x"]}},
        }
    )
    plan = run_solve(tmp_path, job, costs, solver="convex", top=1)
    data = load_source(write_plan(tmp_path, plan))
    first, second = histograms(data)
    known = CostModel(costs, plan.cluster, plan.training)
    factor = known.straggler(task="default", module="a", dp=4, samples=40)
    assert first.stragglers == (("a", 4, factor),)
    assert f"the busiest of a's 4 replicas {factor:.3f}" in first.caption
    assert any(f"{factor:.3g} x the mean of a's 4" in note for note in plan.solver.notes)
    assert second.stragglers == ()
    assert second.mean == pytest.approx(7 / 3)
    for item in (first, second):
        edges = bin_edges(item.relative)
        counts = np.histogram(item.relative, edges)[0]
        assert counts.sum() == 300
        assert item.relative.mean() == pytest.approx(1)
    # Few values: a bin around each.
    assert [c for c in np.histogram(second.relative, bin_edges(second.relative))[0] if c] == [
        100,
        100,
        100,
    ]


def write_plan(folder: Path, plan: Plan) -> Path:
    save_document(plan, folder / "plan.json")
    return folder / "plan.json"


# --- the commands --------------------------------------------------------------------


@pytest.mark.slow
def test_from_the_data_to_the_report(folder: Path) -> None:
    """Profile, solve, simulate, show and report; the file says what was looked at."""
    job = workload_dict()
    job["modules"] = {
        "vision": {"factory": "counted:linear", "inputs": ["x"]},
        "llm": {"factory": "counted:linear", "inputs": ["vision"]},
    }
    (folder / "w.json").write_text(json.dumps(job))
    (folder / "c.json").write_text(json.dumps(cluster(4)))
    profile, plan = folder / "p.json", folder / "plan.json"
    made = call(
        "mmplan", "profile", folder / "w.json", "--analytic", "--cluster", folder / "c.json",
        "--data", "--data-samples", 40, "-o", profile, "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert made.document["source"] == "analytic"
    assert "reading data" in made.err
    assert not (folder / ".p.json.partial").exists()
    assert json.loads(profile.read_text())["data"]["default"]["dataset"] == 100
    shown = call("mmplan", "show", profile)
    assert "40 of 100 samples, by the dataset's work(index)" in shown.out.replace("\n", " ")
    solved = call("mmplan", "solve", folder / "w.json", "--profile", profile, "-o", plan)
    assert solved.code == 0, solved.err
    drawn = call("mmplan", "simulate", plan, "--draws", 8, "--json")
    assert drawn.document["sampled"]["draws"] == 8
    assert drawn.document["sampled"]["samples"] == 40
    spread = drawn.document["sampled"]["drawn"]
    assert 0 < spread["p10_s"] <= spread["p50_s"] <= spread["p90_s"]
    assert "drawn, reordered as in training" in call("mmplan", "simulate", plan).out
    assert "sampled" not in call("mmplan", "simulate", plan, "--draws", 0, "--json").document
    assert call("mmplan", "report", plan, "-o", folder / "r.html").code == 0
    page = (folder / "r.html").read_text()
    assert "40 of 100 samples, by the dataset&#x27;s work(index)" in page
    assert page.count('aria-label="vision: how many samples are how much work;') == 2


def refused(done: Done, *parts: str) -> None:
    assert done.code == 2, done.err
    assert all(part in done.message for part in parts), done.message
    assert done.hint


@pytest.mark.parametrize("options", [["--data-samples", "5"], ["--data", "--data-samples", "0"]])
def test_samples_are_counted_from_1_and_need_data(folder: Path, options: list[str]) -> None:
    (folder / "w.json").write_text(json.dumps(workload_dict()))
    done = call("mmplan", "profile", folder / "w.json", "--analytic", "--cluster", "p3-8", *options)
    refused(done, "--data-samples", "how many samples --data looks at")


GOOD: dict[str, Any] = {"work": {"vision": [1.0, 2.0], "llm": [1.0, 1.0]}, "at": {"vision": 1.0}}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"work": {}}, ("data.default.work", "at least 1 entries")),
        ({"work": {"vision": []}}, ("data.default", "work.vision adds up to 0")),
        ({"work": {"vision": [0.0, 0.0]}}, ("work.vision adds up to 0",)),
        (
            {"work": {"vision": [1.0, -1.0]}},
            ("data.default.work.vision.1", "at least 0.0, got -1.0"),
        ),
        ({"work": {"vision": [1.0, float("nan")]}}, ("data.default.work.vision.1", "finite")),
        ({"work": {"vision": [1.0, "2"]}}, ("data.default.work.vision.1", "must be a number")),
        (
            {"work": {"vision": [1.0], "llm": [1.0, 1.0]}},
            ("data.default: work.llm has 2 samples, work.vision has 1",),
        ),
        (
            {"work": {"vision": [1.0], "audio": [1.0]}},
            ("data.default.work.audio is no module of the profile",),
        ),
        ({"at": {"vision": 0.0}}, ("data.default.at.vision", "more than 0")),
        ({"at": {"projector": 1.0}}, ("data.default: at.projector: work has no projector",)),
        ({"source": "guess"}, ("data.default.source", "'work' or 'lengths'")),
        ({"dataset": 0}, ("data.default.dataset", "at least 1")),
        ({"spread": 1.0}, ("data.default.spread", "unknown field")),
    ],
)
def test_wrong_fields_are_named(
    tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    whole = given(MODULES, 1).model_dump(mode="json", exclude_none=True)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(whole | {"data": {"default": GOOD}}))
    assert call("mmplan", "show", path).code == 0
    path.write_text(json.dumps(whole | {"data": {"default": GOOD | change}}))
    refused(call("mmplan", "show", path), str(path), *parts)
