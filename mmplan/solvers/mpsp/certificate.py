"""What no plan of several tasks beats, as the plan reports it: bounds, curves, Spindle's value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmplan.schema.plan import ScalingCurve
from mmplan.solvers.mpsp.bounds import paper_value, phase_bound
from mmplan.solvers.mpsp.instance import Chain, Instance, in_proportion
from mmplan.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no schedule of a round beats.

    Attributes:
        total_s: forwards and backwards.
        area_s: device-seconds by devices, where slices of one MetaOp overlap in time.
        notes: how it came about.
        curves: of every MetaOp on its own best degrees, for a whole step.
    """

    total_s: float
    area_s: float
    notes: tuple[str, ...]
    curves: tuple[ScalingCurve, ...]


def bounds_of(instance: Instance, rounds: int, limit_s: float) -> Bounds:
    """Of every MetaOp on its own best degrees.

    Args:
        instance: of one round.
        rounds: of a step.
        limit_s: seconds for the configuration programs.
    """
    chains = instance.chains
    forward_s = phase_bound(instance, [c.forward_s for c in chains], limit_s / 2)
    ratio = in_proportion(chains)
    if ratio is not None:
        backward_s = ratio * forward_s
    else:
        tables = [c.backward_s for c in chains]
        backward_s = phase_bound(instance, tables, limit_s / 2)
    area_s = sum(
        float((np.array(c.counts)[:, None] * table).min(axis=0).sum())
        for c in chains
        for table in (c.forward_s, c.backward_s)
    )
    return Bounds(
        total_s=forward_s + backward_s,
        area_s=area_s / instance.devices,
        curves=tuple(_scaling_curve(chain, rounds) for chain in chains),
        notes=(
            f"{counted(len(chains), 'MetaOp')} on {counted(instance.levels, 'level')}; bound "
            f"{forward_s:.4g} s forward + {backward_s:.4g} s backward a round"
            + _papers_optimum(instance),
        ),
    )


def _papers_optimum(instance: Instance) -> str:
    """Spindle's Eq. 11, which gives every MetaOp of a level devices of its own at the same time."""
    levels = [instance.of_level(level) for level in range(instance.levels)]
    if max(map(len, levels)) > instance.devices:
        return ""
    chains = instance.chains
    paper_s = sum(
        paper_value(
            [chains[m].counts for m in members],
            [chains[m].both_s.sum(axis=1) for m in members],
            instance.devices,
        )
        for members in levels
    )
    return f"; Spindle's continuous optimum (Eq. 11, no bound) is {paper_s:.4g} s"


def _scaling_curve(chain: Chain, rounds: int) -> ScalingCurve:
    seconds = rounds * chain.both_s.sum(axis=1)
    faster = [k for k in range(len(seconds)) if k == 0 or seconds[k] < seconds[:k].min()]
    return ScalingCurve(
        name=chain.name,
        devices=tuple(chain.counts[k] for k in faster),
        seconds=tuple(float(seconds[k]) for k in faster),
    )
