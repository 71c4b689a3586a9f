"""The groups of a disaggregated pipeline: backbone replicas and micro-batch, with their bounds.

In a group the backbone has D replicas with micro-batches of M samples, so a step of the
pipeline takes D M samples and there are l = ceil(batch / (D M)) of them; a module with n
replicas has micro-batches of ceil(D M / n).

Shape suffixes: G = groups with one M, H = corners of a lower hull, R = options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.errors import InvalidInputError
from mmplan.solvers.convex_core import Group, Options
from mmplan.solvers.convex_options import ModuleTables, Table, smallest_divisors
from mmplan.solvers.convex_stages import UNLIMITED, Floats, Ints
from mmplan.solvers.problem import Problem

# Largest micro-batch of the backbone that is tried without pins: 1, 2, 4, ...
LARGEST_MICROBATCH = 64
# Up to so many replica numbers, all are tried where memory depends on them (ZeRO-1).
ALL_REPLICAS = 4096
# A number of replicas that leaves no optimizer state to any of them.
MANY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the options of a group have in common.

    Attributes:
        replicas: of the backbone, D.
        microbatch: of the backbone, M.
        steps: l.
        interleaved: every replica has l full micro-batches.
        samples: of a step of the pipeline, D M; the batch where that is less.
    """

    replicas: int
    microbatch: int
    steps: int
    interleaved: bool
    samples: int


