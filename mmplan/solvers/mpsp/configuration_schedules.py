"""Initial schedules from the bound's configurations: combinations of counts, one after another.

The linear program of :func:`mmplan.solvers.mpsp.bounds.configuration_bound` gives each combination
of counts its seconds, in no order. Here one follows the other such that few chains run before
others that must end first, and few devices change hands. Where the order of the chains leaves a
choice, it is random. Blocks are rounded; list scheduling makes a schedule of what comes out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.bounds import Configuration
from mmplan.solvers.mpsp.initial_schedules import block_ends, whole_blocks
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegments

# A chain that runs before another one that must end first costs so many times all devices: it
# decides, and the devices that change hands only break ties. Chosen by hand.
_TOO_EARLY = 1000.0


def configuration_schedules(
    instance: Instance, configurations: Sequence[Configuration], rng: random.Random
) -> Iterator[ChainSchedule]:
    """Schedules from random orders of the configurations, without end.

    There are none where a chain is in no configuration.

    Args:
        configurations: of the same chains, maybe on other counts.
    """
    if len({m for own in configurations for m in own.counts}) < len(instance.chains):
        return
    too_early, moved = _costs(instance, configurations)
    ends = [block_ends(chain.both_s) for chain in instance.chains]
    totals_s = [chain.both_s.sum(axis=1).tolist() for chain in instance.chains]
    while True:
        order = _order(too_early, moved, rng)
        segments = _segments(instance, totals_s, ends, [configurations[i] for i in order])
        yield ChainSchedule(segments)
        yield ChainSchedule(segments, strict=True)


def _costs(instance: Instance, configurations: Sequence[Configuration]) -> tuple[Floats, Floats]:
    """Two costs of one configuration (row) before another, in shares of all devices.

    The first is for chains of the one that must wait for chains of the other, by the seconds of the
    other; the second for devices that change hands.
    """
    chains = instance.chains
    devices = np.zeros((len(configurations), len(chains)))
    for own, row in zip(configurations, devices, strict=True):
        row[list(own.counts)] = list(own.counts.values())
    waits = np.zeros((len(chains), len(chains)))
    for m, chain in enumerate(chains):
        for other in chain.after:
            waits[m] = np.maximum(waits[m], waits[other])
            waits[m, other] = 1.0
    seconds = np.array([own.seconds for own in configurations])
    busy = (devices > 0).astype(float)
    too_early = _TOO_EARLY * (busy @ waits @ busy.T) * seconds / seconds.sum()
    moved = np.abs(devices[:, None] - devices).sum(axis=2) / (2 * instance.devices)
    return too_early, moved


def _order(too_early: Floats, moved: Floats, rng: random.Random) -> list[int]:
    """The configurations' order: the next one is always the one that costs least."""
    count = len(moved)
    order: list[int] = []
    left, from_last = np.ones(count), np.ones(count)
    for _ in range(count):
        random_factor = np.array([1 + rng.random() for _ in range(count)])
        cost = too_early @ left + from_last * random_factor
        order.append(int(np.where(left > 0, cost, np.inf).argmin()))
        left[order[-1]], from_last = 0.0, moved[order[-1]]
    return order


def _segments(
    instance: Instance,
    totals_s: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    ordered: Sequence[Configuration],
) -> ChainSegments:
    """The segments; the priority of each is its start.

    Args:
        totals_s: of each chain on each of its counts.
        ends: of each chain's blocks, see :func:`block_ends`.
    """
    chains, now_s = instance.chains, 0.0
    shares: list[list[tuple[int, float, float]]] = [[] for _ in chains]
    for own in ordered:
        for m, count in own.counts.items():
            k = max(bisect_right(chains[m].counts, count) - 1, 0)
            shares[m].append((k, own.seconds / totals_s[m][k], now_s))
        now_s += own.seconds
    segments: ChainSegments = []
    for own_ends, own in zip(ends, shares, strict=True):
        # Seconds are of one phase, or of other curves.
        whole = sum(share for _, share, _ in own)
        scaled = [(k, share / whole, start_s) for k, share, start_s in own]
        segments.append(whole_blocks(own_ends, scaled))
    return segments
