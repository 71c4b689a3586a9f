"""Changes of a layout: those one step away, two steps away, and small layouts to begin with."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mmplan.planning.neighbours.estimates import LayoutEstimates
from mmplan.planning.neighbours.layout import Backwards, LayoutSpace, PlanLayout, UnitChoice
from mmplan.planning.order_search import LEADS
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import Order, OrderRule
from mmplan.solvers.sample_split import fewest_replicas, microbatch_sizes
from mmplan.solvers.search_budget import SearchBudget

# Forwards between the start and the end of a batch-sync at most; chosen by hand.
_MOST_SYNC_LEAD = 2
# Orders on shared devices that are tried beside each other.
_ORDERS: tuple[tuple[OrderRule, bool], ...] = (
    ("forward-first", True),
    ("longest-path", True),
    ("longest-path", False),
    (Order().rule, False),
)
# What a layout runs otherwise than another one on the same devices.
Tuning = tuple[str, object]
# Uniform layouts: parts of the devices, coarse ones first; micro-batches of a unit, and choices
# kept of a group.
_PARTS = (8, 16)
_UNIFORM_COUNTS = (1, 2, 4, 8, 16, 64)
_UNIFORM_KEPT = 4
# Estimates are paid for too: seconds of a quiet core.
_ESTIMATE_S = 5e-5
# Of many units making a layout and its estimate take longer: each by so much of each further unit.
# Chosen by hand.
_FEW_UNITS = 20
_UNIT_S = 1e-5


class LayoutChanges:
    """The changes that a request's devices and the workload's pins allow.

    Args:
        space: of the layouts.
        estimates: of them.

    Attributes:
        made_s: seconds of a quiet core that each layout takes, whether or not it is tried.
        estimate_s: that an estimate of one takes.
    """

    def __init__(self, space: LayoutSpace, estimates: LayoutEstimates) -> None:
        self._space, self._estimates = space, estimates
        self.made_s = _UNIT_S * max(0, len(space.modules) - _FEW_UNITS)
        self.estimate_s = _ESTIMATE_S + self.made_s
        self._request = space.request
        # Their backwards may be split, where they send gradients to other stages.
        self._free_backwards = [
            space.pins(index).split_backward == "auto" for index in range(len(space.modules))
        ]
        self._with_rounds = [
            index
            for index, (_, problem, _) in enumerate(space.modules)
            if problem.task.sync_batches and problem.rounds > 1
        ]

    def neighbours(self, layout: PlanLayout) -> Iterator[PlanLayout | None]:
        """Layouts one change away that the workload's pins allow.

        None is for each that needs too many devices: it took time too.
        """
        changes = itertools.chain(
            self._of_units(layout),
            self._of_all_sizes(layout),
            self._moved_devices(layout),
            self._merged(layout),
            self._split(layout),
            self._widened(layout),
            self._alike(layout),
            self._shifted(layout),
        )
        yield from map(self._if_it_fits, changes)

    def _if_it_fits(self, layout: PlanLayout) -> PlanLayout | None:
        """The layout with its usual leads; None where it needs too many devices."""
        return self.with_usual_leads(layout) if layout.devices <= self._request.devices else None

    def pairs(self, layout: PlanLayout) -> Iterator[PlanLayout | None]:
        """Layouts two changes away: of groups and then any, or of different units.

        Units with the same parameters come first, and all of them change together.
        """
        yield from map(self._if_it_fits, self._cut_alike(layout))
        for other in itertools.chain(self._merged(layout), self._split(layout)):
            yield from self.neighbours(other)
        single = [list(self._choices_near(i, layout)) for i in range(len(layout.choices))]
        for first, second in itertools.combinations(range(len(single)), 2):
            for one, other in itertools.product(single[first], single[second]):
                yield self._if_it_fits(layout.with_choices({first: one, second: other}))

    def _cut_alike(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """All units with the same parameters under the same degrees, those near to one's own."""
        units: defaultdict[str, list[int]] = defaultdict(list)
        for index, owner in enumerate(self._space.owners):
            units[owner].append(index)
        for own in units.values():
            near = (
                choice
                for index in own
                for choice in (
                    layout.choices[index],
                    *self._choices_near(index, layout, least_tp=True),
                )
            )
            for choice in dict.fromkeys(near) if len(own) > 1 else ():
                others = {
                    index: self._with(
                        index,
                        layout.choices[index],
                        tp=choice.tp,
                        pp=choice.pp,
                        dp=choice.dp,
                        size=choice.size,
                    )
                    for index in own
                }
                yield layout.with_choices({i: c for i, c in others.items() if c is not None})

    def _of_units(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        for index in range(len(layout.choices)):
            for choice in self._choices_near(index, layout):
                yield layout.with_choices({index: choice})

    def _choices_near(
        self, index: int, layout: PlanLayout, *, least_tp: bool = False
    ) -> Iterator[UnitChoice]:
        """Other degrees on about as many devices, other sizes.

        Args:
            least_tp: the least tensor-parallel degree too, however far.
        """
        choice = layout.choices[index]
        free = self._request.devices - layout.devices
        room = layout.group_devices(layout.group_of(index)) + free
        tps = _beside(self._space.tensor_degrees(index), choice.tp)
        if least_tp:
            tps = sorted({*tps, min(self._space.tensor_degrees(index), default=choice.tp)})
        yield from self._degrees_near(index, choice, room, tps)
        yield from self._sizes_near(index, choice)
        yield from self._items_near(index, choice)

    def _items_near(self, index: int, choice: UnitChoice) -> Iterator[UnitChoice]:
        """Replicas as groups that share out the items of samples, or such groups as replicas."""
        if choice.items:
            found = [self._with(index, choice, tp=1, dp=choice.copies, items=False)]
        else:
            sizes = {group: {choice.size, choice.size * group} for group in range(2, choice.dp + 1)}
            found = [
                self._with(index, choice, tp=group, dp=choice.dp // group, size=size, items=True)
                for group, own in sizes.items()
                for size in sorted(own)
                if choice.tp == 1 and choice.dp % group == 0
            ]
        yield from (other for other in found if other is not None)

    def _degrees_near(
        self, index: int, choice: UnitChoice, room: int, tps: Sequence[int]
    ) -> Iterator[UnitChoice]:
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
        items: bool | None = None,
    ) -> UnitChoice | None:
        """The choice with other degrees; None where these are not allowed, or its own."""
        _, problem, module = self._space.modules[index]
        tp, pp, dp = tp or choice.tp, pp or choice.pp, choice.dp if dp is None else dp
        vpp, blocks = choice.vpp if vpp is None else vpp, problem.blocks(module)
        if pp == 1 and choice.pp > 1:
            vpp = 1
        if not (1 <= dp <= problem.round_samples and vpp >= 1 and 1 <= pp * vpp <= blocks):
            return None
        items = tp > 1 and (choice.items if items is None else items)
        degrees = self._space.item_groups if items else self._space.tensor_degrees
        if tp not in degrees(index):
            return None
        kind = choice.kind
        if vpp > 1 and (pp == 1 or problem.task.sync_batches):
            return None
        if not problem.task.sync_batches:
            kind = "interleaved" if vpp > 1 else "1f1b"
        pins = self._space.pins(index)
        share = -(-problem.round_samples // dp)
        size = min(size or choice.size, share)
        chosen = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "microbatch": size}
        if not all(pins.allows(name, value) for name, value in chosen.items()):
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
            sync_lead=choice.sync_lead,
            items=items,
        )
        return None if changed == choice else changed

    def _sizes_of(self, choice: UnitChoice, dp: int) -> list[int]:
        scaled = -(-choice.size * choice.dp // max(1, dp))
        return sorted({choice.size, scaled, -(-choice.size // 2), -(-scaled // 2)})

    def _sizes_near(self, index: int, choice: UnitChoice) -> Iterator[UnitChoice]:
        problem = self._space.modules[index][1]
        share = -(-problem.round_samples // choice.dp)
        sizes = list(microbatch_sizes(share, self._space.pins(index)))
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
            -(-self._space.modules[i][1].round_samples // (choice.dp * choice.size))
            for i, choice in enumerate(layout.choices)
        }
        near = {n + d for n in counts for d in (-1, 0, 1)} | {2 * n for n in counts}
        for count in sorted(near | {n // 2 for n in counts}):
            changed: dict[int, UnitChoice] = {}
            for index, choice in enumerate(layout.choices) if count else ():
                share = -(-self._space.modules[index][1].round_samples // choice.dp)
                size = -(-share // min(count, share))
                if other := self._with(index, choice, size=size):
                    changed[index] = other
            if changed:
                yield layout.with_choices(changed)

    def _on_devices(self, index: int, choice: UnitChoice, devices: int) -> UnitChoice | None:
        """The choice that is most like one, on so many devices."""
        least = min(self._space.tensor_degrees(index), default=1)
        for tp, pp in ((choice.tp, choice.pp), (choice.tp, 1), (least, 1)):
            if dp := devices // (tp * pp):
                dp = min(dp, self._space.modules[index][1].round_samples)
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

    def tuned(self, layout: PlanLayout) -> Iterator[tuple[Tuning, PlanLayout]]:
        """The same degrees and sizes on the same devices, run in another way; what is other."""
        for other in self._cut_less(layout):
            yield ("zero", other.zero), other
        # Its sums may take less time, whatever the memory.
        if (further := min(layout.zero) + 1) <= self._estimates.most_zero(layout):
            yield ("zero", further), layout.cut_further(further)
        for other in self._other_backwards(layout):
            yield ("backwards", other.backwards), other
        yield from self._other_sync_leads(layout)
        if layout.shares_devices:
            for rule, timed in _ORDERS:
                yield ("order", (rule, timed)), replace(layout, rule=rule, timed=timed)
        for turns in self._other_turns(layout):
            yield ("in_turn", turns), replace(layout, in_turn=turns)
        ahead = [i for i, c in enumerate(layout.choices) if POLICIES[c.kind].runs_ahead]
        for lead in LEADS:
            every = {i: replace(layout.choices[i], lead=lead) for i in ahead}
            yield ("leads", lead), layout.with_choices(every)
        for index in ahead:
            choice = layout.choices[index]
            for lead in (choice.lead - 1, choice.lead + 1):
                if 0 <= lead <= max(LEADS):
                    other = layout.with_choices({index: replace(choice, lead=lead)})
                    yield ("lead", index), other

    def _other_sync_leads(self, layout: PlanLayout) -> Iterator[tuple[Tuning, PlanLayout]]:
        """Of all units with several rounds, or of one: each holds another round's activations."""
        for lead in range(_MOST_SYNC_LEAD + 1):
            every = {i: replace(layout.choices[i], sync_lead=lead) for i in self._with_rounds}
            if every:
                yield ("sync_leads", lead), layout.with_choices(every)
        for index in self._with_rounds:
            choice = layout.choices[index]
            for lead in (choice.sync_lead - 1, choice.sync_lead + 1):
                if 0 <= lead <= _MOST_SYNC_LEAD:
                    other = layout.with_choices({index: replace(choice, sync_lead=lead)})
                    yield ("sync_lead", index), other

    def _other_turns(self, layout: PlanLayout) -> Iterator[tuple[str, ...]]:
        """All tasks at once or in turn, in another order: sums of the last one's hide least."""
        own = layout.in_turn or tuple(self._request.tasks)
        if len(self._request.tasks) > 1:
            yield from ((), own)
        if layout.in_turn:
            for first in range(len(own) - 1):
                yield (*own[:first], own[first + 1], own[first], *own[first + 2 :])
            yield own[::-1]

    def _cut_less(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """A lower ZeRO stage of all parameters, or of those of one module."""
        owners, least = self._space.owners, self._space.least_zero
        cut = {own for own, zero, low in zip(owners, layout.zero, least, strict=True) if zero > low}
        for changed in [cut, *({own} for own in sorted(cut) if len(cut) > 1)] if cut else ():
            fewer = (z - (own in changed) for own, z in zip(owners, layout.zero, strict=True))
            yield replace(layout, zero=tuple(fewer))

    def _other_backwards(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Whole and split backwards, where a stage of these modules sends gradients on."""
        free = [i for i, is_free in enumerate(self._free_backwards) if is_free]
        piped = any(layout.choices[i].pp > 1 for i in free)
        if piped or any(self._space.producers[i] for i in free):
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
            ways = itertools.product(self._degrees_of(group), (None, 1), (False, True))
            for tp, size, fewest in ways if len(group) > 1 else ():
                dp, changed = devices // tp, dict[int, UnitChoice]()
                for index in group if dp else ():
                    choice = replace(layout.choices[index], offset=0)
                    samples = self._space.modules[index][1].round_samples
                    own = min(dp, samples)
                    if fewest:
                        # They take as long, and may be alike: ZeRO-2 cuts gradients then.
                        own = fewest_replicas(samples, own)
                    other = self._with(index, choice, tp=tp, pp=1, dp=own, size=size)
                    changed[index] = other or choice
                if changed:
                    yield replace(layout.with_choices(changed), groups=groups)

    def _degrees_of(self, group: Sequence[int]) -> list[int]:
        """Tensor-parallel degrees that all units of a group may have."""
        each = [self._space.tensor_degrees(index) for index in group]
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
                busy = [self._estimates.cost(i, layout.choices[i]) for i in group]
                work = [
                    b.busy_s.sum() * layout.choices[i].devices
                    for b, i in zip(busy, group, strict=True)
                ]
                fair = round(total * work[group.index(index)] / (sum(work) or 1.0))
                for number in sorted({n for n in (fair - 1, fair, fair + 1) if 0 < n < total}):
                    sizes = {stay: total - number, (index,): number}
                    if moved := self._resized(apart, sizes):
                        yield moved

    def _widened(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """One unit of a group on the devices of another group too, which its others leave alone."""
        for first, second in itertools.permutations(layout.groups, 2):
            own, other = layout.group_devices(first), layout.group_devices(second)
            rest = [g for g in layout.groups if g not in (first, second)]
            groups = tuple(sorted([*rest, tuple(sorted(first + second))]))
            chosen = layout.choices
            behind = {i: replace(chosen[i], offset=chosen[i].offset + own) for i in second}
            for index in first:
                whole = replace(chosen[index], offset=0)
                wide = self._on_devices(index, whole, own + other)
                if wide is not None and wide.devices > own:
                    changed = {**behind, index: wide}
                    yield replace(layout.with_choices(changed), groups=groups)

    def with_usual_leads(self, layout: PlanLayout) -> PlanLayout:
        """The layout with a lead where a unit waits for others, and none where it cannot.

        Units of a group with the same degrees and sizes hand their outputs on without a message,
        one by one. Where a unit's samples at once are cut otherwise than its consumer's, what is
        left of one micro-batch comes with the next: it runs one more ahead. Groups begin with a
        unit.
        """
        at_once = [choice.dp * choice.size for choice in layout.choices]
        cut = {
            producer
            for consumer, producers in enumerate(self._space.producers)
            for producer in producers
            if max(at_once[producer], at_once[consumer]) % min(at_once[producer], at_once[consumer])
        }
        changed: dict[int, UnitChoice] = {}
        for group in layout.groups:
            own = [layout.choices[index] for index in group]
            first = min(choice.offset for choice in own)
            shapes = {(c.tp, c.dp, c.size, c.offset) for c in own}
            alike = len(shapes) == 1 and all(c.pp == 1 for c in own)
            for index, choice in zip(group, own, strict=True):
                least = 2 if index in cut else 1
                lead = 0 if alike and len(group) > 1 else max(choice.lead, least)
                if lead != choice.lead or first:
                    changed[index] = replace(choice, lead=lead, offset=choice.offset - first)
        return layout.with_choices(changed)

    # --- small layouts ---------------------------------------------------------------

    def small(self, least_zero: int, budget: SearchBudget) -> Iterator[PlanLayout]:
        """Units that share all devices and hold as little as they must, or as changes reach.

        One for each tensor-parallel degree from which to begin; none where pins allow none.
        """
        group = tuple(range(len(self._space.modules)))
        degrees = {tp for index in group for tp in self._space.tensor_degrees(index)}
        for most_tp in sorted(degrees):
            choices = [self._small_choice(index, most_tp) for index in group]
            own = tuple(choice for choice in choices if choice is not None)
            if len(own) == len(group):
                whole = PlanLayout(choices=own, groups=(group,), zero=self._space.least_zero)
                layout = self._smaller(whole.cut_further(least_zero), budget)
                if self._space.units_of(layout):
                    yield layout

    def uniform(self, budget: SearchBudget) -> Iterator[PlanLayout]:
        """Units in one or two groups, each with one tp and pp on some parts of the devices.

        Units with the same parameters are in one group. Of a group on so many devices those
        choices are taken that take least, and others that hold less.
        """
        found: dict[tuple[tuple[int, ...], int], list[dict[int, UnitChoice]]] = {}
        for parts in self._in_parts():
            # Of many modules there are more parts than can be looked at.
            budget.spend(self.estimate_s)
            for key in parts:
                if budget.is_over:
                    return
                if key not in found:
                    found[key] = self._uniform_group(*key, budget)
            for chosen in itertools.product(*(found[key] for key in parts)):
                own = {i: choice for group in chosen for i, choice in group.items()}
                layout = PlanLayout(
                    choices=tuple(own[i] for i in sorted(own)),
                    groups=tuple(sorted(group for group, _ in parts)),
                    zero=self._space.least_zero,
                )
                for turns in {(): None, **dict.fromkeys(self._other_turns(layout))}:
                    yield self.with_usual_leads(replace(layout, in_turn=turns))

    def _in_parts(self) -> Iterator[list[tuple[tuple[int, ...], int]]]:
        """One or two groups, each with its devices."""
        owners, devices = self._space.owners, self._request.devices
        everything, names = range(len(owners)), list(dict.fromkeys(owners))
        yield [(tuple(everything), devices)]
        seen = {0}
        for parts in _PARTS:
            shares = {devices * part // parts for part in range(1, parts)} - seen
            seen |= shares
            for number in range(1, len(names)):
                for others in itertools.combinations(names[1:], number):
                    first, second = (
                        tuple(i for i in everything if (owners[i] in others) == is_other)
                        for is_other in (False, True)
                    )
                    for share in sorted(shares):
                        yield [(first, share), (second, devices - share)]

    def _uniform_group(
        self, group: tuple[int, ...], devices: int, budget: SearchBudget
    ) -> list[dict[int, UnitChoice]]:
        """The choices of a group's units that take least, and others that hold less."""
        ranked: list[tuple[float, int, dict[int, UnitChoice]]] = []
        blocks = min(problem.blocks(m) for _, problem, m in (self._space.modules[i] for i in group))
        for tp in self._degrees_of(group):
            pp = 1
            while tp * pp <= devices and pp <= blocks:
                for count in _UNIFORM_COUNTS:
                    own = {i: self._uniform_choice(i, tp, pp, devices, count) for i in group}
                    chosen = {i: choice for i, choice in own.items() if choice is not None}
                    if len(chosen) == len(group):
                        budget.spend(self.estimate_s)
                        about_s = self._estimates.group_s(tuple(chosen.items()))
                        ranked.append((about_s, len(ranked), chosen))
                pp *= 2
        ranked.sort(key=lambda item: item[:2])
        found: list[dict[int, UnitChoice]] = []
        least_bytes = math.inf
        for _, _, chosen in ranked:
            if len(found) == _UNIFORM_KEPT or budget.is_over:
                break
            budget.spend(self.estimate_s)
            held = self._estimates.least_group_bytes(tuple(chosen.items()))
            # What takes longer has to hold less.
            if held < min(least_bytes, self._request.cluster.device.memory_bytes):
                found.append(chosen)
                least_bytes = held
        return found

    def _uniform_choice(
        self, index: int, tp: int, pp: int, devices: int, count: int
    ) -> UnitChoice | None:
        """A unit on so many devices with so many micro-batches."""
        problem = self._space.modules[index][1]
        kind = "batch-sync" if problem.task.sync_batches else "1f1b"
        none = UnitChoice(tp=0, pp=0, vpp=1, dp=0, size=0, kind=kind, lead=1)
        dp = min(devices // (tp * pp), problem.round_samples)
        share = -(-problem.round_samples // dp)
        return self._with(index, none, tp=tp, pp=pp, dp=dp, size=-(-share // min(count, share)))

    def _smaller(self, layout: PlanLayout, budget: SearchBudget) -> PlanLayout:
        """Changed unit by unit, where that holds less, until it fits the memory."""
        held = self._estimates.least_bytes(layout) if self._space.units_of(layout) else math.inf
        while held > self._request.cluster.device.memory_bytes and not budget.is_over:
            others = [o for o in self._of_units(layout) if o.devices <= self._request.devices]
            budget.spend(self.estimate_s * len(others))
            ranked = sorted(
                (self._estimates.least_bytes(other), n) for n, other in enumerate(others)
            )
            less = (others[n] for num_bytes, n in ranked if num_bytes < held)
            found = next((other for other in less if self._space.units_of(other)), None)
            if found is None:
                break
            layout, held = found, self._estimates.least_bytes(found)
        return layout

    def _small_choice(self, index: int, most_tp: int) -> UnitChoice | None:
        """A module in one replica of as many parts as there may be, sample by sample."""
        _, problem, module = self._space.modules[index]
        kind = "batch-sync" if problem.task.sync_batches else "1f1b"
        none = UnitChoice(tp=0, pp=0, vpp=1, dp=0, size=0, kind=kind, lead=0)
        degrees = [tp for tp in self._space.tensor_degrees(index) if tp <= most_tp]
        for tp in sorted(degrees, reverse=True):
            for pp in range(min(self._request.devices // tp, problem.blocks(module)), 0, -1):
                for dp in range(1, self._request.devices // (tp * pp) + 1):
                    share = -(-problem.round_samples // dp)
                    for size in microbatch_sizes(share, self._space.pins(index)):
                        if found := self._with(index, none, tp=tp, pp=pp, dp=dp, size=size):
                            return found
        return None


def _beside(values: Sequence[int], value: int) -> list[int]:
    """A value of an ascending list, and those next to it."""
    smaller, larger = [v for v in values if v < value], [v for v in values if v > value]
    return [*smaller[-1:], value, *larger[:1]]
