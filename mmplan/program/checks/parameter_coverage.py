"""The check that every parameter counts every sample as often as it should, on all its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from mmplan.program.checks.interval_counts import CountedInterval, first_deviation, normal
from mmplan.program.model import BlockReduction, Program, Stage
from mmplan.program.shards import held_shards, is_crowded

# Loss to the samples that the gradient counts.
Gradient = dict[int, list[CountedInterval]]


class ParameterCheck:
    """Checks the samples that every part of trainable parameters counts after the reductions.

    Args:
        program: the whole program.
        paths: per stage, loss to the number of paths from it to the stage.
        gradients: (rank, stage) to the samples that its parameters count without reductions.
        reduced: (reduction, rank) to the lengths of those lists, by (stage, loss), at that time.
    """

    def __init__(
        self,
        program: Program,
        *,
        paths: Sequence[Mapping[int, int]],
        gradients: Mapping[tuple[int, int], Gradient],
        reduced: Mapping[tuple[int, int], Mapping[tuple[int, int], int]],
    ) -> None:
        self._program, self._paths = program, paths
        self._gradients, self._reduced = gradients, reduced
        self._known: dict[tuple[object, ...], list[str]] = {}

    def faults(self) -> Iterator[str]:
        """All of them."""
        for owner in dict.fromkeys(stage.owner for stage in self._program.stages):
            stages = [s for s in self._program.stages if s.owner == owner]
            reductions = [r for r in self._program.block_reductions if r.owner == owner]
            spans = [s.blocks for s in stages] + [r.blocks for r in reductions]
            spans += [span for s in stages for span in s.trainable]
            for a, b in pairwise(sorted({x for span in spans for x in span})):
                holders = [s for s in stages if _inside(a, b, s.blocks)]
                trained = [s for s in holders if any(_inside(a, b, t) for t in s.trainable)]
                if trained:
                    covering = [r for r in reductions if _inside(a, b, r.blocks)]
                    yield from self._segment_faults((a, b), holders, trained, covering)

    def _segment_faults(
        self,
        blocks: tuple[int, int],
        holders: Sequence[Stage],
        trained: Sequence[Stage],
        reductions: Sequence[BlockReduction],
    ) -> Iterator[str]:
        """Faults of a range of blocks with one set of holders."""
        groups = list(dict.fromkeys(group for s in holders for group in s.ranks))
        tp = lcm(*map(len, groups), *(r.tp for r in reductions))
        ends = {i * (tp // len(g)) for g in groups for i in range(len(g) + 1)}
        ends |= {end * (tp // r.tp) for r in reductions for end in r.shards}
        name = f"blocks [{blocks[0]},{blocks[1]}) of {trained[0].owner}"
        held = held_shards(groups)
        crowded = is_crowded(groups)
        for part in pairwise(sorted(ends)):
            ranks = sorted(rank for rank, (i, n) in held.items() if part[0] * n // tp == i)
            within = [r for r in reductions if _covers(r, part, tp)]
            for kind in ("cut", "whole"):
                sums = [r for r in within if r.parameters in ("all", kind)]
                what = f"{name}{_part_name(part, tp, kind, sums)}"
                contributors = _Contributors(kind=kind, first=part[0], tp=tp, crowded=crowded)
                yield from self._part_faults(what, contributors, ranks, trained, sums)

    def _part_faults(
        self,
        what: str,
        contributors: _Contributors,
        ranks: Sequence[int],
        trained: Sequence[Stage],
        sums: Sequence[BlockReduction],
    ) -> Iterator[str]:
        """Faults of the parameters of one part, cut or whole, on all its holders."""
        stages = tuple(s.index for s in trained)
        for item in sums if contributors.kind == "cut" else ():
            others = sorted(set(item.ranks) - set(ranks))
            if others:
                yield f"reduction {item.index}: ranks {others} do not hold {what}"
        for rank in ranks:
            over = [r for r in sums if rank in r.ranks]
            if len(over) > 1:
                yield f"rank {rank}: {what} is reduced {len(over)} times"
                continue
            adding = _adding(over[0], contributors.kind) if over else (rank,)
            key = stages, contributors.key, adding, over[0].index if over else None
            if key not in self._known:
                self._known[key] = list(self._sum_faults(trained, contributors, over, adding))
                for fault in self._known[key]:
                    yield f"{what}: after reduction on rank {rank}, {fault}"

    def _sum_faults(
        self,
        trained: Sequence[Stage],
        contributors: _Contributors,
        over: Sequence[BlockReduction],
        ranks: Sequence[int],
    ) -> Iterator[str]:
        for stage in trained:
            batch = self._program.batches[stage.task]
            for loss, times in self._paths[stage.index].items():
                intervals: list[CountedInterval] = []
                for other in ranks:
                    place = stage.find_place(other)
                    if place is not None and contributors.include(place[1], stage.tp):
                        intervals += self._counted(other, stage.index, loss, over)
                off = first_deviation(normal(intervals), 0, batch, times)
                if off:
                    name = self._program.losses[loss].name
                    yield (
                        f"loss {name} counts samples [{off[0]},{off[1]}) of stage {stage.index} "
                        f"{off[2]} times instead of {times}"
                    )

    def _counted(
        self, rank: int, stage: int, loss: int, over: Sequence[BlockReduction]
    ) -> Sequence[CountedInterval]:
        intervals = self._gradients.get((rank, stage), {}).get(loss, [])
        if not over:
            return intervals
        return intervals[: self._reduced.get((over[0].index, rank), {}).get((stage, loss), 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal sets of ranks."""
        return self.first, self.tp, self.crowded and self.kind

    def include(self, index: int, count: int) -> bool:
        """Whether shard ``index`` of a stage's ``count`` is one of them."""
        if self.kind == "whole":
            # Every rank of a group has the whole gradient of replicated parameters.
            return index == 0 or not self.crowded
        return index == self.first * count // self.tp


def _adding(reduction: BlockReduction, kind: str) -> tuple[int, ...]:
    """Ranks whose gradients a reduction sums, of sharded or of replicated parameters."""
    return reduction.contributors if kind == "whole" else reduction.ranks


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
