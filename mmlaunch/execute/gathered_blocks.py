"""Blocks whose parameters are cut over their replicas: gathered around each compute, then freed.

Before a block's forward all replicas gather its parameters, one block after the other, and free
them after it. In backward they gather them again, last block first. When a block's backward is
over, the sums of its gradients begin, and its parameters are freed. So a rank has the parameters
of one block whole at a time; on a device of its own also those of the next one, whose gather runs
beside the compute.

Gathers and sums have one order on all ranks, whatever gets a gradient there: a block's backward
begins with the gradient of its output, and then all later blocks are over. Autograd runs what was
computed last first.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.3 (P_p).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

from torch import Tensor

from mmlaunch.comm.batches import Tree, float_leaves
from mmlaunch.comm.transport import Transport, Work
from mmlaunch.execute.gradient_buckets import FlatShards
from mmlaunch.model.whole_modules import BlockKey
from mmplan.program.model import Stage


class GatheredBlocks:
    """The parameters of one rank that are cut, block by block.

    Args:
        shards: of each block, in the order of their sums.
        transport: gathers.

    Attributes:
        names: full names of the parameters.
        is_ahead: whether the gather of the next block runs beside a compute.
    """

    def __init__(
        self, shards: Mapping[BlockKey, Sequence[FlatShards]], transport: Transport
    ) -> None:
        self._shards, self._transport = shards, transport
        own = [item for items in shards.values() for item in items]
        self.names = {part.name for item in own for part in item.slices}
        # Of blocks that are whole, or become so; none between two computes.
        self._gathers: dict[BlockKey, list[Work]] = {}
        # Of the backward that runs: blocks to come, the one that it is in, and what begins sums.
        self._to_come: deque[BlockKey] = deque()
        self._current: BlockKey | None = None
        self._sum: Callable[[FlatShards], None] | None = None
        self.is_ahead = transport.device.type == "cuda"

    def _blocks_of(self, stage: Stage) -> list[BlockKey]:
        """The blocks of a stage that are cut, in order."""
        blocks = ((stage.owner, index) for index in range(*stage.blocks) if stage.gathers)
        return [block for block in blocks if block in self._shards]

    def before_forward(self, stage: Stage, index: int) -> None:
        """Make the parameters of a block whole; on a device of its own begin with the next one."""
        if not stage.gathers:
            return
        later = [block for block in self._blocks_of(stage) if block[1] >= index]
        if later and later[0][1] == index:
            self._take(*later[:2])

    def after_forward(self, stage: Stage, index: int, output: Tree) -> None:
        """Free the parameters of a block; its backward will gather them again."""
        if not stage.gathers or (stage.owner, index) not in self._shards:
            return
        self._release((stage.owner, index))
        for leaf in float_leaves(output):
            # What a block only hands on has its gradient when another block is over.
            if leaf.grad_fn is not None:
                leaf.register_hook(partial(self._come_to, index))

    @contextmanager
    def backward(self, stage: Stage, begin: Callable[[FlatShards], None] | None) -> Generator[None]:
        """Around the backward of a micro-batch.

        Args:
            stage: of the backward.
            begin: begins the sum of gradients; None to drop them.
        """
        self._to_come.extend(reversed(self._blocks_of(stage)))
        self._sum = begin
        yield
        # Other ranks may have gradients where this one has none: all gather and sum alike.
        self._come_to(stage.blocks[0])
        self._leave()

    def _come_to(self, index: int, gradient: Tensor | None = None) -> None:
        """The backward of a block begins, or that of an earlier one: all later ones are over."""
        del gradient
        while self._to_come and self._to_come[0][1] >= index:
            self._leave()
            self._current = self._to_come.popleft()
            self._take(self._current, *islice(self._to_come, 1))

    def _leave(self) -> None:
        """The backward of a block is over."""
        if self._current is None:
            return
        self._release(self._current)
        for item in self._shards[self._current]:
            if self._sum is None:
                item.drop_gradients()
            else:
                self._sum(item)
        self._current = None

    def _take(self, block: BlockKey, *later: BlockKey) -> None:
        """Make the parameters of a block whole."""
        ahead = later if self.is_ahead else ()
        for each in (block, *ahead):
            if each not in self._gathers:
                own = self._shards[each]
                self._gathers[each] = [item.start_gather(self._transport) for item in own]
        for work in self._gathers[block]:
            work.wait()

    def _release(self, block: BlockKey) -> None:
        del self._gathers[block]
        for item in self._shards[block]:
            item.release()
