"""Tasks one after another, each on one grid of all devices with its modules colocated.

Every task has its options: the layouts and splits of :mod:`.one_grid`. Tasks differ in their
grids, or run on one grid of all of them. A device holds a shard of a block once, whichever tasks
use it; two different shards of one block make it hold the whole block. Activations are those of
the task that runs. With shared parameters held and summed once,

    T = sum_i time_i + max_d sum_o max(reduce_od),   s.t. for every device d
    sum_o parameters_od + max_i held_id + communicators <= memory,

o over the modules that own parameters; of options whose times hold their reductions T is the sum
of the times alone. The search for the combination with the least T is exact: depth-first over the
tasks, fastest option first; a branch ends where the least that the other tasks can add is too slow
or too large.

Shape suffixes used in this file: D = devices, L = blocks of a module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.errors import InfeasibleError
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Unit
from mmplan.solvers.baselines.one_grid import Layout, OneGrid, Split, allowed, nothing_allowed
from mmplan.solvers.pareto import staircase
from mmplan.solvers.problem import Blocks, Candidate, Problem, Request, Solution
from mmplan.solvers.search_budget import SearchBudget
from mmplan.wording import missing, size


class Holding(NamedTuple):
    """Where one task's use of a module keeps its parameters: blocks of each stage, and ranks.

    ``even`` is whether all replicas have as many micro-batches.
    """

    task: str
    module: str
    blocks: tuple[Blocks, ...]
    grid: RankGrid
    even: bool


class Ledger:
    """Bytes and reduction seconds of sets of holdings of one module; remembers what it was asked.

    Holdings are known by number, so that sets of them are cheap to compare.

    Args:
        problems: of the tasks.
        is_one_grid: whether all modules of a task have the same replicas. Then ZeRO-2 and ZeRO-3
            cut what all tasks hold and train alike.
    """

    def __init__(self, problems: Mapping[str, Problem], *, is_one_grid: bool = False) -> None:
        self.problems, self._is_one_grid = problems, is_one_grid
        self.devices = next(iter(problems.values())).devices
        self._holdings: list[Holding] = []
        self._numbers: dict[Holding, int] = {}
        self._bytes: dict[frozenset[int], Floats] = {}
        self._reduce: dict[int, Floats] = {}
        self._blocks: dict[tuple[str, str, int], Floats] = {}
        self._parts: dict[int, tuple[Floats, NDArray[np.int64], Floats]] = {}

    def number(self, holding: Holding) -> int:
        """The holding's number."""
        if holding not in self._numbers:
            self._numbers[holding] = len(self._holdings)
            self._holdings.append(holding)
        return self._numbers[holding]

    def parameters_bytes(self, numbers: frozenset[int]) -> Floats:
        """[D] bytes of weights, gradients and state that holdings of one owner take together."""
        if numbers not in self._bytes:
            self._bytes[numbers] = self._together(sorted(numbers))
        return self._bytes[numbers]

    def _together(self, numbers: Sequence[int]) -> Floats:
        items = [self._holdings[number] for number in numbers]
        if self._is_one_grid and len({*map(self._alike, items)}) == 1 and items[0].even:
            return self._cut(items[0])
        held_DL, shard_DL, whole_DL = self._part(numbers[0])
        for number in numbers[1:]:
            own_DL, other_DL, all_DL = self._part(number)
            differ = (shard_DL != other_DL) & (shard_DL > 0) & (other_DL > 0)
            whole_DL = np.maximum(whole_DL, all_DL)
            held_DL = np.where(differ, whole_DL, np.maximum(held_DL, own_DL))
            shard_DL = np.where(differ, 1, np.maximum(shard_DL, other_DL))
        return held_DL.sum(axis=1)

    def _alike(self, item: Holding) -> object:
        """Equal for holdings whose gradients may have one sum after each micro-batch."""
        trains = self.problems[item.task].trainable(item.module, item.blocks[0])
        return item.blocks, item.grid, item.even, trains

    def _cut(self, holding: Holding) -> Floats:
        """[D] bytes of a module that its replicas cut, and of what they gather of it."""
        problem, grid, found_D = self.problems[holding.task], holding.grid, np.zeros(self.devices)
        costs = problem.module_costs(holding.module)
        stages = costs.stages(holding.blocks)
        kept = costs.parameter_bytes(
            stages.trained, stages.frozen, tp=grid.tp, dp=grid.dp, in_rounds=True
        )
        for chunk, (blocks, own) in enumerate(zip(holding.blocks, kept.tolist(), strict=True)):
            if grid.dp > 1:
                own += problem.gathered_bytes(holding.module, blocks) / grid.tp
            found_D[[rank for group in grid.stage(chunk) for rank in group]] += own
        return found_D

    def _part(self, number: int) -> tuple[Floats, NDArray[np.int64], Floats]:
        """[D, L]: bytes of the shard held, what shard it is (0 for none, 1 for all), bytes of all.

        Where it holds two shards the state is spread over no more ranks than each one's.
        """
        if number not in self._parts:
            item = self._holdings[number]
            tp, whole_L = item.grid.tp, self._block_bytes(item)
            shape = self.devices, len(whole_L)
            held_DL, whole_DL = np.zeros(shape), np.zeros(shape)
            shard_DL = np.zeros(shape, dtype=np.int64)
            for chunk, (first, end) in enumerate(item.blocks):
                own = slice(first, end)
                for group in map(list, item.grid.stage(chunk)):
                    held_DL[group, own] = whole_L[own] / tp
                    whole_DL[group, own] = whole_L[own]
                    shard_DL[group, own] = np.arange(tp, 2 * tp)[:, None]
            self._parts[number] = held_DL, shard_DL, whole_DL
        return self._parts[number]

    def _block_bytes(self, holding: Holding) -> Floats:
        """[L] bytes of every block, whole."""
        key = holding.task, holding.module, holding.grid.dp
        if key not in self._blocks:
            problem = self.problems[holding.task]
            costs = problem.module_costs(holding.module)
            own = costs.blocks
            self._blocks[key] = costs.parameter_bytes(own.trained, own.frozen, tp=1, dp=key[2])
        return self._blocks[key]

    def reduce_s(self, number: int) -> Floats:
        """[D] seconds of one holding's gradient reduction."""
        if number not in self._reduce:
            item, total_D = self._holdings[number], np.zeros(self.devices)
            problem, tp = self.problems[item.task], item.grid.tp
            costs = problem.module_costs(item.module)
            trained = costs.stages(item.blocks).trained
            for chunk, blocks in enumerate(item.blocks if item.grid.dp > 1 else ()):
                if problem.stage(item.module, blocks).trainable:
                    groups = item.grid.stage(chunk)
                    total_D[[rank for group in groups for rank in group]] += (
                        problem.costs.all_reduce_s(
                            ranks=[group[0] for group in groups],
                            num_bytes=trained[chunk] / tp * costs.gradient_bytes,
                            sharers=tp,
                        )
                    )
            self._reduce[number] = total_D
        return self._reduce[number]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskOption:
    """One way to run a task.

    Attributes:
        time_s: a step's forwards, backwards, messages and syncs.
        reduce_s: its reductions alone; None where ``time_s`` has them.
        held_bytes: [D] activations of each device.
        communicators: names of those that its devices make, by place.
        holdings: numbers in the ledger, by the owner of the parameters.
        shape: (tp, pipeline positions, dp).
        make: its units.
    """

    task: str
    time_s: float
    reduce_s: float | None
    held_bytes: Floats
    communicators: Mapping[Hashable, frozenset[Hashable]]
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
        splits = grid.splits(replicas(grid))
        rows = zip(
            splits, grid.compute_s(splits).tolist(), grid.active_bytes(splits).T, strict=True
        )
        for (_, even), same in groupby(rows, key=lambda row: (row[0].dp, row[0].even)):
            own = list(same)
            # Layouts for all devices have no module that a TP group holds whole.
            places = grid.layout.places.items()
            held = [(m, place.cuts, grid.ranks(m, own[0][0])) for m, place in places]
            holdings = by_owner(problem, ledger, held, even=even)
            options = (_option(grid, *row, holdings) for row in own)
            found += staircase(options, lambda o: (o.time_s, float(o.held_bytes.max())))
    return found


