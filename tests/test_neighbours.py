"""Plans of ``auto`` beside all plans there are of small workloads, in simulation."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.cost_model import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError, MMPlanError
from mmplan.planning import candidate_plans
from mmplan.planning.neighbours import best_first
from mmplan.planning.neighbours.changes import LayoutChanges
from mmplan.planning.neighbours.estimates import LayoutEstimates
from mmplan.planning.neighbours.layout import LayoutSpace, PlanLayout, UnitChoice
from mmplan.planning.neighbours.search import NeighbourSearch
from mmplan.planning.neighbours.trials import LayoutTrials
from mmplan.planning.order_search import shares_ranks
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import (
    FileReference,
    Plan,
    PlannedTraining,
    Prediction,
    SolverReport,
    Unit,
)
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.simulation.symmetry import predict
from mmplan.solvers.partitioner import allowed_tensor_degrees
from mmplan.solvers.problem import Candidate, Request
from mmplan.solvers.registry import BASELINES, SOLVERS
from mmplan.solvers.search_budget import SearchBudget
from tests.solving import module_profile, profile, run_solve, workload

# Larger spaces take minutes to enumerate.
MOST_LAYOUTS = 2_500
# Small jobs that the slow test enumerates.
INSTANCES = 500
NO_FILE = FileReference(path="", sha256="")
NO_REPORT = SolverReport(
    name="test", method="test", seconds=0, objective_s=0, formula_bound_s=0, formula_gap=0
)


def small_job(seed: int) -> tuple[Workload, Profile]:
    """A chain or towers of up to four modules on up to six devices, often short of memory."""
    rng = random.Random(seed)
    names = "abcd"[: rng.choice([1, 2, 2, 3, 4])]
    devices = rng.randint(1, 6) if len(names) < 3 else rng.randint(1, 4)
    modules = {
        name: module_profile(
            float(rng.randint(1, 8)),
            float(rng.randint(1, 16)),
            fixed_s=rng.choice([0.0, 0.5, 2.0]),
            blocks=rng.randint(1, 3),
            tp={1: 1.0, 2: rng.uniform(1.1, 2)} if devices > 1 else {1: 1.0},
            parameters=float(rng.randint(1, 40)),
            activation_bytes=float(rng.randint(0, 90)),
            output_bytes_per_sample=float(rng.randint(1, 5)),
            boundary_bytes_per_sample=float(rng.randint(1, 5)),
        )
        for name in names
    }
    specs: dict[str, dict[str, Any]] = {name: {} for name in names}
    losses: dict[str, Any] | None = None
    if len(names) == 1 or rng.random() < 0.5:
        specs |= {then: {"inputs": [name]} for name, then in itertools.pairwise(names)}
        losses = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": [names[-1], "y"]}}
    job = workload(
        specs, batch=rng.choice([2, 3, 4, 6]), losses=losses, train={"zero": rng.choice([0, 1])}
    )
    costs = profile(
        modules,
        devices,
        per_node=rng.choice([2, devices]),
        memory_bytes=float(rng.choice([400, 800, 1500, 1e9])),
        inter={"latency_s": 0.25, "bandwidth_bytes_per_s": 16.0},
        intra={"latency_s": 0.1, "bandwidth_bytes_per_s": 64.0},
    )
    return job, costs


class Enumeration:
    """All layouts of a job: groups of modules x tp, pp, dp and micro-batch of each."""

    def __init__(self, job: Workload, costs: Profile) -> None:
        self.cluster, self.training = costs.cluster, PlannedTraining(zero=job.train.zero)
        self.costs = CostModel(costs, self.cluster, self.training)
        self.request = Request(
            workload=job,
            tasks=resolve_tasks(job),
            costs=self.costs,
            cluster=self.cluster,
            devices=self.cluster.num_devices,
        )
        self.space = LayoutSpace(self.request)
        self.estimates = LayoutEstimates(self.space)
        self.tasks = candidate_plans.planned_tasks(self.request)

    def layouts(self) -> Iterator[PlanLayout]:
        indices = range(len(self.space.modules))
        choices = [list(self._choices(index)) for index in indices]
        for groups in partitions(list(indices)):
            for chosen in itertools.product(*choices):
                layout = PlanLayout(choices=chosen, groups=groups, zero=self.space.least_zero)
                if layout.devices <= self.request.devices:
                    yield layout

    def _choices(self, index: int) -> Iterator[UnitChoice]:
        _, problem, module = self.space.modules[index]
        devices, samples = self.request.devices, problem.round_samples
        kind = "batch-sync" if problem.task.sync_batches else "1f1b"
        for tp in allowed_tensor_degrees(problem, module):
            for pp in range(1, min(devices // tp, problem.blocks(module)) + 1):
                for dp in range(1, min(devices // (tp * pp), samples) + 1):
                    share = -(-samples // dp)
                    for size in {-(-share // count) for count in range(1, share + 1)}:
                        yield UnitChoice(tp=tp, pp=pp, vpp=1, dp=dp, size=size, kind=kind, lead=1)

    def shortest_s(self, layouts: Sequence[PlanLayout]) -> float | None:
        """The shortest step of those that fit the memory, with leads of 1 or none."""
        best_s: float | None = None
        for layout in sorted(layouts, key=self.estimates.busiest_s):
            if best_s is not None and self.estimates.busiest_s(layout) >= best_s:
                break
            for lead in (0, 1):
                led = tuple(replace(choice, lead=lead) for choice in layout.choices)
                step_s = self._step_s(replace(layout, choices=led))
                if step_s is not None and (best_s is None or step_s < best_s):
                    best_s = step_s
        return best_s

    def plan(self, layout: PlanLayout) -> Plan | None:
        """A layout's plan; None where tensor-parallel groups would cross nodes."""
        units = self.space.units_of(layout)
        if units is None:
            return None
        return Plan(
            name="test",
            workload=NO_FILE,
            profile=NO_FILE,
            cluster=self.cluster,
            devices=self.request.devices,
            training=self.training,
            tasks=self.tasks,
            solver=NO_REPORT,
            units=units,
            losses=candidate_plans.placed_losses(self.request, units),
            in_turn=layout.in_turn,
            predicted=Prediction(iteration_s=0, samples_per_s=0),
        )

    def _step_s(self, layout: PlanLayout) -> float | None:
        plan = self.plan(layout)
        if plan is None:
            return None
        try:
            predicted = predict(plan, self.costs)
        except InvalidInputError:
            return None
        fits = max(predicted.memory_bytes) <= self.cluster.device.memory_bytes
        return predicted.iteration_s if fits else None


