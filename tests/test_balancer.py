"""The load balancer against an oracle that only knows the problem statement."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.distmm.balancer import (
    OptionTable,
    balance,
    balance_best_first,
    make_table,
)


def brute_force(
    tables: list[OptionTable], devices: int, rounds: int
) -> list[tuple[float, float, int]]:
    """Best (T, device-seconds, devices) of every combination of groups, sorted.

    Exponential, obvious, and shares no code with the solver.
    """
    grids = np.meshgrid(*(np.arange(len(table)) for table in tables), indexing="ij")
    picks = [grid.ravel() for grid in grids]

    def rows(name: str) -> np.ndarray:
        return np.array([getattr(t, name)[o] for t, o in zip(tables, picks, strict=True)])

    value = (
        rows("first_s").max(axis=0)
        + (rounds - 1) * rows("round_s").max(axis=0)
        + rows("last_s").max(axis=0)
    )
    taken, busy_s, groups = rows("devices").sum(axis=0), rows("device_s").sum(axis=0), rows("group")
    best: dict[tuple[int, ...], tuple[float, float, int]] = {}
    for i in np.flatnonzero(taken <= devices):
        entry = float(value[i]), float(busy_s[i]), int(taken[i])
        key = tuple(groups[:, i])
        best[key] = min(entry, best.get(key, entry))
    return sorted(best.values())


def solve_all(
    tables: list[OptionTable], devices: int, rounds: int, top: int
) -> list[tuple[float, float, int]]:
    try:
        found = list(
            itertools.islice(balance_best_first(tables, devices=devices, rounds=rounds), top)
        )
    except InfeasibleError:
        return []
    for plan in found:
        first_s, round_s, last_s = (
            max(getattr(t, name)[o] for t, o in zip(tables, plan.choice, strict=True))
            for name in ("first_s", "round_s", "last_s")
        )
        assert plan.objective_s == first_s + (rounds - 1) * round_s + last_s
        assert plan.devices == tuple(
            int(t.devices[o]) for t, o in zip(tables, plan.choice, strict=True)
        )
    return [(p.objective_s, p.device_s, sum(p.devices)) for p in found]


@st.composite
def option_tables(draw: st.DrawFn, max_options: int = 6, max_devices: int = 6) -> OptionTable:
    """Small integers, so that ties are common."""
    size = draw(st.integers(1, max_options))

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=size, max_size=size))

    return make_table(
        column(1, max_devices),
        column(0, 6),
        round_s=column(0, 6),
        last_s=column(0, 6),
        device_s=column(0, 3),
        group=column(0, 3),
    )


def random_table(rng: np.random.Generator, highest: int) -> OptionTable:
    size = int(rng.integers(1, 7))
    times = [rng.integers(0, highest, size).astype(float) for _ in range(4)]
    return make_table(
        rng.integers(1, 9, size),
        times[0],
        round_s=times[1],
        last_s=times[2],
        device_s=times[3],
        group=rng.integers(0, 4, size),
    )


tables_lists = st.lists(option_tables(), min_size=1, max_size=3)


@given(tables_lists, st.integers(1, 16), st.integers(1, 3))
@example([make_table([1], [5.0])], 1, 1)  # one option, one device
@example([make_table([1, 2], [7.0, 7.0])] * 2, 3, 2)  # everything ties
@example([make_table([2], [1.0])] * 2, 3, 1)  # one device short
# A floor that is no option's value any more: the search once halved this box for ever.
@example(
    [
        make_table(
            [2, 1, 4, 3, 1],
            [4, 3, 0, 5, 3],
            round_s=[4, 1, 4, 1, 0],
            last_s=[2, 6, 0, 1, 2],
            device_s=[5, 3, 3, 0, 4],
        ),
        make_table([5], [1], round_s=[5], last_s=[0], device_s=[5]),
    ],
    14,
    3,
)
def test_the_k_best_match_brute_force(tables: list[OptionTable], devices: int, rounds: int) -> None:
    want = brute_force(tables, devices, rounds)
    assert solve_all(tables, devices, rounds, 6) == want[:6]


def test_the_k_best_match_brute_force_on_random_instances() -> None:
    rng = np.random.default_rng(7)
    infeasible = 0
    for _ in range(400):
        highest = int(rng.choice([3, 10, 1000]))
        tables = [random_table(rng, highest) for _ in range(rng.integers(1, 4))]
        devices, rounds = int(rng.integers(1, 15)), int(rng.integers(1, 4))
        want = brute_force(tables, devices, rounds)
        infeasible += not want
        assert solve_all(tables, devices, rounds, 3) == want[:3]
    assert 12 < infeasible < 280


@given(tables_lists, st.integers(8, 20), st.integers(1, 3))
def test_one_more_device_never_hurts(tables: list[OptionTable], devices: int, rounds: int) -> None:
    values = [solve_all(tables, n, rounds, 1) for n in (devices, devices + 1)]
    if values[0]:
        assert values[1][0][0] <= values[0][0][0]


@given(tables_lists, st.integers(18, 20), st.integers(1, 3), st.randoms())
def test_module_order_does_not_matter(
    tables: list[OptionTable], devices: int, rounds: int, random: Random
) -> None:
    shuffled = list(tables)
    random.shuffle(shuffled)
    one = balance(tables, devices=devices, rounds=rounds)
    other = balance(shuffled, devices=devices, rounds=rounds)
    assert (one.objective_s, one.device_s) == (other.objective_s, other.device_s)


@given(tables_lists, st.integers(18, 20), st.integers(1, 3))
def test_scaling_the_times_scales_the_objective(
    tables: list[OptionTable], devices: int, rounds: int
) -> None:
    scaled = [
        make_table(
            t.devices,
            4 * t.first_s,
            round_s=4 * t.round_s,
            last_s=4 * t.last_s,
            device_s=4 * t.device_s,
            group=t.group,
        )
        for t in tables
    ]
    one = balance(tables, devices=devices, rounds=rounds)
    four = balance(scaled, devices=devices, rounds=rounds)
    assert four.objective_s == 4 * one.objective_s
    assert four.device_s == 4 * one.device_s


def test_a_large_optimum_holds_its_certificate() -> None:
    """Far too big to enumerate: with every option that is no better removed, nothing fits."""
    rng = np.random.default_rng(3)
    devices = 2048
    counts = np.arange(1, devices)
    tables = [
        make_table(counts, rng.uniform(0, 0.1) + rng.uniform(1, 9) * np.ceil(40000 / counts))
        for _ in range(6)
    ]
    got = balance(tables, devices=devices, rounds=1)
    assert sum(got.devices) <= devices
    fewest = [t.devices[t.first_s < got.objective_s].min(initial=devices) for t in tables]
    assert sum(fewest) > devices
    assert max(t.first_s[o] for t, o in zip(tables, got.choice, strict=True)) == got.objective_s


def test_ties_go_to_fewest_device_seconds_then_fewest_devices() -> None:
    table = make_table([4, 3, 2, 1], [5, 5, 5, 9], device_s=[6, 6, 8, 1])
    got = balance([table], devices=4, rounds=1)
    assert (got.choice, got.devices) == ((1,), (3,))


def test_too_few_devices_says_how_many_are_missing() -> None:
    tables = [make_table([2, 4], [2.0, 1.0]), make_table([3], [1.0])]
    with pytest.raises(InfeasibleError, match=r"2 \+ 3 = 5 devices, there are 4") as error:
        balance(tables, devices=4, rounds=1)
    assert error.value.hint == "give it 1 more device"


def test_a_module_without_options_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="module 1 has no option"):
        balance([make_table([1], [1.0]), make_table([], [])], devices=4, rounds=1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_impossible_times_are_refused_with_the_place(bad: float) -> None:
    with pytest.raises(InvalidInputError, match=r"last_s\[1\] is"):
        make_table([1, 2], [1.0, 1.0], last_s=[1.0, bad])


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"lengths \[1, 2\]"):
        make_table([1, 2], [1.0])


def test_no_devices_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="0 devices"):
        balance([make_table([1], [1.0])], devices=0, rounds=1)
