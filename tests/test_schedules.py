"""Simulated schedules take the times, and hold the micro-batches, of their closed forms."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import ScheduleKind
from mmplan.simulation.step import simulate
from tests.clocks import FixedCosts, tower
from tests.programs import Kind, in_flight, loss, make_plan, unit


def check_batch_sync(stages: int, k: int, rounds: int, forward: float, backward: float) -> None:
    program = tower(stages, k, rounds)
    result = simulate(program, FixedCosts(forward=forward, backward=backward))
    n = k * rounds
    assert result.bubble_fraction == pytest.approx((stages - 1) / (n + stages - 1), abs=1e-12)
    assert result.iteration_s == pytest.approx((n + stages - 1) * (forward + backward))
    assert in_flight(program) == {(p, p): min(n, k + stages - 1 - p) for p in range(stages)}


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 16), st.integers(1, 8), st.sampled_from([0.25, 1.0, 2.0, 3.5])
)
def test_idle_share_of_batch_sync_is_the_lower_bound(
    stages: int, k: int, rounds: int, backward: float
) -> None:
    check_batch_sync(stages, k, rounds, 1.0, backward)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("backward", [0.5, 2.0])
def test_idle_share_of_batch_sync_on_the_whole_grid(stages: int, backward: float) -> None:
    for k in range(1, 17):
        for rounds in range(1, 9):
            check_batch_sync(stages, k, rounds, 1.0, backward)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_gpipe_and_1f1b_take_the_same_time_and_hold_their_micro_batches(
    kind: Kind, stages: int, n: int
) -> None:
    program = tower(stages, n, 1, kind=kind)
    result = simulate(program, FixedCosts(forward=1.0, backward=2.0))
    assert result.iteration_s == pytest.approx(3.0 * (n + stages - 1))
    assert result.bubble_fraction == pytest.approx((stages - 1) / (n + stages - 1))
    held = {(p, p): n if kind == "gpipe" else min(n, stages - p) for p in range(stages)}
    assert in_flight(program) == held
    assert result.peak_bytes == tuple(held[p, p] for p in range(stages))


@pytest.mark.parametrize("pp", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vpp", [2, 3, 4])
def test_interleaved_waits_for_one_chunk_a_hop_and_holds_what_megatron_holds(
    pp: int, vpp: int
) -> None:
    for n in {1, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 3 * pp - 1, 5 * pp}:
        plan = make_plan(
            unit("m", pp=pp, vpp=vpp, k=n, kind="interleaved"), losses=[loss("l", "m")], batch=n
        )
        program = compile_plan(plan)
        assert check_program(program) == []
        result = simulate(program, FixedCosts(forward=1.0, backward=2.0))
        # A chunk is 1/vpp of a stage's time, and so is each of the pp - 1 waits. Fewer than pp
        # micro-batches leave each rank idle before they come back to its next chunk.
        idle = (vpp - 1) * max(0, pp - n)
        assert result.iteration_s == pytest.approx((n * vpp + pp - 1 + idle) * 3.0)
        ahead = [2 * (pp - 1 - q) + (vpp - 1) * longest(n, pp) + 1 for q in range(pp)]
        if n % pp:
            assert all(held <= most for held, most in zip(result.peak_bytes, ahead, strict=True))
        else:
            assert result.peak_bytes == tuple(min(n * vpp, chunks) for chunks in ahead)


def longest(n: int, pp: int) -> int:
    """Micro-batches of the longest of n // pp groups; pp where there are fewer."""
    return max(pp, max(map(len, np.array_split(np.arange(n), max(1, n // pp)))))


@pytest.mark.parametrize("pp", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vpp", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("after", [0, 1, 3, pytest.param(4, marks=pytest.mark.slow), 7])
def test_what_waits_for_a_module_after_it_is_held_as_the_solver_thinks(
    pp: int, vpp: int, after: int
) -> None:
    """Two encoder stages, an interleaved module, and ``after`` stages behind it."""
    for n in (12 * pp, 3 * pp - 1, pp + 1):
        units = [
            unit("encoder", pp=2, k=n, kind="1f1b"),
            unit("llm", "encoder", pp=pp, vpp=vpp, k=n, kind="interleaved"),
            *([unit("image", "llm", pp=after, k=n, kind="1f1b")] if after else []),
        ]
        plan = make_plan(*units, losses=[loss("l", "image" if after else "llm")], batch=n)
        held = simulate(compile_plan(plan), FixedCosts(forward=1.0, backward=2.0)).peak_bytes
        group = longest(n, pp)
        slack = group - 1 if after else 0
        for q in range(pp):
            own = 1 + 2 * (pp - 1 - q)
            most = (vpp - 1) * (group + slack) + own + vpp * after
            assert held[2 + q] <= most
            if n == 12 * pp:
                ahead = (vpp - 1) * pp * (1 - (-after // pp)) + own + after
                assert held[2 + q] == min(ahead, n * vpp)
        for p in range(2):
            assert held[p] <= 2 - p + 2 * group + after + slack


def test_interleaving_keeps_to_the_cap_of_micro_batches_in_flight() -> None:
    plan = make_plan(
        unit("m", pp=2, vpp=2, k=8, kind="interleaved", in_flight=2),
        losses=[loss("l", "m")],
        batch=8,
    )
    program = compile_plan(plan)
    assert check_program(program) == []
    assert max(in_flight(program).values()) == 2


@pytest.mark.parametrize(("stages", "k", "rounds"), [(4, 4, 8), (3, 1, 2), (2, 5, 3), (1, 3, 3)])
def test_gpipe_with_syncs_drains_every_round(stages: int, k: int, rounds: int) -> None:
    plan = make_plan(
        unit("v", pp=stages, k=k, kind="gpipe", lead=0),
        losses=[loss("c", "v", sync_batch=k)],
        batch=rounds * k,
    )
    result = simulate(compile_plan(plan), FixedCosts(forward=1.0, backward=2.0))
    # By hand: 43% for 4 stages, K = 4, 8 sync batches.
    assert result.iteration_s == pytest.approx(rounds * (k + stages - 1) * 3.0)
    assert result.bubble_fraction == pytest.approx((stages - 1) / (k + stages - 1))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6)
        ),  # K, P, f, b
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
)
def test_towers_take_designs_time(towers: list[tuple[int, int, int, int]], rounds: int) -> None:
    """T = max (K+P-1) f + (G-1) max K (f+b) + max (K+P-1) b, equal stages, free syncs."""
    names = [f"m{i}" for i in range(len(towers))]
    plan = make_plan(
        *(unit(n, pp=t[1], k=t[0]) for n, t in zip(names, towers, strict=True)),
        losses=[loss("c", *names, sync_batch=12)],
        batch=12 * rounds,
    )
    costs = FixedCosts(
        by_module={n: (float(t[2]), float(t[3])) for n, t in zip(names, towers, strict=True)}
    )
    expected = (
        max((k + p - 1) * f for k, p, f, _ in towers)
        + (rounds - 1) * max(k * (f + b) for k, _, f, b in towers)
        + max((k + p - 1) * b for k, p, _, b in towers)
    )
    assert simulate(compile_plan(plan), costs).iteration_s == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.integers(1, 3),
            st.integers(1, 5),
            st.integers(0, 9),
            st.booleans(),
            st.integers(1, 2),
        ),  # K, P, f, b, frozen, dp
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
)
def test_frozen_and_replicated_towers_take_no_longer_than_that(
    towers: list[tuple[int, int, int, int, bool, int]], rounds: int
) -> None:
    names = [f"m{i}" for i in range(len(towers))]
    specs = [
        unit(n, k=k, pp=p, frozen=frozen, dp=dp)
        for n, (k, p, _, _, frozen, dp) in zip(names, towers, strict=True)
    ]
    plan = make_plan(*specs, losses=[loss("c", *names, sync_batch=24)], batch=24 * rounds)
    costs = FixedCosts(
        by_module={n: (float(t[2]), float(t[3])) for n, t in zip(names, towers, strict=True)}
    )
    stages = [(k, p, f, 0 if frozen else b) for k, p, f, b, frozen, _ in towers]
    bound = (
        max((k + p - 1) * f for k, p, f, _ in stages)
        + (rounds - 1) * max(k * (f + b) for k, _, f, b in stages)
        + max((k + p - 1) * b for k, p, _, b in stages)
    )
    assert simulate(compile_plan(plan), costs).iteration_s <= bound + 1e-9


@pytest.mark.parametrize(("stages", "k", "rounds"), [(1, 1, 1), (1, 3, 4), (4, 4, 3), (3, 5, 2)])
def test_a_blocking_sync_adds_its_time_once_a_round(stages: int, k: int, rounds: int) -> None:
    result = simulate(tower(stages, k, rounds), FixedCosts(gather=0.5, loss=0.25))
    assert result.iteration_s == pytest.approx(3.0 * (k * rounds + stages - 1) + 0.75 * rounds)


def test_forwards_hide_a_gather_between_start_and_wait() -> None:
    blocking = simulate(tower(1, 1, 2), FixedCosts(gather=1.0))
    assert blocking.iteration_s == 2 * (1 + 1 + 2)
    assert blocking.communication_s == (2.0,)
    # F0 START F1 START WAIT B0 WAIT B1: one gather runs beside F1, the other beside B0.
    hidden = simulate(tower(1, 1, 2, sync_lead=1), FixedCosts(gather=1.0))
    assert hidden.iteration_s == 1 + 1 + 2 + 2
    assert hidden.communication_s == (0.0,)


@pytest.mark.parametrize(("stages", "k", "rounds"), [(1, 2, 3), (2, 2, 3), (4, 4, 4), (3, 1, 5)])
def test_one_micro_batch_of_sync_lead_hides_a_gather_as_long_as_a_forward(
    stages: int, k: int, rounds: int
) -> None:
    result = simulate(tower(stages, k, rounds, sync_lead=1), FixedCosts(gather=1.0))
    assert result.iteration_s == 3 * (k * rounds + stages - 1)


def test_every_kind_of_schedule_that_a_plan_may_name_has_a_policy() -> None:
    assert set(POLICIES) == set(get_args(ScheduleKind))
