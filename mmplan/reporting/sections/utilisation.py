"""What each module makes of its devices, as a table with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.source import ReportData
from mmplan.simulation.utilisation import ModuleUse, module_uses
from mmplan.wording import counted

_EXPLAINED = (
    "Utilisation is model FLOPs over peak FLOP/s times time: while its devices compute the module, "
    "and over the whole step, in which they also wait, communicate, and compute other modules."
)
_UNKNOWN = "The profile says no FLOPs: utilisation is not known."


def modules_section(data: ReportData) -> str:
    """The plan's modules."""
    if data.simulation is None:
        return markup.note(f"Not known: {data.simulation_note}.")
    return utilisation_table(module_uses(data.simulation, data.plan.cluster.device.peak_flops))


def utilisation_table(uses: Sequence[ModuleUse]) -> str:
    """The modules of a plan."""
    if not any(use.flops for use in uses):
        return markup.note(_UNKNOWN)
    columns = ("module", ">devices", ">busy with it", "utilisation while busy", "of the step")
    rows = [
        (
            use.module,
            f"{len(use.ranks)}",
            fmt.percent(use.busy_share),
            _meter(use.while_busy),
            _meter(use.of_step),
        )
        for use in uses
    ]
    return markup.note(_EXPLAINED) + markup.table(columns, rows, label="Utilisation by module")


def utilisation_matrix(plans: Mapping[str, Sequence[ModuleUse]]) -> str:
    """The modules of several plans, a column for each plan."""
    if not any(use.flops for uses in plans.values() for use in uses):
        return markup.note(_UNKNOWN)
    modules = dict.fromkeys(use.module for uses in plans.values() for use in uses)
    by_name = [{use.module: use for use in uses} for uses in plans.values()]
    rows = [(module, *(_cell(found.get(module)) for found in by_name)) for module in modules]
    text = "Bar and first figure: while busy; second: of the step; third: devices."
    return markup.note(f"{_EXPLAINED} {text}") + markup.table(
        ("module", *plans), rows, label="Utilisation by module and plan"
    )


def _cell(use: ModuleUse | None) -> markup.Markup:
    if use is None:
        return markup.Markup("–")
    below = f"{fmt.percent(use.of_step)}, {counted(len(use.ranks), 'device')}"
    return markup.Markup(_meter(use.while_busy) + markup.text("span", below, class_="below"))


def _meter(share: float) -> markup.Markup:
    """A share as a bar and as a figure."""
    width = min(1.0, share) * 100
    bar = markup.element(
        "span", markup.element("span", "", style=f"width:{width:.1f}%"), class_="meter"
    )
    return markup.Markup(bar + markup.esc(fmt.percent(share)))
