"""Output that several commands have in common."""

from __future__ import annotations

from pathlib import Path

from mmplan.errors import InvalidInputError
from mmplan.report.terminal.console import Output
from mmplan.report.terminal.data_tables import work_grids
from mmplan.report.terminal.tables import profile_grids, timeline_lines
from mmplan.schema.agreement import says_its_model
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, unused_modules
from mmplan.simulation.predict import simulate_plan


def warn_unused(out: Output, workload: Workload) -> None:
    """A line for each module that no task uses."""
    for name in unused_modules(workload):
        out.hint(f"module {name} is used by no task: ignored")


def warn_unnamed(out: Output, profile: Profile) -> None:
    """A line for a profile that nothing ties to the workload's model."""
    if not says_its_model(profile):
        out.hint(f"profile {profile.name} does not say of which model it is: it is believed")


def show_profile(out: Output, profile: Profile) -> None:
    """Fits, modules, and the work of the data."""
    out.grids(*profile_grids(profile), *work_grids(profile))


def show_timeline(out: Output, plan: Plan, path: Path) -> None:
    """A row of letters per rank, or why there is none."""
    try:
        simulated = simulate_plan(plan, path)
    except InvalidInputError as error:
        out.hint(f"no timeline: {error.message}")
        return
    for line in timeline_lines(simulated):
        out.text(line)
