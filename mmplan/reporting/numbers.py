"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mmplan.costs.hardware import load_hardware
from mmplan.program.communicators import CommunicatorCount
from mmplan.schema.cluster import Device
from mmplan.schema.plan import Plan, Unit
from mmplan.wording import SIZE_UNITS as SIZE_UNITS
from mmplan.wording import counted, rank_ranges
from mmplan.wording import size as size

# Rounding errors of a fit are below it, real times are far above.
_LEAST_S = 1e-11
# Steps that differ by less are called equal.
_SAME = 0.005
# Stages whose blocks are listed one by one.
_MOST_STAGES = 4


def seconds(value: float) -> str:
    """Seconds with the unit that fits: ``12.3 ms``; rounding errors are 0."""
    value = 0.0 if abs(value) < _LEAST_S else value
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(value) < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def measured(value: float | None) -> str:
    """Seconds of a trial, a dash where there was none."""
    return "–" if value is None else seconds(value)


def count(value: float) -> str:
    """A large number: ``1.2 B``."""
    return _scaled(value, ("", " k", " M", " B", " T", " P"))


def flops(value: float) -> str:
    """Operations, which are counted in giga where numbers are in billions: ``833 G``."""
    return _scaled(value, ("", " k", " M", " G", " T", " P"))


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{units[-1]}"


def percent(value: float) -> str:
    """A share: ``12.3%``."""
    return f"{100 * value:.1f}%"


def mfu(value: float) -> str:
    """The model's FLOP/s over the devices' peak; more than that is a fault of the peak."""
    return percent(value) if value <= 1 else "over 100%"


def mfu_fault(value: float, device: Device) -> str | None:
    """What is wrong where a device would do more than its peak."""
    if value <= 1:
        return None
    return (
        f"MFU over 100%: the step does {value:.2g} times the peak_flops of a {device.name} "
        f"({flops(device.peak_flops)}FLOP/s); correct it in the cluster, or profile again: the "
        "times may be those of another device"
    )


def ranks(values: Sequence[int]) -> str:
    """Ranks with runs joined: ``0-3,8``; "none" without any."""
    return rank_ranges(values) or "none"


def ranks_words(values: Sequence[int]) -> str:
    """Ranks in a sentence: ``rank 3``, ``ranks 0-3,8``."""
    return f"{'rank' if len(set(values)) == 1 else 'ranks'} {ranks(values)}"


def shortened(name: str, most: int) -> str:
    """At most ``most`` characters of a name; an ellipsis ends one that is cut."""
    return name if len(name) <= most else name[: max(1, most - 1)] + "…"


def first_of(names: Sequence[str], most: int, *, separator: str, rest: str) -> str:
    """The first names joined; ``rest`` stands for those beyond ``most``."""
    return separator.join([*names[:most], rest] if len(names) > most else names)


def blocks(unit: Unit) -> str:
    """The blocks of each stage; of many, how many they have: ``0-24 in 24x1``."""
    ranges, sizes = unit.blocks, [end - start for start, end in unit.blocks]
    if len(ranges) <= _MOST_STAGES or sum(sizes) != ranges[-1][1] - ranges[0][0]:
        return ", ".join(f"{start}-{end}" for start, end in ranges)
    return f"{ranges[0][0]}-{ranges[-1][1]} in {repeated(sizes)}"


def microbatch_sizes(unit: Unit) -> list[str]:
    """The different rows of micro-batches that replicas of a unit have."""
    return list(dict.fromkeys(repeated(row) for row in unit.microbatches))


def repeated(values: Sequence[int]) -> str:
    """Sizes with repeats joined: ``4x16+2``."""
    counts = [(len(list(run)), value) for value, run in groupby(values)]
    return "+".join(str(value) if n == 1 else f"{n}x{value}" for n, value in counts)


def communicators(most: CommunicatorCount, device: Device) -> str:
    """The most communicators of a rank, their memory and their start, in one sentence."""
    kinds = f"{most.collectives} of collectives and {most.channels} of messages"
    parts = [f"rank {most.rank} has the most communicators, {most.total} ({kinds})"]
    if device.communicator_bytes:
        parts.append(size(most.total * device.communicator_bytes))
    if device.communicator_start_s:
        parts.append(f"{seconds(most.total * device.communicator_start_s)} to make")
    return ", ".join(parts)


def held_multiprocessors(held: int, device: Device) -> str:
    """Multiprocessors of a GPU that communication may hold at once; of how many, if known."""
    known = load_hardware().known(device).multiprocessors
    of_all = (
        counted(held, "multiprocessor") if known is None else f"{held} of {known} multiprocessors"
    )
    return f"messages and collectives hold at most {of_all} of a rank at once"


def held_too_many(held: int, device: Device) -> str:
    """What to do where communication may hold all multiprocessors; empty elsewhere."""
    known = load_hardware().known(device).multiprocessors
    if known is None or held < known:
        return ""
    return (
        "a compute may wait for what waits for it: lower NCCL_MAX_CTAS, and see "
        "`mmlaunch verify PLAN --strict`"
    )


def gain(plan: Plan) -> str:
    """The plan against training without a planner, both simulated; empty where it is not known."""
    ordinary, now_s = plan.solver.ordinary, plan.predicted.iteration_s
    if ordinary is None or not now_s:
        return ""
    times = ordinary.iteration_s / now_s
    return (
        ("as fast as" if abs(times - 1) < _SAME else f"{times:.2f} times as fast as")
        + f" the ordinary way ({seconds(ordinary.iteration_s)} a step, every module with the same "
        + f"degrees: {ordinary.label.partition(':')[0]})"
    )
