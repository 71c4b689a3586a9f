"""What binds a plan, and what other settings would give: hand-worked, and as sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InvalidInputError
from mmplan.planning.what_if import LOSSES, MESSAGES, NUM_REPLANS, REDUCTIONS, part_effects, replans
from mmplan.reporting.explain import best_batch, explain, replan_reason
from mmplan.schema.base import save_document
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import simulate_plan
from tests.commands import call
from tests.solving import FACTORY, module_profile, profile, run_solve, workload

CHAIN = {"vision": {"inputs": ["x"]}, "llm": {"inputs": ["vision"]}}
LOSS = {"l": {"factory": FACTORY, "inputs": ["llm"]}}


def solved(
    folder: Path, given: Profile, batch: int = 2, **options: Any
) -> tuple[Workload, Plan, Path]:
    task = workload(CHAIN, batch=batch, losses=LOSS)
    plan = run_solve(folder, task, given, **options)
    save_document(plan, folder / "plan.json")
    return task, plan, folder / "plan.json"


def chain(devices: int, **cluster: Any) -> Profile:
    """1 + 2 and 3 + 6 seconds a sample, 1e6 gradients of each module, 1e6 bytes a sample."""
    modules = {
        name: module_profile(
            seconds, 2 * seconds, blocks=1, parameters=1e6, output_bytes_per_sample=1e6
        )
        for name, seconds in (("vision", 1.0), ("llm", 3.0))
    }
    return profile(modules, devices, **cluster)


def gains(plan: Plan, given: Profile) -> dict[str, float]:
    return {effect.part: effect.gain for effect in part_effects(plan, given)}


def test_one_device_gains_what_its_modules_take(tmp_path: Path) -> None:
    # 3 s of vision and 9 s of llm a sample, nothing else: halves are 1/8 and 3/8 of the step.
    given = chain(1)
    _, plan, path = solved(tmp_path, given, solver="colocated")
    assert plan.predicted.iteration_s == pytest.approx(24)
    reasons = explain(plan, given, simulate_plan(plan, path), [])
    on_path = next(reason.text for reason in reasons if reason.topic == "path")
    assert on_path == "the end of the step waits for llm 75.0%, vision 25.0%"
    found = gains(plan, given)
    assert list(found) == ["llm", "vision", MESSAGES, LOSSES, REDUCTIONS]
    assert found["llm"] == pytest.approx(3 / 8)
    assert found["vision"] == pytest.approx(1 / 8)
    assert found[MESSAGES] == found[LOSSES] == found[REDUCTIONS] == 0


def test_what_is_hidden_binds_nothing(tmp_path: Path) -> None:
    # 1 + 2 s behind 3 + 6 s, two micro-batches: vision's ramp of 3 s is all of it that shows.
    given = chain(2)
    _, plan, _ = solved(tmp_path, given, solver="convex", top=1)
    assert plan.predicted.iteration_s == pytest.approx(1 + 9 + 9 + 2)
    assert gains(plan, given)["vision"] == pytest.approx(1.5 / 21)
    assert gains(plan, given)["llm"] == pytest.approx(9 / 21)


def test_slow_links_bind_by_messages_or_by_reductions(tmp_path: Path) -> None:
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 2e6}
    given = chain(2, intra=slow)
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    for folder in (apart, shared):
        folder.mkdir()
    # 2 samples, half a second each way for each.
    _, plan, _ = solved(apart, given, solver="convex", top=1)
    assert gains(plan, given)[MESSAGES] > 0.04
    assert gains(plan, given)[REDUCTIONS] == 0
    # 2e6 gradients of 4 bytes on two devices: 4 s of 16 by a ring of 2 MB/s, a part of them beside
    # the last backward.
    _, plan, _ = solved(shared, given, solver="colocated")
    assert 0.1 < gains(plan, given)[REDUCTIONS] < 4 / 16
    assert gains(plan, given)[MESSAGES] == 0


def test_another_setting_gets_the_plan_that_solving_it_gives(tmp_path: Path) -> None:
    given = chain(2)
    task, plan, _path = solved(tmp_path, given, batch=4, solver="colocated")
    found = {
        replan.change: replan
        for replan in replans(
            plan,
            profile=given,
            workload=task,
        )
    }
    assert len(found) == NUM_REPLANS
    seconds = {change: r.plan.predicted.iteration_s for change, r in found.items() if r.plan}
    # 12 s a sample: 4 samples on 2 devices, then on 4, 2 again, 16, 8, 2 and 1 on 2.
    assert plan.predicted.iteration_s == pytest.approx(24)
    assert seconds == pytest.approx(
        {
            "one node more": 12,
            "links of twice the speed": 24,
            "four times the batch": 96,
            "twice the batch": 48,
            "half the batch": 12,
            "a quarter of the batch": 12,
        }
    )
    # Two samples or more keep both devices busy: no batch is better than the plan's own.
    best = best_batch(plan, list(found.values())).text
    assert best.startswith("the plan's own batch, 0.167 samples/s, of 5 tried")
    assert found["one node less"].plan is None
    assert replan_reason(plan, found["one node less"]).text.startswith("no plan: --devices 0")
    assert "(+100.0%)" in replan_reason(plan, found["one node more"]).text


def test_a_batch_that_cannot_be_halved_is_one_line(tmp_path: Path) -> None:
    given = chain(1)
    task, plan, _path = solved(tmp_path, given, batch=1, solver="colocated")
    found = replans(
        plan,
        profile=given,
        workload=task,
    )
    half = next(r for r in found if r.change == "half the batch")
    assert half.plan is None
    assert half.why
    assert "\n" not in half.why


def test_the_lines_say_the_plan_in_figures(tmp_path: Path) -> None:
    given = chain(3)
    _, plan, path = solved(tmp_path, given, batch=4, solver="convex", top=4)
    simulation = simulate_plan(plan, path)
    reasons = explain(plan, given, simulation, part_effects(plan, given))
    by_topic = {reason.topic: reason.text for reason in reasons}
    assert len(by_topic) == len(reasons) <= 13
    assert f"of {plan.devices} devices" in by_topic["plan"]
    assert "given" in by_topic["plan"]
    # 3 and 9 of 12 seconds a sample.
    assert "25.0% of the work" in by_topic["vision"]
    assert "75.0% of the work" in by_topic["llm"]
    assert "if llm took half the time" in by_topic["binds"]
    assert f"{plan.solver.gap:.2%}" in by_topic["bound"]
    assert "% waiting" in by_topic["bound"]


def test_the_command_has_words_and_data(tmp_path: Path) -> None:
    _, plan, path = solved(tmp_path, chain(2))
    done = call("mmplan", "explain", path)
    assert done.code == 0, done.err
    assert "binds" in done.out
    document = call("mmplan", "explain", path, "--json").document
    assert {effect["part"] for effect in document["effects"]} >= {"vision", "llm"}
    assert document["replans"] == []
    (path.parent / plan.profile.path).unlink()
    done = call("mmplan", "explain", path)
    assert done.code == 2
    assert "--profile" in done.err


def test_a_profile_without_a_module_of_the_plan_is_refused(tmp_path: Path) -> None:
    _, plan, _ = solved(tmp_path, chain(2))
    other = profile({"vision": module_profile()}, 2)
    with pytest.raises(InvalidInputError, match="llm"):
        part_effects(plan, other)
