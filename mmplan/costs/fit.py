"""Fitted times: piecewise-linear, non-negative and robust curves with their residuals.

A curve over the micro-batch size u is ``T(u) = alpha + sum_i slope_i * (length of u in
piece i)``. Points on one line are passed through exactly. Otherwise coefficients minimise

    sum_k huber((T(u_k) - T_k) / T_k),   T and all slopes >= 0,

and the number of pieces is the one with the least BIC. Knots are measured sizes.

Shape suffixes used in this file: K = points, P = coefficients.

Source: the estimator of Spindle, arXiv:2409.03365, section 3.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.costs.block_ranges import running_shares
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

# Relative error below which points lie on one line: some digits above the rounding of times.
_EXACT = 1e-9
# Relative size below which a level at size 0 is rounding, and is taken as 0.
_ROUNDING = 1e-13
# Sizes that may be knots: with 2 knots 8 give 28 curves to fit. Chosen by hand.
_MAX_KNOT_CANDIDATES = 8
# Relative noise of any timing: smaller residuals are no reason for more pieces.
NOISE_FLOOR = 0.005
# The noise is estimated at least so large: where most points fit exactly, a point that is a few
# percent off is a bend that needs a knot, not an outlier.
_OUTLIER_FLOOR = 0.02
# Huber's constant: 95% efficiency under normal errors.
_HUBER = 1.345
# Tukey's constant: 95% efficiency under normal errors.
_TUKEY = 4.685
# Standard deviation over the median absolute deviation of normal errors.
_MAD_TO_SIGMA = 1.4826
# Reweightings at most; a few suffice unless points tie.
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
        knots_max: most knots the curve may have; 0 fits ``alpha + slope * size``, also
            where the points would have a line that is negative at 0.

    Returns:
        The curve. One size alone gives a proportional curve.

    Raises:
        InvalidInputError: no points, or sizes and values that are not what they must be.
    """
    size_K, value_K, spread_K = _checked(sizes, values, spreads)
    return _fitted(tuple(size_K.tolist()), tuple(value_K.tolist()), tuple(spread_K), knots_max)


# What-if simulations, reports and trials ask for the same curves again and again.
@lru_cache(maxsize=4096)
def _fitted(
    sizes: tuple[float, ...],
    values: tuple[float, ...],
    spread_K: tuple[float | None, ...],
    knots_max: int,
) -> Curve:
    size_K, value_K = np.array(sizes), np.array(values)
    lowest, highest = float(size_K.min()), float(size_K.max())
    if lowest == highest:
        level = float(np.median(value_K))
        curve = _curve(level, (), (level / lowest,), lowest, highest)
    else:
        curve = _through_line(size_K, value_K)
    if curve is None or len(curve.knots) > knots_max:
        # Values at the first edge cannot be negative: at size 0 for a line without knots.
        first = lowest if knots_max else 0.0
        designs = [
            Design(columns=_columns(size_K, (first, *knots)), knots=knots)
            for knots in _knot_sets(size_K, knots_max)
        ]
        chosen = select(designs, value_K, relative_weights(value_K, spread_K))
        level, *slopes = (float(x) for x in chosen.coefficients)
        level += slopes[0] * (lowest - first)
        curve = _curve(level, chosen.design.knots, tuple(slopes), lowest, highest)
    return with_residuals(curve, size_K, value_K)


def with_residuals(
    curve: Curve, sizes: Sequence[float] | Floats, values: Sequence[float] | Floats
) -> Curve:
    """The curve with its relative residuals at these points written down."""
    value_K = np.asarray(values, dtype=np.float64)
    got_K = np.array([curve.at(float(size)) for size in sizes])
    # The value that stands for zero in relative errors.
    tiny = max(float(value_K.max()) * 1e-9, 1e-300)
    error_K = np.abs(got_K - value_K) / np.maximum(value_K, tiny)
    changes = {
        "residual_median": float(np.median(error_K)),
        "residual_p90": float(np.quantile(error_K, 0.9)),
        "points": len(value_K),
    }
    return curve.model_copy(update=changes)


