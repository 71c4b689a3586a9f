"""Options, stages, shares and the whole DistMM solver against oracles."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import PlannedTraining, Unit
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Pins, Workload, resolve_tasks
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.partitioner import cut_everywhere
from mmplan.solvers.placement import place_modules
from mmplan.solvers.problem import NotApplicableError, Request, Solution
from mmplan.solvers.sample_split import cut, microbatch_sizes, split_evenly
from tests.solving import module_profile, profile, run_solve, workload


def solve(
    job: Workload, costs: Profile, *, top: int = 1, method: str | None = None, budget_s: float = 5
) -> Solution:
    training = PlannedTraining(zero=job.train.zero)
    return solve_distmm(
        Request(
            workload=job,
            tasks=resolve_tasks(job),
            costs=CostModel(costs, costs.cluster, training),
            cluster=costs.cluster,
            devices=costs.cluster.num_devices,
            method=method,
            top=top,
            budget_s=budget_s,
        )
    )


def shapes(solution: Solution) -> dict[str, tuple[int, int, int]]:
    return {u.module: (u.dp, u.pp, u.tp) for u in solution.candidates[0].units}


# --- the whole solver against brute force -------------------------------------------------


def brute_force(case: dict[str, Any]) -> float | None:
    """Least formula value over every tp, pp, dp and micro-batch, from the numbers alone.

    Knows the profile's rules (equal blocks, time linear in the micro-batch, points at one
    block size) and the formula; shares no code with the solver.
    """
    options = [_every_option(case, module) for module in case["modules"]]
    values = [
        max(o[1] for o in chosen)
        + (case["rounds"] - 1) * max(o[2] for o in chosen)
        + max(o[3] for o in chosen)
        for chosen in itertools.product(*options)
        if sum(o[0] for o in chosen) <= case["devices"]
    ]
    return min(values, default=None)


def _every_option(case: dict[str, Any], module: dict[str, Any]) -> list[tuple[float, ...]]:
    samples, rounds, options = case["sync_batch"], case["rounds"], []
    blocks, frozen = module["blocks"], module["frozen"]
    for tp, speed in module["tp"].items():
        for pp in range(1, blocks + 1):
            most = min(case["devices"] // (tp * pp), samples)
            for dp in range(1, most + 1):
                if case["even"] and samples % dp:
                    continue
                share = math.ceil(samples / dp)
                for size in {math.ceil(share / math.ceil(share / s)) for s in _sizes(share)}:
                    k = math.ceil(share / size)
                    largest = math.ceil(blocks / pp) / blocks
                    f = largest * (module["fixed"] + size * module["forward"] / speed)
                    b = largest * (module["fixed"] + size * module["backward"] / speed)
                    b = 0.0 if frozen else b
                    held = size * module["activation"] / tp
                    order = _order(case, module, tp, pp, k, held, rounds)
                    if order is None:
                        continue
                    cycle = k * (f + b) if order == "sync" else (k + pp - 1) * (f + b)
                    options.append((tp * pp * dp, (k + pp - 1) * f, cycle, (k + pp - 1) * b))
    return options


def _sizes(share: int) -> set[int]:
    return {math.ceil(share / k) for k in range(1, 9)} | {2**i for i in range(10) if 2**i <= share}


def _order(
    case: dict[str, Any], module: dict[str, Any], tp: int, pp: int, k: int, held: float, rounds: int
) -> str | None:
    """Which order's micro-batches in flight fit beside the parameters."""
    fixed = module["parameters"] * (4 if module["frozen"] else 16) / tp
    for order in ("sync", "gpipe"):
        flights = [min(rounds * k, k + pp - 1 - p) if order == "sync" else k for p in range(pp)]
        active = 0 if module["frozen"] else held * max(flights)
        if (fixed + active) / pp <= case["memory"]:
            return order
    return None


def random_case(rng: random.Random) -> dict[str, Any]:
    modules = [
        {
            "name": "abc"[i],
            # At most two: how three are cut in two is the partitioner's free choice.
            "blocks": rng.choice([1, 2]),
            "frozen": bool(i) and rng.random() < 0.3,
            "forward": rng.choice([1.0, 2.0, 0.5]),
            "backward": rng.choice([1.0, 2.0, 4.0]),
            "fixed": rng.choice([0.0, 0.25]),
            "tp": rng.choice([{1: 1.0}, {1: 1.0, 2: 1.5}]),
            "parameters": rng.choice([0.0, 1.0]),
            "activation": rng.choice([0.0, 1.0]),
        }
        for i in range(rng.choice([1, 2, 2, 3]))
    ]
    return {
        "modules": modules,
        "devices": rng.randint(1, 7),
        "rounds": rng.randint(1, 3),
        "sync_batch": rng.choice([3, 4, 6, 7]),
        "memory": rng.choice([1e9, 30.0, 20.0, 12.0]),
        "even": rng.random() < 0.4,
    }


