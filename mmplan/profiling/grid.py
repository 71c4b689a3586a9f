"""Points of a profile, and the differences between tasks: shared by both kinds of profile.

The points decide how good a fit is, more than the fitter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmplan.schema.profile import ModuleProfile

# Samples, spread over the data, for the mean number of ragged rows.
RAGGED_SAMPLES = 32


def microbatch_sizes(largest: int, *, quick: bool = False) -> tuple[int, ...]:
    """Powers of two up to the largest micro-batch, both ends included.

    ``quick`` keeps the ends and every second power: four sizes or more still show a bend.
    """
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    if quick and len(powers) > 4:
        powers = powers[::2]
    return tuple(sorted({*powers, largest}))


def design(
    module_blocks: int, batch: int, tps: Sequence[int], *, quick: bool = False
) -> list[tuple[int, int, int]]:
    """The points of a module as (tp, micro-batch, number of its first blocks).

    Points of all blocks decide the fit. Points of half the blocks show the part of a stage's
    time that does not follow its work: at the ends and the middle of the sizes only, and not
    at all when quick. Then these sizes are all that tensor-parallel points have. Small points
    come first, so that too large ones are met last.

    Args:
        module_blocks: blocks of the module.
        batch: the largest micro-batch of the workload.
        tps: tensor-parallel degrees.
        quick: fewer points.
    """
    sizes = microbatch_sizes(batch, quick=quick)
    half = module_blocks // 2
    points: list[tuple[int, int, int]] = []
    some = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    for tp in sorted(set(tps)):
        points += [(tp, size, module_blocks) for size in (some if quick and tp > 1 else sizes)]
        if half and not quick:
            points += [(tp, size, half) for size in some]
    return points


def task_difference(profile: ModuleProfile, first: ModuleProfile) -> dict[str, Any]:
    """Fields in which a task's use of a module differs from the first task's."""
    own, base = profile.model_dump(mode="json"), first.model_dump(mode="json")
    return {key: value for key, value in own.items() if value != base[key] and value is not None}
