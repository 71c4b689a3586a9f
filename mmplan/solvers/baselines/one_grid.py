"""One TP x DP grid of pipeline positions for a whole model: its formula, and its exact optimum.

A layout gives every module consecutive positions 0..Q-1 of one pipeline; modules may share
positions. With N_mb micro-batches a step, G rounds of K each,

    T = fill + (N_mb - 1) * max_q busy_q + reduce + G s,

where busy_q is what all modules at position q compute for one micro-batch, the fill is one
micro-batch's longest way through the modules (never less than the busiest position), and
reduce is the position with the longest reductions. With Q = 1 this is the formula of
:mod:`.colocated`.

Shape suffixes: S = stages of a module, B = splits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Schedule, Unit
from mmplan.schema.workload import Pins
from mmplan.solvers.communicators import PlacedModule, PlacedModules, communicators
from mmplan.solvers.cost_table import ModuleCosts, StageCosts
from mmplan.solvers.partitioner import module_cuts, tensor_degrees
from mmplan.solvers.problem import Blocks, Candidate, Problem
from mmplan.solvers.sample_split import cut, microbatch_sizes, smallest_divisors, split_evenly
from mmplan.solvers.stage_rows import StageBytes, stage_rows
from mmplan.wording import counted, missing, size

# Micro-batches of a pipeline that are tried without pins: 1, 2, 4, ...
LARGEST_MICROBATCH = 64
# Numbers of pipeline positions up to this are all tried.
ALL_DEPTHS = 16
IntT = TypeVar("IntT", int, Ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGrid:
    """Where a module runs.

    Attributes:
        first: position of its first stage; the others follow.
        cuts: blocks of its stages.
        replicated: every rank of a TP group holds the whole stage, and they share out the
            samples; False where they split it.
        items: the ranks of such a group, where they share out the items of samples; 0 elsewhere.
    """

    first: int
    cuts: tuple[Blocks, ...]
    replicated: bool = False
    items: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of all modules, at one tp."""

    tp: int
    positions: int
    places: Mapping[str, ModuleGrid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a round's samples are cut.

    Attributes:
        dp: replicas of the grid.
        limit: samples of a micro-batch, at most.
        pinned: the user's limit: a smaller micro-batch may come last.
        count: micro-batches of the slowest replica in a round, K.
        even: whether all replicas have as many.
        size: samples of its largest micro-batch.
        inner_dp: ranks of a TP group that share a micro-batch out where a module is replicated.
    """

    dp: int
    limit: int
    pinned: bool
    count: int
    even: bool
    size: int
    inner_dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleStages:
    """A module's stages at positions of the grid.

    Attributes:
        positions: of its stages.
        bytes: of each stage.
        later: stages of other modules after it, on the longest way to the end.
    """

    grid: ModuleGrid
    positions: slice
    tp: int
    costs: ModuleCosts
    stages: StageCosts
    bytes: StageBytes
    later: int


class OneGrid:
    """One layout with any replicas and micro-batches; remembers what it was asked."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        # On one position the consumer is on the same devices: running ahead only holds memory.
        self.schedule = Schedule(
            kind="batch-sync" if problem.task.sync_batches else "1f1b",
            lead=int(layout.positions > 1),
        )
        self._reduce: dict[tuple[int, int], float] = {}
        self._sync: dict[int, float] = {}
        self._modules = {module: self._stages(module) for module in layout.places}
        # Ranks of a TP group that may share a micro-batch out.
        self._most_inner = layout.tp if self._any_replicated else 1

    def _stages(self, module: str) -> _ModuleStages:
        problem, place = self.problem, self.layout.places[module]
        costs, placed = problem.module_costs(module), self._placed(1, self.layout.tp)
        rows = stage_rows(problem, module, place.cuts, len(place.cuts), placed)
        return _ModuleStages(
            grid=place,
            positions=slice(place.first, place.first + len(place.cuts)),
            tp=self._tp(place),
            costs=costs,
            stages=costs.stages(place.cuts),
            bytes=StageBytes(problem, module, rows),
            later=self._later(module),
        )

    @property
    def most(self) -> int:
        """Replicas that the devices and the samples allow."""
        each = self.layout.tp * self.layout.positions
        return min(self.problem.devices // each, self.problem.round_samples)

    # --- what may be chosen ------------------------------------------------------------

    def splits(self, replicas: Iterable[int] | None = None) -> list[Split]:
        """Replicas, of all numbers or of those given, and micro-batches that the pins allow.

        Of the replicas that leave the slowest one the same share only the fewest are tried,
        where more of them can make neither room (ZeRO-1) nor a loss faster.
        """
        if replicas is None:
            sharded = any(map(self.problem.zero_of, self.problem.task.modules))
            every = sharded or bool(self.problem.task.sync_batches)
            replicas = self.counts(every=every)
        samples = self.problem.round_samples
        found = (
            self._split(dp, *own) for dp in replicas for own in self._limits(-(-samples // dp))
        )
        specs = self.problem.request.workload.modules
        pinned = [
            (specs[module].plan, place)
            for module, place in self.layout.places.items()
            if specs[module].plan.dp or specs[module].plan.microbatch
        ]
        return [split for split in found if _allowed(split, pinned)]

    def counts(self, *, every: bool = False) -> Iterable[int]:
        """Replicas, each number the smallest that leaves the slowest its share.

        All numbers where one is pinned.
        """
        specs = self.problem.request.workload.modules
        if every or any(specs[module].plan.dp is not None for module in self.layout.places):
            return range(1, self.most + 1)
        return [int(n) for n in smallest_divisors(self.problem.round_samples) if n <= self.most]

    def _limits(self, share: int) -> list[tuple[int, bool]]:
        specs = self.problem.request.workload.modules
        pinned = [specs[m].plan for m in self.layout.places if specs[m].plan.microbatch]
        if pinned:
            # A replicated module sees less than the micro-batch: any size may be meant.
            sizes = (
                range(1, share + 1) if self._any_replicated else microbatch_sizes(share, pinned[0])
            )
            return [(size, True) for size in sizes]
        if self.problem.task.sync_batches:
            some = next(iter(self.layout.places))
            return [(size, False) for size in microbatch_sizes(share, specs[some].plan)]
        powers = [2**i for i in range(LARGEST_MICROBATCH.bit_length())]
        return [(size, False) for size in powers if size <= share]

    @property
    def _any_replicated(self) -> bool:
        return any(place.replicated for place in self.layout.places.values())

    def _split(self, dp: int, limit: int, pinned: bool) -> Split:
        return _split(self.problem.round_samples, dp, limit, pinned, self._most_inner)

    # --- seconds -----------------------------------------------------------------------

    def compute_s(self, splits: Sequence[Split]) -> Floats:
        """[B] the formula without reductions and syncs, of every split."""
        columns = _columns(splits)
        busy, end = np.zeros((self.layout.positions, len(splits))), dict[str, Floats]()
        for module, own in self._modules.items():
            dp, size = _replicas(own, columns), _sizes(own, columns)
            each = own.costs.seconds(own.tp, size, dp)
            stage_s = own.stages.shares @ sum(each) + self._gathers_s(own, columns)
            busy[own.positions] += stage_s
            producers = self.problem.producers(module)
            reached = [end[p] + self._between_s(p, module, columns) for p in producers]
            inside_s = stage_s.sum(axis=0) + self._inside_s(module, size)
            end[module] = np.maximum.reduce([np.zeros(len(splits)), *reached]) + inside_s
        interval_s = busy.max(axis=0)
        fill_s = np.maximum.reduce([interval_s, *end.values()])
        return fill_s + (self.problem.rounds * columns.count - 1) * interval_s

    def _gathers_s(self, own: _ModuleStages, columns: _SplitColumns) -> Floats | float:
        """[C, B] until ranks that share out items have all of each stage's output."""
        if not own.grid.items:
            return 0.0
        first_s, per_byte_s = self.problem.costs.gather_line(own.grid.items)
        return first_s + per_byte_s * own.stages.cut_bytes[:, None] * columns.size

    def step_s(self, split: Split) -> float:
        """The formula, T."""
        (compute_s,) = self.compute_s([split]).tolist()
        return compute_s + self.reduce_s(split) + self.problem.rounds * self.sync_s(split)

    def sync_s(self, split: Split) -> float:
        """All batch-syncs of one round."""
        if not self.problem.task.sync_batches:
            return 0.0
        if split.dp not in self._sync:
            self._sync[split.dp] = self.problem.sync_s(
                {
                    module: tuple(r for g in self.ranks(module, split).stage(-1) for r in g)
                    for module in self.layout.places
                }
            )
        return self._sync[split.dp]

    def _tp(self, place: ModuleGrid) -> int:
        return 1 if place.replicated else self.layout.tp

    def _inside_s(self, module: str, size: Ints | Floats) -> Floats | float:
        """[B] messages from stage to stage of a module, and back."""
        own, total_s = self._modules[module], 0.0
        for i, following in enumerate(own.grid.cuts[1:]):
            back = self.problem.stage(module, following).input_gradient
            here = own.grid.first + i, own.tp
            num_bytes = size * own.stages.cut_bytes[i]
            total_s = total_s + self._message_s(here, (here[0] + 1, own.tp), num_bytes, back)
        return total_s

    def _between_s(self, producer: str, consumer: str, columns: _SplitColumns) -> Floats:
        source, target = self._modules[producer], self._modules[consumer]
        return self._message_s(
            (source.positions.stop - 1, source.tp),
            (target.positions.start, target.tp),
            _sizes(source, columns) * source.stages.cut_bytes[-1],
            self.problem.makes_gradient(producer),
        )

    def _message_s(
        self, source: tuple[int, int], target: tuple[int, int], num_bytes: Floats, back: bool
    ) -> Floats:
        """[B] between two (position, TP degree); what comes from another node is gathered."""
        if source[0] == target[0]:
            return np.zeros(len(num_bytes))
        costs, node_of = self.problem.costs, self.problem.request.cluster.node_of
        apart = len({node_of(position * self.layout.tp) for position, _ in (source, target)}) > 1
        lines = [costs.message_line(apart=apart)] * (1 + back)
        if apart:
            lines += [costs.gather_line(tp) for tp in (target[1], *([source[1]] if back else []))]
        return sum((line[0] + num_bytes * line[1] for line in lines), np.zeros(len(num_bytes)))

    def reduce_s(self, split: Split) -> float:
        """Gradient reductions of the position where they take longest."""
        key = split.dp, split.inner_dp
        if key not in self._reduce:
            taken = [0.0] * self.layout.positions
            for module, place in self.layout.places.items():
                for i in range(len(place.cuts)):
                    taken[place.first + i] += self._stage_reduce_s(module, i, *key)
            self._reduce[key] = max(taken)
        return self._reduce[key]

    def _stage_reduce_s(self, module: str, i: int, dp: int, inner_dp: int) -> float:
        place, tp = self.layout.places[module], self.layout.tp
        blocks, each = place.cuts[i], _inner_dp(place, inner_dp)
        if dp * each == 1 or not self.problem.stage(module, blocks).trainable:
            return 0.0
        starts = (np.arange(dp) * self.layout.positions + place.first + i) * tp
        return self.problem.costs.all_reduce_s(
            ranks=(starts[:, None] + np.arange(each)).ravel(),
            num_bytes=self._modules[module].stages.trained[i]
            / self._tp(place)
            * self.problem.module_costs(module).gradient_bytes,
            sharers=self._tp(place),
        )

    # --- bytes -------------------------------------------------------------------------

    def needed_bytes(self, splits: Sequence[Split]) -> Floats:
        """[B] bytes of the fullest device: as many micro-batches as each stage's order holds."""
        return (self._fixed_bytes(splits) + self.active_bytes(splits)).max(axis=0)

    def active_bytes(self, splits: Sequence[Split]) -> Floats:
        """[positions, B] activations and messages."""
        total, columns = np.zeros((self.layout.positions, len(splits))), _columns(splits)
        kind, lead = self.schedule.kind, self.schedule.lead
        for own in self._modules.values():
            size, later = _sizes(own, columns), lead * own.later
            active = own.bytes.active_bytes(
                own.tp, size, columns.count, kind, lead=lead, later=later
            )
            total[own.positions] += active
        return total

    def least_bytes(self) -> float:
        """A bound on :meth:`needed_bytes`: one micro-batch of one sample."""
        ends = [
            Split(dp=dp, limit=1, pinned=False, count=1, even=True, size=1, inner_dp=self.layout.tp)
            for dp in (1, max(1, self.most))
        ]
        return float(self.needed_bytes(ends).min())

    def _later(self, module: str) -> int:
        """Stages of other modules after it, on the longest way to the end."""
        consumers, places = self.problem.consumers(module), self.layout.places
        return max((len(places[c].cuts) + self._later(c) for c in consumers), default=0)

    def _fixed_bytes(self, splits: Sequence[Split]) -> Floats:
        """[positions, B] parameters and communicators."""
        fixed, columns = np.zeros((self.layout.positions, len(splits))), _columns(splits)
        each = self.problem.request.cluster.device.communicator_bytes
        if each:
            keys = [(min(split.dp, 2), split.inner_dp) for split in splits]
            names = {key: self.communicators(*key) for key in {*keys}}
            for p in range(self.layout.positions):
                fixed[p] = [each * len(names[key].get(p, ())) for key in keys]
        in_rounds = self.problem.sums_in_rounds and not self._any_replicated
        for module, own in self._modules.items():
            dp = _replicas(own, columns)
            fixed[own.positions] += own.bytes.fixed_bytes(own.tp, dp, in_rounds=in_rounds)
            if in_rounds:
                whole = [self.problem.gathered_bytes(module, cut) for cut in own.grid.cuts]
                fixed[own.positions] += np.array(whole)[:, None] / own.tp * (dp > 1)
        return fixed + self.uneven_bytes(splits) if in_rounds else fixed

    def uneven_bytes(self, splits: Sequence[Split]) -> Floats:
        """[positions, B] what replicas hold more where some have a micro-batch less than others.

        No sum is after each micro-batch then: ZeRO-2 and ZeRO-3 do not cut gradients and weights.
        """
        more, columns = np.zeros((self.layout.positions, len(splits))), _columns(splits)
        for module, own in self._modules.items():
            if self.problem.zero_of(module) > 1:
                dp = _replicas(own, columns)
                whole = own.bytes.fixed_bytes(own.tp, dp)
                more[own.positions] += whole - own.bytes.fixed_bytes(own.tp, dp, in_rounds=True)
        return more * (1 - columns.even)

    def communicators(self, dp: int, inner_dp: int) -> dict[Hashable, frozenset[Hashable]]:
        """By position; see :func:`mmplan.solvers.communicators.communicators`."""
        return communicators(self.problem, self._placed(dp, inner_dp))

    def _placed(self, dp: int, inner_dp: int) -> PlacedModules:
        """The modules at their positions."""
        return {
            module: PlacedModule(
                stages=tuple(enumerate(place.cuts, place.first)),
                tp=self._tp(place),
                dp=dp * _inner_dp(place, inner_dp),
            )
            for module, place in self.layout.places.items()
        }

    # --- units -------------------------------------------------------------------------

    def units(self, split: Split) -> tuple[Unit, ...]:
        """The modules' units on ranks 0, 1, ...: replicas, then positions, then TP."""
        shares = split_evenly(self.problem.round_samples, split.dp)
        sizes = [
            cut(share, split.limit, pinned=split.pinned, largest_share=shares[0])
            for share in shares
        ]
        return tuple(self._unit(module, split, sizes) for module in self.layout.places)

    def _unit(self, module: str, split: Split, sizes: Sequence[tuple[int, ...]]) -> Unit:
        place, ranks = self.layout.places[module], self.ranks(module, split)
        each = _inner_dp(place, split.inner_dp)
        if place.items:
            ranks, each = self._groups(place, split, self.layout.tp, 1), 1
        microbatches = tuple(
            tuple(split_evenly(size, each)[way] for size in own)
            for own in sizes
            for way in range(each)
        )
        return Unit(
            name=module,
            task=self.problem.task.name,
            module=module,
            tp=ranks.tp,
            pp=len(place.cuts),
            dp=ranks.dp,
            items=place.items > 0,
            ranks=ranks.ranks,
            blocks=place.cuts,
            samples=tuple(sum(own) * self.problem.rounds for own in microbatches),
            microbatches=microbatches,
            schedule=self.schedule,
        )

    def ranks(self, module: str, split: Split) -> RankGrid:
        """Its part of the grid, or each rank that holds a module whole as a replica."""
        place = self.layout.places[module]
        return self._groups(place, split, self._tp(place), _inner_dp(place, split.inner_dp))

    def _groups(self, place: ModuleGrid, split: Split, own: int, ways: int) -> RankGrid:
        """Of each TP group of a module's stages so many parts of ``own`` ranks."""
        whole = RankGrid.consecutive(0, split.dp, self.layout.positions, self.layout.tp).ranks
        stages = slice(place.first, place.first + len(place.cuts))
        return RankGrid(
            tuple(
                tuple(group[way : way + own] for group in replica[stages])
                for replica in whole
                for way in range(ways)
            )
        )


def _allowed(split: Split, pinned: Sequence[tuple[Pins, ModuleGrid]]) -> bool:
    return all(
        pins.allows("dp", split.dp * each) and pins.allows("microbatch", -(-split.size // each))
        for pins, place in pinned
        for each in [1 if place.items else _inner_dp(place, split.inner_dp)]
    )


@dataclass(frozen=True, slots=True)
class _SplitColumns:
    """[B] of splits; see :class:`Split`."""

    dp: Ints
    count: Ints
    even: Ints
    size: Ints
    inner_dp: Ints


def _columns(splits: Sequence[Split]) -> _SplitColumns:
    rows = [(split.dp, split.count, split.even, split.size, split.inner_dp) for split in splits]
    return _SplitColumns(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


@cache
def _split(samples: int, dp: int, limit: int, pinned: bool, most_inner: int) -> Split:
    """A round's samples on so many replicas; layouts have most of their splits in common."""
    largest = -(-samples // dp)
    shares = dict.fromkeys((largest, samples // dp))
    sizes = [cut(share, limit, pinned=pinned, largest_share=largest) for share in shares]
    # The last micro-batch is the smallest.
    least = min(own[-1] for own in sizes)
    return Split(
        dp=dp,
        limit=limit,
        pinned=pinned,
        count=len(sizes[0]),
        even=len({*map(len, sizes)}) == 1,
        size=sizes[0][0],
        inner_dp=min(most_inner, least),
    )


def _replicas(own: _ModuleStages, columns: _SplitColumns) -> Ints:
    """[B] of a module."""
    return columns.dp * _inner_dp(own.grid, columns.inner_dp)


def _sizes(own: _ModuleStages, columns: _SplitColumns) -> Ints | Floats:
    """[B] samples of a module's largest micro-batch on a rank."""
    items = own.grid.items
    return (
        columns.size / items if items else -(-columns.size // _inner_dp(own.grid, columns.inner_dp))
    )


def _inner_dp(place: ModuleGrid, inner_dp: IntT) -> IntT | int:
    """Copies of a module in one replica of the grid."""
    return place.items or (inner_dp if place.replicated else 1)


def colocated_layouts(problem: Problem) -> Iterator[Layout]:
    """Every tp and number of positions; with a loss over sync batches one position only."""
    modules, specs = problem.task.modules, problem.request.workload.modules
    degrees = set.intersection(*(set(tensor_degrees(problem, m)) for m in modules))
    whole = problem.task.sync_batches or any(specs[m].share for m in modules)
    cuts = {m: module_cuts(problem, m, 1 if whole else problem.blocks(m)) for m in modules}
    for positions in [1] if whole else depths(problem, modules):
        places = {m: _place(problem, m, cuts[m], positions) for m in modules}
        for tp in sorted(degrees):
            yield Layout(tp=tp, positions=positions, places=places)


def _place(
    problem: Problem, module: str, cuts: Sequence[tuple[Blocks, ...]], positions: int
) -> ModuleGrid:
    """A stage on every position; with fewer blocks, on the first or, after others, the last."""
    stages = min(positions, len(cuts))
    first = positions - stages if problem.producers(module) else 0
    return ModuleGrid(first=first, cuts=cuts[stages - 1])


def depths(problem: Problem, modules: Sequence[str]) -> list[int]:
    """Numbers of stages: all small ones, of larger ones those that make a largest stage smaller."""
    found = set(range(1, ALL_DEPTHS + 1))
    for module in modules:
        found |= {int(n) for n in smallest_divisors(problem.blocks(module))}
        pinned = problem.request.workload.modules[module].plan.pp
        if pinned is not None:
            found |= {pinned} if isinstance(pinned, int) else set(pinned)
    most = max(problem.blocks(module) for module in modules)
    return sorted(n for n in found if n <= most)


class _Entry(NamedTuple):
    """A split of a grid, by its position, with its bytes on the fullest device."""

    compute_s: float
    grid: int
    split: Split
    needed_bytes: float


def best_grids(
    problem: Problem, solver: str, layouts: Sequence[Layout]
) -> list[tuple[Candidate, OneGrid]]:
    """The best split of each of the ``top`` best layouts by the formula, best first: exact.

    Where there are fewer layouts their next best splits follow. Layouts differ in what the
    formula leaves out (stages on common devices wait for each other), so simulation has more
    to choose from than among the best splits of one of them. Splits are visited in the order
    of their time without reductions and syncs, until no later one can come before those found.

    Raises:
        InfeasibleError: nothing that devices and pins allow, or nothing that fits the memory.
    """
    grids = [grid for grid in (OneGrid(problem, layout) for layout in layouts) if grid.most]
    lacking = [(grid.least_bytes(), grid.layout) for grid in grids]
    roomy = [
        g for g, (least, _) in zip(grids, lacking, strict=True) if least <= problem.memory_bytes
    ]
    entries = [
        _Entry(compute_s, k, split, needed)
        for k, grid in enumerate(roomy)
        for splits in (grid.splits(),)
        for compute_s, split, needed in zip(
            grid.compute_s(splits).tolist(), splits, grid.needed_bytes(splits).tolist(), strict=True
        )
    ]
    if not entries and (roomy or not grids):
        raise nothing_allowed(problem, solver, layouts)
    found = _visit(problem, roomy, sorted(entries, key=lambda entry: entry.compute_s), lacking)
    if not found:
        raise too_large(problem, solver, [x for x in lacking if x[0] > problem.memory_bytes])
    return [
        (Candidate(units=roomy[k].units(split), objective_s=value_s), roomy[k])
        for value_s, k, split in _firsts_first(found, problem.request.top)
    ]


def _visit(
    problem: Problem,
    grids: Sequence[OneGrid],
    entries: Sequence[_Entry],
    lacking: list[tuple[float, Layout]],
) -> dict[int, list[tuple[float, Split]]]:
    """Position of a grid to its splits that fit, best first; what does not joins ``lacking``."""
    found: dict[int, list[tuple[float, Split]]] = {}
    for compute_s, k, split, needed in entries:
        firsts, top = sorted(own[0][0] for own in found.values()), problem.request.top
        if len(firsts) >= top and compute_s >= firsts[top - 1]:
            break
        if needed > problem.memory_bytes:
            lacking.append((needed, grids[k].layout))
            continue
        own = found.setdefault(k, [])
        reduced_s = grids[k].reduce_s(split)
        sync_s = problem.rounds * grids[k].sync_s(split)
        own.append((compute_s + reduced_s + sync_s, split))
        own.sort(key=lambda pair: pair[0])
    return found


def _firsts_first(
    found: Mapping[int, Sequence[tuple[float, Split]]], top: int
) -> list[tuple[float, int, Split]]:
    """The best split of each grid, then the others, ``top`` in all; by value."""
    ranked = sorted(
        (place > 0, value_s, k, place)
        for k, own in found.items()
        for place, (value_s, _) in enumerate(own)
    )
    chosen = sorted(item[1:] for item in ranked[:top])
    return [(value_s, k, found[k][place][1]) for value_s, k, place in chosen]


def allowed(problem: Problem, layout: Layout) -> bool:
    """Whether the modules' pins allow a layout's degrees."""
    specs = problem.request.workload.modules
    return all(
        specs[module].plan.allows("tp", 1 if place.replicated and not place.items else layout.tp)
        and specs[module].plan.allows("pp", len(place.cuts))
        and specs[module].plan.allows("vpp", 1)
        for module, place in layout.places.items()
    )


def nothing_allowed(problem: Problem, solver: str, layouts: Sequence[Layout]) -> InfeasibleError:
    """What to say where no layout has a split that devices and pins allow."""
    fewest = min((layout.tp * layout.positions for layout in layouts), default=0)
    if fewest > problem.devices:
        return InfeasibleError(
            f"{solver} needs at least {counted(fewest, 'device')} for one replica, there are "
            f"{problem.devices}: {fewest - problem.devices} missing",
            hint=f"give it {counted(fewest, 'device')} or more",
        )
    modules = problem.task.modules
    specs = problem.request.workload.modules
    pins = {m: p for m in modules if (p := specs[m].plan.model_dump(exclude_none=True))}
    return InfeasibleError(
        f"{solver} has one grid for {', '.join(modules)}: no degrees and micro-batch fit all of "
        f"their plans {pins} on {counted(problem.devices, 'device')}",
        hint="loosen the modules' plan, or use --solver auto",
    )


def too_large(
    problem: Problem, solver: str, lacking: Sequence[tuple[float, Layout]]
) -> InfeasibleError:
    """What to say where nothing fits the memory: by the layout that lacks least."""
    needed, layout = min(lacking, key=lambda item: item[0])
    return InfeasibleError(
        f"{solver} needs at least {size(needed)} on a device (tp {layout.tp}, "
        f"{counted(layout.positions, 'pipeline position')}), "
        f"{missing(needed, problem.memory_bytes)}",
        hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
    )
