"""How far predictions of plans agree with what was found by running them, in tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from page import table
from scipy.stats import spearmanr

from mmplan.schema.plan import Plan

# Steps that are timed closer than this are equal: a machine's noise is no ranking.
SAME = 0.02


@dataclass(slots=True, kw_only=True)
class Entry:
    """One plan, predicted and run.

    Attributes:
        how: ranks and how it was run.
        solvers: that made it.
        predicted_s: one prediction, or one for each time that it was run.
        found_s: as many measured or emulated steps.
        held: bytes that a run is expected to hold over measured ones, of each rank; empty where
            none were measured.
        planned: likewise of the bytes that the plan counts.
        taken: share of a measured run in which the machine's host took a core away, for each run.
    """

    workload: str
    how: str
    solvers: list[str]
    plan: Plan
    predicted_s: list[float] = field(default_factory=list[float])
    found_s: list[float] = field(default_factory=list[float])
    held: list[float] = field(default_factory=list[float])
    planned: list[float] = field(default_factory=list[float])
    taken: list[float] = field(default_factory=list[float])

    @property
    def predicted(self) -> float:
        """Median of the predictions."""
        return statistics.median(self.predicted_s)

    @property
    def found(self) -> float:
        """Median of the runs."""
        return statistics.median(self.found_s)

    @property
    def pairs(self) -> list[float]:
        """Predicted over found, of each time that it was run."""
        return [p / f for p, f in zip(self.predicted_s, self.found_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of pairs that were taken at about the same time."""
        return statistics.median(self.pairs)

    @property
    def own_ratio(self) -> float:
        """The same without the time that the host took, which a profile has no part of."""
        if not self.taken:
            return self.ratio
        pairs = zip(self.pairs, self.taken, strict=True)
        return statistics.median(pair / (1 - taken) for pair, taken in pairs)

    def __str__(self) -> str:
        taken = f", host took {self.taken[-1]:.1%}" if self.taken else ""
        return (
            f"{self.workload}, {self.how}, {self.solvers[0]}: predicted {self.predicted_s[-1]:.3f} "
            f"s, found {self.found_s[-1]:.3f} s, {self.pairs[-1]:.3f}{taken}"
        )


def does_the_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans differ in nothing that is executed."""
    named = {"name", "solver", "predicted"}
    return plan.model_dump(exclude=named) == other.model_dump(exclude=named)


def plans_table(entries: Sequence[Entry]) -> str:
    """A line for each plan."""
    columns = ["workload, ranks", "systems", "predicted", "found", "predicted / found"]
    several = any(len(entry.found_s) > 1 for entry in entries)
    columns += ["pairs"] * several
    shared = any(entry.taken for entry in entries)
    columns += ["host took", "without"] * shared
    return table(columns, [_row(e, several, shared) for e in entries])


def _row(entry: Entry, several: bool, shared: bool) -> list[str]:
    cells = [
        f"{entry.workload}, {entry.how}",
        ", ".join(entry.solvers),
        f"{entry.predicted:.3f} s",
        f"{entry.found:.3f} s",
        f"{entry.ratio:.3f}",
    ]
    cells += [_range(entry.pairs)] * several
    if shared:
        cells += [f"{statistics.median(entry.taken):.1%}", f"{entry.own_ratio:.3f}"]
    return cells


def memory_table(entries: Sequence[Entry]) -> str:
    """A line for each plan whose bytes were measured, and the errors in a sentence."""
    ranks = [ratio for entry in entries for ratio in entry.held]
    columns = ("workload, ranks", "systems", "expected / found", "planned / found")
    rows = [
        [
            f"{entry.workload}, {entry.how}",
            ", ".join(entry.solvers),
            _range(entry.held),
            _range(entry.planned),
        ]
        for entry in entries
    ]
    return (
        f"{table(columns, rows)}\n\nExpected peak memory of a rank is {_off(ranks)} "
        f"({len(ranks)} ranks)."
    )


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def ranking_table(entries: Sequence[Entry]) -> str:
    """A line for each workload and number of ranks: do predictions choose the right plan?"""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.workload, entry.how), []).append(entry)
    return table(
        ["workload, ranks", "systems", "plans", "rank correlation", "regret"],
        [
            [
                f"{name}, {how}",
                str(sum(len(entry.solvers) for entry in group)),
                str(len(group)),
                _correlation(group),
                _regret(group),
            ]
            for (name, how), group in groups.items()
        ],
    )


def errors(what: str, entries: Sequence[Entry]) -> str:
    """Median and worst error of the predictions, in a sentence."""
    text = f"{what}: predictions are {_off([e.ratio for e in entries])} ({len(entries)} plans)."
    if any(entry.taken for entry in entries):
        off = _off([entry.own_ratio for entry in entries])
        text += f" Without the time that the host took they are {off}."
    return text


def _off(ratios: Sequence[float]) -> str:
    off = [abs(ratio - 1) for ratio in ratios]
    return f"{statistics.median(off):.1%} off in the median, {max(off):.1%} at worst"


EXPLAINED = (
    f"Regret is the found time of the plan that the predictions choose over the least of all, "
    f"less 1. Plans whose times are within {SAME:.0%} of each other count as equal in the rank "
    "correlation. Systems that make the same plan share a line."
)


def _correlation(group: Sequence[Entry]) -> str:
    """Spearman's, over plans whose times differ by more than noise."""
    if len(group) < 2:
        return "-"
    predicted = _tied([entry.predicted for entry in group])
    found = _tied([entry.found for entry in group])
    if len(set(predicted)) == 1 or len(set(found)) == 1:
        return "all equal" if len(set(predicted)) == len(set(found)) else "-"
    result: Any = spearmanr(predicted, found)
    return f"{result.statistic:.2f}"


def _tied(seconds: Sequence[float]) -> list[int]:
    """The rank of each time; one within SAME of the first of its rank has that rank too."""
    ranks: dict[int, int] = {}
    first, rank = 0.0, 0
    for index in sorted(range(len(seconds)), key=lambda i: seconds[i]):
        if seconds[index] > first * (1 + SAME):
            first, rank = seconds[index], rank + 1
        ranks[index] = rank
    return [ranks[index] for index in range(len(seconds))]


def _regret(group: Sequence[Entry]) -> str:
    chosen = min(group, key=lambda entry: entry.predicted)
    return f"{chosen.found / min(entry.found for entry in group) - 1:.1%}"