def partitions(items: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put items into groups."""
    if not items:
        yield ()
        return
    for rest in partitions(items[1:]):
        yield tuple(sorted(((items[0],), *rest)))
        for group in rest:
            others = [other for other in rest if other != group]
            yield tuple(sorted(((items[0], *group), *others)))


def regret(folder: Path, seed: int) -> float | None:
    """What auto's step takes more than the shortest; None where nothing fits or too much is."""
    job, costs = small_job(seed)
    whole = Enumeration(job, costs)
    layouts = list(itertools.islice(whole.layouts(), MOST_LAYOUTS + 1))
    if len(layouts) > MOST_LAYOUTS:
        return None
    shortest_s = whole.shortest_s(layouts)
    if shortest_s is None:
        return None
    try:
        plan = run_solve(folder, job, costs)
    except InfeasibleError as error:
        raise AssertionError(f"job {seed}: {shortest_s} s is possible") from error
    return plan.predicted.iteration_s / shortest_s - 1


def search_with(
    whole: Enumeration,
    trial: Callable[[Candidate], tuple[Plan | None, float]],
    budget_s: float = 1000.0,
    critical_modules: Callable[[Plan], frozenset[tuple[str, str]]] = lambda plan: frozenset(),
    price_s: float = 0.0,
) -> NeighbourSearch:
    budget = SearchBudget(budget_s)

    def paid(candidate: Candidate) -> tuple[Plan | None, float]:
        budget.spend(price_s)
        return trial(candidate)

    trials = LayoutTrials(
        whole.request,
        trial=paid,
        critical_modules=critical_modules,
        trial_s=0.0,
        budget=budget,
    )
    return NeighbourSearch(trials, least_s=0.0)


def test_auto_plans_what_no_solver_does(tmp_path: Path) -> None:
    """Units of different degrees share all devices; of job 457 by two changes at once."""
    for seed in (320, 457):
        value = regret(tmp_path, seed)
        assert value is not None
        assert value < 0.01


def test_auto_is_as_good_as_all_small_plans(tmp_path: Path) -> None:
    """Of job 7 no solver has the best plan: the search finds it."""
    found = [regret(tmp_path, seed) for seed in (2, 7, 14, 44)]
    assert all(value is not None and value < 0.01 for value in found), found
    _, costs = small_job(7)
    plan = run_solve(tmp_path, *small_job(7))
    assert plan.solver.name == "neighbours"
    report = plan.solver.neighbours
    assert report is not None
    assert report.gain > 0.02
    assert report.evaluations >= 10
    assert max(plan.predicted.memory_bytes) <= costs.cluster.device.memory_bytes
    assert not plan_faults(plan)
    assert not check_program(compile_plan(plan))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_auto_is_near_the_shortest_of_all_small_plans(tmp_path: Path) -> None:
    """Nor does it find none where one fits."""
    regrets = (regret(tmp_path, seed) for seed in itertools.count())
    found = list(itertools.islice((x for x in regrets if x is not None), INSTANCES))
    assert median(found) <= 0.01
    assert max(found) <= 0.05


def test_no_plan_holds_less_than_its_layout_says() -> None:
    """The search leaves out what cannot fit without making a plan of it."""
    seen = 0
    for seed in range(12):
        job, costs = small_job(seed)
        job = job.model_copy(update={"train": job.train.model_copy(update={"zero": 3})})
        whole = Enumeration(job, costs)
        layouts = list(itertools.islice(whole.layouts(), MOST_LAYOUTS))
        draw = random.Random(seed)
        for layout in draw.sample(layouts, min(len(layouts), 12)):
            led = (replace(choice, lead=draw.randrange(4)) for choice in layout.choices)
            layout = replace(layout, choices=tuple(led))
            plan = whole.plan(layout)
            if plan is not None:
                with suppress(InvalidInputError):
                    held = max(predict(plan, whole.costs).memory_bytes)
                    assert whole.estimates.least_bytes(layout) <= held * (1 + 1e-9), (seed, layout)
                    seen += 1
    assert seen > 60


def test_estimates_know_what_goes_between_nodes() -> None:
    """Messages and sums that take longer than all computes."""
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}
    chain = {"a": {}, "b": {"inputs": ["a"]}}
    for parameters, output_bytes, degrees in (
        (0.0, 40.0, ((2, 1), (2, 1))),  # from the ranks of one node to those of the other
        (20.0, 0.0, ((4, 2), (4, 2))),  # both on both nodes
    ):
        own = module_profile(parameters=parameters, output_bytes_per_sample=output_bytes)
        loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
        job = workload(chain, batch=8, losses=loss)
        whole = Enumeration(job, profile({"a": own, "b": own}, 4, per_node=2, inter=slow))
        choices = tuple(
            UnitChoice(tp=1, pp=1, vpp=1, dp=dp, size=size, kind="1f1b", lead=1)
            for dp, size in degrees
        )
        groups = ((0,), (1,)) if sum(dp for dp, _ in degrees) <= 4 else ((0, 1),)
        layout = PlanLayout(choices=choices, groups=groups, zero=(0, 0))
        plan = whole.plan(layout)
        assert plan is not None
        step_s = predict(plan, whole.costs).iteration_s
        busy_s = whole.estimates.busiest_s(layout)
        assert step_s > 3 * busy_s
        assert 0.5 * step_s < whole.estimates.estimate_s(layout) < 1.2 * step_s


