"""Layouts: what the search of neighbours changes of a plan, and the units that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Order, OrderRule, Plan, Schedule, ScheduleKind, Unit
from mmplan.schema.workload import Pins
from mmplan.solvers.partitioner import allowed_tensor_degrees, module_stages
from mmplan.solvers.placement import Shape, make_unit, place_modules
from mmplan.solvers.problem import Problem, Request

Backwards = Literal["fused", "split", "even"]


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """How a unit runs, wherever it stands.

    Attributes:
        size: samples of its largest micro-batch.
        lead: forwards that its stages run ahead.
        sync_lead: forwards between the start and the end of a batch-sync.
        offset: devices of its group before its first.
        items: the ranks of a tensor-parallel group share out the items of samples.
        kept: the unit of a start whose blocks and micro-batches these are; None where they follow
            from the rest.
    """

    tp: int
    pp: int
    vpp: int
    dp: int
    size: int
    kind: ScheduleKind
    lead: int
    offset: int = 0
    sync_lead: int = 0
    items: bool = False
    kept: Unit | None = field(default=None, compare=False)

    @property
    def devices(self) -> int:
        """Of the unit."""
        return self.tp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Parts in which a group holds the parameters."""
        return 1 if self.items else self.tp

    @property
    def copies(self) -> int:
        """Of each parameter, whose gradients are summed."""
        return self.dp * self.tp // self.shards

    @property
    def end(self) -> int:
        """Devices of its group up to its last."""
        return self.offset + self.devices


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """What a neighbour is one change away from.

    Attributes:
        choices: of each unit.
        groups: units that share devices, whole or in part; ascending.
        zero: ZeRO stage of each unit; one for all that use the same parameters.
        backwards: whole, split, or split with as many micro-batches on all stages, where the
            workload leaves it to the plan.
        rule: of the order on shared devices.
        timed: that order knows what computes take.
        in_turn: tasks that run one after another.
    """

    choices: tuple[UnitChoice, ...]
    groups: tuple[tuple[int, ...], ...]
    zero: tuple[int, ...]
    backwards: Backwards = "fused"
    rule: OrderRule = "forward-first"
    timed: bool = True
    in_turn: tuple[str, ...] = ()

    def group_devices(self, group: Sequence[int]) -> int:
        """Devices of a group: up to the last of all units."""
        return max(self.choices[index].end for index in group)

    @property
    def devices(self) -> int:
        """Of all groups."""
        return sum(map(self.group_devices, self.groups))

    @property
    def shares_devices(self) -> bool:
        """Whether some units do."""
        return len(self.groups) < len(self.choices)

    def in_usual_order(self) -> PlanLayout:
        """The layout with the order that a plan has by default."""
        return replace(self, rule=Order().rule, timed=False)

    def group_of(self, index: int) -> tuple[int, ...]:
        """The group of a unit."""
        return next(group for group in self.groups if index in group)

    def cut_further(self, least: int) -> PlanLayout:
        """The layout with a least ZeRO stage."""
        return replace(self, zero=tuple(max(own, least) for own in self.zero))

    def with_choices(self, changed: Mapping[int, UnitChoice]) -> PlanLayout:
        """The layout with some units' choices changed."""
        choices = list(self.choices)
        for index, choice in changed.items():
            choices[index] = choice
        return replace(self, choices=tuple(choices))


