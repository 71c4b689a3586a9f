"""report.html: one self-contained page about a plan, or about a run of it.

A section is a function of :class:`ReportData` that returns an HTML fragment. The page
loads nothing: style, script, pictures and data are inside, and its content security policy
forbids the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmplan.report.explain import why_section
from mmplan.report.html.document import PageSection, document
from mmplan.report.sections.data import work_section
from mmplan.report.sections.memory import memory_section
from mmplan.report.sections.overview import overview_section
from mmplan.report.sections.plan_tables import (
    provenance_section,
    solver_section,
    units_section,
)
from mmplan.report.sections.profile import profile_section
from mmplan.report.sections.scaling import scaling_pictures
from mmplan.report.sections.timelines import timeline_section
from mmplan.report.sections.topology import topology_section
from mmplan.report.sections.training import training_section
from mmplan.report.sections.utilisation import modules_section
from mmplan.report.sections.what_if import sensitivity_section, with_replans
from mmplan.report.source import ReportData, load_source
from mmplan.schema.base import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        anchor: its id, for links.
        build: makes the fragment below the heading.
    """

    anchor: str
    title: str
    build: Callable[[ReportData], str]


SECTIONS = (
    Section(anchor="overview", title="Overview", build=overview_section),
    Section(anchor="cluster", title="The plan on the cluster", build=topology_section),
    Section(anchor="units", title="Units", build=units_section),
    Section(anchor="why", title="Why this plan", build=why_section),
    Section(anchor="modules", title="What each module makes of its devices", build=modules_section),
    Section(anchor="sensitivity", title="What would change it", build=sensitivity_section),
    Section(
        anchor="solver",
        title="How the plan was found",
        build=lambda data: solver_section(data) + scaling_pictures(data),
    ),
    Section(anchor="timelines", title="One step, predicted above measured", build=timeline_section),
    Section(anchor="training", title="Loss and iteration time", build=training_section),
    Section(anchor="memory", title="Memory per rank", build=memory_section),
    Section(anchor="profile", title="Profile and its fits", build=profile_section),
    Section(anchor="work", title="Work of the data", build=work_section),
    Section(anchor="provenance", title="Where this is from", build=provenance_section),
)

# Sections that a plan alone has nothing for.
OF_RUNS = frozenset({"training"})


def write_report(
    source: Path, output: Path, *, progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Write the page of a plan file or of a run's folder.

    Args:
        source: the one or the other.
        output: its file.
        progress: if given, other settings are planned too, and it hears how many of how many are.

    Raises:
        InvalidInputError: ``source`` is neither of the two, or its plan is faulty; or the workload
            that other settings need is gone.
        UnfitEnvironmentError: the page cannot be written.
    """
    data = load_source(source)
    if progress is not None:
        data = with_replans(data, progress)
    write_text(output, render(data))


def render(data: ReportData) -> str:
    """The whole page."""
    parts = [
        PageSection(anchor=section.anchor, title=section.title, content=section.build(data))
        for section in SECTIONS
        if data.run is not None or section.anchor not in OF_RUNS
    ]
    kind = "plan" if data.run is None else "run"
    return document(data.plan.name, f"mmplan report of a {kind}", parts)
