"""The report page: complete, self-contained, safe, small, and there when pieces are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmplan.costs.cost_model import CostModel
from mmplan.costs.program_costs import ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.planning.what_if import NUM_REPLANS
from mmplan.program.compile import compile_plan
from mmplan.program.trace import trace_events, write_trace
from mmplan.reporting.html.plots import thinned
from mmplan.reporting.report_page import SECTIONS, render, write_report
from mmplan.reporting.sections import timelines
from mmplan.reporting.sections.memory import memory_section
from mmplan.reporting.sections.overview import overview_section, sharing_note
from mmplan.reporting.sections.plan_tables import provenance_section, solver_section
from mmplan.reporting.sections.profile import fit_panels, profile_section
from mmplan.reporting.sections.topology import topology_section
from mmplan.reporting.sections.training import training_section
from mmplan.reporting.source import load_source
from mmplan.schema.base import file_sha256, save_document
from mmplan.schema.plan import Plan
from mmplan.schema.profile import LossPoint, LossProfile, ModuleProfile, Point, Profile
from mmplan.simulation.step import prediction, simulate
from tests.pages import Page, check_self_contained
from tests.programs import loss, make_cluster, make_plan, unit
from tests.solving import FACTORY, module_profile, profile, run_solve, workload

# Names come from users: this one would be markup, an attribute's end and a script's end.
HOSTILE = "vis<b>\"'&</script><script>alert(1)</script>"


def points(base_s: float, per_sample_s: float, blocks: int) -> tuple[Point, ...]:
    """Points with a break at 16 samples, and one of fewer blocks."""

    def at(size: int) -> float:
        return base_s + per_sample_s * (size + max(0, size - 16))

    whole = tuple(
        Point(
            microbatch=size,
            forward_s=at(size),
            backward_s=2 * at(size),
            activation_bytes=1e4 * size,
            forward_spread_s=0.1 * at(size),
            repeats=9,
        )
        for size in (1, 2, 4, 8, 16, 32, 64, 128)
    )
    half = Point(microbatch=8, blocks=blocks // 2, forward_s=at(8) / 2, backward_s=at(8))
    return (*whole, half)


def make_profile(plan: Plan, vision: str, source: Any = "given") -> Profile:
    def module(base_s: float) -> ModuleProfile:
        return ModuleProfile(
            blocks=4,
            parameters=1e6,
            flops_per_sample=1e7,
            output_bytes_per_sample=512,
            boundary_bytes_per_sample=4e4,
            points=points(base_s, 1e-4, 4),
        )

    loss_points = tuple(
        LossPoint(samples=s, forward_s=1e-4 + 1e-6 * s, backward_s=2e-4 + 1e-6 * s)
        for s in (16, 64)
    )
    return Profile(
        name="hand-made",
        source=source,
        cluster=plan.cluster,
        modules={vision: module(1e-3), "text": module(2e-3)},
        losses={"clip": LossProfile(points=loss_points)},
        provenance={"cores": 2, "processes": 2, "nested": {"key": 1.5}},
    )


def predicted_plan(folder: Path, *, vision: str = "vision", source: Any = "given") -> Path:
    """A simulated plan of two towers on six of eight devices, with its profile beside it."""
    plan = make_plan(
        unit(vision, pp=2, dp=2, k=4, cuts=[(0, 2), (2, 4)]),
        unit("text", dp=2, k=2, cuts=[(0, 4)]),
        losses=[loss("clip", vision, "text", sync_batch=64)],
        batch=128,
        cluster=make_cluster(8, devices_per_node=4, latency_s=2e-5, bandwidth=1e9),
        devices=8,
        # It names a folder, so no slash is in it.
        name=f"plan of {vision}".replace("/", "|"),
    )
    profile = make_profile(plan, vision, source)
    save_document(profile, folder / "profile.json")
    program = compile_plan(plan)
    costs = ProgramCosts(program, CostModel(profile, plan.cluster, plan.training), plan)
    simulated = simulate(program, costs)
    solver = plan.solver.model_copy(
        update={"notes": ("a note of the solver",), "idle_ranks": (6, 7)}
    )
    reference = plan.profile.model_copy(update={"sha256": file_sha256(folder / "profile.json")})
    plan = plan.model_copy(
        update={
            "predicted": prediction(simulated, plan),
            "profile": reference,
            "solver": solver,
        }
    )
    save_document(plan, folder / "plan.json")
    return folder / "plan.json"


def make_run(folder: Path, *, steps: int = 40, slowdown: float = 1.25, **names: Any) -> Path:
    """A run's folder as mmlaunch leaves it: every measured time is the predicted one, longer."""
    plan_file = predicted_plan(folder, **names)
    run = folder / "runs" / "first"
    run.mkdir(parents=True)
    data = load_source(plan_file)
    (run / "plan.json").write_text(plan_file.read_text())
    iteration_s = data.plan.predicted.iteration_s
    record = {
        "plan": "../../plan.json",
        "plan_sha256": file_sha256(plan_file),
        "cores": 2,
        "started_at": "2026-01-01T00:00:00",
        "predicted_iteration_s": iteration_s,
    }
    (run / "run.json").write_text(json.dumps(record))
    lines = [
        json.dumps(
            {
                "step": step,
                "loss": 4.0 / (1 + step),
                # The first steps are slow: the median must leave them out.
                "iteration_s": iteration_s * slowdown * (50 if step < 5 else 1),
                "samples_per_s": 1.0,
                "update_s": 1e-3,
                "data_s": 1e-4,
                # Ranks 0 and 1 are never among the longest.
                "data_s_by_rank": {str(r): 1e-3 * r for r in range(9, 1, -1)},
            }
        )
        for step in range(steps)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_run_trace(run / "trace.json", data.plan, data.profile, slowdown)
    return run


def write_run_trace(path: Path, plan: Plan, profile: Profile | None, slowdown: float) -> None:
    assert profile is not None
    program = compile_plan(plan)
    costs = ProgramCosts(program, CostModel(profile, plan.cluster, plan.training), plan)
    predicted = list(simulate(program, costs).events())
    measured = [
        e._replace(start_s=0.5 + e.start_s * slowdown, end_s=0.5 + e.end_s * slowdown)
        for e in predicted
    ]
    write_trace(
        path,
        trace_events(program, predicted, process_name="predicted", process=0),
        trace_events(program, measured, process_name="measured", process=1),
    )


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile"), vision=HOSTILE, source="analytic")


@pytest.fixture(scope="module")
def hostile_page(hostile_run: Path) -> str:
    output = hostile_run / "out" / "report.html"
    write_report(load_source(hostile_run), output)
    return output.read_text(encoding="utf-8")


def test_every_section_is_there_and_every_element_closed(hostile_page: str) -> None:
    page = Page(hostile_page)
    assert page.open == []
    anchors = [attributes.get("id") for attributes in page.of("section")]
    assert anchors == list(SECTIONS)
    headings = {a.get("id") for a in page.of("h2")}
    assert {a.get("aria-labelledby") for a in page.of("section")} == headings
    links = {a["href"] for a in page.of("a")}
    assert links == {"#main", *(f"#{anchor}" for anchor in anchors)}


def test_nothing_is_loaded_from_elsewhere(hostile_page: str) -> None:
    check_self_contained(hostile_page)


def test_names_are_text_wherever_they_are_shown(hostile_page: str) -> None:
    page = Page(hostile_page)
    assert HOSTILE in page.text
    assert page.of("b") == []
    assert len(page.of("script")) == 2  # the timeline's data and the timeline's script
    assert "<script>alert" not in hostile_page
    data = timeline_data(hostile_page)
    assert any(HOSTILE in string for string in data["strings"])


def timeline_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_times_are_predicted_over_measured_without_the_slow_first_steps(hostile_run: Path) -> None:
    data = load_source(hostile_run)
    assert data.run is not None
    assert data.run.warm_up == 5
    assert data.run.iteration_s == pytest.approx(1.25 * data.plan.predicted.iteration_s)
    text = Page(overview_section(data)).text
    assert "Predicted / measured = 0.800: the run is 25.0% slower than predicted" in text
    assert "the median of 35 steps after the first 5" in text


def test_more_ranks_than_cores_is_said(hostile_run: Path) -> None:
    data = load_source(hostile_run)
    text = Page(sharing_note(data)).text
    # Two of the eight ranks are idle and need no core.
    assert "6 ranks share 2 cores" in text
    assert "6/2 = 3 times longer than predicted" in text
    assert "more than sharing explains" not in text


def test_sharing_that_the_profile_contains_is_not_counted_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path, slowdown=4.0)
    assert "more than sharing explains" in sharing_note(load_source(run))
    profile_file = tmp_path / "profile.json"
    profile = json.loads(profile_file.read_text())
    profile["provenance"] = {"cores": 2, "processes": 6, "clock": "wall time"}
    profile_file.write_text(json.dumps(profile))
    assert "already contain sharing a core 6/2 = 3 ways" in sharing_note(load_source(run))
    profile["provenance"]["clock"] = "processor time"
    profile_file.write_text(json.dumps(profile))
    assert "assumes a core for each rank" in sharing_note(load_source(run))


