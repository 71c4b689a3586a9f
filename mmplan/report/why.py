"""Why this plan: the explanation, as a section of the page."""

from __future__ import annotations

from mmplan.costs import check_cluster
from mmplan.errors import MMPlanError
from mmplan.predict import costs_of
from mmplan.report import markup
from mmplan.report.explain import explain
from mmplan.report.source import ReportData
from mmplan.simulate import simulate
from mmplan.whatif import part_effects


def why_section(data: ReportData) -> str:
    """What binds the plan, what waits, what it was chosen over."""
    plan, profile = data.plan, data.profile
    if profile is None:
        return markup.note(f"Not explained: {data.profile_note}")
    try:
        check_cluster(profile, plan.cluster)
        costs = costs_of(plan, profile)
        simulation = simulate(costs.program, costs)
        reasons = explain(plan, profile, simulation, part_effects(plan, profile))
    except MMPlanError as error:
        return markup.note(f"Not explained: {error.message}.")
    rows = [(reason.topic, reason.text) for reason in reasons]
    return markup.table(("", ""), rows, label="Why this plan", head=False) + markup.note(
        "mmplan explain PLAN --replan says what other devices, links and batches would give."
    )
