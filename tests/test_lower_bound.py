"""No plan simulates below the bound: solvers' plans, plans made by hand, and altered ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.cost_model import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.lower_bound import lower_bound
from mmplan.planning.planner import BASELINES, SOLVERS
from mmplan.profiling.analytic import analytic_profile
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.cluster import load_cluster
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan, PlanLoss, Unit
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, load_workload
from mmplan.simulation.symmetry import predict
from mmplan.solvers.problem import NotApplicableError
from tests.programs import loss, make_plan, plans, split_evenly, unit
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_monotone import chain, pair, random_costs, two_tasks

EXAMPLES = Path(__file__).parent.parent / "examples"
# A simulated step may be shorter by rounding alone.
EXACT = 1 + 1e-12


def bound_of(plan: Plan, costs: Profile) -> float:
    return lower_bound(plan, CostModel(costs, plan.cluster, plan.training)).seconds


def check_below(plan: Plan, costs: Profile, bound_s: float | None = None) -> None:
    """A plan that fits takes no less than the bound; by default than its own."""
    model = CostModel(costs, plan.cluster, plan.training)
    predicted = predict(plan, model)
    if max(predicted.memory_bytes) <= plan.cluster.device.memory_bytes:
        bound_s = lower_bound(plan, model).seconds if bound_s is None else bound_s
        assert bound_s <= predicted.iteration_s * EXACT, plan.units


# --- by hand ------------------------------------------------------------------------


def test_one_device_with_one_micro_batch_meets_it() -> None:
    """There is nothing but the work, and no more efficient size."""
    plan = make_plan(unit("a", kind="1f1b", blocks=4), losses=[loss("l", "a")], batch=6)
    costs = profile({"a": module_profile(1.0, 2.0, fixed_s=0.5)}, 1)
    assert bound_of(plan, costs) == pytest.approx(0.5 + 6 * 1 + 0.5 + 6 * 2)
    check_below(plan, costs)


def test_many_devices_leave_the_path_of_one_sample() -> None:
    """Two samples on sixteen devices: 3 s of forwards, and at least 3 s of backwards."""
    one = make_plan(
        *(unit(name, *inputs, kind="1f1b", blocks=4) for name, *inputs in ("a", "ba")),
        losses=[loss("l", "b")],
        batch=2,
        devices=16,
    )
    costs = profile({"a": module_profile(1.0, 2.0), "b": module_profile(2.0, 4.0)}, 16)
    bound = lower_bound(one, CostModel(costs, one.cluster, one.training))
    # Of a backward only the half that others wait for is sure to lie on the path.
    assert bound.path_s == pytest.approx(3 + 3)
    assert bound.work_s == pytest.approx(2 * 9 / 16)
    assert bound.seconds == pytest.approx(6)
    check_below(one, costs)


def test_a_loss_over_the_whole_batch_parts_the_step() -> None:
    """Nothing can run beside it: its second adds to those of the work."""
    points = [{"samples": n, "forward_s": 0.25, "backward_s": 0.75} for n in (4, 8)]
    towers = [unit(name, k=2, blocks=4, ranks=[[[0]], [[1]]], dp=2) for name in "ab"]
    both = make_plan(*towers, losses=[loss("l", "a", "b", sync_batch=8)], batch=8)
    costs = profile(
        {"a": module_profile(1.0, 2.0), "b": module_profile(1.0, 2.0)},
        2,
        losses={"l": {"points": points, "sharded": False}},
    )
    assert bound_of(both, costs) == pytest.approx((8 * 3 + 8 * 3) / 2 + 1)
    check_below(both, costs)
    # With two sync batches one may hide behind the work of the other.
    twice = make_plan(*towers, losses=[loss("l", "a", "b", sync_batch=4)], batch=8)
    assert bound_of(twice, costs) == pytest.approx((8 * 3 + 8 * 3) / 2 + 2 / 2)
    check_below(twice, costs)


def test_memory_leaves_slower_degrees() -> None:
    """Of one sample's 100 bytes a device holds 60: its blocks run on two devices, at 1.5 times."""
    costs = profile(
        {"a": module_profile(1.0, 2.0, blocks=1, tp={1: 1.0, 2: 1.5}, activation_bytes=100.0)},
        4,
        memory_bytes=60.0,
    )
    plan = make_plan(
        unit("a", kind="1f1b", tp=2, dp=2, k=2), losses=[loss("l", "a")], batch=4
    ).model_copy(update={"cluster": costs.cluster})
    assert bound_of(plan, costs) == pytest.approx(2 * 4 * 3 / 1.5 / 4)
    check_below(plan, costs)