def test_enough_cores_or_no_cpu_says_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"cores": 6}))
    assert sharing_note(load_source(run)) == ""
    assert sharing_note(load_source(tmp_path / "plan.json")) == ""


def test_both_timelines_hold_every_instruction_that_takes_time(hostile_run: Path) -> None:
    data = load_source(hostile_run)
    script = timeline_data(timelines.timeline_section(data))
    events = [e for e in (*data.predicted, *data.measured) if e["dur"] > 0]
    assert sum(len(row["bars"]) for row in script["rows"]) == len(events)
    labels = [row["label"] for row in script["rows"]]
    assert labels == [f"{kind}, rank {r}" for kind in ("Predicted", "Measured") for r in range(6)]
    # One time axis: measured rows end at the right edge, predicted ones at 1 / 1.25 of it.
    ends = [max(bar[0] + bar[1] for bar in row["bars"]) for row in script["rows"]]
    assert max(ends[6:]) == pytest.approx(script["ticks"], rel=1e-5)
    assert max(ends[:6]) == pytest.approx(0.8 * script["ticks"], rel=1e-4)
    # The last of all is a wait for sums that began earlier, which takes no time of its own.
    assert 0.9 < script["end"] / (1.25 * data.plan.predicted.iteration_s) <= 1.0


def test_a_bar_says_its_unit_micro_batch_and_samples(hostile_run: Path) -> None:
    script = timeline_data(timelines.timeline_section(load_source(hostile_run)))
    first = next(bar for bar in script["rows"][0]["bars"] if bar[2] == "F")
    assert script["strings"][first[3]] == "0F0"
    assert script["strings"][first[4]] == f"{HOSTILE}, blocks 0-2"
    assert first[5:] == [0, 0, 8]


