"""Which points to measure: the design decides how good the fit is, not the fitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Samples, spread over the data, whose ragged rows are counted for their mean.
RAGGED_SAMPLES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRequest:
    """One point to measure; ``blocks`` is how many of the module's first blocks."""

    tp: int
    microbatch: int
    blocks: int


def microbatch_sizes(largest: int, *, quick: bool = False) -> tuple[int, ...]:
    """Powers of two up to the largest micro-batch that can be asked for, both ends included.

    ``quick`` keeps the ends and every second power: four sizes or more still show a bend.
    """
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    if quick and len(powers) > 4:
        powers = powers[::2]
    return tuple(sorted({*powers, largest}))


def design(
    module_blocks: int, batch: int, tps: Sequence[int], *, quick: bool = False
) -> list[PointRequest]:
    """The grid of a module: every tp and micro-batch, at two numbers of blocks.

    Whole-module points decide the fit. Points of half the blocks show how much of a
    stage's time is not shared out by work: at the ends and the middle of the sizes only,
    and not at all when quick. Small ones come first: what a module is too big for is met
    last.

    Args:
        module_blocks: blocks of the module.
        batch: the largest micro-batch that the workload can ask for.
        tps: tensor-parallel degrees.
        quick: fewer points.
    """
    sizes = microbatch_sizes(batch, quick=quick)
    some = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    half = module_blocks // 2
    return [
        PointRequest(tp=tp, microbatch=size, blocks=blocks)
        for tp in sorted(set(tps))
        for blocks, chosen in (
            (module_blocks, sizes),
            (half, some if half and not quick else ()),
        )
        for size in chosen
    ]
