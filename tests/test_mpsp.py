"""The scheduler of chains against brute force, and its bounds against every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.mpsp_bounds import (
    configuration_bound,
    curve,
    dag_bound,
    level_bound,
    paper_value,
)
from mmplan.solvers.mpsp_drafts import bi_point
from mmplan.solvers.mpsp_find import find, one_after_another, phase_bound
from mmplan.solvers.mpsp_model import Instance, parts
from mmplan.solvers.mpsp_schedule import Evaluator
from mmplan.solvers.mpsp_wavefront import is_tiled, wavefront
from tests.mpsp_cases import brute_force, chain, drafts, instances, overloads

SLACK = 1 + 1e-9


def _forward(instance: Instance) -> list[np.ndarray]:
    return [own.forward_s for own in instance.chains]


def _all_bounds(instance: Instance) -> list[float]:
    curves = [curve(c.counts, parts(c.forward_s)) for c in instance.chains]
    tables = _forward(instance)
    return [
        level_bound(curves, instance.devices),
        dag_bound(curves, [c.after for c in instance.chains], instance.devices)[0],
        configuration_bound(instance.chains, tables, instance.devices, limit_s=5).bound_s,
    ]


@settings(max_examples=40, deadline=None)
@given(
    instances(max_chains=3, max_blocks=2, max_devices=4).filter(
        lambda i: sum(c.blocks for c in i.chains) <= 4
    )
)
def test_no_bound_exceeds_the_brute_forced_optimum(instance: Instance) -> None:
    optimum = brute_force(instance, _forward(instance))
    assert max(_all_bounds(instance)) <= optimum * SLACK


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_bound_exceeds_a_random_schedule(data: st.DataObject) -> None:
    instance = data.draw(instances())
    timed = Evaluator(instance).run(draft := data.draw(drafts(instance)))
    assert not overloads(instance, draft, timed.starts)
    forward_s = phase_bound(instance, _forward(instance), 5)
    backward_s = phase_bound(instance, [c.backward_s for c in instance.chains], 5)
    assert forward_s <= timed.forward_s * SLACK
    assert backward_s <= timed.backward_s * SLACK


@settings(max_examples=30, deadline=None)
@given(instances())
@example(Instance(chains=(chain([1], [5.0]),), devices=1))
@example(Instance(chains=tuple(chain([1], [6.0]) for _ in range(9)), devices=4))
def test_what_is_found_is_a_schedule_no_worse_than_the_tasks_in_turn(instance: Instance) -> None:
    evaluator = Evaluator(instance)
    found = find(instance, bound_s=0.0, limit_s=0.02)
    times: dict[str, float] = {}
    for label, draft in found.items():
        timed = evaluator.run(draft)
        assert is_tiled(draft, instance)
        assert not overloads(instance, draft, timed.starts)
        times[label] = timed.total_s
    sequential_s = evaluator.run(one_after_another(instance)).total_s
    assert min(times.values()) <= sequential_s * SLACK


@settings(max_examples=30, deadline=None)
@given(instances())
def test_waves_as_printed_run_every_block_once(instance: Instance) -> None:
    found = wavefront(instance)
    assert is_tiled(found.draft, instance)
    timed = Evaluator(instance).run(found.draft)
    assert not overloads(instance, found.draft, timed.starts)
    curves = [curve(c.counts, parts(c.both_s)) for c in instance.chains]
    assert level_bound(curves, instance.devices) <= found.seconds * SLACK


@settings(max_examples=15, deadline=None)
@given(
    instances(max_chains=3, max_blocks=2, max_devices=4).filter(
        lambda i: sum(c.blocks for c in i.chains) <= 4
    )
)
def test_the_search_finds_the_optimum_of_tiny_instances(instance: Instance) -> None:
    # Both phases together, forwards apart: where only forwards take time they are the optimum.
    only = Instance(
        chains=tuple(
            chain_
            for chain_ in (
                type(c)(
                    name=c.name,
                    counts=c.counts,
                    forward_s=c.forward_s,
                    backward_s=c.forward_s,
                    after=c.after,
                )
                for c in instance.chains
            )
        ),
        devices=instance.devices,
    )
    optimum = brute_force(only, _forward(only))
    found = find(only, bound_s=2 * optimum, limit_s=0.3)
    best = min(Evaluator(only).run(draft).forward_s for draft in found.values())
    # List scheduling leaves no device idle on purpose; the best order of all may have to.
    assert optimum / SLACK <= best <= 1.34 * optimum


def test_the_papers_value_is_no_bound() -> None:
    """Two MetaOps of 12 blocks, T = 1/n, 3 devices: Eq. 11 gives 9, a schedule takes 8."""
    two = Instance(
        chains=tuple(chain([1, 2, 3], [12, 6, 4], blocks=12) for _ in range(2)), devices=3
    )
    totals = [c.forward_s.sum(axis=1) for c in two.chains]
    assert paper_value([c.counts for c in two.chains], totals, 3) == pytest.approx(9.0)
    assert phase_bound(two, _forward(two), 1) == pytest.approx(8.0, rel=1e-6)
    best = find(two, bound_s=24.0, limit_s=0.2)
    assert min(Evaluator(two).run(d).forward_s for d in best.values()) == pytest.approx(8.0)


def test_as_many_metaops_as_devices() -> None:
    """Algorithm 2 as printed ends at the sum of the times; they run side by side."""
    four = Instance(chains=tuple(chain([1, 2, 4], [6, 4, 3]) for _ in range(4)), devices=4)
    totals = [c.forward_s.sum(axis=1) for c in four.chains]
    assert paper_value([c.counts for c in four.chains], totals, 4) == pytest.approx(6.0)
    lone = [np.array([6.0])] * 5
    assert paper_value([(1,)] * 5, lone, 4) == pytest.approx(30.0)
    assert phase_bound(four, _forward(four), 1) == pytest.approx(6.0)


def test_more_metaops_than_devices() -> None:
    five = Instance(chains=tuple(chain([1], [4], blocks=4) for _ in range(5)), devices=2)
    assert phase_bound(five, _forward(five), 1) == pytest.approx(10.0, rel=1e-6)
    found = find(five, bound_s=0.0, limit_s=0.3)
    best = min(Evaluator(five).run(d).forward_s for d in found.values())
    # A chain stays in one piece in time but may change its device: 12 without any gap left.
    assert 10.0 <= best <= 12.0


def test_configurations_know_counts_that_do_not_fill_the_devices() -> None:
    """Counts 2 and 4 on 7 devices: 6 are used at best."""
    chains = tuple(chain([2, 4], [4, 2], blocks=8) for _ in range(3))
    seven = Instance(chains=chains, devices=7)
    curves = [curve(c.counts, parts(c.forward_s)) for c in seven.chains]
    assert level_bound(curves, 7) == pytest.approx(24 / 7)
    found = configuration_bound(seven.chains, _forward(seven), 7, limit_s=1)
    assert found.bound_s == pytest.approx(4.0, rel=1e-3)


def test_devices_that_make_a_chain_slower_are_not_used() -> None:
    odd = chain([1, 2, 3, 4], [8, 9, 4, 6], blocks=2)
    assert Instance(chains=(odd,), devices=4).chains[0].counts == (1, 3)
    assert Instance(chains=(odd,), devices=2).chains[0].counts == (1,)


def test_curves_that_are_not_concave() -> None:
    """On 2 devices hardly faster, on 4 much: the envelope skips the 2."""
    own = chain([1, 2, 4], [8, 7.9, 2])
    found = curve(own.counts, parts(own.forward_s))
    assert found.time_s.tolist() == [2.0]
    assert found.area_s.tolist() == [8.0]
    assert level_bound([found, found], 4) == pytest.approx(4.0)


def test_levels_are_longest_paths() -> None:
    made = Instance(
        chains=(chain([1], [1]), chain([1], [1], after=[0]), chain([1], [1], after=[0, 1])),
        devices=1,
    )
    assert [c.level for c in made.chains] == [0, 1, 2]
    bound = dag_bound(
        [curve(c.counts, parts(c.forward_s)) for c in made.chains],
        [c.after for c in made.chains],
        8,
    )[0]
    assert bound == pytest.approx(3.0, rel=1e-6)


def test_a_loss_that_does_not_get_faster_is_a_part_of_its_own() -> None:
    table = np.array([[4.0, 4.0, 1.0], [2.0, 2.0, 1.0]])
    found = parts(table)
    assert [part.time_s.tolist() for part in found] == [[8.0, 4.0], [1.0, 1.0]]
    assert curve([1, 2], found).time_s.tolist() == [5.0]


def test_bi_point_takes_the_span() -> None:
    own = chain([1, 2, 4], [8, 4, 2], blocks=8)
    assert bi_point(own.counts, own.forward_s, 3.0, hull=True, larger_first=True) == [
        (2, 0, 4),
        (1, 4, 8),
    ]
    assert bi_point(own.counts, own.forward_s, 9.0, hull=False, larger_first=True) == [(0, 0, 8)]


def test_more_devices_than_there_are_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="m needs 4 devices at least, there are 2"):
        Instance(chains=(chain([4], [1]),), devices=2)


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="m: times must be finite"):
        Instance(chains=(chain([1], [float("nan")]),), devices=2)
