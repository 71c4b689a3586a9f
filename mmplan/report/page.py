"""report.html: one self-contained page about a plan, or about a run of it.

A section is a function of :class:`ReportData` that returns an HTML fragment. The page
loads nothing: style, script, pictures and data are inside, and its content security policy
forbids the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mmplan.report import markup
from mmplan.report.fits import profile_section
from mmplan.report.overview import overview_section
from mmplan.report.scaling import scaling_pictures
from mmplan.report.sections import (
    memory_section,
    provenance_section,
    solver_section,
    units_section,
)
from mmplan.report.source import ReportData, load_source
from mmplan.report.timelines import timeline_section
from mmplan.report.topology import topology_section
from mmplan.report.training import training_section
from mmplan.report.why import why_section
from mmplan.report.work import work_section
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
    Section(
        anchor="solver",
        title="How the plan was found",
        build=lambda data: solver_section(data) + scaling_pictures(data),
    ),
    Section(anchor="timelines", title="One step, predicted above measured", build=timeline_section),
    Section(anchor="training", title="Loss and iteration time", build=training_section),
    Section(anchor="memory", title="Memory per rank, predicted", build=memory_section),
    Section(anchor="profile", title="Profile and its fits", build=profile_section),
    Section(anchor="work", title="Work of the data", build=work_section),
    Section(anchor="provenance", title="Where this is from", build=provenance_section),
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(source: Path, output: Path) -> None:
    """Write the page of a plan file or of a run's folder.

    Raises:
        InvalidInputError: ``source`` is neither of the two, or its plan is faulty.
        UnfitEnvironmentError: the page cannot be written.
    """
    write_text(output, render(load_source(source)))


def render(data: ReportData) -> str:
    """The whole page."""
    sections = "".join(_section(section, data) for section in SECTIONS)
    body = _header(data) + markup.element("main", sections) + _script()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{markup.text('title', f'{data.plan.name}: mmplan report')}"
        f"<style>{_asset('page.css')}</style></head><body>{body}</body></html>\n"
    )


def _section(section: Section, data: ReportData) -> str:
    heading = markup.text("h2", section.title, id=f"{section.anchor}-title")
    return markup.element(
        "section",
        heading + section.build(data),
        id=section.anchor,
        aria_labelledby=f"{section.anchor}-title",
    )


def _header(data: ReportData) -> str:
    kind = "plan" if data.run is None else "run"
    links = "".join(
        markup.element("li", markup.text("a", s.title.partition(",")[0], href=f"#{s.anchor}"))
        for s in SECTIONS
    )
    return markup.element(
        "header",
        markup.text("h1", data.plan.name)
        + markup.text("p", f"mmplan report of a {kind}", class_="kind")
        + markup.element("nav", markup.element("ul", links), aria_label="Sections"),
    )


def _script() -> str:
    return f"<script>{_asset('timeline.js')}</script>"


def _asset(name: str) -> str:
    return files("mmplan.report").joinpath(name).read_text(encoding="utf-8")