def test_frozen_blocks_take_forwards_only() -> None:
    costs = profile({"a": module_profile(1.0, 2.0), "b": module_profile(1.0, 2.0)}, 1)
    plan = make_plan(
        unit("a", kind="1f1b", blocks=4, frozen=True),
        unit("b", "a", kind="1f1b", blocks=4, frozen=((0, 1),), ranks=[[[0]]]),
        losses=[loss("l", "b")],
        batch=2,
    )
    assert bound_of(plan, costs) == pytest.approx(2 * (1 + 1 + 2 * 3 / 4))
    check_below(plan, costs)


@pytest.mark.parametrize(("memory_bytes", "seconds"), [(60.0, 8 * 4.0), (30.0, 8 * 4.375)])
def test_what_recomputes_may_be_the_plans_choice(memory_bytes: float, seconds: float) -> None:
    """Of 30 bytes a sample two or one fit without recomputation, eight with it."""
    module = module_profile(1.0, 2.0, fixed_s=1.0, blocks=1, activation_bytes=30.0)
    costs = profile({"a": module}, 1, memory_bytes=memory_bytes)
    plan = make_plan(unit("a", kind="1f1b", k=8), losses=[loss("l", "a")], batch=8).model_copy(
        update={"cluster": costs.cluster}
    )
    report = plan.solver.model_copy(update={"recompute_auto": ("a",)})
    assert bound_of(plan.model_copy(update={"solver": report}), costs) == pytest.approx(seconds)
    check_below(plan, costs)


def test_a_plan_says_what_its_workload_left_to_it(tmp_path: Path) -> None:
    costs = profile({"a": module_profile()}, 2)
    job = workload({"a": {"recompute": "auto"}}, batch=4)
    plan = run_solve(tmp_path, job, costs, solver="colocated")
    assert plan.solver.recompute_auto == ("a",)
    assert plan.solver.lower_bound_s == pytest.approx(4 * 3 / 2)


# --- all plans ----------------------------------------------------------------------


def costs_of(draw: st.DrawFn, plan: Plan) -> Profile:
    """A profile of a plan's modules and losses, with uneven blocks and curves that bend."""
    number = st.integers(0, 8).map(float)
    task = plan.tasks["default"]
    modules = {
        name: module_profile(
            1.0 + draw(number),
            draw(number),
            fixed_s=draw(number) / 4,
            blocks=planned.blocks,
            tp={1: 1.0, 2: draw(st.sampled_from([0.8, 1.0, 1.7]))},
            parameters=draw(number),
            activation_bytes=draw(number),
            output_bytes_per_sample=draw(number),
            boundary_bytes_per_sample=draw(number),
            block_work=[1.0 + draw(number) for _ in range(planned.blocks)],
        )
        for name, planned in task.modules.items()
    }
    for own in modules.values():
        # A bend, and backwards of which the whole is faster than its part in some sizes.
        point = {**own["points"][-1], "microbatch": 5}
        own["points"].append({**point, "backward_input_s": 3 * point["backward_s"]})
    losses = {
        name: {
            "points": [
                {"samples": n, "forward_s": draw(number) / 4, "backward_s": draw(number) / 4}
                for n in (1, 12)
            ],
            "sharded": draw(st.booleans()),
        }
        for name in task.losses
    }
    slow = {"latency_s": draw(number) / 16, "bandwidth_bytes_per_s": 64.0}
    memory_bytes = draw(st.sampled_from([150.0, 600.0, 1e9]))
    return profile(
        modules, plan.devices, losses=losses, intra=slow, inter=slow, memory_bytes=memory_bytes
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Profile]:
    """Plans of every kind of schedule, their ranks folded onto fewer devices."""
    plan = draw(plans())
    fewer = draw(st.integers(1, plan.devices))
    units = tuple(
        folded(u, fewer) if draw(st.booleans()) else u
        for u in (split(u) if draw(st.booleans()) else u for u in plan.units)
    )
    plan = replanned(plan, units)
    costs = costs_of(draw, plan)
    return plan.model_copy(update={"cluster": costs.cluster}), costs


