"""The search over disaggregated pipelines against an oracle that only knows the formula."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mmplan.solvers.convex.branch_and_bound import (
    Group,
    GroupFamily,
    KnownTimes,
    Options,
    QuickOptions,
    best_plans,
    plan_value,
)
from mmplan.solvers.pareto import lower_hull, pareto_rows, sum_of_hulls

Edges = list[tuple[int, int]]
# Producers before consumers; the last module of the first group is the only one.
GRAPHS: dict[str, tuple[int, Edges]] = {
    "alone": (1, []),
    "encoder, llm": (2, [(0, 1)]),
    "encoder, llm, generator": (3, [(0, 1), (1, 2)]),
    "two encoders, generator": (4, [(0, 2), (1, 2), (2, 3)]),
    "three encoders": (4, [(0, 3), (1, 3), (2, 3)]),
    "encoder, llm, two generators": (4, [(0, 1), (1, 2), (1, 3)]),
    "encoder into llm and generator": (3, [(0, 1), (0, 2), (1, 2)]),
    "apart": (2, []),
}


def random_options(rng: np.random.Generator) -> Options:
    """Small whole numbers, so that ties, dominated options and tight rooms are common."""
    count = int(rng.integers(1, 7))
    depth = rng.integers(1, 4, count)
    return Options(
        devices=rng.integers(1, 7, count) * depth,
        warm_s=rng.integers(1, 9, count).astype(float),
        stage_s=rng.integers(1, 9, count).astype(float),
        reduce_s=rng.integers(0, 4, count).astype(float),
        depth=depth,
        depth_limit=rng.choice([-1, 0, 1, 2, 3, 5, 100], count).astype(np.int64),
    )


def random_groups(rng: np.random.Generator, modules: int) -> list[tuple[int, list[Options]]]:
    return [
        (int(rng.integers(1, 6)), [random_options(rng) for _ in range(modules)])
        for _ in range(int(rng.integers(1, 4)))
    ]


def paths(modules: int, edges: Edges) -> list[list[int]]:
    """Every path from any module to an end, written out."""
    after = {k: [c for p, c in edges if p == k] for k in range(modules)}

    def grow(k: int) -> list[list[int]]:
        return [[k, *rest] for c in after[k] for rest in grow(c)] or [[k]]

    return [path for k in range(modules) for path in grow(k)]


def values(
    groups: Sequence[tuple[int, list[Options]]], edges: Edges, devices: int
) -> list[tuple[float, int, tuple[int, ...]]]:
    """Every feasible plan and its value: exponential, and shares no code with the search."""
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for g, (steps, options) in enumerate(groups):
        all_paths = paths(len(options), edges)
        for choice in itertools.product(*(range(len(own)) for own in options)):
            picked = list(zip(options, choice, strict=True))
            if sum(int(own.devices[o]) for own, o in picked) > devices:
                continue
            depth = [int(own.depth[o]) for own, o in picked]
            if any(
                int(options[path[0]].depth_limit[choice[path[0]]]) < sum(depth[k] for k in path[1:])
                for path in all_paths
            ):
                continue
            warm = [float(own.warm_s[o]) for own, o in picked]
            value = (
                max(sum(warm[k] for k in path) for path in all_paths)
                + (steps - 1) * max(float(own.stage_s[o]) for own, o in picked)
                + max(float(own.reduce_s[o]) for own, o in picked)
            )
            found.append((value, g, choice))
    return found


def quick(own: Options) -> QuickOptions:
    return QuickOptions(
        devices=own.devices, warm_s=own.warm_s, stage_s=own.stage_s, complete=own.take
    )


def as_groups(
    groups: Sequence[tuple[int, list[Options]]], bounds: Sequence[float] | None = None
) -> list[Group]:
    return [
        Group(
            steps=steps,
            bound_s=bounds[g] if bounds else 0.0,
            build=lambda options=options: [quick(own) for own in options],
        )
        for g, (steps, options) in enumerate(groups)
    ]


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GRAPHS)
def test_equals_exhaustive_enumeration(name: str, count: int) -> None:
    modules, edges = GRAPHS[name]
    rng = np.random.default_rng(len(name))
    feasible = 0
    for _ in range(count):
        groups = random_groups(rng, modules)
        devices = int(rng.integers(modules, 30))
        expected = values(groups, edges, devices)
        found = best_plans(as_groups(groups), edges, devices=devices)
        assert bool(found) == bool(expected)
        if found:
            feasible += 1
            assert found[0].value_s == min(expected)[0]
            assert (found[0].value_s, found[0].group, found[0].choice) in expected
    assert feasible > 0


@pytest.mark.parametrize("name", ["encoder, llm, generator", "two encoders, generator"])
def test_several_plans_are_sorted_different_and_real(name: str) -> None:
    modules, edges = GRAPHS[name]
    rng = np.random.default_rng(5)
    for _ in range(150):
        groups = random_groups(rng, modules)
        expected = values(groups, edges, 25)
        found = best_plans(as_groups(groups), edges, devices=25, top=4)
        keys = [(f.value_s, f.group, f.choice) for f in found]
        assert set(keys) <= set(expected)
        assert [f.value_s for f in found] == sorted(f.value_s for f in found)
        assert len(set(keys)) == len(keys)
        if expected:
            assert found[0].value_s == min(expected)[0]
        for f in found:
            steps, options = groups[f.group]
            assert plan_value(options, f.choice, steps, edges) == f.value_s


@pytest.mark.parametrize("steps", [1, 2, 16])
def test_a_chain_of_many_modules_ends(steps: int) -> None:
    """By enumeration there are more than 10 to the power of 30 plans."""
    work, devices = [1.0 + k % 5 for k in range(24)], 72
    options = [
        Options(
            devices=np.arange(1, 25),
            warm_s=own / np.arange(1, 25),
            stage_s=own / np.arange(1, 25),
            reduce_s=np.zeros(24),
            depth=np.ones(24, dtype=np.int64),
            depth_limit=np.full(24, 100),
        )
        for own in work
    ]
    # Under each limit of a stage's time, the least sum of warm-ups by devices.
    expected = np.inf
    for limit_s in {float(own.stage_s[row]) for own in options for row in range(len(own))}:
        least = np.append(0.0, np.full(devices, np.inf))
        for own in work:
            ways = [
                np.append(np.full(d, np.inf), least[:-d] + own / d)
                for d in range(1, 25)
                if own / d <= limit_s
            ]
            least = np.min(ways, axis=0) if ways else np.full(devices + 1, np.inf)
        expected = min(expected, least.min() + (steps - 1) * limit_s)
    edges = list(itertools.pairwise(range(24)))
    found = best_plans(as_groups([(steps, options)]), edges, devices=devices)
    assert found[0].value_s == pytest.approx(expected)


def test_sums_of_hulls_are_below_every_choice_of_points() -> None:
    rng = np.random.default_rng(7)
    for _ in range(100):
        points = [rng.integers(0, 20, (int(rng.integers(1, 6)), 2)).astype(float) for _ in range(3)]
        x, y = sum_of_hulls([lower_hull(own) for own in points]).T
        sums = np.array([np.sum(chosen, axis=0) for chosen in itertools.product(*points)])
        assert (np.interp(sums[:, 0], x, y) <= sums[:, 1] + 1e-9).all()
        # Each corner is a choice.
        assert all(
            (np.abs(sums - corner) < 1e-9).all(axis=1).any() for corner in zip(x, y, strict=True)
        )


def test_tight_bounds_of_groups_change_nothing() -> None:
    modules, edges = GRAPHS["encoder, llm, generator"]
    rng = np.random.default_rng(8)
    for _ in range(200):
        groups = random_groups(rng, modules)
        expected = values(groups, edges, 20)
        bounds = [
            min((v for v, h, _ in expected if h == g), default=1e9) for g in range(len(groups))
        ]
        found = best_plans(as_groups(groups, bounds), edges, devices=20)
        assert [f.value_s for f in found] == ([min(expected)[0]] if expected else [])


def test_groups_beyond_their_bound_are_never_built() -> None:
    rng = np.random.default_rng(2)
    options = [random_options(rng)]
    good = replace(options[0].take(np.array([0])), depth_limit=np.array([9]))
    value = plan_value([good], [0], 3, [])

    def refuse() -> list[QuickOptions]:
        raise AssertionError("built a group that cannot be better")

    groups = [
        Group(steps=3, bound_s=value * (1 + 1e-9), build=refuse),
        Group(steps=3, bound_s=0.0, build=lambda: [quick(good)]),
    ]
    assert best_plans(groups, [], devices=100)[0].value_s == value


def slower(rng: np.random.Generator, own: Options) -> Options:
    """Options of a group with more samples: none is faster or takes fewer devices."""
    more = rng.integers(0, 2, (3, len(own)))
    return replace(
        own,
        devices=own.devices + more[0],
        warm_s=own.warm_s + more[1],
        stage_s=own.stage_s + more[2],
        reduce_s=rng.permutation(own.reduce_s),
        depth_limit=rng.permutation(own.depth_limit),
    )


def test_families_change_nothing_and_leave_groups_unbuilt() -> None:
    modules, edges = GRAPHS["encoder, llm, generator"]
    rng, built = np.random.default_rng(13), list[int]()
    for _ in range(100):
        steps = int(rng.integers(1, 6))
        rows = [[random_options(rng) for _ in range(modules)]]
        for _ in range(6):
            rows.append([slower(rng, own) for own in rows[-1]])
        plain = as_groups([(steps, options) for options in rows])

        def build(g: int, plain: list[Group] = plain) -> Sequence[QuickOptions]:
            built.append(g)
            return plain[g].build()

        related = []
        for g, options in enumerate(rows):
            known = KnownTimes(options[1].warm_s, options[1].stage_s, options[1].reduce_s)
            family = GroupFamily(key="all", samples=g, module=1, known=lambda known=known: known)
            related.append(replace(plain[g], build=partial(build, g), family=family))
        for top in (1, 4):
            expected = best_plans(plain, edges, devices=20, top=top)
            assert best_plans(related, edges, devices=20, top=top) == expected
    assert 200 < len(built) < 0.7 * 200 * 7


def test_one_more_device_never_hurts_and_time_scales() -> None:
    modules, edges = GRAPHS["two encoders, generator"]
    rng = np.random.default_rng(11)
    for _ in range(40):
        groups = random_groups(rng, modules)
        before = float("inf")
        for devices in range(modules, 40, 3):
            found = best_plans(as_groups(groups), edges, devices=devices)
            value = found[0].value_s if found else float("inf")
            assert value <= before
            before = value
        doubled = [
            (
                steps,
                [
                    Options(
                        devices=own.devices,
                        warm_s=2 * own.warm_s,
                        stage_s=2 * own.stage_s,
                        reduce_s=2 * own.reduce_s,
                        depth=own.depth,
                        depth_limit=own.depth_limit,
                    )
                    for own in options
                ],
            )
            for steps, options in groups
        ]
        found = best_plans(as_groups(doubled), edges, devices=37)
        assert (found[0].value_s if found else float("inf")) == 2 * before


def test_pareto_rows_against_pairs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        rows = rng.integers(0, 5, (int(rng.integers(1, 300)), int(rng.integers(2, 6)))).astype(
            float
        )
        kept = pareto_rows(rows)
        assert len(np.unique(rows[kept], axis=0)) == len(kept)
        beaten = np.any(np.all(rows[kept][None] <= rows[:, None], axis=2), axis=1)
        assert beaten.all()
        for i in kept:
            better = np.all(rows <= rows[i], axis=1) & np.any(rows < rows[i], axis=1)
            assert not better.any()