def test_the_picture_is_complete_without_the_script(hostile_page: str) -> None:
    page = Page(hostile_page)
    bars = [a for a in page.of("path") if a.get("class") == "kF"]
    assert len(bars) == 12  # one per row
    assert all((a["d"] or "").count("z") == (8 if i % 6 < 4 else 4) for i, a in enumerate(bars))
    assert "F0" in page.text
    (controls,) = [a for a in page.of("div") if a.get("class") == "controls"]
    assert "hidden" in controls  # buttons that would do nothing are not shown


def test_controls_and_figures_can_be_reached_and_are_named(hostile_page: str) -> None:
    page = Page(hostile_page)
    assert len(page.of("button")) >= 6
    assert all(a.get("aria-label") for a in page.of("button"))
    regions = [a for a in page.of("div") if "scroll" in (a.get("class") or "").split()]
    assert regions
    assert all(a.get("tabindex") == "0" and a.get("aria-label") for a in regions)
    assert all(a.get("aria-label") for a in page.of("svg"))
    assert all(re.search(rf'data-do="{a["data-do"]}"', hostile_page) for a in page.of("button"))


def test_the_script_knows_every_button(hostile_page: str) -> None:
    actions = re.search(r"const ACTIONS = \{(.*?)\n  \};", hostile_page, re.DOTALL)
    assert actions is not None
    known = set(re.findall(r"(?m)^    (\w+):", actions[1]))
    assert {a["data-do"] for a in Page(hostile_page).of("button")} == known