def test_the_order_of_tasks_in_turn_is_one_of_the_changes() -> None:
    """A sum of gradients goes beside the computes of the tasks after it."""
    losses = {
        f"loss_{name}": {"factory": "mmplan.zoo.losses:mse", "inputs": [name, "y"]} for name in "ab"
    }
    tasks = {name: {"modules": [name], "losses": [f"loss_{name}"], "batch": 8} for name in "ab"}
    job = workload({"a": {}, "b": {}}, batch=8, losses=losses, tasks=tasks)
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 4.0}
    costs = profile({"a": module_profile(parameters=40.0), "b": module_profile()}, 2, intra=slow)
    whole = Enumeration(job, costs)
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=2, size=1, kind="1f1b", lead=0)
    layout = PlanLayout(choices=(choice,) * 2, groups=((0, 1),), zero=(0, 0), in_turn=("b", "a"))
    changes = LayoutChanges(whole.space, whole.estimates)
    other = replace(layout, in_turn=("a", "b"))
    assert ("in_turn", other.in_turn) in [how for how, own in changes.tuned(layout) if own == other]
    steps: list[float] = []
    for own in (other, layout):
        plan = whole.plan(own)
        assert plan is not None
        steps.append(predict(plan, whole.costs).iteration_s)
    assert steps[0] < 0.9 * steps[1]
    assert whole.estimates.estimate_s(other) < whole.estimates.estimate_s(layout)


def test_batch_syncs_of_one_unit_may_lead() -> None:
    """Of several rounds: the other unit may have no room for another one's activations."""
    job = workload({"a": {}, "b": {}}, batch=8, sync_batch=4)
    whole = Enumeration(job, profile({"a": module_profile(), "b": module_profile()}, 2))
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=2, size=2, kind="batch-sync", lead=1)
    layout = PlanLayout(choices=(choice,) * 2, groups=((0, 1),), zero=(0, 0))
    changes = LayoutChanges(whole.space, whole.estimates)
    ahead = {
        tuple(choice.sync_lead for choice in other.choices)
        for (what, _), other in changes.tuned(layout)
        if what.startswith("sync_lead")
    }
    assert ahead == {(0, 0), (1, 1), (2, 2), (1, 0), (0, 1)}
    units = whole.space.units_of(replace(layout, choices=(replace(choice, sync_lead=1), choice)))
    assert units is not None
    assert [unit.schedule.sync_lead for unit in units] == [1, 0]


def test_a_unit_may_reach_over_the_devices_of_others() -> None:
    """Which leave these alone otherwise."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["c", "y"]}}
    job = workload({"a": {}, "b": {"inputs": ["a"]}, "c": {"inputs": ["b"]}}, batch=12, losses=loss)
    whole = Enumeration(job, profile({name: module_profile() for name in "abc"}, 6))
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=4, size=1, kind="1f1b", lead=1)
    layout = PlanLayout(
        choices=(choice, choice, replace(choice, dp=2)), groups=((0, 1), (2,)), zero=(0, 0, 0)
    )
    others = LayoutChanges(whole.space, whole.estimates).neighbours(layout)
    found = {
        tuple((own.offset, own.devices) for own in other.choices)
        for other in others
        if other is not None and other.groups == ((0, 1, 2),)
    }
    assert {((0, 6), (0, 4), (4, 2)), ((0, 4), (0, 6), (4, 2))} <= found


def test_uniform_layouts_have_one_or_two_groups() -> None:
    """Each with one tp and pp; units that share parameters are together."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
    tasks = {name: {"modules": ["a", "b"], "losses": ["loss"], "batch": 8} for name in "pq"}
    job = workload({"a": {}, "b": {"inputs": ["a"]}}, batch=8, losses=loss, tasks=tasks)
    own = module_profile(tp={1: 1.0, 2: 1.2}, blocks=4)
    whole = Enumeration(job, profile({"a": own, "b": own}, 8))
    layouts = list(LayoutChanges(whole.space, whole.estimates).uniform(SearchBudget(1000.0)))
    assert len(set(layouts)) == len(layouts)
    together = {(0, 1, 2, 3)}, {(0, 2), (1, 3)}
    assert {layout.groups for layout in layouts} == {tuple(sorted(own)) for own in together}
    assert {layout.in_turn for layout in layouts} == {(), ("p", "q")}
    assert {layout.group_devices((0, 2)) for layout in layouts if len(layout.groups) > 1} > {
        2,
        4,
        6,
    }
    for layout in layouts:
        assert layout.devices <= 8
        for group in layout.groups:
            assert len({(layout.choices[i].tp, layout.choices[i].pp) for i in group}) == 1


