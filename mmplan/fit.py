"""Fitted times: piecewise-linear, non-negative, robust, and honest about their residuals.

A curve over the micro-batch size u is ``T(u) = alpha + sum_i slope_i * (length of u in
piece i)``. Points on one line are passed through exactly. Otherwise coefficients minimise

    sum_k huber((T(u_k) - T_k) / T_k),   alpha, slope_i >= 0,

and the number of pieces is the one with the least BIC, knots being measured sizes.

Shape suffixes used in this file: K = points, P = coefficients.

Source: the estimator of Spindle, arXiv:2409.03365, section 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mmplan.errors import InvalidInputError
from mmplan.schema.profile import (
    Curve,
    Fits,
    LossFit,
    LossProfile,
    ModuleFit,
    ModuleProfile,
    Point,
    Profile,
)

Array = NDArray[np.float64]

# Relative error below which points count as lying on one line.
EXACT = 1e-9
# Relative noise that no timing is free of: residuals below it are no reason for a knot.
NOISE_FLOOR = 0.005
# Huber's constant: 95% efficiency under normal errors.
_HUBER = 1.345
_MAD_TO_SIGMA = 1.4826
_MAX_KNOT_CANDIDATES = 8
_ROUNDS = 12


def fit_curve(
    sizes: Sequence[float],
    values: Sequence[float],
    *,
    spreads: Sequence[float | None] | None = None,
    knots_max: int = 2,
) -> Curve:
    """Fit a curve to measured values.

    Args:
        sizes: positive sizes (micro-batch, samples), any order, repeats allowed.
        values: non-negative value at each size.
        spreads: half-width of the middle half of the repeats of each point, where known:
            points noisier than the others weigh less.
        knots_max: most knots the curve may have.

    Returns:
        The curve. One size alone gives a proportional curve.

    Raises:
        InvalidInputError: no points, or sizes and values that are not what they must be.
    """
    size_K, value_K = _checked(sizes, values)
    curve = _through_line(size_K, value_K)
    if curve is None:
        weight_K = _weights(value_K, spreads)
        candidates = _knot_candidates(size_K)
        chosen = _select(
            [
                _Design(knots=knots, columns=_columns(size_K, knots))
                for knots in _knot_sets(candidates, len(np.unique(size_K)), knots_max)
            ],
            value_K,
            weight_K,
        )
        curve = _as_curve(chosen, size_K)
    return with_residuals(curve, size_K, value_K)


def with_residuals(
    curve: Curve, sizes: Sequence[float] | Array, values: Sequence[float] | Array
) -> Curve:
    """The curve with its relative residuals at these points written down."""
    value_K = np.asarray(values, dtype=np.float64)
    got_K = np.array([curve.at(float(size)) for size in sizes])
    error_K = np.abs(got_K - value_K) / np.maximum(value_K, _tiny(value_K))
    changes = {
        "residual_median": float(np.median(error_K)),
        "residual_p90": float(np.quantile(error_K, 0.9)),
        "points": len(value_K),
    }
    return curve.model_copy(update=changes)


def _checked(sizes: Sequence[float], values: Sequence[float]) -> tuple[Array, Array]:
    size_K = np.asarray(sizes, dtype=np.float64)
    value_K = np.asarray(values, dtype=np.float64)
    if size_K.size == 0 or size_K.shape != value_K.shape:
        raise InvalidInputError(
            f"a fit needs as many values as sizes, got {size_K.size} and {value_K.size}"
        )
    good = np.isfinite(size_K) & np.isfinite(value_K) & (size_K > 0) & (value_K >= 0)
    if not good.all():
        k = int(np.argmin(good))
        raise InvalidInputError(
            f"point {k} (size {size_K[k]:g}, value {value_K[k]:g}) cannot be fitted",
            hint="sizes must be positive, values finite and not negative",
        )
    order = np.argsort(size_K, kind="stable")
    return size_K[order], value_K[order]


def _tiny(value_K: Array) -> float:
    """What relative errors of zero are measured against."""
    return max(float(value_K.max(initial=0.0)) * 1e-9, 1e-300)


def _weights(value_K: Array, spreads: Sequence[float | None] | None) -> Array:
    """1/T, less for points whose repeats spread wider than is usual among these points."""
    weight_K = 1.0 / np.maximum(value_K, max(float(value_K.max()) * 1e-3, 1e-300))
    if spreads is None or all(spread is None for spread in spreads):
        return weight_K
    known = [spread for spread in spreads if spread is not None]
    spread_K = np.array([np.median(known) if spread is None else spread for spread in spreads])
    relative_K = np.maximum(spread_K * weight_K, NOISE_FLOOR)
    return weight_K * np.minimum(1.0, float(np.median(relative_K)) / relative_K)


def _through_line(size_K: Array, value_K: Array) -> Curve | None:
    """The curve through points that lie on one rising line; None where they do not.

    A line that is negative at 0 becomes two pieces with their knot at the smallest size:
    proportional below it, exact above.
    """
    lowest, highest = float(size_K[0]), float(size_K[-1])
    if lowest == highest:
        if np.ptp(value_K) > EXACT * value_K.max():
            return None
        slope = float(value_K[0]) / lowest
        return Curve(alpha=0.0, slopes=(slope,), lowest=lowest, highest=highest)
    slope = float(value_K[-1] - value_K[0]) / (highest - lowest)
    line_K = value_K[0] + slope * (size_K - lowest)
    if slope < 0 or (np.abs(line_K - value_K) > EXACT * np.maximum(value_K, 0)).any():
        return None
    alpha = float(value_K[0]) - slope * lowest
    if alpha >= -EXACT * float(value_K[0]):
        # Rounding must not push a proportional line below zero.
        return Curve(alpha=max(alpha, 0.0), slopes=(slope,), lowest=lowest, highest=highest)
    first = float(value_K[0]) / lowest
    return Curve(alpha=0.0, knots=(lowest,), slopes=(first, slope), lowest=lowest, highest=highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """One candidate model: its linear columns, and what makes it this one."""

    columns: Array
    knots: tuple[float, ...] = ()

    @property
    def num_parameters(self) -> int:
        # A knot that was searched for is a parameter too.
        return self.columns.shape[1] + len(self.knots)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    design: _Design
    coefficients: Array
    errors: Array


def _columns(size_K: Array, knots: tuple[float, ...]) -> Array:
    """[K, 2 + len(knots)]: a constant, then the length of each size in each piece."""
    edges = (0.0, *knots, np.inf)
    pieces = [np.clip(size_K, a, b) - a for a, b in itertools.pairwise(edges)]
    return np.stack([np.ones_like(size_K), *pieces], axis=1)


def _knot_candidates(size_K: Array) -> list[float]:
    interior = np.unique(size_K)[1:-1]
    if len(interior) > _MAX_KNOT_CANDIDATES:
        chosen = np.linspace(0, len(interior) - 1, _MAX_KNOT_CANDIDATES).round().astype(int)
        interior = interior[np.unique(chosen)]
    return [float(size) for size in interior]


def _knot_sets(
    candidates: list[float], num_sizes: int, knots_max: int
) -> Iterator[tuple[float, ...]]:
    """Sets of knots that leave at least one size more than there are coefficients."""
    for num in range(knots_max + 1):
        if num and num_sizes < num + 3:
            return
        yield from itertools.combinations(candidates, num)


def _select(designs: Sequence[_Design], value_K: Array, weight_K: Array) -> _Fitted:
    """The design with the least BIC, its errors measured in units of one common noise."""
    fitted = [_fit_robust(design, value_K, weight_K) for design in designs]
    # The noise is judged by the richest designs: a bend left out must not count as noise.
    most = max(item.design.num_parameters for item in fitted)
    rich = [_sigma(item.errors) for item in fitted if item.design.num_parameters == most]
    sigma = min(rich)
    return min(fitted, key=lambda item: _bic(item, sigma))


def _bic(fitted: _Fitted, sigma: float) -> float:
    num = len(fitted.errors)
    size_K = np.abs(fitted.errors) / sigma
    huber_K = np.where(size_K <= _HUBER, size_K**2, 2 * _HUBER * size_K - _HUBER**2)
    floor = (NOISE_FLOOR / sigma) ** 2
    return num * float(np.log(huber_K.mean() + floor)) + fitted.design.num_parameters * float(
        np.log(num)
    )


def _sigma(error_K: Array) -> float:
    return max(_MAD_TO_SIGMA * float(np.median(np.abs(error_K))), NOISE_FLOOR)


def _fit_robust(design: _Design, value_K: Array, weight_K: Array) -> _Fitted:
    """Non-negative least squares, reweighted until Huber's weights settle.

    The scale is taken anew each round; starting from the median-like weights of least
    absolute errors keeps early outliers from deciding it.
    """
    trust_K = np.ones_like(value_K)
    coefficient_P = _solve(design.columns, value_K, weight_K)
    error_K = np.zeros_like(value_K)
    for _ in range(_ROUNDS):
        error_K = (design.columns @ coefficient_P - value_K) * weight_K
        size_K = np.abs(error_K)
        limit = _HUBER * _sigma(error_K)
        new_K = np.minimum(1.0, limit / np.maximum(size_K, limit))
        if np.abs(new_K - trust_K).max() < 1e-4:
            break
        trust_K = new_K
        coefficient_P = _solve(design.columns, value_K, weight_K * np.sqrt(trust_K))
    return _Fitted(design=design, coefficients=coefficient_P, errors=error_K)


def _solve(columns_KP: Array, value_K: Array, weight_K: Array) -> Array:
    from scipy.optimize import nnls  # pyright: ignore

    scaled_KP = columns_KP * weight_K[:, None]
    # Columns of one length: nnls stops by an absolute tolerance.
    length_P = np.maximum(np.linalg.norm(scaled_KP, axis=0), 1e-300)
    solution_P = cast(Array, nnls(scaled_KP / length_P, value_K * weight_K)[0])
    return solution_P / length_P


def _as_curve(fitted: _Fitted, size_K: Array) -> Curve:
    alpha, *slopes = (float(x) for x in fitted.coefficients)
    return Curve(
        alpha=alpha,
        knots=fitted.design.knots,
        slopes=tuple(slopes),
        lowest=float(size_K[0]),
        highest=float(size_K[-1]),
    )


def fit_key(module: str, task: str | None) -> str:
    """Name of a module's curves: ``module``, or ``task.module`` where the task differs."""
    return module if task is None else f"{task}.{module}"