def built(case: dict[str, Any]) -> tuple[Workload, Profile]:
    job = workload(
        {m["name"]: {"frozen": m["frozen"]} for m in case["modules"]},
        batch=case["rounds"] * case["sync_batch"],
        sync_batch=case["sync_batch"],
    )
    costs = profile(
        {
            m["name"]: module_profile(
                m["forward"],
                m["backward"],
                fixed_s=m["fixed"],
                blocks=m["blocks"],
                tp=m["tp"],
                parameters=m["parameters"],
                activation_bytes=m["activation"],
            )
            for m in case["modules"]
        },
        case["devices"],
        memory_bytes=case["memory"],
    )
    for m in costs.modules.values():
        # Input gradients cost nothing, so that the first stage costs what the others do.
        for point in m.points:
            object.__setattr__(point, "backward_input_s", 0.0)
    return job, costs


def test_equals_brute_force_on_random_workloads() -> None:
    rng = random.Random(11)
    infeasible = 0
    for number in range(150):
        case = random_case(rng)
        want = brute_force(case)
        job, costs = built(case)
        method = "even" if case["even"] else "exact"
        if want is None:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                solve(job, costs, method=method)
            continue
        got = solve(job, costs, method=method)
        assert got.candidates[0].objective_s == pytest.approx(want, rel=1e-12), (number, case)
        assert got.formula_bound_s == pytest.approx(want, rel=1e-12)
    assert 12 < infeasible < 90


# --- what a person expects ----------------------------------------------------------------


def test_the_papers_shares() -> None:
    """64 devices: text 4 replicas of 18 samples, vision 3 of 24, three sync batches of 24."""
    costs = profile(
        {
            "vision": module_profile(8, 16, blocks=8, tp={8: 8.0}, parameters=16e9 / 8),
            "text": module_profile(1.3, 2.6, blocks=8, tp={4: 2.0}, parameters=4e9),
        },
        64,
        per_node=8,
        memory_bytes=16e9,
    )
    job = workload(
        {"vision": {"plan": {"pp": 2, "tp": 8}}, "text": {"plan": {"pp": 1, "tp": 4}}},
        batch=72,
        sync_batch=24,
    )
    got = solve(job, costs)
    assert shapes(got) == {"vision": (3, 2, 8), "text": (4, 1, 4)}
    units = {u.module: u for u in got.candidates[0].units}
    assert units["text"].samples == (18,) * 4
    assert units["vision"].samples == (24,) * 3
    assert [sum(sizes) for sizes in units["text"].microbatches] == [6] * 4


def test_uneven_shares_use_devices_that_equal_ones_leave_idle() -> None:
    costs = profile({"a": module_profile(), "b": module_profile()}, 6)
    job = workload({"a": {}, "b": {}}, batch=8)
    uneven, even = (solve(job, costs, method=m) for m in ("exact", "even"))
    assert shapes(uneven) == {"a": (3, 1, 1), "b": (3, 1, 1)}
    assert uneven.candidates[0].objective_s < even.candidates[0].objective_s
    assert sorted(uneven.candidates[0].units[0].samples) == [2, 3, 3]


def _with_parameters(parameters: float, devices: int, per_node: int) -> Profile:
    tower = module_profile(blocks=8, tp={1: 1.0, 2: 1.5, 4: 2.0}, parameters=parameters)
    return profile({"big": tower}, devices, per_node=per_node, memory_bytes=16.0)


@pytest.mark.parametrize(
    ("parameters", "shape"),
    [(1, (1, 1)), (2, (1, 2)), (4, (1, 4)), (8, (2, 4)), (16, (4, 4))],
)
def test_partitioner_takes_one_device_then_tp_then_pp(
    parameters: int, shape: tuple[int, int]
) -> None:
    """At 16 bytes a parameter and 16 bytes a device, each device holds one."""
    costs = _with_parameters(parameters, 16, 4)
    got = solve(workload({"big": {}}, batch=8), costs, method="paper")
    assert shapes(got)["big"][1:] == shape


