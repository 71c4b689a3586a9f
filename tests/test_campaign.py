"""Thousands of mutants: those that train something else are refused, and next to nothing else.

The judge is one process's training, computed from the workload (:mod:`tests.judge`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.campaign import PER_KIND, PER_VARIANT, Results, judged_same, run_campaign
from tests.campaign_plans import Subject, all_subjects
from tests.matrix_cases import Case
from tests.mixed_tp_cases import random_case
from tests.mutants import check_faults, check_plan
from tests.pairwise import pairwise_rows
from tests.programs import LossSpec, UnitSpec, make_plan, trained_as
from tests.test_matrix import FACTORS, planned_units
from tests.verification import make_workload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return all_subjects(tmp_path_factory.mktemp("solved"))


@pytest.fixture(scope="module")
def results(subjects: list[Subject], _one_thread: None) -> Results:
    found = run_campaign(subjects, per_kind=PER_KIND, per_variant=PER_VARIANT)
    sys.stdout.write(f"\n{found.table()}\n{len(found.cases)} mutants in {found.seconds:.0f} s\n")
    return found


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _shown(results: Results, *outcomes: str) -> str:
    found = results.of(*outcomes)
    return "\n".join([f"{len(found)} of {len(results.cases)}", *map(str, found)])


@pytest.mark.usefixtures("_one_thread")
def test_the_plans_themselves_train_what_one_process_trains(subjects: list[Subject]) -> None:
    assert len(subjects) >= 100
    assert len({subject.kind for subject in subjects}) >= 20
    for subject in subjects:
        assert check_faults(subject.program, subject.workload) == [], subject.name
        assert check_plan(subject.plan, subject.workload) == [], subject.name
    _, others = judged_same(subjects)
    assert not others, [(subject.name, reason) for subject, reason in others]


def test_the_campaign_is_as_large_as_it_says(results: Results) -> None:
    mutants = [case for case in results.cases if case.kind.level != "variants"]
    assert len(mutants) >= 3000
    assert len({case.subject.name for case in mutants}) >= 100
    assert len({case.subject.kind for case in mutants}) >= 20


def test_every_mutant_that_trains_something_else_is_refused(results: Results) -> None:
    assert not results.of("missed"), _shown(results, "missed")


def test_every_mutant_that_does_not_come_to_its_end_is_refused(results: Results) -> None:
    assert not results.of("missed, stops"), _shown(results, "missed, stops")


def test_the_check_says_what_is_wrong_and_raises_nothing(results: Results) -> None:
    assert not results.of("crashed"), _shown(results, "crashed")


def test_next_to_nothing_that_trains_the_same_is_refused(results: Results) -> None:
    """A checker that compiles again and compares would refuse all of it."""
    refused = results.of("refused though harmless")
    harmless = results.of("harmless")
    legal = results.of("harmless", "refused though harmless", variants=True)
    assert len(legal) >= 1000
    assert len(refused) <= 0.05 * len([*refused, *harmless]), _shown(
        results, "refused though harmless"
    )


# --- false alarms ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """The plans that were checked without an alarm."""
    return set()


def _no_alarm(plan: Plan, workload: Workload, checked: set[str]) -> None:
    plan = trained_as(plan, workload)
    assert check_plan(plan, workload) == []
    assert check_faults(compile_plan(plan), workload) == []
    checked.add(plan.model_dump_json())


def test_no_alarm_for_any_plan(checked: set[str]) -> None:
    @settings(
        max_examples=750,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(planned_units())
    def check(planned: tuple[list[UnitSpec], list[LossSpec], int]) -> None:
        units, losses, batch = planned
        plan = make_plan(*units, losses=losses, batch=batch)
        _no_alarm(plan, make_workload(units, losses, batch=batch), checked)

    check()
    assert len(checked) >= 1350


def test_no_alarm_for_slices_under_any_degrees(checked: set[str]) -> None:
    before = len(checked)
    for seed in range(300):
        case = random_case(seed, crowded=seed % 2 == 1)
        _no_alarm(case.plan(), case.workload(), checked)
    assert len(checked) >= before + 290


def test_no_alarm_for_any_two_features_and_degrees(checked: set[str]) -> None:
    """Covering arrays, over every feature."""
    before = len(checked)
    for row in [row for seed in range(6) for row in pairwise_rows(FACTORS, seed=seed)]:
        case = Case(**row)
        _no_alarm(case.plan(), case.workload(), checked)
    assert len(checked) >= before + 400
