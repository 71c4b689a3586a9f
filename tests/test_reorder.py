"""Samples dealt to groups, the recurrence of a program, and the orders that are found with it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmplan.errors import InvalidInputError
from mmplan.program.clocks import Durations, replay
from mmplan.program.compile import compile_plan
from mmplan.program.dependencies import find_dependencies
from mmplan.program.instructions import Compute, Op
from mmplan.program.model import Program
from mmplan.reordering.batch_order import BatchOrder
from mmplan.reordering.microbatch_order import (
    FoundOrder,
    OrderBudget,
    draw_changes,
    full_budget,
    search_order,
)
from mmplan.reordering.pipeline_recurrence import Recurrence, make_recurrence
from mmplan.reordering.replica_assignment import assign_groups
from mmplan.schema.plan import Plan
from mmplan.simulation.step import simulate
from tests.clocks import FixedCosts
from tests.programs import loss, make_plan, plans, split_evenly, unit

Floats = NDArray[np.float64]

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


# --- groups of equal size -----------------------------------------------------------------


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Work of up to 8 samples, small integers so that ties are common, and group sizes."""
    counts = [*draw(st.lists(st.integers(0, 2), max_size=3)), draw(st.integers(1, 2))]
    work = draw(st.lists(st.integers(0, 9), min_size=sum(counts), max_size=sum(counts)))
    return work, counts


def heaviest(work: Any, groups: Any) -> float:
    return float(np.bincount(groups, weights=np.asarray(work, float)).max())


@given(deals())
@example(([5], [1]))
@example(([4, 4, 4, 4], [2, 0, 2]))
@settings(deadline=None)
def test_groups_have_their_sizes_and_are_near_the_best(case: tuple[list[int], list[int]]) -> None:
    work, counts = case
    got = assign_groups(np.array(work, float), counts)
    assert np.bincount(got, minlength=len(counts)).tolist() == counts
    names = [group for group, count in enumerate(counts) for _ in range(count)]
    best = min(heaviest(work, deal) for deal in set(itertools.permutations(names)))
    # Graham's bound for the largest first; with sizes of 0 to 2 the swaps keep it too.
    assert heaviest(work, got) <= best * 4 / 3 + 1e-9


def group_bound(work: Floats, num_groups: int) -> float:
    """The mean load, or the largest of N samples with the N / num_groups - 1 smallest ones."""
    ascending = np.sort(work)
    largest = ascending[-1] + ascending[: len(work) // num_groups - 1].sum()
    return max(float(work.sum()) / num_groups, float(largest))


@pytest.mark.parametrize("dp", [30, 60, 120])
@pytest.mark.parametrize("sigma", [0.8, 1.2, 1.8])
def test_groups_are_within_two_percent_of_the_bound(dp: int, sigma: float) -> None:
    for seed in range(4):
        work = np.random.default_rng(seed).lognormal(0, sigma, 1920)
        got = assign_groups(work, dp)
        assert set(np.bincount(got)) == {1920 // dp}
        assert heaviest(work, got) <= 1.02 * group_bound(work, dp)


def test_the_bound_is_reached_where_one_sample_is_everything() -> None:
    work = np.array([9.0, 1, 2, 3, 1, 2])
    assert group_bound(work, 2) == 9 + 1 + 1
    assert heaviest(work, assign_groups(work, 2)) == 11


def test_numbers_that_do_not_divide_differ_by_one() -> None:
    assert sorted(np.bincount(assign_groups(np.ones(11), 4))) == [2, 3, 3, 3]


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_work_that_is_no_amount_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidInputError, match=r"the work of sample 1 is .*finite number"):
        assign_groups(np.array([1.0, wrong]), 1)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"groups of \[2, 2\] samples cannot hold 5"):
        assign_groups(np.ones(5), [2, 2])


# --- the recurrence is the simulation -------------------------------------------------------


