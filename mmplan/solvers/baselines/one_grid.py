"""One TP x DP grid of pipeline positions for a whole model: its formula, and its exact optimum.

A layout gives every module consecutive positions 0..Q-1 of one pipeline; modules may share
positions. With N_mb micro-batches a step, G rounds of K each,

    T = fill + (N_mb - 1) * max_q busy_q + reduce + G s,

where busy_q is what all modules at position q compute for one micro-batch, the fill is one
micro-batch's longest way through the modules (never less than the busiest position), and
reduce is the position with the longest reductions. With Q = 1 this is the formula of
:mod:`.colocated`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmplan.errors import InfeasibleError
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Schedule, Unit
from mmplan.solvers.communicators import PlacedModule, PlacedModules, communicators
from mmplan.solvers.messages import StageMessages, stage_messages
from mmplan.solvers.partitioner import module_cuts, tensor_degrees
from mmplan.solvers.problem import Blocks, Candidate, Problem
from mmplan.solvers.sample_split import cut, microbatch_sizes, smallest_divisors, split_evenly
from mmplan.wording import counted, missing, size

# Micro-batches of a pipeline that are tried without pins: 1, 2, 4, ...
LARGEST_MICROBATCH = 64
# Numbers of pipeline positions up to this are all tried.
ALL_DEPTHS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGrid:
    """Where a module runs.

    Attributes:
        first: position of its first stage; the others follow.
        cuts: blocks of its stages.
        replicated: every rank of a TP group holds the whole stage, and they share out the
            samples; False where they split it.
    """

    first: int
    cuts: tuple[Blocks, ...]
    replicated: bool = False


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
        size: samples of its largest micro-batch.
        inner_dp: ranks of a TP group that share a micro-batch out where a module is replicated.
    """

    dp: int
    limit: int
    pinned: bool
    count: int
    size: int
    inner_dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageBytes:
    """What a stage of a module holds.

    Attributes:
        position: of the grid.
        size: samples of its largest micro-batch.
        held: bytes of one micro-batch in flight.
        after: stages after it, on the longest way to the end.
        messages: of the stage.
    """

    position: int
    size: int
    held: float
    after: int
    messages: StageMessages


