"""A long search for short steps by random changes in simulation, independent of the planner's.

Part of bench_regret.py. Costs, simulator and memory check are the planner's, as is the refinement
of the best plans (orders, split backwards); moves are not. A unit stands on consecutive ranks from
any rank on, so that units share devices whole, in part or not at all. On shared devices plans are
simulated in an order that knows what computes take, mostly. Half of the search restarts from random
plans, half changes the plan that is to be beaten, at first by one change after the other, then from
what several changes at once make of the best plan. A change that makes the step longer is kept at
random, less often towards the end of each descent.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import numpy as np

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InvalidInputError
from mmplan.planning.candidate_plans import placed_losses, planned_tasks
from mmplan.planning.measured_trials import peak_bytes
from mmplan.planning.neighbours.estimates import LayoutEstimates
from mmplan.planning.neighbours.layout import LayoutSpace, UnitChoice
from mmplan.planning.order_search import OrderSearch, shares_ranks, timed
from mmplan.planning.recomputation import free_modules
from mmplan.planning.unit_schedules import best_backwards
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.faults import plan_faults
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Order, OrderRule, Plan, Schedule, ScheduleKind, Unit
from mmplan.schema.profile import Profile
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import Workload, recomputing, resolve_tasks
from mmplan.simulation.peak_memory import memory_lower_bound
from mmplan.simulation.step import prediction
from mmplan.simulation.symmetry import simulated
from mmplan.solvers.partitioner import module_stages
from mmplan.solvers.placement import make_unit
from mmplan.solvers.problem import Request
from mmplan.solvers.sample_split import microbatch_sizes

# All chosen by hand. Restarts in the first half, each from the best of some random plans.
RESTARTS, DRAWN = 4, 16
# Descents from the best plan in the second half, and changes at once before each but the first.
DESCENTS, KICKS = 4, 3
# A change may take this much longer at the start of a descent, nothing at its end.
WARMTH = 0.04
# One more change is made at once with this probability.
AGAIN = 0.4
MOST_LEAD = 6
# Programs larger than this, and than 1.25 times that of the plan to beat, are not simulated:
# micro-batches of one sample on few devices.
MOST_INSTRUCTIONS = 4_000
# Changes looked at for each simulation, and such that do not fit the memory, at most.
LOOKED_AT, REFUSED = 40, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How a unit runs, and on which ranks.

    Attributes:
        start: its first rank; the others follow.
        size: samples of its largest micro-batch.
        cuts: chunks of blocks; None for chunks of nearly equal work.
        kept: a unit whose ranks, blocks and micro-batches these are.
    """

    start: int
    tp: int
    pp: int
    vpp: int
    dp: int
    size: int
    schedule: Schedule
    cuts: tuple[tuple[int, int], ...] | None = None
    kept: Unit | None = field(default=None, compare=False)

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A plan to be changed."""

    places: tuple[Place, ...]
    zero: int
    full: frozenset[tuple[str, Recompute]]
    order: Order | None = None
    in_turn: tuple[str, ...] = ()
    timed: bool = True

    def at(self, index: int, place: Place) -> State:
        """The state with another place of a unit."""
        places = list(self.places)
        places[index] = place
        order = None if self.order is None else Order(rule=self.order.rule)
        return replace(self, places=tuple(places), order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The end of a search.

    Attributes:
        plan: the best; None where nothing fits.
        evaluations: steps that were simulated.
    """

    plan: Plan | None
    evaluations: int


class _Setting:
    """A workload with its recomputation settled."""

    def __init__(self, job: Workload, profile: Profile, start: Plan) -> None:
        costs = CostModel(profile, start.cluster, start.training)
        tasks = {name: task for name, task in resolve_tasks(job).items() if name in start.tasks}
        self.request = Request(
            workload=job, tasks=tasks, costs=costs, cluster=start.cluster, devices=start.devices
        )
        self.space = LayoutSpace(self.request)
        self.estimates = LayoutEstimates(self.space)
        self.tasks = planned_tasks(self.request)


