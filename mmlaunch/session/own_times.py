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
        self.cells = [
            cell
            for number, row in enumerate(program.instructions)
            for cell in dict.fromkeys(_cell(number, item) for item in row)
        ]
        mine = [index for index, cell in enumerate(self.cells) if cell.rank == rank]
        self.first = min(mine, default=0)
        self._index = [self.cells.index(_cell(rank, i)) for i in program.instructions[rank]]
        self.seconds = [0.0] * len(mine)

    def note(self, spans: Sequence[InstructionSpan]) -> None:
        """Take the times of a step that is over."""
        self.seconds = [0.0] * len(self.seconds)
        for span in spans:
            self.seconds[self._index[span.index] - self.first] += span.own_s


def _cell(rank: int, item: Instruction) -> Cell:
    return Cell(rank, KIND_OF[item.op], item.stage if isinstance(item, Compute) else None)
