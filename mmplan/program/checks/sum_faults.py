"""Every sample of the batch is in every gradient once: which ranks sum which gradients.

A rank's own gradient of a block is that of the micro-batches of its replica
(:mod:`mmplan.program.checks.instruction_faults`), and the micro-batches of all replicas tile the
batch. So a sum is the batch's gradient where one rank of each replica of each stage that trains
the block contributes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    LossReduction,
    Program,
    Stage,
)
from mmplan.program.shards import held_shards, is_crowded


def sum_faults(program: Program) -> Iterator[str]:
    """Gradients of which a sum leaves out a replica, has it twice, or is not on all holders."""
    yield from _loss_faults(program)
    for owner in dict.fromkeys(stage.owner for stage in program.stages):
        stages = [s for s in program.stages if s.owner == owner]
        reductions = [r for r in program.block_reductions if r.owner == owner]
        spans = [s.blocks for s in stages] + [r.blocks for r in reductions]
        spans += [span for s in stages for span in s.trainable]
        for a, b in pairwise(sorted({x for span in spans for x in span})):
            holders = [s for s in stages if _inside(a, b, s.blocks)]
            trained = [
                s
                for s in holders
                if s.has_backward and any(_inside(a, b, span) for span in s.trainable)
            ]
            if trained:
                covering = [r for r in reductions if _inside(a, b, r.blocks)]
                yield from _Segment(program, (a, b), holders, trained, covering).faults()


def _loss_faults(program: Program) -> Iterator[str]:
    """Losses run on the ranks of their features; a loss's own parameters are reduced over them."""
    for loss in program.losses:
        stages = loss.stages if isinstance(loss, CrossSampleLoss) else (loss.host,)
        ranks = {rank for s in stages for rank in program.stages[s].members}
        if sorted(ranks) != list(loss.ranks):
            yield (
                f"loss {loss.index} ({loss.name}): its ranks are {list(loss.ranks)}, its "
                f"features are on {sorted(ranks)}"
            )
    for name in sorted({loss.name for loss in program.losses}):
        losses = [loss for loss in program.losses if loss.name == name]
        holders = sorted({rank for loss in losses for rank in loss.ranks})
        reduced = [
            r.ranks for r in program.reductions if isinstance(r, LossReduction) and r.owner == name
        ]
        if len(holders) > 1 and reduced != [tuple(holders)]:
            yield f"loss {name}: its parameters on ranks {holders} are not reduced over them once"


class _Segment:
    """A range of blocks with one set of holders.

    Args:
        program: whose blocks they are.
        blocks: half-open range.
        holders: stages that run them.
        trained: those of them whose backwards give the blocks a gradient.
        reductions: that cover them.
    """

    def __init__(
        self,
        program: Program,
        blocks: tuple[int, int],
        holders: Sequence[Stage],
        trained: Sequence[Stage],
        reductions: Sequence[BlockReduction],
    ) -> None:
        self._program, self._trained, self._reductions = program, trained, reductions
        self._groups = list(dict.fromkeys(group for s in holders for group in s.holders))
        self._name = f"blocks [{blocks[0]},{blocks[1]}) of {trained[0].owner}"
        self._crowded = is_crowded(self._groups)
        # Sums that were looked at: every rank of a sum has the same one.
        self._known: set[tuple[object, ...]] = set()

    def faults(self) -> Iterator[str]:
        """Faults of each part of the blocks' parameters, cut or whole, on all its holders."""
        groups = self._groups
        tp = lcm(*map(len, groups), *(r.tp for r in self._reductions))
        ends = {i * (tp // size) for size in set(map(len, groups)) for i in range(size + 1)}
        ends |= {end * (tp // r.tp) for r in self._reductions for end in r.shards}
        held = held_shards(groups)
        for part in pairwise(sorted(ends)):
            ranks = sorted(rank for rank, (i, n) in held.items() if part[0] * n // tp == i)
            within = [r for r in self._reductions if _covers(r, part, tp)]
            for kind in ("cut", "whole"):
                sums = [r for r in within if r.parameters in ("all", kind)]
                what = f"{self._name}{_part_name(part, tp, kind, sums)}"
                contributors = _Contributors(kind, part[0], tp, self._crowded)
                yield from self._part_faults(what, contributors, ranks, sums)

    def _part_faults(
        self,
        what: str,
        contributors: _Contributors,
        ranks: Sequence[int],
        sums: Sequence[BlockReduction],
    ) -> Iterator[str]:
        for item in sums if contributors.kind == "cut" else ():
            others = sorted(set(item.ranks) - set(ranks))
            if others:
                yield f"reduction {item.index}: ranks {others} do not hold {what}"
        members = {item.index: set(item.ranks) for item in sums}
        for rank in ranks:
            over = [item for item in sums if rank in members[item.index]]
            if len(over) > 1:
                yield f"rank {rank}: {what} is reduced {len(over)} times"
                continue
            adding = (rank,)
            if over:
                whole = contributors.kind == "whole"
                adding = over[0].contributors if whole else over[0].ranks
            key = contributors, over[0].index if over else None, None if over else rank
            if key not in self._known:
                self._known.add(key)
                for fault in self._sum_faults(contributors, adding):
                    yield f"{what}: after reduction on rank {rank}, {fault}"

    def _sum_faults(self, contributors: _Contributors, adding: Sequence[int]) -> Iterator[str]:
        """Replicas, or ranks that share out items, not in the sum of some ranks' gradients once."""
        for stage in self._trained:
            times = [0] * len(stage.holders)
            for place in map(stage.find_place, adding):
                if place is not None and stage.items:
                    times[place[0] * stage.tp + place[1]] += 1
                elif place is not None:
                    times[place[0]] += contributors.include(place[1], stage.tp)
            off = next((d for d, count in enumerate(times) if count != 1), None)
            if off is not None:
                yield (
                    f"replica {off} of stage {stage.index} ({stage.unit}) counts {times[off]} "
                    "times instead of once"
                )


@dataclass(frozen=True, slots=True)
class _Contributors:
    """The ranks of a stage that have a gradient of the parameters of one part.

    Attributes:
        kind: of the parameters, "cut" (sharded) or "whole" (replicated).
        first: the part's first shard of ``tp``.
        crowded: see :mod:`mmplan.program.shards`.
    """

    kind: str
    first: int
    tp: int
    crowded: bool

    def include(self, index: int, count: int) -> bool:
        """Whether shard ``index`` of a stage's ``count`` is one of them."""
        if self.kind == "whole":
            # Every rank of a group has the whole gradient of replicated parameters.
            return index == 0 or not self.crowded
        return index == self.first * count // self.tp


def _part_name(part: tuple[int, int], tp: int, kind: str, sums: Sequence[BlockReduction]) -> str:
    if kind == "whole" and not any(r.parameters == "all" for r in sums):
        return f", parameters that tp leaves whole (shards [{part[0]},{part[1]}) of {tp})"
    if tp == 1:
        return ""
    shards = f"shard {part[0]}" if part[1] == part[0] + 1 else f"shards [{part[0]},{part[1]})"
    return f", tp {shards} of {tp}"


def _covers(reduction: BlockReduction, part: tuple[int, int], tp: int) -> bool:
    """Whether a reduction sums a part, given in shards of ``tp``."""
    (a, b), (first, end) = part, reduction.shards
    return first * tp <= a * reduction.tp and b * reduction.tp <= end * tp


def _inside(a: int, b: int, span: tuple[int, int]) -> bool:
    return span[0] <= a and b <= span[1]