class LongSearch:
    """Random restarts and random changes.

    Args:
        job: the workload.
        profile: its costs.
        start: the plan to beat, of the same devices and training.
        seed: of all draws.
    """

    def __init__(self, job: Workload, profile: Profile, start: Plan, *, seed: int) -> None:
        self._job, self._profile, self._start = job, profile, start
        self._rng = random.Random(seed)
        self._free = free_modules(job)
        self._zero_of = {unit.module: unit.zero for unit in start.units}
        self._setting = cache(self._settled)
        first = self._setting(self._chosen(start))
        self._modules = first.space.modules
        self._request, self._space = first.request, first.space
        self._best: Plan | None = None
        self._most_instructions = max(MOST_INSTRUCTIONS, 1.25 * _instructions(lower_plan(start)))
        self._evaluations = self._refused = 0

    def run(self, evaluations: int) -> Found:
        """Search until so many steps are simulated, or nothing new is found to simulate."""
        for number in range(RESTARTS):
            self._descend(self._drawn(), evaluations * (number + 1) // (2 * RESTARTS))
        begin = evaluations // 2
        for number in range(DESCENTS):
            own = (not number and self._state_of(self._start)) or self._best_state()
            for _ in range(KICKS if number else 0):
                own = own and (self._one_change(own) or own)
            self._descend(own, begin + (evaluations - begin) * (number + 1) // DESCENTS)
        return Found(plan=self._best, evaluations=self._evaluations)

    def _best_state(self) -> State | None:
        """Of the best that was found, or of the plan to beat."""
        plans = [plan for plan in (self._start, self._best) if plan is not None]
        plans.sort(key=lambda plan: plan.predicted.iteration_s)
        return next(filter(None, map(self._state_of, plans)), None)

    # --- the search ------------------------------------------------------------------

    def _descend(self, state: State | None, end: int) -> None:
        if state is None:
            return
        begin, step_s = self._evaluations, self._step_s(state)
        most = self._refused + REFUSED * (end - begin)
        for _ in range(LOOKED_AT * max(0, end - begin)):
            if self._evaluations >= end or self._refused > most:
                return
            other = self._changed(state)
            if other is None or not self._promises(other, step_s):
                continue
            warmth = WARMTH * (end - self._evaluations) / (end - begin)
            other_s = self._step_s(other)
            if other_s < math.inf and other_s <= step_s * (1 + warmth * self._rng.random()):
                state, step_s = other, other_s

    def _drawn(self) -> State | None:
        """The best of some random plans."""
        drawn = [self._random_state() for _ in range(DRAWN)]
        drawn.sort(key=self._busiest_s)
        steps = [(self._step_s(state), n) for n, state in enumerate(drawn[: DRAWN // 2])]
        return drawn[min(steps)[1]] if steps else None

    def _promises(self, state: State, step_s: float) -> bool:
        """Whether its busiest device alone does not take as long; stages may be cut otherwise."""
        return 0.97 * self._busiest_s(state) < step_s

    def _busiest_s(self, state: State) -> float:
        estimates = self._setting(state.full).estimates
        busy_s = np.zeros(self._request.devices)
        for index, place in enumerate(state.places):
            choice = UnitChoice(
                tp=place.tp,
                pp=place.pp,
                vpp=place.vpp,
                dp=place.dp,
                size=place.size,
                kind=place.schedule.kind,
                lead=place.schedule.lead,
            )
            own_s = np.tile(np.repeat(estimates.cost(index, choice).busy_s, place.tp), place.dp)
            ranks = list(self._ranks(place).members)
            busy_s[ranks] += own_s
        return float(busy_s.max())

    def _step_s(self, state: State) -> float:
        plan = self._simulated(self._plan(state), is_timed=state.timed)
        if plan is None:
            return math.inf
        step_s = plan.predicted.iteration_s
        if self._best is None or step_s < self._best.predicted.iteration_s * (1 - 1e-9):
            if faults := plan_faults(plan):
                raise AssertionError(faults)
            self._best = self._refined(plan)
        return step_s

    def _refined(self, plan: Plan) -> Plan:
        """As the planner does with its few best plans."""
        setting = self._setting(self._chosen(plan))
        memory = plan.cluster.device.memory_bytes

        def again(other: Plan) -> Plan:
            found = self._simulated(other)
            if found is None:
                raise InvalidInputError("does not fit")
            return found

        orders = OrderSearch(
            self._request.costs,
            simulated=again,
            fits=lambda other: peak_bytes(other.predicted) <= memory,
        )
        ordered = orders.best_order(plan)
        split = best_backwards(ordered, setting.request.workload, plan.cluster, again)
        return orders.best_sums(split)

    def _simulated(self, plan: Plan | None, *, is_timed: bool = False) -> Plan | None:
        """With its prediction; None where it cannot run or does not fit.

        Args:
            plan: to simulate.
            is_timed: in an order that knows what computes take, where units share devices.
        """
        if plan is None:
            return None
        memory, costs = plan.cluster.device.memory_bytes, self._request.costs
        try:
            lowered = lower_plan(plan)
            if _instructions(lowered) > self._most_instructions:
                return None
            if memory_lower_bound(plan, costs, lowered) > memory:
                self._refused += 1
                return None
            if is_timed and shares_ranks(plan):
                plan = timed(plan, lowered, costs)
            self._evaluations += 1
            predicted = prediction(simulated(plan, costs, lowered)[0], plan)
        except InvalidInputError:
            return None
        return (
            plan.model_copy(update={"predicted": predicted})
            if (peak_bytes(predicted) <= memory)
            else None
        )

    def _chosen(self, plan: Plan) -> frozenset[tuple[str, Recompute]]:
        """What a plan recomputes of what it may choose."""
        return frozenset((m, v) for m, v in plan.recomputing.items() if m in self._free)

    def _settled(self, full: frozenset[tuple[str, Recompute]]) -> _Setting:
        job = recomputing(self._job, dict(full)) if self._free else self._job
        return _Setting(job, self._profile, self._start)

    # --- plans -----------------------------------------------------------------------

    def _plan(self, state: State) -> Plan | None:
        setting = self._setting(state.full)
        units: list[Unit] = []
        for index, place in enumerate(state.places):
            unit = self._unit(setting, index, place)
            if unit is None:
                return None
            # One stage for all units with the same parameters, as in the start.
            own = self._zero_of.get(unit.module) or 0
            units.append(unit.model_copy(update={"zero": own if own > state.zero else None}))
        zero = cast("Literal[0, 1, 2, 3]", state.zero)
        return self._start.model_copy(
            update={
                "training": self._start.training.model_copy(update={"zero": zero}),
                "tasks": setting.tasks,
                "units": tuple(units),
                "losses": placed_losses(setting.request, units),
                "waves": (),
                "in_turn": state.in_turn,
                "order": state.order,
            }
        )

    def _unit(self, setting: _Setting, index: int, place: Place) -> Unit | None:
        name, problem, module = setting.space.modules[index]
        if place.kept is not None:
            return place.kept.model_copy(update={"name": name, "schedule": place.schedule})
        grid, cluster = self._ranks(place), self._request.cluster
        if not all(cluster.keeps_together(g) for _, _, g in grid.groups()):
            return None
        unit = make_unit(
            problem,
            module,
            grid=grid,
            blocks=place.cuts or module_stages(problem, module, place.pp * place.vpp),
            size=place.size,
            pinned=self._pins(index).microbatch is not None,
            schedule=place.schedule,
        )
        return unit.model_copy(update={"name": name, "vpp": place.vpp})

    def _ranks(self, place: Place) -> RankGrid:
        if place.kept is not None:
            return place.kept.grid
        return RankGrid.consecutive(place.start, place.dp, place.pp, place.tp)

    def _pins(self, index: int) -> Any:
        return self._job.modules[self._modules[index][2]].plan

    def _state_of(self, plan: Plan) -> State | None:
        """None where modules are in several units."""
        by_name = {(unit.task, unit.module): unit for unit in plan.units}
        if plan.waves or len(by_name) < len(plan.units):
            return None
        places: list[Place] = []
        for _, problem, module in self._modules:
            unit = by_name[problem.task.name, module]
            places.append(
                Place(
                    start=min(unit.all_ranks),
                    tp=unit.tp,
                    pp=unit.pp,
                    vpp=unit.vpp,
                    dp=unit.dp,
                    size=max(map(max, unit.microbatches)),
                    schedule=unit.schedule,
                    kept=unit,
                )
            )
        full = self._chosen(plan)
        # Nominal times have the names of units, which this plan may have from another solver.
        order = None if plan.order is None else Order(rule=plan.order.rule)
        return State(
            places=tuple(places),
            zero=plan.training.zero,
            full=full,
            order=order,
            in_turn=plan.in_turn,
            timed=bool(plan.order and plan.order.times),
        )

    # --- random plans and changes ----------------------------------------------------

    def _random_state(self) -> State:
        """Random groups on random shares of the devices, random degrees."""
        rng, number, devices = self._rng, len(self._modules), self._request.devices
        least = self._job.train.zero
        edges = self._random_edges(rng.randint(1, min(number, devices)), devices)
        spans = list(pairwise(edges))
        order = list(range(number))
        rng.shuffle(order)
        places: dict[int, Place] = {}
        for position, index in enumerate(order):
            start, stop = spans[position] if position < len(spans) else rng.choice(spans)
            place = None
            while place is None:
                place = self._random_place(index, start, stop - start)
                start, stop = 0, devices
            places[index] = place
        full: frozenset[tuple[str, Recompute]] = frozenset(
            (m, "full") for m in self._free if rng.random() < 0.5
        )
        return State(
            places=tuple(places[index] for index in range(number)),
            zero=least if rng.random() < 0.7 else rng.randint(least, 3),
            full=full,
            order=Order(rule="forward-first"),
            in_turn=self._random_turn(),
        )

    def _random_edges(self, parts: int, devices: int) -> list[int]:
        rng, unit = self._rng, 1
        for step in (8, 4, 2):
            if devices // step >= 2 * parts and rng.random() < 0.7:
                unit = step
                break
        inner = rng.sample(range(1, max(parts, devices // unit)), parts - 1)
        return [0, *(unit * edge for edge in sorted(inner)), devices]

    def _random_turn(self) -> tuple[str, ...]:
        names = list(self._request.tasks)
        self._rng.shuffle(names)
        return tuple(names) if len(names) > 1 and self._rng.random() < 0.3 else ()

    def _random_place(self, index: int, start: int, room: int) -> Place | None:
        rng, (_, problem, module) = self._rng, self._modules[index]
        pins = self._pins(index)
        tps = [t for t in self._space.tensor_degrees(index) if t <= room]
        if not tps:
            return None
        tp = rng.choice(tps)
        pps = [
            p for p in range(1, min(room // tp, problem.blocks(module)) + 1) if pins.allows("pp", p)
        ]
        if not pps:
            return None
        pp = rng.choices(pps, [1 / p for p in pps])[0]
        most = min(room // (tp * pp), problem.round_samples)
        dps = [d for d in range(1, most + 1) if pins.allows("dp", d)]
        if not dps:
            return None
        dp = dps[-1] if rng.random() < 0.7 else rng.choice(dps)
        return self._sized(index, start, tp, pp, 1, dp, None)

    def _sized(
        self, index: int, start: int, tp: int, pp: int, vpp: int, dp: int, size: int | None
    ) -> Place | None:
        """A place with these degrees; None where they are not allowed."""
        _, problem, module = self._modules[index]
        pins, blocks = self._pins(index), problem.blocks(module)
        if not (1 <= dp <= problem.round_samples and vpp >= 1 and 1 <= pp * vpp <= blocks):
            return None
        if tp not in self._space.tensor_degrees(index):
            return None
        if start < 0 or start + tp * pp * dp > self._request.devices:
            return None
        if vpp > 1 and (pp == 1 or problem.task.sync_batches):
            return None
        degrees = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}
        if not all(pins.allows(name, value) for name, value in degrees.items()):
            return None
        share = -(-problem.round_samples // dp)
        sizes = list(microbatch_sizes(share, pins))
        if size is None or not pins.allows("microbatch", size):
            if not sizes:
                return None
            size = self._rng.choice(sizes)
        kind: ScheduleKind = "interleaved" if vpp > 1 else "1f1b"
        if problem.task.sync_batches:
            kind = "batch-sync"
        return Place(
            start=start,
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            size=min(size, share),
            schedule=Schedule(kind=kind, split_backward=pins.split_backward is True),
        )

    def _changed(self, state: State) -> State | None:
        """One random change, often more."""
        other = self._one_change(state)
        while other is not None and self._rng.random() < AGAIN:
            other = self._one_change(other)
        return None if other == state else other

    def _one_change(self, state: State) -> State | None:
        changes = (
            (self._other_degrees, 4),
            (self._other_size, 3),
            (self._all_sizes, 2),
            (self._shifted, 2),
            (self._boundary, 3),
            (self._copied, 2),
            (self._redrawn, 1),
            (self._other_schedule, 3),
            (self._other_cuts, 1),
            (self._other_training, 1),
            (self._other_order, 1),
        )
        change = self._rng.choices([c for c, _ in changes], [w for _, w in changes])[0]
        return change(state, self._rng.randrange(len(state.places)))

    def _other_degrees(self, state: State, index: int) -> State | None:
        rng, old = self._rng, state.places[index]

        def near(value: int) -> int:
            return rng.choice([value - 1, value + 1, value // 2, 2 * value])

        tp, pp, vpp, dp = old.tp, old.pp, old.vpp, old.dp
        axis = rng.choice("tpvdd")
        if axis == "t":
            tp = rng.choice(self._space.tensor_degrees(index))
        elif axis == "p":
            pp, vpp = near(pp), 1
        elif axis == "v":
            vpp = near(vpp)
        if axis == "d":
            dp = near(dp)
        elif rng.random() < 0.7 and tp * pp:  # about the same devices
            dp = old.devices // (tp * pp)
        size = old.size if rng.random() < 0.5 else max(1, old.size * old.dp // max(1, dp))
        place = self._sized(index, old.start, tp, pp, vpp, dp, size)
        return place and state.at(index, place)

    def _other_size(self, state: State, index: int) -> State | None:
        old = state.places[index]
        share = -(-self._modules[index][1].round_samples // old.dp)
        sizes = list(microbatch_sizes(share, self._pins(index)))
        if self._pins(index).microbatch is None:
            sizes += [size for size in (old.size - 1, old.size + 1) if 1 <= size <= share]
        return state.at(index, self._with_size(index, old, self._rng.choice(sizes or [old.size])))

    def _with_size(self, index: int, old: Place, size: int) -> Place:
        place = self._sized(index, old.start, old.tp, old.pp, old.vpp, old.dp, size)
        return old if place is None else replace(place, schedule=old.schedule, cuts=old.cuts)

    def _all_sizes(self, state: State, index: int) -> State:
        """All units of the task with about the same samples at once."""
        old = state.places[index]
        at_once = max(
            1, old.size * old.dp * self._rng.choice([1, 1, 2, 3]) // self._rng.choice([1, 2, 3])
        )
        for other, place in enumerate(state.places):
            if self._modules[other][1] is self._modules[index][1]:
                state = state.at(other, self._with_size(other, place, max(1, at_once // place.dp)))
        return state

    def _shifted(self, state: State, index: int) -> State | None:
        """To where another begins or ends, or by a few ranks."""
        old, other = state.places[index], self._rng.choice(state.places)
        start = self._rng.choice(
            [
                0,
                other.start,
                other.start + other.devices,
                other.start - old.devices,
                other.start + other.devices - old.devices,
                old.start + old.tp * self._rng.choice([-2, -1, 1, 2]),
            ]
        )
        return self._moved(state, index, start)

    def _moved(self, state: State, index: int, start: int) -> State | None:
        old = state.places[index]
        place = self._sized(index, start, old.tp, old.pp, old.vpp, old.dp, old.size)
        return place and state.at(index, replace(place, schedule=old.schedule, cuts=old.cuts))

    def _boundary(self, state: State, index: int) -> State | None:
        """What lies before a rank, and what after it, on other numbers of devices."""
        rng, devices = self._rng, self._request.devices
        old = rng.choice(
            [state.places[index].start, state.places[index].start + state.places[index].devices]
        )
        step = rng.choice([1, 2, 4, 8, state.places[index].tp * state.places[index].pp])
        new = old + rng.choice([-1, 1]) * step
        if not 0 < old < devices or not 0 < new < devices:
            return None
        for at, place in enumerate(state.places):
            end = place.start + place.devices
            if place.start < old < end:
                continue
            start, stop = (new if place.start == old else place.start), (new if end == old else end)
            if (start, stop) == (place.start, end):
                continue
            moved = self._fitted(at, place, start, stop - start)
            if moved is None:
                return None
            state = state.at(at, moved)
        return state

    def _fitted(self, index: int, old: Place, start: int, room: int) -> Place | None:
        """As a unit runs, on so many devices at most."""
        for tp, pp in ((old.tp, old.pp), (old.tp, 1), (1, 1)):
            if dp := min(max(0, room) // (tp * pp), self._modules[index][1].round_samples):
                size = max(1, old.size * old.dp // dp)
                return self._sized(index, start, tp, pp, 1, dp, size)
        return None

    def _copied(self, state: State, index: int) -> State | None:
        """On the devices of another unit, with its degrees or its own."""
        old, other = state.places[index], self._rng.choice(state.places)
        if self._rng.random() < 0.5:
            place = self._fitted(index, old, other.start, other.devices)
        else:
            place = self._sized(index, other.start, other.tp, other.pp, 1, other.dp, other.size)
        return place and state.at(index, place)

    def _redrawn(self, state: State, index: int) -> State | None:
        """On devices that no other unit has, or anywhere."""
        used = np.zeros(self._request.devices + 1, dtype=bool)
        used[-1] = True
        for other, place in enumerate(state.places):
            if other != index:
                used[list(self._ranks(place).members)] = True
        free = [rank for rank in range(self._request.devices) if not used[rank]]
        start = self._rng.choice(free) if free and self._rng.random() < 0.6 else 0
        room = int(np.argmax(used[start:])) or self._request.devices - start
        place = self._random_place(index, start, room)
        return place and state.at(index, place)

    def _other_schedule(self, state: State, index: int) -> State:
        rng = self._rng
        chosen = [index] if rng.random() < 0.6 else range(len(state.places))
        what, value = rng.choice(("lead", "sync", "split", "gpipe")), rng.randint(0, MOST_LEAD)
        split = not state.places[index].schedule.split_backward
        for at in chosen:
            place, synced = state.places[at], self._modules[at][1].task.sync_batches
            old, changes = place.schedule, dict[str, Any]()
            if what == "lead":
                changes = {"lead": value}
            elif what == "sync":
                changes = {"sync_lead": value % 3} if old.kind == "batch-sync" else {}
            elif what == "split" and self._pins(at).split_backward == "auto":
                even = split and place.pp > 1 and value % 2 == 1
                changes = {"split_backward": split, "even_in_flight": even}
            elif what == "gpipe" and place.vpp == 1:
                usual = "batch-sync" if synced else "1f1b"
                changes = {"kind": "gpipe" if old.kind != "gpipe" and value % 3 == 0 else usual}
            changed = replace(place, schedule=old.model_copy(update=changes))
            state = replace(state.at(at, changed), order=state.order)
        return state

    def _other_cuts(self, state: State, index: int) -> State | None:
        """One boundary between stages moved by a block."""
        place = state.places[index]
        if place.pp * place.vpp == 1:
            return None
        _, problem, module = self._modules[index]
        cuts = place.kept.blocks if place.kept is not None else place.cuts
        cuts = cuts or module_stages(problem, module, place.pp * place.vpp)
        edges = [start for start, _ in cuts] + [cuts[-1][1]]
        at = self._rng.randrange(1, len(edges) - 1)
        edges[at] += self._rng.choice([-1, 1])
        if not edges[at - 1] < edges[at] < edges[at + 1]:
            return None
        moved = self._sized(index, place.start, place.tp, place.pp, place.vpp, place.dp, place.size)
        chunks = tuple(pairwise(edges))
        return moved and state.at(index, replace(moved, cuts=chunks, schedule=place.schedule))

    def _other_training(self, state: State, index: int) -> State:
        """ZeRO, or recomputation where it is free."""
        if self._free and self._rng.random() < 0.7:
            module = self._rng.choice(self._free)
            others = frozenset(pair for pair in state.full if pair[0] != module)
            turned = others | {(module, "full")} if others == state.full else others
            return replace(state, full=turned)
        return replace(state, zero=self._rng.randint(self._job.train.zero, 3))

    def _other_order(self, state: State, index: int) -> State:
        if len(self._request.tasks) > 1 and self._rng.random() < 0.5:
            return replace(state, in_turn=self._random_turn())
        rule = self._rng.choice(get_args(OrderRule))
        return replace(state, order=Order(rule=rule), timed=self._rng.random() < 0.7)


def _instructions(lowered: LoweredPlan) -> int:
    return sum(sum(stage.rounds) for stage in lowered.simulated_graph.stages)
