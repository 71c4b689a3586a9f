"""What each module makes of its devices, as a table with bars."""

from __future__ import annotations

from collections.abc import Sequence

from mmplan.report import format as fmt
from mmplan.report import markup
from mmplan.utilisation import ModuleUse

_EXPLAINED = (
    "Utilisation is model FLOPs over peak FLOP/s times time: while its devices compute the module, "
    "and over the whole step, in which they also wait, communicate, and compute other modules."
)


def utilisation_table(named: Sequence[tuple[str, Sequence[ModuleUse]]]) -> str:
    """Modules of one or several plans.

    Args:
        named: plans' names with their modules; a single one needs no name.
    """
    columns = ("module", ">devices", ">busy with it", "utilisation while busy", "of the step")
    several = len(named) > 1
    rows = [
        (
            *((name,) if several else ()),
            use.module,
            f"{len(use.ranks)}",
            fmt.percent(use.busy_share),
            _meter(use.while_busy),
            _meter(use.of_step),
        )
        for name, uses in named
        for use in uses
    ]
    if not any(use.flops for _, uses in named for use in uses):
        return markup.note("The profile says no FLOPs: utilisation is not known.")
    heads = ("plan", *columns) if several else columns
    return markup.note(_EXPLAINED) + markup.table(heads, rows, label="Utilisation by module")


def _meter(share: float) -> markup.Markup:
    """A share as a bar and as a figure."""
    width = min(1.0, share) * 100
    bar = markup.element(
        "span", markup.element("span", "", style=f"width:{width:.1f}%"), class_="meter"
    )
    return markup.Markup(bar + markup.esc(fmt.percent(share)))