def folded(item: Unit, devices: int) -> Unit:
    """The unit on the first devices only; as it is where a rank would be in it twice."""
    ranks = tuple(
        tuple(tuple(r % devices for r in group) for group in replica) for replica in item.ranks
    )
    flat = [rank for replica in ranks for group in replica for rank in group]
    return item.model_copy(update={"ranks": ranks}) if len(set(flat)) == len(flat) else item


def split(item: Unit) -> Unit:
    schedule = item.schedule.model_copy(update={"split_backward": True})
    return item.model_copy(update={"schedule": schedule})


def replanned(plan: Plan, units: tuple[Unit, ...]) -> Plan:
    """The plan with other units, its losses where their features then are."""
    placed: list[PlanLoss] = []
    for each in plan.losses:
        task = plan.tasks[each.task]
        modules = [text.split(".")[0] for text in task.losses[each.name].inputs if text]
        modules = [m for m in task.modules if m in modules]
        hosts = modules if task.losses[each.name].sync_batch else modules[-1:]
        last = [
            max((u for u in units if (u.task, u.module) == (each.task, m)), key=_end) for m in hosts
        ]
        ranks = {rank for u in last for replica in u.ranks for rank in replica[-1]}
        placed.append(each.model_copy(update={"ranks": tuple(sorted(ranks))}))
    return plan.model_copy(update={"units": units, "losses": tuple(placed)})


def _end(item: Unit) -> int:
    return item.blocks[-1][1]


@settings(max_examples=12, deadline=None)
@given(cases())
def test_no_plan_is_below(case: tuple[Plan, Profile]) -> None:
    check_case(*case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None)
@given(cases())
def test_no_plan_of_thousands_is_below(case: tuple[Plan, Profile]) -> None:
    check_case(*case)


def check_case(plan: Plan, costs: Profile, bound_s: float | None = None) -> None:
    if plan_faults(plan):
        return
    try:
        faults = check_program(compile_plan(plan))
    except InvalidInputError:
        return  # its schedules wait for each other
    if not faults:
        check_below(plan, costs, bound_s)


# --- few blocks on few devices: what is lost in sums and waits ----------------------


def few_blocks(rng: np.random.Generator) -> tuple[Plan, Profile]:
    """A plan on one device of two to five, with sums and messages as long as computes."""
    names = "ab"[: int(rng.integers(1, 3))]
    batch, kinds = int(rng.integers(2, 7)), ("chain", "towers", "tasks")
    kind = kinds[int(rng.integers(3))]
    blocks = {name: int(rng.integers(1, 4)) for name in names}
    own: dict[str, Any] = {
        "ranks": [[[0]]],
        "k": 1,
        "kind": "batch-sync" if kind == "towers" else "1f1b",
    }
    units = [
        unit(
            name,
            *([names[i - 1]] if kind == "chain" and i else []),
            cuts=[(0, blocks[name])],
            **own,
        )
        for i, name in enumerate(names)
    ]
    losses = [loss("l", names[-1])] if kind != "towers" else [loss("l", *names, sync_batch=batch)]
    if kind == "tasks":
        losses = [loss(f"l{name}", name) for name in names]
        cuts = [(0, blocks["a"])]
        other = unit("c", task="other", cuts=cuts, share="a", **own)
        units.append(other)
        losses.append(loss("lc", "c", task="other"))
        blocks["c"] = blocks["a"]
    devices = int(rng.integers(2, 6))
    plan = make_plan(*units, losses=losses, batch=batch, devices=devices)
    costs = profile(
        {
            name: module_profile(
                float(rng.choice([0.2, 1.0, 2.0])),
                float(rng.choice([0.5, 1.0, 4.0])),
                fixed_s=float(rng.choice([0.0, 0.3])),
                blocks=count,
                parameters=float(rng.choice([0, 4, 40])),
                output_bytes_per_sample=4.0,
                boundary_bytes_per_sample=float(rng.integers(1, 9)),
            )
            for name, count in blocks.items()
        },
        devices,
        losses={
            each.name: {
                "points": [
                    {"samples": n, "forward_s": n / 16, "backward_s": n / 8} for n in (1, batch)
                ],
                "sharded": bool(rng.integers(2)),
            }
            for each in losses
        },
        intra={"latency_s": float(rng.choice([0.05, 0.3])), "bandwidth_bytes_per_s": 256.0},
    )
    device = costs.cluster.device.model_copy(
        update={
            "compute_slowdown": float(rng.choice([1.0, 2.0, 5.0])),
            "type": str(rng.choice(["cpu", "cuda"])),
        }
    )
    cluster = costs.cluster.model_copy(update={"device": device})
    costs = costs.model_copy(update={"cluster": cluster})
    return plan.model_copy(update={"cluster": cluster}), costs


