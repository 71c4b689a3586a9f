"""What layouts take and hold, about: what decides which neighbour is simulated first.

The estimate of a step is that of a pipeline: the work of the busiest device, and the path of one
micro-batch through all others; or the messages between nodes, where these take longer.

Shape suffixes used in this file: P = pipeline positions; R = devices of a group; N = nodes;
D, E = replicas.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.costs.hardware import load_hardware
from mmplan.costs.program_costs import MOST_PARTS
from mmplan.planning.neighbours.layout import LayoutSpace, PlanLayout, UnitChoice
from mmplan.program.shards import BUCKET_BYTES
from mmplan.schema.cluster import Link
from mmplan.solvers.cost_table import StageCosts, reductions_s
from mmplan.solvers.partitioner import module_stages
from mmplan.solvers.sample_split import cut

MOST_ZERO = 3


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


class LayoutEstimates:
    """Seconds and bytes of layouts.

    Args:
        space: of the layouts.

    Attributes:
        hides_sums: estimates of steps know what hides sums of gradients inside a node too. They are
            nearer to the step mostly, but what they prefer is no better: so both are of use.
    """

    def __init__(self, space: LayoutSpace) -> None:
        self.hides_sums = False
        self._space, self._request, self._owners = space, space.request, space.owners
        self._consumers = [
            (index, producer) for index, own in enumerate(space.producers) for producer in own
        ]
        self.cost, self._stages = cache(self._cost), cache(self._cut)
        self._seconds = cache(self._seconds_of)
        self._sum_s, self._sums = cache(self._reduction_s), cache(self._of_reductions)
        self._group_busy_s, self._row = cache(self._busy_of), cache(self._busy_row)
        self._turns, self._later = cache(self._turns_of), cache(self._later_of)
        slowdown = load_hardware().compute_slowdown(self._request.cluster.device)
        self._beside = 1 - 1 / slowdown
        self._node_seconds: dict[tuple[object, ...], tuple[float, float]] = {}
        self._edge_bytes, self._inside_bytes = cache(self._of_edge), cache(self._of_stages)
        self._summed_bytes = cache(self._of_sums)
        self._bytes_of, self._group_bytes = cache(self._bytes), cache(self._bytes_of_group)

    # --- seconds ---------------------------------------------------------------------

    def _cut(self, index: int, chunks: int) -> StageCosts:
        """A unit's blocks in so many chunks."""
        _, problem, module = self._space.modules[index]
        return problem.module_costs(module).stages(module_stages(problem, module, chunks))

    def _cost(self, index: int, choice: UnitChoice) -> _Cost:
        _, problem, module = self._space.modules[index]
        costs = problem.module_costs(module)
        own = self._stages(index, choice.pp * choice.vpp)
        share = -(-problem.round_samples // choice.dp)
        sizes = cut(share, choice.size, pinned=self._space.pins(index).microbatch is not None)
        values = tuple(sorted({*sizes, choice.size}))
        counts = np.array([sizes.count(value) for value in values])
        seconds = self._seconds(index, choice.shards, choice.tp // choice.shards, choice.dp, values)
        forward, backward = (own.shares @ x for x in seconds)
        chunks = (forward + backward).reshape(choice.vpp, choice.pp, len(values))
        each_P = chunks[:, :, -1].sum(axis=0)
        # The ramp of interleaved chunks is as much shorter, if there are micro-batches to fill it.
        slot_s, chunked = float(each_P.max()), choice.vpp if len(sizes) >= choice.pp else 1
        trained = float(own.trained.max()) * choice.vpp / choice.shards
        return _Cost(
            busy_s=problem.rounds * (chunks.sum(axis=0) @ counts),
            slot_s=slot_s,
            through_s=slot_s + (float(each_P.sum()) - slot_s) / chunked,
            gradient_bytes=trained * costs.gradient_bytes,
            backward_s=float(backward[:, -1].sum()) / choice.pp,
        )

    def _seconds_of(
        self, index: int, shards: int, sharers: int, dp: int, sizes: tuple[int, ...]
    ) -> tuple[Floats, Floats]:
        """Of a unit's forwards and backwards: what stages' shares are multiplied by."""
        _, problem, module = self._space.modules[index]
        work, each = np.array(sizes) / sharers, np.full(len(sizes), dp)
        return problem.module_costs(module).seconds(shards, work, each)

    def _reduction_s(self, index: int, choice: UnitChoice, dp: int) -> float:
        own = self.cost(index, choice)
        if not own.gradient_bytes:
            return 0.0
        alone_s, together_s, number = self._sums(choice.shards, choice.pp, dp, own.gradient_bytes)
        # As :func:`mmplan.solvers.cost_table.reduction_s`.
        return max(alone_s, together_s - (number - 1) * own.backward_s)

    def _of_reductions(
        self, tp: int, pp: int, dp: int, num_bytes: float
    ) -> tuple[float, float, int]:
        alone_s, together_s, number = reductions_s(
            self._request.cluster, tp=tp, pp=pp, dp=dp, num_bytes=num_bytes
        )
        return float(alone_s), float(together_s), int(number)

    def _sums_s(self, layout: PlanLayout) -> list[float]:
        """By unit, of the sums of gradients over all places at which its parameters are used."""
        if len(set(self._owners)) == len(self._owners):
            return [self._sum_s(i, own, own.copies) for i, own in enumerate(layout.choices)]
        places: defaultdict[str, set[tuple[object, ...]]] = defaultdict(set)
        replicas: Counter[str] = Counter()
        for index, (own, owner) in enumerate(zip(layout.choices, self._owners, strict=True)):
            place = layout.group_of(index), own.offset, own.tp, own.pp, own.dp
            if place not in places[owner]:
                places[owner].add(place)
                replicas[owner] += own.copies
        return [
            self._sum_s(index, own, replicas[owner])
            for index, (own, owner) in enumerate(zip(layout.choices, self._owners, strict=True))
        ]

    def busiest_s(self, layout: PlanLayout) -> float:
        """Seconds of the computes of the device that has most of them."""
        return max(self._busy_s(layout, group) for group in layout.groups)

    def group_s(self, units: tuple[tuple[int, UnitChoice], ...]) -> float:
        """Of a group beside no others: its busiest device, ramps, and sums of gradients."""
        own = [self.cost(*unit) for unit in units]
        sums_s = max(self._sum_s(index, choice, choice.copies) for index, choice in units)
        ramps_s = sum(cost.through_s - cost.slot_s for cost in own)
        return self._group_busy_s(units) + ramps_s + sums_s

    def _busy_s(self, layout: PlanLayout, group: Sequence[int]) -> float:
        return self._group_busy_s(tuple((index, layout.choices[index]) for index in group))

    def _busy_of(self, units: tuple[tuple[int, UnitChoice], ...]) -> float:
        """Of the busiest device of a group."""
        if len(units) == 1:
            return float(self.cost(*units[0]).busy_s.max())
        total_R = np.zeros(max(choice.end for _, choice in units))
        for index, choice in units:
            total_R[choice.offset : choice.end] += self._row(index, choice)
        return float(total_R.max())

    def _busy_row(self, index: int, choice: UnitChoice) -> Floats:
        """[R], of the computes of each of a unit's devices."""
        return np.tile(np.repeat(self.cost(index, choice).busy_s, choice.tp), choice.dp)

    def estimate_s(self, layout: PlanLayout) -> float:
        """About what a step takes; for comparing neighbours."""
        messages_s, sums_s = self._between_nodes_s(layout)
        return max(self._pipeline_s(layout, sums_s), messages_s)

    def _pipeline_s(self, layout: PlanLayout, link_sums_s: float) -> float:
        """The work of the busiest device, and the path of a micro-batch through all others.

        Args:
            link_sums_s: of all sums of gradients on the busiest link between nodes.
        """
        own = [self.cost(index, choice) for index, choice in enumerate(layout.choices)]
        into, after = [0.0] * len(own), [0.0] * len(own)
        for consumer, producer in self._consumers:
            wait = into[producer] + self._passing_s(layout, own, producer, consumer)
            into[consumer] = max(into[consumer], wait)
        for consumer, producer in reversed(self._consumers):
            wait = after[consumer] + own[consumer].through_s
            after[producer] = max(after[producer], wait)
        turns, last = self._turns(layout.in_turn)
        sums_s = self._sums_s(layout)
        shares = list(_shares(layout))
        free_s, total_s = [0.0] * len(shares), 0.0
        for number, turn in enumerate(turns):
            # A unit begins when all of its devices are free, those that have less to do wait.
            late = [-own_s for own_s in into]
            for before_s, (share, _) in zip(free_s, shares, strict=True):
                for index in share:
                    late[index] = max(late[index], before_s - into[index])
            for consumer, producer in self._consumers:
                late[consumer] = max(late[consumer], late[producer])
            for place, (share, whole) in enumerate(shares):
                if units := [index for index in share if index in turn]:
                    path_s = max(into[i] + own[i].through_s + after[i] for i in units)
                    fill_s = max(0.0, path_s - sum(own[i].slot_s for i in units))
                    sums = {i: sums_s[i] for i in units if last[i] == number}
                    busy = {i: float(own[i].busy_s.max()) for i in units}
                    most_s = self._busy_s(layout, [i for i in whole if i in turn])
                    end_s = free_s[place] + min(most_s, sum(busy.values()))
                    end_s = max(end_s, *(late[i] + own_s for i, own_s in busy.items())) + fill_s
                    tail_s = max(sums.values(), default=0.0)
                    if self.hides_sums:
                        left = {i: self._left_s(layout, i, sum_s) for i, sum_s in sums.items()}
                        tail_s = self._tail_s(busy, left)
                    free_s[place], total_s = end_s, max(total_s, end_s + tail_s)
        # Sums of gradients begin during the last backwards.
        hidden_s = max(sum(own[i].backward_s for i in group) for group in layout.groups)
        return max(total_s, max(free_s) + max(0.0, link_sums_s - hidden_s))

    def _tail_s(self, busy: Mapping[int, float], left: Mapping[int, float]) -> float:
        """Of sums after all computes of some devices, whose tasks run side by side.

        Those of what one task has alone go on beside the tasks after it: these come in the order of
        what is left of sums, most first.

        Args:
            busy: seconds of units' computes.
            left: of their sums of gradients, beside no computes of other tasks.

        Source: Jackson, Scheduling a production line to minimize maximum tardiness, 1955.
        """
        computes, sums, tail_s = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
        for index, own_s in busy.items():
            task = self._space.modules[index][1].task.name
            computes[task] += own_s
            if self._owners.count(self._owners[index]) > 1:
                tail_s = max(tail_s, left.get(index, 0.0))
            else:
                sums[task] = max(sums[task], left.get(index, 0.0))
        after_s = sum(computes.values())
        for task in sorted(computes, key=lambda own: -sums[own]):
            after_s -= computes[task]
            tail_s = max(tail_s, sums[task] - after_s)
        return tail_s

    def _left_s(self, layout: PlanLayout, index: int, sum_s: float) -> float:
        """Of a sum of gradients, beside no computes: they begin during the last backwards."""
        own = self.cost(index, layout.choices[index])
        parts = min(MOST_PARTS, max(1, math.ceil(own.gradient_bytes / BUCKET_BYTES)))
        later = self._later(index, layout.group_of(index))
        later_s = sum(self.cost(i, layout.choices[i]).backward_s for i in later)
        hidden_s = own.backward_s * (1 - 1 / parts) + later_s
        return max(sum_s - hidden_s, sum_s * max(self._beside, 1 / parts))

    def _later_of(self, index: int, group: tuple[int, ...]) -> list[int]:
        """Units of a group whose backwards come after a unit's."""
        found = set(self._space.producers[index])
        for producer in sorted(found):
            found |= set(self._later_of(producer, group))
        return sorted(found & set(group))

    def _turns_of(self, in_turn: tuple[str, ...]) -> tuple[list[set[int]], list[int]]:
        """The units of each turn, and of each unit the last turn that adds to its gradients."""
        tasks = [problem.task.name for _, problem, _ in self._space.modules]
        names = [{name} for name in in_turn]
        names += [rest] if (rest := set(tasks) - set(in_turn)) else []
        turns = [{index for index, task in enumerate(tasks) if task in own} for own in names]
        last = {self._owners[index]: number for number, own in enumerate(turns) for index in own}
        return turns, [last[owner] for owner in self._owners]

    def _passing_s(
        self, layout: PlanLayout, own: Sequence[_Cost], producer: int, consumer: int
    ) -> float:
        """Until a producer has made what the consumer's first micro-batches need."""
        first, then = layout.choices[producer], layout.choices[consumer]
        needed = max(1.0, then.dp * then.size / (first.dp * first.size))
        return own[producer].through_s + (needed - 1) * own[producer].slot_s

    # --- messages --------------------------------------------------------------------

    def _between_nodes_s(self, layout: PlanLayout) -> tuple[float, float]:
        """Seconds of messages, and of sums of gradients, on the busiest link between nodes."""
        cluster = self._request.cluster
        link = cluster.links.inter_node
        if cluster.nodes == 1 or link is None:
            return 0.0, 0.0
        places = [(*_degrees(own), own.vpp, own.shards, own.offset) for own in layout.choices]
        key = layout.groups, *places
        if key not in self._node_seconds:
            self._node_seconds[key] = self._node_s(layout, link)
        return self._node_seconds[key]

    def _node_s(self, layout: PlanLayout, link: Link) -> tuple[float, float]:
        cluster, starts = self._request.cluster, self._space.starts_of(layout)
        if starts is None:
            return 0.0, 0.0  # it has no plan
        messages_N, sums_N = np.zeros(cluster.nodes), np.zeros(cluster.nodes)
        places: defaultdict[str, dict[tuple[object, ...], tuple[int, UnitChoice, int]]]
        places = defaultdict(dict)
        for index, choice in enumerate(layout.choices):
            degrees, start = _degrees(choice), starts[index]
            if choice.pp > 1:
                messages_N += self._inside_bytes(index, degrees, start)
            for producer in self._space.producers[index]:
                sends = _degrees(layout.choices[producer])
                messages_N += self._edge_bytes(producer, sends, starts[producer], degrees, start)
            places[self._owners[index]].setdefault((degrees, start), (index, choice, start))
        for own in places.values():
            sums_N += self._summed_bytes(tuple(own.values()))
        bandwidth = link.bandwidth_bytes_per_s
        return float(messages_N.max()) / bandwidth, float(sums_N.max()) / bandwidth

    def _of_edge(
        self,
        producer: int,
        sends: tuple[int, int, int],
        first: int,
        takes: tuple[int, int, int],
        then: int,
    ) -> Floats:
        """[N], bytes that leave each node between two units in a step."""
        _, problem, module = self._space.modules[producer]
        num_bytes = problem.output_bytes(module, problem.blocks(module) - 1)
        num_bytes *= problem.round_samples * problem.rounds
        back = num_bytes if problem.makes_gradient(module) else 0.0
        return self._leaving(
            self._nodes(sends, first, sends[1] - 1), self._nodes(takes, then, 0), num_bytes, back
        )

    def _of_stages(self, index: int, shape: tuple[int, int, int], first: int) -> Floats:
        """[N], bytes that leave each node between a unit's stages in a step; of equal cuts."""
        _, problem, module = self._space.modules[index]
        blocks, pp = problem.blocks(module), shape[1]
        total_N = np.zeros(self._request.cluster.nodes)
        for position in range(pp - 1):
            here, there = (self._nodes(shape, first, at) for at in (position, position + 1))
            if (here != there).any():
                num_bytes = problem.output_bytes(module, blocks * (position + 1) // pp - 1)
                num_bytes *= problem.round_samples * problem.rounds
                total_N += self._leaving(here, there, num_bytes, num_bytes)
        return total_N

    def _of_sums(self, places: tuple[tuple[int, UnitChoice, int], ...]) -> Floats:
        """[N], bytes that leave each node for sums of gradients over places; of equal stages."""
        total_N = np.zeros(self._request.cluster.nodes)
        index, choice, first = places[0]
        num_bytes = self.cost(index, choice).gradient_bytes * choice.shards
        for position in range(choice.pp):
            if len(places) == 1:
                own = np.unique(self._nodes(_degrees(choice), first, position))
            else:
                node = self._request.cluster.devices_per_node
                spans = (range(at // node, (at + c.devices - 1) // node + 1) for _, c, at in places)
                own = np.unique(np.concatenate([np.array(span) for span in spans]))
            # A ring over the nodes.
            total_N[own] += 2 * num_bytes * (len(own) - 1) / len(own)
        return total_N

    def _nodes(self, shape: tuple[int, int, int], first: int, position: int) -> Ints:
        """[dp], the node of each replica at a pipeline position."""
        dp, pp, tp = shape
        ranks = first + (np.arange(dp) * pp + position) * tp
        return ranks // self._request.cluster.devices_per_node

    def _leaving(self, here_D: Ints, there_E: Ints, num_bytes: float, back: float) -> Floats:
        """[N], of the samples of a step, in order on the replicas of two units."""
        here, there = len(here_D), len(there_E)
        edges = np.union1d(np.arange(here + 1) * there, np.arange(there + 1) * here)
        shares, middle = np.diff(edges) / (here * there), edges[:-1]
        source, target = here_D[middle // there], there_E[middle // here]
        shares = np.where(source == target, 0.0, shares)
        total_N = np.zeros(self._request.cluster.nodes)
        np.add.at(total_N, source, shares * num_bytes)
        np.add.at(total_N, target, shares * back)
        return total_N

    # --- memory ----------------------------------------------------------------------

    def most_zero(self, layout: PlanLayout) -> int:
        """The last ZeRO stage that saves memory: 2 and 3 cut what is summed in rounds.

        There are rounds where all units have the same micro-batches as those before them.
        """
        own = [(choice.dp, choice.size) for choice in layout.choices]
        has_rounds = all(own[i] == own[p] for i, ps in enumerate(self._space.producers) for p in ps)
        return MOST_ZERO if has_rounds else 1

    def least_bytes(self, layout: PlanLayout) -> float:
        """What its fullest device holds at least."""
        return sum(self.fullest(layout))

    def fullest(self, layout: PlanLayout) -> tuple[float, float]:
        """Bytes of parameters with their state, and of activations, at least, of that device."""
        most, zero = self.most_zero(layout), layout.zero
        ahead = self._ahead(layout)
        units = [(i, own, min(zero[i], most), ahead[i]) for i, own in enumerate(layout.choices)]
        groups = (self._group_bytes(tuple(units[i] for i in group)) for group in layout.groups)
        return max(groups, key=sum)

    def least_group_bytes(self, units: tuple[tuple[int, UnitChoice], ...]) -> float:
        """What a group's fullest device holds beside no others, under ZeRO-3."""
        return sum(self._group_bytes(tuple((index, own, MOST_ZERO, 1) for index, own in units)))

    def _ahead(self, layout: PlanLayout) -> list[int]:
        """Of each unit, micro-batches whose forwards come before its last stage's first backward.

        At least: what the first replica of a consumer has first, and its lead.
        """
        found, wanted = [1] * len(layout.choices), [0] * len(layout.choices)
        for index in reversed(range(len(found))):
            choice, total = layout.choices[index], self._space.modules[index][1].round_samples
            if wanted[index]:
                found[index] = -(-wanted[index] // (choice.dp * choice.size)) + choice.lead
            first = found[index] + choice.lead * (choice.pp - 1) if choice.kind == "1f1b" else 1
            until = total if choice.kind == "batch-sync" else (first - 1) * choice.dp + 1
            for producer in self._space.producers[index]:
                wanted[producer] = max(wanted[producer], min(until * choice.size, total))
        return found

    def _bytes_of_group(
        self, units: tuple[tuple[int, UnitChoice, int, int], ...]
    ) -> tuple[float, float]:
        """Of the fullest device of units that share some, each with its ZeRO stage."""
        active_R = np.zeros(max(choice.end for _, choice, _, _ in units))
        # Units that cut the same parameters alike hold them once.
        fixed: defaultdict[tuple[str, int], Floats] = defaultdict(lambda: np.zeros_like(active_R))
        for index, choice, zero, ahead in units:
            held = self._bytes_of(index, choice, zero, ahead)
            for total_R, of_P in zip(
                (fixed[self._owners[index], choice.shards], active_R), held, strict=True
            ):
                own_R = np.tile(np.repeat(of_P, choice.tp), choice.dp)
                place_R = total_R[choice.offset : choice.end]
                np.maximum(place_R, own_R, out=place_R)
        fixed_R = np.sum([*fixed.values()], axis=0)
        fullest = int((fixed_R + active_R).argmax())
        return float(fixed_R[fullest]), float(active_R[fullest])

    def _bytes(
        self, index: int, choice: UnitChoice, zero: int, ahead: int
    ) -> tuple[Floats, Floats]:
        """[P], parameters with their state, and activations of micro-batches in flight.

        Args:
            ahead: those of the last stage before its first backward.
        """
        _, problem, module = self._space.modules[index]
        costs, (tp, pp, dp) = problem.module_costs(module), (choice.shards, choice.pp, choice.dp)
        own = self._stages(index, pp * choice.vpp)
        # Ranks of all units that use the parameters cut their state.
        is_alone = self._owners.count(self._owners[index]) == 1
        sharers = choice.copies if is_alone else self._request.devices
        trained = problem.costs.bytes_per_parameter(
            trainable=True,
            zero=zero,
            dp=sharers,
            in_rounds=True,
            gathers=sharers > 1,
        )
        frozen = problem.costs.bytes_per_parameter(trainable=False)
        fixed = (own.trained * trained + own.frozen * frozen) / tp
        # A replica with the largest share has one of its largest micro-batches beside others.
        share = -(-problem.round_samples // dp)
        count = -(-share // choice.size)
        sizes = np.array([share // count, -(-share // count)])
        smaller, larger = (
            costs.held_bytes(
                own.held, own.outputs, tp=tp, size=np.array(size / (choice.tp // choice.shards))
            )
            .reshape(choice.vpp, pp)
            .max(axis=0)
            for size in sizes
        )
        in_flight = np.ones(pp)
        if choice.kind == "batch-sync":
            in_flight[:] = count
        elif choice.vpp == 1:
            in_flight = np.minimum(ahead + choice.lead * np.arange(pp - 1, -1, -1), count)
        return fixed.reshape(choice.vpp, pp).sum(axis=0), larger + smaller * (in_flight - 1)


def _shares(layout: PlanLayout) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """The units of devices that the same units use, and the group of these."""
    for group in layout.groups:
        ends = ((layout.choices[i].offset, layout.choices[i].end) for i in group)
        for first, end in pairwise(sorted({0, *chain.from_iterable(ends)})):
            own = [
                i
                for i in group
                if layout.choices[i].offset <= first and end <= layout.choices[i].end
            ]
            if own:
                yield own, group


def _degrees(choice: UnitChoice) -> tuple[int, int, int]:
    """Degrees that say where a unit's replicas and stages stand."""
    return choice.dp, choice.pp, choice.tp
