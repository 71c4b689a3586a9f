"""How the work of samples varies: batches drawn from a profile's data, and their stragglers.

Work is counted in samples of mean work. A micro-batch takes the time of as many mean samples
as its work adds up to, so the fixed part of a time stays fixed.

Shape suffixes used in this file: M = modules, N = samples of the profile's subset, R = draws,
B = samples of a draw.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mmplan.arrays import Floats
from mmplan.reordering.replica_assignment import assign_groups
from mmplan.schema.profile import Curve, DataWork, ModuleFit

# Samples drawn for one estimate, over all its draws, and draws at least and at most.
_DRAWN, _FEWEST, _MOST = 1 << 18, 4, 2048
# Dealing samples to replicas takes a thousand times longer than adding them up.
_DEALT, _FEWEST_DEALT, _MOST_DEALT = 1 << 11, 4, 32
# Replicas for which the straggler is estimated: all up to 8, then so many an octave.
_PER_OCTAVE = 4


class SampledWork:
    """One task's data: draws of it, and how much more work the busiest replica has.

    Args:
        data: of the profile.
        seed: of all draws.
        reordered: whether batches are dealt to the replicas by their samples' work; lengths
            are no ``work(index)``, so data that were profiled by them never are.

    Attributes:
        modules: whose work varies or may vary; all samples cost the others the same.
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
        """Mean work of a sample, in samples like those that the module's points were taken on."""
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

        The profile's samples are the first of that epoch's order; beyond them it is drawn.
        """
        start, stop = number * size, (number + 1) * size
        if stop > self._relative_MN.shape[1]:
            return self.draw(size, number=number)
        return dict(zip(self.modules, self._relative_MN[:, start:stop], strict=True))

    def straggler(self, module: str, *, dp: int, samples: int) -> float:
        """Expected work of the busiest of dp replicas over the mean of all of them, at least 1.

        The replicas share ``samples`` samples equally and then wait for each other. Estimated
        from draws for some numbers of replicas and interpolated; it never falls with dp.
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
        # Dealt groups hardly depend on how many others there are: a part of them shows it.
        drawn = min(samples, _DEALT) if self.reordered else samples
        limits = (
            (_DEALT, _FEWEST_DEALT, _MOST_DEALT) if self.reordered else (_DRAWN, _FEWEST, _MOST)
        )
        draws = min(max(limits[0] // drawn, limits[1]), limits[2])
        generator = np.random.default_rng([self._seed, samples])
        # Shares are rounded up to be equal: up to twice as many samples.
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
            work_MRB = np.stack([_dealt(w, replicas) for w in work_MRB.swapaxes(0, 1)], axis=1)
        load_MRG = np.add.reduceat(work_MRB, np.arange(0, replicas * share, share), axis=2)
        # The mean load is known to be `share`: what the draws' own mean differs is noise.
        excess_MR = load_MRG.max(axis=2) - load_MRG.mean(axis=2)
        return 1 + excess_MR.mean(axis=1) / share


def _dealt(work_MB: Floats, replicas: int) -> Floats:
    """A batch in the order of the replicas that its samples are dealt to."""
    # Modules are given devices so that all are busy: their work counts alike.
    group_B = assign_groups(work_MB.sum(axis=0), replicas)
    return work_MB[:, np.argsort(group_B, kind="stable")]


def _replica_counts(most: int) -> list[int]:
    counts = set(range(1, min(most, 8) + 1)) | {most}
    start = 8
    while start < most:
        counts |= {start + start * k // _PER_OCTAVE for k in range(_PER_OCTAVE)}
        start *= 2
    return sorted(count for count in counts if count <= most)


def sampled_work(
    data: Mapping[str, DataWork], *, seed: int, reordered: bool
) -> dict[str, SampledWork]:
    """The data of every task that a profile knows."""
    return {task: SampledWork(work, seed=seed, reordered=reordered) for task, work in data.items()}


def fit_for_work(fit: ModuleFit, mean: float) -> ModuleFit:
    """Curves over samples of mean work, from those over samples of which one is worth 1 / mean."""
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
