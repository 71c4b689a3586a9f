"""A comparison on the terminal: plans side by side, and how they scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mmplan.planning.compare import ComparedSetting, Comparison, Refused
from mmplan.report import numbers as text
from mmplan.report.terminal.console import Grid
from mmplan.schema.plan import Plan
from mmplan.wording import counted

# Of more tasks their number alone is said.
SHOWN_TASKS = 6
COLUMNS = (
    *("iteration", "MFU", "idle", "communication", "memory", "devices"),
    *("formula gap", "solved in"),
)


def comparison_grids(found: Comparison) -> Iterator[Grid]:
    """The main setting's plans, then a table for each of the sweeps."""
    yield Grid(
        title=f"{found.name}, simulated, best first, {setting_words(found, found.main)}",
        columns=("solver", ">samples/s", f">x {found.baseline}", *(f">{c}" for c in COLUMNS)),
        rows=[comparison_row(found, item.solver, item.plan) for item in found.best_first],
        note=baseline_words(found),
    )
    by_devices, by_batch = device_sweep(found), batch_sweep(found)
    if by_devices:
        yield _sweep_grid(found, "samples/s by devices", by_devices, lambda s: s.devices)
    if by_batch:
        grid = _sweep_grid(found, "samples/s by batch", by_batch, lambda s: s.batch)
        yield replace(grid, note=batch_axis(found))


def comparison_row(found: Comparison, solver: str, plan: Plan) -> tuple[str, ...]:
    """A plan's figures, in the order of the columns."""
    predicted = plan.predicted
    return (
        solver,
        text.count(predicted.samples_per_s),
        f"{found.ratio(plan):.3f}",
        text.seconds(predicted.iteration_s),
        text.percent(predicted.mfu),
        text.percent(predicted.bubble_fraction),
        text.percent(predicted.communication_fraction),
        text.size(max(predicted.memory_bytes, default=0.0)),
        f"{predicted.devices_used} of {plan.devices}",
        text.percent(plan.solver.formula_gap),
        text.seconds(plan.solver.seconds),
    )


def baseline_words(found: Comparison, times: str = "x") -> str:
    """What ratios refer to, and why; a page has a better sign for times."""
    name = found.baseline
    return f"{times} {name}: samples/s over those of {name}, {found.baseline_is}"


def setting_words(found: Comparison, setting: ComparedSetting) -> str:
    """Devices and batch."""
    return f"{counted(setting.devices, 'device')}, {batch_words(found, setting)}"


def batch_words(found: Comparison, setting: ComparedSetting) -> str:
    """What a step takes: of one task its batch, of several their sum and what it is made of."""
    batches = found.batches(setting)
    if len(batches) == 1:
        return f"batch {next(iter(batches.values()))}"
    shown = ", ".join(f"{name} {batch}" for name, batch in batches.items())
    of = shown if len(batches) <= SHOWN_TASKS else f"{len(batches)} tasks"
    return f"{sum(batches.values()):,} samples a step ({of})"


def batch_axis(found: Comparison) -> str:
    """What stands along a sweep of batches, where that is not clear."""
    if not found.has_own_batches:
        return ""
    return "batch: the workload's; those of its tasks change in the same ratio"


def device_sweep(found: Comparison) -> list[ComparedSetting]:
    """Settings of the main batch, fewest devices first; none where there is one only."""
    kept = [s for s in found.settings if s.batch == found.main.batch]
    return sorted(kept, key=lambda s: s.devices) if len(kept) > 1 else []


def batch_sweep(found: Comparison) -> list[ComparedSetting]:
    """Settings of the main number of devices, smallest batch first; none where there is one."""
    kept = [s for s in found.settings if s.devices == found.main.devices]
    return sorted(kept, key=lambda s: s.batch) if len(kept) > 1 else []


def left_out_lines(found: Comparison) -> list[str]:
    """Solvers and settings without a plan, each with the reason."""
    solvers = {item.solver for item in found.solved}
    alike: defaultdict[str, list[Refused]] = defaultdict(list)
    for item in found.refused:
        if item.setting == found.main:
            alike[_reason(item, "each")].append(item)
    lines = [
        f"{same[0].solver} is left out: {_reason(same[0], 'it')}"
        if len(same) == 1
        else f"{', '.join(item.solver for item in same)} are left out: {reason}"
        for reason, same in alike.items()
    ]
    lines += [
        f"{item.solver} has no plan {_other_words(found, item.setting)}: {_reason(item, 'it')}"
        for item in found.refused
        if item.setting != found.main and item.solver in solvers
    ]
    return [*lines, *found.omitted]


def _reason(refused: Refused, pronoun: str) -> str:
    """Why there is no plan; a sentence that begins with the solver's name gets a pronoun."""
    said = refused.error.message
    rest = said.removeprefix(f"{refused.solver} ")
    return said if rest == said else f"{pronoun} {rest}"


def _other_words(found: Comparison, setting: ComparedSetting) -> str:
    """What sets it apart from the main setting."""
    if setting.batch == found.main.batch:
        return f"on {counted(setting.devices, 'device')}"
    return f"with {batch_words(found, setting)}"


def _sweep_grid(
    found: Comparison,
    title: str,
    settings: Sequence[ComparedSetting],
    axis: Callable[[ComparedSetting], int],
) -> Grid:
    rates = {(o.solver, o.setting): o.plan.predicted.samples_per_s for o in found.solved}
    solvers = dict.fromkeys(outcome.solver for outcome in found.solved)
    return Grid(
        title=title,
        columns=("solver", *(f">{axis(setting)}" for setting in settings)),
        rows=[
            (
                solver,
                *(text.count(rates[solver, s]) if (solver, s) in rates else "-" for s in settings),
            )
            for solver in solvers
        ],
    )
