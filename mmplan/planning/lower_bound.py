"""A bound below the simulated step of every plan of a workload on its devices.

It knows no solver and no schedule. Whatever a plan does, each of its micro-batches runs each block
with some tensor-parallel degree and some size, and all these choices together have to meet

- *work*: devices are busy with all computes, and there are N of them for a step;
- *path*: a sample goes through its blocks one after another, to a loss and back.

The bound is a weighted mean of the two, least over the choices of each block by itself, with the
weights for which that is largest. To the work comes what devices lose at least beside their
computes (:mod:`mmplan.planning.least_overheads`). docs/architecture.md has the proof.

Shape suffixes used in this file: K = blocks of all modules of all tasks; P = pieces of
their curves.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.block_ranges import overlaps
from mmplan.costs.cost_model import CostModel
from mmplan.planning.least_overheads import (
    blocks_of_owners,
    features_s,
    is_barrier,
    is_on_one_node,
    least_overheads,
    most_value,
)
from mmplan.program.lower import lower
from mmplan.program.model import CrossSampleLoss, Graph, Stage
from mmplan.schema.base import ZeroStage
from mmplan.schema.plan import Plan, PlanLoss, Schedule, Unit
from mmplan.schema.profile import Curve
from mmplan.schema.recompute import recomputed_blocks
from mmplan.simulation.step import Simulation

# What rounding may take from a simulated step, relative.
_ROUNDING = 1e-9
# The weights are found in steps of 1/4, 1/8 and so on: so many.
_STEP_SIZES = 7
# A tensor-parallel degree, and whether a block recomputes; None where it has nothing to.
_Way = tuple[int, Literal["none", "full"] | None]
# Curves with their factors: a sum.
_CurveSum = Sequence[tuple[Curve, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Seconds that every plan's step takes at least.

    Attributes:
        seconds: the bound.
        work_s: by the work of all devices alone, each block at its most efficient.
        path_s: by the path of one sample alone, each block at its fastest.
    """

    seconds: float
    work_s: float
    path_s: float


class _Weights(NamedTuple):
    """Of the path; the rest of 1 is that of work.

    A loss over the whole batch parts a step in two: forwards come before it, backwards after.
    """

    forward: float
    backward: float


def lower_bound(plan: Plan, costs: CostModel) -> LowerBound:
    """The bound for the plan's workload, profile, cluster, training and number of devices.

    Every plan of these that has no faults simulates to no less, whatever degrees the workload pins.

    Args:
        plan: any plan of them. Neither its units nor its prediction are looked at; its tasks say
            which modules recompute, its solver's report of which of them it chose that itself.
        costs: of its profile, cluster and training.
    """
    blocks = _Blocks(plan, costs)
    work, path = _Weights(0.0, 0.0), _Weights(1.0, 1.0)
    best = max((blocks.bound_s(weights), weights) for weights in (work, path))
    for halvings in range(_STEP_SIZES):
        best = _climbed(blocks.bound_s, best, 0.25 / 2**halvings)
    return LowerBound(
        seconds=best[0] * (1 - _ROUNDING),
        work_s=blocks.least_s(work) * (1 - _ROUNDING),
        path_s=blocks.least_s(path) * (1 - _ROUNDING),
    )


def above_work(simulation: Simulation, bound: LowerBound) -> dict[str, float]:
    """Where a step's device time goes beside the least work: shares of it, by what takes them.

    Args:
        simulation: of a plan.
        bound: of its workload.
    """
    total_s = len(simulation.used) * simulation.iteration_s or 1.0
    used_s = sum(simulation.used) * simulation.iteration_s
    waiting_s, messages_s = sum(simulation.idle_s), sum(simulation.communication_s)
    least_s = bound.work_s * len(simulation.used)
    seconds = {
        "slower computes": used_s - waiting_s - messages_s - least_s,
        "waiting": waiting_s,
        "communication": messages_s,
        "devices without work": total_s - used_s,
    }
    return {what: max(0.0, value) / total_s for what, value in seconds.items()}