class OneGrid:
    """One layout with any replicas and micro-batches; remembers what it was asked."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout = problem, layout
        # On one position the consumer is on the same devices: running ahead only holds memory.
        self.schedule = Schedule(
            kind="batch-sync" if problem.task.sync_batches else "1f1b",
            lead=int(layout.positions > 1),
        )
        self._intervals: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._held: dict[tuple[int, int], list[_StageBytes]] = {}
        self._fixed: dict[tuple[int, int], list[float]] = {}
        self._reduce: dict[tuple[int, int], float] = {}
        self._sync: dict[int, float] = {}
        self._after = {module: self._stages_after(module) for module in layout.places}

    @property
    def most(self) -> int:
        """Replicas that the devices and the samples allow."""
        each = self.layout.tp * self.layout.positions
        return min(self.problem.devices // each, self.problem.round_samples)

    # --- what may be chosen ------------------------------------------------------------

    def splits(self, replicas: Iterable[int] | None = None) -> Iterator[Split]:
        """Replicas, of all numbers or of those given, and micro-batches that the pins allow.

        Of the replicas that leave the slowest one the same share only the fewest are tried,
        where more of them can make neither room (ZeRO-1) nor a loss faster.
        """
        if replicas is None:
            every = bool(self.problem.costs.training.zero or self.problem.task.sync_batches)
            replicas = self.counts(every=every)
        for dp in replicas:
            for limit, pinned in self._limits(-(-self.problem.round_samples // dp)):
                split = self._split(dp, limit, pinned)
                if self._allowed(split):
                    yield split

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
        shares = split_evenly(self.problem.round_samples, dp)
        sizes = [
            cut(share, limit, pinned=pinned, largest_share=shares[0])
            for share in (shares[0], shares[-1])
        ]
        least = min(min(own) for own in sizes)
        return Split(
            dp=dp,
            limit=limit,
            pinned=pinned,
            count=len(sizes[0]),
            size=sizes[0][0],
            inner_dp=min(self.layout.tp, least) if self._any_replicated else 1,
        )

    def _allowed(self, split: Split) -> bool:
        specs = self.problem.request.workload.modules
        return all(
            specs[module].plan.allows("dp", split.dp * _inner_dp(place, split.inner_dp))
            and specs[module].plan.allows("microbatch", _own(place, split.size, split.inner_dp))
            for module, place in self.layout.places.items()
        )

    # --- seconds -----------------------------------------------------------------------

    def compute_s(self, split: Split) -> float:
        """The formula without reductions and syncs."""
        fill_s, interval_s = self.fill_and_interval_s(split.size, split.inner_dp, split.dp)
        return fill_s + (self.problem.rounds * split.count - 1) * interval_s

    def step_s(self, split: Split) -> float:
        """The formula, T."""
        reduced_s = self.reduce_s(split.dp, split.inner_dp)
        return self.compute_s(split) + reduced_s + self.problem.rounds * self.sync_s(split)

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

    def fill_and_interval_s(self, size: int, inner_dp: int, dp: int) -> tuple[float, float]:
        """(fill, busiest position) of one micro-batch, forward and backward."""
        key = size, inner_dp, dp if self.problem.varies else 1
        if key not in self._intervals:
            busy, end = [0.0] * self.layout.positions, dict[str, float]()
            for module, place in self.layout.places.items():
                producers = self.problem.producers(module)
                reached = max(
                    (end[p] + self._between_s(p, module, size, inner_dp) for p in producers),
                    default=0,
                )
                for i, blocks in enumerate(place.cuts):
                    own, replicas = _own(place, size, inner_dp), key[2] * _inner_dp(place, inner_dp)
                    stage_s = sum(
                        self.problem.stage_s(module, blocks, self._tp(place), own, replicas)
                    )
                    busy[place.first + i] += stage_s
                    reached += stage_s + self._transfer_s(module, i, own)
                end[module] = reached
            self._intervals[key] = max(*busy, *end.values()), max(busy)
        return self._intervals[key]

    def _tp(self, place: ModuleGrid) -> int:
        return 1 if place.replicated else self.layout.tp

    def _transfer_s(self, module: str, i: int, size: int) -> float:
        """From stage i of a module to its next one, and back."""
        place = self.layout.places[module]
        if i + 1 == len(place.cuts):
            return 0.0
        back = self.problem.stage(module, place.cuts[i + 1]).input_gradient
        num_bytes = size * self.problem.output_bytes(module, place.cuts[i][1] - 1)
        here = place.first + i, self._tp(place)
        return self._message_s(here, (here[0] + 1, here[1]), num_bytes, back)

    def _between_s(self, producer: str, consumer: str, size: int, inner_dp: int) -> float:
        source, target = self.layout.places[producer], self.layout.places[consumer]
        per_sample = self.problem.output_bytes(producer, self.problem.blocks(producer) - 1)
        return self._message_s(
            (source.first + len(source.cuts) - 1, self._tp(source)),
            (target.first, self._tp(target)),
            _own(source, size, inner_dp) * per_sample,
            self.problem.makes_gradient(producer),
        )

    def _message_s(
        self, source: tuple[int, int], target: tuple[int, int], num_bytes: float, back: bool
    ) -> float:
        """Between two (position, TP degree); what comes from another node is gathered."""
        costs, node_of = self.problem.costs, self.problem.request.cluster.node_of
        first, second = (position * self.layout.tp for position, _ in (source, target))
        total_s = (1 + back) * costs.message_s(source=first, target=second, num_bytes=num_bytes)
        if node_of(first) != node_of(second):
            for tp in (target[1], *([source[1]] if back else [])):
                total_s += costs.gather_shares_s(ranks=range(tp), num_bytes=num_bytes)
        return total_s

    def reduce_s(self, dp: int, inner_dp: int) -> float:
        """Gradient reductions of the position where they take longest."""
        if (dp, inner_dp) not in self._reduce:
            taken = [0.0] * self.layout.positions
            for module, place in self.layout.places.items():
                for i in range(len(place.cuts)):
                    taken[place.first + i] += self._stage_reduce_s(module, i, dp, inner_dp)
            self._reduce[dp, inner_dp] = max(taken)
        return self._reduce[dp, inner_dp]

    def _stage_reduce_s(self, module: str, i: int, dp: int, inner_dp: int) -> float:
        place, tp = self.layout.places[module], self.layout.tp
        blocks, each = place.cuts[i], _inner_dp(place, inner_dp)
        if dp * each == 1 or not self.problem.stage(module, blocks).trainable:
            return 0.0
        starts = [(d * self.layout.positions + place.first + i) * tp for d in range(dp)]
        return self.problem.costs.all_reduce_s(
            ranks=[start + t for start in starts for t in range(each)],
            num_bytes=self.problem.gradient_bytes(module, blocks, self._tp(place)),
            sharers=self._tp(place),
        )

    # --- bytes -------------------------------------------------------------------------

    def needed_bytes(self, split: Split) -> float:
        """Bytes of the fullest device: as many micro-batches as each stage's order holds."""
        fixed = self._fixed_bytes(split.dp, split.inner_dp)
        return max(map(sum, zip(fixed, self.active_bytes(split), strict=True)))

    def active_bytes(self, split: Split) -> list[float]:
        """Activations and messages that each position holds."""
        total = [0.0] * self.layout.positions
        schedule, count = self.schedule, self.problem.rounds * split.count
        for stage in self._held_bytes(split.size, split.inner_dp):
            flight = POLICIES[schedule.kind].in_flight(split.count, schedule.lead * stage.after)
            beside = stage.size * stage.messages.bytes_beside(count)
            total[stage.position] += stage.held * min(count, flight) + beside
        return total

    def least_bytes(self) -> float:
        """A bound on :meth:`needed_bytes`: one micro-batch of one sample."""
        return min(
            self.needed_bytes(
                Split(dp=dp, limit=1, pinned=False, count=1, size=1, inner_dp=self.layout.tp)
            )
            for dp in (1, max(1, self.most))
        )

    def _held_bytes(self, size: int, inner_dp: int) -> list[_StageBytes]:
        """What every stage holds."""
        if (size, inner_dp) not in self._held:
            placed = self._placed(1, inner_dp)
            found = self._held[size, inner_dp] = []
            for module, place in self.layout.places.items():
                own = _own(place, size, inner_dp)
                for i, blocks in enumerate(place.cuts):
                    messages = stage_messages(self.problem, module, blocks, placed)
                    held = self.problem.held_bytes(module, blocks, self._tp(place), own)
                    found.append(
                        _StageBytes(
                            position=place.first + i,
                            size=own,
                            held=held + own * messages.carried,
                            after=self._after[module] - i,
                            messages=messages,
                        )
                    )
        return self._held[size, inner_dp]

    def _stages_after(self, module: str) -> int:
        """Stages after the module's first one, on the longest way to the end."""
        own = len(self.layout.places[module].cuts)
        consumers = self.problem.consumers(module)
        return own - 1 + max((1 + self._stages_after(c) for c in consumers), default=0)

    def _fixed_bytes(self, dp: int, inner_dp: int) -> list[float]:
        key = (dp if self.problem.costs.training.zero else min(dp, 2)), inner_dp
        if key not in self._fixed:
            each = self.problem.request.cluster.device.communicator_bytes
            names = self.communicators(dp, inner_dp) if each else {}
            fixed = [each * len(names.get(p, ())) for p in range(self.layout.positions)]
            for module, place in self.layout.places.items():
                for i, blocks in enumerate(place.cuts):
                    fixed[place.first + i] += self.problem.fixed_bytes(
                        module,
                        blocks,
                        self._tp(place),
                        dp * _inner_dp(place, inner_dp),
                        is_one_grid=inner_dp == 1,
                    )
            self._fixed[key] = fixed
        return self._fixed[key]

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
        microbatches = tuple(
            tuple(split_evenly(size, each)[way] for size in own)
            for own in sizes
            for way in range(each)
        )
        return Unit(
            name=module,
            task=self.problem.task.name,
            module=module,
            tp=self._tp(place),
            pp=len(place.cuts),
            dp=ranks.dp,
            ranks=ranks.ranks,
            blocks=place.cuts,
            samples=tuple(sum(own) * self.problem.rounds for own in microbatches),
            microbatches=microbatches,
            schedule=self.schedule,
        )

    def ranks(self, module: str, split: Split) -> RankGrid:
        """Of a module's unit: its part of the grid, or one rank of each group a replica."""
        place, own = self.layout.places[module], self._tp(self.layout.places[module])
        whole = RankGrid.consecutive(0, split.dp, self.layout.positions, self.layout.tp).ranks
        stages = slice(place.first, place.first + len(place.cuts))
        return RankGrid(
            tuple(
                tuple(group[way : way + own] for group in replica[stages])
                for replica in whole
                for way in range(_inner_dp(place, split.inner_dp))
            )
        )