def _option(
    grid: OneGrid,
    split: Split,
    compute_s: float,
    active_bytes: Floats,
    holdings: dict[str, frozenset[int]],
) -> TaskOption:
    """An option of a split; ``active_bytes`` are of the grid's positions."""
    problem, tp, positions = grid.problem, grid.layout.tp, grid.layout.positions
    held_D = np.zeros(problem.devices)
    held_D[: split.dp * positions * tp] = np.tile(np.repeat(active_bytes, tp), split.dp)
    return TaskOption(
        task=problem.task.name,
        time_s=compute_s + problem.rounds * grid.sync_s(split),
        reduce_s=grid.reduce_s(split),
        held_bytes=held_D,
        communicators=grid.communicators(split.dp, split.inner_dp),
        holdings=holdings,
        shape=(tp, positions, split.dp),
        make=lambda: grid.units(split),
    )


def by_owner(
    problem: Problem,
    ledger: Ledger,
    held: Iterable[tuple[str, tuple[Blocks, ...], RankGrid]],
    *,
    even: bool = True,
) -> dict[str, frozenset[int]]:
    """Numbers of the holdings of every owner.

    Args:
        problem: of their task.
        ledger: gives the numbers.
        held: module, blocks of each pipeline stage, and ranks.
        even: whether all replicas have as many micro-batches.
    """
    found: dict[str, set[int]] = {}
    for module, blocks, grid in held:
        owner = problem.request.workload.modules[module].share or module
        number = ledger.number(Holding(problem.task.name, module, blocks, grid, even))
        found.setdefault(owner, set()).add(number)
    return {owner: frozenset(own) for owner, own in found.items()}


