"""Blocks that share a parameter, and the tensor-parallel groups that can sum its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmplan.errors import InvalidInputError
from mmplan.program.model import Stage, Ties
from mmplan.program.shards import Ranks, is_crowded


def groups_of(stages: Iterable[Stage], owner: str, blocks: Iterable[int]) -> list[Ranks]:
    """The distinct tensor-parallel groups that run any of a module's blocks."""
    wanted = set(blocks)
    return list(
        dict.fromkeys(
            group
            for stage in stages
            if stage.owner == owner and not wanted.isdisjoint(range(*stage.blocks))
            for group in stage.holders
        )
    )


def check_ties(stages: Sequence[Stage], ties: Ties) -> None:
    """Refuse groups in which the gradient of a shared parameter cannot be summed.

    A rank has one shard of it for all of the blocks. Of a parameter that tensor parallelism leaves
    whole, one rank of each group contributes to the sum.

    Args:
        stages: of a whole plan.
        ties: of its modules.

    Raises:
        InvalidInputError: a rank runs the blocks as two different shards.
    """
    for owner, together in ties.items():
        for blocks in together:
            groups = groups_of(stages, owner, blocks)
            if groups and is_crowded(groups):
                raise InvalidInputError(
                    f"modules.{owner}: blocks {', '.join(map(str, blocks))} share a parameter, "
                    "whose gradient units of different tp with ranks in common cannot sum",
                    hint=f"give all of its units one tp: modules.{owner}.plan: {{tp: 1}}, say",
                )
