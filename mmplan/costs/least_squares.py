"""Non-negative, robust least squares on relative errors, and the choice between models.

Every candidate is linear in its coefficients: ``value = columns @ coefficients``, all
coefficients non-negative. They minimise ``sum_k huber(weight_k * error_k)``; the candidate
with the least BIC is chosen.

Shape suffixes used in this file: K = points, P = coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from mmplan.arrays import Floats

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
    from scipy.optimize import nnls  # pyright: ignore

    scaled_KP = columns_KP * weight_K[:, None]
    # Columns of one length: nnls stops by an absolute tolerance.
    length_P = np.maximum(np.linalg.norm(scaled_KP, axis=0), 1e-300)
    solution_P = cast(Floats, nnls(scaled_KP / length_P, value_K * weight_K)[0])
    return solution_P / length_P