def named(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """The units of one task of several, their names told apart by the task's."""
    return tuple(u.model_copy(update={"name": f"{u.task}.{u.module}"}) for u in units)


# Seconds of a look at one option of a task after those of others.
_VISIT_S = 1e-4
Held = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """An option of every task.

    Attributes:
        time_s: T.
        fullest_bytes: on the device that holds most.
    """

    options: tuple[TaskOption, ...]
    time_s: float
    fullest_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationResult:
    """The answer of a search.

    Attributes:
        best: None where nothing fits.
        bound_s: no combination that fits is faster.
        least_bytes: of the fullest device, where nothing was seen that fits; a bound or what the
            leanest one needs.
    """

    best: Combination | None
    bound_s: float
    least_bytes: float


class _OutOfTimeError(Exception):
    pass


class CombinationSearch:
    """The search for the combination with the least T that fits.

    Args:
        ledger: knows the options' holdings.
        options: of every task.
        memory_bytes: of a device.
        communicator_bytes: of a device, for each communicator.
        better_than_s: others are not looked for.
    """

    def __init__(
        self,
        ledger: Ledger,
        options: Sequence[Sequence[TaskOption]],
        *,
        memory_bytes: float,
        communicator_bytes: float,
        better_than_s: float = np.inf,
    ) -> None:
        self._ledger, self._memory, self._each = ledger, memory_bytes, communicator_bytes
        self._options = [sorted(own, key=lambda o: o.alone_s) for own in options]
        self._summed = all(o.reduce_s is not None for own in options for o in own)
        self._best: Combination | None = None
        self._limit_s = better_than_s
        self._least_bytes = np.inf
        self._rest = _Rest(self._options)
        # Of the tasks from i on: [D] activations, and by owner [D] parameters, at least.
        self._rest_held: list[Floats] = [np.zeros(ledger.devices)]
        self._rest_owned: list[dict[str, Floats]] = [{}]
        for own in reversed(self._options):
            self._rest_held.insert(0, self._least_held(own))
            self._rest_owned.insert(0, self._least_owned(own))
        self._sums: dict[frozenset[tuple[str, frozenset[int]]], float] = {}

    def _least_held(self, own: Sequence[TaskOption]) -> Floats:
        least = np.min([o.held_bytes for o in own], axis=0)
        return np.maximum(least, self._rest_held[0])

    def _least_owned(self, own: Sequence[TaskOption]) -> dict[str, Floats]:
        found = dict(self._rest_owned[0])
        for owner in own[0].holdings:
            rows = {o.holdings[owner] for o in own}
            least = np.min([self._ledger.parameters_bytes(row) for row in rows], axis=0)
            found[owner] = np.maximum(found.get(owner, 0.0), least)
        return found

    def run(self, limit_s: float) -> CombinationResult:
        """Search to the end, or for so many seconds of a quiet core.

        Where they do not suffice ``bound_s`` is less than T.
        """
        self._budget = SearchBudget(limit_s)
        bound_s = self._rest.least_s(0, 0.0)
        try:
            self._go(0, (), {}, 0.0)
            bound_s = self._limit_s if self._best is None else self._best.time_s
        except _OutOfTimeError:
            # Of a bound nothing more is known than what the tasks take at least.
            bound_s = min(bound_s, self._limit_s)
        return CombinationResult(
            best=self._best, bound_s=bound_s, least_bytes=float(self._least_bytes)
        )

    def _go(self, i: int, chosen: tuple[TaskOption, ...], held: Held, time_s: float) -> None:
        reduce_s = self._reduce_s(held)
        if time_s + self._rest.least_s(i, reduce_s) >= self._limit_s:
            return
        needed = self._fullest_bytes(i, chosen, held)
        if needed > self._memory:
            self._least_bytes = min(self._least_bytes, needed)
            return
        if i == len(self._options):
            self._limit_s = time_s + reduce_s
            self._best = Combination(
                options=chosen, time_s=self._limit_s, fullest_bytes=float(needed)
            )
            return
        for option in self._options[i]:
            own_s = max(reduce_s, option.reduce_s or 0.0)
            if time_s + option.time_s + self._rest.least_s(i + 1, own_s) >= self._limit_s:
                continue
            if self._budget.is_over:
                raise _OutOfTimeError
            self._budget.spend(_VISIT_S)
            self._go(i + 1, (*chosen, option), joined(held, option), time_s + option.time_s)

    def _reduce_s(self, held: Held) -> float:
        """Seconds of the reductions on the device where they take longest."""
        if not self._summed:
            return 0.0
        key = frozenset(held.items())
        if key not in self._sums:
            total = np.zeros(self._ledger.devices)
            for numbers in held.values():
                total += reduce(np.maximum, (self._ledger.reduce_s(n) for n in sorted(numbers)))
            self._sums[key] = float(total.max())
        return self._sums[key]

    def _fullest_bytes(self, i: int, chosen: Sequence[TaskOption], held: Held) -> float:
        """Of the fullest device: what is chosen, and the least that the others add."""
        total = self._each * most_communicators(chosen) + np.zeros(self._ledger.devices)
        for numbers in held.values():
            total += self._ledger.parameters_bytes(numbers)
        for owner, least in self._rest_owned[i].items():
            if owner in held:
                total += np.maximum(least - self._ledger.parameters_bytes(held[owner]), 0)
            else:
                total += least
        total += reduce(np.maximum, (o.held_bytes for o in chosen), self._rest_held[i])
        return float(total.max())


class _Rest:
    """What tasks i, i + 1, ... add to T at least, reductions included.

    Reductions of all tasks together take no less than those of any one of them, r: where they
    take R, every task has an option with r <= R.
    """

    def __init__(self, options: Sequence[Sequence[TaskOption]]) -> None:
        self._reduce_R = np.unique([o.reduce_s or 0.0 for own in options for o in own] + [0.0])
        rest_R = np.zeros(len(self._reduce_R))
        rows = [rest_R]
        for own in reversed(options):
            rest_R = rest_R + self._fastest(own)
            rows.append(rest_R)
        self._rest_TR = rows[::-1]
        # The best with reductions of R or more.
        self._best_TR = [
            np.minimum.accumulate((row + self._reduce_R)[::-1])[::-1] for row in self._rest_TR
        ]

    def _fastest(self, own: Sequence[TaskOption]) -> Floats:
        """[R] the fastest option whose reductions take no more; infinite where there is none."""
        ordered = sorted(own, key=lambda o: o.reduce_s or 0.0)
        least = np.minimum.accumulate([o.time_s for o in ordered])
        count_R = np.searchsorted([o.reduce_s or 0.0 for o in ordered], self._reduce_R, "right")
        return np.where(count_R > 0, least[np.maximum(count_R, 1) - 1], np.inf)

    def least_s(self, i: int, reduce_s: float) -> float:
        """Of tasks from i on with all reductions, where those so far take ``reduce_s``."""
        above = int(np.searchsorted(self._reduce_R, reduce_s, "right"))
        now_s = float(self._rest_TR[i][above - 1]) + reduce_s
        return min(now_s, float(self._best_TR[i][above])) if above < len(self._reduce_R) else now_s


def joined(held: Held, option: TaskOption) -> Held:
    """What is held with one more task."""
    return {**held, **{o: held.get(o, frozenset()) | own for o, own in option.holdings.items()}}


def most_communicators(chosen: Sequence[TaskOption]) -> int:
    """Most of a device that runs all of the tasks.

    Tasks of one shape have the same ranks at one place, and share communicators. An owner of
    several shapes is summed over the ranks of all.
    """
    named: defaultdict[Hashable, defaultdict[Hashable, set[Hashable]]]
    named = defaultdict(lambda: defaultdict(set))
    shapes: defaultdict[str, set[Hashable]] = defaultdict(set)
    for option in chosen:
        for place, names in option.communicators.items():
            named[option.shape][place] |= names
        for owner in option.holdings:
            shapes[owner].add(option.shape)
    own = [max(map(len, places.values())) for places in named.values()]
    # One is of all ranks.
    shared = sum(len(several) > 1 for several in shapes.values())
    return sum(own) - len(own) + 1 + shared if any(own) else 0


TaskOptions = list[list[TaskOption]]
# Share of the budget for a search among grids that differ from task to task.
_SEARCH = 0.2
# Grids of all tasks that are offered too, where there are pipelines.
_GRIDS = 3
# What fits this share of the memory is offered too: the formula's bytes are estimates.
_ROOM = 0.9


class InTurn:
    """A request's tasks with their options.

    Args:
        layouts: to choose from, of one task.
        replicas: to try on a grid.
        is_one_grid: see :class:`Ledger`.

    Raises:
        InfeasibleError: devices or pins leave a task without any option.
    """

    def __init__(
        self,
        request: Request,
        solver: str,
        layouts: Callable[[Problem], Iterable[Layout]],
        replicas: Replicas = halvings,
        *,
        is_one_grid: bool = False,
    ) -> None:
        self._request, self._solver = request, solver
        self._problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._ledger = Ledger(self._problems, is_one_grid=is_one_grid)
        self._options = [self._of(p, list(layouts(p)), replicas) for p in self._problems.values()]

    def _of(
        self, problem: Problem, layouts: Sequence[Layout], replicas: Replicas
    ) -> list[TaskOption]:
        options = grid_options(problem, self._ledger, layouts, replicas)
        if not options:
            raise nothing_allowed(problem, self._solver, layouts)
        return options

    # --- the searches ------------------------------------------------------------------

    def _best_of_all(self, options: TaskOptions, memory_bytes: float) -> CombinationResult:
        # One grid for all is quickly found where the memory is tight, and bounds the search.
        uniform = self._best_uniform(options, memory_bytes)
        limit_s = self._request.budget_s * _SEARCH
        found = self._fastest(options, memory_bytes, uniform.best, limit_s)
        if found.best is not None:
            return found
        least_bytes = min(uniform.least_bytes, found.least_bytes)
        return replace(found, best=uniform.best, least_bytes=least_bytes)

    def _best_uniform(self, options: TaskOptions, memory_bytes: float) -> CombinationResult:
        best: Combination | None = None
        least_bytes = float("inf")
        for own in _uniform(options):
            found = self._fastest(own, memory_bytes, best)
            best, least_bytes = found.best or best, min(least_bytes, found.least_bytes)
        bound_s = best.time_s if best is not None else float("inf")
        return CombinationResult(best=best, bound_s=bound_s, least_bytes=least_bytes)

    def _best_grids(self, memory_bytes: float) -> dict[str, Combination]:
        """The best grids of all tasks, by what they are."""
        found: dict[str, Combination] = {}
        for own in _uniform(self._options):
            tp, positions, _ = own[0][0].shape
            grid = f"tp {tp}, {positions} positions"
            best = self._fastest(own, memory_bytes, found.get(grid)).best
            found |= {} if best is None else {grid: best}
        return dict(sorted(found.items(), key=lambda pair: pair[1].time_s)[:_GRIDS])

    def _fastest(
        self,
        options: TaskOptions,
        memory_bytes: float,
        known: Combination | None,
        limit_s: float = float("inf"),
    ) -> CombinationResult:
        search = CombinationSearch(
            self._ledger,
            options,
            memory_bytes=memory_bytes,
            communicator_bytes=self._request.cluster.device.communicator_bytes,
            better_than_s=known.time_s if known is not None else float("inf"),
        )
        return search.run(limit_s)

    # --- the answer --------------------------------------------------------------------

    def solution(self, *, on_one_grid: bool = False) -> Solution:
        """Every task on its own best grid, or all on one.

        On one grid they have the same tp and pipeline positions, and replicas as far as samples go.

        Raises:
            InfeasibleError: no combination fits the memory; names what is missing.
        """
        search = self._best_uniform if on_one_grid else self._best_of_all
        memory_bytes = self._request.cluster.device.memory_bytes
        found = search(self._options, memory_bytes)
        if found.best is None:
            raise self._too_large(found.least_bytes)
        chosen = {"": found.best}
        if any(option.shape[1] > 1 for option in found.best.options):
            # Stages of one device wait for each other in ways that the formula does not know.
            flat = [[o for o in own if o.shape[1] == 1] for own in self._options]
            if all(flat) and (plain := search(flat, memory_bytes).best) is not None:
                chosen["no pipeline"] = plain
            chosen |= self._best_grids(memory_bytes)
        if found.best.fullest_bytes > _ROOM * memory_bytes:
            roomy = search(self._options, _ROOM * memory_bytes).best
            chosen |= {} if roomy is None else {"room to spare": roomy}
        candidates = [self._candidate(kind, item) for kind, item in _distinct(chosen).items()]
        return Solution(
            solver=self._solver,
            method="exact",
            candidates=tuple(sorted(candidates, key=lambda c: c.objective_s)),
            formula_bound_s=found.bound_s,
            # A device may begin a task before others have ended the last one, and parameters
            # that tasks hold in different shards are summed in pieces.
            closed_form=False,
            idle_because="no task gets faster with them",
        )

    def _candidate(self, kind: str, found: Combination) -> Candidate:
        units = tuple(unit for option in found.options for unit in option.make())
        return Candidate(
            units=named(units) if len(self._problems) > 1 else units,
            objective_s=found.time_s,
            closed_form=False,
            kind=kind,
            in_turn=tuple(self._problems) if len(self._problems) > 1 else (),
        )

    def _too_large(self, needed_bytes: float) -> InfeasibleError:
        memory, tasks = self._request.cluster.device.memory_bytes, list(self._problems)
        what = f" for {', '.join(tasks)} one after another" if len(tasks) > 1 else ""
        return InfeasibleError(
            f"{self._solver} needs at least {size(needed_bytes)} on a device{what}, "
            f"{missing(needed_bytes, memory)}",
            hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
        )


def _distinct(chosen: Mapping[str, Combination]) -> dict[str, Combination]:
    """Without those whose options others before them have."""
    found: dict[tuple[TaskOption, ...], str] = {}
    for kind, item in chosen.items():
        found.setdefault(item.options, kind)
    return {kind: chosen[kind] for kind in found.values()}


def _uniform(options: TaskOptions) -> Iterator[TaskOptions]:
    """The options of every grid that all tasks have."""
    grids = [{option.shape[:2] for option in own} for own in options]
    for grid in sorted(set.intersection(*grids)):
        same = [[o for o in own if o.shape[:2] == grid] for own in options]
        most = [max(o.shape[2] for o in own) for own in same]
        for dp in sorted({o.shape[2] for own in same for o in own}, reverse=True):
            chosen = [
                [o for o in own if o.shape[2] == min(dp, limit)]
                for own, limit in zip(same, most, strict=True)
            ]
            if all(chosen):
                yield chosen
