"""Ranks that take longer than they should for a kind of instruction.

Batches may be uneven and machines noisy, so a rank is held against those that do the same, its
peers; what the other stages of its samples show too is the samples' doing and is taken off. How
much must be seen follows from the noise: evidence is summed up over the steps.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mmlaunch.session.session import Session
from mmplan.arrays import Floats
from mmplan.program.instructions import KIND_OF, Compute
from mmplan.program.model import Timings

# A rank that is so much slower is found soonest; one that is slower by less than the root of it
# never is.
FACTOR = 1.1
# The same for a rank without peers: plans predict no better.
LONE_FACTOR = 1.5
# The evidence of one step counts as a third of what is enough at most.
STEPS = 3
# Logarithm of the ratio of likelihoods at which a rank is named. Of steps without a slow rank one
# in exp(18), 66 million, ends in a false alarm at most.
_ENOUGH = 18.0
# Ranks differ by so much for good; what is measured over the last steps may be less.
_LEAST_NOISE = 0.02
# Steps from which the noise is measured, ever more seldom.
_REMEMBERED = 50
# Differences between two steps from which the noise can be told.
_LEAST_DIFFERENCES = 20
_MANY = 16
# Of the time of the busiest rank: a kind in which less is lost is not spoken of.
_LEAST_LOSS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What is timed in every step: one kind of instruction on a rank.

    Attributes:
        peers: the same for ranks that do the same.
        samples: the same for all that is done with the same samples; None for nothing else.
        expected: seconds, or in units of their own for all peers.
        predicted: whether they are seconds of a prediction, which tells where there are no peers.
    """

    rank: int
    kind: str
    peers: Hashable
    samples: Hashable = None
    expected: float = 1.0
    predicted: bool = False


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


class SlowRanks:
    """Looks at the steps of a run, one after another, and names each slow rank once.

    A deviation is the logarithm of the seconds over those expected, less the median of the peers.
    It comes once as it is, which finds all the stages of a replica that are slow together, and once
    less the deviation of the other stages of the same samples, in units of how much each stage's
    deviations vary from step to step: longer samples lengthen one stage more than another. Either
    is summed up by Page's CUSUM for a normal mean that goes from 0 to log(FACTOR). Differences of
    consecutive steps give the noise: a rank that is slow all the time adds nothing to these.

    Args:
        timed: in the order of the times.

    Source:
        Page, "Continuous inspection schemes", Biometrika 41 (1954); that there are no more false
        alarms than said: Lorden, "Procedures for reacting to a change in distribution", 1971.
    """

    def __init__(self, timed: Sequence[Timed]) -> None:
        self._timed = timed
        self._named: set[int] = set()
        places = range(len(timed))
        groups = _groups([item.peers for item in timed])
        lone = np.array([len(group) == 1 for group in groups])
        kinds = _groups([item.kind if item.predicted else None for item in timed])

        def others_of(i: int) -> list[int]:
            # One of many does not move their median, and all of them have the same one.
            if len(groups[i]) > _MANY:
                return groups[i]
            if lone[i]:
                return [j for j in kinds[i] if j != i] if timed[i].predicted else []
            return [j for j in groups[i] if j != i]

        others = [others_of(i) for i in places]
        work = _groups(
            [i if item.samples is None else item.samples for i, item in enumerate(timed)]
        )
        # Who has no peers is held against all, its partners among them.
        partners = [
            [j for j in work[i] if timed[j].peers != timed[i].peers and not (lone[i] or lone[j])]
            for i in places
        ]
        self._others, self._partners = _Medians(others), _Medians(partners)
        # The only peer of a slow rank seems fast: that does not make its own partners slow.
        self._fastest = np.array([0.0 if len(found) == 1 else -math.inf for found in others])
        self._margin = np.where(lone, math.log(LONE_FACTOR / FACTOR), 0.0)
        self._expected = np.array([item.expected for item in timed])
        self._plain, self._paired = _Evidence(groups), _Evidence(groups)

    def add(self, seconds: Sequence[float]) -> list[SlowRank]:
        """The ranks that a step's times make known as slow."""
        ratio = np.log(np.maximum(seconds, 1e-9) / self._expected)
        deviation = ratio - self._others.of(ratio, ratio)
        over = deviation - self._margin
        found = self._plain.add(over)
        noise = self._plain.noise
        partners = self._partners.of(np.maximum(deviation / noise, self._fastest), 0 * noise)
        found = {**self._paired.add(over - noise * partners), **found}
        return self._slow({i: math.exp(log + self._margin[i]) for i, log in found.items()}, seconds)

    def _slow(self, times: dict[int, float], seconds: Sequence[float]) -> list[SlowRank]:
        """The ranks that are not yet named, each with the kind in which it loses most."""
        if not times:
            return []
        busy_s: defaultdict[int, float] = defaultdict(float)
        took_s: defaultdict[tuple[int, str], float] = defaultdict(float)
        lost_s: defaultdict[tuple[int, str], float] = defaultdict(float)
        for i, item in enumerate(self._timed):
            busy_s[item.rank] += seconds[i]
            if i in times:
                took_s[item.rank, item.kind] += seconds[i]
                lost_s[item.rank, item.kind] += seconds[i] * (1 - 1 / times[i])
        slow: list[SlowRank] = []
        for (rank, kind), lost in sorted(lost_s.items(), key=lambda item: -item[1]):
            if rank not in self._named and lost > _LEAST_LOSS * max(busy_s.values()):
                self._named.add(rank)
                ratio = took_s[rank, kind] / (took_s[rank, kind] - lost)
                slow.append(SlowRank(rank=rank, kind=kind, times=ratio))
        return slow


