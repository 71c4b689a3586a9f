"""Which ranks sum which elements, against what every single element needs."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmlaunch.checkpoint.boxes import ShardStyle, shard_boxes
from mmlaunch.model.shard_layout import ShardLayout, flat_parts, shard_layout
from mmplan.program.shards import Ranks, ShardSum, held_shards, is_crowded, shard_sums

STYLES: tuple[ShardStyle, ...] = ("colwise", "rowwise", "packed_colwise")


@st.composite
def disjoint_groups(draw: st.DrawFn) -> list[Ranks]:
    """Tensor-parallel groups of any sizes on ranks of their own."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return [tuple(next(ranks) for _ in range(size)) for size in sizes]


@settings(deadline=None)
@given(disjoint_groups(), st.sampled_from(STYLES))
@example([(0, 1), (2, 3, 4)], "packed_colwise")
@example([(0, 1), (2, 3, 4, 5), (6,)], "rowwise")
def test_every_element_is_summed_once_over_all_that_hold_it(
    groups: list[Ranks], style: ShardStyle
) -> None:
    tp = math.lcm(*map(len, groups))
    shape, parts = ((2, tp), 1) if style == "rowwise" else ((3 * tp, 2), 3)
    holders: dict[int, set[int]] = {}
    places: dict[int, ShardLayout] = {}
    position = torch.arange(math.prod(shape)).view(shape)
    for group in groups:
        for index, rank in enumerate(group):
            boxes = shard_boxes(shape, style, index, len(group), parts)
            places[rank] = shard_layout(shape, style, index, len(group), parts)
            for box in boxes:
                for element in position[box.slices].reshape(-1).tolist():
                    holders.setdefault(element, set()).add(rank)
    seen: Counter[int] = Counter()
    for total in shard_sums(groups):
        if total.parameters == "whole":
            continue
        found = {rank: _elements(places[rank], total, position) for rank in total.ranks}
        # In the same order on all ranks, or the sum would add what does not belong together.
        assert len(set(map(tuple, found.values()))) == 1
        for element in found[total.ranks[0]]:
            seen[element] += 1
            assert set(total.ranks) == holders[element]
    assert seen == dict.fromkeys(range(math.prod(shape)), 1)


def _elements(place: ShardLayout, total: ShardSum, position: torch.Tensor) -> list[int]:
    local = place.take(position)
    boxes = place.span(total.shards, total.tp)
    if boxes is None:
        return local.reshape(-1).tolist()
    return [x for box in boxes for x in local[box.slices].reshape(-1).tolist()]


@settings(deadline=None)
@given(disjoint_groups())
@example([(0, 1, 2), (3, 4, 5, 6), (7, 8)])  # as many ranks as three groups of three
def test_whole_parameters_are_brought_once_by_every_group(groups: list[Ranks]) -> None:
    reached: Counter[int] = Counter()
    for total in shard_sums(groups):
        if total.parameters == "cut":
            continue
        assert set(total.contributors) <= set(total.ranks)
        reached.update(total.ranks)
        for group in groups:
            assert len(set(group) & set(total.contributors)) == 1
    assert reached == dict.fromkeys({rank for group in groups for rank in group}, 1)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_groups_of_one_size_have_one_sum_for_each_shard(size: int, num_groups: int) -> None:
    groups = [tuple(range(d * size, (d + 1) * size)) for d in range(num_groups)]
    found = shard_sums(groups)
    assert [(x.tp, x.shards, x.parameters) for x in found] == [
        (size, (t, t + 1), "all") for t in range(size)
    ]
    assert [x.ranks for x in found] == [tuple(group[t] for group in groups) for t in range(size)]
    assert all(x.contributors == x.ranks for x in found)


def test_parts_are_the_coarsest_with_constant_holders() -> None:
    found = shard_sums([(0, 1), (2, 3, 4)])
    assert [(x.shards, x.ranks, x.parameters) for x in found] == [
        ((0, 2), (0, 2), "cut"),
        ((2, 3), (0, 3), "cut"),
        ((3, 4), (1, 3), "cut"),
        ((4, 6), (1, 4), "cut"),
        ((0, 6), (0, 1, 2, 3, 4), "whole"),
    ]
    assert found[-1].contributors == (0, 2)


def test_groups_that_share_a_rank_have_one_sum_of_whole_parameters() -> None:
    """Rank 0 adds up for both groups, 1 and 2 do not: apart they would differ in the last bit."""
    found = shard_sums([(0, 1), (0, 2)])
    assert [(x.shards, x.ranks, x.parameters, x.contributors) for x in found] == [
        ((0, 1), (0,), "cut", (0,)),
        ((1, 2), (1, 2), "cut", (1, 2)),
        ((0, 2), (0, 1, 2), "whole", (0,)),
    ]


@pytest.mark.parametrize(
    ("groups", "held", "crowded"),
    [
        ([(0, 1), (0, 2), (3,)], {0: (0, 2), 1: (1, 2), 2: (1, 2), 3: (0, 1)}, False),
        ([(0, 1), (0,)], {0: (0, 1), 1: (1, 2)}, True),
        ([(0, 1), (2, 3, 1)], {0: (0, 2), 1: (0, 1), 2: (0, 3), 3: (1, 3)}, True),
        ([(0, 1), (1, 0)], {0: (0, 1), 1: (0, 1)}, True),
    ],
)
def test_a_rank_that_runs_two_shards_holds_the_whole(
    groups: list[Ranks], held: dict[int, tuple[int, int]], crowded: bool
) -> None:
    assert held_shards(groups) == held
    assert is_crowded(groups) == crowded


def test_of_a_crowded_block_every_rank_adds_whole_parameters() -> None:
    found = shard_sums([(0, 1), (0,), (2, 3)])
    assert [(x.shards, x.ranks, x.parameters, x.contributors) for x in found] == [
        ((0, 1), (0, 2), "cut", (0, 2)),
        ((1, 2), (0, 1, 3), "cut", (0, 1, 3)),
        ((0, 2), (0, 1, 2, 3), "whole", (0, 1, 2, 3)),
    ]
    # Held whole by all: one sum is enough.
    (only,) = shard_sums([(0, 1), (0,), (1,)])
    assert (only.tp, only.shards, only.parameters, only.ranks) == (1, (0, 1), "all", (0, 1))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3), st.data())
def test_flat_parts_of_boxes_are_that_slice(sizes: list[tuple[int, int]], data: st.DataObject):
    from mmlaunch.checkpoint.boxes import Box

    boxes = tuple(Box(offsets=(4 * k, k), sizes=size) for k, size in enumerate(sizes))
    position = torch.arange(12 * 7).view(12, 7)
    flat = torch.cat([position[box.slices].reshape(-1) for box in boxes])
    low = data.draw(st.integers(0, len(flat)))
    high = data.draw(st.integers(low, len(flat)))
    found = [position[box.slices].reshape(-1) for box in flat_parts(boxes, low, high)]
    assert torch.equal(torch.cat([*found, position[:0, 0]]), flat[low:high])
