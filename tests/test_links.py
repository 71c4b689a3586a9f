"""Links and the network in closed form: collectives by size, transfers that share interfaces."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.links import all_reduce_s, collective, collective_s, message
from mmplan.program.network import Network, Traffic, exchange, incoming, outgoing
from mmplan.schema.cluster import Cluster, CollectiveLinks, Link, Links
from tests.clocks import Flow, levels
from tests.programs import make_cluster

Kind = Literal["all_reduce", "all_gather"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather")
INSIDE = Link(latency_s=1.0, bandwidth_bytes_per_s=100.0)
BETWEEN = Link(latency_s=10.0, bandwidth_bytes_per_s=20.0)


def nodes_of(
    per_node: int, nodes: int, *, between: Link = BETWEEN, adapter: float | None = None
) -> Cluster:
    base = make_cluster(per_node * nodes, devices_per_node=per_node)
    links = Links(intra_node=INSIDE, inter_node=between, adapter_bytes_per_s=adapter)
    return base.model_copy(update={"links": links})


# --- collectives ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "passes"), [(k, 2 if k == "all_reduce" else 1) for k in KINDS])
def test_a_ring_inside_a_node_moves_each_byte_once_a_pass(kind: Kind, passes: int) -> None:
    for n in (2, 3, 8):
        got = collective(nodes_of(8, 1), kind, range(n), 1e6)
        ring = passes * (n - 1) * 1.0 + passes * (n - 1) / n * 1e6 / 100
        assert got.seconds == pytest.approx(
            ring if kind == "all_reduce" else min(ring, got.seconds)
        )
        assert got.seconds <= ring
        assert got.interface_s == 0


def test_large_ones_go_around_all_ranks_small_ones_up_a_tree() -> None:
    cluster = nodes_of(4, 16)
    # 64 ranks: 126 steps, 32 of them between nodes; 2 * 63/64 of the bytes at the slower link.
    large = collective(cluster, "all_reduce", range(64), 1e6)
    assert large.interface_s == pytest.approx(2 * 63 / 64 * 1e6 / 20)
    assert large.seconds == pytest.approx(94 * 1 + 32 * 10 + large.interface_s)
    # Trees: 2 steps up and 2 down in a node of 4, 4 and 4 between 16 nodes.
    small = collective(cluster, "all_reduce", range(64), 0)
    assert small.seconds == pytest.approx(2 * 2 * 1 + 2 * 4 * 10)
    assert small.interface_s == 0
    gather = collective(cluster, "all_gather", range(64), 1e6)
    assert gather.interface_s == pytest.approx(63 / 64 * 1e6 / 20)
    assert gather.seconds == pytest.approx(48 * 1 + 15 * 10 + gather.interface_s)


def test_few_nodes_save_bytes_between_them_by_reducing_inside_first() -> None:
    # 2 * 1/2 of the bytes between nodes instead of 2 * 7/8.
    got = collective(nodes_of(4, 2), "all_reduce", range(8), 1e6)
    assert got.interface_s == pytest.approx(1e6 / 20)
    assert got.seconds == pytest.approx(6 + 1.5 * 1e6 / 100 + 2 * 10 + got.interface_s)


def test_one_part_after_the_other_where_links_inside_a_node_are_slow() -> None:
    """All bytes between nodes by one ring, at the speed of the links inside, is slower."""
    cluster = nodes_of(2, 8, between=Link(latency_s=30.0, bandwidth_bytes_per_s=1000.0))
    got = collective(cluster, "all_reduce", range(16), 1000.0)
    inside = 2 * 1.0 + 1000 / 100
    between = 2 * 3 * 30.0 + 2 * 1000 / 1000
    assert got.seconds == pytest.approx(inside + between)
    assert got.interface_s == pytest.approx(2 * 1000 / 1000)


def test_one_rank_of_each_node_has_the_whole_interface() -> None:
    got = collective(nodes_of(4, 4), "all_reduce", [0, 4, 8, 12], 1e6)
    assert got.interface_s == pytest.approx(2 * 3 / 4 * 1e6 / 20)
    assert got.seconds == pytest.approx(6 * 10 + got.interface_s)


def test_measured_links_between_nodes_leave_no_choice() -> None:
    measured = CollectiveLinks(all_reduce=Link(latency_s=5.0, bandwidth_bytes_per_s=10.0))
    links = Links(intra_node=INSIDE, inter_node=BETWEEN, inter_node_collectives=measured)
    cluster = nodes_of(4, 2).model_copy(update={"links": links})
    inside = collective_s(cluster, "all_reduce", range(4), 1e6)
    got = collective(cluster, "all_reduce", range(8), 1e6)
    assert got.seconds == pytest.approx(inside + 5 + 1e6 / 10)
    assert got.interface_s == pytest.approx(1e6 / 10)


def test_without_links_between_nodes_there_are_no_interfaces() -> None:
    cluster = nodes_of(2, 2).model_copy(update={"links": Links(intra_node=INSIDE)})
    assert message(cluster, 0, 3, 100.0).interface_s == 0
    assert collective(cluster, "all_reduce", range(4), 1e6).interface_s == 0


def test_a_devices_adapter_bounds_its_message_and_leaves_the_node_to_others() -> None:
    cluster = nodes_of(4, 2, adapter=5.0)
    got = message(cluster, 0, 4, 100.0)
    assert (got.seconds, got.interface_s, got.load) == (10 + 100 / 5, 100 / 20, 0.25)
    assert message(cluster, 0, 1, 100.0) == message(nodes_of(4, 2), 0, 1, 100.0)
    wide = nodes_of(4, 2, adapter=50.0)
    assert message(wide, 0, 4, 100.0) == message(nodes_of(4, 2), 0, 4, 100.0)


@pytest.mark.parametrize(("local", "rate"), [(1, 5), (2, 10), (4, 20)])
def test_a_collective_has_the_adapters_of_its_ranks_on_a_node(local: int, rate: int) -> None:
    ranks = [node * 4 + k for node in range(2) for k in range(local)]
    got = collective(nodes_of(4, 2, adapter=5.0), "all_reduce", ranks, 1e6)
    inside = collective_s(nodes_of(4, 2), "all_reduce", range(local), 1e6)
    assert got.seconds == pytest.approx(inside + 2 * 10 + 1e6 / rate)
    assert (got.interface_s, got.load) == pytest.approx((1e6 / 20, rate / 20))
    # Shards that are summed at the same time have adapters of their own, up to the node's sum.
    two = collective(nodes_of(4, 2, adapter=5.0), "all_reduce", ranks, 1e6, sharers=2)
    assert two.seconds == pytest.approx(inside + 2 * 10 + max(1e6 / rate, 2 * 1e6 / 20))


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.sets(st.integers(0, 15), min_size=1),
    st.floats(0, 1e6),
    st.floats(1, 8),
    st.sampled_from([None, 8.0]),
)
def test_a_faster_link_never_costs_more(
    kind: Kind,
    per_node: int,
    ranks: set[int],
    size: float,
    faster: float,
    adapter: float | None,
) -> None:
    slow = nodes_of(per_node, 16, adapter=adapter)
    for name in ("intra_node", "inter_node"):
        link: Link = getattr(slow.links, name)
        better = link.model_copy(
            update={
                "latency_s": link.latency_s / faster,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * faster,
            }
        )
        fast = slow.model_copy(update={"links": slow.links.model_copy(update={name: better})})
        took = collective_s(slow, kind, sorted(ranks), size)
        assert collective_s(fast, kind, sorted(ranks), size) <= took * (1 + 1e-12)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0, 1e6),
    st.sampled_from([None, 8.0]),
)
def test_the_solvers_formula_for_many_groups_is_the_same(
    per_node: int, dp: int, stride: int, size: float, adapter: float | None
) -> None:
    cluster = nodes_of(per_node, 64, adapter=adapter)
    ranks = [d * stride for d in range(dp)]
    counts = np.unique([rank // per_node for rank in ranks], return_counts=True)[1]
    got = all_reduce_s(
        cluster,
        np.array([dp]),
        np.array([counts.max()]),
        np.array([len(counts)]),
        np.array([size]),
        sharers=2,
    )
    assert got[0] == pytest.approx(collective_s(cluster, "all_reduce", ranks, size, sharers=2))


# --- the network ------------------------------------------------------------------------


def between(source: int, target: int, seconds: float = 1.0, load: float = 1.0) -> Traffic:
    return Traffic(seconds=seconds, loads=((outgoing(source), load), (incoming(target), load)))


def ends(*transfers: tuple[float, Traffic]) -> list[float]:
    """When each of (begin, traffic) is over."""
    network, found = Network(), [math.nan] * len(transfers)
    for key, (begins, traffic) in enumerate(transfers):
        network.add(begins, traffic, key)
    last = 0.0
    while (over := network.advance()) is not None:
        when, keys = over
        assert when >= last
        last = when
        for key in keys:
            assert math.isnan(found[key])
            found[key] = when
    return found


def test_two_transfers_on_one_interface_take_twice_as_long_together() -> None:
    assert ends((0, between(0, 1))) == [1]
    assert ends((0, between(0, 1)), (0, between(0, 1))) == [2, 2]
    assert ends((0, between(0, 1)), (0, between(0, 2))) == [2, 2]
    assert ends((0, between(0, 2)), (0, between(1, 2))) == [2, 2]


def test_on_two_interfaces_they_take_no_longer_than_one() -> None:
    assert ends((0, between(0, 1)), (0, between(2, 3))) == [1, 1]
    # Full duplex: what a node sends does not slow down what it receives.
    assert ends((0, between(0, 1)), (0, between(1, 0))) == [1, 1]
    assert ends((0, between(0, 1)), (0, between(1, 2))) == [1, 1]


def test_one_that_comes_later_slows_down_what_is_left() -> None:
    # Half is done after 0.5; then both have half of the interface.
    assert ends((0, between(0, 1)), (0.5, between(0, 2))) == [1.5, 2.0]
    assert ends((0, between(0, 1)), (0.5, between(0, 2, 0.25))) == [1.25, 1.0]
    assert ends((0, between(0, 1)), (1.0, between(0, 2))) == [1.0, 2.0]


def test_who_is_held_up_elsewhere_leaves_its_share_to_others() -> None:
    # Three into node 3 have a third each; what shares node 0 with one of them gets the rest.
    got = ends(
        (0, between(0, 3)), (0, between(1, 3)), (0, between(2, 3)), (0, between(0, 4, 2 / 3))
    )
    assert got == pytest.approx([3, 3, 3, 1])


def test_a_collective_has_both_directions_of_all_its_nodes() -> None:
    ring = Traffic(seconds=1.0, loads=exchange([0, 1, 2]))
    assert ends((0, ring), (0, between(5, 2))) == [2, 2]
    assert ends((0, ring), (0, ring), (0, ring)) == [3, 3, 3]
    assert ends((0, ring), (0, between(5, 6))) == [1, 1]


def test_a_load_above_one_stands_for_several_alike() -> None:
    four = Traffic(seconds=1.0, loads=((outgoing(0), 4.0), (incoming(1), 1.0)))
    assert ends((0, four)) == [4]
    assert ends((0, four), (0, between(0, 2, 0.2))) == pytest.approx([4.2, 1.0])


def test_a_load_below_one_leaves_room_and_is_never_faster_than_alone() -> None:
    quarter = between(0, 1, 1.0, 0.25)
    assert ends((0, quarter)) == [1]
    assert ends(*[(0, quarter)] * 4) == [1, 1, 1, 1]
    assert ends(*[(0, quarter)] * 8) == [2] * 8
    assert ends((0, quarter), (0, between(0, 2))) == [1.25, 1.25]


def test_nothing_to_carry_is_over_at_once() -> None:
    assert ends((1, between(0, 1, 0.0)), (0, between(0, 1, 3.0))) == [1, 3]


traffics = st.builds(
    lambda nodes, seconds, ring, load: (
        Traffic(seconds=seconds, loads=exchange(set(nodes), load))
        if ring
        else between(nodes[0], nodes[1], seconds, load)
    ),
    st.lists(st.integers(0, 4), min_size=2, max_size=4),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.booleans(),
    st.sampled_from([0.25, 1.0]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), traffics), min_size=1, max_size=8))
def test_interfaces_are_never_overfull_nor_idle_while_one_could_use_them(
    transfers: list[tuple[int, Traffic]],
) -> None:
    """Against rates that are computed anew for everything at every event."""
    expected, flows, waiting = {}, [], sorted(enumerate(transfers), key=lambda x: x[1][0])
    now = 0.0
    while flows or waiting:
        rates = levels(flows)
        over = [now + flow.left / rate for flow, rate in zip(flows, rates, strict=True)]
        then = min([*over, *(begins for _, (begins, _) in waiting[:1])])
        for flow, rate in zip(flows, rates, strict=True):
            flow.left -= rate * (then - now)
        for flow, end in zip(list(flows), over, strict=True):
            if end <= then:
                flows.remove(flow)
                expected[flow.key] = then
        now = then
        while waiting and waiting[0][1][0] <= now:
            key, (_, traffic) = waiting.pop(0)
            flows.append(Flow(traffic, traffic.seconds, key))
    got = ends(*transfers)
    assert got == pytest.approx([expected[key] for key in range(len(transfers))])
    for (begins, traffic), end in zip(transfers, got, strict=True):
        assert end >= begins + traffic.seconds * (1 - 1e-12)
