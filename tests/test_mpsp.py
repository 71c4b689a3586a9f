"""The scheduler of chains against brute force, and its bounds against every schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.mpsp.bounds import (
    configuration_bound,
    continuous_optimum,
    curve,
    dag_bound,
    level_bound,
    phase_bound,
)
from mmplan.solvers.mpsp.configuration_schedules import configuration_schedules
from mmplan.solvers.mpsp.initial_schedules import FluidScheduler, bi_point
from mmplan.solvers.mpsp.instance import Chain, GradientSum, Instance, scaling_classes
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment, Evaluator
from mmplan.solvers.mpsp.search import find_schedules, sequential_schedule
from mmplan.solvers.mpsp.wavefront import wavefront
from mmplan.solvers.search_budget import SearchBudget
from tests.mpsp_cases import brute_force, chain, instances, overloads, schedules

SLACK = 1 + 1e-9


def _forward(instance: Instance) -> list[np.ndarray]:
    return [own.forward_s for own in instance.chains]


def _all_bounds(instance: Instance) -> list[float]:
    curves = [curve(c.counts, c.forward_s) for c in instance.chains]
    tables = _forward(instance)
    return [
        level_bound(curves, instance.devices),
        dag_bound(curves, [c.after for c in instance.chains], instance.devices)[0],
        configuration_bound(
            instance.chains, tables, instance.devices, budget=SearchBudget(5)
        ).seconds,
    ]


def _one_chain(*segments: tuple[int, int, int]) -> ChainSchedule:
    return ChainSchedule([[ChainSegment(*own, float(i)) for i, own in enumerate(segments)]])


@settings(max_examples=20, deadline=None)
@given(
    instances(max_chains=3, max_blocks=2, max_devices=4).filter(
        lambda i: sum(c.blocks for c in i.chains) <= 4
    )
)
def test_no_bound_exceeds_the_brute_forced_optimum(instance: Instance) -> None:
    optimum = brute_force(instance, _forward(instance))
    assert max(_all_bounds(instance)) <= optimum * SLACK


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_bound_exceeds_a_random_schedule(data: st.DataObject) -> None:
    instance = data.draw(instances())
    timed = Evaluator(instance).run(schedule := data.draw(schedules(instance)))
    assert not overloads(instance, schedule, timed.starts)
    forward = phase_bound(instance, _forward(instance), SearchBudget(5))
    backward = phase_bound(instance, [c.backward_s for c in instance.chains], SearchBudget(5))
    assert forward.seconds <= timed.forward_s * SLACK
    assert backward.seconds <= timed.backward_s * SLACK


@settings(max_examples=15, deadline=None)
@given(instances())
@example(Instance(chains=(chain([1], [5.0]),), devices=1))
@example(Instance(chains=tuple(chain([1], [6.0]) for _ in range(9)), devices=4))
def test_schedules_are_valid_and_no_worse_than_the_tasks_in_turn(instance: Instance) -> None:
    evaluator = Evaluator(instance)
    found = find_schedules(instance, bound_s=0.0, budget=SearchBudget(0.02))
    times: dict[str, float] = {}
    for label, schedule in found.items():
        timed = evaluator.run(schedule)
        assert not overloads(instance, schedule, timed.starts)
        times[label] = timed.total_s
    sequential_s = evaluator.run(sequential_schedule(instance)).total_s
    assert min(times.values()) <= sequential_s * SLACK


@settings(max_examples=15, deadline=None)
@given(instances())
def test_waves_as_printed_run_every_block_once(instance: Instance) -> None:
    found = wavefront(instance)
    timed = Evaluator(instance).run(found.schedule)
    assert not overloads(instance, found.schedule, timed.starts)
    curves = [curve(c.counts, c.both_s) for c in instance.chains]
    assert level_bound(curves, instance.devices) <= found.seconds * SLACK


@settings(max_examples=15, deadline=None)
@given(
    instances(max_chains=3, max_blocks=2, max_devices=4).filter(
        lambda i: sum(c.blocks for c in i.chains) <= 4
    )
)
def test_the_search_finds_the_optimum_of_tiny_instances(instance: Instance) -> None:
    # Both phases take the same times: the optimum of one is the optimum of both.
    only = Instance(
        chains=tuple(replace(c, backward_s=c.forward_s) for c in instance.chains),
        devices=instance.devices,
    )
    optimum = brute_force(only, _forward(only))
    found = find_schedules(only, bound_s=2 * optimum, budget=SearchBudget(0.3))
    best = min(Evaluator(only).run(schedule).forward_s for schedule in found.values())
    # List scheduling leaves no device idle on purpose; the best order of all may have to.
    assert optimum / SLACK <= best <= 1.34 * optimum


@settings(max_examples=30, deadline=None)
@given(instances(), st.integers(0, 1000))
@example(Instance(chains=tuple(chain([1], [6.0]) for _ in range(9)), devices=4), 0)
def test_fluid_schedules_run_every_block_once(instance: Instance, seed: int) -> None:
    curves = [curve(c.counts, c.both_s) for c in instance.chains]
    spans = dag_bound(curves, [c.after for c in instance.chains], instance.devices)[1]
    fluid = FluidScheduler(instance, spans, random.Random(seed))
    settings_ = fluid.first()
    settings_ += [fluid.draw(best) for best in (None, settings_[0], settings_[-1])]
    for setting in settings_:
        schedule = ChainSchedule(fluid.segments(setting))
        assert not overloads(instance, schedule, Evaluator(instance).run(schedule).starts)


def test_a_fluid_schedule_holds_back_what_the_chains_after_it_need() -> None:
    """The short chain gets all devices first: what comes after it needs the rest of the time."""
    four = Instance(
        chains=(
            chain([1, 2, 3, 4], [18, 9, 6, 4.5], blocks=18),
            chain([1, 2, 4], [8, 4, 2], blocks=8),
            chain([1], [6], blocks=6, after=[1]),
        ),
        devices=4,
    )
    curves = [curve(c.counts, c.both_s) for c in four.chains]
    bound_s, spans = dag_bound(curves, [c.after for c in four.chains], 4)
    fluid = FluidScheduler(four, spans, random.Random(0))
    ends = [
        Evaluator(four).run(ChainSchedule(fluid.segments(own))).total_s for own in fluid.first()
    ]
    assert bound_s == pytest.approx(24.0, rel=1e-6)
    assert min(ends) == pytest.approx(24.0)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_schedule_that_ends_too_late_is_given_up(data: st.DataObject) -> None:
    instance = data.draw(instances())
    schedule = data.draw(schedules(instance))
    evaluator = Evaluator(instance)
    end_s = evaluator.run(schedule).forward_s
    assert evaluator.run(schedule, end_s * SLACK) == evaluator.run(schedule)
    assert evaluator.run(schedule, end_s / SLACK).forward_s == float("inf")


def test_a_cut_waits_for_what_comes_from_the_slice_before() -> None:
    one = chain([1, 2], [4, 2], blocks=4)
    instance = Instance(chains=(replace(one, cut_s=np.array([0.0, 0.1, 0.2, 0.4])),), devices=2)
    cut = Evaluator(instance).run(_one_chain((0, 0, 2), (1, 2, 4)))
    # Two blocks of 1 s, two of 0.5 s; forward and backward together wait for 0.2 s twice.
    assert cut.total_s == pytest.approx(3 * (2 + 1) + 2 * 0.2)
    whole = Evaluator(instance).run(_one_chain((1, 0, 4)))
    assert whole.total_s == pytest.approx(3 * 2)


def test_sums_of_gradients_keep_a_module_on_few_devices() -> None:
    """Two tasks with one module: on all devices its computes take least, and its sum most."""
    both = tuple(chain([1, 2], [8.0, 3.9]) for _ in range(2))

    def widest(sum_s: float) -> int:
        total = GradientSum(chains=(0, 1), seconds=lambda devices: sum_s * (devices - 1))
        instance = Instance(chains=both, devices=4, sums=(total,))
        found = find_schedules(instance, bound_s=0.0, budget=SearchBudget(0.1))
        segments = found["the best schedule of slices"].segments
        return max(both[m].counts[s.k] for m, own in enumerate(segments) for s in own)

    assert widest(0.0) == 2
    # A sum of 90 s on all devices, or of 30 s on half of them; computes of 11.7 s or of 24.
    assert widest(30.0) == 1


def test_a_cut_waits_in_the_mirror_as_well() -> None:
    one = chain([1, 2], [4, 2], blocks=4)
    uneven = replace(
        one, backward_s=one.forward_s * np.arange(1, 5), cut_s=np.array([0.0, 0.1, 0.2, 0.4])
    )
    instance = Instance(chains=(uneven,), devices=2)
    timed = Evaluator(instance).run(_one_chain((1, 0, 1), (0, 1, 3), (1, 3, 4)))
    assert timed.forward_s == pytest.approx(0.5 + 2 + 0.5 + 0.1 + 0.4)
    assert timed.backward_s == pytest.approx(0.5 + 2 + 3 + 2 + 0.1 + 0.4)


def random_graph(rng: np.random.Generator, chains: int, devices: int) -> Instance:
    """Amdahl's curves, on any count or on powers of two; every second chain after one or two."""
    made: list[Chain] = []
    for m in range(chains):
        counts = np.arange(1, devices + 1)
        if rng.random() < 0.5:
            counts = 2 ** np.arange(devices.bit_length())
        seconds = rng.lognormal(0.0, 1.0) * (rng.uniform(0.0, 0.05) + 1 / counts)
        after = rng.choice(m, size=min(m, int(rng.integers(1, 3))), replace=False) if m % 2 else ()
        made.append(
            chain(
                counts.tolist(),
                seconds.tolist(),
                blocks=int(rng.integers(8, 33)),
                after=sorted(int(i) for i in after),
            )
        )
    return Instance(chains=tuple(made), devices=devices)


