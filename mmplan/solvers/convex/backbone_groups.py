"""The groups of a disaggregated pipeline: backbone replicas and micro-batch, with their bounds.

In a group the backbone has D replicas with micro-batches of M samples, so a step of the
pipeline takes D M samples and there are l = ceil(batch / (D M)) of them; a module with n
replicas has micro-batches of ceil(D M / n).

Shape suffixes: G = groups with one M, H = corners of a lower hull, R = options.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.errors import InvalidInputError
from mmplan.solvers.convex.branch_and_bound import Group, GroupFamily, KnownTimes, longest_after
from mmplan.solvers.convex.module_tables import (
    UNLIMITED,
    ModuleTables,
    OptionRows,
    Table,
)
from mmplan.solvers.pareto import lower_hull, sum_of_hulls
from mmplan.solvers.partitioner import backbone_of
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import smallest_divisors

# Largest micro-batch of the backbone that is tried without pins; all up to it are.
LARGEST_MICROBATCH = 64
# Up to so many replica numbers, all are tried where memory depends on them (ZeRO-1).
ALL_REPLICAS = 4096
# Points of the grid on which bounds of the other modules are known.
RATES = 256
# Shares of the steady time that the backbone's own stage answers for (see _Bounds), None for
# its share of the devices.
SHARES = (None, 0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneShape:
    """What the options of a group have in common.

    Attributes:
        replicas: of the backbone, D.
        microbatch: of the backbone, M.
        steps: l.
        fewest: micro-batches of the replica that has the fewest.
        samples: of a step of the pipeline, D M; the batch where that is less.
    """

    replicas: int
    microbatch: int
    steps: int
    fewest: int
    samples: int


class Pipelines:
    """All groups of one task.

    Args:
        microbatches: of the backbone, where its plan has none; default all that may matter.
        interleaved: whether the backbone may have vpp > 1.
        divisible: only replicas that divide the batch, and the backbone's samples a step.
        shares: devices that each module may take; default all that the others leave.

    Attributes:
        modules: in the task's order, producers first.
        edges: (producer, consumer) as positions in ``modules``.
        backbone: position of the module whose replicas set the micro-batches.
        tables: of every module.
        depths_after: least stages after each module.
        frames: of every group.

    Raises:
        InvalidInputError: vpp is pinned above 1 for a module that is not the backbone.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        microbatches: Sequence[int] | None = None,
        interleaved: bool = True,
        divisible: bool = False,
        shares: Mapping[str, int] | None = None,
    ) -> None:
        self.problem = problem
        self.modules = problem.task.modules
        self.edges = [
            (self.modules.index(producer), k)
            for k, module in enumerate(self.modules)
            for producer in problem.producers(module)
        ]
        self.backbone = self.modules.index(backbone_of(problem))
        self.tables = [
            ModuleTables(
                problem,
                module,
                backbone=k == self.backbone,
                interleaved=interleaved and k == self.backbone,
            )
            for k, module in enumerate(self.modules)
        ]
        self.depths_after = longest_after([1] * len(self.modules), self.edges)
        self._microbatches, self._divisible = microbatches, divisible
        # Each other module takes one at least.
        left = problem.devices - len(self.modules) + 1
        self.most = [shares[module] if shares else left for module in self.modules]
        self.frames: list[BackboneShape] = []
        for tables in self.tables:
            vpp = tables.pins.vpp
            if not tables.backbone and vpp is not None and not tables.pins.allows("vpp", 1):
                raise InvalidInputError(
                    f"modules.{tables.module}.plan.vpp: only the backbone "
                    f"({self.modules[self.backbone]}) is interleaved",
                    hint=f"leave vpp out, or set backbone: true in modules.{tables.module}",
                )

    def groups(self) -> list[Group]:
        """Every group with a bound; those in which some module fits nowhere are left out."""
        self.frames = []
        groups: list[Group] = []
        if any(own.empty for own in self.tables):
            return groups
        bounds, has_families = _Bounds(self), not (self._is_pinned or self.problem.varies)
        for microbatch in self._backbone_sizes():
            frames = list(self._frames(microbatch))
            found, known = bounds.of(frames)
            for position, (frame, bound) in enumerate(zip(frames, found, strict=True)):
                if np.isfinite(bound):
                    self.frames.append(frame)
                    family = GroupFamily(
                        key=(microbatch, frame.steps),
                        samples=frame.samples,
                        module=self.backbone,
                        known=lambda known=known, position=position: known.of(position),
                    )
                    groups.append(
                        Group(
                            steps=frame.steps,
                            bound_s=float(bound),
                            build=lambda frame=frame: [
                                table.options for table in self.tables_of(frame)
                            ],
                            family=family if has_families else None,
                        )
                    )
        return groups

    @property
    def _is_pinned(self) -> bool:
        """Whether another module's plan has its replicas or micro-batches."""
        others = (own.pins for own in self.tables if not own.backbone)
        return any(pins.dp or pins.microbatch for pins in others)

    def tables_of(self, frame: BackboneShape) -> list[Table]:
        """The options of every module in a group, and what they mean."""
        return [
            own.table(
                *self.replicas(k, frame),
                steps=frame.steps,
                fewest=frame.fewest,
                most=most,
            )
            for k, (own, most) in enumerate(zip(self.tables, self.most, strict=True))
        ]

    def replicas(self, k: int, frame: BackboneShape) -> tuple[Ints, Ints]:
        """(dp, largest micro-batch) that one module may have in a group."""
        if self.tables[k].backbone:
            return np.array([frame.replicas]), np.array([frame.microbatch])
        dp, size = self.tables[k].replicas(frame.samples, frame.steps, self.most[k])
        if self._divisible:
            whole = frame.samples % dp == 0
            dp, size = dp[whole], size[whole]
        return dp, size

    def _backbone_sizes(self) -> list[int]:
        batch, pins = self.problem.task.batch, self.tables[self.backbone].pins
        if pins.microbatch is not None:
            return [m for m in range(1, batch + 1) if pins.allows("microbatch", m)]
        sizes = self._microbatches or range(1, LARGEST_MICROBATCH + 1)
        return [m for m in sizes if m <= batch]

    def _frames(self, microbatch: int) -> Iterator[BackboneShape]:
        batch, own = self.problem.task.batch, self.tables[self.backbone]
        samples = -(-batch // microbatch)
        most = min(samples, self.most[self.backbone] // min(own.tps, default=1))
        pinned = self._is_pinned
        sharded = any(map(self.problem.zero_of, self.problem.task.modules))
        if own.pins.dp is not None:
            counts = [n for n in range(1, most + 1) if own.pins.allows("dp", n)]
        elif pinned or (sharded and most <= ALL_REPLICAS):
            counts = list(range(1, most + 1))
        else:
            counts = [int(n) for n in smallest_divisors(samples) if n <= most]
        for replicas in counts:
            if self._divisible and batch % (replicas * microbatch):
                continue
            if not pinned and self._is_beaten(replicas, microbatch):
                continue
            step = min(batch, replicas * microbatch)
            steps = -(-batch // step)
            last = batch - (steps - 1) * step
            yield BackboneShape(
                replicas=replicas,
                microbatch=microbatch,
                steps=steps,
                fewest=steps - (last < replicas),
                samples=step,
            )

    def _is_beaten(self, replicas: int, microbatch: int) -> bool:
        """Whether the next smaller micro-batch takes as few steps: it needs no more of anything."""
        batch, free = self.problem.task.batch, self.tables[self.backbone].pins.microbatch is None
        if microbatch == 1 or self._microbatches or not free:
            return False
        return -(-batch // (replicas * (microbatch - 1))) == -(-batch // (replicas * microbatch))


class _BackboneTimes(NamedTuple):
    """Of the backbone's options in several groups.

    Attributes:
        group: of each.
        times: of all.
    """

    group: Ints
    times: KnownTimes

    def of(self, group: int) -> KnownTimes:
        """Those of one group."""
        own = self.group == group
        return KnownTimes(*(column[own] for column in self.times))


class _Bounds:
    """Lower bounds of groups, before the options of any other module are built.

    Let one option of the backbone take d devices and t seconds a stage, and let r = N - d. The
    other modules share r devices: tau = max_k stage_k >= sum_k devices_k stage_k / r. For any
    share s in [0, 1] (the best one is tried of a few)

        (l - 1) tau >= s (l - 1) t + (1 - s) (l - 1) / r * sum_k devices_k stage_k,

    and T >= that + sum over a path of warm_k. Since devices_k >= tp pp samples / size, what a
    module adds is a function of rate = (1 - s) (l - 1) samples / r only,

        phi_k(rate) = min_o (warm_o + rate * tp pp stage_o / size_o),

    concave, so that interpolating it on a grid keeps it a bound. With few steps warm-ups matter
    more than stages: they add up to the least sum for r devices at least, whatever tau is.
    """

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines, self._k = pipelines, pipelines.backbone
        self._own = pipelines.tables[self._k]
        self._after = pipelines.depths_after
        batch, tables = pipelines.problem.task.batch, pipelines.tables
        others = {k: own for k, own in enumerate(tables) if k != self._k}
        hulls = {k: _Hulls.of(own, batch, self._after[k]) for k, own in others.items()}
        self._fewest = sum(
            int(_fitting(own, self._after[k]).devices.min(initial=UNLIMITED))
            for k, own in others.items()
        )
        # [T, Q], whether the backbone fits with the smallest micro-batch.
        self._fits = np.zeros((len(self._own.tps), len(self._own.shapes.pp)), dtype=np.bool_)
        fitting = _fitting(self._own, self._after[self._k])
        self._fits[fitting.tp, fitting.shape] = True
        self.empty = any(not len(own.work) for own in hulls.values())
        self._rate = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, RATES) * 2 * batch])
        edges = pipelines.edges
        ends = _chains(self._k, [(c, p) for p, c in edges]), _chains(self._k, edges)
        paths = [] if self.empty else [(*a, *b) for a, b in itertools.product(*ends)]
        self._added = [self._path_added(hulls, path) for path in paths]
        self._warm = [_least_warm(hulls, path) for path in paths]

    def _path_added(self, hulls: Mapping[int, _Hulls], path: Sequence[int]) -> Floats:
        """phi on the grid, summed up along a path through the backbone."""
        total = np.zeros(len(self._rate))
        for k, own in hulls.items():
            work, warm = own.work[:, :1], own.work[:, 1:]
            total += (work * self._rate + warm * (k in path)).min(axis=0)
        return total

    def of(self, frames: Sequence[BackboneShape]) -> tuple[Floats, _BackboneTimes]:
        """A bound for each group of one micro-batch; inf where the backbone fits in no way."""
        bound, none = np.full(len(frames), np.inf), np.zeros(0)
        if self.empty or not frames:
            return bound, _BackboneTimes(none.astype(np.int64), KnownTimes(none, none, none))
        own, devices = self._own, self._pipelines.problem.devices
        steps_G = np.array([frame.steps for frame in frames])
        dp_G = np.array([frame.replicas for frame in frames])
        samples_G = np.array([frame.samples for frame in frames])
        fewest_G = np.array([frame.fewest for frame in frames])
        size = np.array([frames[0].microbatch])
        rows = own.rows(dp_G, min(devices - self._fewest, self._pipelines.most[self._k]))
        rows = rows.where(self._fits[rows.tp, rows.shape])
        limit = own.depth_limit(rows, size, steps_G[rows.b], fewest_G[rows.b])
        rows = rows.where(limit >= self._after[self._k])
        # A module alone may take them all.
        steps, left = steps_G[rows.b], np.maximum(devices - rows.devices, 1)
        stage, warm = own.times(rows, size, steps)
        steady = (steps - 1) * stage
        least = np.full(len(left), -np.inf)
        for share in SHARES:
            weight = rows.devices / devices if share is None else share
            rate = (1 - weight) * (steps - 1) * samples_G[rows.b] / left
            for added in self._added:
                least = np.maximum(least, weight * steady + np.interp(rate, self._rate, added))
        for devices_H, warm_H in self._warm:
            each = left / samples_G[rows.b]
            least = np.maximum(least, steady + np.interp(each, devices_H, warm_H))
        reduce_s = own.reduce_s(rows, size)
        np.minimum.at(bound, rows.b, warm + reduce_s + least)
        return bound, _BackboneTimes(rows.b, KnownTimes(warm, stage, reduce_s))


def _chains(start: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Paths that follow the edges from a module, without it, to an end."""
    following = [c for p, c in edges if p == start]
    return [(c, *rest) for c in following for rest in _chains(c, edges)] or [()]


class _Hulls(NamedTuple):
    """What a module takes for its warm-up that no mix of others beats: [H, 2] each.

    Attributes:
        work: device-seconds of a stage per sample, and warm-up.
        devices: per sample of a step, and warm-up.
    """

    work: Floats
    devices: Floats

    @classmethod
    def of(cls, own: ModuleTables, batch: int, after: int) -> _Hulls:
        """Of all micro-batches and degrees that leave room for so many stages after it."""
        spread = np.geomspace(64, 2 * batch + 65, 64).astype(np.int64)
        sizes = np.unique(np.concatenate([np.arange(1, 65), spread]))
        sizes = sizes[: int(np.searchsorted(sizes, batch, side="right")) + 1]
        # Times grow with the size: those of a range's start, shared out over its last size.
        size_B, last_B = sizes[:-1], sizes[1:] - 1
        rows = own.rows(np.ones_like(size_B), UNLIMITED)
        stage, warm = own.times(rows, size_B)
        devices = rows.devices / last_B[rows.b]
        fits = own.most_after(rows, size_B) >= after
        fits &= own.shapes.vpp[rows.shape] == 1
        each = (np.stack([x[fits], warm[fits]], axis=1) for x in (devices * stage, devices))
        return cls(*map(lower_hull, each))


def _least_warm(hulls: Mapping[int, _Hulls], path: Sequence[int]) -> tuple[Floats, Floats]:
    """(devices per sample, the least sum of warm-ups of a path with so many) of all modules."""
    if not path:
        return np.zeros(1), np.zeros(1)
    fewest = sum(float(own.devices[0, 0]) for k, own in hulls.items() if k not in path)
    devices, warm = sum_of_hulls([hulls[k].devices for k in path]).T
    return devices + fewest, warm


def _fitting(own: ModuleTables, after: int) -> OptionRows:
    """The options of one replica that may fit with micro-batches of one sample."""
    one = np.ones(1, dtype=np.int64)
    rows = own.rows(one, UNLIMITED)
    return rows.where(own.most_after(rows, one) >= after)
