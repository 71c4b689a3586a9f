"""Changes of a plan that are tried in simulation: what no formula of one solver sees.

A *layout* is what such a change acts on: of each unit its degrees, micro-batch and lead, which
units share devices, and how the whole runs: backwards, order, ZeRO stage. The search starts from
the layouts of the solvers' best plans. It tries those first of which an estimate promises most, and
goes on from each that is about as good as the best so far: by one change, then by two. Where memory
refuses a layout, the next ZeRO stage is tried. Last come *small* layouts, whose units share all
devices in many parts: changes may lead to them only by way of what does not fit. The search begins
with these where no solver has a plan that fits.

The estimate is that of a pipeline: the work of the busiest device, and the path of one micro-batch
through all others. A layout whose busiest device alone takes as long as the best plan's step is not
simulated.

Shape suffixes used in this file: P = pipeline positions; R = devices of a group.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, cast, get_args

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.cost_model import CostModel
from mmplan.planning.measured_trials import rounded
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.cluster import Cluster
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Order, OrderRule, Plan, Schedule, ScheduleKind, Unit
from mmplan.schema.workload import Pins
from mmplan.solvers.cost_table import reduction_s
from mmplan.solvers.partitioner import allowed_tensor_degrees, module_stages
from mmplan.solvers.placement import make_unit, place_modules
from mmplan.solvers.problem import Candidate, Problem, Request
from mmplan.solvers.sample_split import cut, microbatch_sizes
from mmplan.solvers.search_budget import SearchBudget

# The best different layouts, from which the search starts. Chosen by hand, as all that follows.
_STARTS = 3
# The search goes on from layouts that take up to this times the best step.
_NEAR = 1.02
# Pairs of changes are looked at once this many layouts in a row gained nothing.
_PATIENCE = 12
# Forwards that a unit may run ahead of its consumer's need.
_MOST_LEAD = 3
_MOST_SYNC_LEAD = 2
_MOST_ZERO = 3
# The search ends after so many layouts in a row that gained nothing.
_GIVE_UP = 100
# Estimates are paid for too: seconds of a quiet core.
_ESTIMATE_S = 5e-5
# A plan with split backwards must shorten the step to less than this share.
SHORTER = 0.99
# Steps are equal but for rounding.
_SAME = 1 + 1e-9


Backwards = Literal["fused", "split", "even"]


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """How a unit runs, wherever it stands.

    Attributes:
        size: samples of its largest micro-batch.
        offset: devices of its group before its first.
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
    kept: Unit | None = field(default=None, compare=False)

    @property
    def devices(self) -> int:
        """Of the unit."""
        return self.tp * self.pp * self.dp

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
        zero: ZeRO stage.
        backwards: whole, split, or split with as many micro-batches on all stages, where the
            workload leaves it to the plan.
        sync_lead: forwards between the start and the end of a batch-sync.
        rule: of the order on shared devices.
        in_turn: tasks that run one after another.
    """

    choices: tuple[UnitChoice, ...]
    groups: tuple[tuple[int, ...], ...]
    zero: int
    backwards: Backwards = "fused"
    sync_lead: int = 0
    rule: OrderRule = "backward-first"
    in_turn: tuple[str, ...] = ()

    def group_devices(self, group: Sequence[int]) -> int:
        """Devices of a group: up to the last of all units."""
        return max(self.choices[index].end for index in group)

    @property
    def devices(self) -> int:
        """Of all groups."""
        return sum(map(self.group_devices, self.groups))

    def group_of(self, index: int) -> tuple[int, ...]:
        """The group of a unit."""
        return next(group for group in self.groups if index in group)

    def with_choices(self, changed: Mapping[int, UnitChoice]) -> PlanLayout:
        """The layout with some units' choices changed."""
        return replace(
            self,
            choices=tuple(changed.get(i, choice) for i, choice in enumerate(self.choices)),
        )


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds of a unit's choice.

    Attributes:
        busy_s: [P], of each position's computes in a step.
        slot_s: of one micro-batch on the busiest position, forward and backward.
        through_s: of one micro-batch on all positions.
        gradient_bytes: that a device of the largest stage sums.
        backward_s: of the last micro-batch on one position.
    """

    busy_s: Floats
    slot_s: float
    through_s: float
    gradient_bytes: float
    backward_s: float


class LayoutSpace:
    """The layouts of a request, in which each module of each task is one unit.

    Args:
        request: whose tasks are planned.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        problems = [Problem(request=request, task=task) for task in request.tasks.values()]
        several = len(problems) > 1
        self.modules = [
            (f"{own.task.name}.{module}" if several else module, own, module)
            for own in problems
            for module in own.task.modules
        ]
        at = {(own.task.name, module): i for i, (_, own, module) in enumerate(self.modules)}
        self._producers = [
            [at[own.task.name, p] for p in own.producers(module)] for _, own, module in self.modules
        ]
        # Their backwards may be split, where they send gradients to other stages.
        self._free_backwards = [
            request.workload.modules[module].plan.split_backward == "auto"
            for _, _, module in self.modules
        ]
        self._has_rounds = any(own.task.sync_batches and own.rounds > 1 for own in problems)
        self._owners = [
            request.workload.modules[module].share or module for _, _, module in self.modules
        ]
        self.cost = cache(self._cost)
        self._sum_s = cache(self._reduction_s)
        self.bytes = cache(self._bytes)
        self._costs_of = cache(self._zero_costs)
        self.tensor_degrees = cache(self._tensor_degrees)

    # --- plans -----------------------------------------------------------------------

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
            zero=plan.training.zero,
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
            kept=unit,
        )

    def units_of(self, layout: PlanLayout) -> tuple[Unit, ...] | None:
        """Its units on their ranks; None where tensor-parallel groups would cross nodes."""
        cluster = self._request.cluster
        shapes = {str(group): self._shape(layout, group) for group in layout.groups}
        places = place_modules(shapes, cluster=cluster, devices=self._request.devices)
        if places is None:
            return None
        units: list[Unit] = []
        for index, choice in enumerate(layout.choices):
            start = places[str(layout.group_of(index))].members[0] + choice.offset
            grid = RankGrid.consecutive(start, choice.dp, choice.pp, choice.tp)
            if not _inside_nodes(grid, cluster):
                return None
            units.append(self._unit(index, layout, grid))
        return tuple(units)

    def _shape(self, layout: PlanLayout, group: Sequence[int]) -> tuple[int, int, int]:
        """(dp, pp, tp) of a grid with room for a group."""
        if len(group) == 1:
            own = layout.choices[group[0]]
            return own.dp, own.pp, own.tp
        tp = max(layout.choices[index].tp for index in group)
        return -(-layout.group_devices(group) // tp), 1, tp

    def _unit(self, index: int, layout: PlanLayout, grid: RankGrid) -> Unit:
        name, problem, module = self.modules[index]
        choice = layout.choices[index]
        splits = layout.backwards != "fused" and self._pins(index).split_backward == "auto"
        schedule = Schedule(
            kind=choice.kind,
            lead=choice.lead,
            sync_lead=layout.sync_lead if choice.kind == "batch-sync" else 0,
            split_backward=splits,
            even_in_flight=splits and layout.backwards == "even",
        )
        if choice.kept is not None:
            changes = {"name": name, "ranks": grid.ranks, "schedule": schedule}
            return choice.kept.model_copy(update=changes)
        unit = make_unit(
            problem,
            module,
            grid=grid,
            blocks=module_stages(problem, module, choice.pp * choice.vpp),
            size=choice.size,
            pinned=self._pins(index).microbatch is not None,
            schedule=schedule,
        )
        return unit.model_copy(update={"name": name, "vpp": choice.vpp})

    def _tensor_degrees(self, index: int) -> list[int]:
        """Those that a module's profile has and its pins allow."""
        return allowed_tensor_degrees(*self.modules[index][1:])

    def _pins(self, index: int) -> Pins:
        return self._request.workload.modules[self.modules[index][2]].plan

    # --- estimates -------------------------------------------------------------------

    def _cost(self, index: int, choice: UnitChoice) -> _Cost:
        _, problem, module = self.modules[index]
        costs = problem.module_costs(module)
        own = costs.stages(module_stages(problem, module, choice.pp * choice.vpp))
        share = -(-problem.round_samples // choice.dp)
        sizes = cut(share, choice.size, pinned=self._pins(index).microbatch is not None)
        values, counts = np.unique(np.array((*sizes, choice.size)), return_counts=True)
        counts[-1] -= 1
        dp = np.full(len(values), choice.dp)
        forward, backward = (own.shares @ x for x in costs.seconds(choice.tp, values, dp))
        chunks = (forward + backward).reshape(choice.vpp, choice.pp, len(values))
        each_P = chunks[:, :, -1].sum(axis=0)
        trained = float(own.trained.max()) * choice.vpp / choice.tp
        return _Cost(
            busy_s=problem.rounds * (chunks.sum(axis=0) @ counts),
            slot_s=float(each_P.max()),
            through_s=float(each_P.sum()) / choice.vpp,
            gradient_bytes=trained * problem.costs.gradient_bytes,
            backward_s=float(backward[:, -1].sum()) / choice.pp,
        )

    def _reduction_s(self, index: int, choice: UnitChoice, dp: int) -> float:
        own = self.cost(index, choice)
        return float(
            reduction_s(
                self._request.cluster,
                tp=choice.tp,
                pp=choice.pp,
                dp=dp,
                num_bytes=own.gradient_bytes,
                backward_s=own.backward_s,
            )
        )

    def _sums_s(self, layout: PlanLayout) -> list[float]:
        """By unit, of the sums of gradients over all places at which its parameters are used."""
        places: defaultdict[str, set[tuple[object, ...]]] = defaultdict(set)
        replicas: Counter[str] = Counter()
        for index, (own, owner) in enumerate(zip(layout.choices, self._owners, strict=True)):
            place = layout.group_of(index), own.offset, own.tp, own.pp, own.dp
            if place not in places[owner]:
                places[owner].add(place)
                replicas[owner] += own.dp
        return [
            self._sum_s(index, own, replicas[owner])
            for index, (own, owner) in enumerate(zip(layout.choices, self._owners, strict=True))
        ]

    def busiest_s(self, layout: PlanLayout) -> float:
        """Seconds of the computes of the device that has most of them."""
        return max(self._busy_s(layout, group) for group in layout.groups)

    def _busy_s(self, layout: PlanLayout, group: Sequence[int]) -> float:
        if len(group) == 1:
            return float(self.cost(group[0], layout.choices[group[0]]).busy_s.max())
        total_R = np.zeros(layout.group_devices(group))
        for index in group:
            choice = layout.choices[index]
            busy_s = self.cost(index, choice).busy_s
            own_R = np.tile(np.repeat(busy_s, choice.tp), choice.dp)
            total_R[choice.offset : choice.end] += own_R
        return float(total_R.max())

    def estimate_s(self, layout: PlanLayout) -> float:
        """About what a step takes; for comparing neighbours."""
        own = [self.cost(index, choice) for index, choice in enumerate(layout.choices)]
        into, after = [0.0] * len(own), [0.0] * len(own)
        consumers: list[tuple[int, int]] = []
        for index, producers in enumerate(self._producers):
            consumers += [(index, producer) for producer in producers]
        for consumer, producer in consumers:
            wait = into[producer] + self._passing_s(layout, own, producer, consumer)
            into[consumer] = max(into[consumer], wait)
        for consumer, producer in reversed(consumers):
            wait = after[consumer] + own[consumer].through_s
            after[producer] = max(after[producer], wait)
        apart = set(layout.in_turn)
        tasks = [problem.task.name for _, problem, _ in self.modules]
        turns = [{name} for name in dict.fromkeys(tasks) if name in apart]
        turns += [set(tasks) - apart] if set(tasks) - apart else []
        total_s, sums_s, summed = 0.0, self._sums_s(layout), set[str]()
        for turn in reversed(turns):  # gradients are summed after the last turn that adds to them
            ends: list[float] = []
            for whole in layout.groups:
                if group := [index for index in whole if tasks[index] in turn]:
                    path_s = max(into[i] + own[i].through_s + after[i] for i in group)
                    fill_s = max(0.0, path_s - sum(own[i].slot_s for i in group))
                    left_s = (0.0 if self._owners[i] in summed else sums_s[i] for i in group)
                    ends.append(self._busy_s(layout, group) + fill_s + max(left_s))
            total_s += max(ends)
            summed |= {own for task, own in zip(tasks, self._owners, strict=True) if task in turn}
        return total_s

    def _passing_s(
        self, layout: PlanLayout, own: Sequence[_Cost], producer: int, consumer: int
    ) -> float:
        """Until a producer has made what the consumer's first micro-batches need."""
        first, then = layout.choices[producer], layout.choices[consumer]
        needed = max(1.0, then.dp * then.size / (first.dp * first.size))
        return own[producer].through_s + (needed - 1) * own[producer].slot_s

    # --- memory ----------------------------------------------------------------------

    def most_zero(self, layout: PlanLayout) -> int:
        """The last ZeRO stage that saves memory: 2 and 3 cut what is summed in rounds.

        There are rounds where all units have the same micro-batches as those before them.
        """
        own = [(choice.dp, choice.size) for choice in layout.choices]
        has_rounds = all(own[i] == own[p] for i, ps in enumerate(self._producers) for p in ps)
        return _MOST_ZERO if has_rounds else 1

    def least_bytes(self, layout: PlanLayout) -> float:
        """What its fullest device holds at least."""
        zero = min(layout.zero, self.most_zero(layout))
        return max(self._group_bytes(layout, group, zero) for group in layout.groups)

    def _group_bytes(self, layout: PlanLayout, group: Sequence[int], zero: int) -> float:
        active_R = np.zeros(layout.group_devices(group))
        # Units that cut the same parameters alike hold them once.
        fixed: defaultdict[tuple[str, int], Floats] = defaultdict(lambda: np.zeros_like(active_R))
        for index in group:
            choice = layout.choices[index]
            held = self.bytes(index, replace(choice, lead=min(choice.lead, 1)), zero)
            for total_R, of_P in zip(
                (fixed[self._owners[index], choice.tp], active_R), held, strict=True
            ):
                own_R = np.tile(np.repeat(of_P, choice.tp), choice.dp)
                place_R = total_R[choice.offset : choice.end]
                np.maximum(place_R, own_R, out=place_R)
        return float((sum(fixed.values()) + active_R).max())

    def _bytes(self, index: int, choice: UnitChoice, zero: int) -> tuple[Floats, Floats]:
        """[P], parameters with their state, and activations of micro-batches in flight."""
        _, problem, module = self.modules[index]
        costs, (tp, pp, dp) = problem.module_costs(module), (choice.tp, choice.pp, choice.dp)
        own = costs.stages(module_stages(problem, module, pp * choice.vpp))
        priced = self._costs_of(zero)
        # Ranks of all units that use the parameters cut their state.
        cut = dp if self._owners.count(self._owners[index]) == 1 else self._request.devices
        trained = priced.bytes_per_parameter(
            trainable=True, dp=cut, in_rounds=True, gathers=tp == 1 and cut > 1
        )
        frozen = priced.bytes_per_parameter(trainable=False)
        fixed = (own.trained * trained + own.frozen * frozen) / tp
        # The least share of a replica, and micro-batches that are no larger than the others.
        share = problem.round_samples // dp
        count = -(-max(share, 1) // choice.size)
        each = costs.held_bytes(
            own.held, own.inputs, tp=tp, size=np.array(max(1, share // count))
        ).reshape(choice.vpp, pp)
        in_flight = np.ones(pp)
        if choice.kind == "batch-sync":
            in_flight[:] = count
        elif choice.vpp == 1 and choice.lead:
            in_flight = np.minimum(np.arange(pp, 0, -1), count)
        return fixed.reshape(choice.vpp, pp).sum(axis=0), each.max(axis=0) * in_flight

    def _zero_costs(self, zero: int) -> CostModel:
        own = self._request.costs
        training = own.training.model_copy(update={"zero": zero})
        return CostModel(own.profile, own.cluster, training)

    def small(self, zero: int, budget: SearchBudget) -> Iterator[PlanLayout]:
        """Units that share all devices and hold as little as they must, or as changes reach.

        One for each tensor-parallel degree from which to begin; none where pins allow none.
        """
        group = tuple(range(len(self.modules)))
        degrees = {tp for index in group for tp in self.tensor_degrees(index)}
        for most_tp in sorted(degrees):
            choices = [self._small_choice(index, most_tp) for index in group]
            own = tuple(choice for choice in choices if choice is not None)
            if len(own) == len(group):
                layout = self._smaller(PlanLayout(choices=own, groups=(group,), zero=zero), budget)
                if self.units_of(layout):
                    yield layout

    def _smaller(self, layout: PlanLayout, budget: SearchBudget) -> PlanLayout:
        """Changed unit by unit, where that holds less, until it fits the memory."""
        held = self.least_bytes(layout) if self.units_of(layout) else math.inf
        while held > self._request.cluster.device.memory_bytes and not budget.is_over:
            others = [o for o in self._of_units(layout) if o.devices <= self._request.devices]
            budget.spend(_ESTIMATE_S * len(others))
            ranked = sorted((self.least_bytes(other), n) for n, other in enumerate(others))
            less = (others[n] for num_bytes, n in ranked if num_bytes < held)
            found = next((other for other in less if self.units_of(other)), None)
            if found is None:
                break
            layout, held = found, self.least_bytes(found)
        return layout

    def _small_choice(self, index: int, most_tp: int) -> UnitChoice | None:
        """A module in one replica of as many parts as there may be, sample by sample."""
        _, problem, module = self.modules[index]
        kind = "batch-sync" if problem.task.sync_batches else "1f1b"
        none = UnitChoice(tp=0, pp=0, vpp=1, dp=0, size=0, kind=kind, lead=0)
        degrees = [tp for tp in self.tensor_degrees(index) if tp <= most_tp]
        for tp in sorted(degrees, reverse=True):
            for pp in range(min(self._request.devices // tp, problem.blocks(module)), 0, -1):
                for dp in range(1, self._request.devices // (tp * pp) + 1):
                    share = -(-problem.round_samples // dp)
                    for size in microbatch_sizes(share, self._pins(index)):
                        if found := self._with(index, none, tp=tp, pp=pp, dp=dp, size=size):
                            return found
        return None

    # --- neighbours ------------------------------------------------------------------

    def neighbours(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Layouts one change away that the devices and the workload's pins allow."""
        changes = itertools.chain(
            self._of_units(layout),
            self._of_all_sizes(layout),
            self._moved_devices(layout),
            self._merged(layout),
            self._split(layout),
            self._alike(layout),
            self._shifted(layout),
        )
        for other in changes:
            if other.devices <= self._request.devices:
                yield _with_usual_leads(other)

    def pairs(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Layouts two changes away: of groups and then any, or of different units."""
        for other in itertools.chain(self._merged(layout), self._split(layout)):
            yield from self.neighbours(other)
        single = [list(self._choices_near(i, layout)) for i in range(len(layout.choices))]
        for first, second in itertools.combinations(range(len(single)), 2):
            for one, other in itertools.product(single[first], single[second]):
                changed = layout.with_choices({first: one, second: other})
                if changed.devices <= self._request.devices:
                    yield _with_usual_leads(changed)

    def _of_units(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        for index in range(len(layout.choices)):
            for choice in self._choices_near(index, layout):
                yield layout.with_choices({index: choice})

    def _choices_near(self, index: int, layout: PlanLayout) -> Iterator[UnitChoice]:
        """Other degrees on about as many devices, other sizes."""
        choice = layout.choices[index]
        free = self._request.devices - layout.devices
        room = layout.group_devices(layout.group_of(index)) + free
        yield from self._degrees_near(index, choice, room)
        yield from self._sizes_near(index, choice)

    def _degrees_near(self, index: int, choice: UnitChoice, room: int) -> Iterator[UnitChoice]:
        tps = _beside(self.tensor_degrees(index), choice.tp)
        near = {choice.pp, choice.pp - 1, choice.pp + 1, choice.pp // 2, choice.pp * 2}
        shapes: list[tuple[int, int, int]] = []
        for tp in tps:
            # Next to this number of stages, or one replica on all devices.
            for pp in sorted((near | {choice.devices // tp, room // tp}) - {0, -1}):
                same = {choice.devices // (tp * pp), room // (tp * pp), choice.dp}
                if (tp, pp) == (choice.tp, choice.pp):
                    same |= {choice.dp - 1, choice.dp + 1, choice.dp // 2, 2 * choice.dp}
                shapes += [(tp, pp, dp) for dp in sorted(same) if tp * pp * dp <= room]
        # With the same samples at once in a replica or in all, and half of these for less memory.
        found = [
            *(
                self._with(index, choice, tp=tp, pp=pp, dp=dp, size=size)
                for tp, pp, dp in shapes
                for size in self._sizes_of(choice, dp)
            ),
            *(self._with(index, choice, vpp=v) for v in (choice.vpp - 1, choice.vpp + 1)),
        ]
        yield from (other for other in dict.fromkeys(found) if other is not None)

    def _with(
        self,
        index: int,
        choice: UnitChoice,
        *,
        tp: int | None = None,
        pp: int | None = None,
        dp: int | None = None,
        vpp: int | None = None,
        size: int | None = None,
    ) -> UnitChoice | None:
        """The choice with other degrees; None where these are not allowed, or its own."""
        _, problem, module = self.modules[index]
        tp, pp, dp = tp or choice.tp, pp or choice.pp, choice.dp if dp is None else dp
        vpp, blocks = choice.vpp if vpp is None else vpp, problem.blocks(module)
        if pp == 1 and choice.pp > 1:
            vpp = 1
        if not (1 <= dp <= problem.round_samples and vpp >= 1 and 1 <= pp * vpp <= blocks):
            return None
        if tp not in self.tensor_degrees(index):
            return None
        kind = choice.kind
        if vpp > 1 and (pp == 1 or problem.task.sync_batches):
            return None
        if not problem.task.sync_batches:
            kind = "interleaved" if vpp > 1 else "1f1b"
        pins = self._pins(index)
        share = -(-problem.round_samples // dp)
        size = min(size or choice.size, share)
        degrees = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "microbatch": size}
        if not all(pins.allows(name, value) for name, value in degrees.items()):
            return None
        changed = UnitChoice(
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            size=size,
            kind=kind,
            lead=choice.lead,
            offset=choice.offset,
        )
        return None if changed == choice else changed

    def _sizes_of(self, choice: UnitChoice, dp: int) -> list[int]:
        scaled = -(-choice.size * choice.dp // max(1, dp))
        return sorted({choice.size, scaled, -(-choice.size // 2), -(-scaled // 2)})

    def _sizes_near(self, index: int, choice: UnitChoice) -> Iterator[UnitChoice]:
        problem = self.modules[index][1]
        share = -(-problem.round_samples // choice.dp)
        sizes = list(microbatch_sizes(share, self._pins(index)))
        smaller, larger = (
            [s for s in sizes if s < choice.size],
            [s for s in sizes if s > choice.size],
        )
        for size in (*smaller[-2:], *larger[:2]):
            if other := self._with(index, choice, size=size):
                yield other

    def _of_all_sizes(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """All units with the same number of micro-batches."""
        counts = {
            -(-self.modules[i][1].round_samples // (choice.dp * choice.size))
            for i, choice in enumerate(layout.choices)
        }
        near = {n + d for n in counts for d in (-1, 0, 1)} | {2 * n for n in counts}
        for count in sorted(near | {n // 2 for n in counts}):
            changed: dict[int, UnitChoice] = {}
            for index, choice in enumerate(layout.choices) if count else ():
                share = -(-self.modules[index][1].round_samples // choice.dp)
                size = -(-share // min(count, share))
                if other := self._with(index, choice, size=size):
                    changed[index] = other
            if changed:
                yield layout.with_choices(changed)

    def _on_devices(self, index: int, choice: UnitChoice, devices: int) -> UnitChoice | None:
        """The choice that is most like one, on so many devices."""
        least = min(self.tensor_degrees(index), default=1)
        for tp, pp in ((choice.tp, choice.pp), (choice.tp, 1), (least, 1)):
            if dp := devices // (tp * pp):
                dp = min(dp, self.modules[index][1].round_samples)
                # The same samples go through all replicas at once.
                size = max(1, choice.size * choice.dp // dp)
                if (tp, pp, dp) == (choice.tp, choice.pp, choice.dp):
                    return choice
                return self._with(index, choice, tp=tp, pp=pp, dp=dp, size=size)
        return None

    def _resized(
        self, layout: PlanLayout, sizes: Mapping[tuple[int, ...], int]
    ) -> PlanLayout | None:
        """Some groups on so many devices; None where a unit can have no such number."""
        changed: dict[int, UnitChoice] = {}
        for group, devices in sizes.items():
            own = layout.group_devices(group)
            for index in group:
                choice = layout.choices[index]
                if choice.devices == own or choice.end > devices:
                    # Of units with a part of the group the share stays.
                    offset = choice.offset * devices // own
                    room = max(1, choice.devices * devices // own)
                    other = self._on_devices(index, replace(choice, offset=offset), room)
                    if other is None:
                        return None
                    changed[index] = other
        return layout.with_choices(changed)

    def _moved_devices(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """A few devices from one group to another."""
        for source, target in itertools.permutations(layout.groups, 2):
            own, other = layout.group_devices(source), layout.group_devices(target)
            for number in sorted({1, 2, self._step(layout, source), self._step(layout, target)}):
                if number < own:
                    sizes = {source: own - number, target: other + number}
                    if moved := self._resized(layout, sizes):
                        yield moved

    def _step(self, layout: PlanLayout, group: Sequence[int]) -> int:
        """Devices of a replica of a group's largest unit."""
        return max(layout.choices[i].tp * layout.choices[i].pp for i in group)

    def _merged(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Two groups on the devices of both, or the smaller one nested in the larger."""
        for first, second in itertools.combinations(layout.groups, 2):
            rest = [g for g in layout.groups if g not in (first, second)]
            groups = tuple(sorted([*rest, tuple(sorted(first + second))]))
            nested = replace(layout, groups=groups)
            yield nested
            devices = layout.group_devices(first) + layout.group_devices(second)
            changed: dict[int, UnitChoice] = {}
            for index in first + second:
                choice = replace(layout.choices[index], offset=0)
                if other := self._on_devices(index, choice, devices):
                    changed[index] = other
            yield nested.with_choices(changed)

    def tuned(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """The same degrees and sizes on the same devices, run in another way."""
        if layout.zero > self._request.workload.train.zero:
            yield replace(layout, zero=layout.zero - 1)
        yield from self._other_backwards(layout)
        if self._has_rounds:
            yield from (replace(layout, sync_lead=lead) for lead in range(_MOST_SYNC_LEAD + 1))
        if any(len(group) > 1 for group in layout.groups):
            yield from (replace(layout, rule=rule) for rule in get_args(OrderRule))
        if len(self._request.tasks) > 1:
            yield from (replace(layout, in_turn=x) for x in ((), tuple(self._request.tasks)))
        ahead = [i for i, c in enumerate(layout.choices) if POLICIES[c.kind].runs_ahead]
        for lead in range(1, _MOST_LEAD + 1):
            yield layout.with_choices({i: replace(layout.choices[i], lead=lead) for i in ahead})
        for index in ahead:
            choice = layout.choices[index]
            for lead in (choice.lead - 1, choice.lead + 1):
                if 0 <= lead <= _MOST_LEAD:
                    yield layout.with_choices({index: replace(choice, lead=lead)})

    def _other_backwards(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Whole and split backwards, where a stage of these modules sends gradients on."""
        free = [i for i, is_free in enumerate(self._free_backwards) if is_free]
        piped = any(layout.choices[i].pp > 1 for i in free)
        if piped or any(self._producers[i] for i in free):
            ways: tuple[Backwards, ...] = (
                ("fused", "split", "even") if piped else ("fused", "split")
            )
            yield from (replace(layout, backwards=way) for way in ways)

    def _alike(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """A group's units, or all on all devices, with one tensor-parallel degree."""
        everything = tuple(range(len(layout.choices)))
        for group in dict.fromkeys((*layout.groups, everything)):
            whole = group == everything
            devices = self._request.devices if whole else layout.group_devices(group)
            groups = (everything,) if whole else layout.groups
            ways = itertools.product(self._degrees_of(group), (None, 1))
            for tp, size in ways if len(group) > 1 else ():
                dp, changed = devices // tp, dict[int, UnitChoice]()
                for index in group if dp else ():
                    choice = replace(layout.choices[index], offset=0)
                    own = min(dp, self.modules[index][1].round_samples)
                    other = self._with(index, choice, tp=tp, pp=1, dp=own, size=size)
                    changed[index] = other or choice
                if changed:
                    yield replace(layout.with_choices(changed), groups=groups)

    def _degrees_of(self, group: Sequence[int]) -> list[int]:
        """Tensor-parallel degrees that all units of a group may have."""
        each = [self.tensor_degrees(index) for index in group]
        return sorted(set.intersection(*map(set, each)))

    def _shifted(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """A unit on other devices of its group: where another begins, or behind it."""
        for group in layout.groups:
            places = {n for i in group for n in (layout.choices[i].offset, layout.choices[i].end)}
            for index in group if len(group) > 1 else ():
                choice, most = layout.choices[index], layout.group_devices(group)
                for offset in sorted(places - {choice.offset}):
                    if offset + choice.devices <= most:
                        moved = replace(choice, offset=offset)
                        yield layout.with_choices({index: moved})

    def _split(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """One unit of a group on devices of its own: idle ones, or some of the group's."""
        free = self._request.devices - layout.devices
        for group in layout.groups:
            for index in group if len(group) > 1 else ():
                stay = tuple(i for i in group if i != index)
                rest = [g for g in layout.groups if g != group]
                apart = replace(layout, groups=tuple(sorted([*rest, stay, (index,)])))
                total = layout.group_devices(group) + free
                busy = [self.cost(i, layout.choices[i]) for i in group]
                work = [
                    b.busy_s.sum() * layout.choices[i].devices
                    for b, i in zip(busy, group, strict=True)
                ]
                fair = round(total * work[group.index(index)] / (sum(work) or 1.0))
                for number in sorted({n for n in (fair - 1, fair, fair + 1) if 0 < n < total}):
                    sizes = {stay: total - number, (index,): number}
                    if moved := self._resized(apart, sizes):
                        yield moved


def _with_usual_leads(layout: PlanLayout) -> PlanLayout:
    """The layout with a lead where a unit waits for others of its group, and none where it cannot.

    Groups begin with a unit.

    Units with the same degrees and sizes hand their outputs on without a message, one by one.
    """
    changed: dict[int, UnitChoice] = {}
    for group in layout.groups:
        own = [layout.choices[index] for index in group]
        first = min(choice.offset for choice in own)
        shapes = {(c.tp, c.dp, c.size, c.offset) for c in own}
        alike = len(shapes) == 1 and all(c.pp == 1 for c in own)
        for index, choice in zip(group, own, strict=True):
            lead = 0 if alike and len(group) > 1 else max(choice.lead, 1)
            if lead != choice.lead or first:
                changed[index] = replace(choice, lead=lead, offset=choice.offset - first)
    return layout.with_choices(changed)


def _beside(values: Sequence[int], value: int) -> list[int]:
    """A value of an ascending list, and those next to it."""
    smaller, larger = [v for v in values if v < value], [v for v in values if v > value]
    return [*smaller[-1:], value, *larger[:1]]


def _inside_nodes(grid: RankGrid, cluster: Cluster) -> bool:
    """Whether each tensor-parallel group is on one node."""
    return all(
        cluster.node_of(ranks[0]) == cluster.node_of(ranks[-1]) for _, _, ranks in grid.groups()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What a search found.

    Attributes:
        plan: the best: a start, or one that is better than all of them.
        start: that the best was reached from.
        candidate: the units of the best; None where it is a start.
        evaluations: layouts that were simulated.
    """

    plan: Plan
    start: Plan
    candidate: Candidate | None = None
    evaluations: int = 0


class NeighbourSearch:
    """Tries the layouts that promise most, until its budget ends or nothing more is gained.

    Args:
        request: whose plans these are.
        trial: the simulated plan of a candidate; None where it does not fit or cannot run. It
            spends from the budget what it takes.
        trial_s: seconds of a quiet core that a trial takes about.
        budget: of the whole search.
        least_s: no plan takes less.
    """

    def __init__(
        self,
        request: Request,
        *,
        trial: Callable[[Candidate], Plan | None],
        trial_s: float,
        budget: SearchBudget,
        least_s: float,
    ) -> None:
        self._request, self._trial, self._budget = request, trial, budget
        self._least_s = least_s
        self._space = LayoutSpace(request)
        self._seen: set[PlanLayout] = set()
        self._heap: list[tuple[float, int, PlanLayout, float, Plan, float]] = []
        # By unit and choice, the least factor by which steps took longer than estimated.
        self._factors: dict[tuple[object, ...], float] = {}
        # Of equal estimates the first is tried first.
        self._numbers = itertools.count()
        # The steps of layouts whose neighbours are known. Of equal ones the first is enough: they
        # differ in what nothing waits for.
        self._expanded: set[float] = set()
        self._evaluations = 0
        # No trial is begun for which too little is left.
        self._longest_s = trial_s

    def run(self, starts: Sequence[Plan]) -> Neighbours:
        """The best plan that changes of some others lead to.

        Args:
            starts: simulated, best first; one at least.
        """
        best, in_vain = Neighbours(plan=starts[0], start=starts[0]), 0
        first = self._begin(starts)
        # Whose pairs of changes are still to come.
        around, are_small_tried = first, False
        while self._goes_on(best.plan, in_vain):
            if around is not None and (in_vain >= _PATIENCE or not self._heap):
                self._push(self._space.pairs(around), around, best.plan, best.start, math.inf)
                around = None
            if not self._heap and first is not None and not are_small_tried:
                self._push(self._small(starts[0]), first, starts[0], starts[0], math.inf)
                are_small_tried = True
            if not self._heap:
                break
            expected_s, _, layout, limit_s, start, factor = heapq.heappop(self._heap)
            learnt = self._factor(layout)
            if learnt > factor:
                estimate_s = expected_s / factor
                self._add(layout, learnt * estimate_s, limit_s, start, learnt)
                continue
            if not self._may_fit(layout):
                self._cut_further(layout, expected_s, limit_s, start)
                continue
            if self._space.busiest_s(layout) >= best.plan.predicted.iteration_s:
                continue
            candidate = self._candidate(layout)
            if candidate is None:
                continue
            plan = self._evaluated(candidate)
            if plan is None:
                self._cut_further(layout, expected_s, limit_s, start)
                continue
            in_vain += 1
            self._learn(
                layout, plan.predicted.iteration_s * factor / expected_s if expected_s else 1.0
            )
            if _merit(plan) < _merit(best.plan):
                best = Neighbours(plan=plan, start=start, candidate=candidate)
                around, in_vain = layout, 0
            step_s = rounded(plan.predicted.iteration_s)
            is_near = step_s <= _NEAR * best.plan.predicted.iteration_s
            if step_s * _SAME < limit_s and is_near and step_s not in self._expanded:
                self._expand(layout, plan, start)
        return replace(best, evaluations=self._evaluations)

    def first_fit(self) -> tuple[Candidate, Plan] | None:
        """A plan that fits where no solver has one, those first that hold least."""
        small = self._space.small(self._request.costs.training.zero, self._small_budget())
        heap = [(self._space.least_bytes(own), next(self._numbers), own) for own in small]
        heapq.heapify(heap)
        while heap and not self._budget.is_over:
            _, _, layout = heapq.heappop(heap)
            others = [layout, *self._space.neighbours(layout)]
            stages = range(layout.zero, _MOST_ZERO + 1)
            for other, zero in itertools.product(others, stages):
                if self._budget.is_over:
                    return None
                other = replace(other, zero=zero)
                if other in self._seen or not self._may_fit(other):
                    continue
                self._seen.add(other)
                candidate = self._candidate(other)
                if candidate and (plan := self._evaluated(candidate)):
                    return candidate, plan
                held = self._space.least_bytes(other)
                heapq.heappush(heap, (held, next(self._numbers), other))
        return None

    def _small(self, start: Plan) -> Iterator[PlanLayout]:
        """Changes of a start may lead to these only by way of what does not fit."""
        for small in self._space.small(start.training.zero, self._small_budget()):
            yield _with_usual_leads(small)
            yield small

    def _small_budget(self) -> SearchBudget:
        return self._budget.part(self._budget.left_s / 8)

    def _begin(self, starts: Sequence[Plan]) -> PlanLayout | None:
        """Look around the best different starts; the layout of the first, where it has one."""
        layouts: dict[PlanLayout, Plan] = {}
        for start in starts:
            layout = self._space.layout_of(start)
            if layout is not None and len(layouts) < _STARTS:
                layouts.setdefault(layout, start)
        for layout, start in layouts.items():
            self._seen.add(layout)
            self._learn(layout, 1.0)
            if start.waves or self._space.units_of(layout) != start.units:
                self._add(layout, 0.0, math.inf, start)
            self._expand(layout, start, start)
        return next((own for own, start in layouts.items() if start is starts[0]), None)

    def _goes_on(self, best: Plan, in_vain: int) -> bool:
        may_gain = best.predicted.iteration_s > self._least_s * _SAME
        return may_gain and in_vain < _GIVE_UP and self._budget.left_s > self._longest_s

    def _may_fit(self, layout: PlanLayout) -> bool:
        self._budget.spend(_ESTIMATE_S)
        memory_bytes = self._request.cluster.device.memory_bytes
        return self._space.least_bytes(layout) <= memory_bytes

    def _cut_further(
        self, layout: PlanLayout, expected_s: float, limit_s: float, start: Plan
    ) -> None:
        """Try a layout that did not fit with the next ZeRO stage."""
        if layout.zero < self._space.most_zero(layout):
            further = replace(layout, zero=layout.zero + 1)
            if further not in self._seen:
                self._add(further, expected_s, limit_s, start)

    def _expand(self, layout: PlanLayout, plan: Plan, start: Plan) -> None:
        """Try what is one change away: leads that gain nothing lead nowhere."""
        self._expanded.add(rounded(plan.predicted.iteration_s))
        self._push(self._space.neighbours(layout), layout, plan, start, math.inf)
        self._push(self._space.tuned(layout), layout, plan, start, plan.predicted.iteration_s)

    def _push(
        self,
        others: Iterable[PlanLayout],
        layout: PlanLayout,
        plan: Plan,
        start: Plan,
        limit_s: float,
    ) -> None:
        """Layouts to try later, those first that should take least.

        Args:
            others: two changes at most from ``layout``.
            limit_s: the search goes on from those that take less.
        """
        scale = plan.predicted.iteration_s / self._space.estimate_s(layout)
        # Most of the budget is for trials.
        budget = self._budget.part(self._budget.left_s / 4)
        for other in others:
            if budget.is_over:
                return
            if other not in self._seen:
                self._seen.add(other)
                budget.spend(_ESTIMATE_S)
                self._add(other, scale * self._space.estimate_s(other), limit_s, start)

    def _add(
        self,
        layout: PlanLayout,
        expected_s: float,
        limit_s: float,
        start: Plan,
        factor: float = 1.0,
    ) -> None:
        self._seen.add(layout)
        item = rounded(expected_s), next(self._numbers), layout, limit_s, start, factor
        heapq.heappush(self._heap, item)

    def _factor(self, layout: PlanLayout) -> float:
        """By which a layout should take longer than estimated, by the choices in it."""
        own = (self._factors.get(key, 1.0) for key in _learnt_by(layout))
        return max(1.0, *own)

    def _learn(self, layout: PlanLayout, factor: float) -> None:
        for key in _learnt_by(layout):
            self._factors[key] = min(factor, self._factors.get(key, math.inf))

    def _candidate(self, layout: PlanLayout) -> Candidate | None:
        units = self._space.units_of(layout)
        if units is None:
            return None
        return Candidate(
            units=units,
            objective_s=0.0,
            in_turn=layout.in_turn,
            zero=cast("Literal[0, 1, 2, 3]", layout.zero),
            order=None if layout.rule == Order().rule else Order(rule=layout.rule),
        )

    def _evaluated(self, candidate: Candidate) -> Plan | None:
        left_s = self._budget.left_s
        plan = self._trial(candidate)
        self._evaluations += 1
        self._longest_s = max(self._longest_s, left_s - self._budget.left_s)
        return plan


def _learnt_by(layout: PlanLayout) -> Iterator[tuple[object, ...]]:
    """What estimates are corrected by: each unit's choice, whatever its lead."""
    for index, choice in enumerate(layout.choices):
        yield layout.backwards, index, replace(choice, lead=0, offset=0)


def _merit(plan: Plan) -> tuple[float, int]:
    """Less is better: the step, then its device-seconds; split backwards must gain something."""
    split = any(unit.schedule.split_backward for unit in plan.units)
    step_s = plan.predicted.iteration_s / (SHORTER if split else 1)
    return rounded(step_s), plan.predicted.devices_used