def test_what_profiles_are_is_shown_at_every_fit(hostile_page: str, hostile_run: Path) -> None:
    text = Page(hostile_page).text
    assert "ANALYTIC: no time in this profile was measured" in text
    profile = load_source(hostile_run).profile
    assert profile is not None
    panels = list(fit_panels(profile))
    titles = [panel.title for panel in panels]
    assert titles == [f"{HOSTILE}, tp 1", "text, tp 1", "loss clip"]
    assert hostile_page.count('<span class="tag analytic">analytic</span>') == len(panels)
    assert "Predicted from an analytic profile" in text


def test_fits_show_points_of_fewer_blocks_scaled_and_breaks(hostile_run: Path) -> None:
    profile = load_source(hostile_run).profile
    assert profile is not None
    panel = list(fit_panels(profile))[1]
    curve, samples = panel.forward
    assert curve.knots == (16.0,)
    (half,) = [sample for sample in samples if sample.scaled]
    whole = next(s for s in samples if s.size == half.size and not s.scaled)
    assert half.value_s == pytest.approx(whole.value_s)
    assert whole.spread_s == pytest.approx(0.1 * whole.value_s)


def test_idle_devices_are_drawn_and_named(hostile_run: Path) -> None:
    page = Page(topology_section(load_source(hostile_run)))
    titles = [w for w in page.words if w.startswith("rank ") and ":" in w]
    assert [t for t in titles if "idle" in t] == [
        "rank 6: idle: in no unit",
        "rank 7: idle: in no unit",
    ]
    assert any("replica 2 of 2, stage 1 of 2, tp index 0 of 1" in t for t in titles)
    assert len([a for a in page.of("rect") if a.get("class") == "device unused"]) == 2


def test_of_alike_nodes_of_a_large_cluster_one_is_drawn(tmp_path: Path) -> None:
    plan = make_plan(
        unit("vision", dp=1500, k=1),
        unit("text", pp=2, dp=250, k=1),
        losses=[loss("clip", "vision", "text", sync_batch=3000)],
        batch=3000,
        cluster=make_cluster(2048, devices_per_node=8),
        devices=2048,
    )
    save_document(plan, tmp_path / "plan.json")
    drawn = topology_section(load_source(tmp_path / "plan.json"))
    names = [word for word in Page(drawn).words if word.startswith("node") and ":" not in word]
    assert names == ["nodes 0-186", "node 187", "nodes 188-249", "nodes 250-255"]
    assert "Of nodes whose devices hold the same stages one is drawn." in drawn


def big_events(ranks: int, per_rank: int) -> Iterator[dict[str, Any]]:
    for rank in range(ranks):
        for i in range(per_rank):
            yield {
                "tid": rank,
                "ts": 10.0 * i,
                "dur": 1.0 + (i * 7 + rank) % 9,
                "name": f"0F{i}",
                "cat": "F",
                "args": {
                    "unit": "vision",
                    "blocks": [0, 1],
                    "microbatch": i,
                    "samples": [i, i + 1],
                },
            }


def test_long_programs_are_thinned_and_it_is_said() -> None:
    events = list(big_events(4, 500))
    line = timelines.timeline("Predicted", events, ranks=range(4), most_bars=600)
    drawn = [bar for row in line.rows for bar in row.bars]
    assert 0 < len(drawn) <= 600
    assert line.hidden == 2000 - len(drawn)
    longest_hidden = sorted((e["dur"] * 1e-6 for e in events), reverse=True)[600]
    assert min(bar.end_s - bar.start_s for bar in drawn) > longest_hidden - 1e-12
    assert "shortest instructions" in timelines.thinned_notes([line])


def test_rows_are_chosen_so_that_every_stage_is_seen() -> None:
    assert timelines.chosen_ranks(range(10), [7, 3], most=4) == (0, 1, 3, 7)
    assert timelines.chosen_ranks([2, 5], [9], most=4) == (2, 5)
    units = (unit("a", pp=2, dp=2, tp=2), unit("b", dp=3))
    plan = make_plan(*units, losses=[loss("l", "a", "b", sync_batch=8)])
    # First replica of a and of b, second of both, third of b; one rank of a tp group.
    assert timelines.representatives(plan) == [0, 2, 8, 4, 6, 9, 10]


