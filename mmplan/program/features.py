"""Which features of a cross-sample loss each of its ranks receives.

A rank *reads* an input if rows that it holds are compared with that input's. Where rows are
compared with those of other inputs alone, towers on devices of their own read the other towers'
features and not their own: of two towers, half of all (DistMM, section 5.3.2). The rows then reach
their readers in two phases. Each row goes once, to the one reader in whose *share* it stands; then
the readers gather their shares. So a node's network carries a row once for all of its readers.

Where every rank reads every input, one gather of what each holds does the same in one phase.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmplan.program.model import CrossSampleLoss, Program
from mmplan.program.shards import Ranks


def readers(holders: Sequence[Ranks], *, others_only: bool) -> list[Ranks]:
    """Of each input, the ranks that read it, ascending.

    Args:
        holders: of each input, the ranks that hold rows of it.
        others_only: whether rows are compared with those of other inputs alone.
    """
    return [
        tuple(
            sorted(
                {
                    rank
                    for j, ranks in enumerate(holders)
                    if j != i or not others_only
                    for rank in ranks
                }
            )
        )
        for i in range(len(holders))
    ]


def are_apart(holders: Sequence[Ranks], *, others_only: bool) -> bool:
    """Whether some rank does not read every input; a single input has no others to read."""
    every = readers(holders, others_only=False)
    return len(holders) > 1 and len({*readers(holders, others_only=others_only), *every}) > 1


def holders_of(program: Program, loss: CrossSampleLoss) -> list[Ranks]:
    """Of each of a loss's features, the ranks of its stage; data fields are left out."""
    return [
        tuple(rank for group in program.stages[item.stage].ranks for rank in group)
        for item in loss.inputs
        if item.stage is not None
    ]


def share(place: int, count: int, samples: int) -> tuple[int, int]:
    """First row and end of the share of one of ``count`` readers; the last ones may be shorter."""
    rows = share_rows(count, samples)
    return min(place * rows, samples), min((place + 1) * rows, samples)


def share_rows(count: int, samples: int) -> int:
    """Rows of the longest share."""
    return -(-samples // count)
