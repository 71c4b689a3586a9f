"""How the work of the data's samples is distributed, as histograms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmplan.costs.cost_model import CostModel
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData
from mmplan.reporting.terminal.tables import subset
from mmplan.schema.profile import Profile

# Each picture weighs some 10 kB.
MOST_PICTURES = 40
# More different values share even bins.
_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One module's work in one task.

    Attributes:
        relative: work of each sample, mean 1.
        mean: in the data's own unit.
        stragglers: (unit, its dp, work of its busiest replica over the mean).
    """

    title: str
    relative: NDArray[np.float64]
    mean: float
    stragglers: tuple[tuple[str, int, float], ...]

    @property
    def p99(self) -> float:
        """Work that one sample in a hundred exceeds."""
        return float(np.quantile(self.relative, 0.99))

    @property
    def caption(self) -> str:
        """What the picture shows, in figures."""
        replicas = "".join(
            f"; the busiest of {unit}'s {dp} replicas {factor:.3f} ×"
            for unit, dp, factor in self.stragglers
        )
        return (
            f"mean {self.mean:.3g}; 99% of the samples up to {self.p99:.2f} × mean, the largest "
            f"{float(self.relative.max()):.2f} ×{replicas}"
        )


def work_section(data: ReportData) -> str:
    """Histograms of the work of every module's samples."""
    profile = data.profile
    if profile is None:
        return markup.note(f"{data.profile_note} The work of samples cannot be shown without it.")
    if not profile.data:
        return markup.note(
            "The profile does not know how the work of samples differs: all count alike. "
            "mmplan profile --data looks."
        )
    items = list(histograms(data))
    pictures = "".join(_picture(item, index) for index, item in enumerate(items[:MOST_PICTURES]))
    return (
        "".join(markup.text("p", line) for line in _sentences(profile, data))
        + markup.left_out(len(items) - MOST_PICTURES, "more module")
        + markup.element("div", pictures, class_="grid")
    )


def _sentences(profile: Profile, data: ReportData) -> Iterator[str]:
    for task, work in profile.data.items():
        of_task = f"Task {task}: " if len(profile.data) > 1 else ""
        yield f"{of_task}{subset(work)}. Modules without a picture cost the same for all samples."
    dealt = any(work.source == "work" for work in profile.data.values())
    how = (
        "dealt to the replicas by their work, as training does"
        if dealt and data.plan.training.reorder
        else "in random order"
    )
    yield (
        "Times in the plan are for samples of mean work, and for the busiest replica: how much "
        f"more than the mean it has in a round is expected from batches drawn from these, {how}."
    )


def histograms(data: ReportData) -> Iterator[Histogram]:
    """Every module whose work the profile of a report knows."""
    profile, plan = data.profile, data.plan
    if profile is None:
        return
    costs = CostModel(profile, plan.cluster, plan.training)
    for task, work in profile.data.items():
        for module in work.work:
            yield Histogram(
                title=f"{task}.{module}" if len(profile.data) > 1 else module,
                relative=np.array(work.work[module]) / np.mean(work.work[module]),
                mean=float(np.mean(work.work[module])),
                stragglers=tuple(_stragglers(data, costs, task, module)),
            )


def _stragglers(
    data: ReportData, costs: CostModel, task: str, module: str
) -> Iterator[tuple[str, int, float]]:
    samples = data.plan.tasks[task].period
    for unit in data.plan.units:
        if (unit.task, unit.module) == (task, module) and unit.dp > 1:
            factor = costs.straggler(task=task, module=module, dp=unit.dp, samples=samples)
            yield unit.name, unit.dp, factor


def _picture(item: Histogram, index: int) -> str:
    label = f"{item.title}: how many samples are how much work; {item.caption}"
    return plots.panel(
        lambda figure: _draw(figure, item),
        title=item.title,
        beside=markup.text("div", item.caption),
        height=2.4,
        label=label,
        prefix=f"work{index}",
    )


def _draw(figure: Any, item: Histogram) -> None:
    axes = figure.subplots()
    shares = np.full(len(item.relative), 100 / len(item.relative))
    edges = bin_edges(item.relative)
    axes.hist(
        item.relative,
        bins=edges.tolist(),
        weights=shares,
        color=plots.BLUE,
        edgecolor=plots.GROUND,
        linewidth=0.8,
    )
    for value, name, style in ((1.0, "mean", "-"), (item.p99, "99%", "--")):
        axes.axvline(value, color=plots.RED, linestyle=style, linewidth=1.4, label=name)
    axes.set_xlim(left=min(0.0, float(edges[0])))
    axes.set(xlabel="work of a sample, in means", ylabel="samples (%)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)


def bin_edges(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bin edges: around each value where there are few, else even ones from 0 on."""
    values = np.unique(relative)
    if len(values) > _BINS:
        return np.linspace(0.0, float(values[-1]), _BINS + 1)
    half = float(np.diff(values).min()) / 2 if len(values) > 1 else 0.05
    edges = np.concatenate([values - half, values + half])
    # Neighbours at the least distance share an edge; rounding must not make two of it.
    return np.array(sorted({round(float(edge), 9) for edge in edges}))
