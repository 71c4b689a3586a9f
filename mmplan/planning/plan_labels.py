"""Plans in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from mmplan.schema.plan import Plan

# How the label of a plan ends that runs several modules on one device.
SHARED = ", shared devices)"


def labelled(plan: Plan) -> str:
    """Degrees and largest micro-batch of every unit, and whether units share devices."""
    degrees = ", ".join(
        f"{unit.name} {unit.dp}x{unit.pp}x{unit.tp}" + (f" vpp {unit.vpp}" if unit.vpp > 1 else "")
        for unit in plan.units
    )
    sizes = [
        max((max(row, default=0) for row in unit.microbatches), default=0) for unit in plan.units
    ]
    shown = sizes[:1] if len(set(sizes)) == 1 else sizes
    microbatches = f"micro-batch {'/'.join(map(str, shown))}"
    return f"{degrees}, {microbatches} (dp x pp x tp{SHARED if shares_devices(plan) else ')'}"


def shares_devices(plan: Plan) -> bool:
    """Whether some device runs several modules."""
    ranks = [rank for unit in plan.units for rank in set(unit.all_ranks)]
    return len(set(ranks)) < len(ranks)


def idle_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks that no unit uses."""
    used = {rank for unit in plan.units for rank in unit.all_ranks}
    return tuple(rank for rank in range(plan.devices) if rank not in used)


def representatives(plan: Plan) -> list[int]:
    """A rank of each stage's replicas: every unit's first replica, then every unit's second, ..."""
    ranks = (
        group[0]
        for d in range(max(unit.dp for unit in plan.units))
        for unit in plan.units
        if d < unit.dp
        for group in unit.ranks[d]
    )
    return list(dict.fromkeys(ranks))


def spans(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``3, 8-15``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ", ".join("-".join(map(str, span)) for span in found)
