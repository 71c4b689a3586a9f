"""report.html: one self-contained page about a plan, or about a run of it.

A section is a function of :class:`ReportData` that returns an HTML fragment. The page
loads nothing: style, script, pictures and data are inside, and its content security policy
forbids the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmplan.reporting.explain import why_section
from mmplan.reporting.html import markup
from mmplan.reporting.sections.data import work_section
from mmplan.reporting.sections.memory import memory_section
from mmplan.reporting.sections.overview import overview_section
from mmplan.reporting.sections.plan_tables import provenance_section, solver_section, units_section
from mmplan.reporting.sections.profile import profile_section
from mmplan.reporting.sections.timelines import timeline_section
from mmplan.reporting.sections.topology import topology_section
from mmplan.reporting.sections.training import training_section
from mmplan.reporting.sections.utilisation import modules_section
from mmplan.reporting.sections.what_if import sensitivity_section, with_replans
from mmplan.reporting.source import ReportData
from mmplan.schema.base import write_text

# Anchor to the heading and the markup below it, in the order of the page.
SECTIONS: dict[str, tuple[str, Callable[[ReportData], str]]] = {
    "overview": ("Overview", overview_section),
    "cluster": ("The plan on the cluster", topology_section),
    "units": ("Units", units_section),
    "why": ("Why this plan", why_section),
    "modules": ("What each module makes of its devices", modules_section),
    "sensitivity": ("What would change it", sensitivity_section),
    "solver": ("How the plan was found", solver_section),
    "timelines": ("One step, predicted above measured", timeline_section),
    "training": ("Loss and iteration time", training_section),
    "memory": ("Memory per rank", memory_section),
    "profile": ("Profile and its fits", profile_section),
    "work": ("Work of the data", work_section),
    "provenance": ("Where this is from", provenance_section),
}


def write_report(
    data: ReportData, output: Path, *, progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Write the page of a plan or of a run.

    Args:
        data: of :func:`mmplan.reporting.source.load_source`.
        output: the page's file.
        progress: if given, other settings are planned too; see :func:`with_replans`.

    Raises:
        InvalidInputError: the workload that other settings need is gone.
        UnfitEnvironmentError: the page cannot be written.
    """
    if progress is not None:
        data = with_replans(data, progress)
    write_text(output, render(data))


def render(data: ReportData) -> str:
    """The page as HTML."""
    sections = [
        markup.Section(anchor, title, content(data))
        for anchor, (title, content) in SECTIONS.items()
        if data.run is not None or anchor != "training"
    ]
    kind = "plan" if data.run is None else "run"
    return markup.document(data.plan.name, f"mmplan report of a {kind}", sections)