@pytest.mark.slow
def test_the_page_stays_under_five_megabytes(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10_000)
    process = [{"ph": "M", "pid": p, "tid": 0, "name": "process_name", "args": {"name": name}}
               for p, name in enumerate(("predicted", "measured"))]  # fmt: skip
    slices = [e | {"ph": "X", "pid": p} for p in (0, 1) for e in big_events(8, 2500)]
    (run / "trace.json").write_text(json.dumps({"traceEvents": process + slices}))
    output = tmp_path / "report.html"
    write_report(load_source(run), output)
    assert output.stat().st_size < 5_000_000
    page = output.read_text()
    assert sum(len(row["bars"]) for row in timeline_data(page)["rows"]) <= timelines.MOST_BARS
    assert "shortest instructions" in page


def test_thinned_curves_keep_their_extremes() -> None:
    ys = [0.0] * 10_000
    ys[1234], ys[7001] = 5.0, -3.0
    xs, kept = thinned(list(enumerate(ys)), most=100)
    assert len(kept) <= 200
    assert (max(kept), min(kept)) == (5.0, -3.0)
    assert xs == sorted(xs)
    assert xs[kept.index(5.0)] == 1234


def test_a_plan_alone_is_simulated(tmp_path: Path) -> None:
    plan_file = predicted_plan(tmp_path)
    data = load_source(plan_file)
    assert data.run is None
    assert max(e["ts"] + e["dur"] for e in data.predicted) == pytest.approx(
        1e6 * data.plan.predicted.iteration_s, rel=1e-6
    )
    text = Page(render(data)).text
    assert "Measured rows appear in the report of a run's folder" in text
    assert "a note of the solver" in text


def test_a_plan_without_its_profile_still_has_a_page(tmp_path: Path) -> None:
    plan_file = predicted_plan(tmp_path)
    (tmp_path / "profile.json").unlink()
    text = Page(render(load_source(plan_file))).text
    assert "No predicted timeline: it needs the profile, which is missing" in text
    assert "Fits cannot be shown without it" in text


def test_a_profile_that_changed_is_said(tmp_path: Path) -> None:
    plan_file = predicted_plan(tmp_path)
    with (tmp_path / "profile.json").open("a") as file:
        file.write("\n")
    data = load_source(plan_file)
    text = Page(profile_section(data) + provenance_section(data)).text
    assert "The profile has changed since the plan was made from it" in text
    assert "differs: " in text


def test_a_faulty_profile_is_said(tmp_path: Path) -> None:
    plan_file = predicted_plan(tmp_path)
    (tmp_path / "profile.json").write_text("{")
    assert "The profile cannot be used" in profile_section(load_source(plan_file))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"traceEvents": [{"ph": "X"}, 3]}'])
def test_a_run_without_a_trace_shows_the_prediction(tmp_path: Path, content: str | None) -> None:
    run = make_run(tmp_path)
    (run / "trace.json").unlink()
    if content is not None:
        (run / "trace.json").write_text(content)
    data = load_source(run)
    assert data.measured == ()
    assert data.predicted  # simulated again
    assert "No measured timeline" in timelines.timeline_section(data)


def test_one_line_of_metrics_is_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    data = load_source(run)
    assert data.run is not None
    assert data.run.warm_up == 0
    assert "Loss: 4 at step 0" in training_section(data)
    assert "the median of 1 step." in overview_section(data)


def test_ranks_that_waited_for_data_are_named_longest_first(hostile_run: Path) -> None:
    data = load_source(hostile_run)
    assert data.run is not None
    assert data.run.iteration_s is not None
    share = 9e-3 / (data.run.iteration_s + 1e-3 + 1e-4)
    _, table = training_section(data).split('aria-label="Waiting for data by rank"')
    rows = re.findall(r"<td>(\d)</td><td[^>]*>(\d ms)</td><td[^>]*>([\d.]+%)</td>", table)
    assert [row[:2] for row in rows] == [(str(rank), f"{rank} ms") for rank in range(9, 1, -1)]
    assert rows[0][2] == f"{100 * share:.1f}%"


