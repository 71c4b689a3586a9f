"""The planner: plans are sound, their predictions meet the formula, and errors say what to do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning import measured_trials
from mmplan.planning.candidate_plans import num_forwards
from mmplan.planning.neighbours.best_first import Neighbours
from mmplan.planning.neighbours.search import NeighbourSearch
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_graph, compile_plan
from mmplan.program.instructions import Compute, Op
from mmplan.program.symmetry_classes import lower_plan
from mmplan.schema.base import file_sha256
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from tests.programs import in_flight, loss, make_plan, unit
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_order import shared_plans

LOSS_POINTS = {"points": [{"samples": 1, "forward_s": 1.0, "backward_s": 1.0}]}


def check_plan(plan: Plan, memory_bytes: float) -> None:
    """Everything that must hold of any plan on free links."""
    assert plan_faults(plan) == []
    assert check_program(compile_plan(plan)) == []
    assert plan.predicted.iteration_s <= plan.solver.objective_s * (1 + 1e-9)
    solver = plan.solver
    assert solver.formula_bound_s <= solver.objective_s
    assert solver.formula_gap == pytest.approx(solver.objective_s / solver.formula_bound_s - 1)
    assert max(plan.predicted.memory_bytes) <= memory_bytes
    used = {rank for unit in plan.units for rank in unit.all_ranks}
    assert set(plan.solver.idle_ranks) == set(range(plan.devices)) - used


def random_job(rng: random.Random, *, chained: bool) -> tuple[Workload, Profile]:
    """Up to three modules, pinned, frozen in whole or in part, with little or much memory."""
    names = "abc"[: rng.randint(1, 3)]
    modules: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        frozen = rng.choice([False, False, False, True, ((0, 1),)])
        spec: dict[str, Any] = {"frozen": frozen if i else False, "plan": {}}
        if rng.random() < 0.2:
            spec["plan"]["dp"] = rng.randint(1, 3)
        if rng.random() < 0.2:
            spec["plan"]["microbatch"] = rng.randint(1, 3)
        if chained and i and rng.random() < 0.7:
            spec["inputs"] = [rng.choice(names[:i]), f"{name}_data"]
        modules[name] = spec
    sync_batch, rounds = rng.choice([4, 6, 8, 18, 22]), rng.randint(1, 3)
    losses = {"own": {"factory": "x:y", "inputs": list(names)}}
    job = workload(
        modules,
        batch=rounds * sync_batch,
        sync_batch=sync_batch,
        losses=losses if chained and rng.random() < 0.3 else None,
    )
    towers = {
        name: module_profile(
            rng.choice([1, 2, 0.5]),
            rng.choice([1, 2, 3]),
            fixed_s=rng.choice([0, 0, 0.3]),
            blocks=rng.choice([2, 3, 4]),
            tp=rng.choice([None, {1: 1.0, 2: 1.7}]),
            parameters=rng.choice([0, 1]),
            activation_bytes=rng.choice([0, 1, 1]),
        )
        for name in names
    }
    costs = profile(
        towers,
        rng.randint(1, 9),
        memory_bytes=rng.choice([1e12, 20.0, 30.0, 60.0]),
        losses=rng.choice([None, {"contrastive": LOSS_POINTS}]),
    )
    return job, costs


@pytest.mark.parametrize("chained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_random_workloads_give_sound_plans_never_above_the_formula(
    tmp_path: Path, chained: bool
) -> None:
    rng = random.Random(5 + chained)
    outcomes: Counter[str] = Counter()
    for _ in range(12):
        job, costs = random_job(rng, chained=chained)
        solver, top = rng.choice(["distmm", "auto", "colocated"]), rng.choice([1, 4])
        try:
            plan = run_solve(tmp_path, job, costs, solver=solver, top=top)
        except InfeasibleError:
            outcomes["infeasible"] += 1
            continue
        outcomes[plan.solver.name] += 1
        check_plan(plan, costs.cluster.device.memory_bytes)
    assert min(outcomes[key] for key in ("distmm", "colocated", "infeasible")) >= 1


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("frozen", [False, True])
def test_prediction_meets_the_formula_with_equal_stages(
    tmp_path: Path, rounds: int, pp: int, frozen: bool
) -> None:
    """Equal stages and micro-batches, free links: 1%, here to rounding."""
    towers = {"a": module_profile(2, 4), "b": module_profile(1, 3)}
    for tower in towers.values():
        for point in tower["points"]:
            point["backward_input_s"] = point["backward_s"]
    pins = {"pp": pp, "dp": 2, "tp": 1, "microbatch": 2}
    job = workload(
        {"a": {"plan": pins}, "b": {"plan": pins, "frozen": frozen}},
        batch=16 * rounds,
        sync_batch=16,
    )
    costs = profile(towers, 4 * pp, losses={"contrastive": LOSS_POINTS})
    plan = run_solve(tmp_path, job, costs, solver="distmm", top=1)
    assert plan.predicted.iteration_s == pytest.approx(plan.solver.objective_s, rel=1e-9)
    assert plan.solver.formula_gap == pytest.approx(0, abs=1e-12)


def test_programs_hold_the_micro_batches_that_memory_was_planned_for(tmp_path: Path) -> None:
    costs = profile({"a": module_profile(activation_bytes=1.0)}, 4, memory_bytes=7 / 4 + 1e-9)
    pins = {"pp": 4, "dp": 1, "microbatch": 1, "split_backward": False}
    job = workload({"a": {"plan": pins}}, batch=12, sync_batch=4)
    plan = run_solve(tmp_path, job, costs)
    held = in_flight(compile_plan(plan))
    assert [held[rank, rank] for rank in range(4)] == [7, 6, 5, 4]
    assert plan.predicted.memory_bytes == pytest.approx((7 / 4, 6 / 4, 5 / 4, 4 / 4))
    assert plan.solver.largest_sync_batch == {"contrastive": 4}


def test_largest_sync_batch_fits_and_one_more_micro_batch_does_not(tmp_path: Path) -> None:
    costs = profile(
        {"a": module_profile(activation_bytes=1.0), "b": module_profile(activation_bytes=2.0)},
        4,
        memory_bytes=40.0,
    )
    pins = {"pp": 1, "dp": 2, "microbatch": 4}
    modules = {"a": {"plan": pins}, "b": {"plan": pins}}

    def solved(sync_batch: int) -> Plan:
        job = workload(modules, batch=2 * sync_batch, sync_batch=sync_batch)
        return run_solve(tmp_path, job, costs, solver="distmm")

    # b: 40 bytes hold 5 micro-batches of 8 bytes, on 2 replicas.
    assert solved(8).solver.largest_sync_batch == {"contrastive": 40}
    assert solved(40).solver.largest_sync_batch == {"contrastive": 40}
    with pytest.raises(InfeasibleError, match="module b needs 48 B"):
        solved(48)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_auto_colocates_where_devices_are_fewer_than_modules(tmp_path: Path, devices: int) -> None:
    names = "abcd"
    costs = profile({name: module_profile() for name in names}, devices)
    job = workload({name: {} for name in names}, batch=8, sync_batch=4)
    plan = run_solve(tmp_path, job, costs)
    check_plan(plan, 1e12)
    assert {rank for unit in plan.units for rank in unit.all_ranks} == set(range(devices))
    assert any("distmm does not apply" in note for note in plan.solver.notes)
    # All modules' work, on the slowest replica's share.
    together_s = 2 * 4 * 3.0 * -(-4 // devices)
    if plan.solver.name == "colocated":
        assert {unit.all_ranks for unit in plan.units} == {tuple(range(devices))}
        assert plan.predicted.iteration_s == pytest.approx(together_s)
    else:
        # 4 samples do not part into 3: slices of a module each fill what the others leave.
        assert (devices, plan.solver.name) == (3, "mpsp")
        assert plan.predicted.iteration_s < 0.7 * together_s


def test_auto_keeps_the_fastest(tmp_path: Path) -> None:
    """Fixed costs make many small replicas slow: then modules apart win, otherwise together."""
    for fixed_s, winner in ((0.0, "colocated"), (20.0, "distmm")):
        tower = module_profile(fixed_s=fixed_s)
        job = workload({"a": {}, "b": {}, "c": {}}, batch=10)
        costs = profile({"a": tower, "b": tower, "c": tower}, 4)
        times = {
            name: run_solve(tmp_path, job, costs, solver=name).predicted.iteration_s
            for name in ("distmm", "colocated", "mpsp", "auto")
        }
        assert min(("distmm", "colocated"), key=times.__getitem__) == winner
        # Three towers share four devices unevenly: waves of slices are faster than either.
        assert times["auto"] == times["mpsp"] < times[winner]


def test_auto_takes_the_plainer_of_plans_that_are_as_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = module_profile()
    job = workload({"a": {}, "b": {}, "c": {}}, batch=10)
    costs = profile({"a": tower, "b": tower, "c": tower}, 4)
    waves, plain = (run_solve(tmp_path, job, costs, solver=s) for s in ("mpsp", "colocated"))
    ratio = plain.predicted.iteration_s / waves.predicted.iteration_s
    assert waves.waves
    assert ratio > measured_trials.AS_FAST

    # Changes of both would lie between them.
    def unchanged(_: NeighbourSearch, starts: Sequence[Plan]) -> list[Neighbours]:
        return [Neighbours(plan=starts[0], start=starts[0])]

    monkeypatch.setattr(NeighbourSearch, "run", unchanged)
    for limit, expected in ((0.999 * ratio, waves), (1.001 * ratio, plain)):
        monkeypatch.setattr(measured_trials, "AS_FAST", limit)
        plan = run_solve(tmp_path, job, costs)
        assert (plan.solver.name, bool(plan.waves)) == (expected.solver.name, bool(expected.waves))
        said = [note for note in plan.solver.notes if "less time; this plan has no waves" in note]
        assert len(said) == (expected is plain)
        assert all(f"{1 - 1 / ratio:.2%}" in note and note.startswith("mpsp: ") for note in said)
    first = plan.solver.runners_up[0]
    assert first.iteration_s == waves.predicted.iteration_s


def test_of_several_tasks_auto_takes_the_fastest() -> None:
    def finalist(seconds: float, units: int, tasks: int) -> Any:
        plan = SimpleNamespace(
            predicted=SimpleNamespace(iteration_s=seconds),
            units=range(units),
            waves=(),
            tasks=range(tasks),
        )
        return SimpleNamespace(plan=plan, label=f"{units} units"), plan

    for tasks, best in ((1, 2), (2, 3)):
        pairs = [finalist(1.0, 3, tasks), finalist(1.001, 2, tasks), finalist(1.003, 1, tasks)]
        found, notes = measured_trials.plainest_first(pairs)
        assert len(found[0][0].plan.units) == best
        assert sorted(map(id, found)) == sorted(map(id, pairs))
        said = ["3 units takes 0.10% less time; this plan has fewer units"]
        assert notes == (said if tasks == 1 else [])


def test_auto_finds_the_plan_that_waves_alone_have(tmp_path: Path) -> None:
    """Four towers on three devices: too much for one to hold all, too few for one each."""
    towers = {
        "a": module_profile(4, 1, blocks=2, parameters=4, activation_bytes=4),
        "b": module_profile(4, 2, blocks=4, parameters=4, activation_bytes=4),
        "c": module_profile(2, 1, blocks=2, parameters=2, activation_bytes=1),
        "d": module_profile(1, 2, blocks=2, parameters=2, activation_bytes=1),
    }
    costs = profile(towers, 3, memory_bytes=120)
    job = workload({name: {} for name in towers}, batch=8, sync_batch=8)
    for solver in ("distmm", "colocated"):
        with pytest.raises(InfeasibleError):
            run_solve(tmp_path, job, costs, solver=solver)
    waves = run_solve(tmp_path, job, costs, solver="mpsp")
    plan = run_solve(tmp_path, job, costs)
    assert plan.solver.name == "neighbours"
    assert plan.predicted.iteration_s < waves.predicted.iteration_s
    check_plan(plan, 120)


def test_auto_plans_what_takes_no_time(tmp_path: Path) -> None:
    """mpsp cuts by times and has none here; the others plan on."""
    costs = profile({"a": module_profile(0.0, 0.0), "b": module_profile()}, 3)
    plan = run_solve(tmp_path, workload({"a": {}, "b": {}}, batch=8), costs)
    check_plan(plan, 1e12)
    with pytest.raises(InvalidInputError, match=r"the forward of default\.a takes none"):
        run_solve(tmp_path, workload({"a": {}, "b": {}}, batch=8), costs, solver="mpsp")


def test_colocated_modules_share_the_memory(tmp_path: Path) -> None:
    """Both fit alone, with any micro-batches; together only a smaller sync batch does."""
    tower = module_profile(activation_bytes=1.0, parameters=0.25)
    for memory, fits in ((16.0, True), (15.0, False)):
        costs = profile({"a": tower, "b": tower}, 1, memory_bytes=memory)
        job = workload({"a": {}, "b": {}}, batch=4)
        if fits:
            check_plan(run_solve(tmp_path, job, costs), memory)
            continue
        with pytest.raises(InfeasibleError, match=r"16 B on each device.* 1 B missing"):
            run_solve(tmp_path, job, costs, solver="colocated")


@pytest.mark.parametrize(
    ("memory", "sizes", "step_s"), [(8.0, [2, 2, 1, 1], 18 - 2 / 3), (7.0, [1, 1, 2, 2], 18.0)]
)
def test_heavy_stages_come_early_where_memory_holds_them(
    tmp_path: Path, memory: float, sizes: list[int], step_s: float
) -> None:
    """Stage 1 of 4 runs two forwards of a third while the first sample comes back."""
    tower = module_profile(1, 2, blocks=6, activation_bytes=6)
    costs = profile({"a": tower}, 4, memory_bytes=memory)
    pins = {"plan": {"tp": 1, "pp": 4, "dp": 1, "microbatch": 1}}
    own = {"own": {"factory": "x:y", "inputs": ["a"]}}
    job = workload({"a": pins}, batch=16, losses=own)
    plan = run_solve(tmp_path, job, costs, solver="megatron")
    assert [b - a for a, b in plan.units[0].blocks] == sizes
    assert plan.predicted.iteration_s == pytest.approx(step_s)
    assert max(plan.predicted.memory_bytes) <= memory


def test_top_1_is_the_formulas_optimum_and_more_never_predict_worse(tmp_path: Path) -> None:
    towers = {"a": module_profile(1, 3, blocks=3), "b": module_profile(2, 1, fixed_s=0.5)}
    job, costs = workload({"a": {}, "b": {}}, batch=22), profile(towers, 7)
    one, many = (run_solve(tmp_path, job, costs, solver="distmm", top=k) for k in (1, 8))
    assert one.solver.objective_s == one.solver.formula_bound_s == many.solver.formula_bound_s
    assert many.predicted.iteration_s <= one.predicted.iteration_s
    assert 1 <= len(many.solver.runners_up) <= 7
    assert one.solver.runners_up == ()


ROUNDS = make_plan(
    unit("a", dp=4, tp=2, k=2),
    unit("b", "a", dp=4, k=2),
    losses=[loss("clip", "b", "a", sync_batch=16)],
    batch=48,
)


@settings(max_examples=40, deadline=None)
@example(ROUNDS)
@given(shared_plans(copies=2))
def test_forwards_are_counted_before_anything_is_compiled(plan: Plan) -> None:
    lowered = lower_plan(plan)
    program = compile_graph(plan, lowered.simulated_graph, lowered.orders)
    rows = program.instructions
    computes = [x for row in rows for x in row if isinstance(x, Compute)]
    assert num_forwards(lowered) == sum(x.op is Op.FORWARD for x in computes)


def test_sharded_losses_and_real_links_keep_the_bound_below(tmp_path: Path) -> None:
    links = {"latency_s": 0.01, "bandwidth_bytes_per_s": 50.0}
    towers = {
        name: module_profile(parameters=5, output_bytes_per_sample=2, boundary_bytes_per_sample=3)
        for name in ("a", "b")
    }
    costs = profile(
        towers, 8, per_node=4, inter=links, intra=links, losses={"contrastive": LOSS_POINTS}
    )
    job = workload({"a": {}, "b": {}}, batch=24, sync_batch=12)
    plan = run_solve(tmp_path, job, costs, solver="distmm")
    assert plan_faults(plan) == []
    assert 0 < plan.solver.formula_bound_s <= plan.solver.objective_s
    assert plan.predicted.communication_fraction > 0


def test_a_slow_gather_is_hidden_behind_forwards_of_the_next_sync_batch(tmp_path: Path) -> None:
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 16.0}
    towers = {name: module_profile(output_bytes_per_sample=1) for name in ("a", "b")}
    costs = profile(towers, 2, intra=slow, inter=slow)
    pins = {"plan": {"dp": 1, "pp": 1, "microbatch": 2}}
    job = workload({"a": pins, "b": pins}, batch=24, sync_batch=8)
    plan = run_solve(tmp_path, job, costs, solver="distmm")
    assert plan_faults(plan) == []
    assert {unit.schedule.sync_lead for unit in plan.units} == {1}
    # Three gathers of 16 bytes, half of them from the other rank; the last one hides behind
    # the backwards that the lead leaves over.
    assert plan.solver.objective_s == pytest.approx(24 * 3 + 3 * 0.5)
    assert plan.predicted.iteration_s == pytest.approx(24 * 3)


def test_sizes_beyond_the_profile_are_named_for_this_plan_only(tmp_path: Path) -> None:
    costs = profile({"a": module_profile()}, 1)
    for size, beyond in ((2, False), (4, True)):
        job = workload({"a": {"plan": {"microbatch": size}}}, batch=8)
        notes = " ".join(run_solve(tmp_path, job, costs).solver.notes)
        assert ("a at tp 1: micro-batch 4 (measured from 1 to 2)" in notes) == beyond


def test_left_over_devices_are_named(tmp_path: Path) -> None:
    costs = profile({"a": module_profile(), "b": module_profile()}, 7)
    pins = {"plan": {"dp": 2, "pp": 1}}
    plan = run_solve(tmp_path, workload({"a": pins, "b": pins}, batch=8), costs, solver="distmm")
    assert plan.solver.idle_ranks == (4, 5, 6)
    assert any("3 of 7 devices stay idle (ranks 4-6)" in note for note in plan.solver.notes)


def test_the_plan_names_its_files_relative_to_itself(tmp_path: Path) -> None:
    job, costs = workload({"a": {}}, batch=4), profile({"a": module_profile()}, 2)
    plan = run_solve(tmp_path, job, costs)
    assert (plan.workload.path, plan.profile.path) == ("w.json", "p.json")
    assert plan.workload.sha256 == file_sha256(tmp_path / "w.json")
    assert plan.solver.seconds > 0


def test_a_frozen_tower_changes_who_gets_devices(tmp_path: Path) -> None:
    """Without its backward, and with its forward before the sync only, it needs fewer."""
    costs = profile({"a": module_profile(), "b": module_profile()}, 8)

    def degrees(frozen: bool) -> int:
        job = workload({"a": {}, "b": {"frozen": frozen}}, batch=24, sync_batch=8)
        plan = run_solve(tmp_path, job, costs, solver="distmm")
        check_plan(plan, 1e12)
        return len(plan.unit("b").all_ranks)

    assert degrees(frozen=True) < degrees(frozen=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"solver": "guess"},
            "--solver guess: this version has auto, distmm, convex, colo",
        ),
        ({"tasks": ["x"]}, "--tasks x: the workload has default"),
        ({"top": 0}, "--top 0"),
        ({"devices": 9}, "--devices 9: cluster test has 2"),
        ({"solver": "distmm", "method": "guess"}, "--method guess"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    job, costs = workload({"a": {}}, batch=4), profile({"a": module_profile()}, 2)
    with pytest.raises(InvalidInputError, match=message):
        run_solve(tmp_path, job, costs, **options)


def test_a_profile_without_a_module_is_refused(tmp_path: Path) -> None:
    job, costs = workload({"a": {}, "b": {}}, batch=4), profile({"a": module_profile()}, 2)
    with pytest.raises(InvalidInputError, match="profile test has no module 'b'"):
        run_solve(tmp_path, job, costs)


def test_nothing_fits_says_what_every_solver_lacks(tmp_path: Path) -> None:
    costs = profile({"a": module_profile(parameters=9, blocks=1)}, 2, memory_bytes=16.0)
    with pytest.raises(
        InfeasibleError,
        match=r"distmm, mpsp: module a needs 144 B.*; convex: plans .*; colocated: ",
    ) as caught:
        run_solve(tmp_path, workload({"a": {}}, batch=4), costs)
    assert "--solver auto" not in str(caught.value.hint)


def test_solving_loads_no_heavy_module() -> None:
    import subprocess
    import sys

    code = (
        "import sys, mmplan.planning.planner;"
        "print([m for m in ('torch', 'scipy', 'cvxpy', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def random_coupled_job(rng: random.Random) -> tuple[Workload, Profile]:
    """Two cross-sample losses with a common module, or a contrastive captioner."""

    def synced(inputs: list[str], sync_batch: int) -> dict[str, Any]:
        return {
            "factory": "x:y",
            "inputs": inputs,
            "cross_sample": True,
            "sync_batch": sync_batch,
        }

    modules: dict[str, dict[str, Any]] = {"a": {"frozen": rng.random() < 0.3}, "b": {}, "c": {}}
    if rng.random() < 0.5:
        losses = {
            "one": synced(["a", "b"], 4),
            "two": synced(["b", "c"], rng.choice([4, 6])),
        }
    else:
        modules["c"]["inputs"] = ["a", "b"]
        losses = {
            "one": synced(["a", "b"], rng.choice([4, 12])),
            "caption": {"factory": "x:y", "inputs": ["c", "a_data"]},
        }
    job = workload(modules, batch=12 * rng.randint(1, 2), losses=losses)
    towers = {
        name: module_profile(
            rng.choice([1, 2]),
            rng.choice([2, 3]),
            fixed_s=rng.choice([0, 0.5]),
            parameters=1,
            activation_bytes=1,
        )
        for name in "abc"
    }
    costs = profile(
        towers,
        rng.randint(1, 9),
        memory_bytes=rng.choice([1e9, 60.0, 100.0]),
        losses=rng.choice([None, dict.fromkeys(losses, LOSS_POINTS)]),
    )
    return job, costs


@pytest.mark.slow
def test_coupled_losses_and_captioners_give_sound_plans(tmp_path: Path) -> None:
    rng = random.Random(3)
    solved: Counter[str] = Counter()
    for _ in range(24):
        job, costs = random_coupled_job(rng)
        try:
            plan = run_solve(tmp_path, job, costs, solver=rng.choice(["distmm", "auto"]), top=3)
        except InfeasibleError:
            continue
        solved[plan.solver.name] += 1
        check_plan(plan, costs.cluster.device.memory_bytes)
    assert min(solved["distmm"], solved["colocated"]) >= 3


def test_colocation_equals_brute_force(tmp_path: Path) -> None:
    """Every pair of micro-batch sizes of two modules that share the memory of all devices."""
    rng = random.Random(9)
    infeasible = 0
    for _ in range(60):
        sync_batch, rounds = rng.choice([4, 6, 9]), rng.randint(1, 2)
        devices, memory = rng.randint(1, 4), rng.choice([4.0, 6.0, 9.0, 20.0])
        towers = {
            name: (rng.choice([1, 2]), rng.choice([0, 0.5, 2]), rng.choice([0, 0.5, 1]))
            for name in "ab"
        }
        share = -(-sync_batch // devices)
        options = []
        for forward_s, fixed_s, held in towers.values():
            sizes = range(1, share + 1)
            options.append(
                [
                    (
                        rounds * -(-share // n) * (2 * fixed_s + n * 3 * forward_s),
                        -(-share // n) * n * held,
                    )
                    for n in sizes
                    if -(-share // -(-share // n)) == n
                ]
            )
        values = [x[0] + y[0] for x in options[0] for y in options[1] if x[1] + y[1] <= memory]
        job = workload({"a": {}, "b": {}}, batch=rounds * sync_batch, sync_batch=sync_batch)
        costs = profile(
            {
                name: module_profile(f, 2 * f, fixed_s=fixed_s, activation_bytes=held)
                for name, (f, fixed_s, held) in towers.items()
            },
            devices,
            memory_bytes=memory,
        )
        if not values:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                run_solve(tmp_path, job, costs, solver="colocated")
            continue
        plan = run_solve(tmp_path, job, costs, solver="colocated", top=1)
        assert plan.solver.objective_s == pytest.approx(min(values))
        assert plan.solver.formula_bound_s == pytest.approx(min(values))
        assert plan.predicted.iteration_s <= plan.solver.objective_s * (1 + 1e-9)
    assert 3 <= infeasible <= 40
