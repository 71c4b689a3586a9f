"""What a kind of schedule decides: where chunks run, the order, the memory that it takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from mmplan.program.instructions import Op
from mmplan.program.samples import SampleRange
from mmplan.schema.plan import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaving:
    """The orders of the ranks of one replica.

    Attributes:
        forwards: (chunk row, micro-batch) of every forward in its order, the same on all ranks;
            row r of position q is chunk r * pp + q.
        backwards: likewise.
        before: ``[position][j]``, forwards that come before backward j.
    """

    forwards: tuple[tuple[int, int], ...]
    backwards: tuple[tuple[int, int], ...]
    before: tuple[tuple[int, ...], ...]

    def chunk_order(self, position: int, row: int) -> list[int]:
        """``forwards_before[m]`` of one chunk alone."""
        places = [i for i, (r, _) in enumerate(self.forwards) if r == row]
        order = [0] * len(places)
        for (r, mb), before in zip(self.backwards, self.before[position], strict=True):
            if r == row:
                order[mb] = bisect_left(places, before)
        return order

    def sequence(self, position: int) -> Iterator[tuple[Op, int, int]]:
        """(F or B, chunk row, micro-batch) in the order of one rank."""
        done = 0
        for (row, mb), before in zip(self.backwards, self.before[position], strict=True):
            yield from ((Op.FORWARD, r, m) for r, m in self.forwards[done:before])
            done = before
            yield Op.BACKWARD, row, mb


class ChunkOrders(Protocol):
    """One order for all chunks of a rank, where greedy merging of their own orders would idle."""

    def interleave(
        self, count: int, pp: int, vpp: int, needs: Sequence[int], schedule: Schedule, extra: int
    ) -> Interleaving:
        """The orders of one replica's ranks.

        Args:
            count: micro-batches.
            pp: ranks of the pipeline.
            vpp: chunks of a rank.
            needs: forwards of the last chunk that must come before its backward m.
            schedule: its lead and in_flight count.
            extra: forwards that every rank runs ahead of what that takes.
        """
        ...

    def group_ends(self, count: int, pp: int) -> list[int]:
        """Per micro-batch, how many a rank takes in before that one enters its last chunk."""
        ...


class SchedulePolicy(Protocol):
    """What a kind of schedule decides; compiling and the solvers ask it.

    K is the number of micro-batches of a round; a round is one sync batch, or the whole step
    where the task has no cross-sample loss. Where a type is Any, arrays do as well as numbers.
    """

    # Whether a stage may run ``lead`` micro-batches ahead of its consumers.
    runs_ahead: ClassVar[bool]

    @property
    def chunk_orders(self) -> ChunkOrders | None:
        """How the chunks of a rank are ordered together; None where each has its own order."""
        return None

    def position(self, chunk: int, pp: int) -> int:
        """Pipeline position that runs a chunk; here the chunks go round the positions."""
        return chunk % pp

    def forwards_before(
        self,
        spans: Sequence[SampleRange],
        per_round: int,
        sync_batches: Sequence[int],
        sync_lead: int,
    ) -> list[int]:
        """``[m]``: forwards that come before backward m, consumers aside.

        Args:
            spans: samples of each micro-batch of one replica of the stage.
            per_round: K.
            sync_batches: sizes of the sync batches of the cross-sample losses it feeds.
            sync_lead: forwards between the start and the end of a sync.
        """
        ...

    def in_flight(self, per_round: Any, ahead: Any) -> Any:
        """Most micro-batches that a stage holds of a step that has at least so many.

        Args:
            per_round: K.
            ahead: forwards that the stages after it must have first, ``lead`` for each of them.
        """
        ...

    def held_of_step(self, per_round: Any, rounds: int, ahead: Any) -> Any:
        """:meth:`in_flight` of a step of so many rounds."""
        return np.minimum(rounds * per_round, self.in_flight(per_round, ahead))

    def round_s(self, per_round: Any, interval_s: Any, fill_and_drain_s: Any) -> Any:
        """Seconds from one sync to the next.

        Args:
            per_round: K.
            interval_s: from one micro-batch to the next in the steady state.
            fill_and_drain_s: of a round that begins and ends with an empty pipeline.
        """
        ...
