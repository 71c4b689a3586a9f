"""Waiting for data: the loading processes that are chosen, and what is said of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlaunch.data.loader import StepData
from mmlaunch.data.loading_processes import LoadCost, Loading, choose, sent_bytes
from mmlaunch.run.data_watch import DataWatch, hint_of, said_of
from mmlaunch.run.metrics_log import longest_waits
from mmlaunch.session.session import StepResult
from mmplan.commands.options import count_or_auto
from mmplan.errors import InvalidInputError
from mmplan.reporting.terminal.run_progress import follow
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import run

COST = LoadCost(
    rank=0,
    task="default",
    samples=64,
    load_s=0.12,
    longest_s=0.12,
    core_s=0.12,
    rest_s=0.045,
    batch_bytes=10_000,
    sent_bytes=1000,
    memory_bytes=10e9,
    shared_bytes=1e9,
    place="0:",
    cores=8,
    threads=1,
)


@pytest.mark.parametrize(
    ("change", "steps", "processes", "ahead", "limit"),
    [
        ({}, 1000, 4, 2, ""),
        ({"load_s": 0.03, "core_s": 0.03, "longest_s": 0.03}, 1000, 1, 2, ""),
        ({"load_s": 0.0008}, 10**6, 0, 2, ""),  # nothing to speak of
        ({}, 80, 0, 2, ""),  # over before it pays
        ({"longest_s": 0.6}, 1000, 4, 5, ""),
        ({"cores": 3}, 1000, 2, 3, "no core is to spare"),
        ({"cores": 1}, 1000, 0, 2, "no core is to spare"),
        ({"cores": 2, "threads": 2}, 1000, 0, 2, "no core is to spare"),
        ({"cores": 4, "threads": 4, "core_s": 0.012}, 1000, 4, 2, ""),  # it waits for files
        ({"sent_bytes": None}, 1000, 0, 2, "the dataset cannot be sent to another process"),
        ({"memory_bytes": 600e6}, 1000, 2, 1, "memory allows no more"),
        ({"sent_bytes": 10**11}, 1000, 0, 1, "memory allows no more"),
        ({"shared_bytes": 50e6, "batch_bytes": 10**7}, 1000, 4, 1, ""),
        ({"rest_s": 0.0}, 1000, 7, 8, "no core is to spare"),
    ],
)
def test_as_many_processes_as_keep_up(
    change: dict[str, Any], steps: int, processes: int, ahead: int, limit: str
) -> None:
    (found,) = choose([replace(COST, **change)], steps)
    assert found == Loading(processes=processes, ahead=ahead, limit=limit)


def test_each_rank_has_its_own() -> None:
    """The heavy rank's step is what the others' would be without it, and cores go to who needs."""
    vision = replace(COST, rank=3)
    text = [replace(COST, rank=r, load_s=1e-4, core_s=1e-4, rest_s=0.165) for r in range(3)]
    assert [f.processes for f in choose([*text, vision], 1000)] == [0, 0, 0, 4]
    assert [f.processes for f in choose([vision, replace(vision, rank=4)], 1000)] == [3, 3]
    elsewhere = replace(vision, rank=4, place="1:")
    assert [f.processes for f in choose([vision, elsewhere], 1000)] == [4, 4]
    assert choose([], 10) == []


costs = st.builds(
    lambda load_s, of_core, rest_s, place, cores: replace(
        COST, load_s=load_s, core_s=load_s * of_core, rest_s=rest_s, place=place, cores=cores[place]
    ),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from("ab"),
    st.just({"a": 6, "b": 2}),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(costs, max_size=6), st.integers(0, 10**6))
def test_no_more_cores_are_taken_than_there_are(found: list[LoadCost], steps: int) -> None:
    ranked = [replace(cost, rank=rank) for rank, cost in enumerate(found)]
    chosen = choose(ranked, steps)
    for place in "ab":
        pairs = [p for p in zip(ranked, chosen, strict=True) if p[0].place == place]
        busy = [f.processes * c.core_s / c.load_s for c, f in pairs if f.processes]
        spare = pairs[0][0].cores - len(pairs) if pairs else 0
        # Of each rank half a core at least may be shared.
        assert sum(busy) <= max(0, spare) + 0.5 * len(busy) + 1e-9
        assert all(f.processes <= c.cores for c, f in pairs)


def test_a_dataset_s_size_is_that_of_what_is_sent() -> None:
    arrays = {"x": torch.zeros(1000, dtype=torch.float64), "y": np.zeros(500)}
    assert 12_000 <= (sent_bytes(arrays, 1e6) or 0) < 13_000
    assert (sent_bytes(arrays, 5000) or 0) > 5000
    assert sent_bytes({"decode": lambda sample: sample}, 1e6) is None  # pyright: ignore[reportUnknownLambdaType]


def test_metrics_tell_the_longest_waits() -> None:
    assert longest_waits([0.5, 0.25, 1 / 3]) == {"0": 0.5, "2": 0.333333, "1": 0.25}
    assert list(longest_waits([*range(1000)])) == [str(rank) for rank in range(999, 991, -1)]


# ---- a run's watch ----


class Watched:
    """A watch of rank 0 whose other rank loads nothing, and what it told and chose."""

    def __init__(self, processes: int | None, *, until: int) -> None:
        self.told: list[dict[str, Any]] = []
        self.used: list[dict[str, Loading]] = []
        device = SimpleNamespace(cores=frozenset(range(4)), num_threads=1)
        ctx: Any = SimpleNamespace(rank=0, device=device, report=self.told.append)
        self.session: Any = SimpleNamespace(
            rank=0,
            step_count=0,
            hooks=SimpleNamespace(on_data=[], on_step=[]),
            data=SimpleNamespace(use=self.used.append, sent_bytes=lambda *_: 0),
            transport=SimpleNamespace(world_size=2, gather_objects=self._gathered),
        )
        DataWatch(ctx, processes).follow(self.session, until)

    @staticmethod
    def _gathered(mine: list[LoadCost], _: Any) -> list[list[LoadCost]]:
        other = [replace(c, rank=1, load_s=0.0, longest_s=0.0, core_s=0.0) for c in mine]
        return [[replace(c, cores=8) for c in costs] for costs in (mine, other)]

    def steps(self, count: int, *, waited_s: float) -> None:
        part = StepData(step=0, ranges=[(0, 64)], fields={}, indices=range(64), load_s=0.12)
        result = StepResult(
            step=0,
            loss=1.0,
            losses={},
            grad_norm=None,
            iteration_s=0.04,
            update_s=0.005,
            data_s=waited_s,
            data_s_by_rank=[waited_s, 0.001],
            last_own_s=[],
            stop=False,
            starved=False,
            finite=True,
            loss_scale=None,
            spans=[],
        )
        for _ in range(count):
            for hook in self.session.hooks.on_data:
                hook(self.session, {"default": part})
            self.session.step_count += 1
            for hook in self.session.hooks.on_step:
                hook(self.session, result)


@pytest.fixture
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_places")
def test_the_choice_is_made_once_and_a_hint_given_once() -> None:
    watched = Watched(None, until=1000)
    watched.steps(7, waited_s=0.12)
    assert (watched.told, watched.used) == ([], [])
    watched.steps(1, waited_s=0.12)
    assert watched.used == [{"default": Loading(processes=4)}]
    said = (
        "data: 4 loading processes on rank 0; a step's samples take up to 120.0 ms to load, the "
        "rest of a step 45.0 ms"
    )
    assert watched.told == [{"kind": "note", "message": said}]
    watched.steps(2, waited_s=3.0)  # while they start
    watched.steps(100, waited_s=0.002)
    assert len(watched.told) == 1
    watched.steps(200, waited_s=0.015)
    hint = (
        "steps wait 23% of their time for data (rank 0 most): --num-workers 5 (a sample takes "
        "1.9 ms, a step needs 64)"
    )
    assert watched.told[1:] == [{"kind": "hint", "message": hint}]
    assert len(watched.used) == 1


@pytest.mark.usefixtures("_places")
def test_a_given_number_stays_and_a_hint_names_the_better_one() -> None:
    watched = Watched(0, until=1000)
    watched.steps(60, waited_s=0.12)
    assert watched.used == []
    (told,) = watched.told
    assert told["kind"] == "hint"
    assert "wait 73% of their time for data (rank 0 most): --num-workers 4 (" in told["message"]


@pytest.mark.usefixtures("_places")
def test_steps_that_wait_for_long_need_fewer_to_choose() -> None:
    watched = Watched(None, until=1000)
    watched.steps(3, waited_s=9.0)
    assert watched.used == []
    watched.steps(1, waited_s=9.0)
    assert len(watched.used) == 1


@pytest.mark.usefixtures("_places")
def test_short_runs_hear_nothing() -> None:
    watched = Watched(None, until=80)
    watched.steps(80, waited_s=0.12)
    assert (watched.told, watched.used) == ([], [])


def test_the_progress_tells_longer_waits_and_the_hint() -> None:
    said: list[Any] = []
    out: Any = SimpleNamespace(hint=said.append)
    bar: Any = SimpleNamespace(update=lambda *parts: said.append(parts[2]))
    plan: Any = SimpleNamespace(predicted=SimpleNamespace(iteration_s=0.05))
    show = follow(out, bar, plan, 9)
    step = {"kind": "step", "step": 1, "loss": 1.0, "samples_per_s": 9.0, "data_s": 0.0}
    step |= {"iteration_s": 0.09, "update_s": 0.01}
    for longest_s in (0.034, 0.004):
        show({**step, "data_s_by_rank": {"3": longest_s, "0": 0.0}})
    show({"kind": "hint", "message": "more of them"})
    usual = "loss 1.0000  9 samples/s  iteration 90.0 ms (predicted 50.0)"
    assert said == [f"{usual}  waiting for data 34% (rank 3)", usual, "more of them"]


@pytest.mark.parametrize("text", ["-1", "many", "1.5", ""])
def test_other_numbers_of_processes_are_refused(text: str) -> None:
    assert (count_or_auto("--num-workers", "auto"), count_or_auto("--num-workers", "3")) == (
        None,
        3,
    )
    with pytest.raises(InvalidInputError, match=f"--num-workers {text}: neither auto nor"):
        count_or_auto("--num-workers", text)


def test_a_hint_names_what_stands_in_the_way() -> None:
    found = [Loading(processes=1, limit="no core is to spare")]
    assert "most): no core is to spare (a sample" in hint_of(0.3, 0, [COST], found, None)
    assert "most): --num-workers 1 (a sample" in hint_of(0.3, 0, [COST], found, 0)


def test_ranks_of_one_choice_are_said_together() -> None:
    costs = [replace(COST, rank=rank, task=task) for rank in range(4) for task in "ab"]
    found = [Loading(processes=n) for n in (1, 2, 0, 0, 3, 0, 1, 0)]
    said = "data: 3 loading processes on ranks 0,2, 1 loading process on rank 3; "
    assert said_of(costs, found).startswith(said)


# ---- runs ----


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_chooses_processes_for_slow_samples_and_trains_the_same(tmp_path: Path) -> None:
    """Samples that wait 12 ms each, as for files: 16 of them are longer than the rest of a step."""
    workload = copy_workload(tmp_path)
    data = workload.parent / "birds" / "data.py"
    edited(data, "import torch\n", "import time\n\nimport torch\n")
    edited(data, "        return {\n", "        time.sleep(0.012)\n        return {\n")
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    losses: list[list[float]] = []
    for number, said, hinted in (("auto", True, False), ("0", False, True)):
        folder = tmp_path / number
        where = ("--run-dir", folder, "--steps", 100, "--num-workers", number)
        done = run("mmlaunch", "run", plan, *where, cwd=tmp_path, timeout_s=280)
        assert done.code == 0, done.err
        chosen = re.search(r"^data: [12] loading process(es)? on rank", done.out, re.MULTILINE)
        assert (chosen is not None) == said, done.out
        hint = (
            r"hint: steps wait \d+% of their time for data \(rank [01] most\): --num-workers [12] "
        )
        assert not hinted or re.search(
            hint + r"\(a sample takes \d+ ms, a step needs 16\)", done.err
        )
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([step["loss"] for step in steps])
        assert all(step["data_s_by_rank"].keys() == {"0", "1"} for step in steps)
        assert "waiting for data" in done.err
    assert losses[0] == losses[1]
