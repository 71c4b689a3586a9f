"""Drafts by sharing the devices out anew whenever a chain ends.

At every such instant each chain that may run has a time left until the end C: what the chains
after it take is held back, as a tail. It needs the least count that finishes it in that time, and
none yet where it can wait. The least C for which these needs fit the devices is found by
bisection; devices that are left over go to chains that waited, then to those with the least slack.
Blocks may be cut anywhere here and are rounded at the end; list scheduling then makes a schedule
of it.

The tails decide. They start from the seconds that the graph's bound gives each chain, and are
varied: random changes of all chains' seconds, or of some, kept where the schedule became shorter.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace

from mmplan.solvers.mpsp.initial_schedules import block_ends, falling, whole_blocks
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import Pieces

# Ways to share out: how much slack a chain has at least that waits, as a share of the bound, and
# how much later C may be where a chain then keeps its count.
_WAITS, _KEEPS = (0.0, 0.1, 0.3, float("inf")), (0.0, 0.0, 0.02, 0.1)
# Random changes of the seconds: of all by more, of all by less, or of this share by more.
_MUCH, _LITTLE, _SOME = 0.3, 0.1, 0.3
# Shares of the draws that start from the best one, and that change its way to share out.
_FROM_BEST, _OTHER_WAY = 0.7, 0.2
# Share of the ways to share out that are patient.
_PATIENT = 0.2
_HALVINGS = 14
_DONE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidProblem:
    """What a fluid schedule depends on.

    Attributes:
        spans: seconds that each chain is taken to need before those after it.
        waits_s: a chain with more slack than this does not start yet.
        patient: slack is what its fastest count leaves, not its least.
        keeps: share by which the time left may grow for a chain to keep its count.
    """

    spans: tuple[float, ...]
    waits_s: float
    patient: bool
    keeps: float


class Fluid:
    """Draws settings, and makes drafts of them.

    Args:
        spans: seconds of each chain by the graph's bound.
    """

    def __init__(self, instance: Instance, spans: Sequence[float], rng: random.Random) -> None:
        chains = instance.chains
        self._devices = instance.devices
        self._rng = rng
        self._spans = tuple(spans)
        self._scale = max(spans)
        totals = [c.both_s.sum(axis=1) for c in chains]
        self._kept = [falling(own) for own in totals]
        self._counts = [
            [c.counts[k] for k in kept] for c, kept in zip(chains, self._kept, strict=True)
        ]
        # Speeds ascend with the counts: the least that is enough is found by bisection.
        self._seconds = [
            [float(own[k]) for k in kept] for own, kept in zip(totals, self._kept, strict=True)
        ]
        self._speeds = [[1 / x for x in own] for own in self._seconds]
        self._then: list[list[int]] = [[] for _ in chains]
        for m, chain in enumerate(chains):
            for other in set(chain.after):
                self._then[other].append(m)
        self._before = [len(set(c.after)) for c in chains]
        self._ends = [block_ends(chain.both_s) for chain in chains]

    def draw(self, best: FluidProblem | None) -> FluidProblem:
        """A setting near the best one, or anywhere."""
        rng = self._rng
        if best is None or rng.random() > _FROM_BEST:
            spans = tuple(x * (1 + rng.uniform(-_MUCH, _MUCH)) for x in self._spans)
            return self._way(FluidProblem(spans=spans, waits_s=0.0, patient=False, keeps=0.0))
        if rng.random() < 0.5:
            spans = tuple(
                x * (1 + rng.uniform(-_MUCH, _MUCH)) if rng.random() < _SOME else x
                for x in best.spans
            )
        else:
            spans = tuple(x * (1 + rng.uniform(-_LITTLE, _LITTLE)) for x in best.spans)
        changed = replace(best, spans=spans)
        return self._way(changed) if rng.random() < _OTHER_WAY else changed

    def first(self) -> list[FluidProblem]:
        """The bound's own seconds, with each way to wait."""
        return [
            FluidProblem(spans=self._spans, waits_s=share * self._scale, patient=patient, keeps=0.0)
            for patient in (True, False)
            for share in _WAITS
        ]

    def _way(self, setting: FluidProblem) -> FluidProblem:
        rng = self._rng
        return replace(
            setting,
            waits_s=rng.choice(_WAITS) * self._scale,
            patient=rng.random() < _PATIENT,
            keeps=rng.choice(_KEEPS),
        )

    def pieces(self, setting: FluidProblem) -> Pieces:
        """The slices of a setting's schedule, each as urgent as it starts early."""
        state = _State(self._before, self._tails(setting.spans))
        shares: list[list[tuple[int, float, float]]] = [[] for _ in self._before]
        while state.active:
            self._share_out(state, setting)
            self._advance(state, shares)
        return [whole_blocks(ends, own) for ends, own in zip(self._ends, shares, strict=True)]

    def _tails(self, spans: Sequence[float]) -> list[float]:
        tails = [0.0] * len(spans)
        for m in reversed(range(len(spans))):
            tails[m] = max((tails[j] + spans[j] for j in self._then[m]), default=0.0)
        return tails

    def _share_out(self, state: _State, setting: FluidProblem) -> None:
        """Counts for the chains that may run now."""
        end_s, wanted = self._least_end(state, setting)
        if setting.keeps and state.chosen:
            later_s = state.now + (end_s - state.now) * (1 + setting.keeps)
            enough = self._needs(state, later_s, setting)
            for m, i in state.chosen.items():
                if enough[m] <= i <= wanted[m] + 2:
                    wanted[m] = i
        # Less left at the least count is less urgent.
        order = sorted(
            state.active, key=lambda m: end_s - state.tails[m] - state.left[m] * self._seconds[m][0]
        )
        chosen, free = state.chosen, self._devices
        chosen.clear()
        for m in order:
            if wanted[m] >= 0:
                i = min(wanted[m], bisect_right(self._counts[m], free) - 1)
                if i >= 0:
                    chosen[m], free = i, free - self._counts[m][i]
        for m in order:
            if wanted[m] < 0 and self._counts[m][0] <= free:
                chosen[m], free = 0, free - self._counts[m][0]
        self._extend(state, end_s, free)

    def _extend(self, state: _State, end_s: float, free: int) -> None:
        """What is left over, count by count to the chain with the least slack."""
        chosen = state.chosen
        slack = [
            (end_s - state.tails[m] - state.left[m] * self._seconds[m][i], m)
            for m, i in chosen.items()
        ]
        heapify(slack)
        while slack and free > 0:
            m = slack[0][1]
            counts, i = self._counts[m], chosen[m] + 1
            if i == len(counts) or counts[i] - counts[i - 1] > free:
                heappop(slack)
                continue
            chosen[m], free = i, free - counts[i] + counts[i - 1]
            heapreplace(slack, (end_s - state.tails[m] - state.left[m] * self._seconds[m][i], m))

    def _least_end(self, state: _State, setting: FluidProblem) -> tuple[float, dict[int, int]]:
        """The least end for which all needs fit, and these."""
        low = high = 0.0
        for m in state.active:
            base, left = state.now + state.tails[m], state.left[m]
            low = max(low, base + left * self._seconds[m][-1])
            high = max(high, base + left * self._seconds[m][0])
        wanted = self._needs(state, low, setting)
        if self._fits(wanted):
            return low, wanted
        best = self._needs(state, high, setting)
        if self._fits(best):
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                wanted = self._needs(state, middle, setting)
                if self._fits(wanted):
                    high, best = middle, wanted
                else:
                    low = middle
        return high, best

    def _needs(self, state: _State, end_s: float, setting: FluidProblem) -> dict[int, int]:
        """Index of the count that each chain needs; -1 where it can wait."""
        found: dict[int, int] = {}
        for m in state.active:
            time_s = (end_s - state.now - state.tails[m]) * (1 + _DONE)
            left, speeds = state.left[m], self._speeds[m]
            slack_s = time_s - left * self._seconds[m][-1 if setting.patient else 0]
            if m not in state.chosen and slack_s > setting.waits_s:
                found[m] = -1
            elif time_s <= 0:
                found[m] = len(speeds) - 1
            else:
                found[m] = min(bisect_left(speeds, left / time_s), len(speeds) - 1)
        return found

    def _fits(self, wanted: dict[int, int]) -> bool:
        counts = self._counts
        return sum(counts[m][i] for m, i in wanted.items() if i >= 0) <= self._devices

    def _advance(self, state: _State, shares: list[list[tuple[int, float, float]]]) -> None:
        """Until the first chain ends."""
        step_s = min(state.left[m] * self._seconds[m][i] for m, i in state.chosen.items())
        for m, i in list(state.chosen.items()):
            done = min(state.left[m], step_s * self._speeds[m][i])
            shares[m].append((self._kept[m][i], done, state.now))
            state.left[m] -= done
            if state.left[m] <= _DONE:
                state.end(m, self._then[m])
        state.now += step_s


class _State:
    """Where a fluid schedule stands.

    Attributes:
        tails: seconds after each chain.
        left: share of each chain.
        active: chains that may run.
        chosen: index of the count of those that do.
    """

    def __init__(self, before: Sequence[int], tails: list[float]) -> None:
        self.now = 0.0
        self.tails = tails
        self.left = [1.0] * len(tails)
        self.active = [m for m, count in enumerate(before) if not count]
        self.chosen: dict[int, int] = {}
        self._before = list(before)

    def end(self, m: int, then: Sequence[int]) -> None:
        """A chain has ended; those after it may run."""
        self.active.remove(m)
        del self.chosen[m]
        for other in then:
            self._before[other] -= 1
            if not self._before[other]:
                self.active.append(other)