def test_uniform_layouts_of_many_modules_end_with_their_budget() -> None:
    """There are 2 to the power of 39 ways to make two groups."""
    names = [f"m{number}" for number in range(40)]
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": [names[-1], "y"]}}
    inputs = {then: {"inputs": [name]} for name, then in itertools.pairwise(names)}
    job = workload({names[0]: {}, **inputs}, batch=8, losses=loss)
    # No degree is common to all: most groups have no choice at all.
    own = [module_profile(tp={1 + number % 2: 1.0}) for number in range(len(names))]
    whole = Enumeration(job, profile(dict(zip(names, own, strict=True)), 8))
    budget = SearchBudget(0.05)
    assert not list(LayoutChanges(whole.space, whole.estimates).uniform(budget))
    assert budget.is_over


def test_units_may_leave_devices_over_where_fewer_replicas_take_as_long() -> None:
    """From ZeRO-2 on replicas that are alike need less memory."""
    whole = Enumeration(
        workload({"a": {}, "b": {}}, batch=12, train={"zero": 2}),
        profile({"a": module_profile(), "b": module_profile()}, 8),
    )
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=4, size=1, kind="batch-sync", lead=0)
    layout = PlanLayout(choices=(choice,) * 2, groups=((0, 1),), zero=(2, 2))
    others = LayoutChanges(whole.space, whole.estimates).neighbours(layout)
    together = {
        tuple(own.dp for own in other.choices)
        for other in others
        if other is not None and other.groups == ((0, 1),)
    }
    assert {(8, 8), (6, 6)} <= together


def test_two_changes_may_need_too_many_devices() -> None:
    """Each of two units takes the one that is left."""
    whole = Enumeration(
        workload({"a": {}, "b": {}}, batch=4),
        profile({"a": module_profile(), "b": module_profile()}, 3),
    )
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=1, size=1, kind="batch-sync", lead=1)
    layout = PlanLayout(choices=(choice,) * 2, groups=((0,), (1,)), zero=(0, 0))
    pairs = set(LayoutChanges(whole.space, whole.estimates).pairs(layout))
    assert None in pairs
    assert all(other.devices <= 3 for other in pairs if other)