class Pipelines:
    """All groups of one task.

    Args:
        microbatches: of the backbone, where its plan has none; default powers of two.
        interleaved: whether the backbone may have vpp > 1.
        divisible: only replicas that divide the batch, and the backbone's samples a step.

    Attributes:
        modules: in the task's order, producers first.
        edges: (producer, consumer) as positions in ``modules``.
        backbone: position of the module whose replicas set the micro-batches.
        tables: of every module.
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
    ) -> None:
        self.problem = problem
        self.modules = problem.task.modules
        self.edges = [
            (self.modules.index(producer), k)
            for k, module in enumerate(self.modules)
            for producer in problem.producers(module)
        ]
        self.backbone = self.modules.index(_backbone(problem))
        self.tables = [
            ModuleTables(
                problem,
                module,
                backbone=k == self.backbone,
                interleaved=interleaved and k == self.backbone,
            )
            for k, module in enumerate(self.modules)
        ]
        self._check_vpp()
        self._microbatches, self._divisible = microbatches, divisible
        self.frames: list[Frame] = []

    def _check_vpp(self) -> None:
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
        bounds = _Bounds(self)
        for microbatch in self._backbone_sizes():
            frames = list(self._frames(microbatch))
            for frame, bound in zip(frames, bounds.of(microbatch, frames), strict=True):
                if np.isfinite(bound):
                    self.frames.append(frame)
                    groups.append(
                        Group(
                            steps=frame.steps,
                            bound_s=float(bound),
                            build=lambda frame=frame: self.options(frame),
                        )
                    )
        return groups

    def options(self, frame: Frame) -> list[Options]:
        """The options of every module in a group."""
        return [self.table(k, frame).options for k in range(len(self.modules))]

    def table(self, k: int, frame: Frame) -> Table:
        """The options of one module, and what they mean."""
        dp, size = self.replicas(k, frame)
        return self.tables[k].table(dp, size, steps=frame.steps, interleaved=frame.interleaved)

    def replicas(self, k: int, frame: Frame) -> tuple[Ints, Ints]:
        """(dp, largest micro-batch) that one module may have in a group."""
        if self.tables[k].backbone:
            return np.array([frame.replicas]), np.array([frame.microbatch])
        dp, size = self.tables[k].replicas(frame.samples, frame.steps)
        if self._divisible:
            whole = frame.samples % dp == 0
            dp, size = dp[whole], size[whole]
        return dp, size

    def depths_after(self) -> list[int]:
        """Least stages after each module."""
        after = [0] * len(self.modules)
        for k in reversed(range(len(self.modules))):
            after[k] = max((1 + after[c] for p, c in self.edges if p == k), default=0)
        return after

    def _backbone_sizes(self) -> list[int]:
        batch, pins = self.problem.task.batch, self.tables[self.backbone].pins
        if pins.microbatch is not None:
            return [m for m in range(1, batch + 1) if pins.allows("microbatch", m)]
        sizes = self._microbatches or [
            2**i for i in range(LARGEST_MICROBATCH.bit_length()) if 2**i <= LARGEST_MICROBATCH
        ]
        return [m for m in sizes if m <= batch]

    def _frames(self, microbatch: int) -> Iterator[Frame]:
        batch, own = self.problem.task.batch, self.tables[self.backbone]
        samples = -(-batch // microbatch)
        most = min(samples, self.problem.devices // min(own.tps, default=1))
        others = [t for t in self.tables if not t.backbone]
        pinned = any(t.pins.dp or t.pins.microbatch for t in others)
        sharded = bool(self.problem.costs.training.zero)
        if own.pins.dp is not None:
            counts = [n for n in range(1, most + 1) if own.pins.allows("dp", n)]
        elif pinned or (sharded and most <= ALL_REPLICAS):
            counts = list(range(1, most + 1))
        else:
            counts = [int(n) for n in smallest_divisors(samples) if n <= most]
        for replicas in counts:
            if self._divisible and batch % (replicas * microbatch):
                continue
            yield Frame(
                replicas=replicas,
                microbatch=microbatch,
                steps=-(-batch // (replicas * microbatch)),
                interleaved=batch % (replicas * microbatch) == 0,
                samples=min(batch, replicas * microbatch),
            )


class _Bounds:
    """Lower bounds of groups, before their options are built.

    For any choice tau = max_k stage_k has N tau >= sum_k devices_k stage_k, so

        T >= sum over a path of  min_o (warm_o + (l - 1) / N devices_o stage_o)
             + (l - 1) / N * sum off the path of  min_o devices_o stage_o,

    and devices_o >= tp pp samples / size: of a module other than the backbone only the lower
    hull of (tp pp stage / size, warm) is needed, for all groups at once.
    """

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self._after = pipelines.depths_after()
        batch = pipelines.problem.task.batch
        self._hulls = [
            np.zeros((0, 2)) if own.backbone else _hull(own, batch, self._after[k])
            for k, own in enumerate(pipelines.tables)
        ]
        self._fewest = [_fewest(own, self._after[k]) for k, own in enumerate(pipelines.tables)]

    def of(self, microbatch: int, frames: Sequence[Frame]) -> Floats:
        """A bound for each group; inf where the backbone fits in no way."""
        own, backbone = self._pipelines.tables[self._pipelines.backbone], self._pipelines.backbone
        empty = any(
            not t.backbone and not len(h)
            for t, h in zip(self._pipelines.tables, self._hulls, strict=True)
        )
        if not frames or empty or own.empty:
            return np.full(len(frames), np.inf)
        devices = self._pipelines.problem.devices
        steps_G = np.array([frame.steps for frame in frames])
        dp_G = np.array([frame.replicas for frame in frames])
        rate_G = (steps_G - 1) * np.array([frame.samples for frame in frames]) / devices
        shared_G, least_s = self._others(rate_G)
        spare = devices - sum(n for k, n in enumerate(self._fewest) if k != backbone)
        best = np.full(len(frames), np.inf)
        size = np.array([microbatch])
        shapes = own.known
        for tp in own.tps:
            stage, warm = own.times(tp, size)
            degree = (tp * shapes.pp)[:, None]
            room = own.room(tp, dp_G, np.full_like(dp_G, microbatch), steps_G)
            steady = warm + (steps_G - 1) * dp_G / devices * degree * stage + shared_G
            alone = warm + (steps_G - 1) * stage + least_s
            value = np.maximum(steady, alone) + own.reduce_s(tp, dp_G)
            fits = (room >= self._after[backbone]) & (degree * dp_G <= spare)
            best = np.minimum(best, np.where(fits, value, np.inf).min(axis=0))
        return best

    def _others(self, rate_G: Floats) -> tuple[Floats, float]:
        """What the other modules add to a path through the backbone, and their warm-ups alone."""
        count = len(self._hulls)
        both, only = np.zeros((count, len(rate_G))), np.zeros((count, len(rate_G)))
        least = [0.0] * count
        for k, hull in enumerate(self._hulls):
            if len(hull):
                both[k] = (hull[:, :1] * rate_G + hull[:, 1:]).min(axis=0)
                only[k], least[k] = hull[:, 0].min() * rate_G, float(hull[:, 1].min())
        backbone, edges = self._pipelines.backbone, self._pipelines.edges
        before, before_least = [np.zeros(len(rate_G))] * count, [0.0] * count
        after, after_least = list(before), [0.0] * count
        gain = both - only
        for k in range(count):
            for p, c in edges:
                if c == k:
                    before[k] = np.maximum(before[k], before[p] + gain[p])
                    before_least[k] = max(before_least[k], before_least[p] + least[p])
        for k in reversed(range(count)):
            for p, c in edges:
                if p == k:
                    after[k] = np.maximum(after[k], after[c] + gain[c])
                    after_least[k] = max(after_least[k], after_least[c] + least[c])
        shared = only.sum(axis=0) + before[backbone] + after[backbone]
        return shared, before_least[backbone] + after_least[backbone]


def _optimistic_room(own: ModuleTables, tp: int, size_B: Ints) -> Ints:
    """[Q, B]: room with the number of replicas that needs least memory, and one micro-batch."""
    alone, many = np.ones_like(size_B), np.full_like(size_B, MANY)
    return np.maximum(own.room(tp, alone, size_B, 1), own.room(tp, many, size_B, 1))


def _hull(own: ModuleTables, batch: int, after: int) -> Floats:
    """[H, 2]: (device-seconds of a stage per sample, warm-up) that no mix of others beats."""
    points: list[Floats] = []
    sizes = np.unique(
        np.concatenate([np.arange(1, 65), np.geomspace(64, 2 * batch + 65, 64)]).astype(np.int64)
    )
    # Times grow with the size: those of a range's start, shared out over its last size.
    size_B, last_B = sizes[:-1], sizes[1:] - 1
    for tp in () if own.empty else own.tps:
        stage, warm = own.times(tp, size_B)
        work = tp * own.known.pp[:, None] * stage / last_B
        fits = _optimistic_room(own, tp, size_B) >= after
        fits &= size_B <= batch
        points.append(np.stack([work[fits], warm[fits]], axis=1))
    return _lower_hull(np.concatenate(points)) if points else np.zeros((0, 2))


def _lower_hull(points: Floats) -> Floats:
    """Corners where ``rate * x + y`` is least for some rate >= 0."""
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    lowest = np.minimum.accumulate(ordered[:, 1])
    better = np.append(True, ordered[1:, 1] < lowest[:-1])[: len(ordered)]
    corners: list[tuple[float, float]] = []
    for x, y in ordered[better]:
        while len(corners) > 1 and _above(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((float(x), float(y)))
    return np.array(corners).reshape(-1, 2)


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _fewest(own: ModuleTables, after: int) -> int:
    """A bound on the devices of a module."""
    least, one = UNLIMITED, np.ones(1, dtype=np.int64)
    for tp in () if own.empty else own.tps:
        fits = _optimistic_room(own, tp, one)[:, 0] >= after
        if fits.any():
            least = min(least, tp * int(own.known.pp[fits].min()))
    return least


def _backbone(problem: Problem) -> str:
    """The module that says so, or the one with the most seconds per sample at its least tp."""
    specs, task = problem.request.workload.modules, problem.task

    def seconds(module: str) -> float:
        tp = min(problem.costs.tp_options(task=task.name, module=module))
        return sum(problem.stage_s(module, (0, problem.blocks(module)), tp, 1))

    named = [module for module in task.modules if specs[module].backbone]
    return named[0] if named else max(task.modules, key=seconds)
