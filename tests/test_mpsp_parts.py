"""Parts of the scheduler of chains: linear programs, times of transfers, curves."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from mmplan.costs.links import message
from mmplan.schema.cluster import Cluster
from mmplan.solvers.mpsp.bounds import curve, level_bound, maximize
from mmplan.solvers.mpsp.initial_schedules import block_ends, whole_blocks
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.placement import RankGroups, reductions_s, transfer_s
from mmplan.solvers.sample_split import split_evenly
from tests.mpsp_cases import instances
from tests.solving import cluster

SLOW = {"latency_s": 0.5, "bandwidth_bytes_per_s": 2.0}
FAST = {"latency_s": 0.25, "bandwidth_bytes_per_s": 8.0}


def two_nodes() -> Cluster:
    return Cluster.model_validate(cluster(8, per_node=4, inter=SLOW, intra=FAST))


@st.composite
def programs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small integers, so that ties are common; a row for each variable keeps it bounded."""
    columns, rows = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    numbers = st.integers(-2, 3)
    matrix = [[draw(numbers) for _ in range(columns)] for _ in range(rows)]
    limit = [draw(st.integers(0, 4)) for _ in range(rows)] + [draw(st.integers(0, 9))] * columns
    gain = [draw(numbers) for _ in range(columns)]
    whole = np.vstack([np.array(matrix, dtype=np.float64).reshape(rows, columns), np.eye(columns)])
    return np.array(gain, dtype=np.float64), whole, np.array(limit, dtype=np.float64)


@settings(max_examples=75, deadline=None)
@given(programs())
def test_the_simplex_method_finds_the_optimum_and_its_prices(
    program: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    gain, matrix, limit = program
    x, prices = maximize(gain, matrix, limit)
    optimum = -linprog(-gain, A_ub=matrix, b_ub=limit, method="highs").fun
    assert gain @ x == pytest.approx(optimum, abs=1e-7)
    assert limit @ prices == pytest.approx(optimum, abs=1e-7)
    assert (x >= -1e-9).all()
    assert (matrix @ x <= limit + 1e-7).all()
    assert (matrix.T @ prices >= gain - 1e-7).all()


@settings(max_examples=50, deadline=None)
@given(instances())
def test_the_levels_bound_is_where_the_device_seconds_fit(instance: Instance) -> None:
    curves = [curve(c.counts, c.forward_s) for c in instance.chains]
    bound_s = level_bound(curves, instance.devices)

    def spare(seconds: float) -> float:
        return instance.devices * seconds - sum(
            float(np.interp(seconds, c.time_s, c.area_s)) for c in curves
        )

    least_s = max(float(c.time_s[0]) for c in curves)
    assert bound_s >= least_s
    assert spare(bound_s) >= -1e-9 * bound_s
    if bound_s > least_s * (1 + 1e-9):
        assert spare(bound_s * (1 - 1e-6)) < 0


def plain_transfer_s(
    where: Cluster, producers: RankGroups, consumers: RankGroups, samples: int
) -> float:
    """Sample by sample: the longest message, or the busiest interface of a node."""
    made = [
        rank
        for share, (rank,) in zip(split_evenly(samples, len(producers)), producers, strict=True)
        for rank in [rank] * share
    ]
    edges = [0, *accumulate(split_evenly(samples, len(consumers)))]
    longest, interfaces = 0.0, Counter[str]()
    for (target,), (a, b) in zip(consumers, pairwise(edges), strict=True):
        for source in set(made[a:b]):
            size = 3.0 * made[a:b].count(source)
            longest = max(longest, message(where, source, target, size).seconds)
            if source // 4 != target // 4:
                seconds = size / SLOW["bandwidth_bytes_per_s"]
                interfaces.update({f"out {source // 4}": seconds, f"in {target // 4}": seconds})
    return max(longest, *interfaces.values(), 0.0)


@settings(max_examples=50, deadline=None)
@given(
    st.permutations(range(8)),
    st.permutations(range(8)),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 12),
)
@example(list(range(8)), list(range(8)), 4, 4, 0)
@example(list(range(8)), list(range(8)), 4, 8, 1)
def test_a_transfer_takes_as_long_as_its_longest_message_or_busiest_interface(
    one: list[int], other: list[int], producers: int, consumers: int, more: int
) -> None:
    samples = max(producers, consumers) + more
    groups = tuple((r,) for r in one[:producers]), tuple((r,) for r in other[:consumers])
    own = transfer_s(two_nodes(), *groups, samples=samples, sample_bytes=3.0)
    assert own == pytest.approx(plain_transfer_s(two_nodes(), *groups, samples))


def test_gradients_are_summed_one_group_after_another() -> None:
    where = two_nodes()
    # Blocks 0 and 1 on ranks 0 and 1, block 2 on ranks 1 and 4 of two nodes, block 3 alone.
    holders = [{(0,), (1,)}, {(0,), (1,)}, {(1,), (4,)}, {(6,)}]
    shards = [(frozenset(groups), 8.0) for groups in holders]
    # Two ranks: the latency there and back, and each byte once.
    inside, between = 2 * 0.25 + 16 / 8, 2 * 0.5 + 8 / 2
    assert reductions_s(where, shards) == pytest.approx(inside + between)
    assert reductions_s(where, shards[3:]) == 0.0


def test_sums_of_other_ranks_share_the_interfaces_of_their_nodes() -> None:
    shards = [(frozenset({(b,), (4 + b,)}), 800.0) for b in range(3)]
    one_s = reductions_s(two_nodes(), shards[:1])
    # Bytes take three times as long, latencies do not.
    assert reductions_s(two_nodes(), shards) == pytest.approx(3 * one_s, rel=0.01)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=6),
)
@example([1, 1, 1], [(0, 1), (1, 1)])  # half of three blocks: two ends are as near
def test_shares_become_whole_blocks(seconds: list[int], shares: list[tuple[int, int]]) -> None:
    total = sum(share for _, share in shares)
    if not total:
        return
    ends = block_ends(np.array([seconds, seconds], dtype=np.float64))
    assert ends == pytest.approx([0, *(x / sum(seconds) for x in accumulate(seconds))])
    # Shares come from numpy too; blocks go into files.
    given = [(k, np.float64(s / total), float(n)) for n, (k, s) in enumerate(shares)]
    found = whole_blocks(ends, given)
    assert {type(block) for _, a, b, _ in found for block in (a, b)} == {int}
    # Every block once, in order; neighbours have other counts.
    assert [a for _, a, _, _ in found] == [0, *(b for _, _, b, _ in found[:-1])]
    assert found[-1][2] == len(seconds)
    assert all(a < b for _, a, b, _ in found)
    assert all(first[0] != second[0] for first, second in pairwise(found))
    # A cut is at the block end nearest to where a share ends; its priority is that of the next one.
    wanted = [x / total for x in accumulate(share for _, share in shares)]
    for _, cut, _, priority in found[1:]:
        assert any(
            abs(share - ends[cut]) <= min(abs(share - end) for end in ends) + 1e-9
            for share in wanted[: int(priority)]
        )
