"""Tables of the work of a profile's samples, and of steps simulated on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmplan.report import numbers as text
from mmplan.report.terminal.console import Grid
from mmplan.schema.profile import DataWork, Profile
from mmplan.simulation.sampled_batches import SampledSteps, Spread
from mmplan.wording import counted

SOURCES = {"work": "the dataset's work(index)", "lengths": "lengths of ragged fields"}


def work_grids(profile: Profile) -> Iterator[Grid]:
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