class LayoutSpace:
    """The layouts of a request, in which each module of each task is one unit.

    Args:
        request: whose tasks are planned.

    Attributes:
        modules: of each unit its name, its task's problem, and the module.
        producers: of each unit, those before it.
        owners: of each unit, the module whose parameters it uses.
        least_zero: of each unit, the ZeRO stage that the workload asks for.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        problems = [Problem(request=request, task=task) for task in request.tasks.values()]
        several = len(problems) > 1
        self.modules = [
            (f"{own.task.name}.{module}" if several else module, own, module)
            for own in problems
            for module in own.task.modules
        ]
        at = {(own.task.name, module): i for i, (_, own, module) in enumerate(self.modules)}
        self.producers = [
            [at[own.task.name, p] for p in own.producers(module)] for _, own, module in self.modules
        ]
        self.owners = [
            request.workload.modules[module].share or module for _, _, module in self.modules
        ]
        self.least_zero = tuple(request.workload.zero_of(module) for _, _, module in self.modules)
        self.tensor_degrees = cache(self._tensor_degrees)
        self._starts, self._grid = cache(self._starts_of_groups), cache(self._grid_from)

    def plan_zero(self, layout: PlanLayout) -> int:
        """The ZeRO stage of a layout's plan, which units have that say nothing else."""
        return max(self.request.workload.train.zero, min(layout.zero))

    def layout_of(self, plan: Plan) -> PlanLayout | None:
        """The layout that is most like a plan; None where a module is in several units."""
        by_name = {(unit.task, unit.module): unit for unit in plan.units}
        if len(by_name) < len(plan.units):
            return None
        own = [by_name[problem.task.name, module] for _, problem, module in self.modules]
        groups: list[tuple[set[int], list[int]]] = []
        for index, unit in enumerate(own):
            ranks, members = set(unit.all_ranks), [index]
            for other in [g for g in groups if g[0] & ranks]:
                groups.remove(other)
                ranks, members = ranks | other[0], members + other[1]
            groups.append((ranks, members))
        first = {index: min(ranks) for ranks, members in groups for index in members}
        return PlanLayout(
            choices=tuple(self._choice_of(i, unit, first[i]) for i, unit in enumerate(own)),
            groups=tuple(sorted(tuple(sorted(members)) for _, members in groups)),
            zero=tuple(map(plan.zero_of, own)),
            in_turn=plan.in_turn,
        )

    def _choice_of(self, index: int, unit: Unit, first: int) -> UnitChoice:
        kind = unit.schedule.kind
        if kind == "wave":
            kind = "batch-sync" if self.modules[index][1].task.sync_batches else "1f1b"
        return UnitChoice(
            tp=unit.tp,
            pp=unit.pp,
            vpp=unit.vpp,
            dp=unit.dp,
            size=max(map(max, unit.microbatches)),
            kind=kind,
            lead=unit.schedule.lead,
            offset=min(unit.all_ranks) - first,
            sync_lead=unit.schedule.sync_lead,
            items=unit.items,
            kept=unit,
        )

    def starts_of(self, layout: PlanLayout) -> tuple[int, ...] | None:
        """Each unit's first rank; None where tensor-parallel groups would cross nodes."""
        starts = self._starts(layout.groups, tuple(self._shape(layout, g) for g in layout.groups))
        if starts is None:
            return None
        first = {
            i: start for group, start in zip(layout.groups, starts, strict=True) for i in group
        }
        return tuple(first[i] + choice.offset for i, choice in enumerate(layout.choices))

    def _starts_of_groups(
        self, groups: tuple[tuple[int, ...], ...], shapes: tuple[Shape, ...]
    ) -> tuple[int, ...] | None:
        named = {str(group): shape for group, shape in zip(groups, shapes, strict=True)}
        cluster, devices = self.request.cluster, self.request.devices
        places = place_modules(named, cluster=cluster, devices=devices)
        return None if places is None else tuple(places[name].members[0] for name in named)

    def units_of(self, layout: PlanLayout) -> tuple[Unit, ...] | None:
        """Its units on their ranks; None where tensor-parallel groups would cross nodes."""
        starts = self.starts_of(layout)
        if starts is None:
            return None
        units: list[Unit] = []
        for index, (choice, start) in enumerate(zip(layout.choices, starts, strict=True)):
            grid = self._grid(start, choice.dp, choice.pp, choice.tp)
            if grid is None:
                return None
            units.append(self._unit(index, layout, grid))
        return tuple(units)

    def _grid_from(self, start: int, dp: int, pp: int, tp: int) -> RankGrid | None:
        """Consecutive ranks; None where tensor-parallel groups would cross nodes."""
        grid, cluster = RankGrid.consecutive(start, dp, pp, tp), self.request.cluster
        return grid if all(cluster.keeps_together(own) for _, _, own in grid.groups()) else None

    def _shape(self, layout: PlanLayout, group: Sequence[int]) -> Shape:
        """(dp, pp, tp) of a grid with room for a group."""
        if len(group) == 1:
            own = layout.choices[group[0]]
            return own.dp, own.pp, own.tp
        tp = max(layout.choices[index].tp for index in group)
        return -(-layout.group_devices(group) // tp), 1, tp

    def _unit(self, index: int, layout: PlanLayout, grid: RankGrid) -> Unit:
        name, problem, module = self.modules[index]
        choice = layout.choices[index]
        splits = layout.backwards != "fused" and self.pins(index).split_backward == "auto"
        schedule = Schedule(
            kind=choice.kind,
            lead=choice.lead,
            sync_lead=choice.sync_lead if choice.kind == "batch-sync" else 0,
            split_backward=splits,
            even_in_flight=splits and layout.backwards == "even",
        )
        own = layout.zero[index]
        zero = None if own == self.plan_zero(layout) else own
        if choice.kept is not None:
            changes = {"name": name, "ranks": grid.ranks, "schedule": schedule, "zero": zero}
            return choice.kept.model_copy(update=changes)
        unit = make_unit(
            problem,
            module,
            grid=grid,
            blocks=module_stages(problem, module, choice.pp * choice.vpp),
            size=choice.size,
            pinned=self.pins(index).microbatch is not None,
            schedule=schedule,
        )
        changes = {"name": name, "vpp": choice.vpp, "items": choice.items, "zero": zero}
        return unit.model_copy(update=changes)

    def item_groups(self, index: int) -> list[int]:
        """Sizes of groups that may share out the items of a module's samples."""
        _, problem, module = self.modules[index]
        if not self.request.workload.modules[module].items:
            return []
        if 1 not in problem.costs.tp_options(task=problem.task.name, module=module):
            return []
        node = self.request.cluster.devices_per_node
        return [ranks for ranks in range(2, node + 1) if node % ranks == 0]

    def _tensor_degrees(self, index: int) -> list[int]:
        """Those that a module's profile has and its pins allow."""
        return allowed_tensor_degrees(*self.modules[index][1:])

    def pins(self, index: int) -> Pins:
        """The workload's, of a unit's module."""
        return self.request.workload.modules[self.modules[index][2]].plan
