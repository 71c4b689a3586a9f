"""Curves: exact on lines, never negative or falling, robust where points are noisy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.fit import fit_curve, fit_module, fit_profile
from mmplan.errors import InvalidInputError
from mmplan.schema.cluster import load_cluster
from mmplan.schema.profile import Curve, ModuleProfile, Point, Profile

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

sizes_lists = st.lists(st.integers(1, 512), min_size=2, max_size=9, unique=True)
times = st.floats(1e-6, 1e3)


@settings(deadline=None)
@given(sizes_lists, times, times, st.integers(1, 3))
def test_points_on_one_line_are_passed_through(
    sizes: list[int], alpha: float, beta: float, repeats: int
) -> None:
    points = [(u, alpha + beta * u) for u in sizes] * repeats
    curve = fit_curve(*map(list, zip(*points, strict=True)))
    for u in (*sizes, 0.5, 1000):
        assert curve.at(u) == pytest.approx(alpha + beta * u, rel=1e-9 * max(1, 1 / u) * 1000)
    for u in sizes:
        assert curve.at(u) == pytest.approx(alpha + beta * u, rel=1e-9)
    assert curve.knots == ()
    assert curve.residual_p90 <= 1e-9


@settings(deadline=None)
@given(sizes_lists, times)
def test_a_line_through_zero_and_one_below_it_are_exact_too(sizes: list[int], beta: float) -> None:
    through_zero = fit_curve(sizes, [beta * u for u in sizes])
    below = fit_curve(sizes, [beta * (u - min(sizes) / 2) for u in sizes])
    for u in sizes:
        assert through_zero.at(u) == pytest.approx(beta * u, rel=1e-9)
        assert below.at(u) == pytest.approx(beta * (u - min(sizes) / 2), rel=1e-9)
    assert below.at(0) == 0


@settings(deadline=None)
@given(sizes_lists, times)
def test_without_knots_a_line_is_one_slope_from_zero_on(sizes: list[int], beta: float) -> None:
    below = fit_curve(sizes, [beta * (u - min(sizes) / 2) for u in sizes], knots_max=0)
    assert below.knots == ()
    assert below.alpha == 0
    above = fit_curve(sizes, [beta * (u + 3) for u in sizes], knots_max=0)
    assert above.alpha == pytest.approx(3 * beta, rel=1e-6)


@settings(deadline=None)
@given(st.integers(1, 512), times)
def test_one_point_is_proportional(size: int, time_s: float) -> None:
    curve = fit_curve([size], [time_s])
    assert curve.alpha == 0
    assert curve.at(3 * size) == pytest.approx(3 * time_s)
    assert (curve.lowest, curve.highest) == (size, size)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 256), st.floats(0, 10)), min_size=1, max_size=12),
    st.integers(0, 2),
)
def test_any_points_give_a_curve_that_rises_and_is_never_negative(
    points: list[tuple[int, float]], knots_max: int
) -> None:
    curve = fit_curve([u for u, _ in points], [t for _, t in points], knots_max=knots_max)
    assert curve.alpha >= 0
    values = [curve.at(u) for u in range(600)]
    assert min(values) >= 0
    assert all(b >= a for a, b in itertools.pairwise(values))
    assert all(curve.lowest <= knot < curve.highest for knot in curve.knots)
    assert Curve.model_validate(curve.model_dump()) == curve


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 64), times), min_size=2, max_size=8), st.randoms())
def test_the_order_of_the_points_does_not_matter(points: list[Any], random: Any) -> None:
    shuffled = random.sample(points, len(points))
    curves = [fit_curve([u for u, _ in p], [t for _, t in p]) for p in (points, shuffled)]
    for u in (1, 7, 100):
        assert curves[0].at(u) == pytest.approx(curves[1].at(u), rel=1e-6)


def _two_pieces(u: float, alpha: float, below: float, above: float, knot: float) -> float:
    return alpha + below * min(u, knot) + above * max(0.0, u - knot)


def test_two_pieces_with_noise_and_outliers_are_found_within_five_percent() -> None:
    rng = np.random.default_rng(0)
    median_K, bends = [], 0
    for _ in range(40):
        slope = rng.uniform(1e-4, 1e-3)
        truth = (rng.uniform(0, 0.01), slope, slope * rng.choice([0.3, 3]), rng.choice([8, 16, 32]))
        sizes = np.repeat(SIZES, 6)
        values = np.array([_two_pieces(u, *truth) for u in sizes])
        values *= 1 + 0.05 * rng.standard_normal(len(sizes))
        outliers = rng.random(len(sizes)) < 0.08
        values[outliers] *= rng.uniform(1.5, 4, outliers.sum())
        curve = fit_curve(sizes.tolist(), values.tolist())
        asked = (1, 3, 6, 12, 24, 48, 96, 128)
        error = [abs(curve.at(u) / _two_pieces(u, *truth) - 1) for u in asked]
        median_K.append(np.median(error))
        bends += bool(curve.knots)
    assert np.median(median_K) < 0.02
    assert max(median_K) < 0.05
    assert bends >= 34


def test_noise_on_a_line_seldom_makes_a_knot() -> None:
    rng = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 4)
    knots = 0
    for _ in range(40):
        values = (0.004 + 0.001 * sizes) * (1 + 0.05 * rng.standard_normal(len(sizes)))
        knots += bool(fit_curve(sizes.tolist(), values.tolist()).knots)
    assert knots <= 8


def test_a_point_with_a_wide_spread_counts_less() -> None:
    sizes, values = [1, 2, 3, 4], [1.0, 2.0, 6.0, 4.0]
    plain = fit_curve(sizes, values, knots_max=0)
    spread = fit_curve(sizes, values, spreads=[0.01, 0.01, 5.0, 0.01], knots_max=0)
    assert abs(spread.at(4) - 4) < abs(plain.at(4) - 4)
    assert spread.at(2) == pytest.approx(2, rel=0.01)


def test_residuals_are_those_of_the_points() -> None:
    curve = fit_curve([4, 4, 4], [1.0, 1.0, 2.0])
    assert curve.at(4) == 1.0
    assert curve.residual_median == 0
    assert curve.residual_p90 == pytest.approx(np.quantile([0, 0, 0.5], 0.9))
    assert curve.points == 3


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ([], [], "got 0 sizes"),
        ([1, 2], [1.0], "got 2 sizes, 1 values"),
        ([0, 2], [1.0, 1.0], r"point 0 \(size 0"),
        ([1, 2], [1.0, -1.0], "point 1 .*value -1"),
        ([1, 2], [1.0, float("nan")], "point 1"),
    ],
)
def test_what_cannot_be_fitted_is_named(
    sizes: list[float], values: list[float], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        fit_curve(sizes, values)


def _points(**changes: Any) -> ModuleProfile:
    base: dict[str, Any] = {
        "blocks": 4,
        "parameters": 8.0,
        "points": (Point(microbatch=1, forward_s=1.0, backward_s=3.0),),
    }
    return ModuleProfile.model_validate(base | changes)


def test_half_of_the_blocks_stands_for_the_module_by_its_share_of_the_work() -> None:
    half = Point(microbatch=2, blocks=2, forward_s=3.0, backward_s=6.0, activation_bytes=5)
    fit = fit_module(_points(points=(half,), block_work=(1, 2, 3, 4)), 1)
    assert fit.forward.at(2) == pytest.approx(10.0)
    assert fit.backward_input.at(2) == pytest.approx(10.0)  # half of the backward
    assert fit.activation_bytes.at(2) == pytest.approx(10.0)  # blocks hold the same each


def test_partial_points_only_show_in_the_residuals_of_whole_ones() -> None:
    whole = [Point(microbatch=u, forward_s=1 + u, backward_s=1) for u in (1, 2, 4)]
    half = Point(microbatch=4, blocks=2, forward_s=4.0, backward_s=0.5)
    fit = fit_module(_points(points=(*whole, half)), 1)
    assert fit.forward.at(4) == pytest.approx(5)
    assert fit.forward.points == 4
    assert fit.forward.residual_p90 > 0.2  # 8 s measured, 5 s charged


def test_a_profile_is_fitted_for_every_tp_and_every_task_of_its_own() -> None:
    module = _points(
        points=tuple(
            Point(tp=tp, microbatch=u, forward_s=u / tp, backward_s=2 * u / tp)
            for tp in (1, 2)
            for u in (1, 2)
        )
    )
    own = [{"tp": 1, "microbatch": 1, "forward_s": 7.0, "backward_s": 1.0}]
    profile = Profile(
        name="p",
        source="given",
        cluster=load_cluster("p3-8"),
        modules={"m": module},
        tasks={"VL": {"m": {"points": own}}},
    )
    fits = fit_profile(profile).modules
    assert {key: set(value) for key, value in fits.items()} == {"m": {"1", "2"}, "VL.m": {"1"}}
    assert fits["m"]["2"].forward.at(2) == pytest.approx(1)
    assert fits["VL.m"]["1"].forward.at(1) == 7