def test_a_module_too_big_for_all_devices_says_what_is_missing() -> None:
    with pytest.raises(InfeasibleError, match=r"module big needs 32 B .*pp 8.* 16 B: 16 B missing"):
        solve(workload({"big": {}}, batch=8), _with_parameters(64, 32, 4))


def test_fewer_devices_than_modules_points_to_colocation() -> None:
    costs = profile({"a": module_profile(), "b": module_profile()}, 1)
    with pytest.raises(InfeasibleError, match="2 modules devices of its own") as error:
        solve(workload({"a": {}, "b": {}}, batch=8), costs)
    assert "auto" in (error.value.hint or "")


def test_pins_hold_and_impossible_ones_are_named() -> None:
    costs = profile({"a": module_profile(), "b": module_profile(tp={1: 1.0, 2: 1.5})}, 8)
    pinned = {"a": {"plan": {"dp": [2, 3], "microbatch": 2}}, "b": {"plan": {"tp": 2, "pp": 2}}}
    units = solve(workload(pinned, batch=11), costs).candidates[0].units
    assert units[0].dp in (2, 3)
    assert all(size == 2 for sizes in units[0].microbatches for size in sizes[:-1])
    assert (units[1].tp, units[1].pp) == (2, 2)
    with pytest.raises(InfeasibleError, match=r"module a: no tp and pp fit its plan \(tp 4\)"):
        solve(workload({"a": {"plan": {"tp": 4}}, "b": {}}, batch=8), costs)
    with pytest.raises(NotApplicableError, match=r"modules\.a\.plan\.vpp: distmm does not"):
        solve(workload({"a": {"plan": {"vpp": 2}}, "b": {"plan": {"vpp": 1}}}, batch=8), costs)
    with pytest.raises(InfeasibleError, match="module a: no number of replicas"):
        solve(workload({"a": {"plan": {"dp": 40}}, "b": {}}, batch=8), costs)


def test_modules_with_common_parameters_get_one_tp() -> None:
    """The fast degrees differ: the copy is pinned to one device a replica."""
    tower = module_profile(tp={1: 1.0, 2: 1.9})
    costs = profile({"a": tower, "b": tower}, 8)
    got = solve(workload({"a": {}, "b": {"share": "a", "plan": {"tp": 2}}}, batch=2), costs, top=4)
    for candidate in got.candidates:
        assert {unit.tp for unit in candidate.units} == {2}


def test_a_degree_that_common_parameters_ask_for_is_no_worse_than_none() -> None:
    """Alone, a would never split: two replicas of one device are always faster."""
    tower = module_profile(tp={1: 1.0, 2: 1.5})
    costs = profile({"a": tower, "b": tower}, 4)
    job = workload({"a": {}, "b": {"share": "a", "plan": {"tp": 2}}}, batch=8)
    assert shapes(solve(job, costs)) == {"a": (1, 1, 2), "b": (1, 1, 2)}


# --- with components switched off ---------------------------------------------------------


def uneven_towers(devices: int) -> Profile:
    return profile(
        {
            "a": module_profile(3.0, 5.0, blocks=4, tp={1: 1.0, 2: 1.7}),
            "b": module_profile(0.7, 1.6, blocks=4, tp={1: 1.0, 2: 1.8}),
        },
        devices,
    )


def test_one_grid_is_the_best_of_the_grids_that_all_modules_are_pinned_to() -> None:
    costs = uneven_towers(6)
    values: list[float] = []
    for tp, pp in itertools.product((1, 2), (1, 2, 3)):
        pins = {"plan": {"tp": tp, "pp": pp}}
        job = workload({"a": pins, "b": pins}, batch=12, sync_batch=6)
        with contextlib.suppress(InfeasibleError):
            values.append(solve(job, costs).candidates[0].objective_s)
    got = solve(workload({"a": {}, "b": {}}, batch=12, sync_batch=6), costs, method="one-grid")
    a, b = got.candidates[0].units
    assert (a.tp, a.pp) == (b.tp, b.pp)
    assert got.candidates[0].objective_s == pytest.approx(min(values), rel=1e-12)


