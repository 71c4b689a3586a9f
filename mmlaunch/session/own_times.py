"""What each rank's instructions take by themselves, told to all ranks with a step's sum.

A cell is one kind of instruction on one rank, of computes for each stage. The time is the rank's
own: in waits for other ranks it is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmlaunch.execute.executor import InstructionSpan
from mmplan.program.instructions import KIND_OF, Compute, Instruction
from mmplan.program.model import Program


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of instruction on a rank.

    Attributes:
        stage: of computes; else None.
    """

    rank: int
    kind: str
    stage: int | None


class OwnTimes:
    """The cells of a program, and this rank's seconds in its own.

    Args:
        program: of all ranks.
        rank: this one.

    Attributes:
        cells: of all ranks, the same everywhere.
        first: index of this rank's first one, behind which its others are.
        seconds: of this rank's cells in its last step; zeros where it was not timed.
    """

    def __init__(self, program: Program, rank: int) -> None:
        rows = program.instructions
        # Rows are long, and have few kinds.
        kinds = [dict.fromkeys(map(_kind, row)) for row in rows]
        self.cells = [Cell(number, *kind) for number, found in enumerate(kinds) for kind in found]
        self.first = sum(map(len, kinds[:rank]))
        places = {kind: place for place, kind in enumerate(kinds[rank])}
        self._places = [places[_kind(item)] for item in rows[rank]]
        self.seconds = [0.0] * len(places)

    def note(self, spans: Sequence[InstructionSpan]) -> None:
        """Take the times of a step that is over."""
        self.seconds = [0.0] * len(self.seconds)
        for span in spans:
            self.seconds[self._places[span.index]] += span.own_s


def _kind(item: Instruction) -> tuple[str, int | None]:
    return KIND_OF[item.op], item.stage if isinstance(item, Compute) else None
