"""Mutants of every kind can be made, and some of each level are judged; test_campaign has all."""

from __future__ import annotations

import random

import pytest

from mmplan.program.model import Program
from mmplan.schema.plan import Plan
from tests.campaign import SEED, try_mutant
from tests.campaign_plans import Subject, of_mixed_degrees, of_tasks, of_the_matrix
from tests.judge import judge
from tests.mutants import KINDS, Kind

# Judged here: one of so many kinds, an eighth of a second each.
EVERY = 16


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    """Those that no solver made, the small ones first."""
    found = [*of_the_matrix(), *of_mixed_degrees(), *of_tasks()]
    return sorted(found, key=lambda subject: subject.plan.devices)


def _one(kind: Kind, subjects: list[Subject]) -> tuple[Subject, Program | Plan] | None:
    rng = random.Random(f"{SEED}:{kind.name}")
    # One after the other, from a place of its own: each kind meets other plans.
    first = rng.randrange(len(subjects) // 2)
    for subject in [*subjects[first:], *subjects[:first]]:
        source = subject.plan if kind.level == "plan" else subject.program
        mutant = kind.mutate(source, rng)
        if mutant is not None and mutant != source:
            return subject, mutant
    return None


@pytest.mark.parametrize("level", ["rows", "groups", "graph", "plan", "variants"])
def test_every_kind_of_mutant_can_be_made(level: str, subjects: list[Subject]) -> None:
    kinds = [kind for kind in KINDS.values() if kind.level == level]
    assert len(kinds) > 20
    assert [kind.name for kind in kinds if _one(kind, subjects) is None] == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted(KINDS)[::EVERY])
def test_the_check_and_the_judge_agree(name: str, subjects: list[Subject]) -> None:
    """Legal variants and harmless mutants may be refused now and then: see the campaign."""
    made = _one(KINDS[name], subjects)
    assert made is not None
    case = try_mutant(KINDS[name], *made)
    assert case.outcome in ("caught", "harmless", "refused though harmless"), str(case)


# Gathers in another order, a loss's sum, two communicators, and other mistakes that neither a
# deadlock nor a missing sample shows; and two programs that are right.
KNOWN = {
    "sync starts of one loss in another order on one rank": ("other", "stops"),
    "loss reduction without one rank": ("other",),
    "sync start across a tp compute on one rank": ("stops",),
    "two receives of a route swapped": ("stops",),
    "loss weight a millionth more": ("other",),
    "update that every copy counts": ("other",),
    "tie reduction forgotten": ("other",),
    "two edges into a stage exchanged": ("other",),
    "all messages of one sample each": ("same",),
    "reductions in turned order on all ranks": ("same",),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", KNOWN)
def test_the_judge_knows(name: str, subjects: list[Subject]) -> None:
    made = _one(KINDS[name], subjects)
    assert made is not None
    subject, mutant = made
    assert isinstance(mutant, Program)
    assert judge(subject.program, subject.plan, subject.workload).verdict == "same"
    found = judge(mutant, subject.plan, subject.workload)
    assert found.verdict in KNOWN[name], found