def replayed(program: Program, recurrence: Recurrence, time_N: Floats) -> float:
    """The simulator's clocks with the same times."""
    columns = recurrence.stage, recurrence.replica, recurrence.mb, recurrence.backward, time_N
    seconds = {
        (int(s), int(d), int(m), bool(b)): float(t) for s, d, m, b, t in zip(*columns, strict=True)
    }
    rows: list[list[float]] = []
    for rank, row in enumerate(program.instructions):
        places = {s.index: s.place(rank) for s in program.stages_of(rank)}
        rows.append(
            [
                seconds[item.stage, places[item.stage][0], item.mb, item.op is Op.BACKWARD]
                if isinstance(item, Compute)
                else 0.0
                for item in row
            ]
        )
    dependencies = find_dependencies(program)
    nothing = Durations(
        instruction=rows,
        message=[0.0] * len(dependencies.messages),
        started=[[(1.0, 0.0)]] * len(dependencies.started),
    )
    return max(max(row) for row in replay(dependencies, nothing).end if row)


@given(plans(), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, suppress_health_check=[*_SLOW])
def test_any_program_takes_what_the_simulator_says(plan: Plan, seed: int) -> None:
    program = compile_plan(plan)
    recurrence = make_recurrence(program)
    times = np.random.default_rng(seed).lognormal(0, 1, (recurrence.num_nodes, 3))
    times[recurrence.stage < 0] = 0
    got = recurrence.makespans(times.copy())
    for r in range(3):
        assert got[r] == pytest.approx(replayed(program, recurrence, times[:, r]), rel=1e-12)


def chain(stages: int, count: int, **options: Any) -> Program:
    options = {"kind": "1f1b", **options}
    plan = make_plan(unit("v", pp=stages, k=count, **options), losses=[loss("l", "v")], batch=count)
    return compile_plan(plan)


def order_makespans(
    recurrence: Recurrence, orders_RM: Any, forward_SM: Floats, backward_SM: Floats
) -> Floats:
    """Makespans [R] when position k of every stage holds micro-batch ``orders_RM[r, k]``."""
    table = np.stack([forward_SM, backward_SM])
    mb_NR = np.asarray(orders_RM).T[recurrence.mb]
    time_NR = table[recurrence.backward.astype(int)[:, None], recurrence.stage[:, None], mb_NR]
    time_NR[recurrence.stage < 0] = 0
    return recurrence.makespans(time_NR)


def ordered(
    recurrence: Recurrence,
    forward_SM: Floats,
    backward_SM: Floats,
    seed: int = 0,
    budget: OrderBudget | None = None,
) -> FoundOrder:
    """The order of the micro-batches of one replica that the search finds."""
    count = forward_SM.shape[1]
    return search_order(
        lambda orders: order_makespans(recurrence, orders, forward_SM, backward_SM),
        forward_SM + backward_SM,
        [range(count)],
        seed=seed,
        budget=budget or full_budget(count),
    )


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_equal_micro_batches_of_1f1b_take_what_simulate_says(lead: int) -> None:
    program = chain(4, 7, lead=lead)
    forward, backward = np.full((4, 7), 1.5), np.full((4, 7), 2.25)
    got = order_makespans(make_recurrence(program), np.arange(7)[None], forward, backward)
    assert got[0] == simulate(program, FixedCosts(forward=1.5, backward=2.25)).iteration_s


def test_many_waits_are_for_helpers_and_end_alike() -> None:
    """One encoder before 20 replicas: its backward waits for all of them."""
    plan = make_plan(
        unit("e", k=2), unit("l", "e", dp=20, k=2, kind="1f1b"), losses=[loss("x", "l")], batch=40
    )
    program = compile_plan(plan)
    recurrence = make_recurrence(program)
    times = np.random.default_rng(0).random((recurrence.num_nodes, 1))
    times[recurrence.stage < 0] = 0
    expected = replayed(program, recurrence, times[:, 0])
    assert recurrence.makespans(times.copy())[0] == pytest.approx(expected, rel=1e-12)


def test_a_deadlock_and_a_missing_message_are_refused() -> None:
    program = chain(2, 2)
    first, second = program.instructions
    silent = tuple(x for x in second if str(x) != "1SEND_B0:e0>0[0,1)")
    with pytest.raises(InvalidInputError, match="message that nobody sends"):
        make_recurrence(replace(program, instructions=(first, silent)))
    forward = [str(x) for x in second].index("1F0")
    backward = [str(x) for x in second].index("1B0")
    turned = list(second)
    turned[forward], turned[backward] = turned[backward], turned[forward]
    late = [x for x in first if str(x).startswith("0SEND_F0")]
    held = [x for x in first if x not in late]
    after = next(i for i, x in enumerate(held) if str(x) == "0B0") + 1
    held[after:after] = late
    with pytest.raises(InvalidInputError, match="deadlocks"):
        make_recurrence(replace(program, instructions=(tuple(held), second)))


