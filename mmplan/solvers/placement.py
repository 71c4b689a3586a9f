"""The ranks of a unit: TP groups, then PP, then DP; modules on ranks of their own.

A TP group is inside a node, or on whole nodes where the cluster lets it.

A grid takes consecutive ranks, ``[dp][pp][tp]`` in that order, so replicas of one module
are neighbours. Where the devices suffice, each module starts on a node of its own, and the
reduction of its gradients shares no link with another module's. Else modules lie one behind
another; if that cuts one that a node could hold, they fill the nodes one by one, where they can.
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
    ways = (
        _starts(shapes, order, node, cluster),
        _starts(shapes, order, None, cluster),
        _filled_nodes(shapes, order, node, devices),
    )
    fitting = [starts for starts in ways if starts is not None and _fits(shapes, starts, devices)]
    if not fitting:
        return None
    # The first of those that cut least.
    starts = min(fitting, key=lambda starts: _cuts(shapes, starts, node))
    return {m: RankGrid.consecutive(starts[m], *shapes[m]) for m in shapes}


def _fits(shapes: Mapping[str, Shape], starts: Mapping[str, int], devices: int) -> bool:
    return max(starts[m] + _size(shapes[m]) for m in shapes) <= devices


def _cuts(shapes: Mapping[str, Shape], starts: Mapping[str, int], node: int) -> int:
    """Borders of nodes inside of modules, beyond the least."""
    sizes = {m: _size(shape) for m, shape in shapes.items()}
    return sum(
        (starts[m] + size - 1) // node - starts[m] // node - (size - 1) // node
        for m, size in sizes.items()
    )


def _filled_nodes(
    shapes: Mapping[str, Shape], order: list[str], node: int, devices: int
) -> dict[str, int] | None:
    """First rank of each module: the fullest node with room; larger modules begin on a free one.

    There may be more ranks than devices. None where tensor-parallel groups do not divide nodes.
    """
    if any(node % shapes[m][2] for m in order):
        return None
    starts: dict[str, int] = {}
    # First free rank of each node that is begun, and its end.
    begun: list[tuple[int, int]] = []
    free = 0
    # A stable order: modules of several nodes come first, and leave room on their last ones.
    for module in sorted(order, key=lambda m: _size(shapes[m]) <= node):
        size, tp = _size(shapes[module]), shapes[module][2]
        rooms = [(end - (-(-at // tp) * tp), i) for i, (at, end) in enumerate(begun)]
        fitting = [(room, i) for room, i in rooms if room >= size]
        if fitting:
            _, i = min(fitting)
            at, end = begun[i]
            starts[module] = -(-at // tp) * tp
            begun[i] = starts[module] + size, end
        else:
            starts[module] = free
            nodes = -(-size // node)
            free += nodes * node
            begun.append((starts[module] + size, min(free, devices)))
    return starts


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
