"""Run a stage's blocks, keeping their activations or recomputing them in backward."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmlaunch.comm.batches import NO_ROWS, Tree, lacks_rows
from mmlaunch.execute.compiled_blocks import CompiledBlocks
from mmlaunch.execute.gathered_blocks import GatheredBlocks
from mmlaunch.execute.item_shares import ItemShares
from mmlaunch.execute.weight_gradients import SplitBackward, WeightGradients
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.seeds import Seeds
from mmlaunch.model.tensor_parallel import sums_of
from mmplan.errors import MMPlanError, RunFailedError
from mmplan.program.model import Stage
from mmplan.proof.row_cuts import BlockRows, RowFlow


class ExecutionError(RunFailedError):
    """An instruction failed; the message shows it between its neighbours, or names the block."""

    @property
    def detail(self) -> str:
        """The traceback of its cause."""
        return "".join(traceback.format_exception(self.__cause__)) if self.__cause__ else ""


class StageBlocks:
    """This rank's blocks, as stages run them.

    Args:
        model: has the blocks.
        seeds: seeded before each block, and again where it runs a second time.
        recompute: (module, index) of blocks that keep their inputs only.
        compiled: compiles blocks; None to run them as they are.
        gathered: makes blocks whole whose parameters are cut.

    Attributes:
        split: makes the ``later`` of :meth:`run`.
    """

    def __init__(
        self,
        model: LocalModel,
        seeds: Seeds,
        recompute: frozenset[tuple[str, int]],
        compiled: CompiledBlocks | None = None,
        *,
        gathered: GatheredBlocks,
    ) -> None:
        self._model, self._seeds, self._recompute = model, seeds, recompute
        self._compiled, self._gathered = compiled, gathered
        self.split = SplitBackward()

    def run(
        self,
        stage: Stage,
        step: int,
        first_sample: int,
        arguments: Sequence[Tree],
        later: WeightGradients | None = None,
    ) -> Tree:
        """The stage's output for one micro-batch.

        Args:
            stage: has the blocks.
            step: number of the optimizer step.
            first_sample: of the micro-batch.
            arguments: of the first block.
            later: takes the weight gradients of a split backward.
        """
        shares = self._item_shares(stage)
        given = tuple(arguments if shares is None else shares.own(arguments))
        flow = RowFlow(self._model.row_groups.get(stage.index, ""))
        for index in range(*stage.blocks):
            cuts = self._model.row_cuts.get((stage.index, index))
            given = flow.before(cuts, given)
            self._gathered.before_forward(stage, index)
            try:
                # Ranks of a tensor-parallel group run the same again, so their sums still meet.
                if (stage.module, index) in self._recompute and torch.is_grad_enabled():
                    block = partial(
                        self._run_block, stage, index, step, first_sample, later, flow.length
                    )
                    # The block seeds the generators itself: their state needs no copy.
                    output = checkpoint(
                        block, *given, use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    output = self._run_block(
                        stage, index, step, first_sample, later, flow.length, *given
                    )
            except Exception as error:
                if isinstance(error, MMPlanError) or not any(map(lacks_rows, given)):
                    raise
                kind = type(self._model.blocks[stage.owner, index]).__name__
                raise ExecutionError(
                    f"modules.{stage.module}: block {index} ({kind}) cannot take a micro-batch "
                    f"without any row of its ragged input: {type(error).__name__}: "
                    f"{next(iter(str(error).splitlines()), '')}",
                    hint=NO_ROWS,
                ) from error
            self._gathered.after_forward(stage, index, output)
            flow.after(None if cuts is None else self._rows(stage, index))
            given = (output,)
        output = flow.end(given[0])
        return output if shares is None else shares.whole(output)

    def _item_shares(self, stage: Stage) -> ItemShares | None:
        """How the ranks of a group share out the items of a micro-batch; None where they do not."""
        if not stage.items:
            return None
        return ItemShares(self._model.row_groups[stage.index], f"modules.{stage.module}")

    def _run_block(
        self,
        stage: Stage,
        index: int,
        step: int,
        first_sample: int,
        later: WeightGradients | None,
        length: int,
        *arguments: Any,
    ) -> Any:
        block = self._model.blocks[stage.owner, index]
        off = self._model.frozen_here[stage.index]
        self._model.tp_groups.enter(stage, index)
        sums = sums_of(block) if stage.shards > 1 else None
        if sums is not None:
            last = index == stage.blocks[1] - 1
            sums.keeps_logits = last and stage.index in self._model.own_logits
        rows = self._rows(stage, index)
        if rows is not None:
            cuts = self._model.row_cuts.get((stage.index, index))
            taken = cuts is None or not cuts.takes or length
            rows.begin(cuts if taken else None, self._model.row_groups.get(stage.index, ""), length)
        # Of fewer rows than ranks some have none: all run the same operators, none compiled.
        compiled = None if 0 < length < stage.tp else self._compiled
        self._seeds.enter(step, stage.module, index, first_sample)
        if later is None and not off and compiled is None:
            return block(*arguments)
        through = nullcontext() if later is None else self.split.during(block)
        with frozen(off), through:
            if compiled is None:
                return block(*arguments)
            call = compiled.of(block, arguments, split=later is not None)
            return call(block, *arguments)

    def _rows(self, stage: Stage, index: int) -> BlockRows | None:
        """The rows of a block that tensor-parallel groups run."""
        sums = sums_of(self._model.blocks[stage.owner, index]) if stage.shards > 1 else None
        return None if sums is None else sums.rows


def frozen(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Context in which computing gives these parameters no gradient."""
    switched = [parameter for parameter in parameters if parameter.requires_grad]
    return _without_gradient(switched) if switched else nullcontext()


@contextmanager
def _without_gradient(switched: Sequence[nn.Parameter]) -> Generator[None]:
    for parameter in switched:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in switched:
            parameter.requires_grad_(True)