def test_what_has_too_few_devices_is_paid_for_where_units_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two changes most need more devices than there are."""
    names = [f"m{number}" for number in range(24)]
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": [names[-1], "y"]}}
    inputs = {then: {"inputs": [name]} for name, then in itertools.pairwise(names)}
    job = workload({names[0]: {}, **inputs}, batch=8, losses=loss)
    whole = Enumeration(job, profile(dict.fromkeys(names, module_profile()), len(names) + 1))
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=1, size=1, kind="1f1b", lead=1)
    alone = tuple((index,) for index in range(len(names)))
    layout = PlanLayout(choices=(choice,) * len(names), groups=alone, zero=(0,) * len(names))
    made = 0

    def only_in_vain(self: LayoutChanges, own: PlanLayout) -> Iterator[PlanLayout | None]:
        nonlocal made
        while made < 100_000:
            made += 1
            yield None

    def trial(candidate: Candidate) -> tuple[Plan | None, float]:
        return None, math.inf

    monkeypatch.setattr(LayoutChanges, "neighbours", lambda self, own: iter(()))
    monkeypatch.setattr(LayoutChanges, "pairs", only_in_vain)
    start = whole.plan(layout)
    assert start is not None
    predicted = Prediction(iteration_s=1e6, samples_per_s=1)
    search_with(whole, trial, 0.2).run([start.model_copy(update={"predicted": predicted})])
    assert 0 < made <= 0.2 / LayoutChanges(whole.space, whole.estimates).made_s


def test_a_search_goes_on_from_a_uniform_layout_that_is_better(tmp_path: Path) -> None:
    """Though no change leads to it."""
    job, costs = small_job(7)
    whole = Enumeration(job, costs)
    start = run_solve(tmp_path, job, costs, budget_s=0.0)
    better = next(
        units
        for layout in LayoutChanges(whole.space, whole.estimates).uniform(SearchBudget(1000.0))
        if (units := whole.space.units_of(layout)) not in (None, start.units)
    )
    shorter = start.model_copy(update={"predicted": Prediction(iteration_s=1e-6, samples_per_s=1)})
    found: list[Candidate] = []

    def trial(candidate: Candidate) -> tuple[Plan | None, float]:
        found.append(candidate)
        plan = shorter if candidate.units == better else start
        return plan.model_copy(update={"units": candidate.units}), 0.0

    best = search_with(whole, trial).run([start])[0]
    assert best.plan.predicted.iteration_s == 1e-6
    assert best.candidate is not None
    assert best.candidate.units == better


def test_both_searches_have_some_best_plans(tmp_path: Path) -> None:
    """A refined step may be the least of one whose own step is not: of other degrees or order."""
    job, costs = small_job(7)
    whole = Enumeration(job, costs)
    start = run_solve(tmp_path, job, costs, budget_s=0.0)
    steps = itertools.count(1000, -1)

    def trial(candidate: Candidate) -> tuple[Plan | None, float]:
        predicted = Prediction(iteration_s=float(next(steps)), samples_per_s=1.0)
        changes = {"units": candidate.units, "order": candidate.order, "predicted": predicted}
        return start.model_copy(update=changes), 0.0

    slow = Prediction(iteration_s=1e4, samples_per_s=1.0)
    found = search_with(whole, trial).run([start.model_copy(update={"predicted": slow})])
    found_s = [best.plan.predicted.iteration_s for best in found]
    assert found_s == sorted(set(found_s))
    assert all(best.start.predicted is slow and best.candidate for best in found)
    kinds = {
        str([best.plan.order, *((u.tp, u.pp, u.vpp, u.ranks) for u in best.plan.units)])
        for best in found
    }
    # Two of each search at least; both may have tried the same.
    assert 4 <= len(found) <= 2 * len(kinds)


def test_a_search_that_gains_late_goes_on(tmp_path: Path) -> None:
    """With the same budget, in which no trial costs more than another."""
    job, costs = small_job(7)
    whole = Enumeration(job, costs)
    start = run_solve(tmp_path, job, costs, budget_s=0.0)

    def evaluations(gains_until: int) -> int:
        number = itertools.count()

        def trial(candidate: Candidate) -> tuple[Plan | None, float]:
            step_s = 1e3 * 0.99 ** min(next(number), gains_until)
            predicted = Prediction(iteration_s=step_s, samples_per_s=1.0)
            return start.model_copy(update={"units": candidate.units, "predicted": predicted}), 0.0

        search = search_with(whole, trial, budget_s=40.0, price_s=1.0)
        search.run([start.model_copy(update={"predicted": slow})])
        return search.evaluations

    slow = Prediction(iteration_s=2e3, samples_per_s=1.0)
    early, late, later = map(evaluations, (10, 40, 60))
    assert early <= 40 < late < later <= 2 * 60, (early, late, later)


def test_what_changes_nothing_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no third time, whatever the layout."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
    job = workload({"a": {}, "b": {"inputs": ["a"]}}, batch=6, losses=loss)
    whole = Enumeration(job, profile({"a": module_profile(), "b": module_profile()}, 2))
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=1, size=1, kind="1f1b", lead=1)
    layout = PlanLayout(choices=(choice,) * 2, groups=((0,), (1,)), zero=(0, 0))
    start = whole.plan(layout)
    assert start is not None
    start = start.model_copy(update={"predicted": Prediction(iteration_s=1e9, samples_per_s=1.0)})
    tried: list[Candidate] = []

    def trial(candidate: Candidate) -> tuple[Plan, float]:
        tried.append(candidate)
        return start, 0.0

    def tuned(_: LayoutChanges, layout: PlanLayout) -> Iterator[tuple[object, PlanLayout]]:
        for what, lead in (("one", 2), ("other", 3), ("one", 4), ("one", 5), ("other", 6)):
            yield what, layout.with_choices({0: replace(layout.choices[0], lead=lead)})

    for changes in ("neighbours", "pairs", "uniform", "small"):
        monkeypatch.setattr(LayoutChanges, changes, lambda *_: iter(()))
    monkeypatch.setattr(LayoutChanges, "tuned", tuned)
    search_with(whole, trial).run([start])
    assert [candidate.units[0].schedule.lead for candidate in tried] == [2, 3, 4, 6]


def test_units_with_the_same_parameters_change_together() -> None:
    """One by one they would hold and sum these in several ways."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["a", "y"]}}
    tasks = {name: {"modules": ["a"], "losses": ["loss"], "batch": 8} for name in "pqr"}
    job = workload({"a": {}}, batch=8, losses=loss, tasks=tasks)
    own = module_profile(tp={1: 1.0, 2: 1.2}, blocks=2)
    whole = Enumeration(job, profile({"a": own}, 4))
    narrow = UnitChoice(tp=1, pp=1, vpp=1, dp=1, size=4, kind="1f1b", lead=0)
    wide = replace(narrow, tp=2)
    layouts = [
        PlanLayout(choices=own, groups=((0, 1, 2),), zero=(0, 0, 0), in_turn=("p", "q", "r"))
        for own in ((narrow,) * 3, (wide, narrow, narrow), (wide,) * 3)
    ]
    changes = LayoutChanges(whole.space, whole.estimates)
    assert layouts[2] not in changes.neighbours(layouts[0])
    assert layouts[2] in changes.pairs(layouts[0])
    plans = [whole.plan(layout) for layout in layouts]
    one, mixed, other = (predict(plan, whole.costs).iteration_s for plan in plans if plan)
    assert other < mixed < one


