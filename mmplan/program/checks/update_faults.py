"""Faults of updates: copies that would drift apart, elements that nobody or two ranks count.

Looked at are the places where the same ranks hold the same parameters: shards of blocks, what
tensor parallelism leaves whole of them, parameters that blocks share, and losses'. In each place

- every holder is in exactly one update, and so each element has one owner among the ranks of a
  sharded update, and each rank of another one updates its own copy;
- the ranks of an update sum their gradients with each other and with nobody else, so that equal
  copies get equal updates; of a sharded one they also gather what the others updated;
- each element enters the norm of all gradients, and the checkpoint, once.

Whether the sums themselves are right is what :mod:`mmplan.program.checks.sum_faults` shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from mmplan.program.model import (
    BlockReduction,
    BlockUpdate,
    Graph,
    LossReduction,
    LossUpdate,
    ParameterUpdate,
    Program,
    Stage,
    TieReduction,
    TieUpdate,
)
from mmplan.program.shards import Kind, Ranks, Span, held_shards
from mmplan.program.ties import groups_of
from mmplan.wording import rank_ranges

# What has a part of the parameters of blocks.
_Sharded = BlockUpdate | TieUpdate | BlockReduction | TieReduction


def update_faults(program: Program | Graph) -> Iterator[str]:
    """Each fault of a program's updates, on one line that names the place.

    Instructions are not looked at, so the graph of a plan will do.
    """
    check = _UpdateCheck(program)
    # Where nothing is cut, cut and whole parameters have the same faults.
    yield from dict.fromkeys(check.faults())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Parameters with one set of holders.

    Attributes:
        name: for faults.
        holders: the ranks that hold them.
        updates: (index, update) of the program's that are of them.
        sums: the ranks of each reduction that is of them.
    """

    name: str
    holders: frozenset[int]
    updates: Sequence[tuple[int, ParameterUpdate]]
    sums: Sequence[Ranks]

    def faults(self) -> Iterator[str]:
        times = Counter(rank for _, update in self.updates for rank in update.ranks)
        forgotten = self.holders - times.keys()
        if forgotten:
            yield f"{self.name}: no update is for rank {rank_ranges(forgotten)}"
        twice = [rank for rank, count in times.items() if count > 1]
        if twice:
            yield f"{self.name}: rank {rank_ranges(twice)} is in two updates"
        others = times.keys() - self.holders
        if others:
            yield f"{self.name}: rank {rank_ranges(others)} is in an update and does not hold it"
        copies = 0
        for index, update in self.updates:
            yield from self._sum_faults(index, update)
            if update.sharded and update.counted not in ((), update.ranks):
                yield (
                    f"{self.name}: update {index} is sharded over rank "
                    f"{rank_ranges(update.ranks)}, and counts the parts of rank "
                    f"{rank_ranges(update.counted)} alone"
                )
            copies += bool(update.counted) if update.sharded else len(update.counted)
        if copies != 1:
            yield f"{self.name}: counts {copies} times in the norm of all gradients"

    def _sum_faults(self, index: int, update: ParameterUpdate) -> Iterator[str]:
        """An update's ranks sum with each other, and with nobody else."""
        met = [ranks for ranks in self.sums if not set(ranks).isdisjoint(update.ranks)]
        alone = len(update.ranks) == 1 and not update.sharded
        if met != [update.ranks] and (met or not alone):
            found = " and over ".join(map(rank_ranges, met))
            yield (
                f"{self.name}: update {index} is for rank {rank_ranges(update.ranks)}, whose "
                f"gradients are summed over {f'rank {found}' if met else 'no ranks'}"
            )