def fit_profile(profile: Profile) -> Fits:
    """Fit every module (and every task's own version of one), tp and loss of a profile."""
    versions = [(name, None) for name in profile.modules]
    versions += [(name, task) for task, changed in profile.tasks.items() for name in changed]
    return Fits(
        modules={
            fit_key(name, task): {
                str(tp): fit_module(profile.module(name, task), tp)
                for tp in tp_degrees(profile.module(name, task))
            }
            for name, task in versions
        },
        losses={name: fit_loss(loss) for name, loss in profile.losses.items()},
    )


def tp_degrees(module: ModuleProfile) -> tuple[int, ...]:
    """The tensor-parallel degrees that have points, ascending."""
    return tuple(sorted({point.tp for point in module.points}))


def fit_module(module: ModuleProfile, tp: int) -> ModuleFit:
    """Whole-module curves for one tp.

    A point of fewer blocks stands for the first ones and is scaled to the whole module
    by their share of the work. Where whole-module points of two sizes exist they alone
    decide the curve and the others only its residuals: sharing out the fixed part is
    what a stage is charged, so what that misses must show.
    """
    points = [point for point in module.points if point.tp == tp]
    work = share_of(module.block_work, module.blocks)
    held = share_of(module.block_activation_bytes, module.blocks)

    def curve(value: Callable[[Point], float], share: Callable[[int], float]) -> Curve:
        return _fit_points(module, points, value, share)

    return ModuleFit(
        forward=curve(lambda p: p.forward_s, work),
        backward=curve(lambda p: p.backward_s, work),
        backward_input=curve(input_backward_s, work),
        activation_bytes=curve(lambda p: p.activation_bytes, held),
    )