def test_same_devices_is_the_best_of_halves() -> None:
    plain = {"plan": {"tp": 1, "pp": 1}}
    halves = {"plan": {"tp": 1, "pp": 1, "dp": [1, 2, 3]}}
    want = solve(workload({"a": halves, "b": halves}, batch=12), uneven_towers(7))
    got = solve(
        workload({"a": plain, "b": plain}, batch=12), uneven_towers(7), method="same-devices"
    )
    assert got.candidates[0].objective_s == pytest.approx(want.candidates[0].objective_s)
    whole = solve(workload({"a": plain, "b": plain}, batch=12), uneven_towers(7))
    assert whole.candidates[0].objective_s < got.candidates[0].objective_s
    assert shapes(whole)["a"] == (4, 1, 1)  # shares of 3; 5 would not be less
    with pytest.raises(InfeasibleError, match="module a"):
        solve(
            workload({"a": {"plan": {"pp": 4}}, "b": {}}, batch=12),
            uneven_towers(7),
            method="same-devices",
        )


def test_drained_ends_every_sync_batch_before_the_next() -> None:
    """By hand: one module in two stages, two sync batches of 4 samples, f = 0.5, b = 1.

    Interleaved: (K + P - 1)(f + b) + K (f + b) = 5 x 1.5 + 4 x 1.5; drained 10 x 1.5.
    """
    costs = profile({"a": module_profile(blocks=2)}, 2)
    for point in costs.modules["a"].points:
        object.__setattr__(point, "backward_input_s", 0.0)
    job = workload({"a": {"plan": {"pp": 2, "microbatch": 1}}}, batch=8, sync_batch=4)
    whole, drained = (solve(job, costs, method=m).candidates[0] for m in ("exact", "drained"))
    assert (whole.objective_s, drained.objective_s) == (pytest.approx(13.5), pytest.approx(15.0))
    assert drained.units[0].schedule.kind == "gpipe"


@pytest.mark.parametrize(("memory_bytes", "lead", "interval_s"), [(1e9, 2, 3.0), (12.0, 1, 3.75)])
def test_a_longer_lead_hides_messages_where_memory_holds_it(
    tmp_path: Path, memory_bytes: float, lead: int, interval_s: float
) -> None:
    """Four stages of f = 1 and b = 2, messages of half a second, four rounds of 8 micro-batches.

    By hand: 11 f + 3 messages, 3 rounds of 8 paces, 11 b + 3 messages; stage 0 holds
    8 + 3 lead micro-batches. With a lead of 1 four micro-batches take 4 (f + b) + 6 messages.
    """
    wire = {"latency_s": 0.5, "bandwidth_bytes_per_s": 1e300}
    tower = module_profile(4, 8, blocks=4, activation_bytes=4.0)
    costs = profile({"a": tower}, 4, memory_bytes=memory_bytes, intra=wire)
    for point in costs.modules["a"].points:
        # So that the first stage, which has no input gradient, costs what the others do.
        object.__setattr__(point, "backward_input_s", 0.0)
    job = workload({"a": {"plan": {"pp": 4, "dp": 1, "microbatch": 1}}}, batch=32, sync_batch=8)
    plan = run_solve(tmp_path, job, costs, solver="distmm", top=1)
    assert plan.units[0].schedule.lead == lead
    formula_s = 11 * 1 + 3 * 0.5 + 3 * 8 * interval_s + 11 * 2 + 3 * 0.5
    assert plan.solver.objective_s == pytest.approx(formula_s)
    # Between rounds the first pace of a round waits for no message.
    assert plan.predicted.iteration_s == pytest.approx(formula_s, rel=0.02)


def test_memory_that_does_not_hold_the_optimal_order_drains_each_round() -> None:
    costs = profile({"a": module_profile(blocks=2, activation_bytes=1.0)}, 2, memory_bytes=2.0)
    job = workload({"a": {"plan": {"pp": 2, "microbatch": 1}}}, batch=8, sync_batch=4)
    (unit,) = solve(job, costs).candidates[0].units
    # Stage 0 would hold K + 1 = 5 micro-batches of half a byte; a round has 4.
    assert unit.schedule.kind == "gpipe"


def test_several_tasks_and_unknown_methods_are_refused() -> None:
    costs = profile({"a": module_profile(), "b": module_profile()}, 2)
    loss = {"factory": "x:y", "inputs": ["a"]}
    job = workload(
        {"a": {}, "b": {}},
        batch=4,
        losses={"one": loss, "two": {**loss, "inputs": ["b"]}},
        tasks={
            "A": {"modules": ["a"], "losses": ["one"]},
            "B": {"modules": ["b"], "losses": ["two"]},
        },
    )
    with pytest.raises(InvalidInputError, match="distmm plans one task, this workload has A, B"):
        solve(job, costs)
    with pytest.raises(InvalidInputError, match="distmm knows exact, even, paper"):
        solve(workload({"a": {}, "b": {}}, batch=4), costs, method="guess")


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(2, 9), st.integers(2, 12))
def test_one_more_device_and_scaled_times(rounds: int, devices: int, sync_batch: int) -> None:
    job = workload({"a": {}, "b": {}}, batch=rounds * sync_batch, sync_batch=sync_batch)

    def best(count: int, scale: float) -> float:
        towers = {
            "a": module_profile(scale, 2 * scale, tp={1: 1.0, 2: 1.5}),
            "b": module_profile(3 * scale, 2 * scale, fixed_s=scale),
        }
        return solve(job, profile(towers, count)).candidates[0].objective_s

    assert best(devices + 1, 1.0) <= best(devices, 1.0) + 1e-12
    assert best(devices, 4.0) == pytest.approx(4 * best(devices, 1.0))