def test_a_unit_whose_samples_are_cut_otherwise_runs_one_more_ahead() -> None:
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
    job = workload({"a": {}, "b": {"inputs": ["a"]}}, batch=12, losses=loss)
    whole = Enumeration(job, profile({"a": module_profile(), "b": module_profile()}, 4))
    for size, lead in ((2, 1), (3, 2), (4, 1)):  # beside four samples at once
        choices = tuple(
            UnitChoice(tp=1, pp=1, vpp=1, dp=dp, size=own, kind="1f1b", lead=0)
            for dp, own in ((1, size), (2, 2))
        )
        layout = PlanLayout(choices=choices, groups=((0,), (1,)), zero=(0, 0))
        changes = LayoutChanges(whole.space, whole.estimates)
        assert [c.lead for c in changes.with_usual_leads(layout).choices] == [lead, 1]


def test_what_trials_held_is_learnt() -> None:
    """Of layouts with the same degrees the memory refuses few before the others are left out."""
    job, costs = small_job(7)
    whole = Enumeration(job, costs)
    memory = costs.cluster.device.memory_bytes
    found: list[Candidate] = []

    def too_large(candidate: Candidate) -> tuple[None, float]:
        found.append(candidate)
        return None, 10 * memory

    search = search_with(whole, too_large)
    layouts = [
        layout
        for layout in itertools.islice(whole.layouts(), MOST_LAYOUTS)
        if whole.space.units_of(layout) is not None
    ]
    start = next(plan for layout in layouts if (plan := whole.plan(layout)) is not None)
    shown = start.model_copy(update={"predicted": Prediction(iteration_s=1e9, samples_per_s=0)})
    search.run([shown])
    shapes = [(c.zero, *((u.module, u.ranks, u.vpp) for u in c.units)) for c in found]
    assert len(shapes) > 3
    assert len(set(shapes)) == len(shapes)
    # One more stage of ZeRO is a change like others; further ones are tried if they save enough.
    assert {c.zero for c in found} <= {shown.training.zero, shown.training.zero + 1}


def test_modules_that_hold_nothing_are_planned(tmp_path: Path) -> None:
    """Only their messages take memory."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
    job = workload({"a": {}, "b": {"inputs": ["a"]}}, batch=6, losses=loss)
    link = {"latency_s": 0.1, "bandwidth_bytes_per_s": 64.0}
    own = module_profile(output_bytes_per_sample=8.0)
    costs = profile({"a": own, "b": own}, 3, intra=link)
    plan = run_solve(tmp_path, job, costs)
    assert plan.solver.neighbours is not None
    assert plan.solver.neighbours.evaluations > 0


def test_a_search_without_budget_changes_nothing(tmp_path: Path) -> None:
    plan = run_solve(tmp_path, *small_job(7), budget_s=0.0)
    assert plan.solver.name != "neighbours"
    report = plan.solver.neighbours
    assert report is not None
    assert (report.evaluations, report.gain) == (0, 0.0)


def test_starts_that_lie_next_to_each_other_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is estimated of starts: two that a third one has met may not be compared."""
    job, costs = small_job(7)
    whole = Enumeration(job, costs)
    space = whole.space
    first = run_solve(tmp_path, job, costs, budget_s=0.0)
    own = space.layout_of(first)
    assert own is not None
    near = [
        other
        for other in LayoutChanges(space, whole.estimates).neighbours(own)
        if other is not None and space.units_of(other)
    ][:2]
    starts = [first.model_copy(update={"units": space.units_of(x)}) for x in (own, *near)]
    for start in starts:  # no layout as they stand, as of plans with waves
        named = tuple(unit.model_copy(update={"name": "other"}) for unit in start.units)
        object.__setattr__(start, "units", named)
    met = {own: near}
    monkeypatch.setattr(LayoutChanges, "neighbours", lambda _, layout: met.get(layout, []))
    monkeypatch.setattr(LayoutChanges, "tuned", lambda *_: [])
    monkeypatch.setattr(LayoutChanges, "pairs", lambda *_: [])
    assert tried(job, costs, starts, budget_s=1.0)


