"""Random and brute-forced instances of chains that share devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment, ChainSegments


def chain(
    counts: Sequence[int],
    seconds: Sequence[float],
    *,
    blocks: int = 1,
    after: Sequence[int] = (),
    backward: float = 2.0,
    name: str = "m",
) -> Chain:
    """Equal blocks that together take these seconds on each count."""
    forward_s = np.outer(np.array(seconds, dtype=np.float64) / blocks, np.ones(blocks))
    return Chain(
        name=name,
        counts=tuple(counts),
        forward_s=forward_s,
        backward_s=backward * forward_s,
        after=tuple(after),
    )


@st.composite
def instances(
    draw: st.DrawFn, max_chains: int = 5, max_blocks: int = 4, max_devices: int = 8
) -> Instance:
    """Small integers, so that ties are common; curves of any shape, any order between chains."""
    devices = draw(st.integers(1, max_devices))
    made: list[Chain] = []
    for m in range(draw(st.integers(1, max_chains))):
        others = draw(st.sets(st.integers(1, max_devices), max_size=3))
        counts = sorted({draw(st.integers(1, devices)), *others})
        blocks = draw(st.integers(1, max_blocks))
        table = st.lists(
            st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks),
            min_size=len(counts),
            max_size=len(counts),
        )
        forward, backward = (np.array(draw(table), dtype=np.float64) for _ in range(2))
        made.append(
            Chain(
                name=f"m{m}",
                counts=tuple(counts),
                forward_s=forward,
                backward_s=backward * draw(st.sampled_from([0.0, 1.0, 2.0])),
                after=tuple(sorted(draw(st.sets(st.integers(0, m - 1), max_size=2)))) if m else (),
                task=m % 2,
            )
        )
    return Instance(chains=tuple(made), devices=devices)


@st.composite
def schedules(draw: st.DrawFn, instance: Instance) -> ChainSchedule:
    """Any cuts of the chains, any counts, any priorities."""
    segments: ChainSegments = []
    for own in instance.chains:
        inner = draw(st.sets(st.integers(1, own.blocks - 1))) if own.blocks > 1 else set()
        edges = [0, *sorted(inner), own.blocks]
        segments.append(
            [
                ChainSegment(
                    draw(st.integers(0, len(own.counts) - 1)), a, b, float(draw(st.integers(0, 5)))
                )
                for a, b in itertools.pairwise(edges)
            ]
        )
    return ChainSchedule(segments, strict=draw(st.booleans()))


def brute_force(instance: Instance, tables: Sequence[Floats]) -> float:
    """The least makespan: every block a slice, every count, every order. Exponential, obvious.

    Placing slices one by one, each as early as it fits, in some order gives every schedule in
    which nothing could start earlier, the best one among them.
    """
    chains = instance.chains
    blocks = [(m, b) for m, own in enumerate(chains) for b in range(own.blocks)]
    best = float("inf")
    for order in _orders(instance):
        for choice in itertools.product(*(range(len(chains[m].counts)) for m, _ in blocks)):
            counts = dict(zip(blocks, choice, strict=True))
            best = min(best, _serial(instance, tables, order, counts, best))
    return best


def _orders(instance: Instance) -> Iterator[tuple[int, ...]]:
    """Orders of chains' next blocks that respect the chains' order."""
    items = [m for m, own in enumerate(instance.chains) for _ in range(own.blocks)]
    for order in sorted(set(itertools.permutations(items))):
        seen: dict[int, int] = {}
        good = True
        for m in order:
            seen[m] = seen.get(m, 0) + 1
            good &= all(
                seen.get(i, 0) == instance.chains[i].blocks for i in instance.chains[m].after
            )
        if good:
            yield order


def _serial(
    instance: Instance,
    tables: Sequence[Floats],
    order: Sequence[int],
    counts: dict[tuple[int, int], int],
    limit: float,
) -> float:
    ends = [0.0] * len(instance.chains)
    done = [0] * len(instance.chains)
    placed: list[tuple[float, float, int]] = []
    for m in order:
        own, k = instance.chains[m], counts[m, done[m]]
        ready = max([ends[m], *(ends[i] for i in own.after)])
        seconds, devices = float(tables[m][k, done[m]]), own.counts[k]
        start = next(
            t
            for t in sorted({ready, *(e for _, e, _ in placed if e > ready)})
            if _fits(placed, t, t + seconds, devices, instance.devices)
        )
        placed.append((start, start + seconds, devices))
        ends[m], done[m] = start + seconds, done[m] + 1
        if ends[m] >= limit:
            return limit
    return max(ends)


def _fits(
    placed: Sequence[tuple[float, float, int]], a: float, b: float, devices: int, capacity: int
) -> bool:
    """Whether so many devices are free all the time from a to b."""
    instants = [a, *(s for s, _, _ in placed if a < s < b)]
    return all(devices + sum(n for s, e, n in placed if s <= t < e) <= capacity for t in instants)


def overloads(
    instance: Instance, schedule: ChainSchedule, starts: Sequence[Sequence[float]]
) -> list[str]:
    """Faults of a decoded schedule of forwards: a block left out or twice, or too many devices."""
    faults: list[str] = []
    ends: list[float] = []
    running: list[tuple[float, float, int]] = []
    for m, own in enumerate(instance.chains):
        block, free_at = 0, max((ends[i] for i in own.after), default=0.0)
        for (k, a, b, _), start in zip(schedule.segments[m], starts[m], strict=True):
            if a != block or start < free_at - 1e-9:
                faults.append(f"{own.name}: blocks [{a}, {b}) at {start}")
            free_at = start + float(own.forward_s[k, a:b].sum())
            running.append((start, free_at, own.counts[k]))
            block = b
        if block != own.blocks:
            faults.append(f"{own.name}: {block} of {own.blocks} blocks")
        ends.append(free_at)
    for start, _, _ in running:
        # Times are sums in another order than the decoder's.
        used = sum(n for s, e, n in running if s <= start + 1e-9 and start + 1e-9 < e - 1e-9)
        if used > instance.devices:
            faults.append(f"{used} devices at {start}")
    return faults