def test_chains_match_brute_force_over_their_candidates() -> None:
    """Modules in a row: the formula along the path, over all pairs of pinned degrees."""
    costs = profile({"a": module_profile(2, 3), "b": module_profile(1, 2)}, 6)
    loss = {"loss": {"factory": "x:y", "inputs": ["b"]}}
    values = {}
    for dp_a, dp_b in itertools.product(range(1, 6), repeat=2):
        if dp_a + dp_b > 6 or 12 % dp_a or 12 % dp_b:
            continue
        for size_a, size_b in itertools.product((1, 2, 3, 4, 6, 12), repeat=2):
            ka, kb = 12 // dp_a / size_a, 12 // dp_b / size_b
            if ka != kb or ka != int(ka):
                continue
            ramps = 5 * size_a + 3 * size_b
            values[dp_a, dp_b, ka] = ramps + (ka - 1) * (
                max(2 * size_a, size_b) + max(3 * size_a, 2 * size_b)
            )
    pins = {"pp": 1, "dp": [1, 2, 3, 4]}
    job = workload(
        {"a": {"plan": pins}, "b": {"inputs": ["a"], "plan": pins}}, batch=12, losses=loss
    )
    got = solve(job, costs, method="even")
    # Micro-batches that differ cost a wait; none of them may win unless it is cheaper still.
    assert got.candidates[0].objective_s <= min(values.values()) + 1e-9
    assert got.formula_bound_s == pytest.approx(got.candidates[0].objective_s)


def test_without_time_a_chain_still_gets_a_good_plan_and_a_bound() -> None:
    """Budget 0: what balances the modules without their edges, and the first look's bound."""
    tp = {1: 1.0, 2: 1.8, 4: 3.1}
    costs = profile(
        {
            "a": module_profile(3, 5, fixed_s=0.3, blocks=6, tp=tp),
            "b": module_profile(1, 2, fixed_s=0.2, blocks=3, tp=tp),
            "c": module_profile(0.4, 0.8, fixed_s=0.1, blocks=2, tp=tp),
        },
        24,
        per_node=8,
    )
    inputs: dict[str, Any] = {"a": {}, "b": {}, "c": {"inputs": ["b.0", "a.0"]}}
    job = workload(inputs, batch=96, sync_batch=24)
    hasty, whole = solve(job, costs, top=4, budget_s=0), solve(job, costs, top=4, budget_s=20)
    best = whole.candidates[0].objective_s
    assert whole.formula_bound_s == pytest.approx(best)
    assert len(hasty.candidates) == 4
    assert 0.5 * best < hasty.formula_bound_s <= best
    assert best <= hasty.candidates[0].objective_s < 1.1 * best


# --- the parts ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_cuts_are_optimal(work: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(work)))
    got = cut_everywhere(tuple(float(w) for w in work), len(work))[stages - 1]
    assert [b for _, b in got] == [*(a for a, _ in got[1:]), len(work)]
    assert got[0][0] == 0
    assert all(a < b for a, b in got)
    best = min(
        max(sum(work[a:b]) for a, b in itertools.pairwise((0, *ends, len(work))))
        for ends in itertools.combinations(range(1, len(work)), stages - 1)
    )
    assert max(sum(work[a:b]) for a, b in got) == best


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_heavy_stages_come_early(work: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(work)))
    got = cut_everywhere(tuple(map(float, work)), len(work), heavy_early=True)[stages - 1]

    def weight(cuts: Iterable[tuple[int, int]]) -> float:
        after = reversed(range(stages))
        return max(sum(work[a:b]) * (1 - 1e-3 * n) for (a, b), n in zip(cuts, after, strict=True))

    every = itertools.combinations(range(1, len(work)), stages - 1)
    best = min(weight(itertools.pairwise((0, *ends, len(work)))) for ends in every)
    assert [b for _, b in got] == [*(a for a, _ in got[1:]), len(work)]
    assert weight(got) == pytest.approx(best)
    assert cut_everywhere((0.1,) * 32, 10, heavy_early=True)[9][1:3] == ((4, 8), (8, 11))