# --- the order of micro-batches -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_near_the_best_of_all(seed: int) -> None:
    stages, count = 3, 7
    recurrence = make_recurrence(chain(stages, count))
    forward = np.random.default_rng(seed).lognormal(0, 1, (stages, count))
    backward = 2 * forward
    got = ordered(recurrence, forward, backward, seed=seed)
    assert sorted(got.order) == list(range(count))
    every = np.array(list(itertools.permutations(range(count))))
    spans = order_makespans(recurrence, every, forward, backward)
    assert got.makespan <= spans[0]
    assert got.makespan == order_makespans(recurrence, got.order[None], forward, backward)[0]
    assert got.makespan <= 1.015 * spans.min()


def test_the_order_beats_random_ones_by_far_where_work_is_skewed() -> None:
    rng = np.random.default_rng(0)
    recurrence = make_recurrence(chain(6, 32))
    forward = np.vstack([rng.lognormal(0, 1, 32), *[rng.lognormal(0, 0.5, 32)] * 5])
    got = ordered(recurrence, forward, 2 * forward)
    draws = rng.permuted(np.tile(np.arange(32), (200, 1)), axis=1)
    assert got.makespan < 0.9 * order_makespans(recurrence, draws, forward, 2 * forward).min()


def test_scans_never_make_it_worse_and_the_same_seed_finds_the_same() -> None:
    recurrence = make_recurrence(chain(4, 12))
    forward = np.random.default_rng(1).lognormal(0, 1, (4, 12))
    found = [
        ordered(recurrence, forward, forward, seed=5, budget=budget)
        for budget in (OrderBudget(scans=0), OrderBudget(), OrderBudget())
    ]
    assert found[1].order.tolist() == found[2].order.tolist()
    assert found[0].makespan >= found[1].makespan


def test_equal_micro_batches_stay_as_they_are() -> None:
    got = ordered(make_recurrence(chain(3, 5)), np.ones((3, 5)), np.ones((3, 5)))
    assert got.order.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_changes_are_all_single_moves_and_swaps(count: int) -> None:
    expected: set[tuple[int, ...]] = set()
    for place, target in itertools.permutations(range(count), 2):
        moved = [i for i in range(count) if i != place]
        moved.insert(target, place)
        swapped = list(range(count))
        swapped[place], swapped[target] = target, place
        expected |= {tuple(moved), tuple(swapped)}
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = [tuple(row) for _ in range(20) for row in draw_changes(rng, count).tolist()]
    assert set(drawn) == expected


# --- whole batches --------------------------------------------------------------------------


def skewed(batch: int, seed: int, *modules: str) -> dict[str, Floats]:
    rng = np.random.default_rng(seed)
    return {name: rng.lognormal(0, 1, batch) for name in modules}


@given(plans(), st.integers(0, 99))
@settings(max_examples=20, deadline=None, suppress_health_check=[*_SLOW])
def test_samples_stay_in_their_sync_batch_and_the_step_is_never_slower(
    plan: Plan, seed: int
) -> None:
    program = compile_plan(plan)
    order = BatchOrder(program, "default")
    work = skewed(12, seed, *order.modules)
    got = order(work, seed)
    sync = next((loss.sync_batch for loss in program.cross_sample_losses), 12)
    for start in range(0, 12, sync):
        assert sorted(got[start : start + sync]) == list(range(start, start + sync))
    assert got.tolist() == BatchOrder(program, "default")(work, seed).tolist()
    before, after = order.makespans(np.array([np.arange(12), got]), work)
    assert after <= before


