"""The ranks of a unit: TP groups, then PP, then DP; modules on ranks of their own.

A TP group is inside a node, or on whole nodes where the cluster lets it.

A grid takes consecutive ranks, ``[dp][pp][tp]`` in that order, so replicas of one module
are neighbours. Where the devices suffice, each module starts on a node of its own, and the
reduction of its gradients shares no link with another module's.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmplan.schema.cluster import Cluster
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Schedule, Unit
from mmplan.solvers.problem import Blocks, Problem
from mmplan.solvers.sample_split import cut, split_evenly

Shape = tuple[int, int, int]


def place_modules(
    shapes: Mapping[str, Shape], *, cluster: Cluster, devices: int
) -> dict[str, RankGrid] | None:
    """Ranks of every module, disjoint.

    Args:
        shapes: module to (dp, pp, tp).
        cluster: its nodes hold ``devices_per_node`` ranks each.
        devices: ranks 0..devices-1 may be used.

    Returns:
        None where the devices are enough, but some TP group would have to cross nodes.
    """
    node = cluster.devices_per_node

    # Largest TP groups first: later modules stay aligned to their own, smaller groups. Among equal
    # ones, modules of whole nodes come first, the largest of them before.
    def key(module: str) -> tuple[int, int]:
        size = _size(shapes[module])
        return -shapes[module][2], -size // node if size % node == 0 else 0

    order = sorted(shapes, key=key)
    for align in (node, None):
        starts = _starts(shapes, order, align, cluster)
        last = order[-1]
        if starts is not None and starts[last] + _size(shapes[last]) <= devices:
            return {m: RankGrid.consecutive(starts[m], *shapes[m]) for m in shapes}
    return None


def _size(shape: Shape) -> int:
    dp, pp, tp = shape
    return dp * pp * tp


def _starts(
    shapes: Mapping[str, Shape], order: list[str], align: int | None, cluster: Cluster
) -> dict[str, int] | None:
    """First rank of each module in order; None where a TP group crosses nodes that it may not."""
    starts: dict[str, int] = {}
    position = 0
    for module in order:
        tp = shapes[module][2]
        step = align or tp
        position = -(-position // step) * step
        starts[module] = position
        end = position + _size(shapes[module])
        groups = (range(first, first + tp) for first in range(position, end, tp))
        if cluster.devices_per_node % tp and not all(map(cluster.keeps_together, groups)):
            return None
        position = end
    return starts


def make_unit(
    problem: Problem,
    module: str,
    *,
    grid: RankGrid,
    blocks: tuple[Blocks, ...],
    size: int,
    pinned: bool,
    schedule: Schedule,
) -> Unit:
    """A module's unit: shares differ by at most one sample, micro-batches have ``size`` samples."""
    shares = split_evenly(problem.round_samples, grid.dp)
    return Unit(
        name=module,
        task=problem.task.name,
        module=module,
        tp=grid.tp,
        pp=grid.pp,
        dp=grid.dp,
        ranks=grid.ranks,
        blocks=blocks,
        samples=tuple(share * problem.rounds for share in shares),
        microbatches=tuple(
            cut(share, size, pinned=pinned, largest_share=shares[0]) for share in shares
        ),
        schedule=schedule,
    )


def last_stage_ranks(unit: Unit) -> tuple[int, ...]:
    """Ranks with a unit's output."""
    return tuple(sorted(rank for group in unit.grid.stage(-1) for rank in group))
