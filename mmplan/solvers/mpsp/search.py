"""The best schedules that the seconds allow, and the best proven bound of a phase."""

from __future__ import annotations

import time

from mmplan.solvers.mpsp.bounds import (
    Column,
    configuration_bound,
    curve,
    dag_bound,
    level_bound,
)
from mmplan.solvers.mpsp.instance import Instance, parts
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Evaluator
from mmplan.solvers.mpsp.local_search import search

# Share of the seconds for the configuration programs that guide the search.
_GUIDES = 0.3


def find(instance: Instance, *, bound_s: float, limit_s: float) -> dict[str, ChainSchedule]:
    """The best drafts by where they come from: all of them, one slice each, one after another."""
    begun = time.monotonic()
    targets, columns = _guides(instance, limit_s * _GUIDES)
    left_s = limit_s - (time.monotonic() - begun)
    evaluator = Evaluator(instance)
    found = search(
        evaluator, targets=targets, columns=columns, bound_s=bound_s, limit_s=max(left_s, 0.0)
    )
    sequential = one_after_another(instance)
    drafts = {
        "the best schedule of slices": found.best,
        "one slice for each MetaOp": found.whole,
        "tasks one after another": sequential,
    }
    unique: dict[str, ChainSchedule] = {}
    for label, draft in drafts.items():
        if not any(draft == other for other in unique.values()):
            unique[label] = draft
    return unique


def _guides(
    instance: Instance, limit_s: float
) -> tuple[list[list[float]], list[tuple[Column, ...]]]:
    """Spans to aim at, level by level and over the graph; a configuration program's columns.

    The columns know no order, so there are none for several levels.
    """
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, parts(c.both_s)) for c in chains]
    if instance.levels == 1:
        tables = [c.both_s for c in chains]
        found = configuration_bound(chains, tables, devices, limit_s=limit_s)
        return [[level_bound(curves, devices)] * len(chains)], [found.columns]
    by_level = [0.0] * len(chains)
    for members in map(instance.of_level, range(instance.levels)):
        for m in members:
            by_level[m] = level_bound([curves[i] for i in members], devices)
    return [by_level, dag_bound(curves, [c.after for c in chains], devices)[1]], []


def one_after_another(instance: Instance) -> ChainSchedule:
    """Tasks one after another, each MetaOp on the devices that make it fastest."""
    order = sorted(range(len(instance.chains)), key=lambda m: (instance.chains[m].group, m))
    return ChainSchedule(
        [
            [(int(c.both_s.sum(axis=1).argmin()), 0, c.blocks, float(order.index(m)))]
            for m, c in enumerate(instance.chains)
        ],
        strict=True,
    )