def _climbed(
    value: Callable[[_Weights], float], best: tuple[float, _Weights], step: float
) -> tuple[float, _Weights]:
    """The best weights that steps along one of them lead to.

    The value is concave in them, but for what devices lose.
    """
    while True:
        near = [
            best[1]._replace(**{name: min(max(weight + move, 0.0), 1.0)})
            for name, weight in best[1]._asdict().items()
            for move in (step, -step)
        ]
        found = max((value(weights), weights) for weights in near)
        if found[0] <= best[0]:
            return best
        best = found


@dataclass(frozen=True, slots=True)
class _Path:
    """The path of one sample to a loss and back.

    Attributes:
        forwards: [K] 1 where a block's forward lies on it, else 0.
        backwards: [K] the same of backwards.
        loss_s: seconds of the loss, where it is one over several samples.
    """

    forwards: Floats
    backwards: Floats
    loss_s: float


class _Blocks:
    """Every block of every task with its choices, and what holds for all of them together.

    Args:
        plan: as of :func:`lower_bound`.
        costs: likewise.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._graph: Graph = lower(_on_one_device(plan))
        self._stages = self._graph.stages
        self._trained = {(stage.owner, stage.blocks) for stage in self._stages if stage.trainable}
        self._known: dict[object, Floats] = {}
        self._shares_items = any(
            module.items for task in plan.tasks.values() for module in task.modules.values()
        )
        largest = [self._largest(stage) for stage in self._stages]
        pieces = [self._pieces(*pair) for pair in zip(self._stages, largest, strict=True)]
        rows, lengths = np.concatenate(pieces), list(map(len, pieces))
        self._block_P = np.repeat(np.arange(len(pieces)), lengths)
        self._first_P = np.cumsum([0, *lengths[:-1]])
        self._tp_P, self._low_P, self._high_P = rows.T[:3]
        self._forward_P, self._inputs_P, self._backward_P = rows.T[3:5], rows.T[5:7], rows.T[7:9]
        batch_K = np.array([plan.tasks[stage.task].batch for stage in self._stages], np.float64)
        self._share_K = batch_K / plan.devices
        losses = self._graph.cross_sample_losses
        barriers = [loss for loss in losses if is_barrier(plan, self._graph, loss)]
        self._barrier_s = max(map(self._loss_s, barriers), default=0.0)
        self._gather_s = max(map(self._whole_loss_s, barriers), default=0.0) - self._barrier_s
        self._syncs_s = sum(
            sum(costs.loss_s(loss=loss.name, samples=loss.sync_batch)) * loss.divisor
            for loss in losses
        )
        none_K, each_K = np.zeros(len(pieces)), np.ones(len(pieces))
        self._forward_K = self._least_of_each(each_K, none_K, none_K, none_K)
        self._inputs_K = self._least_of_each(none_K, each_K, none_K, none_K)
        self._path = self._longest_path(self._forward_K, self._inputs_K)
        self._whole_K = self._least_of_each(none_K, none_K, batch_K, batch_K)
        self._overheads_N = least_overheads(
            plan, costs, self._graph, self._forward_K, self._inputs_K
        )
        self._owned = [list(of) for of in blocks_of_owners(self._graph).values()]

    def least_s(self, weights: _Weights) -> float:
        """The weighted mean of work and path, least over all choices."""
        return float(self._blocks_s(weights).sum()) + self._losses_s(weights)

    def bound_s(self, weights: _Weights) -> float:
        """The same with what devices lose beside their computes."""
        blocks_K = self._blocks_s(weights)
        least_s = float(blocks_K.sum()) + self._losses_s(weights) + self._gather_s
        return least_s + self._lost_s(weights, blocks_K)

    def _backward(self, weights: _Weights) -> float:
        """The weight of the path back: that of the path there where nothing parts the step."""
        return weights.backward if self._barrier_s else weights.forward

    def _blocks_s(self, weights: _Weights) -> Floats:
        """[K] least of each block."""
        forward, backward, path = weights.forward, self._backward(weights), self._path
        return self._least_of_each(
            forward * path.forwards,
            backward * path.backwards,
            (1 - forward) * self._share_K,
            (1 - backward) * self._share_K,
        )

    def _losses_s(self, weights: _Weights) -> float:
        forward = weights.forward
        return self._barrier_s or (
            forward * self._path.loss_s + (1 - forward) * self._syncs_s / self._plan.devices
        )

    def _lost_s(self, weights: _Weights, blocks_K: Floats) -> float:
        """What comes to the mean for the seconds that devices lose.

        Args:
            weights: of the mean.
            blocks_K: least of each block at these weights.
        """
        if self._overheads_N is None:
            return 0.0
        devices = self._plan.devices
        backward = self._backward(weights)
        share = (1 - max(weights.forward, backward)) / devices
        shared_N = share * self._overheads_N
        least_s = float(blocks_K.sum())
        # In a step that takes this long there is nothing to show. In a shorter one no device is
        # alone with more work than that.
        room_s = least_s + float(shared_N[devices])
        path_K = (
            weights.forward * self._path.forwards * self._forward_K
            + backward * self._path.backwards * self._inputs_K
        )
        seconds = [float(self._whole_K[of].sum()) for of in self._owned]
        values = [float((blocks_K - path_K)[of].sum()) for of in self._owned]
        of_one = most_value(values, seconds, room_s)
        of_all = sum(v for v, s in zip(values, seconds, strict=True) if s <= room_s * 1.001)
        # Of so many devices that are alone, a part of all time is theirs, less what their blocks
        # count in the mean.
        return min(
            float(shared_N[devices - alone])
            + max(0.0, alone * share * least_s - min(alone * of_one, of_all))
            for alone in range(devices + 1)
        )

    def _least_of_each(
        self, f_K: Floats, i_K: Floats, work_f_K: Floats, work_b_K: Floats
    ) -> Floats:
        """[K] of each block the least over degrees tp and sizes u of

            f_K f(u) + i_K i(u) + tp (work_f_K f(u) + work_b_K b(u)) / u

        with f, i and b the seconds of forward, of input gradients and of the whole backward. On a
        piece of the curves that is c0 + c1 u + c2 / u: least at an end or beside sqrt(c2 / c1).
        """
        at, f, i, b = self._block_P, self._forward_P, self._inputs_P, self._backward_P
        work_f_P, work_b_P = self._tp_P * work_f_K[at], self._tp_P * work_b_K[at]
        c1_P = f_K[at] * f[1] + i_K[at] * i[1]
        c2_P = work_f_P * f[0] + work_b_P * b[0]
        c0_P = f_K[at] * f[0] + i_K[at] * i[0] + work_f_P * f[1] + work_b_P * b[1]
        between_P = np.sqrt(np.maximum(c2_P, 0.0) / np.maximum(c1_P, 1e-300))
        low_P, high_P = self._low_P, self._high_P
        near = [np.floor(between_P), np.ceil(between_P)]
        if self._shares_items:
            near.append(between_P)
        beside = (np.clip(u_P, low_P, high_P) for u_P in near)
        values = [c0_P + c1_P * u_P + c2_P / u_P for u_P in (low_P, high_P, *beside)]
        return np.minimum.reduceat(np.minimum.reduce(values), self._first_P)

    # --- choices ---------------------------------------------------------------------

    def _recomputations(self, stage: Stage) -> tuple[Literal["none", "full"] | None, ...]:
        """Of a block that keeps something for its backward; None for the others."""
        if not stage.has_backward or not (stage.input_gradient or stage.trainable):
            return (None,)
        if stage.module in self._plan.solver.recompute_auto:
            return ("none", "full")
        module = self._plan.tasks[stage.task].modules[stage.module]
        again = overlaps(stage.blocks, recomputed_blocks(module.recompute, module.blocks))
        return ("full" if again else "none",)

    def _least(self, stage: Stage, tp: int) -> float:
        """Least size: one sample, or a share of it where ranks may share out its items."""
        items = tp == 1 and self._plan.tasks[stage.task].modules[stage.module].items
        return 1 / self._plan.devices if items else 1.0

    def _largest(self, stage: Stage) -> dict[_Way, float]:
        """Of each way that fits a device with the least size, the largest size that does.

        If none fits, no plan does. The bound is then that of devices with more memory.
        """
        task, module = stage.task, stage.module
        batch, devices = self._plan.tasks[task].batch, self._plan.devices
        room, found = self._costs.cluster.device.memory_bytes, dict[_Way, float]()
        degrees = [n for n in self._costs.tp_options(task=task, module=module) if n <= devices]
        ways = list(itertools.product(degrees, self._recomputations(stage)))
        for way in ways:
            least = self._least(stage, way[0])

            def held(count: int, way: _Way = way, least: float = least) -> float:
                return self._held_bytes(stage, way, count * least)

            if fitting := bisect_right(range(1, round(batch / least) + 1), room, key=held):
                found[way] = fitting * least
        return found or dict.fromkeys(ways, batch)

    def _held_bytes(self, stage: Stage, way: _Way, size: float) -> float:
        """What each device of a group holds at least of a block and one micro-batch."""
        tp, recompute = way
        task, module = stage.task, stage.module
        trains = (stage.owner, stage.blocks) in self._trained
        # Plans may shard otherwise than the workload asks for, as those of deepspeed do.
        each = min(
            self._costs.bytes_per_parameter(
                trainable=trains, zero=zero, dp=self._plan.devices, in_rounds=True, gathers=True
            )
            for zero in get_args(ZeroStage)
        )
        own = each * self._costs.parameters(task=task, module=module, blocks=stage.blocks) / tp
        if recompute is None:
            return own
        return own + self._costs.activation_bytes(
            task=task,
            module=module,
            tp=tp,
            samples=size,
            blocks=stage.blocks,
            recompute=recompute,
        )

    def _pieces(self, stage: Stage, largest: Mapping[_Way, float]) -> Floats:
        """[P, 9] pieces of a block's curves between two knots.

        The columns are the degree; the least and the largest size; level and slope of the
        seconds of its forward, of its input gradients and of its whole backward, hosted losses
        included.
        """
        share = self._costs.work_share(task=stage.task, module=stage.module, blocks=stage.blocks)
        trains = bool(stage.trainable)
        key = stage.task, stage.module, share, trains, stage.hosted, *largest.items()
        if key in self._known:
            return self._known[key]
        hosted = [self._graph.losses[index].name for index in stage.hosted]
        rows: list[tuple[float, ...]] = []
        for (tp, recompute), most in largest.items():
            of_each = (self._costs.loss_curves(name, tp) for name in hosted)
            losses = [fit for fit in of_each if fit is not None]
            fit = self._costs.curves(task=stage.task, module=stage.module, tp=tp)
            forward = [(fit.forward, share), *((loss.forward, 1.0) for loss in losses)]
            after = [(loss.backward, 1.0) for loss in losses]
            if recompute == "full":
                after.append((fit.forward, share))
            inputs = after if recompute is None else [(fit.backward_input, share), *after]
            backward = inputs
            if recompute is not None and trains:
                backward = [(fit.backward, share), *after]
            rows += _rows(tp, self._least(stage, tp), most, (forward, inputs, backward))
        self._known[key] = np.array(rows)
        return self._known[key]

    # --- all blocks together ---------------------------------------------------------

    def _loss_s(self, loss: CrossSampleLoss) -> float:
        """Seconds of one sync batch, however many devices share it."""
        return sum(
            self._costs.loss_s(loss=loss.name, samples=loss.sync_batch, shards=self._plan.devices)
        )

    def _whole_loss_s(self, loss: CrossSampleLoss) -> float:
        """Least seconds of one sync batch with the exchange of its features."""
        if not is_on_one_node(self._plan, self._costs):
            return self._loss_s(loss)
        sharing = range(1, self._plan.devices + 1)
        return min(
            sum(self._costs.loss_s(loss=loss.name, samples=loss.sync_batch, shards=ranks))
            + features_s(self._costs, loss, ranks)
            for ranks in sharing
        )

    def _longest_path(self, forward_K: Floats, backward_K: Floats) -> _Path:
        """The longest path of one sample through its fastest blocks.

        Args:
            forward_K: seconds of each block's fastest forward.
            backward_K: the same of input gradients.
        """
        edges = self._graph.edges
        there = _Longest(forward_K, [(e.producer, e.consumer) for e in edges])
        back = _Longest(backward_K, [(e.producer, e.consumer) for e in edges if e.carries_gradient])
        paths: list[tuple[float, _Path]] = []
        for loss in self._graph.losses:
            is_sync = isinstance(loss, CrossSampleLoss)
            ends = loss.stages if is_sync else (loss.host,)
            loss_s = self._loss_s(loss) if is_sync else 0.0
            first = max(ends, key=lambda k: there.total_K[k])
            returns = [k for k in ends if self._stages[k].has_backward]
            last = max(returns, key=lambda k: back.total_K[k], default=None)
            total = there.total_K[first] + loss_s + (0.0 if last is None else back.total_K[last])
            paths.append((total, _Path(there.on_path(first), back.on_path(last), loss_s)))
        return max(paths, key=lambda pair: pair[0])[1]


class _Longest:
    """Longest paths that end at each block.

    Args:
        seconds_K: of each block.
        edges: from earlier blocks to later ones.

    Attributes:
        total_K: seconds of the longest path that ends there.
    """

    def __init__(self, seconds_K: Floats, edges: Sequence[tuple[int, int]]) -> None:
        self.total_K = seconds_K.copy()
        self._before: dict[int, int] = {}
        for producer, consumer in sorted(edges, key=lambda edge: edge[1]):
            total = self.total_K[producer] + seconds_K[consumer]
            if total > self.total_K[consumer]:
                self.total_K[consumer], self._before[consumer] = total, producer

    def on_path(self, end: int | None) -> Floats:
        """[K] 1 for the blocks of the longest path to one, else 0; no path to None."""
        found_K = np.zeros(len(self.total_K))
        while end is not None:
            found_K[end] = 1.0
            end = self._before.get(end)
        return found_K


def _rows(
    tp: int, least: float, most: float, sums: Sequence[_CurveSum]
) -> Iterator[tuple[float, ...]]:
    """The pieces of some sums of curves on sizes from ``least`` to ``most``.

    Sizes are whole, but where they may be less than a sample.
    """
    knots = {knot for curves in sums for curve, _ in curves for knot in curve.knots}
    edges = [least, *sorted(knot for knot in knots if least < knot < most), most]
    for low, high in itertools.pairwise(edges):
        first, last = (math.ceil(low), math.floor(high)) if least == 1 else (low, high)
        if first <= last:
            yield tp, first, last, *(number for curves in sums for number in _line(curves, low))


def _line(curves: _CurveSum, low: float) -> tuple[float, float]:
    """Level and slope of a sum of curves from a size up to the next knot."""
    slope = sum(factor * c.slopes[bisect_right(c.knots, low)] for c, factor in curves)
    return sum(factor * c.at(low) for c, factor in curves) - slope * low, slope


def _on_one_device(plan: Plan) -> Plan:
    """The plan's tasks on one device, every block a stage of its own."""
    units = [
        Unit(
            name=f"{name}.{module}",
            task=name,
            module=module,
            vpp=planned.blocks,
            ranks=(((0,),),),
            blocks=tuple((block, block + 1) for block in range(planned.blocks)),
            samples=(task.batch,),
            microbatches=((task.batch,),),
            schedule=Schedule(kind="interleaved"),
        )
        for name, task in plan.tasks.items()
        for module, planned in task.modules.items()
    ]
    losses = [
        PlanLoss(name=loss, task=name, ranks=(0,))
        for name, task in plan.tasks.items()
        for loss in task.losses
    ]
    return plan.model_copy(update={"units": tuple(units), "losses": tuple(losses)})
