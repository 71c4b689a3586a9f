"""Results in the cells of tables."""

from __future__ import annotations

from reproduction.jobs import Result

NONE = "does not fit"


def seconds(result: Result) -> str:
    """Simulated time of a step."""
    return f"{result.plan.predicted.iteration_s:.3g} s" if result.plan else NONE


def rate(result: Result) -> str:
    """Simulated samples per second."""
    return f"{result.plan.predicted.samples_per_s:.4g}" if result.plan else NONE


def ratio(theirs: Result, ours: Result) -> str:
    """Their time for a sample over ours; above 1 ours is faster."""
    if theirs.samples_per_s is None or ours.samples_per_s is None:
        return NONE if theirs.plan is None else "-"
    return f"{ours.samples_per_s / theirs.samples_per_s:.2f}"


def percent(share: float) -> str:
    """A share in percent."""
    return f"{share:.1%}"


def degrees(result: Result) -> str:
    """dp × pp × tp of every unit."""
    if result.plan is None:
        return "-"
    return ", ".join(
        f"{unit.name} {unit.dp}×{unit.pp}×{unit.tp}" + (f" vpp {unit.vpp}" if unit.vpp > 1 else "")
        for unit in result.plan.units
    )


def utilisations(result: Result) -> str:
    """Every module's useful FLOP/s over the peak of its devices."""
    if result.plan is None:
        return "-"
    plan = result.plan
    flops = result.costs.module_flops()
    ranks: dict[str, set[int]] = {}
    for unit in plan.units:
        ranks.setdefault(unit.module, set()).update(unit.all_ranks)
    peak = plan.cluster.device.peak_flops * plan.predicted.iteration_s
    return ", ".join(f"{m} {flops[m] / (len(own) * peak):.1%}" for m, own in ranks.items())
