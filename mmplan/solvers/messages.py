"""The bytes of messages under way, before there is a program in which they could be counted.

:func:`mmplan.simulation.step.peak_bytes` counts them in the program. What is said here is not less,
but where ranks run several tasks in turn: there the simulation of a plan finds what does not fit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmplan.solvers.communicators import PlacedModules
from mmplan.solvers.problem import Blocks, Problem

# A module and one of its blocks.
_Block = tuple[str, int]
# Micro-batches of gradients that a stage waits for at a time: a receive is posted two computes
# ahead.
RETURNED = 3
# Micro-batches of inputs that it waits for, or whose gradients are not known to have come, beside
# those in flight. Most seen in plans of all solvers.
RECEIVED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessages:
    """Bytes of a stage's messages for each sample of a micro-batch.

    Attributes:
        carried: of each micro-batch in flight. An output is kept until its gradient comes, and the
            gradient of the inputs may be kept as long as the next stages hold a micro-batch.
        returned: of one micro-batch's gradients to receive.
        received: of one micro-batch's inputs.
        kept: of every micro-batch of the step: what no gradient is sent back for may come any time
            before it is taken, and nothing shows that it has come.
    """

    carried: float
    returned: float
    received: float
    kept: float

    def bytes_beside(self, count: int) -> float:
        """For each sample of a micro-batch, what is not ``carried``, with so many in a step."""
        return float(bytes_beside(self.returned, self.received, self.kept, count))


def bytes_beside(returned: Any, received: Any, kept: Any, count: Any) -> Any:
    """:meth:`StageMessages.bytes_beside`, also of arrays."""
    waited = returned * np.minimum(count, RETURNED) + received * np.minimum(count, RECEIVED)
    return waited + kept * count


def stage_messages(
    problem: Problem, module: str, blocks: Blocks, placed: PlacedModules
) -> StageMessages:
    """The messages of a stage.

    Args:
        problem: the task.
        module: of the task.
        blocks: of the stage.
        placed: the module, and others. What stays on the stage's ranks is no message; the stages of
            each other module are on ranks of their own.
    """
    own = _place(module, blocks[0], placed)
    sources = [s for s in _sources(problem, module, blocks) if _place(*s, placed) != own]
    targets = [t for t in _targets(problem, module, blocks) if _place(*t, placed) != own]
    received = unanswered = 0.0
    for name, block in sources:
        num_bytes = problem.output_bytes(name, block)
        if _returns(problem, name, block + 1):
            received += num_bytes
        else:
            unanswered += num_bytes
    output = problem.output_bytes(module, blocks[1] - 1) if targets else 0.0
    sent = output if _returns(problem, module, blocks[1]) else 0.0
    return StageMessages(
        carried=max(sent, received),
        returned=sent * len(targets),
        received=received,
        kept=unanswered + output - sent,
    )


def _sources(problem: Problem, module: str, blocks: Blocks) -> list[_Block]:
    """The blocks whose outputs a stage takes."""
    inside = [(module, blocks[0] - 1)] if blocks[0] else []
    names = [] if blocks[0] else problem.into_first(module)
    if blocks[1] == problem.blocks(module):
        names = names + problem.into_last(module)
    return inside + [(name, problem.blocks(name) - 1) for name in names]


def _targets(problem: Problem, module: str, blocks: Blocks) -> list[_Block]:
    """The blocks that take a stage's output; a module's last block where its losses do."""
    if blocks[1] < problem.blocks(module):
        return [(module, blocks[1])]
    return [
        (name, block)
        for name in problem.task.modules
        for block, sources in (
            (0, problem.into_first(name)),
            (problem.blocks(name) - 1, problem.into_last(name)),
        )
        for source in sources
        if source == module
    ]


def _returns(problem: Problem, module: str, stop: int) -> bool:
    """Whether a gradient comes back to what leaves a module's first ``stop`` blocks."""
    if stop == problem.blocks(module):
        return problem.makes_gradient(module)
    return bool(problem.trainable(module, (0, stop))) or any(
        map(problem.makes_gradient, problem.into_first(module))
    )


def _place(module: str, block: int, placed: PlacedModules) -> Hashable:
    """What tells the ranks of a block's stage from others."""
    own = placed.get(module)
    if own is None:
        return module, block
    place = next(place for place, (start, stop) in own.stages if start <= block < stop)
    return place, own.tp, own.dp
