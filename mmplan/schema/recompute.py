"""Which blocks of a module run their forward again in backward."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Literal

from mmplan.schema.base import Count

# Of no block, of all, or of so many.
Recompute = Literal["none", "full"] | Count


@cache
def recomputed_blocks(recompute: Recompute, blocks: int) -> tuple[tuple[int, int], ...]:
    """Ranges of the blocks that recompute, ascending.

    So many of them lie evenly among the others: a stage has its share of them, wherever a module is
    cut, and one more or less.

    Args:
        recompute: of the module.
        blocks: that it has.
    """
    named = {"none": 0, "full": blocks}
    count = named[recompute] if isinstance(recompute, str) else recompute
    chosen = [(b + 1) * count // blocks > b * count // blocks for b in range(blocks)]
    edges = [b for b, (one, other) in enumerate(pairwise([False, *chosen, False])) if one != other]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
