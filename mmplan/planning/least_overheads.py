"""What devices lose at least beside their computes: sums of gradients, and waits for samples.

A part of :mod:`mmplan.planning.lower_bound`; docs/architecture.md has the proof. It counts where no
block is cut by tensor parallelism, all devices are on one node and all blocks train. Elsewhere
nothing is sure to be lost.

Shape suffixes used in this file: K = blocks of all modules of all tasks; N = numbers of devices.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.cost_model import CostModel
from mmplan.costs.hardware import load_hardware
from mmplan.program.model import CrossSampleLoss, Graph, Stage
from mmplan.schema.base import ZeroStage
from mmplan.schema.plan import Plan

# Of more devices or blocks nothing is counted: they would take long, and have little to lose.
_MOST_DEVICES = 64
_MOST_BLOCKS = 64
# Sums of seconds may be off by it, relative.
_ROUNDING = 1e-9
# Seconds of a device are counted in so many parts of its step.
_PARTS = 256

# Parameters of a block, by their owner.
OwnedBlock = tuple[str, tuple[int, int]]


def least_overheads(
    plan: Plan, costs: CostModel, graph: Graph, forward_K: Floats, inputs_K: Floats
) -> Floats | None:
    """[N] least seconds that so many devices lose together, none of which is alone with all it has.

    A device is alone if no other one runs any of its blocks. None where nothing is sure to be lost.

    Args:
        plan: any plan of the workload.
        costs: of its profile, cluster and training.
        graph: of its tasks, every block a stage.
        forward_K: seconds of each block's fastest forward.
        inputs_K: the same of input gradients.
    """
    if not _counts(plan, costs, graph):
        return None
    owned = blocks_of_owners(graph)
    sums = [_Sums(plan, costs, [graph.stages[k] for k in of]) for of in owned.values()]
    waits = [
        [min(float(waits_K[k]) for k in of) for of in owned.values()]
        for waits_K in _waits(graph, costs, forward_K, inputs_K)
    ]
    found = np.zeros(plan.devices + 1)
    # A device pays for sums once, so a part of that counts with each of its waits.
    for quarters in itertools.product(range(5), repeat=len(waits)):
        if sum(quarters) == 4:
            parts = zip(waits, quarters, strict=True)
            least = [_least(sums, of, each / 4, plan.devices) for of, each in parts]
            found = np.maximum(found, np.sum(least, axis=0))
    return found


def blocks_of_owners(graph: Graph) -> Mapping[OwnedBlock, Sequence[int]]:
    """The stages that run each block's parameters, of a graph whose stages are blocks."""
    found: defaultdict[OwnedBlock, list[int]] = defaultdict(list)
    for stage in graph.stages:
        found[stage.owner, stage.blocks].append(stage.index)
    return found


def most_value(values: Sequence[float], seconds: Sequence[float], room_s: float) -> float:
    """At least the most value of items that take no more than ``room_s`` together.

    Args:
        values: of each item.
        seconds: that each takes, rounded down to parts of the room here.
        room_s: what all may take.
    """
    best = np.zeros(_PARTS + 1)
    for value, own_s in zip(values, seconds, strict=True):
        if value > 0 and own_s <= room_s * (1 + _ROUNDING):
            parts = max(0, int(_PARTS * own_s / max(room_s, own_s, 1e-300) - _ROUNDING))
            best[parts:] = np.maximum(best[parts:], best[: len(best) - parts] + value)
    return float(best[-1])


def is_barrier(plan: Plan, graph: Graph, loss: CrossSampleLoss) -> bool:
    """Whether all forwards come before a loss, and all backwards after it."""
    if len(plan.tasks) > 1 or loss.divisor > 1 or any(s.hosted for s in graph.stages):
        return False
    before = set(loss.stages)
    for edge in sorted(graph.edges, key=lambda edge: -edge.consumer):
        if edge.consumer in before:
            before.add(edge.producer)
    return len(before) == len(graph.stages)


