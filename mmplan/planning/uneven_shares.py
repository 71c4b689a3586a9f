"""Samples that go over from devices with much to do to devices with less.

Solvers give the replicas of a unit about the same share. Where units share a part of their devices,
these have more to do than others, and the step waits for them.

Shape suffixes used in this file: D = replicas of a unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.hardware import load_hardware
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.program.instructions import Op
from mmplan.program.model import Stage
from mmplan.program.symmetry_classes import lower_plan
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.workload import Workload
from mmplan.solvers.sample_split import split_evenly

# Steps of the search for the level of all devices: each halves what is left.
_HALVINGS = 60
# So often each unit evens out what the others left; chosen by hand.
_SWEEPS = 8
# Parts of the way to the same work for all devices that are tried; chosen by hand.
_WAYS = (1.0, 0.7, 0.4, 0.2)


def with_uneven_shares(
    plan: Plan,
    costs: CostModel,
    workload: Workload,
    better: Callable[[Plan, Plan], Plan | None],
) -> Plan:
    """The plan with other shares of the units' replicas, as long as these make it better.

    Args:
        plan: simulated.
        costs: under its training settings.
        workload: units whose micro-batches it pins keep their shares.
        better: simulates the second plan; it, where it is better than the first, else None.
    """
    free = [
        index
        for index, others in enumerate(_others_beside(plan.units))
        if len(others) > 1
        and not plan.units[index].items
        and not workload.modules[plan.units[index].module].plan.microbatch
    ]
    is_better = bool(free)
    while is_better:
        work, is_better = _Work(plan, costs), False
        for way in _WAYS:
            units = work.evened_out(free, way)
            if units == plan.units:
                continue
            if found := better(plan, plan.model_copy(update={"units": units})):
                plan, is_better = found, True
                break
    return plan


def _others_beside(units: Sequence[Unit]) -> list[set[frozenset[int]]]:
    """Of each unit, the different sets of units on the devices of its replicas."""
    there: defaultdict[int, set[int]] = defaultdict(set)
    for index, unit in enumerate(units):
        for rank in unit.all_ranks:
            there[rank].add(index)
    return [
        {
            frozenset[int]().union(*(there[rank] for rank in unit.grid.replica(d)))
            for d in range(unit.dp)
        }
        for unit in units
    ]


class _Work:
    """What each rank of a plan has to do: computes, and what sums take from these.

    Args:
        plan: any.
        costs: under its training settings.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._units = plan.units
        graph = lower_plan(plan).graph
        whole = ProgramCosts.of_lowered(plan, graph, costs)
        self._load_s: defaultdict[int, float] = defaultdict(float)
        # By unit, of a sample more in its slowest stage.
        self._sample_s: defaultdict[str, float] = defaultdict(float)
        for stage in graph.stages:
            self._sample_s[stage.unit] = max(self._sample_s[stage.unit], _sample_s(stage, whole))
            for d, group in enumerate(stage.ranks):
                seconds = sum(_compute_s(stage, b - a, whole) for a, b in stage.microbatches[d])
                for rank in group:
                    self._load_s[rank] += seconds
        beside = 1 / load_hardware().compute_slowdown(plan.cluster.device)
        for reduction in graph.reductions:
            for rank in reduction.ranks:
                self._load_s[rank] += (1 - beside) * whole.reduce_s(reduction)

    def evened_out(self, free: Sequence[int], way: float) -> tuple[Unit, ...]:
        """The units with shares that leave ranks about as much to do, as far as they share them.

        Args:
            free: units whose shares may change.
            way: the part of each change that is made.
        """
        load_s, own = self._load_s.copy(), list(self._units)
        shares = {index: _shares(own[index]) for index in free}
        ranks = {
            index: [own[index].grid.replica(d) for d in range(own[index].dp)] for index in free
        }
        for index in _SWEEPS * [*free]:
            each_s = self._sample_s[own[index].name]
            if each_s:
                least_D = np.array([len(row) for row in own[index].microbatches], np.float64)
                load_D = np.array([max(load_s[rank] for rank in group) for group in ranks[index]])
                level_D = _levelled(shares[index], least_D, load_D / each_s)
                for group, more in zip(ranks[index], level_D - shares[index], strict=True):
                    for rank in group:
                        load_s[rank] += more * each_s
                shares[index] = level_D
        for index in free:
            before_D = _shares(own[index])
            own[index] = _with_shares(own[index], before_D + way * (shares[index] - before_D))
        return tuple(own)


def _compute_s(stage: Stage, samples: int, costs: ProgramCosts) -> float:
    ops = (Op.FORWARD, Op.BACKWARD) if stage.has_backward else (Op.FORWARD,)
    return sum(costs.compute_s(stage, op, samples) for op in ops)


def _sample_s(stage: Stage, costs: ProgramCosts) -> float:
    """Seconds of one sample more in the largest micro-batch."""
    largest = max(b - a for row in stage.microbatches for a, b in row)
    return _compute_s(stage, largest + 1, costs) - _compute_s(stage, largest, costs)


def _shares(unit: Unit) -> Floats:
    """[D] samples of a round."""
    return np.array([sum(row) for row in unit.microbatches], np.float64)


def _levelled(shares_D: Floats, least_D: Floats, load_D: Floats) -> Floats:
    """[D] shares with the same sum, and no less than the least, that bring loads together.

    Args:
        load_D: of the fullest rank of each replica, in samples.
    """
    total = shares_D.sum()
    low, high = load_D.min() - total, load_D.max() + total
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        wanted = np.maximum(shares_D + level - load_D, least_D).sum()
        low, high = (level, high) if wanted < total else (low, level)
    return np.maximum(shares_D + high - load_D, least_D)


def _with_shares(unit: Unit, wanted_D: Floats) -> Unit:
    """The unit with about these shares."""
    shares = _whole(wanted_D, sum(map(sum, unit.microbatches)))
    rows = tuple(
        tuple(split_evenly(share, len(row)))
        for share, row in zip(shares, unit.microbatches, strict=True)
    )
    rounds = unit.samples[0] // sum(unit.microbatches[0])
    samples = tuple(rounds * share for share in shares)
    return unit.model_copy(update={"microbatches": rows, "samples": samples})


def _whole(wanted_D: Floats, total: int) -> list[int]:
    """Whole numbers next to these, which add up to ``total``."""
    found = np.floor(wanted_D).astype(np.int64)
    most_missing = np.argsort(found - wanted_D, kind="stable")
    found[most_missing[: total - int(found.sum())]] += 1
    return found.tolist()


def shares_notes(plan: Plan, before: Plan) -> list[str]:
    """Which units have uneven shares, and what that gains; nothing without any."""
    pairs = zip(plan.units, before.units, strict=True)
    changed: Mapping[str, tuple[int, ...]] = {
        unit.name: unit.samples for unit, old in pairs if unit.samples != old.samples
    }
    if not changed:
        return []
    gain = 1 - plan.predicted.iteration_s / before.predicted.iteration_s
    listed = "; ".join(
        f"{name} {min(samples)} to {max(samples)}" for name, samples in changed.items()
    )
    return [
        f"devices that other units use too have fewer samples ({listed}): the step takes "
        f"{gain:.1%} less"
    ]
