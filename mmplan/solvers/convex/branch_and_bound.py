"""Disaggregated pipelines as numbers: the best options of modules that feed each other.

Modules k = 0..K-1 form a graph (edges from producer to consumer, producers first). In a group
g every module has options o of its own, and the step has l_g micro-batches:

    T = max over paths of  sum_k warm_k  +  (l_g - 1) * max_k stage_k  +  max_k reduce_k
    s.t.  sum_k devices_k <= N,    depth_limit_k >= max over paths after k of  sum depth.

``warm`` is the time of one micro-batch through a module's stages, ``stage`` of the slowest
of them, ``depth`` its stages: a stage at distance d from the end of the pipeline holds d
micro-batches, so ``depth_limit`` is how many stages the memory allows after the module.

:func:`best_plans` is exact. It visits groups in the order of a lower bound and stops when
that passes what was found. Of a *family* of groups, which differ in the samples of a step
only, one that was searched bounds those with more samples. Inside a group, options that
another one equals or beats are dropped and modules are chosen from the end of the pipeline
to its start, a chunk of partial plans at a time, each bounded by the least warm-ups and the least
``max stage`` still to come that the devices left allow.

Source: MMScale's objective (its Algorithm 1), solved over integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Ints
from mmplan.solvers.pareto import lower_hull, pareto_rows, sum_of_hulls

Edges = Sequence[tuple[int, int]]
Weight = TypeVar("Weight", int, float)
# Partial plans that are extended at a time: enough for numpy, few enough to find good ones soon.
CHUNK = 1024
# Values this close are the same: sums of floats in another order.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one module may choose from in a group; columns of one length.

    Attributes:
        devices: of all replicas.
        warm_s: one micro-batch through all stages, forward and backward.
        stage_s: the slowest stage for one micro-batch.
        reduce_s: gradient reduction at the end.
        depth: stages that modules before this one must hold micro-batches for.
        depth_limit: most stages that may follow; negative where nothing fits.
    """

    devices: Ints
    warm_s: Floats
    stage_s: Floats
    reduce_s: Floats
    depth: Ints
    depth_limit: Ints

    def __len__(self) -> int:
        return len(self.devices)

    def take(self, rows: NDArray[np.intp]) -> Options:
        """Some of the options."""
        return Options(**{name: getattr(self, name)[rows] for name in Options.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickOptions:
    """Of :class:`Options` the columns that most of them are dropped by.

    Attributes:
        complete: all columns of some rows.
    """

    devices: Ints
    warm_s: Floats
    stage_s: Floats
    complete: Callable[[NDArray[np.intp]], Options]

    def __len__(self) -> int:
        return len(self.devices)

    def all(self) -> Options:
        """All columns of all rows."""
        return self.complete(np.arange(len(self)))

    def take(self, rows: NDArray[np.intp]) -> QuickOptions:
        """Some of the options."""
        return QuickOptions(
            devices=self.devices[rows],
            warm_s=self.warm_s[rows],
            stage_s=self.stage_s[rows],
            complete=lambda some: self.complete(rows[some]),
        )


class KnownTimes(NamedTuple):
    """Times of a module's options, or bounds, that are known before all options are built."""

    warm_s: Floats
    stage_s: Floats
    reduce_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFamily:
    """A group among those that differ in the samples of a step only.

    For every option of a group, those with fewer samples have one with the same degrees or fewer
    replicas that takes no more devices, warm-up or stage time. Reductions and memory may differ.

    Attributes:
        key: of the family.
        samples: of a step of the pipeline.
        module: whose times are known.
        known: these.
    """

    key: Hashable
    samples: int
    module: int
    known: Callable[[], KnownTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options that go together: one number of backbone replicas, one micro-batch.

    Attributes:
        steps: micro-batches of the step, l.
        bound_s: no plan of the group is better.
        build: the options of every module.
        family: None where others tell nothing of this one.
    """

    steps: int
    bound_s: float
    build: Callable[[], Sequence[QuickOptions]]
    family: GroupFamily | None = None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FormulaPlan:
    """A plan: its group, each module's option in it, and its value T."""

    value_s: float
    group: int
    choice: tuple[int, ...]


def best_plans(
    groups: Sequence[Group],
    edges: Edges,
    *,
    devices: int,
    top: int = 1,
    below_s: float = float("inf"),
    any_plan: bool = False,
) -> list[FormulaPlan]:
    """The ``top`` best plans, best first; the first one is the optimum.

    Later ones are the best among options that no other one of the group equals or beats.

    Args:
        groups: all that may be chosen from.
        edges: (producer, consumer), producers before consumers in the modules' order.
        devices: N.
        top: plans wanted.
        below_s: only plans that take less.
        any_plan: whether the best plan of any group will do: only feasibility is asked.

    Returns:
        An empty list where no plan fits.
    """
    best = _Best(top, below_s)
    # By family, what no plan of the last group that was searched takes less than, and its samples.
    searched: dict[Hashable, tuple[int, _LeastTimes]] = {}
    for index in sorted(range(len(groups)), key=lambda i: groups[i].bound_s):
        group, family = groups[index], groups[index].family
        if group.bound_s * (1 - ROUNDING) >= best.limit_s:
            break
        if family is not None and family.key in searched:
            samples, least = searched[family.key]
            values = least.values(family.module, family.known(), group.steps)
            if samples <= family.samples and values.min() * (1 - ROUNDING) >= best.limit_s:
                continue
        search = _GroupSearch(group, index, edges, devices, best)
        search.run()
        if family is not None:
            searched[family.key] = family.samples, search.least
        if any_plan and best.plans:
            break
    return best.plans


def plan_value(
    options: Sequence[Options], choice: Sequence[int], steps: int, edges: Edges
) -> float:
    """T of a choice."""
    warm = [float(own.warm_s[o]) for own, o in zip(options, choice, strict=True)]
    stage = max(float(own.stage_s[o]) for own, o in zip(options, choice, strict=True))
    reduce = max(float(own.reduce_s[o]) for own, o in zip(options, choice, strict=True))
    return longest_path(warm, edges) + (steps - 1) * stage + reduce


def longest_path(weights: Sequence[float], edges: Edges) -> float:
    """The largest sum of weights along a path."""
    return max(w + after for w, after in zip(weights, longest_after(weights, edges), strict=True))


def longest_after(weights: Sequence[Weight], edges: Edges) -> list[Weight]:
    """For each module the largest sum of weights along a path that begins after it."""
    after = [type(weight)() for weight in weights]
    for k in reversed(range(len(weights))):
        after[k] = max((weights[c] + after[c] for p, c in edges if p == k), default=after[k])
    return after


def _chains_before(weights: Sequence[float], edges: Edges) -> list[frozenset[int]]:
    """For each module those before it on the path with the largest sum of weights."""
    before, chains = _longest_before(weights, edges), list[frozenset[int]]()
    for k in range(len(weights)):
        last = max((p for p, c in edges if c == k), key=lambda p: before[p] + weights[p], default=k)
        chains.append(frozenset() if last == k else chains[last] | {last})
    return chains


def _longest_before(weights: Sequence[float], edges: Edges) -> list[float]:
    """For each module the largest sum of weights along a path that ends before it."""
    before = [0.0] * len(weights)
    for k in range(len(weights)):
        before[k] = max((before[p] + weights[p] for p, c in edges if c == k), default=0.0)
    return before


class _Best:
    """The best plans so far."""

    def __init__(self, top: int, below_s: float) -> None:
        self._top, self._below_s = top, below_s
        self.plans: list[FormulaPlan] = []

    @property
    def limit_s(self) -> float:
        """Plans must be better than this to be kept."""
        return self.plans[-1].value_s if len(self.plans) >= self._top else self._below_s

    def add(self, group: int, values: Floats, choices: NDArray[np.int64]) -> None:
        rows = np.flatnonzero(values < self.limit_s)
        if len(rows) > self._top:
            rows = rows[np.argpartition(values[rows], self._top)[: self._top]]
        self.plans += [
            FormulaPlan(value_s=float(values[r]), group=group, choice=tuple(choices[r].tolist()))
            for r in rows
        ]
        self.plans.sort()
        del self.plans[self._top :]


class _LeastTimes:
    """Plans of options that take no less than these.

    Args:
        warm_s: of each module.
        stage_s: of the slowest one.
        edges: between modules.
    """

    def __init__(self, warm_s: Sequence[float], stage_s: float, edges: Edges) -> None:
        before_s, after_s = _longest_before(warm_s, edges), longest_after(warm_s, edges)
        self._around_s = [a + b for a, b in zip(before_s, after_s, strict=True)]
        self._longest_s, self._stage_s = longest_path(warm_s, edges), stage_s

    def values(self, module: int, own: KnownTimes, steps: int) -> Floats:
        """What plans with each option of a module take at least."""
        warm_s = np.maximum(self._around_s[module] + own.warm_s, self._longest_s)
        return warm_s + (steps - 1) * np.maximum(own.stage_s, self._stage_s) + own.reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partial:
    """Plans in which the last modules are chosen; one row each.

    Attributes:
        choice: [S, K], option of each module, -1 where open.
        path_s: [S, K], largest sum of warm-ups from module k to an end.
        depth: [S, K], stages from module k to the furthest end.
        warm_s: largest sum over whole paths, with the least warm-ups of open modules.
        bound_s: no completion is better.
    """

    choice: Ints
    devices: Ints
    stage_s: Floats
    reduce_s: Floats
    path_s: Floats
    depth: Ints
    warm_s: Floats
    bound_s: Floats

    def take(self, rows: NDArray[np.intp] | slice) -> _Partial:
        return _Partial(**{name: getattr(self, name)[rows] for name in _Partial.__slots__})


class _GroupSearch:
    """Branch and bound in one group.

    Attributes:
        least: what its options take that may be in a plan better than the limit, by their times.
    """

    def __init__(self, group: Group, index: int, edges: Edges, devices: int, best: _Best) -> None:
        self._steps, self._index, self._best = group.steps, index, best
        self._edges, self._devices = edges, devices
        self._quick = list(group.build())
        self._rows = [np.arange(len(own)) for own in self._quick]
        self._kept: list[Options] = []
        self.least = _LeastTimes([np.inf] * len(self._quick), 0.0, edges)

    def run(self) -> None:
        """Add the group's best plans to the best so far."""
        if not self._narrow_quickly() or not self._narrow_quickly():
            return
        warm_s = [float(own.warm_s.min()) for own in self._quick]
        self.least = _LeastTimes(warm_s, self._least_stage_s, self._edges)
        self._kept = [own.complete(np.arange(len(own))) for own in self._quick]
        for k, own in enumerate(self._kept):
            self._keep(k, np.flatnonzero(own.depth_limit >= 0))
        if not self._narrow() or not self._narrow():
            return
        for k, keep in enumerate(map(self._front, range(len(self._kept)))):
            self._keep(k, keep)
        self._prepare()
        count = len(self._kept)
        empty = _Partial(
            choice=np.full((1, count), -1, dtype=np.int64),
            devices=np.zeros(1, dtype=np.int64),
            stage_s=np.full(1, self._least_stage_s),
            reduce_s=np.full(1, self._least_reduce_s),
            path_s=np.zeros((1, count)),
            depth=np.zeros((1, count), dtype=np.int64),
            warm_s=np.zeros(1),
            bound_s=np.zeros(1),
        )
        self._extend(empty, count - 1)

    def _keep(self, k: int, rows: NDArray[np.intp]) -> None:
        self._rows[k] = self._rows[k][rows]
        self._kept[k] = self._kept[k].take(rows)

    # --- dropping options ---------------------------------------------------------------

    def _narrow_quickly(self) -> bool:
        """As :meth:`_narrow`, before memory and reductions are known."""
        for k, rows in enumerate(self._worth(self._quick, [np.zeros(1)] * len(self._quick))):
            self._rows[k] = self._rows[k][rows]
            self._quick[k] = self._quick[k].take(rows)
        return all(map(len, self._quick))

    def _narrow(self) -> bool:
        """Drop options that no plan better than the limit uses; False where none is left."""
        if not all(map(len, self._kept)):
            return False
        least_depth = longest_after([int(own.depth.min()) for own in self._kept], self._edges)
        self._least_reduce_s = max(float(own.reduce_s.min()) for own in self._kept)
        reduce = [np.maximum(own.reduce_s, self._least_reduce_s) for own in self._kept]
        for k, rows in enumerate(self._worth(self._kept, reduce)):
            self._keep(k, rows[self._kept[k].depth_limit[rows] >= least_depth[k]])
        return all(map(len, self._kept))

    def _worth(
        self,
        options: Sequence[Options] | Sequence[QuickOptions],
        reduce_s: Sequence[Floats],
    ) -> Sequence[NDArray[np.intp]]:
        """Of each module the options that a plan better than the limit may use."""
        # Without options of a module no plan is left, and so with too few devices.
        fewest = [int(own.devices.min()) if len(own) else self._devices + 1 for own in options]
        spare = self._devices - sum(fewest)
        if spare < 0:
            return [np.zeros(0, dtype=np.intp) for _ in options]
        least_stage = self._stage_by_devices(options)
        self._least_stage_s = least_stage(np.array([self._devices]))[0]
        least_warm = [float(own.warm_s.min()) for own in options]
        least = _LeastTimes(least_warm, self._least_stage_s, self._edges)
        found = list[NDArray[np.intp]]()
        for k, own in enumerate(options):
            value = least.values(k, KnownTimes(own.warm_s, own.stage_s, reduce_s[k]), self._steps)
            worth = value * (1 - ROUNDING) < self._best.limit_s
            found.append(np.flatnonzero((own.devices <= fewest[k] + spare) & worth))
        return found

    def _front(self, k: int) -> NDArray[np.intp]:
        """Options that no other one equals or beats, as far as they can change a plan."""
        own = self._kept[k]
        columns: list[NDArray[np.float64]] = [
            own.devices.astype(np.float64),
            own.warm_s,
            np.maximum(own.stage_s, self._least_stage_s),
            np.maximum(own.reduce_s, self._least_reduce_s),
        ]
        # Depths matter where some module before has little memory, limits up to what may follow.
        most = longest_after([int(o.depth.max()) for o in self._kept], self._edges)
        if any(int(self._kept[p].depth_limit.min()) < most[p] for p in self._before(k)):
            columns.append(own.depth.astype(np.float64))
        if int(own.depth_limit.min()) < most[k]:
            columns.append(-np.minimum(own.depth_limit, most[k]).astype(np.float64))
        return np.sort(pareto_rows(np.stack(columns, axis=1)))

    def _before(self, module: int) -> set[int]:
        found: set[int] = set()
        for producer, consumer in self._edges:
            if consumer == module:
                found |= {producer} | self._before(producer)
        return found

    # --- combining them -----------------------------------------------------------------

    @staticmethod
    def _stage_by_devices(
        modules: Sequence[Options] | Sequence[QuickOptions],
    ) -> Callable[[Ints], Floats]:
        """Function of devices: the least ``max stage`` of some modules, inf where too few."""
        if not modules:
            return lambda left: np.zeros(len(left))
        limits = np.unique(np.concatenate([own.stage_s for own in modules]))
        needed = np.zeros(len(limits))
        for own in modules:
            order = np.argsort(own.stage_s, kind="stable")
            fewest = np.minimum.accumulate(own.devices[order]).astype(np.float64)
            position = np.searchsorted(own.stage_s[order], limits, side="right")
            needed += np.where(position > 0, fewest[np.maximum(position - 1, 0)], np.inf)
        padded = np.append(limits, np.inf)

        def least(left: Ints) -> Floats:
            # ``needed`` falls: the first entry that fits is the least stage time.
            return padded[np.searchsorted(-needed, -left.astype(np.float64), side="left")]

        return least

    @staticmethod
    def _warm_by_devices(
        modules: Sequence[Options], chain: Collection[int]
    ) -> Callable[[Ints], Floats]:
        """Function of devices: at most the sum of warm-ups of a chain among some modules.

        Of each module in the chain those times count that no mix of others beats; the others take
        the fewest devices.
        """
        hulls = [
            lower_hull(np.stack([own.devices.astype(np.float64), own.warm_s], axis=1))
            for k, own in enumerate(modules)
            if k in chain
        ]
        if not hulls:
            return lambda left: np.zeros(left.shape)
        fewest = sum(float(own.devices.min()) for k, own in enumerate(modules) if k not in chain)
        devices, least = sum_of_hulls(hulls).T
        return lambda left: np.interp(left - fewest, devices, least * (1 - ROUNDING))

    def _prepare(self) -> None:
        """Bounds on what the modules that are still open add, for each level."""
        least_warm = [float(own.warm_s.min()) for own in self._kept]
        chains = _chains_before(least_warm, self._edges)
        self._before_s = [
            self._warm_by_devices(self._kept[:k], own) for k, own in enumerate(chains)
        ]
        self._least_stage = [self._stage_by_devices(self._kept[:k]) for k in range(len(self._kept))]
        self._least_path_s = longest_path(least_warm, self._edges)

    def _extend(self, partial: _Partial, k: int) -> None:
        """Choose module k in all partial plans, then the modules before it."""
        order = np.argsort(partial.bound_s, kind="stable")
        step = max(1, CHUNK * 256 // max(256, len(self._kept[k])))
        for start in range(0, len(order), step):
            rows = order[start : start + step]
            rows = rows[partial.bound_s[rows] < self._best.limit_s]
            if not len(rows):
                return
            children = self._children(partial.take(rows), k)
            if not len(children.bound_s):
                continue
            if k == 0:
                original = np.stack(
                    [self._rows[m][children.choice[:, m]] for m in range(len(self._kept))], axis=1
                )
                self._best.add(self._index, children.bound_s, original)
            else:
                self._extend(children, k - 1)

    def _children(self, partial: _Partial, k: int) -> _Partial:
        """Every option of module k for every partial plan, as far as it can be better."""
        own, after = self._kept[k], [c for p, c in self._edges if p == k]
        depth_after = partial.depth[:, after].max(axis=1, initial=0)
        path_after = partial.path_s[:, after].max(axis=1, initial=0.0)
        devices = partial.devices[:, None] + own.devices
        path = path_after[:, None] + own.warm_s
        left = np.maximum(self._devices - devices, -1)
        warm = np.maximum(partial.warm_s[:, None], path + self._before_s[k](left))
        stage = np.maximum(partial.stage_s[:, None], own.stage_s)
        least = self._least_stage[k](left.ravel())
        stage_bound = np.maximum(stage, least.reshape(devices.shape))
        reduce = np.maximum(partial.reduce_s[:, None], own.reduce_s)
        full_warm = warm if k == 0 else np.maximum(warm, self._least_path_s)
        # With one micro-batch 0 * inf must not hide that nothing fits.
        fits = (devices <= self._devices) & np.isfinite(stage_bound)
        fits &= own.depth_limit >= depth_after[:, None]
        steady = (self._steps - 1) * np.where(fits, stage_bound, 0.0)
        bound = full_warm + steady + reduce
        s, o = np.nonzero(fits & (bound < self._best.limit_s))
        choice, all_path, depth = partial.choice[s], partial.path_s[s], partial.depth[s]
        choice[:, k], all_path[:, k] = o, path[s, o]
        depth[:, k] = depth_after[s] + own.depth[o]
        return _Partial(
            choice=choice,
            devices=devices[s, o],
            stage_s=stage[s, o],
            reduce_s=reduce[s, o],
            path_s=all_path,
            depth=depth,
            warm_s=warm[s, o],
            bound_s=bound[s, o],
        )
