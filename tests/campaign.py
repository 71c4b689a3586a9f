"""The campaign: mutants of many programs, each checked and judged; counts by kind.

``python -m tests.campaign`` runs all of it and prints the table of docs/campaign.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmplan.errors import MMPlanError
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program
from mmplan.schema.plan import Plan
from tests import legal_variants, mutants_of_graphs, mutants_of_groups, mutants_of_plans
from tests.campaign_plans import Subject, all_subjects
from tests.judge import Judgement, judge
from tests.mutants import KINDS, Kind, Level, check_faults, check_plan

SEED = 14
# Of each kind: together some 4,500.
PER_KIND = 14
PER_VARIANT = 50
# The modules that enter kinds of mutants.
SOURCES = legal_variants, mutants_of_graphs, mutants_of_groups, mutants_of_plans


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mutant: what the check says of it, and what the judge.

    Attributes:
        faults: the check's.
        crash: what the check raised instead of saying it.
    """

    kind: Kind
    subject: Subject
    faults: tuple[str, ...]
    judgement: Judgement
    crash: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the check found a fault."""
        return bool(self.faults) and self.crash is None

    @property
    def outcome(self) -> str:
        """A column of the table."""
        if self.crash is not None:
            return "crashed"
        if self.judgement.verdict == "same":
            return "refused though harmless" if self.refused else "harmless"
        if self.refused:
            return "caught"
        return "missed" if self.judgement.verdict == "other" else "missed, stops"

    def __str__(self) -> str:
        found = self.crash or (self.faults[0] if self.faults else "no faults")
        return (
            f"{self.kind.name} | {self.subject.name} | {found} | "
            f"{self.judgement.verdict} {self.judgement.reason}"
        )


COLUMNS = ("caught", "harmless", "missed", "missed, stops", "refused though harmless", "crashed")


@dataclass
class Results:
    """All cases of a campaign."""

    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, *outcomes: str, variants: bool | None = None) -> list[Case]:
        """Cases with some outcomes; of legal variants only, or of mutants only."""
        return [
            case
            for case in self.cases
            if case.outcome in outcomes
            and (variants is None or (case.kind.level == "variants") == variants)
        ]

    def table(self) -> str:
        """A row for each kind, a sum for each level, in Markdown."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for case in self.cases:
            counts[case.kind.name][case.outcome] += 1
        lines = [
            "| level | kind | " + " | ".join(COLUMNS) + " |",
            "|---|---|" + "---:|" * len(COLUMNS),
        ]
        levels: dict[Level, list[Kind]] = {}
        for kind in KINDS.values():
            levels.setdefault(kind.level, []).append(kind)
        for level, kinds in levels.items():
            total: Counter[str] = Counter()
            seen = [kind for kind in kinds if kind.name in counts]
            for kind in seen:
                total.update(counts[kind.name])
                lines.append(_row(level, kind.name, counts[kind.name]))
            if seen:
                lines.append(_row(f"**{level}**", f"**{len(seen)} kinds**", total))
        return "\n".join(lines)


def _row(level: str, name: str, counts: Counter[str]) -> str:
    return f"| {level} | {name} | " + " | ".join(str(counts[c] or "") for c in COLUMNS) + " |"


def run_campaign(
    subjects: Sequence[Subject],
    *,
    kinds: Iterable[Kind] = (),
    per_kind: int,
    per_variant: int | None = None,
    seed: int = SEED,
    progress: Callable[[Case], object] = lambda _: None,
) -> Results:
    """Check and judge some mutants of every kind.

    Args:
        subjects: whose programs train what one process trains.
        kinds: default all.
        per_kind: mutants of each, spread over the subjects; fewer where fewer are possible.
        per_variant: of each kind of legal variants; default the same.
        seed: of the choice.
        progress: hears of each case.
    """
    results, start = Results(), time.perf_counter()
    for kind in kinds or KINDS.values():
        count = per_kind if kind.level != "variants" else per_variant or per_kind
        for subject, mutant in _mutants(subjects, kind, count, seed):
            case = try_mutant(kind, subject, mutant)
            results.cases.append(case)
            progress(case)
    results.seconds = time.perf_counter() - start
    return results


def _mutants(
    subjects: Sequence[Subject], kind: Kind, count: int, seed: int
) -> Iterator[tuple[Subject, Program | Plan]]:
    """Mutants of different subjects, and twice of one only where the others have none."""
    rng = random.Random(f"{seed}:{kind.name}")
    found = 0
    for _ in range(3):
        for subject in rng.sample(subjects, len(subjects)):
            source = subject.plan if kind.level == "plan" else subject.program
            mutant = kind.mutate(source, rng)
            if mutant is not None and mutant != source:
                yield subject, mutant
                found += 1
            if found == count:
                return


def try_mutant(kind: Kind, subject: Subject, mutant: Program | Plan) -> Case:
    """What the check and the judge say of a mutant."""
    if isinstance(mutant, Plan):
        return _try_plan(kind, subject, mutant)
    faults, crash = _faults(lambda: check_faults(mutant, subject.workload))
    judgement = judge(mutant, subject.plan, subject.workload)
    return Case(kind=kind, subject=subject, faults=faults, crash=crash, judgement=judgement)


def _try_plan(kind: Kind, subject: Subject, plan: Plan) -> Case:
    """A mutant that cannot be compiled stops before it begins."""
    faults, crash = _faults(lambda: check_plan(plan, subject.workload))
    try:
        judgement = judge(compile_plan(plan), plan, subject.workload)
    except Exception as error:
        judgement = Judgement("stops", f"cannot be compiled: {error}")
    return Case(kind=kind, subject=subject, faults=faults, crash=crash, judgement=judgement)


def _faults(check: Callable[[], list[str]]) -> tuple[tuple[str, ...], str | None]:
    try:
        return tuple(check()), None
    except MMPlanError as error:
        return (error.message,), None
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"


def judged_same(subjects: Iterable[Subject]) -> tuple[list[Subject], list[tuple[Subject, str]]]:
    """The subjects that train the same, and the others with the reason."""
    good: list[Subject] = []
    others: list[tuple[Subject, str]] = []
    for subject in subjects:
        found = judge(subject.program, subject.plan, subject.workload)
        if found.verdict == "same":
            good.append(subject)
        else:
            others.append((subject, f"{found.verdict}: {found.reason}"))
    return good, others


def _main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--per-kind", type=int, default=PER_KIND)
    options.add_argument("--per-variant", type=int, default=PER_VARIANT)
    options.add_argument("--seed", type=int, default=SEED)
    options.add_argument("--kind", help="only kinds whose name has this in it", default="")
    options.add_argument("--show", nargs="*", default=["missed", "missed, stops", "crashed"])
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        subjects, others = judged_same(all_subjects(Path(folder)))
    lines = [f"left out: {subject.name}: {reason}" for subject, reason in others]
    kinds = [kind for kind in KINDS.values() if asked.kind in kind.name]
    results = run_campaign(
        subjects,
        kinds=kinds,
        per_kind=asked.per_kind,
        per_variant=asked.per_variant,
        seed=asked.seed,
    )
    lines += [f"{case.outcome}: {case}" for case in results.of(*asked.show)]
    lines += [results.table(), f"{len(results.cases)} mutants in {results.seconds:.0f} s"]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    _main()
