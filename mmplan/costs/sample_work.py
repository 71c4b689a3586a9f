"""The varying work of samples: batches sampled from a profile's data, and their stragglers.

Work is counted in samples of mean work. The sum of its work is a micro-batch's size on the time
curve, so the fixed part of a time stays fixed.

Shape suffixes used in this file: M = modules, N = samples of the profile's subset, R = draws,
B = samples of a draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmplan.arrays import Floats
from mmplan.reordering.replica_assignment import assign_groups
from mmplan.schema.profile import Curve, DataWork, ModuleFit


@dataclass(frozen=True, slots=True)
class _Draws:
    """Samples of one estimate, over all its draws, and the limits of the number of draws."""

    samples: int
    min_draws: int
    max_draws: int


# Draws in the given order: sums of 256k samples take milliseconds. Chosen by hand.
_GIVEN_ORDER = _Draws(1 << 18, 4, 2048)
# Draws assigned to replicas: assigning a sample takes a thousand times longer than adding it.
_ASSIGNED = _Draws(1 << 11, 4, 32)
# Numbers of replicas with an estimate: all up to this one, then some of each octave.
_EVERY_COUNT_TO = 8
# The straggler varies little within a quarter of an octave; numbers between are interpolated.
_PER_OCTAVE = 4


class SampledWork:
    """One task's data: sampled batches, and the excess work of the busiest replica.

    Args:
        data: of the profile.
        seed: of all draws.
        reordered: whether the samples of a batch are assigned to replicas by their work. Only
            data with ``work(index)`` are reordered, not data profiled by lengths.

    Attributes:
        modules: those whose work may vary; all samples cost other modules the same.
    """

    def __init__(self, data: DataWork, *, seed: int, reordered: bool) -> None:
        self.modules = tuple(data.work)
        self.reordered = reordered and data.source == "work"
        self._seed = seed % 2**32
        raw_MN = np.array([data.work[name] for name in self.modules])
        mean_M = raw_MN.mean(axis=1)
        self._relative_MN = raw_MN / mean_M[:, None]
        at = (data.at.get(n, float(m)) for n, m in zip(self.modules, mean_M, strict=True))
        self._means = {n: float(m) / a for n, m, a in zip(self.modules, mean_M, at, strict=True)}
        self._known: dict[int, tuple[Floats, Floats]] = {}

    def mean(self, module: str) -> float:
        """Mean work of a sample, in samples like those of the module's points."""
        return self._means.get(module, 1.0)

    def relative(self, module: str) -> Floats:
        """[N] work of the profile's samples, mean 1."""
        return self._relative_MN[self.modules.index(module)]

    def draw(self, batch: int, *, number: int) -> dict[str, Floats]:
        """Work of the samples of one batch, drawn with replacement; equal for equal numbers."""
        generator = np.random.default_rng([self._seed, batch, number])
        picks = generator.integers(self._relative_MN.shape[1], size=batch)
        return dict(zip(self.modules, self._relative_MN[:, picks], strict=True))

    def batch(self, size: int, *, number: int) -> dict[str, Floats]:
        """Work of the samples of a run's batch, by its number in the first epoch.

        The profile's samples are the first of that epoch's order; later batches are drawn.
        """
        start, stop = number * size, (number + 1) * size
        if stop > self._relative_MN.shape[1]:
            return self.draw(size, number=number)
        return dict(zip(self.modules, self._relative_MN[:, start:stop], strict=True))

    def straggler(self, module: str, *, dp: int, samples: int) -> float:
        """Expected work of the busiest of dp replicas over the mean of all of them, at least 1.

        The replicas share ``samples`` samples equally and then wait for each other. The factor is
        estimated from draws for some numbers of replicas and interpolated; it never falls with dp.
        """
        if module not in self._means or dp <= 1:
            return 1.0
        if samples not in self._known:
            self._known[samples] = self._factors(samples)
        counts, factors_MC = self._known[samples]
        row = factors_MC[self.modules.index(module)]
        return float(np.interp(dp * counts[-1] / samples, counts, row))

    def _factors(self, samples: int) -> tuple[Floats, Floats]:
        """Numbers of replicas [C] and the factors [M, C]."""
        # An assigned group hardly depends on the number of groups: a part of the batch is enough.
        limits = _ASSIGNED if self.reordered else _GIVEN_ORDER
        drawn = min(samples, limits.samples) if self.reordered else samples
        draws = min(max(limits.samples // drawn, limits.min_draws), limits.max_draws)
        generator = np.random.default_rng([self._seed, samples])
        # Shares are rounded up to be equal, which takes up to twice as many samples.
        picks_RB = generator.integers(self._relative_MN.shape[1], size=(draws, 2 * drawn))
        work_MRB = self._relative_MN[:, picks_RB]
        counts = _replica_counts(drawn)
        factors = [self._factor(work_MRB, n, -(-drawn // n)) for n in counts]
        rising = np.maximum.accumulate(np.stack(factors, axis=1), axis=1)
        return np.array(counts, dtype=np.float64), rising

    def _factor(self, work_MRB: Floats, replicas: int, share: int) -> Floats:
        """[M] factors of one number of replicas with equal shares."""
        work_MRB = work_MRB[:, :, : replicas * share]
        if self.reordered:
            work_MRB = np.stack([_assigned(w, replicas) for w in work_MRB.swapaxes(0, 1)], axis=1)
        load_MRG = np.add.reduceat(work_MRB, np.arange(0, replicas * share, share), axis=2)
        # The mean load is known to be `share`: deviations of the draws' own mean are noise.
        excess_MR = load_MRG.max(axis=2) - load_MRG.mean(axis=2)
        return 1 + excess_MR.mean(axis=1) / share


def _assigned(work_MB: Floats, replicas: int) -> Floats:
    """A batch in the order of the replicas to which its samples are assigned."""
    # Plans give modules devices so that all are busy: work of all modules has equal weight.
    group_B = assign_groups(work_MB.sum(axis=0), replicas)
    return work_MB[:, np.argsort(group_B, kind="stable")]


def _replica_counts(most: int) -> list[int]:
    counts = set(range(1, min(most, _EVERY_COUNT_TO) + 1)) | {most}
    start = _EVERY_COUNT_TO
    while start < most:
        counts |= {start + start * k // _PER_OCTAVE for k in range(_PER_OCTAVE)}
        start *= 2
    return sorted(count for count in counts if count <= most)


def fit_for_work(fit: ModuleFit, mean: float) -> ModuleFit:
    """Curves over samples of mean work, from curves over samples of 1 / mean of that work."""
    if mean == 1:
        return fit

    def scaled(curve: Curve) -> Curve:
        return curve.model_copy(
            update={
                "knots": tuple(knot / mean for knot in curve.knots),
                "slopes": tuple(slope * mean for slope in curve.slopes),
            }
        )

    return ModuleFit(
        forward=scaled(fit.forward),
        backward=scaled(fit.backward),
        backward_input=scaled(fit.backward_input),
        activation_bytes=scaled(fit.activation_bytes),
    )