@pytest.mark.slow
def test_graphs_of_many_metaops_end_near_their_bound() -> None:
    """A second each leaves about 1.03 in the median on a quiet machine; here it may be busy."""
    rng = np.random.default_rng(5)
    ratios: list[float] = []
    for size in ((10, 16), (20, 32), (20, 64), (30, 64)) * 2:
        instance = random_graph(rng, *size)
        bound = phase_bound(instance, [c.both_s for c in instance.chains], SearchBudget(5))
        found = find_schedules(
            instance,
            bound_s=bound.seconds,
            configurations=bound.configurations,
            budget=SearchBudget(1.0),
        )
        best_s = min(Evaluator(instance).run(schedule).total_s for schedule in found.values())
        ratios.append(best_s / bound.seconds)
    assert median(ratios) <= 1.06, sorted(ratios)
    assert max(ratios) <= 1.12, sorted(ratios)


def test_the_papers_value_is_no_bound() -> None:
    """Two MetaOps of 12 blocks, T = 1/n, 3 devices: Eq. 11 gives 9, a schedule takes 8."""
    two = Instance(
        chains=tuple(chain([1, 2, 3], [12, 6, 4], blocks=12) for _ in range(2)), devices=3
    )
    # Forward and backward: 1 + 2 times the forward.
    assert continuous_optimum(two, [0, 1]) == pytest.approx(3 * 9.0)
    assert phase_bound(two, _forward(two), SearchBudget(1)).seconds == pytest.approx(8.0, rel=1e-6)
    best = find_schedules(two, bound_s=24.0, budget=SearchBudget(0.2))
    assert min(Evaluator(two).run(d).forward_s for d in best.values()) == pytest.approx(8.0)