def test_measured_memory_stands_beside_the_predicted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = memory_section(load_source(run))
    assert "measured" not in before
    record = json.loads((run / "run.json").read_text())
    predicted = load_source(run).plan.predicted.memory_bytes
    held = {"0": predicted[0] / 2, "1": predicted[1] / 4, "99": 1.0, "x": 1.0, "2": None}
    (run / "run.json").write_text(json.dumps(record | {"memory_bytes": held}))
    text = memory_section(load_source(run))
    assert "planned / measured is 2.00 to 4.00" in text
    assert text.count('class="measured"') == 2
    for wrong in ([1.0], "much", {"0": "much"}):
        (run / "run.json").write_text(json.dumps(record | {"memory_bytes": wrong}))
        assert memory_section(load_source(run)) == before


def test_a_change_of_tasks_is_marked_and_medians_are_of_the_last_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60)
    before = training_section(load_source(run))
    record = json.loads((run / "run.json").read_text())
    last = {"plan_sha256": "0", "predicted_samples_per_s": 2.0}
    record["segments"] = [
        {"from_step": 0, "tasks": ["a", "b"], "devices": 4, "predicted_iteration_s": 1.0, **last},
        {"from_step": 40, "tasks": ["b"], "devices": 1, "predicted_iteration_s": 3.0, **last},
    ]
    (run / "run.json").write_text(json.dumps(record))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slow = [row | {"iteration_s": 7.0} if row["step"] >= 40 else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in slow))
    data = load_source(run)
    assert data.run is not None
    assert data.run.iteration_s == 7.0
    text = training_section(data)
    assert before.count("<svg") == text.count("<svg") == 3
    # One change, in the pictures of loss and throughput in words as well.
    assert Page(text).text.count("Dotted: from step 40 b on 1 rank.") == 2
    assert "Dotted" not in Page(before).text
    assert "the median of 15 steps after the first 5" in overview_section(data)
    # A run that was killed before the first step of its last plan, and a record that is wrong.
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:3]))
    assert "Nothing was measured" in overview_section(load_source(run))
    assert training_section(load_source(run)).count("<svg") == 3
    for wrong in ([{"from_step": "x"}], {"from_step": 0}, 3, [3]):
        (run / "run.json").write_text(json.dumps(record | {"segments": wrong}))
        assert training_section(load_source(run)).count("<svg") == 3


def test_broken_metrics_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": null, "iteration_s": 1.0}\n{"step": 4, "lo')
    data = load_source(run)
    assert data.run is not None
    assert [step.step for step in data.run.steps] == [0, 1, 2, 3]
    text = Page(training_section(data)).text
    assert "metrics.jsonl: 1 line cannot be read and is left out" in text
    assert "1 step has a loss that is no finite number" in text


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_run_without_a_file_still_has_a_page(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, steps=3)
    (run / name).unlink()
    data = load_source(run)
    text = Page(overview_section(data) + training_section(data) + provenance_section(data)).text
    assert f"{name} is missing" in text


def test_memory_is_drawn_against_the_capacity(hostile_run: Path) -> None:
    data = load_source(hostile_run)
    most = max(data.plan.predicted.memory_bytes)
    device = data.plan.cluster.device

    def drawn(capacity: float) -> str:
        small = device.model_copy(update={"memory_bytes": capacity})
        cluster = data.plan.cluster.model_copy(update={"device": small})
        plan = data.plan.model_copy(update={"cluster": cluster})
        return memory_section(replace(data, plan=plan))

    assert 'class="capacity"' in drawn(2 * most)
    assert "does not fit" in drawn(0.99 * most)
    assert "times the longest bar" in drawn(1000 * most)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "profile", "no JSON"])