def _inner_dp(place: ModuleGrid, inner_dp: int) -> int:
    """Replicas of a module in one replica of the grid."""
    return inner_dp if place.replicated else 1


def _own(place: ModuleGrid, size: int, inner_dp: int) -> int:
    """The module's largest micro-batch."""
    return -(-size // _inner_dp(place, inner_dp))


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
        (grid.compute_s(split), k, split) for k, grid in enumerate(roomy) for split in grid.splits()
    ]
    if not entries and (roomy or not grids):
        raise nothing_allowed(problem, solver, layouts)
    found = _visit(problem, roomy, sorted(entries, key=lambda entry: entry[0]), lacking)
    if not found:
        raise too_large(problem, solver, [x for x in lacking if x[0] > problem.memory_bytes])
    return [
        (Candidate(units=roomy[k].units(split), objective_s=value_s), roomy[k])
        for value_s, k, split in _firsts_first(found, problem.request.top)
    ]


def _visit(
    problem: Problem,
    grids: Sequence[OneGrid],
    entries: Sequence[tuple[float, int, Split]],
    lacking: list[tuple[float, Layout]],
) -> dict[int, list[tuple[float, Split]]]:
    """Position of a grid to its splits that fit, best first; what does not joins ``lacking``."""
    found: dict[int, list[tuple[float, Split]]] = {}
    for compute_s, k, split in entries:
        firsts, top = sorted(own[0][0] for own in found.values()), problem.request.top
        if len(firsts) >= top and compute_s >= firsts[top - 1]:
            break
        needed = grids[k].needed_bytes(split)
        if needed > problem.memory_bytes:
            lacking.append((needed, grids[k].layout))
            continue
        own = found.setdefault(k, [])
        own.append((grids[k].step_s(split), split))
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
        specs[module].plan.allows("tp", 1 if place.replicated else layout.tp)
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
