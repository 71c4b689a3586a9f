"""Slices on ranks of tight memory: a placement is found wherever one exists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmplan.schema.cluster import Cluster
from mmplan.solvers.mpsp.placement import Placed, RankGroups, UnplacedSlice, pack, place
from mmplan.solvers.search_budget import SearchBudget
from tests.solving import cluster


def unplaced(
    owner: str,
    blocks: tuple[int, int],
    *,
    devices: int,
    size: float,
    activations: float,
    tp: int = 1,
    dp: int = 1,
    start_s: float = 0.0,
    after: Sequence[int] = (),
) -> UnplacedSlice:
    """A second of work on blocks of equal size, which other degrees divide."""
    each = np.full(blocks[1] - blocks[0], size / tp)
    return UnplacedSlice(
        tp=tp,
        dp=dp,
        rank_range=(0, devices),
        start_s=start_s,
        forward_s=1.0,
        backward_s=2.0,
        after=tuple((i, 1.0) for i in after),
        samples=8,
        num_microbatches=1,
        owner=owner,
        blocks=blocks,
        fixed_bytes=each,
        gradient_bytes=each / 4,
        activation_bytes=activations,
    )


@st.composite
def tight(draw: st.DrawFn) -> tuple[list[UnplacedSlice], int, float]:
    """Slices, devices, and a memory near the mean of what they need."""
    devices = draw(st.sampled_from([2, 3, 4]))
    size_of = {owner: float(draw(st.integers(1, 6))) for owner in "vt"}
    slices: list[UnplacedSlice] = []
    for i in range(draw(st.integers(2, 4))):
        tp = draw(st.sampled_from([1, 1, 2]))
        first = draw(st.integers(0, 2))
        owner = draw(st.sampled_from("vt"))
        after = draw(st.sets(st.integers(0, i - 1), max_size=1)) if i else set[int]()
        ready_s = max((slices[j].start_s + 1.0 for j in after), default=0.0)
        slices.append(
            unplaced(
                owner,
                (first, draw(st.integers(first + 1, 3))),
                devices=devices,
                size=size_of[owner],
                activations=float(draw(st.integers(0, 5))),
                tp=tp,
                dp=draw(st.integers(1, devices // tp)),
                start_s=ready_s + draw(st.integers(0, 2)),
                after=sorted(after),
            )
        )
    needed = sum(s.tp * s.dp * (float(s.fixed_bytes.sum()) + s.activation_bytes) for s in slices)
    share = draw(st.sampled_from([0.6, 0.8, 1.0, 1.1]))
    return slices, devices, float(max(1, round(needed / devices * share)))


def fits(
    slices: Sequence[UnplacedSlice], choice: Sequence[RankGroups], memory_bytes: float
) -> bool:
    """Every rank holds each block as one shard, once, and all of its slices' activations."""
    activations: dict[int, float] = {}
    degree: dict[tuple[int, str, int], int] = {}
    sizes: dict[tuple[int, str, int], float] = {}
    for own, groups in zip(slices, choice, strict=True):
        for rank in itertools.chain(*groups):
            activations[rank] = activations.get(rank, 0.0) + own.activation_bytes
            for block, size in enumerate(own.fixed_bytes.tolist(), own.blocks[0]):
                key = rank, own.owner, block
                if degree.setdefault(key, own.tp) != own.tp:
                    return False
                sizes[key] = size
    for rank, total in activations.items():
        if total + sum(size for key, size in sizes.items() if key[0] == rank) > memory_bytes:
            return False
    return True


def some_placement_exists(slices: Sequence[UnplacedSlice], memory_bytes: float) -> bool:
    """Try every choice of groups for every slice."""
    options = [
        list(itertools.combinations([own.group(g) for g in range(own.num_groups)], own.dp))
        for own in slices
    ]
    return any(fits(slices, choice, memory_bytes) for choice in itertools.product(*options))


EXCHANGE = (
    # In the order of time the small ones take both ranks, and the large one does not fit.
    [
        unplaced("v", (0, 1), devices=2, size=3.0, activations=0.0),
        unplaced("t", (0, 1), devices=2, size=3.0, activations=0.0),
        unplaced("u", (0, 1), devices=2, size=6.0, activations=0.0, start_s=1.0),
    ],
    2,
    6.0,
)


@settings(max_examples=100, deadline=None)
@given(tight())
@example(EXCHANGE)
def test_a_placement_is_found_wherever_one_exists(
    case: tuple[list[UnplacedSlice], int, float],
) -> None:
    slices, devices, memory_bytes = case
    packed = pack(slices, devices, memory_bytes, budget=SearchBudget(20))
    assert (packed is not None) == some_placement_exists(slices, memory_bytes)
    if packed is not None:
        assert fits(slices, packed, memory_bytes)


@settings(max_examples=50, deadline=None)
@given(tight())
@example(EXCHANGE)
def test_what_is_placed_fits_and_is_a_schedule(
    case: tuple[list[UnplacedSlice], int, float],
) -> None:
    slices, devices, memory_bytes = case
    where = Cluster.model_validate(cluster(devices, memory_bytes=memory_bytes))
    placed = place(slices, where, devices, budget=SearchBudget(20))
    assert isinstance(placed, Placed) == some_placement_exists(slices, memory_bytes)
    if not isinstance(placed, Placed):
        assert placed > 0
        return
    assert fits(slices, placed.groups, memory_bytes)
    for own, start, groups in zip(slices, placed.starts, placed.groups, strict=True):
        assert start >= max(
            (placed.starts[i] + slices[i].forward_s for i, _ in own.after), default=0
        )
        assert len({*itertools.chain(*groups)}) == own.tp * own.dp
    for i, j in itertools.combinations(range(len(slices)), 2):
        if {*itertools.chain(*placed.groups[i])} & {*itertools.chain(*placed.groups[j])}:
            assert abs(placed.starts[i] - placed.starts[j]) >= 1.0


def test_packing_goes_back_many_times_within_a_second() -> None:
    """Twenty-four slices on eight ranks, filled to the last byte: sums of three that are equal."""
    triples = [(3.0, 4.0, 5.0), (2.0, 4.0, 6.0), (1.0, 5.0, 6.0), (2.0, 3.0, 7.0)] * 2
    slices = [
        unplaced(f"m{t}.{i}", (0, 1), devices=8, size=size, activations=0.0)
        for t, triple in enumerate(triples)
        for i, size in enumerate(triple)
    ]
    found = pack(slices, 8, 12.0, budget=SearchBudget(5))
    assert found is not None
    assert fits(slices, found, 12.0)


def test_a_search_without_time_finds_nothing() -> None:
    slices, devices, memory_bytes = EXCHANGE
    assert pack(slices, devices, memory_bytes, budget=SearchBudget(0)) is None
