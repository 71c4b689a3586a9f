"""Utilisation of devices by each module: model FLOPs over peak FLOP/s times time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mmplan.program.instructions import Compute
from mmplan.simulation.step import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUse:
    """One module's work and devices in a simulated step.

    Attributes:
        flops: model FLOPs of the step.
        ranks: those that compute some of it, ascending.
        busy_s: device-seconds in its computes, over all ranks.
        iteration_s: of the step.
        peak_flops: of a device, FLOP/s.
    """

    module: str
    flops: float
    ranks: tuple[int, ...]
    busy_s: float
    iteration_s: float
    peak_flops: float

    @property
    def while_busy(self) -> float:
        """Utilisation of its devices while they compute it."""
        return _share(self.flops, self.peak_flops * self.busy_s)

    @property
    def of_step(self) -> float:
        """Utilisation of its devices over the whole step; other modules on them count as idle."""
        return _share(self.flops, self.peak_flops * self.iteration_s * len(self.ranks))

    @property
    def busy_share(self) -> float:
        """Share of the step in which its devices compute it."""
        return _share(self.busy_s, self.iteration_s * len(self.ranks))


def module_uses(
    simulation: Simulation, peak_flops: float, representatives: Mapping[int, int] | None = None
) -> list[ModuleUse]:
    """Every module's use of its devices, most work first.

    Args:
        simulation: of a step.
        peak_flops: of a device, FLOP/s.
        representatives: of every used rank, where only representatives were simulated; see
            :func:`mmplan.simulation.symmetry.simulated`.
    """
    if representatives is None:
        representatives = {rank: rank for rank, used in enumerate(simulation.used) if used}
    represented: defaultdict[int, list[int]] = defaultdict(list)
    for rank, representative in representatives.items():
        represented[representative].append(rank)
    busy_s: defaultdict[str, float] = defaultdict(float)
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for representative, same in represented.items():
        for module, seconds in _module_seconds(simulation, representative).items():
            busy_s[module] += len(same) * seconds
            ranks[module] += same
    flops = simulation.costs.module_flops()
    return [
        ModuleUse(
            module=module,
            flops=flops.get(module, 0.0),
            ranks=tuple(sorted(ranks[module])),
            busy_s=busy_s[module],
            iteration_s=simulation.iteration_s,
            peak_flops=peak_flops,
        )
        for module in sorted(busy_s, key=lambda name: -busy_s[name])
    ]


def _module_seconds(simulation: Simulation, rank: int) -> dict[str, float]:
    """Seconds that a rank computes each of its modules."""
    found: defaultdict[str, float] = defaultdict(float)
    stages = simulation.program.stages
    clocks = simulation.clocks
    row = simulation.program.instructions[rank]
    for item, start_s, end_s in zip(row, clocks.start[rank], clocks.end[rank], strict=True):
        if isinstance(item, Compute):
            found[stages[item.stage].module] += end_s - start_s
    return dict(found)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