class _UpdateCheck:
    """The check of all places."""

    def __init__(self, program: Program | Graph) -> None:
        self._program = program
        self._updates = list(enumerate(program.updates))
        # Owner to whether its summed updates are sharded, by the places where they are not alike.
        self._sharded: defaultdict[str, dict[bool, str]] = defaultdict(dict)

    def faults(self) -> Iterator[str]:
        for index, update in self._updates:
            yield from self._form_faults(index, update)
        for owner in dict.fromkeys(stage.owner for stage in self._program.stages):
            stages = [s for s in self._program.stages if s.owner == owner]
            yield from self._block_faults(owner, stages)
            yield from self._tie_faults(owner, stages)
        yield from self._loss_faults()
        for owner, places in self._sharded.items():
            if len(places) > 1:
                yield (
                    f"{owner}: {places[True]} has a sharded update, {places[False]} has not: one "
                    "optimizer would see parts of some parameters and all of others"
                )

    def _form_faults(self, index: int, update: ParameterUpdate) -> Iterator[str]:
        """Ranks and shards that are none; owners that there are not."""
        for ranks in (update.ranks, update.counted):
            if list(ranks) != sorted(set(ranks)):
                yield f"update {index}: ranks {list(ranks)} are not ascending"
        if not set(update.counted) <= set(update.ranks):
            yield f"update {index}: counts rank {rank_ranges(update.counted)}, which is not in it"
        if isinstance(update, LossUpdate):
            known = any(loss.name == update.owner for loss in self._program.losses)
        else:
            known = any(stage.owner == update.owner for stage in self._program.stages)
        if not known:
            yield f"update {index}: there is no {update.owner}"
        if isinstance(update, BlockUpdate) and not update.blocks[0] < update.blocks[1]:
            yield f"update {index}: {list(update.blocks)} are no blocks"
        if not isinstance(update, LossUpdate):
            first, end = update.shards
            whole = update.parameters != "whole" or update.shards == (0, update.tp)
            if not (0 <= first < end <= update.tp and whole):
                yield (
                    f"update {index}: shards [{first},{end}) of {update.tp} are not those of "
                    f"{update.parameters} parameters"
                )

    def _of(self, place: _Place, owner: str) -> Iterator[str]:
        """The faults of a place; notes how its updates are made."""
        for _, update in place.updates:
            if update.ranks in place.sums:
                self._sharded[owner].setdefault(update.sharded, place.name)
        yield from place.faults()

    def _block_faults(self, owner: str, stages: Sequence[Stage]) -> Iterator[str]:
        updates = [
            (index, update)
            for index, update in self._updates
            if isinstance(update, BlockUpdate) and update.owner == owner
        ]
        reductions = [
            r
            for r in self._program.reductions
            if isinstance(r, BlockReduction) and r.owner == owner
        ]
        spans = [s.blocks for s in stages] + [span for s in stages for span in s.trainable]
        spans += [x.blocks for x in (*reductions, *(update for _, update in updates))]
        for segment in pairwise(sorted({x for span in spans for x in span})):
            holders = [s for s in stages if _inside(segment, s.blocks)]
            groups = list(dict.fromkeys(group for s in holders for group in s.holders))
            here = [(i, update) for i, update in updates if _inside(segment, update.blocks)]
            name = f"blocks [{segment[0]},{segment[1]}) of {owner}"
            if any(_inside(segment, span) for s in holders for span in s.trainable):
                sums = [r for r in reductions if _inside(segment, r.blocks)]
                yield from self._segment_faults(owner, name, groups, here, sums)
            elif here:
                yield f"update {here[0][0]}: nobody trains {name}"

    def _segment_faults(
        self,
        owner: str,
        name: str,
        groups: Sequence[Ranks],
        updates: Sequence[tuple[int, BlockUpdate | TieUpdate]],
        sums: Sequence[BlockReduction | TieReduction],
    ) -> Iterator[str]:
        """Faults of trained blocks with one set of holders, or of what blocks share."""
        shared = [*(update for _, update in updates), *sums]
        tp = lcm(*map(len, groups), *(max(x.tp, 1) for x in shared))
        ends = {i * (tp // len(group)) for group in groups for i in range(len(group) + 1)}
        ends |= {min(end * tp // max(x.tp, 1), tp) for x in shared for end in x.shards}
        held = held_shards(groups)
        counts: defaultdict[int, set[bool]] = defaultdict(set)
        for part in pairwise(sorted(ends)):
            holders = frozenset(rank for rank, (i, n) in held.items() if part[0] * n // tp == i)
            place = _Place(
                name=f"{name}, shards [{part[0]},{part[1]}) of {tp}" if tp > 1 else name,
                holders=holders,
                updates=[(i, u) for i, u in updates if _has(u, "cut", part, tp)],
                sums=[r.ranks for r in sums if _has(r, "cut", part, tp)],
            )
            yield from self._of(place, owner)
            for _, update in place.updates:
                for rank in () if update.sharded else update.ranks:
                    counts[rank].add(rank in update.counted)
        mixed = [rank for rank, found in counts.items() if len(found) > 1]
        if mixed:
            yield f"{name}: rank {rank_ranges(mixed)} saves some parts of its shard and not others"
        whole = _Place(
            name=f"{name}, parameters that tp leaves whole" if tp > 1 else name,
            holders=frozenset(held),
            updates=[(i, u) for i, u in updates if u.parameters != "cut"],
            sums=list(dict.fromkeys(r.ranks for r in sums if r.parameters != "cut")),
        )
        yield from self._of(whole, owner)

    def _tie_faults(self, owner: str, stages: Sequence[Stage]) -> Iterator[str]:
        updates = [
            (index, update)
            for index, update in self._updates
            if isinstance(update, TieUpdate) and update.owner == owner
        ]
        sums = [
            r for r in self._program.reductions if isinstance(r, TieReduction) and r.owner == owner
        ]
        # A parameter that a frozen block shares is frozen.
        trained = [
            blocks for blocks in self._program.ties.get(owner, ()) if _all_train(stages, blocks)
        ]
        for blocks in dict.fromkeys(x.blocks for x in (*sums, *(u for _, u in updates))):
            if blocks not in trained:
                yield f"{_tie(owner, blocks)}: nobody trains such a parameter, and it is updated"
        for blocks in trained:
            groups = groups_of(stages, owner, blocks)
            own = [r for r in sums if r.blocks == blocks]
            name = _tie(owner, blocks)
            here = [(i, u) for i, u in updates if u.blocks == blocks]
            yield from self._segment_faults(owner, name, groups, here, own)
            for item in own:
                bring = set(item.contributors)
                if item.parameters == "cut":
                    is_right = item.contributors == item.ranks
                else:
                    once = all(len(bring & {*group}) == 1 for group in groups)
                    is_right = once and bring <= set(item.ranks)
                if not is_right:
                    yield (
                        f"{name}: reduction {item.index} takes the gradients of rank "
                        f"{rank_ranges(bring)}, not of "
                        + ("all its ranks" if item.parameters == "cut" else "one in each tp group")
                    )

    def _loss_faults(self) -> Iterator[str]:
        for name in dict.fromkeys(loss.name for loss in self._program.losses):
            ranks = (loss.ranks for loss in self._program.losses if loss.name == name)
            place = _Place(
                name=f"parameters of loss {name}",
                holders=frozenset().union(*ranks),
                updates=[
                    (index, update)
                    for index, update in self._updates
                    if isinstance(update, LossUpdate) and update.owner == name
                ],
                sums=[
                    r.ranks
                    for r in self._program.reductions
                    if isinstance(r, LossReduction) and r.owner == name
                ],
            )
            yield from place.faults()


def _has(item: _Sharded, kind: Kind, part: Span, tp: int) -> bool:
    """Whether an update or a sum is of a part, given in shards of ``tp``."""
    (a, b), (first, end) = part, item.shards
    covers = first * tp <= a * item.tp and b * item.tp <= end * tp
    return covers and item.parameters in ("all", kind)


def _inside(blocks: Span, span: Span) -> bool:
    return span[0] <= blocks[0] and blocks[1] <= span[1]


def _all_train(stages: Sequence[Stage], blocks: Iterable[int]) -> bool:
    spans = [span for stage in stages for span in stage.trainable]
    return all(any(a <= block < b for a, b in spans) for block in blocks)


def _tie(owner: str, blocks: Sequence[int]) -> str:
    *others, last = map(str, blocks)
    return f"what blocks {', '.join(others)} and {last} of {owner} share"