def _checked(
    sizes: Sequence[float],
    values: Sequence[float],
    spreads: Sequence[float | None] | None,
) -> tuple[Floats, Floats, list[float | None]]:
    size_K = np.asarray(sizes, dtype=np.float64)
    value_K = np.asarray(values, dtype=np.float64)
    spread_K: list[float | None] = list(spreads or [None] * len(size_K))
    if not 0 < len(size_K) == len(value_K) == len(spread_K):
        raise InvalidInputError(
            f"a fit needs as many values as sizes, got {len(size_K)} sizes, {len(value_K)} "
            f"values and {len(spread_K)} spreads",
            hint="give one value (and one spread, or none at all) for each size",
        )
    good = np.isfinite(size_K) & np.isfinite(value_K) & (size_K > 0) & (value_K >= 0)
    if not good.all():
        k = int(np.argmin(good))
        raise InvalidInputError(
            f"point {k} (size {size_K[k]:g}, value {value_K[k]:g}) cannot be fitted",
            hint="sizes must be positive, values finite and not negative",
        )
    return size_K, value_K, spread_K


def _through_line(size_K: Floats, value_K: Floats) -> Curve | None:
    """The curve through points that lie on one rising line; None where they do not."""
    first, last = int(size_K.argmin()), int(size_K.argmax())
    lowest, highest = float(size_K[first]), float(size_K[last])
    level, rise = float(value_K[first]), float(value_K[last] - value_K[first])
    line_K = level + rise / (highest - lowest) * (size_K - lowest)
    if rise < 0 or (np.abs(line_K - value_K) > _EXACT * value_K).any():
        return None
    return _curve(level, (), (rise / (highest - lowest),), lowest, highest)


def _curve(
    level: float,
    knots: tuple[float, ...],
    slopes: tuple[float, ...],
    lowest: float,
    highest: float,
) -> Curve:
    """The curve that is ``level`` at the smallest size and rises by the slopes from there.

    Where the first slope would lead below zero at size 0, a knot at the smallest size
    makes the curve proportional below it, so that it stays exact above.
    """
    alpha = level - slopes[0] * lowest
    if abs(alpha) <= _ROUNDING * level:
        alpha = 0.0
    if alpha < 0:
        alpha, knots, slopes = 0.0, (lowest, *knots), (level / lowest, *slopes)
    return Curve(alpha=alpha, knots=knots, slopes=slopes, lowest=lowest, highest=highest)


def _columns(size_K: Floats, edges: tuple[float, ...]) -> Floats:
    """[K, 1 + len(edges)]: the level at the first edge, then the length in each piece."""
    pieces = [np.clip(size_K, a, b) - a for a, b in itertools.pairwise((*edges, np.inf))]
    return np.stack([np.ones_like(size_K), *pieces], axis=1)


def _knot_sets(size_K: Floats, knots_max: int) -> Iterator[tuple[float, ...]]:
    """Interior sizes as knots, fewer than sizes less 2: with more, a bend fits any noise."""
    distinct = np.unique(size_K)
    inner = distinct[1:-1]
    if len(inner) > _MAX_KNOT_CANDIDATES:
        spaced = np.linspace(0, len(inner) - 1, _MAX_KNOT_CANDIDATES).round().astype(int)
        inner = inner[np.unique(spaced)]
    for num in range(knots_max + 1):
        if num == 0 or len(distinct) >= num + 3:
            yield from itertools.combinations(map(float, inner), num)


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
    by their share of the work. Where whole-module points of two sizes exist, they alone
    decide the curve, and all points its residuals. A stage is charged a share of the fixed part,
    and the residuals show the error of that.
    """
    points = [point for point in module.points if point.tp == tp]
    work = running_shares(module.block_work, module.blocks)
    activations = running_shares(module.block_activation_bytes, module.blocks)

    def curve(value: Callable[[Point], float], shares: Sequence[float], spread: str = "") -> Curve:
        return _fit_points(module, points, value, shares, spread)

    return ModuleFit(
        forward=curve(lambda p: p.forward_s, work, "forward_spread_s"),
        backward=curve(lambda p: p.backward_s, work, "backward_spread_s"),
        backward_input=curve(input_backward_s, work, "backward_spread_s"),
        activation_bytes=curve(lambda p: p.activation_bytes, activations),
    )


def input_backward_s(point: Point) -> float:
    """The part of a point's backward that computes input gradients; half by default."""
    return point.backward_s / 2 if point.backward_input_s is None else point.backward_input_s


