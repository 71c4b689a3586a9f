"""Ranks that take longer than they should for a kind of instruction.

Batches may be uneven and machines noisy, so a rank is held against those that do the same, its
peers; what the other stages of its samples show too is the samples' doing and is taken off. How
much must be seen follows from the noise: evidence is summed up over the steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A rank that is so much slower is to be found soonest; one that is slower by less than the root of
# it never is.
FACTOR = 1.1
# Plans predict no better than this.
LONE_FACTOR = 1.5
# Natural logarithm of the ratio of likelihoods at which a rank is named. Of steps without a slow
# rank one in exp(18), 66 million, ends in a false alarm at most.
_ENOUGH = 18.0
# The evidence of one step counts as a third of it at most, so no rank is named for fewer.
STEPS = 3
# Ranks differ by so much for good; what is measured over the last steps may be less.
_LEAST_NOISE = 0.02
_REMEMBERED = 50
# Steps between two looks at the noise, once half of these are there.
_RENEWED = 10
# Differences between two steps from which the noise can be told.
_LEAST_DIFFERENCES = 12
# Of the time of the busiest rank: a kind in which less is lost is not spoken of.
_LEAST_LOSS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that is named.

    Attributes:
        kind: of instruction, in which it loses most.
        times: as long as expected, in the median of the last three steps.
    """

    rank: int
    kind: str
    times: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: its {self.kind} takes {self.times:.2f} times as long"


class SlowRanks:
    """Looks at the steps of a run, one after another, and names each slow rank once.

    For every kind of instruction the deviation of a rank is the logarithm of its seconds over
    those expected, less the median of its peers. It comes once as it is, which finds all the stages
    of a replica that are slow together, and once less the deviation of those with the same
    samples, scaled as the deviations of the two groups vary from step to step (longer samples
    lengthen one stage more than another). Either is summed up by Page's CUSUM for a normal mean
    that goes from 0 to log(FACTOR), with the noise measured by differences of consecutive steps: a
    rank that is slow all the time adds nothing to those.

    Args:
        peers: of each rank, the same for those that do the same work.
        samples: of each rank, the same for those that work on the same samples.
        expected: of a kind, units of work by rank; equal where a kind is not in it.
        predicted: kinds whose expectation is in seconds: they tell of a rank without peers too,
            where it is LONE_FACTOR times slower than the median of all ranks.

    Source:
        Page, "Continuous inspection schemes", Biometrika 41 (1954); that there are no more false
        alarms than said: Lorden, "Procedures for reacting to a change in distribution", 1971.
    """

    def __init__(
        self,
        peers: Sequence[Hashable],
        samples: Sequence[Hashable],
        *,
        expected: Mapping[str, Sequence[float]] | None = None,
        predicted: frozenset[str] = frozenset(),
    ) -> None:
        self._peers, self._samples = peers, samples
        self._expected, self._predicted = expected or {}, predicted
        self._kinds: dict[str, _Kind] = {}
        self._named: set[int] = set()

    def add(self, seconds: Mapping[str, Sequence[float]]) -> list[SlowRank]:
        """The ranks that a step's times make known as slow.

        Args:
            seconds: of a kind, by rank; 0 where a rank has none of it.
        """
        least_s = _LEAST_LOSS * max(map(sum, zip(*seconds.values(), strict=True)), default=0.0)
        lost: dict[int, tuple[float, SlowRank]] = {}
        for kind, took_s in seconds.items():
            for rank, times in self._kind(kind, took_s).add(took_s):
                loss_s = took_s[rank] * (1 - 1 / times)
                if rank not in self._named and loss_s > lost.get(rank, (least_s,))[0]:
                    lost[rank] = loss_s, SlowRank(rank=rank, kind=kind, times=times)
        self._named |= set(lost)
        return [lost[rank][1] for rank in sorted(lost)]

    def _kind(self, kind: str, took_s: Sequence[float]) -> _Kind:
        if kind not in self._kinds:
            self._kinds[kind] = _Kind(
                [rank for rank, one_s in enumerate(took_s) if one_s > 0],
                self._peers,
                self._samples,
                self._expected.get(kind),
                predicted=kind in self._predicted,
            )
        return self._kinds[kind]


