"""Sections that are tables: units, the solver's report, provenance."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from textwrap import shorten
from typing import Any

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.sections.scaling import scaling_pictures
from mmplan.reporting.sections.topology import unit_colour, unit_letter
from mmplan.reporting.source import ReportData
from mmplan.schema.plan import Plan, Unit

# Rows of a table: a page of thousands is slow to open.
_MOST_UNITS = 400
_MOST_RUNNERS_UP = 50
# Runners-up that are shown without a click.
_FIRST_RUNNERS_UP = 8
# Characters of another plan's degrees: with many units they fill a page.
_LABEL = 300
# Entries of the profile's provenance, and characters of each.
_MOST_PROVENANCE = 60
_MOST_CHARACTERS = 300


def units_section(data: ReportData) -> str:
    """Every unit's degrees, ranks and samples."""
    units = data.plan.units
    columns = ("unit", "module", "blocks", ">dp × pp × tp", "ranks", "samples", "micro-batches")
    rows = [_unit_row(unit, i) for i, unit in enumerate(units[:_MOST_UNITS])]
    grid = markup.table((*columns, "schedule"), rows, label="Units of the plan")
    if len(units) > _MOST_UNITS:
        grid += markup.note(f"The first {_MOST_UNITS} of {len(units):,} units.")
    return grid


def _unit_row(unit: Unit, index: int) -> tuple[str, ...]:
    sign = markup.text("span", unit_letter(index), class_=f"key {unit_colour(index)}")
    return (
        markup.Markup(sign + markup.esc(unit.name)),
        unit.module,
        ", ".join(f"[{a}, {b})" for a, b in unit.blocks),
        f"{unit.dp} × {unit.pp} × {unit.tp}"
        + (f", vpp {unit.vpp}" if unit.vpp > 1 else "")
        + (", items" if unit.items else "")
        + (f", zero {unit.zero}" if unit.zero is not None else ""),
        fmt.ranks(unit.all_ranks),
        fmt.repeated(unit.samples),
        fmt.first_of(fmt.microbatch_sizes(unit), 4, separator=" | ", rest="…"),
        unit.schedule.kind,
    )


def solver_section(data: ReportData) -> str:
    """Step, bound and gap, what the solver notes, the runners-up, and the curves of MetaOps."""
    plan, solver = data.plan, data.plan.solver
    rows = [
        ("solver", f"{solver.name} ({solver.method}), {fmt.seconds(solver.seconds)}"),
        ("simulated", f"{fmt.seconds(plan.predicted.iteration_s)} (the plan's program)"),
    ]
    if solver.lower_bound_s is not None and solver.gap is not None:
        rows.append(
            (
                "lower bound",
                f"{fmt.seconds(solver.lower_bound_s)}: no plan of any solver takes less on these "
                f"devices; gap {fmt.percent(solver.gap)}",
            )
        )
    rows.append(
        (
            "solver's formula",
            f"{fmt.seconds(solver.objective_s)} for this plan, at least "
            f"{fmt.seconds(solver.formula_bound_s)} for all that the solver may choose. The "
            "simulated step may be shorter than both",
        )
    )
    if solver.measured_s is not None:
        rows.append(("measured", f"{fmt.seconds(solver.measured_s)} in the trial that chose it"))
    rows += [
        ("MFU", fmt.mfu(plan.predicted.mfu)),
        ("communication", f"{fmt.percent(plan.predicted.communication_fraction)} not hidden"),
    ]
    rows += [
        (f"largest sync batch, {loss}", f"{samples:,} samples fit the memory")
        for loss, samples in solver.largest_sync_batch.items()
    ]
    return (
        markup.table(("", ""), rows, label="How the plan was found", head=False)
        + (markup.bullets(solver.notes) if solver.notes else "")
        + _other_solvers(plan)
        + _runners_up(plan)
        + scaling_pictures(data)
    )


def _other_solvers(plan: Plan) -> str:
    """The best plan of each solver, where several were run."""
    best_s: dict[str, float] = {plan.solver.name: plan.predicted.iteration_s}
    for runner in plan.solver.runners_up:
        name = runner.label.partition(":")[0]
        best_s[name] = min(runner.iteration_s, best_s.get(name, runner.iteration_s))
    if len(best_s) == 1:
        return markup.note(
            "mmplan solve with --solver auto also looks at the plans of other solvers, and "
            "mmplan compare shows them side by side."
        )
    chosen_s = best_s[plan.solver.name]
    amounts = [
        markup.Amount(
            name=name,
            value=seconds,
            words=f"{fmt.seconds(seconds)}, {seconds / chosen_s - 1:+.1%}" if chosen_s else "",
            marked=name == plan.solver.name,
        )
        for name, seconds in sorted(best_s.items(), key=lambda pair: pair[1])
    ]
    heading = markup.text("h3", "The best plan of every solver: seconds of a step")
    return heading + markup.bars(amounts, label="Seconds of a step by solver")


def _runners_up(plan: Plan) -> str:
    runners = plan.solver.runners_up
    if not runners:
        return markup.note("No other plan was simulated.")
    best_s = plan.predicted.iteration_s
    trials = plan.solver.measured_s is not None
    rows = [
        (
            shorten(runner.label, _LABEL, placeholder=" …"),
            fmt.seconds(runner.objective_s),
            fmt.seconds(runner.iteration_s),
            *((fmt.measured(runner.measured_s),) if trials else ()),
            f"{runner.iteration_s / best_s - 1:+.1%}" if best_s else "–",
        )
        for runner in runners[:_MOST_RUNNERS_UP]
    ]
    measured = (">measured in a trial",) if trials else ()
    columns = ("runner-up", ">objective", ">simulated", *measured, ">slower, simulated")
    first, others = rows[:_FIRST_RUNNERS_UP], rows[_FIRST_RUNNERS_UP:]
    shown = markup.element(
        "div", markup.table(columns, first, label="Runners-up"), class_="first-wide"
    )
    if others:
        rest = markup.table(columns, others, label="More runners-up")
        shown += markup.details(f"{len(others)} more", rest, class_="first-wide")
    return markup.text("h3", "Runners-up") + shown


def provenance_section(data: ReportData) -> str:
    """Versions, machine, and the files by their hashes."""
    rows = [("mmplan", _version("mmplan")), ("Python", platform.python_version())]
    rows += [(name, _version(name)) for name in ("torch", "numpy", "matplotlib")]
    run = data.run
    if run is not None:
        known = {"run started": "started_at", "cores of the run's machine": "cores"}
        rows += [(n, str(run.record[key])) for n, key in known.items() if key in run.record]
    if data.profile is not None:
        rows.append(("profile", f"{data.profile.name} ({data.profile.source})"))
        rows += [
            (f"profile: {name}", value)
            for name, value in islice(_flat(data.profile.provenance), _MOST_PROVENANCE)
        ]
    made = markup.table(("", ""), rows, label="Versions and machine", head=False)
    files = markup.table(
        ("file", "path", "SHA-256 written down", "now"),
        [(what, path, sha[:16], _state(sha, found)) for what, path, sha, found in data.hashes],
        label="Files",
    )
    return made + markup.text("h3", "Files") + files


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested provenance as dotted names with short texts."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif values not in ([], "", None):
        shown = f"{values:.6g}" if isinstance(values, float) else str(values)
        yield prefix, fmt.shortened(shown, _MOST_CHARACTERS)


def _state(recorded: str, found: str | None) -> str:
    if found is None:
        return "not found"
    return "the same" if found == recorded else f"differs: {found[:16]}"
