"""Why this plan: the explanation, as a section of the page."""

from __future__ import annotations

from mmplan.report import markup
from mmplan.report.explain import explain
from mmplan.report.source import ReportData


def why_section(data: ReportData) -> str:
    """What binds the plan, what waits, what it was chosen over."""
    plan, profile = data.plan, data.profile
    if profile is None or data.simulation is None:
        return markup.note(f"Not explained: {data.profile_note or data.simulation_note}")
    reasons = explain(plan, profile, data.simulation, data.effects, held=data.held)
    rows = [(reason.topic, reason.text) for reason in reasons]
    return markup.table(("", ""), rows, label="Why this plan", head=False)