def moved(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with one unit on other devices, with other samples, or in two."""
    units = list(plan.units)
    at = int(rng.integers(len(units)))
    item = units[at]
    batch, (first, end) = plan.tasks[item.task].batch, item.blocks[0]
    dp = int(rng.integers(1, min(plan.devices, batch) + 1))
    shares = [int(n) for n in rng.multinomial(batch - dp, [1 / dp] * dp) + 1]
    on = [int(rank) for rank in rng.permutation(plan.devices)[:dp]]
    if rng.random() < 0.3:
        dp, shares, on = item.dp, list(item.samples), [replica[0][0] for replica in item.ranks]
    most = int(rng.integers(1, 4))
    schedule = item.schedule.model_copy(
        update={"split_backward": bool(rng.integers(2)), "lead": int(rng.integers(0, 4))}
    )
    units[at] = item.model_copy(
        update={
            "dp": dp,
            "ranks": tuple(((rank,),) for rank in on),
            "samples": tuple(shares),
            "microbatches": tuple(split_evenly(n, min(most, n)) for n in shares),
            "schedule": schedule,
            "zero": int(rng.choice([0, 0, 1, 2, 3])),
        }
    )
    if end - first > 1 and rng.random() < 0.3:
        middle = int(rng.integers(first + 1, end))
        name = f"{item.name}.{len(units)}"
        units[at] = units[at].model_copy(update={"blocks": ((first, middle),)})
        units.append(item.model_copy(update={"blocks": ((middle, end),), "name": name}))
    return replanned(plan, tuple(units))


def check_few_blocks(seeds: range, moves: int) -> int:
    """Shorter and shorter plans stay above; the number of cases in which something is lost."""
    lossy = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        plan, costs = few_blocks(rng)
        model = CostModel(costs, plan.cluster, plan.training)
        bound = lower_bound(plan, model)
        lossy += bound.seconds > max(bound.work_s, bound.path_s) * 1.02
        best_s = predict(plan, model).iteration_s
        for _ in range(moves):
            other = moved(plan, rng)
            if plan_faults(other):
                continue
            try:
                program = compile_plan(other)
            except InvalidInputError:
                continue
            if check_program(program):
                continue
            seconds = predict(other, model).iteration_s
            assert bound.seconds <= seconds * EXACT, (seed, other.units)
            if seconds <= best_s * float(rng.choice([1.0, 1.0, 1.05])):
                plan, best_s = other, seconds
    return lossy


def test_no_plan_of_few_blocks_is_below() -> None:
    assert check_few_blocks(range(8), moves=25) > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_short_plan_of_few_blocks_is_below() -> None:
    assert check_few_blocks(range(100, 250), moves=300) > 50


# --- plans of solvers, and what is near them ----------------------------------------


ALL = (*SOLVERS, *BASELINES)


def solved(
    folder: Path, job: Workload, costs: Profile, devices: int, solvers: Sequence[str] = ALL
) -> Iterator[Plan]:
    """The plan of every solver that has one."""
    for solver in solvers:
        try:
            yield run_solve(folder, job, costs, devices=devices, solver=solver, budget_s=0.05)
        except (InfeasibleError, NotApplicableError):
            continue


def altered(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with one unit changed: micro-batches, devices, or a cut in two units."""
    at = int(rng.integers(len(plan.units)))
    item = plan.units[at]
    round_samples = [sum(sizes) for sizes in item.microbatches]
    units = [item]
    match int(rng.integers(6)):
        case 0:
            count = int(rng.integers(1, 5))
            sizes = tuple(split_evenly(n, min(count, n)) for n in round_samples)
            units = [item.model_copy(update={"microbatches": sizes})]
        case 1:
            units = [split(item)]
        case 2:
            units = [folded(item, int(rng.integers(1, plan.devices + 1)))]
        case 3 if item.pp * item.vpp == 1 and item.blocks[0][1] - item.blocks[0][0] > 1:
            first, end = item.blocks[0]
            middle = int(rng.integers(first + 1, end))
            parts = (((first, middle),), ((middle, end),))
            units = [
                item.model_copy(update={"name": f"{item.name}.{i}", "blocks": blocks})
                for i, blocks in enumerate(parts)
            ]
        case 4 if item.dp > 1:
            ranks = item.ranks[:1]
            sizes = (tuple(n for row in item.microbatches for n in row),)
            samples = (sum(item.samples),)
            units = [
                item.model_copy(
                    update={"dp": 1, "ranks": ranks, "microbatches": sizes, "samples": samples}
                )
            ]
        case _:
            lead = {"lead": int(rng.integers(0, 3)), "sync_lead": int(rng.integers(0, 3))}
            units = [item.model_copy(update={"schedule": item.schedule.model_copy(update=lead)})]
    waves: dict[str, Any] = {} if units == [item] else {"waves": ()}
    changed = replanned(plan, (*plan.units[:at], *units, *plan.units[at + 1 :]))
    return changed.model_copy(update=waves)


def check_solvers(folder: Path, seeds: range, changes: int) -> int:
    """The number of plans that were looked at."""
    count = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        job, costs = (pair, chain, two_tasks)[seed % 3](rng), random_costs(rng, "ab")
        for plan in solved(folder, job, costs, int(rng.integers(1, 9))):
            assert plan.solver.lower_bound_s is not None
            assert plan.solver.gap == pytest.approx(
                plan.predicted.iteration_s / plan.solver.lower_bound_s - 1
            )
            assert plan.solver.lower_bound_s <= plan.predicted.iteration_s * EXACT
            for _ in range(changes):
                check_case(altered(plan, rng), costs, plan.solver.lower_bound_s)
            count += 1
    return count


def test_no_solvers_plan_is_below(tmp_path: Path) -> None:
    assert check_solvers(tmp_path, range(1, 3), changes=2) > 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_plan_near_a_solvers_is_below(tmp_path: Path) -> None:
    assert check_solvers(tmp_path, range(60), changes=40) > 200


def test_all_solvers_have_one_bound(tmp_path: Path) -> None:
    """It is the workload's, and no better for a plan with more ZeRO."""
    rng = np.random.default_rng(3)
    job, costs = pair(rng), random_costs(rng, "ab")
    found = list(solved(tmp_path, job, costs, 4, ("colocated", "deepspeed")))
    assert len({plan.training.zero for plan in found}) == 2
    assert len({plan.solver.lower_bound_s for plan in found}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["clip-digits", "mllm-digits", "multitask-digits", "val-digits"])
def test_no_plan_of_an_example_is_below(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name / "workload.yaml"
    job = load_workload(path)
    costs = analytic_profile(job, path.parent, load_cluster("cpu"))
    for devices in (1, 2, 4):
        for plan in solved(tmp_path, job, costs, devices):
            assert plan.solver.lower_bound_s is not None
            assert plan.solver.lower_bound_s <= plan.predicted.iteration_s * EXACT