def test_leads_come_first_where_a_step_takes_longer_than_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No estimate sees how many micro-batches are in flight."""
    costs = profile({n: module_profile(1.0, 2.0, fixed_s=1.0, blocks=4) for n in "ab"}, 4)
    loss = {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}
    job = workload({"a": {}, "b": {"inputs": ["a"]}}, batch=16, losses={"loss": loss})
    start = run_solve(tmp_path, job, costs, budget_s=0.0, solver="ratio")
    predicted = start.predicted.model_copy(update={"iteration_s": 3 * start.predicted.iteration_s})
    slow = start.model_copy(update={"predicted": predicted})

    def shape(units: Sequence[Unit]) -> list[object]:
        return [(unit.ranks, unit.blocks, unit.microbatches) for unit in units]

    def place() -> int:
        """That of the first trial with the degrees and sizes of the start."""
        every = tried(job, costs, [slow], budget_s=1.0)
        return [shape(candidate.units) for candidate in every].index(shape(slow.units))

    early = place()
    monkeypatch.setattr("mmplan.planning.neighbours.best_first._UNSEEN_SHARE", 0.0)
    assert early < place()


def test_shared_devices_are_tried_in_an_order_that_knows_the_times(tmp_path: Path) -> None:
    job, costs = small_job(7)
    start = run_solve(tmp_path, job, costs, budget_s=0.0)
    every = tried(job, costs, [start], budget_s=1000.0)
    shared = [
        item for item in every if shares_ranks(start.model_copy(update={"units": item.units}))
    ]
    assert len(every) > len(shared) > 0
    assert all(item.order is None for item in every if item not in shared)
    # In the usual order too, which comes without times.
    assert {item.is_timed for item in shared} == {True, False}
    assert None in [item.order for item in shared]
    assert not any(item.is_timed and item.order is None for item in shared)


def test_a_plan_in_the_usual_order_is_as_good_where_it_takes_as_long(tmp_path: Path) -> None:
    """Towers with one micro-batch each: no order of theirs is shorter than another."""
    costs = profile({n: module_profile(2.0, 4.0, tp={1: 1.0, 2: 1.1}) for n in "ab"}, 2)
    plan = run_solve(tmp_path, workload({"a": {}, "b": {}}, batch=2), costs)
    assert plan.order is None
    assert plan.predicted.iteration_s == pytest.approx(plan.solver.lower_bound_s)


def test_estimates_know_what_hides_sums_of_gradients() -> None:
    """Of one unit its last backward, and for the first of a chain's no other."""
    chain = {"a": {}, "b": {"inputs": ["a"]}}
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}}
    job = workload(chain, batch=8, losses=loss)
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    for large in "ab":
        own = {n: module_profile(1.0, 2.0, parameters=6e9 * (n == large)) for n in "ab"}
        whole = Enumeration(job, profile(own, 4, per_node=2, inter=slow, memory_bytes=1e12))
        choice = UnitChoice(tp=1, pp=1, vpp=1, dp=4, size=2, kind="1f1b", lead=1)
        layout = PlanLayout(choices=(choice, choice), groups=((0, 1),), zero=(0, 0))
        plan, whole.estimates.hides_sums = whole.plan(layout), True
        assert plan is not None
        step_s, busy_s = predict(plan, whole.costs).iteration_s, whole.estimates.busiest_s(layout)
        assert step_s > 1.2 * busy_s
        assert whole.estimates.estimate_s(layout) == pytest.approx(step_s, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=4))
@settings(max_examples=50, deadline=None)
def test_estimates_of_tasks_side_by_side_are_those_of_their_best_order(
    tasks: list[tuple[int, int]],
) -> None:
    """A task's sum goes on beside the tasks after it."""
    names = "abcd"[: len(tasks)]
    losses = {f"l{n}": {"factory": "mmplan.zoo.losses:mse", "inputs": [n, "y"]} for n in names}
    own: dict[str, Any] = {f"T{n}": {"modules": [n], "losses": [f"l{n}"]} for n in names}
    job = workload({n: {} for n in names}, batch=2, losses=losses, tasks=own)
    # Two devices of one node: no sum is between nodes.
    fast = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    costs = profile(
        {
            n: module_profile(forward, 0.0, parameters=sum_s * 1e9 / 4)
            for n, (forward, sum_s) in zip(names, tasks, strict=True)
        },
        2,
        intra=fast,
        memory_bytes=1e12,
    )
    whole = Enumeration(job, costs)
    choice = UnitChoice(tp=1, pp=1, vpp=1, dp=2, size=1, kind="1f1b", lead=1)
    whole.estimates.hides_sums = True
    everything = tuple(range(len(names)))
    layout = PlanLayout(
        choices=(choice,) * len(names), groups=(everything,), zero=(0,) * len(names)
    )
    # Of one task alone the estimate is its computes and its sum.
    alone = [
        one.estimates.estimate_s(PlanLayout(choices=(choice,), groups=((0,),), zero=(0,)))
        for one in (
            Enumeration(workload({n: {}}, batch=2, losses={f"l{n}": losses[f"l{n}"]}), costs)
            for n in names
        )
    ]
    sums = [both - forward for both, (forward, _) in zip(alone, tasks, strict=True)]
    expected = min(
        max(
            sum(tasks[i][0] for i in order[: place + 1]) + sums[order[place]]
            for place in range(len(order))
        )
        for order in itertools.permutations(everything)
    )
    assert whole.estimates.estimate_s(layout) == pytest.approx(expected)


def test_estimates_know_which_devices_a_turn_leaves_free() -> None:
    """Two tasks side by side on halves of the devices, then one on all of them."""
    losses = {f"l{n}": {"factory": "mmplan.zoo.losses:mse", "inputs": [n, "y"]} for n in "abc"}
    tasks: dict[str, Any] = {f"T{n}": {"modules": [n], "losses": [f"l{n}"]} for n in "abc"}
    job = workload({n: {} for n in "abc"}, batch=4, losses=losses, tasks=tasks)
    costs = profile({n: module_profile(1.0, 2.0, parameters=0.0) for n in "abc"}, 4)
    whole = Enumeration(job, costs)

    def choice(dp: int, offset: int) -> UnitChoice:
        return UnitChoice(tp=1, pp=1, vpp=1, dp=dp, size=1, kind="1f1b", lead=1, offset=offset)

    layout = PlanLayout(
        choices=(choice(2, 0), choice(2, 2), choice(4, 0)),
        groups=((0, 1, 2),),
        zero=(0, 0, 0),
        in_turn=("Ta", "Tb", "Tc"),
    )
    # Two samples of a or b, then one of c.
    assert whole.estimates.estimate_s(layout) == pytest.approx(9.0)
    first = replace(layout, in_turn=("Ta", "Tc", "Tb"))
    assert whole.estimates.estimate_s(first) == pytest.approx(15.0)