class _Kind:
    """One kind of instruction; its ranks are those that have it."""

    def __init__(
        self,
        ranks: list[int],
        peers: Sequence[Hashable],
        samples: Sequence[Hashable],
        expected: Sequence[float] | None,
        *,
        predicted: bool,
    ) -> None:
        self._ranks = ranks
        self._expected_s = np.array([expected[rank] if expected else 1.0 for rank in ranks])
        groups = _groups([peers[rank] for rank in ranks])
        others = [[j for j in group if j != i] for i, group in enumerate(groups)]
        lone = np.array([not found for found in others])
        self._margin = np.where(lone, math.log(LONE_FACTOR / FACTOR), 0.0)
        if predicted:
            everyone = range(len(ranks))
            others = [found or [j for j in everyone if j != i] for i, found in enumerate(others)]
        same = _groups([samples[rank] for rank in ranks])
        partners = [[j for j in same[i] if j not in groups[i]] for i in range(len(ranks))]
        self._others, self._partners = _Medians(others), _Medians(partners)
        # The only peer of a slow rank seems fast: that does not make its own partners slow.
        self._fastest = np.array([0.0 if len(found) == 1 else -math.inf for found in others])
        self._plain, self._paired = _Evidence(groups), _Evidence(groups)

    def add(self, took_s: Sequence[float]) -> list[tuple[int, float]]:
        """Slow ranks, and how many times as long they took in the last steps."""
        ratio = np.log(np.array([took_s[rank] for rank in self._ranks]) / self._expected_s)
        deviation = ratio - self._others.of(ratio, ratio)
        over = deviation - self._margin
        found = self._plain.add(over)
        scale = self._plain.noise
        partners = self._partners.of(np.maximum(deviation / scale, self._fastest), 0 * scale)
        found = {**self._paired.add(over - scale * partners), **found}
        return [(self._ranks[i], math.exp(log + self._margin[i])) for i, log in found.items()]


class _Evidence:
    """CUSUM over the deviations of a kind's ranks.

    Args:
        groups: of each place, those whose noise is alike.

    Attributes:
        noise: of each place, the standard deviation from step to step.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = {group[0]: group for group in groups}
        self._first = [group[0] for group in groups]
        self._last: deque[Floats] = deque(maxlen=_REMEMBERED)
        self._num_steps = 0
        self._known = np.zeros(len(groups))
        self._sum = np.zeros(len(groups))
        self.noise = np.full(len(groups), _LEAST_NOISE)

    def add(self, deviation: Floats) -> dict[int, float]:
        """Count a step; the places that are slow, and the logarithm of by how much."""
        self._last.append(deviation)
        self._num_steps += 1
        if 2 <= self._num_steps <= _REMEMBERED // 2 or self._num_steps % _RENEWED == 0:
            self._measure()
        step = math.log(FACTOR) * (deviation - math.log(FACTOR) / 2) / self.noise**2
        step = np.minimum(step, _ENOUGH / STEPS) * self._known
        self._sum = np.minimum(np.maximum(self._sum + step, 0.0), _ENOUGH)
        slow = np.flatnonzero(self._sum > _ENOUGH - 1e-9)
        if not len(slow):
            return {}
        last = np.median([*self._last][-STEPS:], axis=0)
        return {int(place): float(last[place]) for place in slow}

    def _measure(self) -> None:
        steps = np.abs(np.diff(np.array(self._last), axis=0))
        for first, group in self._groups.items():
            seen = steps[:, group]
            self._known[group] = seen.size >= _LEAST_DIFFERENCES
            # Of a normal distribution the standard deviation is 1.4826 of these medians.
            noise = 1.4826 * float(np.median(seen)) / math.sqrt(2)
            self.noise[group] = max(_LEAST_NOISE, noise)


class _Medians:
    """For each place, the median over some others."""

    def __init__(self, others: Sequence[Sequence[int]]) -> None:
        width = max(map(len, others), default=0)
        # What is behind the last place is infinite, and so comes last.
        self._index = np.array(
            [[*found, *[len(others)] * (width - len(found))] for found in others], dtype=np.intp
        )
        num = np.array([len(found) for found in others])
        self._any = num > 0
        self._rows = np.arange(len(others))
        self._low, self._high = np.maximum(num - 1, 0) // 2, np.minimum(num // 2, width - 1)

    def of(self, values: Floats, default: Floats) -> Floats:
        """The medians; the default where there is nobody else."""
        if not self._any.any():
            return default
        found = np.sort(np.append(values, math.inf)[self._index], axis=1)
        middle = (found[self._rows, self._low] + found[self._rows, self._high]) / 2
        return np.where(self._any, middle, default)


def _groups(labels: Sequence[Hashable]) -> list[list[int]]:
    """For each place, all with the same label."""
    found: dict[Hashable, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return [found[label] for label in labels]