def test_the_last_digits_of_seconds_cut_no_blocks() -> None:
    # The first stages hold most micro-batches, so the last ones have the third block.
    work = tuple(0.1 * (1 + 1e-13 * (7 * block % 5)) for block in range(16))
    for seconds in ((0.1,) * 16, work, work[::-1]):
        cuts = cut_everywhere(seconds, 6)[5]
        assert [b - a for a, b in cuts] == [2, 2, 3, 3, 3, 3]


@given(st.integers(1, 200), st.integers(1, 40))
def test_shares_and_cuts_hold_every_sample(share: int, parts: int) -> None:
    if parts <= share:
        pieces = split_evenly(share, parts)
        assert sum(pieces) == share
        assert max(pieces) - min(pieces) <= 1
    for pinned in (True, False):
        pieces = cut(share, parts, pinned=pinned)
        assert sum(pieces) == share
        assert max(pieces) <= parts
        assert len(pieces) == math.ceil(share / parts)


@given(st.integers(1, 300))
def test_microbatch_candidates_are_real_sizes(share: int) -> None:
    sizes = list(microbatch_sizes(share, Pins()))
    assert {1, share} <= set(sizes)
    for size in sizes:
        assert max(split_evenly(share, math.ceil(share / size))) == size


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4])),
        min_size=1,
        max_size=4,
    )
)
def test_placement_keeps_groups_in_nodes_and_modules_apart(
    wanted: list[tuple[int, int, int]],
) -> None:
    devices = 4 * math.ceil(sum(math.prod(shape) for shape in wanted) / 4)
    costs = profile({"a": module_profile()}, devices, per_node=4)
    by_name = {f"m{i}": shape for i, shape in enumerate(wanted)}
    placed = place_modules(by_name, cluster=costs.cluster, devices=devices)
    assert placed is not None
    grids = {name: grid.ranks for name, grid in placed.items()}
    ranks = [r for g in grids.values() for replica in g for group in replica for r in group]
    assert len(ranks) == len(set(ranks))
    assert max(ranks) < devices
    for name, (dp, pp, tp) in by_name.items():
        assert (len(grids[name]), len(grids[name][0]), len(grids[name][0][0])) == (dp, pp, tp)
        for group in itertools.chain.from_iterable(grids[name]):
            assert len({rank // 4 for rank in group}) == 1


def test_modules_start_on_nodes_of_their_own_where_there_is_room() -> None:
    costs = profile({"a": module_profile()}, 16, per_node=4)
    grids = place_modules({"a": (3, 1, 1), "b": (5, 1, 1)}, cluster=costs.cluster, devices=16)
    assert grids is not None
    nodes = [{group[0] // 4 for (group,) in grids[name].ranks} for name in ("a", "b")]
    assert not nodes[0] & nodes[1]


def test_a_module_that_a_node_holds_is_not_cut_between_two() -> None:
    costs = profile({"a": module_profile()}, 16, per_node=8)
    # By the size of their groups c comes first: b behind it would lie on two nodes.
    shapes = {"a": (2, 1, 1), "b": (4, 2, 1), "c": (1, 1, 2), "d": (2, 1, 1), "e": (2, 1, 1)}
    grids = place_modules(shapes, cluster=costs.cluster, devices=16)
    assert grids is not None
    for grid in grids.values():
        assert len({rank // 8 for rank in grid.members}) == 1
    assert len({rank for grid in grids.values() for rank in grid.members}) == 16


def test_units_of_uneven_shares_keep_step() -> None:
    slow_start = module_profile(fixed_s=9.0, activation_bytes=1.0)
    costs = profile({"a": slow_start}, 3, memory_bytes=1e9)
    for pins, sizes in (
        ({"microbatch": 4}, ((4, 4, 4, 4, 4, 2), (4, 4, 4, 4, 4, 1), (4, 4, 4, 4, 4, 1))),
        ({}, ((22,), (21,), (21,))),
    ):
        job = workload({"a": {"plan": {"dp": 3, "pp": 1, **pins}}}, batch=64)
        unit: Unit = solve(job, costs).candidates[0].units[0]
        assert unit.samples == (22, 21, 21)
        assert unit.microbatches == sizes
