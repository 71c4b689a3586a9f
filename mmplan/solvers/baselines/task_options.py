"""Ways to run one whole task on one grid of devices: its modules colocated, TP x DP x PP.

They are the layouts and splits of :mod:`.one_grid`, with what tasks that share devices need to
know of each other: activations by device, and where parameters are held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mmplan.arrays import Floats
from mmplan.schema.plan import Unit
from mmplan.solvers.baselines.grid_search import allowed
from mmplan.solvers.baselines.one_grid import Layout, OneGrid, Split
from mmplan.solvers.baselines.shared_parameters import Holding, Ledger
from mmplan.solvers.pareto import staircase
from mmplan.solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """What a device makes for one task; tasks that run in turn share groups of one name.

    Attributes:
        groups: for collectives, by what tells them apart.
        gathers: one more for each cross-sample loss.
        directions: of messages.
    """

    groups: frozenset[Hashable]
    gathers: int
    directions: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskOption:
    """One way to run a task.

    Attributes:
        time_s: a step's forwards, backwards, messages and syncs.
        reduce_s: its reductions alone; None where ``time_s`` has them.
        held_bytes: [D] activations of each device.
        communicators: that its devices make.
        holdings: numbers in the ledger, by the owner of the parameters.
        shape: (tp, pipeline positions, dp).
        make: its units.
    """

    task: str
    time_s: float
    reduce_s: float | None
    held_bytes: Floats
    communicators: Communicators
    holdings: dict[str, frozenset[int]]
    shape: tuple[int, int, int]
    make: Callable[[], tuple[Unit, ...]] = field(repr=False)

    @property
    def alone_s(self) -> float:
        """A step of this task, if it were the only one."""
        return self.time_s + (self.reduce_s or 0.0)


Replicas = Callable[[OneGrid], Iterable[int]]


def halvings(grid: OneGrid) -> Iterator[int]:
    """As many replicas as devices and samples allow; without a pipeline half of them, and so on."""
    count = grid.most
    while count:
        yield count
        count = count // 2 if grid.layout.positions == 1 else 0


def grid_options(
    problem: Problem, ledger: Ledger, layouts: Iterable[Layout], replicas: Replicas
) -> list[TaskOption]:
    """All that the pins allow, of each set of parameters and devices only what is undominated.

    Of options that hold the same parameters on the same devices one is left out where another is
    no slower and holds no more.
    """
    found: list[TaskOption] = []
    for layout in layouts:
        grid = OneGrid(problem, layout)
        if not grid.most or not allowed(problem, layout):
            continue
        for dp in replicas(grid):
            splits = list(grid.splits([dp]))
            if splits:
                # Layouts for all devices have no module that a TP group holds whole.
                holdings = _holdings(problem, ledger, grid, splits[0])
                options = (_option(grid, split, holdings) for split in splits)
                found += staircase(options, lambda o: (o.time_s, float(o.held_bytes.max())))
    return found


def _option(grid: OneGrid, split: Split, holdings: dict[str, frozenset[int]]) -> TaskOption:
    problem = grid.problem
    return TaskOption(
        task=problem.task.name,
        time_s=grid.compute_s(split) + problem.rounds * grid.sync_s(split),
        reduce_s=grid.reduce_s(split.dp, split.inner_dp),
        held_bytes=_by_device(grid, split, problem.devices),
        communicators=_communicators(problem, grid.layout, split.dp),
        holdings=holdings,
        shape=(grid.layout.tp, grid.layout.positions, split.dp),
        make=lambda: grid.units(split),
    )


def _holdings(
    problem: Problem, ledger: Ledger, grid: OneGrid, split: Split
) -> dict[str, frozenset[int]]:
    specs = problem.request.workload.modules
    return by_owner(
        ledger,
        (
            Holding(
                task=problem.task.name,
                module=module,
                owner=specs[module].share or module,
                blocks=place.cuts,
                grid=grid.ranks(module, split),
            )
            for module, place in grid.layout.places.items()
        ),
    )


def by_owner(ledger: Ledger, holdings: Iterable[Holding]) -> dict[str, frozenset[int]]:
    """Numbers of the holdings of every owner."""
    found: dict[str, set[int]] = {}
    for item in holdings:
        found.setdefault(item.owner, set()).add(ledger.number(item))
    return {owner: frozenset(own) for owner, own in found.items()}


def _communicators(problem: Problem, layout: Layout, dp: int) -> Communicators:
    """A group of all devices, TP groups, reductions, and the ranks of the losses."""
    shape, several = (layout.tp, layout.positions, dp), problem.devices > 1
    names = {"all": several, ("tp", layout.tp): layout.tp > 1, ("sum", shape): dp > 1}
    syncs = several * len(problem.task.sync_batches)
    names["loss", shape] = syncs > 0 and layout.tp * dp < problem.devices
    return Communicators(
        groups=frozenset(name for name, needed in names.items() if needed),
        gathers=syncs,
        directions=4 * (layout.positions > 1),
    )


def _by_device(grid: OneGrid, split: Split, devices: int) -> Floats:
    """[D] bytes of activations."""
    tp, positions = grid.layout.tp, grid.layout.positions
    at_position = np.array(grid.active_bytes(split))
    held = np.zeros(devices)
    used = split.dp * positions * tp
    held[:used] = np.tile(np.repeat(at_position, tp), split.dp)
    return held


def named(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """The units of one task of several, their names told apart by the task's."""
    return tuple(u.model_copy(update={"name": f"{u.task}.{u.module}"}) for u in units)