def features_s(costs: CostModel, loss: CrossSampleLoss, ranks: int) -> float:
    """Least seconds in which so many ranks of a loss exchange features, and rows' statistics.

    The ranks that hold one of the inputs are at least so many as an equal share of all. They read
    another input. Bytes count 0.
    """
    known = costs.profile.losses.get(loss.name)
    exchanges = 1 + (known is not None and known.sharded)
    if ranks == 1:
        return 0.0
    inputs = max(1, sum(item.stage is not None for item in loss.inputs))
    readers = -(-ranks // inputs)
    gather_s = costs.all_gather(ranks=range(readers), num_bytes=0.0).seconds
    message_s = costs.message(source=0, target=1, num_bytes=0.0).seconds
    pair_s = costs.all_gather(ranks=range(2), num_bytes=0.0).seconds
    return exchanges * max(gather_s, min(message_s, pair_s))


def is_on_one_node(plan: Plan, costs: CostModel) -> bool:
    """Whether all links between the plan's devices are the same."""
    return plan.devices <= min(costs.cluster.devices_per_node, _MOST_DEVICES)


def _counts(plan: Plan, costs: CostModel, graph: Graph) -> bool:
    """Whether what devices lose is counted."""
    apart = (loss for loss in graph.cross_sample_losses if not is_barrier(plan, graph, loss))
    return (
        is_on_one_node(plan, costs)
        and len(graph.stages) <= _MOST_BLOCKS
        and not any(apart)
        and all(
            stage.trainable
            and stage.has_backward
            and costs.tp_options(task=stage.task, module=stage.module) == (1,)
            for stage in graph.stages
        )
    )


class _Sums:
    """Seconds that each device of several loses at least in sums of a block's gradients.

    Args:
        plan: any plan of the workload.
        costs: of its profile, cluster and training.
        stages: that run the block, one for each task.
    """

    def __init__(self, plan: Plan, costs: CostModel, stages: Sequence[Stage]) -> None:
        self._costs, self._rounds = costs, len(stages)
        task, module, (block, _) = stages[0].task, stages[0].module, stages[0].blocks
        self._numbers = costs.own_parameters(task=task, module=module, block=block)
        # A compute beside a sum does what it would do in this part of the time.
        self._beside = 1 / load_hardware().compute_slowdown(costs.cluster.device)
        self._known: dict[int, float] = {}

    def seconds(self, devices: int) -> float:
        """Of each of so many devices that run the block, two or more."""
        if devices not in self._known:
            self._known[devices] = self._seconds(range(devices))
        return self._known[devices]

    def _seconds(self, ranks: range) -> float:
        costs = self._costs
        each = min(costs.gradient_bytes(zero) for zero in get_args(ZeroStage))
        whole_s = costs.all_reduce(ranks=ranks, num_bytes=self._numbers * each).seconds
        part_s = costs.all_gather(ranks=ranks, num_bytes=self._numbers * each).seconds
        held = self._numbers * costs.held_bytes
        # ZeRO-3 gathers parameters for each forward and backward, on a CPU before they compute.
        gather_s = costs.all_gather(ranks=ranks, num_bytes=held).seconds
        gathers_s = 2 * gather_s if costs.cluster.device.is_cpu else 0.0
        lost = 1 - self._beside
        # Each of several tasks has a micro-batch at least, after which it sums.
        return min(lost * whole_s, self._rounds * (lost * part_s + gathers_s))


def _waits(graph: Graph, costs: CostModel, forward_K: Floats, inputs_K: Floats) -> list[Floats]:
    """[K] by block, seconds that a device waits which runs nothing before it, of each wait.

    At the beginning it waits for the first sample to come to it. Before a loss over the whole batch
    it waits for its last one to leave, and then for the first gradient to come back.
    """
    message_K = np.array([_message_s(costs, stage) for stage in graph.stages])
    there = [(e.producer, e.consumer) for e in graph.edges]
    waits = [_longest(forward_K, there, [message_K[p] for p, _ in there])]
    if graph.cross_sample_losses:
        back = [(e.consumer, e.producer) for e in graph.edges]
        messages = [message_K[p] for _, p in back]
        waits += [_longest(seconds_K, back, messages) for seconds_K in (forward_K, inputs_K)]
    return waits


def _longest(
    seconds_K: Floats, edges: Sequence[tuple[int, int]], messages: Sequence[float]
) -> Floats:
    """[K] seconds of the longest way that leads to each block, with a message at its end.

    Args:
        seconds_K: of a sample in each block.
        edges: pairs of blocks, one done after the other, all forward or all backward.
        messages: seconds of a message, of each pair.
    """
    waits_K, total_K = np.zeros(len(seconds_K)), seconds_K.copy()
    ascending = all(first < second for first, second in edges)
    pairs = sorted(zip(edges, messages, strict=True), key=lambda pair: pair[0][1])
    for (first, second), message_s in pairs if ascending else reversed(pairs):
        waits_K[second] = max(waits_K[second], total_K[first] + message_s)
        total_K[second] = max(total_K[second], total_K[first] + seconds_K[second])
    return waits_K


def _message_s(costs: CostModel, stage: Stage) -> float:
    """Seconds of a message with a block's output of one sample."""
    after = stage.blocks[1] - 1
    num_bytes = costs.cut_bytes(task=stage.task, module=stage.module, after_block=after)
    return costs.message(source=0, target=1, num_bytes=num_bytes).seconds


def _least(sums: Sequence[_Sums], waits: Sequence[float], part: float, devices: int) -> Floats:
    """[N] least seconds of so many devices, all of which sum some block's gradients.

    Of what a device runs, one block has the least wait. Where m devices have the same, each waits
    for it and sums its gradients over m devices or more; one alone sums another's.

    Args:
        sums: of each block.
        waits: of each block.
        part: of the seconds of sums that counts.
        devices: the largest number.
    """
    cheapest_s = min(each.seconds(2) for each in sums)
    numbers_N = np.arange(devices + 1)
    # [N, N] the number that is left of a number of devices; below 0 where it is not as large.
    left_NN = numbers_N[:, None] - numbers_N
    least_N = np.where(numbers_N > 0, np.inf, 0.0)
    for each, wait_s in zip(sums, waits, strict=True):
        sum_s = [each.seconds(m) if m > 1 else cheapest_s for m in range(devices + 1)]
        own_N = numbers_N * (wait_s + part * np.array(sum_s))
        least_N = np.min(np.where(left_NN < 0, np.inf, least_N[left_NN] + own_N), axis=1)
    return least_N
