"""Programs whose backwards are split by hand: weight gradients at any time that is allowed."""

from __future__ import annotations

import random
from dataclasses import replace

from mmplan.program.instructions import Collective, Compute, Instruction, Op, Step
from mmplan.program.model import Program

Row = tuple[Instruction, ...]


def split_by_hand(program: Program, seed: int | None = 0) -> Program:
    """Every stage that can be is split; each ``W`` lies at random behind its ``I``.

    Args:
        program: one without split stages.
        seed: None puts all of them as late as they may stand.
    """
    stages = tuple(
        replace(stage, split=stage.input_gradient and bool(stage.trainable))
        for stage in program.stages
    )
    pick = random.Random(seed) if seed is not None else None
    split = {stage.index for stage in stages if stage.split}
    rows = tuple(_split_row(row, split, pick) for row in program.instructions)
    return replace(program, stages=stages, instructions=rows)


def _split_row(row: Row, split: set[int], pick: random.Random | None) -> Row:
    items: list[Instruction] = []
    late: list[Compute] = []
    for item in row:
        # A start belongs before the last W.
        if item.op is Op.REDUCE_START:
            continue
        if isinstance(item, Step) or (isinstance(item, Collective) and item.op is Op.REDUCE):
            items += late
            late = []
        while pick and late and pick.random() < 0.3:
            items.append(late.pop(pick.randrange(len(late))))
        if isinstance(item, Compute) and item.op is Op.BACKWARD and item.stage in split:
            late.append(Compute(Op.WEIGHT, item.stage, item.mb))
            item = Compute(Op.INPUT, item.stage, item.mb)
        items.append(item)
    return tuple(items)
