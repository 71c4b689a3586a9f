"""A comparison on the terminal: plans side by side, and how they scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

from mmplan.planning.compare import ComparedSetting, Comparison, Refused
from mmplan.reporting import numbers as text
from mmplan.reporting.terminal.console import Grid
from mmplan.schema.plan import Plan
from mmplan.wording import counted

Axis = Literal["devices", "batch"]

# More tasks are only counted, so that a title stays on a line.
SHOWN_TASKS = 6
COLUMNS = (
    "iteration",
    "MFU",
    "idle",
    "communication",
    "memory",
    "devices",
    "gap",
    "solved in",
)


def comparison_grids(comparison: Comparison) -> Iterator[Grid]:
    """The main setting's plans, then a table for each of the sweeps."""
    setting = setting_words(comparison, comparison.main)
    yield Grid(
        title=f"{comparison.name}, simulated, best first, {setting}",
        columns=("solver", ">samples/s", f">x {comparison.baseline}", *(f">{c}" for c in COLUMNS)),
        rows=[comparison_row(comparison, item.solver, item.plan) for item in comparison.best_first],
        note="; ".join(filter(None, [baseline_words(comparison), _mfu_fault(comparison)])),
    )
    rates = {
        (item.solver, item.setting): text.count(item.plan.predicted.samples_per_s)
        for item in comparison.solved
    }
    for axis in ("devices", "batch"):
        settings = sweep(comparison, axis)
        if settings:
            yield Grid(
                title=f"samples/s by {axis}",
                columns=("solver", *(f">{getattr(setting, axis)}" for setting in settings)),
                rows=[
                    (solver, *(rates.get((solver, setting), "-") for setting in settings))
                    for solver in dict.fromkeys(item.solver for item in comparison.solved)
                ],
                note=batch_axis(comparison) if axis == "batch" else "",
            )


def _mfu_fault(comparison: Comparison) -> str | None:
    most = max((item.plan for item in comparison.best_first), key=lambda plan: plan.predicted.mfu)
    return text.mfu_fault(most.predicted.mfu, most.cluster.device)


def comparison_row(comparison: Comparison, solver: str, plan: Plan) -> tuple[str, ...]:
    """A plan's figures, in the order of the columns."""
    predicted = plan.predicted
    return (
        solver,
        text.count(predicted.samples_per_s),
        f"{comparison.ratio(plan):.3f}",
        text.seconds(predicted.iteration_s),
        text.mfu(predicted.mfu),
        text.percent(predicted.bubble_fraction),
        text.percent(predicted.communication_fraction),
        text.size(max(predicted.memory_bytes, default=0.0)),
        f"{predicted.devices_used} of {plan.devices}",
        "-" if plan.solver.gap is None else text.percent(plan.solver.gap),
        text.seconds(plan.solver.seconds),
    )


def baseline_words(comparison: Comparison, times: str = "x") -> str:
    """The baseline of ratios and its reason; ``times`` is the sign of a ratio."""
    name = comparison.baseline
    return f"{times} {name}: samples/s over those of {name}, {comparison.baseline_is}"


def setting_words(comparison: Comparison, setting: ComparedSetting) -> str:
    """Devices and batch."""
    return f"{counted(setting.devices, 'device')}, {batch_words(comparison, setting)}"


def batch_words(comparison: Comparison, setting: ComparedSetting) -> str:
    """The batch of one task; the sum of several tasks' batches and each of them."""
    batches = comparison.batches(setting)
    if len(batches) == 1:
        return f"batch {next(iter(batches.values()))}"
    shown = ", ".join(f"{name} {batch}" for name, batch in batches.items())
    of = shown if len(batches) <= SHOWN_TASKS else f"{len(batches)} tasks"
    return f"{sum(batches.values()):,} samples a step ({of})"


def batch_axis(comparison: Comparison) -> str:
    """A sentence on the axis of a sweep of batches, where a task's batch is another."""
    unclear = comparison.has_own_batches
    return "batch: the workload's; those of its tasks change in the same ratio" if unclear else ""


def sweep(comparison: Comparison, axis: Axis) -> list[ComparedSetting]:
    """Settings with the main one's value of the other axis, in order; none where there is one."""
    same = attrgetter("batch" if axis == "devices" else "devices")
    kept = [s for s in comparison.settings if same(s) == same(comparison.main)]
    return sorted(kept, key=attrgetter(axis)) if len(kept) > 1 else []


def left_out_lines(comparison: Comparison) -> list[str]:
    """Solvers and settings without a plan, each with the reason."""
    solvers = {item.solver for item in comparison.solved}
    by_reason: defaultdict[str, list[Refused]] = defaultdict(list)
    for item in comparison.refused:
        if item.setting == comparison.main:
            by_reason[_reason(item, "each")].append(item)
    lines = [
        f"{same[0].solver} is left out: {_reason(same[0], 'it')}"
        if len(same) == 1
        else f"{', '.join(item.solver for item in same)} are left out: {reason}"
        for reason, same in by_reason.items()
    ]
    lines += [
        f"{item.solver} has no plan {_other_words(comparison, item.setting)}: {_reason(item, 'it')}"
        for item in comparison.refused
        if item.setting != comparison.main and item.solver in solvers
    ]
    return [*lines, *comparison.omitted]


def _reason(refused: Refused, pronoun: str) -> str:
    """The error's message, with a pronoun for the solver's name at its beginning."""
    message = refused.error.message
    rest = message.removeprefix(f"{refused.solver} ")
    return message if rest == message else f"{pronoun} {rest}"


def _other_words(comparison: Comparison, setting: ComparedSetting) -> str:
    """The difference to the main setting."""
    if setting.batch == comparison.main.batch:
        return f"on {counted(setting.devices, 'device')}"
    return f"with {batch_words(comparison, setting)}"
