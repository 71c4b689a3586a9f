"""Slow ranks: found in recorded steps and in a run, and nobody is named without a reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmlaunch.execute.executor import StepMarks
from mmlaunch.run.slow_ranks import SlowRank, SlowRanks, Timed, slow_ranks_of
from mmlaunch.session.own_times import Cell, OwnTimes
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute, Op
from mmplan.reporting.report_page import render
from mmplan.reporting.source import load_source
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import run
from tests.matrix_cases import Case
from tests.recorded import named, recorded, slowed
from tests.test_emulate import distinct


def test_in_recorded_jobs_the_slow_worker_is_named_and_nobody_else() -> None:
    assert (named(recorded("ST")), named(recorded("SE"))) == ([], [])
    ((step, slow),) = named(recorded("AR"))
    assert (step, slow.rank) == (7, 0)
    assert 2.2 < slow.times < 2.5


@pytest.mark.parametrize("times", [1.1, 1.2, 1.5])
@pytest.mark.parametrize(("job", "ranks"), [("ST", (0, 5)), ("SE", (1, 30))])
def test_in_recorded_jobs_a_slowed_worker_is_named_after_three_steps(
    job: str, ranks: Sequence[int], times: float
) -> None:
    for rank in ranks:
        ((step, slow),) = named(slowed(recorded(job), rank, times, first=12))
        assert (step, slow.rank) == (14, rank)
        assert slow.times == pytest.approx(times, rel=0.07)


def _named(timed: Sequence[Timed], seconds: Sequence[Sequence[float]]) -> list[SlowRank]:
    ranks = SlowRanks(timed)
    return [slow for step in seconds for slow in ranks.add(step)]


def _steps(count: int, means: Sequence[float], noise: float = 0.01) -> list[list[float]]:
    pick = np.random.default_rng(0)
    return (means * np.exp(pick.normal(0, noise, (count, len(means))))).tolist()


def test_all_stages_of_a_slow_replica_are_named() -> None:
    timed = [
        Timed(rank=2 * replica + stage, kind="forward", peers=stage, samples=replica)
        for replica in range(4)
        for stage in range(2)
    ]
    found = _named(timed, _steps(20, [1.0, 2.0, 1.2, 2.4, 1.0, 2.0, 1.0, 2.0]))
    assert sorted(slow.rank for slow in found) == [2, 3]


@pytest.mark.parametrize(("times", "rank"), [(1.4, None), (1.7, 2)])
def test_a_rank_without_peers_is_held_against_the_prediction(
    times: float, rank: int | None
) -> None:
    # The plan is twice too fast, for all.
    timed = [
        Timed(rank=i, kind="forward", peers=i, expected=0.5 + i, predicted=True) for i in range(4)
    ]
    found = _named(timed, _steps(40, [1.0, 3.0, 5.0 * times, 7.0]))
    assert [slow.rank for slow in found] == ([] if rank is None else [rank])
    if found:
        assert found[0].times == pytest.approx(times, rel=0.05)
    unknown = [Timed(rank=i, kind="forward", peers=i) for i in range(4)]
    assert _named(unknown, _steps(40, [1.0, 3.0, 5.0 * times, 7.0])) == []


def test_of_several_kinds_the_one_that_loses_most_is_said() -> None:
    timed = [
        Timed(rank=rank, kind=kind, peers=kind)
        for kind in ("message", "forward", "backward")
        for rank in range(4)
    ]
    slow = [0.001, 0.001, 0.001, 0.003, 1.0, 1.0, 1.0, 1.3, 2.0, 2.0, 2.0, 2.6]
    (found,) = _named(timed, _steps(30, slow))
    assert (found.rank, found.kind) == (3, "backward")
    # Ten times as long, and nothing beside the rest.
    small = [0.001, 0.001, 0.001, 0.01, *[1.0] * 4, *[2.0] * 4]
    assert _named(timed, _steps(30, small)) == []


def test_noise_names_nobody_and_hides_nobody_for_long() -> None:
    timed = [Timed(rank=rank, kind="forward", peers=0) for rank in range(8)]
    assert _named(timed, _steps(1000, [1.0] * 8, noise=0.3)) == []
    (found,) = _named(timed, _steps(60, [*[1.0] * 7, 1.5], noise=0.15))
    assert found.rank == 7


@pytest.mark.parametrize(
    ("dp", "times", "found"), [(2, 1.2, True), (1, 1.2, False), (1, 1.8, True)]
)
def test_a_plans_computes_are_held_against_replicas_or_the_prediction(
    dp: int, times: float, found: bool
) -> None:
    program = compile_plan(Case(pp=3, dp=dp, k=4, samples=12, backward="split").plan())
    timings = distinct(program)
    own = OwnTimes(program, 0)
    seconds = dict.fromkeys(own.cells, 0.1)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Compute):
                stage = program.stages[item.stage]
                start, stop = stage.microbatches[stage.place(rank)[0]][item.mb]
                kind = "forward" if item.op == Op.FORWARD else "backward"
                took_s = timings.computes[item.stage, item.op, stop - start]
                seconds[Cell(rank, kind, item.stage)] += 3 * took_s * (times if rank == 1 else 1)
    session: Any = SimpleNamespace(program=program, own_times=own)
    ranks = slow_ranks_of(session, timings)
    slow = [one for step in _steps(50, [*seconds.values()]) for one in ranks.add(step)]
    assert [(one.rank, one.kind) for one in slow] == [(1, "backward")] * found


def test_an_instructions_own_time_is_without_its_waits() -> None:
    clock = iter([0.0, 1.0, 2.0, 5.0, 6.5, 7.0, 8.0])
    transport: Any = SimpleNamespace(mark=lambda: next(clock), seconds_of=list)
    marks = StepMarks(transport)
    marks.add()
    for waits in (1, 0):
        marks.begin()
        for _ in range(2 + 2 * waits):
            marks.add()
    first, second = marks.spans()
    assert (first.start_s, first.end_s, first.own_s) == (1.0, 6.5, 2.5)
    assert (second.start_s, second.end_s, second.own_s) == (7.0, 8.0, 1.0)


# ---- runs ----


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rank", "kind"), [(0, "forward"), (1, "backward"), (None, None)])
def test_a_run_names_the_rank_that_is_slow(
    tmp_path: Path, rank: int | None, kind: str | None
) -> None:
    """All ranks sleep: beside it what they take from each other on few cores is little."""
    workload = copy_workload(tmp_path)
    towers = workload.parent / "birds" / "towers.py"
    usual = {"forward": 0.02, "backward": 0.02}
    more = {name: 0.015 * (name == kind) for name in usual}
    slept = {n: f'{usual[n]} + {more[n]} * (os.environ.get("RANK") == "{rank}")' for n in usual}
    edited(towers, "import torch\n", "import os\nimport time\n\nimport torch\n")
    edited(
        towers,
        "        return torch.tanh(self.lift(spectrogram))\n",
        f"        time.sleep({slept['forward']})\n"
        "        lifted = torch.tanh(self.lift(spectrogram))\n"
        f"        lifted.register_hook(lambda _: time.sleep({slept['backward']}))\n"
        "        return lifted\n",
    )
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json", dp=True)
    folder = tmp_path / "run"
    done = run("mmlaunch", "run", plan, "--run-dir", folder, "--steps", 60, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if " is slow: " in line]
    record = json.loads((folder / "run.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [entry | {"step": step["step"]} for step in steps for entry in step.get("slow", [])]
    page = render(load_source(folder))
    if rank is None:
        assert (lines, told, record.get("slow_ranks")) == ([], [], None)
        assert " is slow" not in page
        return
    ((line,), (entry,)) = lines, told
    assert f": rank {rank} is slow: its {kind} takes 1." in line
    assert (entry["rank"], entry["instruction"]) == (rank, kind)
    assert 1.3 < entry["times"] < 2.0
    assert entry["step"] < 30
    ((recorded),) = record["slow_ranks"]
    assert {key: recorded[key] for key in entry} == entry
    assert line in page