def test_changes_of_what_nothing_waits_for_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayoutChanges, "uniform", lambda *_: iter(()))
    monkeypatch.setattr(best_first, "_LATER_EACH", 0.0)
    costs = profile({n: module_profile(1.0, 2.0, fixed_s=1.0, blocks=4) for n in "ab"}, 4)
    job = workload({"a": {}, "b": {}}, batch=16)
    whole = Enumeration(job, costs)
    start = run_solve(tmp_path, job, costs, budget_s=0.0, solver="distmm")

    slow = Prediction(iteration_s=1000.0, samples_per_s=1.0)

    def shapes(units: Sequence[Unit]) -> list[object]:
        return [(unit.ranks, unit.blocks, unit.microbatches) for unit in units]

    def changed(critical: frozenset[tuple[str, str]]) -> list[int]:
        """Of the first trials, how many change either unit alone."""
        found: list[list[object]] = []

        def trial(candidate: Candidate) -> tuple[Plan | None, float]:
            found.append(shapes(candidate.units))
            slower = Prediction(iteration_s=1001.0, samples_per_s=1.0)
            is_same = found[-1] == shapes(start.units)
            changes = {"units": candidate.units, "predicted": slow if is_same else slower}
            return start.model_copy(update=changes), 0.0

        starts = [start.model_copy(update={"predicted": slow})]
        search_with(whole, trial, critical_modules=lambda plan: critical).run(starts)
        first = shapes(start.units)
        pairs = [(own[0] != first[0], own[1] != first[1]) for own in found[:100]]
        return [pairs.count((True, False)), pairs.count((False, True))]

    (a_any, b_any) = changed(frozenset())
    for place, unit in enumerate(start.units):
        own = changed(frozenset({(unit.task, unit.module)}))
        assert own[place] >= (a_any, b_any)[place]
        assert own[1 - place] < (a_any, b_any)[1 - place]


def test_other_degrees_are_tried_where_nothing_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the best, which no trial reaches, those of many sizes and leads would come first."""
    costs = profile({n: module_profile(1.0, 2.0, fixed_s=0.1, blocks=4) for n in "ab"}, 8)
    job = workload({"a": {}, "b": {}}, batch=64)
    whole = Enumeration(job, costs)
    start = run_solve(tmp_path, job, costs, budget_s=0.0, solver="distmm")
    slow = Prediction(iteration_s=1e4, samples_per_s=1.0)

    def degrees(later: float) -> int:
        monkeypatch.setattr(best_first, "_LATER_EACH", later)
        found: list[object] = []

        def trial(candidate: Candidate) -> tuple[Plan | None, float]:
            found.append([(unit.ranks, unit.blocks) for unit in candidate.units])
            return start.model_copy(update={"units": candidate.units, "predicted": slow}), 0.0

        search_with(whole, trial).run([start.model_copy(update={"predicted": slow})])
        return len({str(own) for own in found[:80]})

    assert degrees(0.003) > 1.1 * degrees(0.0)


def tried(
    job: Workload, costs: Profile, starts: Sequence[Plan], *, budget_s: float
) -> list[Candidate]:
    """What a search tries where nothing fits."""
    found: list[Candidate] = []

    def trial(candidate: Candidate) -> tuple[None, float]:
        found.append(candidate)
        return None, math.inf

    search_with(Enumeration(job, costs), trial, budget_s).run(starts)
    return found


def plans(folder: Path, solver: str) -> list[str]:
    """A solver's plan for each of some jobs, or why there is none."""
    found: list[str] = []
    for seed in range(4, 10):
        try:
            plan = run_solve(folder, *small_job(seed), solver=solver)
        except MMPlanError as error:
            found.append(error.message)
            continue
        report = plan.solver.model_copy(update={"seconds": 0.0})
        found.append(plan.model_copy(update={"solver": report}).model_dump_json())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("solver", ["auto", *SOLVERS, *BASELINES])
def test_a_busy_machine_finds_the_same_plan(tmp_path: Path, solver: str) -> None:
    quiet = plans(tmp_path, solver)
    assert any(text.startswith("{") for text in quiet)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        assert plans(tmp_path, solver) == quiet
    finally:
        for process in busy:
            process.kill()
            process.wait()


def plan_of_uneven_sums(folder: Path) -> str:
    """A plan with bytes that no binary fraction is: their sum depends on its order."""
    sizes = {"a": 1e9 / 7, "b": 1e8 / 3, "c": 1e7 / 11}
    modules = {name: module_profile(blocks=8, parameters=size) for name, size in sizes.items()}
    costs = profile(modules, 3)
    job = workload({name: {} for name in sizes}, batch=6, train={"zero": 1})
    plan = run_solve(folder, job, costs, solver="colocated")
    report = plan.solver.model_copy(update={"seconds": 0.0})
    return plan.model_copy(update={"solver": report}).model_dump_json()


def test_a_plan_does_not_depend_on_hashes(tmp_path: Path) -> None:
    """Each process hashes text in its own way."""
    command = "import pathlib, sys; from tests.test_neighbours import plan_of_uneven_sums"
    command += "; print(plan_of_uneven_sums(pathlib.Path(sys.argv[1])))"
    found = {
        subprocess.run(
            [sys.executable, "-c", command, str(tmp_path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
    assert b'"units":' in found.pop()
