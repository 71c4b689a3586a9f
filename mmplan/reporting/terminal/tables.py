"""Workloads, profiles and plans on the terminal: tables, timelines, and hints on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import Any

import numpy as np

from mmplan.planning.differences import Change
from mmplan.program.instructions import Op
from mmplan.reporting import numbers as text
from mmplan.reporting.terminal.console import Grid
from mmplan.schema.cluster import Device
from mmplan.schema.plan import Plan, Prediction, Unit
from mmplan.schema.profile import Curve, DataWork, Profile
from mmplan.schema.workload import TaskView, Workload, resolve_tasks, unused_modules
from mmplan.simulation.sampled_batches import SampledSteps, Spread
from mmplan.simulation.step import Simulation
from mmplan.solvers.mpsp.metaops import contract
from mmplan.wording import counted

# Most letters of a rank's row.
_MOST_LETTERS = 96
# Characters of a row beside its letters.
_BESIDE = 11
# Most characters of a workload's value.
_MOST_FIELD = 60
# Runners-up on the terminal; the plan's file has all.
MOST_RUNNERS_UP = 5
SOURCES = {"work": "the dataset's work(index)", "lengths": "lengths of ragged fields"}


def workload_grids(workload: Workload) -> Iterator[Grid]:
    """Modules and losses of every task, the MetaOps of all together, and who trains when."""
    views = resolve_tasks(workload)
    for name, view in views.items():
        label = "" if name == "default" and not workload.tasks else f", task {name}"
        yield Grid(
            title=f"workload {workload.name}{label}: batch {view.batch}",
            columns=("module", "factory", "takes", "frozen", "pins"),
            rows=[_module_row(workload, view, module) for module in view.modules],
        )
        yield Grid(
            title="losses",
            columns=("loss", "factory", "takes", "sync batch", ">weight"),
            rows=[
                (
                    loss,
                    workload.losses[loss].factory,
                    _takes(workload.losses[loss].inputs),
                    str(view.sync_batches.get(loss, "per sample")),
                    f"{workload.losses[loss].weight * view.weight:g}",
                )
                for loss in view.loss_inputs
            ],
            note=_unused(workload),
        )

    yield _metaops(workload, views)
    if workload.train.tasks_from_step:
        yield Grid(
            title="tasks over time",
            columns=(">from step", "tasks"),
            rows=[(str(item.from_step), ", ".join(item.tasks)) for item in workload.task_sets],
        )


def _metaops(workload: Workload, views: dict[str, TaskView]) -> Grid:
    """The contracted graph: predecessors of each MetaOp, and the MetaOps with its parameters."""
    ops = contract(workload, views)
    return Grid(
        title="MetaOps by level: one task's use of one module",
        columns=("level", "MetaOp", ">batch", "after", "shares parameters with"),
        rows=[
            (
                str(op.level),
                op.name,
                str(op.batch),
                ", ".join(ops[i].name for i in op.after) or "-",
                ", ".join(o.name for o in ops if o.owner == op.owner and o is not op) or "-",
            )
            for op in sorted(ops, key=lambda op: op.level)
        ],
    )


def _module_row(workload: Workload, view: TaskView, module: str) -> tuple[str, ...]:
    spec = workload.modules[module]
    frozen = view.frozen[module]
    return (
        module + (f" (shares {spec.share})" if spec.share else ""),
        spec.factory,
        _takes(spec.inputs),
        ("yes" if frozen is True else ", ".join(f"{a}-{b}" for a, b in frozen or ())) or "no",
        str(spec.plan) or "none",
    )


def _takes(inputs: tuple[str | None, ...]) -> str:
    return ", ".join("null" if item is None else item for item in inputs)


def _unused(workload: Workload) -> str:
    unused = unused_modules(workload)
    return f"no task uses {', '.join(unused)}: ignored" if unused else ""


def profile_grids(profile: Profile) -> Iterator[Grid]:
    """Fitted curves and their residuals, modules, and the work of the data."""
    from mmplan.costs.fit import fit_profile

    fits = profile.fits or fit_profile(profile)
    named = [
        (module, tp, fit) for module, by_tp in fits.modules.items() for tp, fit in by_tp.items()
    ]
    named += [(f"loss {loss}", "-", fit) for loss, fit in fits.losses.items()]
    rows = [
        (name, tp, direction, *_curve_cells(curve))
        for name, tp, fit in named
        for direction, curve in (("forward", fit.forward), ("backward", fit.backward))
    ]
    yield Grid(
        title=f"profile {profile.name}: {profile.source}, on {profile.cluster.name} "
        f"({profile.cluster.device.name})",
        columns=(
            "what",
            ">tp",
            "time",
            ">fixed",
            ">per sample",
            "breaks at",
            ">points",
            ">residual",
            ">p90",
        ),
        rows=rows,
        note=f"times of this profile are {profile.source.upper()}; residuals are relative",
        keys=3,
    )
    yield Grid(
        title="modules",
        columns=("module", ">blocks", ">parameters", ">FLOP/sample", ">output/sample"),
        rows=[
            (
                name,
                str(module.blocks),
                text.count(module.parameters),
                text.flops(module.flops_per_sample),
                text.size(module.output_bytes_per_sample),
            )
            for name, module in profile.modules.items()
        ],
    )
    yield from _work_grids(profile)


def _curve_cells(curve: Curve) -> tuple[str, ...]:
    return (
        text.seconds(curve.alpha),
        " then ".join(text.seconds(slope) for slope in curve.slopes),
        ", ".join(f"{knot:g}" for knot in curve.knots) or "none",
        str(curve.points),
        text.percent(curve.residual_median),
        text.percent(curve.residual_p90),
    )


def _work_grids(profile: Profile) -> Iterator[Grid]:
    """How much the work of the samples of each task differs, module by module."""
    for task, data in profile.data.items():
        yield Grid(
            title=f"work of the data{_of_task(profile, task)}",
            columns=("module", ">mean", ">p50", ">p99", ">largest", ">spread", ">points at"),
            rows=[(module, *_cells(data, module)) for module in data.work],
            note=f"{subset(data)}; relative to the mean, which is in the data's own unit; spread "
            "is the standard deviation; modules that are not here cost the same for all samples",
        )


def _of_task(profile: Profile, task: str) -> str:
    return f", task {task}" if len(profile.data) > 1 else ""


def subset(data: DataWork) -> str:
    """How many samples were looked at, and how."""
    whole = f" of {data.dataset}" if data.dataset is not None else ""
    return f"{data.samples}{whole} samples, by {SOURCES[data.source]}"


def _cells(data: DataWork, module: str) -> tuple[str, ...]:
    work = np.array(data.work[module])
    mean = float(work.mean())
    middle, high = (float(q) / mean for q in np.quantile(work, (0.5, 0.99)))
    return (
        f"{mean:.4g}",
        f"{middle:.2f}",
        f"{high:.2f}",
        f"{float(work.max()) / mean:.2f}",
        text.percent(float(work.std()) / mean),
        f"{data.at.get(module, mean) / mean:.2f}",
    )


def sampled_grid(sampled: SampledSteps, *, predicted_s: float) -> Grid:
    """Iteration times of steps on drawn batches, beside those without drawing."""

    def row(name: str, spread: Spread) -> tuple[str, ...]:
        times = (spread.mean_s, spread.p10_s, spread.p50_s, spread.p90_s)
        return name, *(text.seconds(value) for value in times)

    rows = [
        ("all samples alike", text.seconds(sampled.alike_s), "", "", ""),
        ("predicted: every replica the busiest", text.seconds(predicted_s), "", "", ""),
        row("drawn", sampled.drawn),
    ]
    if sampled.reordered is not None:
        rows.append(row("drawn, reordered as in training", sampled.reordered))
    return Grid(
        title=f"iteration on {counted(sampled.draws, 'batch', 'batches')} drawn from "
        f"{counted(sampled.samples, 'sample')}",
        columns=("batches", ">mean", ">10%", ">50%", ">90%"),
        rows=rows,
    )


def plan_grids(plan: Plan) -> Iterator[Grid]:
    """Units, predictions with the lower bound, and runners-up."""
    fault = text.mfu_fault(plan.predicted.mfu, plan.cluster.device)
    yield Grid(
        title=f"plan {plan.name}: {plan.solver.name} ({plan.solver.method}) on "
        f"{plan.devices} of {plan.cluster.name}",
        columns=("unit", "blocks", "tp x pp x dp", "ranks", "samples", "micro-batches", "schedule"),
        rows=[_unit_row(unit) for unit in plan.units],
        note="; ".join(filter(None, [fault, *plan.solver.notes])),
    )
    predicted, solver = plan.predicted, plan.solver
    trials = solver.measured_s is not None
    memory = max(predicted.memory_bytes, default=0.0)
    yield Grid(
        title="predicted",
        columns=("", ""),
        note=f"which is {against}" if (against := text.gain(plan)) else "",
        rows=[
            ("iteration", text.seconds(predicted.iteration_s)),
            ("samples/s", text.count(predicted.samples_per_s)),
            ("MFU", text.mfu(predicted.mfu)),
            ("idle", text.percent(predicted.bubble_fraction)),
            ("communication", text.percent(predicted.communication_fraction)),
            (
                "most memory",
                f"{text.size(memory)} of {text.size(plan.cluster.device.memory_bytes)}",
            ),
            ("devices used", f"{predicted.devices_used} of {plan.devices}"),
            ("idle ranks", text.ranks(solver.idle_ranks)),
            *([("measured in a trial", text.measured(solver.measured_s))] if trials else []),
            *(
                [("lower bound", f"{text.seconds(least)} (gap {text.percent(solver.gap or 0.0)})")]
                if (least := solver.lower_bound_s) is not None
                else []
            ),
            (
                "solver's formula",
                f"{text.seconds(solver.objective_s)}, of its other plans at least "
                f"{text.seconds(solver.formula_bound_s)}",
            ),
            ("solved in", text.seconds(solver.seconds)),
        ],
    )
    if solver.runners_up:
        more = len(solver.runners_up) - MOST_RUNNERS_UP
        yield Grid(
            title="runners-up",
            columns=("plan", ">objective", ">simulated", *((">measured",) if trials else ())),
            rows=[
                (
                    r.label,
                    text.seconds(r.objective_s),
                    text.seconds(r.iteration_s),
                    *((text.measured(r.measured_s),) if trials else ()),
                )
                for r in solver.runners_up[:MOST_RUNNERS_UP]
            ],
            note=f"{more} more in the plan's solver.runners_up" if more > 0 else "",
        )


def _unit_row(unit: Unit) -> tuple[str, ...]:
    sizes = [text.repeated(row) for row in unit.microbatches]
    same = len(set(sizes)) == 1
    return (
        unit.name,
        text.blocks(unit),
        f"{unit.tp} x {unit.pp} x {unit.dp}"
        + (f" (vpp {unit.vpp})" if unit.vpp > 1 else "")
        + (" (items)" if unit.items else "")
        + (f" (zero {unit.zero})" if unit.zero is not None else ""),
        text.ranks(unit.all_ranks),
        text.repeated(unit.samples),
        sizes[0] if same else " | ".join(sizes),
        unit.schedule.kind,
    )


_LETTERS: dict[Any, str] = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.INPUT: "B",
    Op.WEIGHT: "W",
    Op.SYNC_WAIT: "S",
    Op.REDUCE: "R",
}


def timeline_lines(
    simulation: Simulation, *, width: int, ranks: Sequence[int] | None = None
) -> Iterator[str]:
    """One row of letters per rank: its last instruction in each slice of the step.

    Args:
        simulation: of the step.
        width: characters that a row may have.
        ranks: with a row; default: all.
    """
    total = simulation.iteration_s or 1.0
    letters = max(20, min(_MOST_LETTERS, width - _BESIDE))
    shown = range(simulation.program.num_ranks) if ranks is None else ranks
    rows = {rank: ["." for _ in range(letters)] for rank in shown}
    for event in (event for rank in shown for event in simulation.events_of(rank)):
        item = simulation.program.instructions[event.rank][event.position]
        letter = _LETTERS.get(getattr(item, "op", None))
        if letter is None or event.end_s <= event.start_s:
            continue
        first = int(event.start_s / total * letters)
        last = max(first + 1, round(event.end_s / total * letters))
        for column in range(first, min(last, letters)):
            rows[event.rank][column] = letter
    for rank, row in rows.items():
        yield f"rank {rank:>3} |{''.join(row)}|"
    yield f"          0{'':{letters - 12}}{text.seconds(total):>12}"
    split = "  W its weight gradients" if any("W" in row for row in rows.values()) else ""
    yield f"F forward  B backward{split}  S sync and loss  R gradient reduction"
    yield ". idle, or waiting for messages or for a reduction that began inside a backward"


def prediction_words(predicted: Prediction, device: Device) -> Iterator[str]:
    """The figures of a step in a line, and what is wrong with them."""
    memory = max(predicted.memory_bytes, default=0.0)
    yield (
        f"iteration {predicted.iteration_s:.4g} s, {predicted.samples_per_s:.4g} samples/s, "
        f"idle {text.percent(predicted.bubble_fraction)}, "
        f"communication {text.percent(predicted.communication_fraction)}, "
        f"MFU {text.mfu(predicted.mfu)}, most memory {text.size(memory)} of "
        f"{text.size(device.memory_bytes)}"
    )
    if (fault := text.mfu_fault(predicted.mfu, device)) is not None:
        yield fault


def changes_grid(first: str, second: str, changes: Sequence[Change]) -> Grid:
    """What differs between two plans."""
    title = f"from {first} to {second}"
    if not changes:
        return Grid(title=title, columns=("",), rows=[("the plans are the same",)])
    return Grid(
        title=title,
        columns=("part", "what", "before", "after"),
        rows=[
            (c.part, c.what, _field(c.before), _field(c.after))
            if c.part == "workload"
            else (c.part, _without_unit(c.what), _value(c.what, c.before), _value(c.what, c.after))
            for c in changes
        ],
        keys=2,
    )


def _field(value: Any) -> str:
    """A value of a workload's field; a plan has hashes of factories."""
    return "–" if value is None else shorten(str(value), _MOST_FIELD, placeholder=" …")


def _without_unit(what: str) -> str:
    return (
        what.removesuffix("_bytes").removesuffix("_s") if what != "samples_per_s" else "samples/s"
    )


def _value(what: str, value: Any) -> str:
    """A value of a plan as people read it."""
    if value is None:
        return "–"
    match what:
        case "samples_per_s":
            return text.count(value)
        case "mfu":
            return text.mfu(value)
        case "workload" | "profile":
            return f"file {value[:12]}"
        case "ranks" | "idle ranks":
            return text.ranks(value)
        case "samples":
            return text.repeated(value)
        case "microbatches":
            return " | ".join(dict.fromkeys(text.repeated(row) for row in value))
        case "blocks":
            return ", ".join(f"{a}-{b}" for a, b in value)
        case _:
            return _measured(what, value)


def _measured(what: str, value: Any) -> str:
    if what.endswith("_s"):
        return text.seconds(value)
    if what.endswith("_bytes"):
        return text.size(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
