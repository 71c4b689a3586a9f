"""How an operator's time scales with devices: Spindle's estimator, fitted.

On piece i of the number of devices n, with u = w/n the work of one device,

    T(n, w, c) = alpha_i + beta_i * c + slope_i1 * min(u, h) + slope_i2 * max(u - h, 0).

c is the work that does not shrink with n (0 on one device), h a hinge where a device's
efficiency changes; all coefficients are non-negative. Breaks in n come from the topology
(devices per node); whether they and the hinge are used is decided by BIC. Without variety
in w and c besides n, alpha and beta cannot be told apart: measure two or three batch sizes.

Source: Spindle, arXiv:2409.03365, section 3.2; the hinge is ours.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.errors import InvalidInputError
from mmplan.robust import Array, Design, Fitted, relative_weights, select

_MAX_HINGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement: devices n, work w, constant work c, and the time."""

    devices: int
    work: float
    constant: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFit:
    """A fitted scaling curve.

    Attributes:
        breaks: the last number of devices of each piece but the last.
        hinge: work of one device where the slope changes, None for one slope.
        coefficients: per piece alpha, beta and the slopes below and above the hinge
            (equal without one).
        lowest, highest: devices that were measured.
        residual_median, residual_p90: relative errors at the samples.
    """

    breaks: tuple[int, ...]
    hinge: float | None
    coefficients: tuple[tuple[float, float, float, float], ...]
    lowest: int
    highest: int
    residual_median: float
    residual_p90: float

    def at(self, *, devices: int, work: float, constant: float) -> float:
        """Seconds on ``devices`` devices."""
        alpha, beta, below, above = self.coefficients[bisect_left(self.breaks, devices)]
        each = work / devices
        hinge = each if self.hinge is None else min(each, self.hinge)
        return alpha + beta * constant + below * hinge + above * (each - hinge)

    def extrapolates(self, devices: int) -> bool:
        """Whether no measurement stands on either side of this number of devices."""
        return not self.lowest <= devices <= self.highest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A model's shape; ``shared`` pieces have overheads of their own and common slopes."""

    breaks: tuple[int, ...]
    hinge: float | None
    shared: bool
    design: Design


def fit_scaling(samples: Sequence[Sample], *, breaks_n: Sequence[int] = ()) -> ScalingFit:
    """Fit the estimator to measurements.

    Args:
        samples: several n, each with two or three values of w (and of c).
        breaks_n: where the topology changes, for instance devices per node.

    Raises:
        InvalidInputError: fewer than two samples, or values that are not positive.
    """
    _check(samples)
    time_K = np.array([s.time_s for s in samples])
    candidates = list(_candidates(samples, breaks_n))
    chosen = select(
        [c.design for c in candidates], time_K, relative_weights(time_K, [None] * len(time_K))
    )
    shape = next(c for c in candidates if c.design is chosen.design)
    return _as_scaling(shape, chosen, samples)


def _check(samples: Sequence[Sample]) -> None:
    if len(samples) < 2:
        raise InvalidInputError(
            f"a scaling curve needs two samples or more, got {len(samples)}",
            hint="measure at several numbers of devices and batch sizes",
        )
    for k, s in enumerate(samples):
        if not (s.devices >= 1 and s.work > 0 and s.constant >= 0 and 0 < s.time_s < np.inf):
            raise InvalidInputError(
                f"sample {k} cannot be fitted: {s}",
                hint="devices, work and time must be positive, the constant not negative",
            )


def _candidates(samples: Sequence[Sample], breaks_n: Sequence[int]) -> Iterator[_Candidate]:
    devices_K = np.array([s.devices for s in samples])
    each_K = np.array([s.work / s.devices for s in samples])
    usable = sorted({n for n in breaks_n if (devices_K <= n).any() and (devices_K > n).any()})
    for num in range(len(usable) + 1):
        for breaks in itertools.combinations(usable, num):
            for hinge in (None, *_hinges(each_K)):
                for shared in (True, False) if breaks else (True,):
                    columns = _columns(samples, breaks, hinge, shared=shared)
                    if columns.shape[1] + (hinge is not None) < len(samples):
                        knots = () if hinge is None else (hinge,)
                        design = Design(columns=columns, knots=knots)
                        yield _Candidate(breaks=breaks, hinge=hinge, shared=shared, design=design)
    if len(samples) <= 3:
        columns = _columns(samples, (), None, shared=True)
        yield _Candidate(breaks=(), hinge=None, shared=True, design=Design(columns=columns))


def _hinges(each_K: Array) -> list[float]:
    inner = np.unique(each_K)[1:-1]
    if len(inner) <= _MAX_HINGES:
        return [float(u) for u in inner]
    spaced = np.linspace(0, len(inner) - 1, _MAX_HINGES).round().astype(int)
    return [float(inner[i]) for i in np.unique(spaced)]


def _columns(
    samples: Sequence[Sample], breaks: tuple[int, ...], hinge: float | None, *, shared: bool
) -> Array:
    """Overheads of each piece, then slopes: common ones, or each piece's own."""
    piece_K = np.array([bisect_left(breaks, s.devices) for s in samples])
    constant_K = np.array([s.constant for s in samples])
    each_K = np.array([s.work / s.devices for s in samples])
    low_K = each_K if hinge is None else np.minimum(each_K, hinge)
    work = [low_K] if hinge is None else [low_K, each_K - low_K]
    inside = [(piece_K == i).astype(np.float64) for i in range(len(breaks) + 1)]
    overheads = [column for own_K in inside for column in (own_K, own_K * constant_K)]
    slopes = work if shared else [own_K * part for own_K in inside for part in work]
    return np.stack([*overheads, *slopes], axis=1)


def _as_scaling(shape: _Candidate, fitted: Fitted, samples: Sequence[Sample]) -> ScalingFit:
    values = [float(x) for x in fitted.coefficients]
    num_pieces, num_slopes = len(shape.breaks) + 1, 1 if shape.hinge is None else 2
    slopes = values[2 * num_pieces :] * (num_pieces if shape.shared else 1)
    pieces: list[tuple[float, float, float, float]] = []
    for i in range(num_pieces):
        own = slopes[i * num_slopes : (i + 1) * num_slopes]
        pieces.append((values[2 * i], values[2 * i + 1], own[0], own[-1]))
    error_K = np.abs(fitted.design.columns @ fitted.coefficients - [s.time_s for s in samples])
    relative_K = error_K / np.array([s.time_s for s in samples])
    return ScalingFit(
        breaks=shape.breaks,
        hinge=shape.hinge,
        coefficients=tuple(pieces),
        lowest=min(s.devices for s in samples),
        highest=max(s.devices for s in samples),
        residual_median=float(np.median(relative_K)),
        residual_p90=float(np.quantile(relative_K, 0.9)),
    )