def test_a_source_that_is_neither_plan_nor_run_is_refused(tmp_path: Path, kind: str) -> None:
    predicted_plan(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("hello")
    source = {
        "missing": tmp_path / "nothing.json",
        "empty folder": tmp_path / "empty",
        "profile": tmp_path / "profile.json",
        "no JSON": tmp_path / "text.json",
    }[kind]
    output = tmp_path / "report.html"
    with pytest.raises(InvalidInputError, match=re.escape(str(source))):
        write_report(load_source(source), output)
    assert not output.exists()


def test_the_same_input_gives_the_same_page(tmp_path: Path) -> None:
    plan_file = predicted_plan(tmp_path)
    assert render(load_source(plan_file)) == render(load_source(plan_file))


# --- what travels ---


def test_what_travels_is_counted_inside_and_between_nodes(tmp_path: Path) -> None:
    modules = {
        name: module_profile(seconds, 2 * seconds, blocks=1, output_bytes_per_sample=1e6)
        for name, seconds in (("vision", 1.0), ("llm", 1.0))
    }
    chain = {"vision": {"inputs": ["x"]}, "llm": {"inputs": ["vision"]}}
    losses = {"l": {"factory": FACTORY, "inputs": ["llm"]}}
    task = workload(chain, batch=4, losses=losses)
    # 4 samples of 1 MB, and their gradients back.
    for per_node, cells in ((2, "8 MB–"), (1, "–8 MB")):
        given = profile(modules, 2, per_node=per_node)
        plan = run_solve(tmp_path, task, given, solver="distmm", top=1)
        save_document(plan, tmp_path / "plan.json")
        text = Page(topology_section(load_source(tmp_path / "plan.json"))).text
        assert f"vision to llm{cells}" in text


def test_features_that_meet_in_a_loss_travel(tmp_path: Path) -> None:
    towers = {name: module_profile(blocks=1, output_bytes_per_sample=1e6) for name in ("a", "b")}
    task = workload({"a": {}, "b": {}}, batch=4)
    # Each of two ranks gets the other's 4 features of 1 MB, in a buffer for all 8.
    for per_node, cells in ((2, "8 MB–"), (1, "–8 MB")):
        plan = run_solve(tmp_path, task, profile(towers, 2, per_node=per_node), solver="distmm")
        save_document(plan, tmp_path / "plan.json")
        text = Page(topology_section(load_source(tmp_path / "plan.json"))).text
        assert f", gathered{cells}" in text


def test_other_solvers_are_drawn_where_they_were_asked(tmp_path: Path) -> None:
    task = workload({"a": {}, "b": {}}, batch=4)
    given = profile({name: module_profile(blocks=1) for name in ("a", "b")}, 2)
    for solver, drawn in (("auto", True), ("distmm", False)):
        plan = run_solve(tmp_path, task, given, solver=solver)
        save_document(plan, tmp_path / "plan.json")
        page = solver_section(load_source(tmp_path / "plan.json"))
        assert ("The best plan of every solver" in page) == drawn
        assert ('<span class="name">colocated' in page) == drawn


# --- other settings ------------------------------------------------------------------


def test_what_other_settings_give_is_shown_where_asked(tmp_path: Path) -> None:
    modules = {
        name: module_profile(seconds, 2 * seconds, blocks=1, flops_per_sample=1.0)
        for name, seconds in (("vision", 1.0), ("llm", 3.0))
    }
    chain = {"vision": {"inputs": ["x"]}, "llm": {"inputs": ["vision"]}}
    losses = {"l": {"factory": FACTORY, "inputs": ["llm"]}}
    task = workload(chain, batch=4, losses=losses)
    plan = run_solve(tmp_path, task, profile(modules, 2), solver="colocated")
    save_document(plan, tmp_path / "plan.json")
    heard: list[str] = []
    output = tmp_path / "report.html"
    write_report(
        load_source(tmp_path / "plan.json"), output, progress=lambda *said: heard.append(said[2])
    )
    document = output.read_text()
    check_self_contained(document)
    text = Page(document).text
    # 12 s a sample on two devices; llm is 9 of them.
    assert "llm in half the timestep 37.5% shorter" in text
    assert "no messages" in text
    assert "one node more0.333× 2.00012 s" in text
    assert "one node less––––no plan: --devices 0" in text
    assert "Best batch: the plan's own batch, 0.167 samples/s, of 5 tried" in text
    assert len(heard) == NUM_REPLANS


def test_other_settings_need_the_workload(tmp_path: Path) -> None:
    data = load_source(predicted_plan(tmp_path))
    with pytest.raises(InvalidInputError, match=r"workload\.yaml"):
        write_report(data, tmp_path / "report.html", progress=lambda *said: None)
    assert not (tmp_path / "report.html").exists()