def test_as_many_metaops_as_devices() -> None:
    """Algorithm 2 as printed ends at the sum of the times; they run side by side."""
    four = Instance(chains=tuple(chain([1, 2, 4], [6, 4, 3]) for _ in range(4)), devices=4)
    assert continuous_optimum(four, range(4)) == pytest.approx(3 * 6.0)
    five = Instance(chains=tuple(chain([1], [6]) for _ in range(5)), devices=4)
    assert continuous_optimum(five, range(5)) == pytest.approx(3 * 30.0)
    assert phase_bound(four, _forward(four), SearchBudget(1)).seconds == pytest.approx(6.0)


def test_more_metaops_than_devices() -> None:
    five = Instance(chains=tuple(chain([1], [4], blocks=4) for _ in range(5)), devices=2)
    assert phase_bound(five, _forward(five), SearchBudget(1)).seconds == pytest.approx(
        10.0, rel=1e-6
    )
    found = find_schedules(five, bound_s=0.0, budget=SearchBudget(0.3))
    best = min(Evaluator(five).run(d).forward_s for d in found.values())
    # A chain stays in one piece in time but may change its device: 12 without any gap left.
    assert 10.0 <= best <= 12.0


def test_configurations_know_counts_that_do_not_fill_the_devices() -> None:
    """Counts 2 and 4 on 7 devices: 6 are used at best."""
    chains = tuple(chain([2, 4], [4, 2], blocks=8) for _ in range(3))
    seven = Instance(chains=chains, devices=7)
    curves = [curve(c.counts, c.forward_s) for c in seven.chains]
    assert level_bound(curves, 7) == pytest.approx(24 / 7)
    bound = configuration_bound(seven.chains, _forward(seven), 7, budget=SearchBudget(1))
    assert bound.seconds == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(
    ("after", "least_s"),
    [
        # The first alone, then half a second more than the longest path.
        (((), (0,), (0,), (0,)), 2.5),
        # Two paths side by side.
        (((), (0,), (), (2,)), 2.0),
        (((), (), (0, 1), (0, 1)), 2.0),
        (((), (0,), (1,), (0,)), 3.0),
    ],
)
def test_configurations_know_what_cannot_run_at_once(
    after: tuple[tuple[int, ...], ...], least_s: float
) -> None:
    """A second each on one of two devices."""
    chains = tuple(replace(chain([1], [1.0], blocks=4), after=own) for own in after)
    two = Instance(chains=chains, devices=2)
    bound = configuration_bound(two.chains, _forward(two), 2, budget=SearchBudget(1))
    assert bound.seconds == pytest.approx(least_s, rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(instances())
def test_configurations_fit_the_devices_and_run_every_chain(instance: Instance) -> None:
    bound = configuration_bound(
        instance.chains, _forward(instance), instance.devices, budget=SearchBudget(5)
    )
    done = np.zeros(len(instance.chains))
    for own in bound.configurations:
        assert sum(own.counts.values()) <= instance.devices
        for m, count in own.counts.items():
            one = instance.chains[m]
            done[m] += own.seconds / one.forward_s[one.counts.index(count)].sum()
    if all(len(scaling_classes(own.forward_s)) == 1 for own in instance.chains):
        # Where devices are left over they may run for longer.
        assert (done > 1 - 1e-3).all()
    assert (done > 0).all()
    assert sum(own.seconds for own in bound.configurations) >= bound.seconds * (1 - 1e-6)


@settings(max_examples=30, deadline=None)
@given(instances())
def test_schedules_from_configurations_are_valid(instance: Instance) -> None:
    """Also from configurations on other counts; there are none where a chain is in none."""
    fewer = [
        replace(c, counts=c.counts[::2], forward_s=c.forward_s[::2], backward_s=c.backward_s[::2])
        for c in instance.chains
    ]
    half = Instance(chains=tuple(fewer), devices=instance.devices)
    for bounded, planned in ((instance, instance), (instance, half), (half, instance)):
        found = phase_bound(bounded, _forward(bounded), SearchBudget(1)).configurations
        for schedule in islice(configuration_schedules(planned, found, random.Random(0)), 4):
            assert [own[-1].end for own in schedule.segments] == [c.blocks for c in planned.chains]
            starts = Evaluator(planned).run(schedule).starts
            assert not overloads(planned, schedule, starts)
    assert not [*configuration_schedules(instance, (), random.Random(0))]


def test_configurations_follow_each_other_in_the_order_of_the_chains() -> None:
    """The second chain shares the devices with the third, which comes after the first.

    The first takes 2 s on both devices, the others 4 s on one each.
    """
    tables = ([4, 2], [4, 3.9], [4, 3.9])
    one, two, three = (chain([1, 2], own, blocks=4) for own in tables)
    three_chains = Instance(chains=(one, two, replace(three, after=(0,))), devices=2)
    bound = phase_bound(three_chains, _forward(three_chains), SearchBudget(1))
    assert bound.seconds == pytest.approx(6.0, rel=1e-3)
    schedule = next(configuration_schedules(three_chains, bound.configurations, random.Random(0)))
    assert Evaluator(three_chains).run(schedule).forward_s == pytest.approx(6.0, rel=1e-3)


def test_devices_that_make_a_chain_slower_are_not_used() -> None:
    odd = chain([1, 2, 3, 4], [8, 9, 4, 6], blocks=2)
    assert Instance(chains=(odd,), devices=4).chains[0].counts == (1, 3)
    assert Instance(chains=(odd,), devices=2).chains[0].counts == (1,)


def test_curves_that_are_not_concave() -> None:
    """On 2 devices hardly faster, on 4 much: the envelope skips the 2."""
    own = chain([1, 2, 4], [8, 7.9, 2])
    found = curve(own.counts, own.forward_s)
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
        [curve(c.counts, c.forward_s) for c in made.chains],
        [c.after for c in made.chains],
        8,
    )[0]
    assert bound == pytest.approx(3.0, rel=1e-6)


def test_a_loss_that_does_not_get_faster_is_a_scaling_class_of_its_own() -> None:
    table = np.array([[4.0, 4.0, 1.0], [2.0, 2.0, 1.0]])
    found = scaling_classes(table)
    assert [time_s.tolist() for time_s in found] == [[8.0, 4.0], [1.0, 1.0]]
    assert curve([1, 2], table).time_s.tolist() == [5.0]


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
