"""Results in the cells of tables."""

from __future__ import annotations

from mmplan.simulation.utilisation import ModuleUse
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
    plan, flops = result.plan, result.costs.module_flops()
    ranks: dict[str, set[int]] = {}
    for unit in plan.units:
        ranks.setdefault(unit.module, set()).update(unit.all_ranks)
    uses = [
        ModuleUse(
            module=module,
            flops=flops[module],
            ranks=tuple(sorted(own)),
            busy_s=0.0,  # what it does while busy is not asked
            iteration_s=plan.predicted.iteration_s,
            peak_flops=plan.cluster.device.peak_flops,
        )
        for module, own in ranks.items()
    ]
    return ", ".join(f"{use.module} {use.of_step:.1%}" for use in uses)
