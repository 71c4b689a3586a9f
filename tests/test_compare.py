"""Plans side by side: figures by hand, sweeps, the page, what is refused, processes that end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InfeasibleError, InvalidInputError, RunFailedError
from mmplan.planning.compare import ComparedSetting, Comparison, compare
from mmplan.processes import in_processes
from mmplan.reporting.comparison_page import _fitting, render_comparison
from mmplan.reporting.terminal.comparison_tables import (
    comparison_grids,
    left_out_lines,
    setting_words,
)
from mmplan.schema.base import document_text
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, with_batch
from tests.commands import Program, call
from tests.pages import Page, check_self_contained
from tests.solving import FACTORY, module_profile, profile, workload

CHAIN = {"vision": {"inputs": ["x"]}, "llm": {"inputs": ["vision"]}}
LOSS = {"l": {"factory": FACTORY, "inputs": ["llm"]}}


def chain(devices: int = 4, **cluster: Any) -> Profile:
    """3 and 9 seconds a sample; a sample is worth 6 and 18 FLOPs of 1 FLOP/s."""
    modules = {
        name: module_profile(s, 2 * s, blocks=1, flops_per_sample=2 * s)
        for name, s in (("vision", 1.0), ("llm", 3.0))
    }
    given = profile(modules, devices, **cluster)
    device = given.cluster.device.model_copy(update={"peak_flops": 4.0})
    return given.model_copy(update={"cluster": given.cluster.model_copy(update={"device": device})})


def job(batch: int = 8, **more: Any) -> Workload:
    return workload(CHAIN, batch=batch, losses=LOSS, **more)


def compared(folder: Path, task: Workload, given: Profile, **options: Any) -> Comparison:
    write(folder, task, given)
    return compare(
        task,
        workload_path=folder / "w.yaml",
        profile=given,
        profile_path=folder / "p.json",
        processes=1,
        **options,
    )


def write(folder: Path, task: Workload, given: Profile) -> tuple[Program, str, Path, str, Path]:
    (folder / "w.yaml").write_text(document_text(task))
    (folder / "p.json").write_text(document_text(given))
    return "mmplan", "compare", folder / "w.yaml", "--profile", folder / "p.json"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compared(
        tmp_path_factory.mktemp("swept"),
        job(),
        chain(),
        solvers=["colocated", "convex"],
        devices=[2, 4],
        batches=[16, 12],
        with_details=True,
    )


def test_plans_come_best_first_with_ratios_to_a_plain_one(swept: Comparison) -> None:
    # 12 s a sample over 4 devices: 8 samples in 24 s, if all do everything.
    rates = {item.solver: item.plan.predicted.samples_per_s for item in swept.best_first}
    assert rates["colocated"] == pytest.approx(8 / 24)
    assert list(rates) == sorted(rates, key=lambda name: -rates[name])
    assert swept.main == ComparedSetting(devices=4, batch=8)
    assert swept.baseline == "colocated"
    for item in swept.best_first:
        assert swept.ratio(item.plan) == pytest.approx(3 * rates[item.solver])


def test_sweeps_plan_anew_for_every_setting(swept: Comparison) -> None:
    sizes = [(2, 8), (4, 16), (4, 12)]
    assert swept.settings[1:] == tuple(ComparedSetting(devices=d, batch=b) for d, b in sizes)
    # 12 s a sample, however many there are of either.
    for setting in swept.settings:
        (plan,) = (item.plan for item in swept.at(setting) if item.solver == "colocated")
        assert plan.predicted.samples_per_s == pytest.approx(setting.devices / 12)
        assert plan.devices == setting.devices
        assert plan.tasks["default"].batch == setting.batch
    assert [plan.devices for plan in swept.plans] == [4, 4, 2, 2, 4, 4, 4, 4]
    tables = list(comparison_grids(swept))
    assert [table.columns[1:] for table in tables[1:]] == [(">2", ">4"), (">8", ">12", ">16")]
    assert ("colocated", "0.167", "0.333") in tables[1].rows


TASKS = {
    "one": {"modules": ["vision", "llm"], "losses": ["l"], "batch": 6},
    "two": {"modules": ["vision"], "losses": ["v"], "batch": 2},
}
TWO_LOSSES = {**LOSS, "v": {"factory": FACTORY, "inputs": ["vision"]}}


def two_tasks() -> Workload:
    return workload(CHAIN, batch=8, losses=TWO_LOSSES, tasks=TASKS)


def test_headings_say_what_each_task_takes(tmp_path: Path) -> None:
    solvers = ["spindle-seq"]
    found = compared(tmp_path, two_tasks(), chain(2), solvers=solvers, batches=[16])
    tables = list(comparison_grids(found))
    assert "best first, 2 devices, 8 samples a step (one 6, two 2)" in tables[0].title
    assert "batch: the workload's; those of its tasks" in tables[1].note
    larger = next(s for s in found.settings if s.batch == 16)
    assert setting_words(found, larger) == "2 devices, 16 samples a step (one 12, two 4)"
    (item,) = found.at(larger)
    assert {name: task.batch for name, task in item.plan.tasks.items()} == found.batches(larger)
    page = Page(render_comparison(found)).text
    assert "On 2 devices, 8 samples a step (one 6, two 2), cluster" in page
    assert "those of its tasks change in the same ratio" in page


def test_solvers_without_a_plan_for_one_reason_are_one_line(tmp_path: Path) -> None:
    found = compared(tmp_path, two_tasks(), chain(2), devices=[1, 2], budget_s=0.05)
    several, *others = left_out_lines(found)
    assert several.startswith(
        "distmm, convex, colocated, megatron-rigid, ratio are left out: each "
    )
    assert several.endswith(" plans one task, this workload has one, two")
    assert not any("plans one task" in line for line in others)
    (smaller,) = (line for line in others if "spindle-optimus" in line)
    assert smaller.startswith("spindle-optimus has no plan on 1 device: it gives each of 2 tasks ")


def test_only_some_tasks_are_compared(tmp_path: Path) -> None:
    write(tmp_path, two_tasks(), chain(2))
    done = call(
        *write(tmp_path, two_tasks(), chain(2)),
        "--tasks",
        "one",
        "--solvers",
        "colocated",
        "--json",
    )
    assert [list(plan["tasks"]) for plan in done.document] == [["one"]]
    assert "2 devices, batch 6" in done.err
    refused = call(*write(tmp_path, two_tasks(), chain(2)), "--tasks", "three")
    assert refused.code == 2
    assert refused.message == "--tasks three: the workload has one, two"


def test_one_of_several_tasks_is_asked_of_solvers_of_one_task(tmp_path: Path) -> None:
    found = compared(tmp_path, two_tasks(), chain(2), tasks=["one"], budget_s=0.05)
    assert "colocated" in {item.solver for item in found.solved}
    assert any(
        "distmm-mt are left out: they are for several tasks, unless" in line
        for line in found.omitted
    )


def test_utilisation_is_flops_over_peak_and_time(swept: Comparison) -> None:
    (item,) = (item for item in swept.best_first if item.solver == "colocated")
    assert item.details is not None
    uses = {use.module: use for use in item.details.uses}
    # vision: 8 samples of 3 x 2 FLOPs in 8 x 3 device-seconds of 4 FLOP/s; half that of the step
    # that llm fills to 3/4.
    for name, seconds in (("vision", 3.0), ("llm", 9.0)):
        assert uses[name].flops == pytest.approx(8 * 2 * seconds)
        assert uses[name].while_busy == pytest.approx(0.5)
        assert uses[name].busy_share == pytest.approx(seconds / 12)
        assert uses[name].of_step == pytest.approx(0.5 * seconds / 12)
    assert item.plan.predicted.mfu == pytest.approx(0.5)


def test_processes_find_what_one_does(swept: Comparison, tmp_path: Path) -> None:
    task, given = job(), chain()
    write(tmp_path, task, given)
    heard: list[tuple[int, int, str]] = []
    found = compare(
        task,
        workload_path=tmp_path / "w.yaml",
        profile=given,
        profile_path=tmp_path / "p.json",
        solvers=["colocated", "convex"],
        with_details=True,
        processes=2,
        progress=lambda *said: heard.append(said),
    )
    assert [i.plan.predicted for i in found.best_first] == [
        i.plan.predicted for i in swept.best_first
    ]
    assert [i.details for i in found.best_first] == [i.details for i in swept.best_first]
    assert [(done, total) for done, total, _ in heard] == [(1, 2), (2, 2)]


# --- the page ------------------------------------------------------------------------


def test_the_page_shows_everything_and_loads_nothing(swept: Comparison) -> None:
    document = render_comparison(swept)
    check_self_contained(document)
    page = Page(document)
    shown = [a["id"] for a in page.of("section")]
    assert shown == ["plans", "timelines", "memory", "modules", "devices", "batches"]
    for item in swept.best_first:
        assert item.solver in page.text
    assert "× colocated" in page.text
    assert "50.0%" in page.text
    assert len(document) < 1e6


def test_rows_that_do_not_fit_lose_messages_then_ranks() -> None:
    def event(rank: int, kind: str) -> dict[str, Any]:
        return {"tid": rank, "cat": kind, "ts": 0.0, "dur": 1.0}

    events = [event(rank, kind) for rank in range(10) for kind in ("F", "SEND", "B", "RECV")]
    assert _fitting(events, 40) == (events, list(range(10)))
    computes, ranks = _fitting(events, 20)
    assert [e["cat"] for e in computes] == ["F", "B"] * 10
    assert ranks == list(range(10))
    # 20 computes, room for 6: three ranks, from end to end.
    assert _fitting(events, 6)[1] == [0, 4, 9]


def test_names_on_the_page_are_text(swept: Comparison) -> None:
    hostile = "<b>\"'&</script><script>alert(1)</script>"
    document = render_comparison(replace(swept, name=hostile, omitted=(hostile,)))
    check_self_contained(document)
    assert Page(document).of("b") == []
    assert "<script>alert" not in document
    assert hostile in Page(document).text


def test_a_comparison_without_sweeps_has_no_empty_sections(tmp_path: Path) -> None:
    found = compared(tmp_path, job(), chain(), solvers=["colocated"])
    ids = [a["id"] for a in Page(render_comparison(found)).of("section")]
    assert ids == ["plans", "memory"]


# --- what is refused -----------------------------------------------------------------


def test_batches_that_cannot_be_are_named_and_left_out(tmp_path: Path) -> None:
    modules = {n: module_profile(blocks=1) for n in ("a", "b")}
    task = workload({"a": {}, "b": {}}, batch=8, sync_batch=4)
    found = compared(tmp_path, task, profile(modules, 2), solvers=["colocated"], batches=[6, 16])
    assert [setting.batch for setting in found.settings] == [8, 16]
    (line,) = left_out_lines(found)
    assert "batch 6" in line
    assert "4 does not divide" in line


def test_batches_of_tasks_keep_their_ratio() -> None:
    task = workload(
        CHAIN,
        batch=8,
        losses=LOSS,
        tasks={"one": {"modules": ["vision", "llm"], "losses": ["l"], "batch": 6}},
    )
    assert with_batch(task, 16).tasks["one"].batch == 12
    with pytest.raises(InvalidInputError, match="task one's batch of 6 times 2/8 is no whole"):
        with_batch(task, 2)


def test_sync_batches_scale_where_asked() -> None:
    task = workload({"a": {}, "b": {}}, batch=8, sync_batch=8)
    with pytest.raises(InvalidInputError, match="8 does not divide"):
        with_batch(task, 4)
    assert with_batch(task, 4, scale_sync=True).losses["contrastive"].sync_batch == 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"solvers": ["best"]}, InvalidInputError, "--solvers best: this version has distmm"),
        ({"baseline": "best"}, InvalidInputError, "--baseline best: this version has distmm"),
        ({"devices": [2, 8]}, InvalidInputError, "--devices 8: cluster test has 4"),
        ({"solvers": ["megatron-rigid"]}, InvalidInputError, "no such chain"),
        (
            {"solvers": ["colocated"], "baseline": "ratio", "devices": [1]},
            InvalidInputError,
            "--baseline ratio has no plan: .* 1 missing",
        ),
        ({"solvers": ["ratio"], "devices": [1]}, InfeasibleError, "ratio gives .* 1 missing"),
    ],
)
def test_what_cannot_be_compared_is_said(
    options: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    modules = {n: module_profile(blocks=1) for n in ("a", "b")}
    with pytest.raises(error, match=said):
        compared(tmp_path, workload({"a": {}, "b": {}}, batch=8), profile(modules, 4), **options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices", "2,x"), "--devices 2,x: numbers from 1 on"),
        (("--devices", "0"), "--devices 0: numbers from 1 on"),
        (("--batches", "8,-1"), "--batches 8,-1: numbers from 1 on"),
        (("--batches", ","), "names nothing"),
        (("--budget", "-1"), "--budget -1: not a number of seconds"),
    ],
)
def test_wrong_numbers_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = call(*write(tmp_path, job(), chain()), "--solvers", "colocated", *words)
    assert done.code == 2
    assert said in done.err


def test_the_command_lists_plans_and_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    words = ("--solvers", "colocated,convex", "--devices", "2,4", "-o", page, "--json")
    done = call(*write(tmp_path, job(), chain()), *words)
    assert [(p["devices"], p["solver"]["name"]) for p in done.document][::2] == [
        (4, "colocated"),
        (2, "colocated"),
    ]
    assert "x colocated" in done.err
    check_self_contained(page.read_text())


# --- processes -----------------------------------------------------------------------


def test_whoever_stops_listening_ends_the_processes() -> None:
    before = set(multiprocessing.active_children())
    started = time.monotonic()
    found = in_processes(time.sleep, [0.01, 60.0, 60.0], processes=2)
    assert next(found) is None
    assert isinstance(found, Generator)
    found.close()
    assert time.monotonic() - started < 30
    assert set(multiprocessing.active_children()) <= before


def test_a_killed_process_is_said() -> None:
    with pytest.raises(RunFailedError, match="a process was killed"):
        list(in_processes(_kill_this_process, [1, 2], processes=2))


def _kill_this_process(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