def slow_ranks_of(session: Session, predicted: Timings | None) -> SlowRanks:
    """For the own times of a session's ranks; computes are held against a prediction, if any."""
    program = session.program
    work: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Compute):
                stage = program.stages[item.stage]
                start, stop = stage.microbatches[stage.place(rank)[0]][item.mb]
                one = predicted.computes[item.stage, item.op, stop - start] if predicted else 1.0
                work[rank, KIND_OF[item.op], item.stage] += one if predicted else stop - start
    timed: list[Timed] = []
    for cell in session.own_times.cells:
        if cell.stage is None:
            stages = tuple(stage.index for stage in program.stages_of(cell.rank))
            timed.append(Timed(rank=cell.rank, kind=cell.kind, peers=(cell.kind, stages)))
            continue
        stage = program.stages[cell.stage]
        timed.append(
            Timed(
                rank=cell.rank,
                kind=cell.kind,
                peers=(cell.kind, cell.stage),
                samples=(cell.kind, stage.task, stage.microbatches[stage.place(cell.rank)[0]]),
                # Of what is predicted to take no time nothing is expected.
                expected=work[cell.rank, cell.kind, cell.stage] or 1.0,
                predicted=predicted is not None,
            )
        )
    return SlowRanks(timed)


class _Evidence:
    """CUSUM over deviations.

    Args:
        groups: of each place, those whose noise is alike.

    Attributes:
        noise: of each place, the standard deviation from step to step.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        # Groups of one size are measured together: [groups, size].
        by_size: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        for group in {found[0]: found for found in groups}.values():
            by_size[len(group)].append(group)
        self._groups = [np.array(found) for found in by_size.values()]
        self._last: deque[Floats] = deque(maxlen=_REMEMBERED)
        self._num_steps, self._measured_at = 0, 2
        self._known = np.zeros(len(groups))
        self._sum = np.zeros(len(groups))
        self.noise = np.full(len(groups), _LEAST_NOISE)

    def add(self, deviation: Floats) -> dict[int, float]:
        """Count a step; the places that are slow, and the logarithm of by how much."""
        self._last.append(deviation)
        self._num_steps += 1
        if self._num_steps == self._measured_at:
            self._measure()
            self._measured_at += min(1 + self._num_steps // 8, _REMEMBERED // 2)
        step = math.log(FACTOR) * (deviation - math.log(FACTOR) / 2) / self.noise**2
        step = np.minimum(step, _ENOUGH / STEPS) * self._known
        self._sum = np.minimum(np.maximum(self._sum + step, 0.0), _ENOUGH)
        slow = np.flatnonzero(self._sum > _ENOUGH - 1e-9)
        if not len(slow):
            return {}
        last = np.median([*self._last][-STEPS:], axis=0)
        return {int(place): float(last[place]) for place in slow}

    def _measure(self) -> None:
        last = np.array(self._last)
        # A machine that others use is now quiet, now busy: the second is larger there.
        steps = np.abs(np.diff(last, axis=0)) / math.sqrt(2)
        spread = np.abs(last - np.median(last, axis=0))
        for groups in self._groups:
            middles = [np.median(values[:, groups], axis=(0, 2)) for values in (steps, spread)]
            # Of a normal distribution the standard deviation is 1.4826 of these medians.
            noise = np.maximum(_LEAST_NOISE, 1.4826 * np.maximum(*middles))
            self.noise[groups] = noise[:, None]
            self._known[groups] = len(steps) * groups.shape[1] >= _LEAST_DIFFERENCES


class _Medians:
    """For each place, the median over some others."""

    def __init__(self, others: Sequence[Sequence[int]]) -> None:
        rows = {tuple(found): None for found in others if found}
        width = max(map(len, rows), default=0)
        # What is behind the last place is infinite, and so comes last.
        padded = [[*row, *[len(others)] * (width - len(row))] for row in rows]
        self._index = np.array(padded, dtype=np.intp)
        num = np.array([len(row) for row in rows], dtype=np.intp)
        self._middles = np.arange(len(rows)), (num - 1) // 2, num // 2
        at = {row: i for i, row in enumerate(rows)}
        self._of = np.array([at.get(tuple(found), -1) for found in others])

    def of(self, values: Floats, default: Floats) -> Floats:
        """The medians; the default where there is nobody else."""
        if not len(self._index):
            return default
        found = np.sort(np.append(values, math.inf)[self._index], axis=1)
        row, low, high = self._middles
        return np.where(self._of < 0, default, ((found[row, low] + found[row, high]) / 2)[self._of])


def _groups(labels: Sequence[Hashable]) -> list[list[int]]:
    """For each place, all with the same label."""
    found: dict[Hashable, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return [found[label] for label in labels]