@pytest.mark.parametrize(("encoders", "replicas"), [(1, 1), (2, 4), (3, 2), (4, 3)])
def test_skewed_batches_end_a_fifth_earlier(encoders: int, replicas: int) -> None:
    count = 16
    batch = replicas * count
    plan = make_plan(
        unit("e", dp=encoders, k=batch // max(encoders, replicas), kind="1f1b"),
        unit("l", "e", dp=replicas, pp=3, k=count, kind="1f1b"),
        losses=[loss("x", "l")],
        batch=batch,
    )
    order = BatchOrder(compile_plan(plan), "default")
    ratios: list[float] = []
    for seed in range(3):
        work = skewed(batch, seed, "e", "l")
        draws = np.random.default_rng(seed).permuted(np.tile(np.arange(batch), (20, 1)), axis=1)
        random_time = order.makespans(draws, work).mean()
        ratios.append(float(order.makespans(order(work, seed)[None], work)[0] / random_time))
    assert np.mean(ratios) < 0.85


def test_the_time_of_a_batch_is_that_of_its_samples() -> None:
    """Makespans of a batch equal the recurrence with the sums of its micro-batches' work."""
    plan = make_plan(
        unit("e", sizes=[(2, 4, 2)], kind="1f1b", frozen=True),
        unit("l", "e", pp=2, sizes=[(3, 3, 2)], kind="1f1b", blocks=3),
        losses=[loss("x", "l")],
        batch=8,
    )
    program = compile_plan(plan)
    work = skewed(8, 3, "e", "l")
    samples = np.random.default_rng(0).permutation(8)
    recurrence = make_recurrence(program)
    # The encoder has no backward; the LLM's first stage is the busiest with 2 of 3 blocks.
    busiest = {"e": 1.0, "l": 2 / 3 * (1 + 2)}
    share = {0: 1.0, 1: 2 / 3, 2: 1 / 3}
    times = np.zeros((recurrence.num_nodes, 1))
    for node, index in enumerate(recurrence.stage.tolist()):
        if index >= 0:
            stage = program.stages[index]
            start, stop = stage.microbatches[0][recurrence.mb[node]]
            whole = work[stage.module].sum() * busiest[stage.module]
            load = work[stage.module][samples[start:stop]].sum() * share[index] / whole
            # Both the inputs' and the weights' gradient.
            times[node] = load * (2 if recurrence.backward[node] else 1)
    got = BatchOrder(program, "default").makespans(samples[None], work)
    assert got[0] == pytest.approx(recurrence.makespans(times)[0], rel=1e-12)


def test_the_unit_of_work_does_not_matter() -> None:
    plan = make_plan(
        unit("e", k=8, kind="1f1b"),
        unit("l", "e", dp=2, pp=2, k=4, kind="1f1b"),
        losses=[loss("x", "l")],
        batch=8,
    )
    order = BatchOrder(compile_plan(plan), "default")
    work = skewed(8, 0, "e", "l")
    other = {"e": work["e"] * 1024, "l": work["l"] / 4}
    assert order(work, 1).tolist() == order(other, 1).tolist()


def test_uneven_shares_get_equal_work_in_their_numbers() -> None:
    plan = make_plan(
        unit("v", dp=2, sizes=[(1,) * 6, (1,) * 2], kind="1f1b"), losses=[loss("l", "v")], batch=8
    )
    program = compile_plan(plan)
    work = {"v": np.array([6.0, 6, 2, 2, 2, 2, 2, 2])}
    got = BatchOrder(program, "default")(work, 0)
    held = [
        sorted(work["v"][got[start]] for start, _ in row) for row in program.stages[0].microbatches
    ]
    assert held == [[2] * 6, [6, 6]]


def test_a_short_step_gets_less_effort_and_still_a_good_order() -> None:
    plan = make_plan(unit("v", dp=2, k=8, kind="1f1b", pp=2), losses=[loss("l", "v")], batch=16)
    program = replace(compile_plan(plan), predicted_s=1e-4)
    work = {"v": np.sort(skewed(16, 0, "v")["v"])}
    order = BatchOrder(program, "default")
    got = order(work, 0)
    before, after = order.makespans(np.array([np.arange(16), got]), work)
    assert after < before


def test_equal_or_unknown_work_leaves_the_batch_alone() -> None:
    order = BatchOrder(chain(2, 4), "default")
    assert order({"v": np.ones(4)}, 0).tolist() == [0, 1, 2, 3]
    assert order({}, 0).tolist() == [0, 1, 2, 3]


def test_work_of_another_length_and_an_unknown_task_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="3 samples have work for v, the batch has 4"):
        BatchOrder(chain(2, 4), "default")({"v": np.ones(3)}, 0)
    with pytest.raises(InvalidInputError, match="nothing of the task other"):
        BatchOrder(chain(2, 4), "other")


def test_split_evenly_is_what_the_groups_get() -> None:
    counts = np.bincount(assign_groups(np.arange(10.0), 3)).tolist()
    assert counts == list(split_evenly(10, 3))