def _fit_points(
    module: ModuleProfile,
    points: Sequence[Point],
    value: Callable[[Point], float],
    shares: Sequence[float],
    spread: str,
) -> Curve:
    def whole(point: Point) -> float:
        part = shares[point.blocks or module.blocks]
        return value(point) / part if part else 0.0

    full = [point for point in points if point.blocks in (None, module.blocks)]
    deciding = full if len({p.microbatch for p in full}) > 1 else points
    curve = fit_curve(
        [p.microbatch for p in deciding],
        [whole(p) for p in deciding],
        spreads=[getattr(p, spread, None) for p in deciding],
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


def relative_weights(value_K: Floats, spreads: Sequence[float | None]) -> Floats:
    """1/T, less for points whose repeats spread wider than the median spread."""
    weight_K = 1.0 / np.maximum(value_K, max(float(value_K.max()) * 1e-3, 1e-300))
    if all(spread is None for spread in spreads):
        return weight_K
    known = [spread for spread in spreads if spread is not None]
    spread_K = np.array([np.median(known) if spread is None else spread for spread in spreads])
    relative_K = np.maximum(spread_K * weight_K, NOISE_FLOOR)
    return weight_K * np.minimum(1.0, float(np.median(relative_K)) / relative_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One candidate model.

    Attributes:
        columns: [K, P].
        knots: sizes at which its pieces meet.
    """

    columns: Floats
    knots: tuple[float, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Coefficients and searched knots."""
        return self.columns.shape[1] + len(self.knots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A design with its coefficients [P] and its weighted errors [K]."""

    design: Design
    coefficients: Floats
    errors: Floats


def select(designs: Sequence[Design], value_K: Floats, weight_K: Floats) -> Fitted:
    """The design with the least BIC, its errors measured in units of one common noise."""
    fitted = [_fit_robust(design, value_K, weight_K) for design in designs]
    # The richest designs estimate the noise: a bend that is left out must not count as noise.
    most = max(item.design.num_parameters for item in fitted)
    rich = [_sigma(item.errors) for item in fitted if item.design.num_parameters == most]
    sigma = min(rich)
    return min(fitted, key=lambda item: _bic(item, sigma))


def _bic(fitted: Fitted, sigma: float) -> float:
    """BIC with Tukey's bounded loss: the distance of an outlier does not count."""
    num = len(fitted.errors)
    size_K = np.minimum(np.abs(fitted.errors) / (_TUKEY * sigma), 1.0)
    loss = float((_TUKEY**2 / 3 * (1 - (1 - size_K**2) ** 3)).mean())
    floor = (NOISE_FLOOR / sigma) ** 2
    return num * math.log(loss + floor) + fitted.design.num_parameters * math.log(num)


def _sigma(error_K: Floats) -> float:
    return max(_MAD_TO_SIGMA * float(np.median(np.abs(error_K))), _OUTLIER_FLOOR)


def _fit_robust(design: Design, value_K: Floats, weight_K: Floats) -> Fitted:
    """Non-negative least squares, reweighted until Huber's weights settle.

    Each round estimates the noise by the median error, which outliers do not move.
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
    return Fitted(design=design, coefficients=coefficient_P, errors=error_K)


def _solve(columns_KP: Floats, value_K: Floats, weight_K: Floats) -> Floats:
    from scipy.optimize import nnls

    scaled_KP = columns_KP * weight_K[:, None]
    # Columns of one length: nnls stops by an absolute tolerance.
    length_P = np.maximum(np.linalg.norm(scaled_KP, axis=0), 1e-300)
    solution_P = cast(Floats, nnls(scaled_KP / length_P, value_K * weight_K)[0])
    return solution_P / length_P


def curve_values(curve: Curve, size: Ints | Floats) -> Floats:
    """:meth:`Curve.at` of every size, in the sizes' shape."""
    value: Floats = np.full(np.shape(size), curve.alpha)
    start = 0.0
    for slope, end in zip(curve.slopes, (*curve.knots, np.inf), strict=True):
        value += slope * np.clip(size - start, 0.0, end - start)
        start = end
    return value