def input_backward_s(point: Point) -> float:
    """The part of a point's backward that computes input gradients; half when not said."""
    return point.backward_s / 2 if point.backward_input_s is None else point.backward_input_s


def share_of(weights: Sequence[float] | None, blocks: int) -> Callable[[int], float]:
    """Share of the first k blocks; equal blocks without weights, or when all are zero."""
    if weights is None or not sum(weights):
        return lambda k: k / blocks
    totals = [0.0, *itertools.accumulate(weights)]
    return lambda k: totals[k] / totals[-1]


def _fit_points(
    module: ModuleProfile,
    points: Sequence[Point],
    value: Callable[[Point], float],
    share: Callable[[int], float],
) -> Curve:
    def whole(point: Point) -> float:
        part = share(point.blocks or module.blocks)
        return value(point) / part if part else 0.0

    full = [point for point in points if point.blocks in (None, module.blocks)]
    deciding = full if len({p.microbatch for p in full}) > 1 else points
    curve = fit_curve(
        [p.microbatch for p in deciding],
        [whole(p) for p in deciding],
        spreads=[p.forward_spread_s for p in deciding],
    )
    if len(deciding) == len(points):
        return curve
    return with_residuals(curve, [p.microbatch for p in points], [whole(p) for p in points])


def fit_loss(loss: LossProfile) -> LossFit:
    """Curves of a loss over its number of samples."""
    sizes = [point.samples for point in loss.points]
    return LossFit(
        forward=fit_curve(sizes, [point.forward_s for point in loss.points]),
        backward=fit_curve(sizes, [point.backward_s for point in loss.points]),
    )
