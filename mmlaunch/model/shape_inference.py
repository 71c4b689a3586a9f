"""The output spec of every stage, known on all ranks before the first message.

A receive buffer of the wrong size is filled in part, or aborts the process; so shapes are
inferred when workers start: each stage runs once on fake tensors, in pipeline order, and
its first rank tells the others. Where a tensor-parallel group runs the stage, its blocks' values
are followed through the group at the same time (:mod:`mmplan.proof.tp_states`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree, element_of, lacks_rows, map_tensors
from mmlaunch.comm.messages import LeafSpec, Spec, spec_of, tree_of
from mmlaunch.comm.transport import Transport
from mmlaunch.comm.wire import Failure
from mmlaunch.data.loader import StepData
from mmlaunch.model.local_model import LocalModel, tensors_in
from mmlaunch.model.precision import TrainingPrecision
from mmlaunch.model.whole_modules import call_blocks
from mmplan.errors import MMPlanError, RunFailedError
from mmplan.program.model import Program, Source, Stage
from mmplan.proof.row_cuts import RowCuts
from mmplan.proof.tp_states import TPStates, tp_states
from mmplan.ragged import Ragged
from mmplan.schema.protocols import as_vocabulary_loss
from mmplan.wording import counted

# Two samples: some modules squeeze a batch of one away.
_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A stage's spec, or why there is none, as its first rank tells the others.

    Attributes:
        partial: by block, the parameters whose gradients its tensor-parallel groups sum.
        rows: by block, where the rows of its activations are cut.
        logits: whether its losses take each rank's own logits.
    """

    spec: Spec = None
    partial: dict[int, tuple[str, ...]] = field(default_factory=lambda: {})
    rows: dict[int, RowCuts] = field(default_factory=lambda: {})
    logits: bool = False
    failure: Failure | None = None


def infer_shapes(
    program: Program,
    model: LocalModel,
    transport: Transport,
    data: Callable[[str], StepData],
    prepare: Callable[[Tree], Tree],
    precision: TrainingPrecision,
    *,
    sequence_parallel: bool,
) -> list[Spec]:
    """The output spec of every stage, the same list on all ranks.

    Args:
        program: the program.
        model: this rank's blocks; is told whose gradients tensor-parallel groups sum.
        transport: tells the specs to all ranks.
        data: some step's data of a task.
        prepare: moves a data field to the device and its training type.
        precision: the type in which blocks compute.
        sequence_parallel: whether tensor-parallel groups share out rows; the model is told of
            which blocks.

    Raises:
        MMPlanError: a block raised, returned something that cannot travel, or would train
            something else under tensor parallelism; on all ranks.
    """
    specs: list[Spec] = []
    known: dict[object, TPStates] = {}
    for stage in program.stages:
        leader = stage.ranks[0][0]
        answer = _Answer()
        if transport.rank == leader:
            try:
                with precision.compute(keep_casts=False):
                    inputs = _arguments(
                        stage, program, specs, data(stage.task), prepare, transport.device
                    )
                    logits = _takes_own_logits(program, stage, model.losses)
                    answer = _infer(
                        stage, model, inputs, known, sequence_parallel, logits, transport.device
                    )
            except MMPlanError as error:
                answer = _Answer(failure=Failure.of(error))
            except Exception as error:
                task = f"task {stage.task}, " if len(program.batches) > 1 else ""
                where = f"{task}{stage.module} blocks {list(stage.blocks)}"
                failed = RunFailedError(
                    f"{where}: {type(error).__name__}: {error}{_own_line(error)}",
                    hint="run the blocks on a batch of two samples to see where",
                )
                answer = _Answer(failure=Failure.of(failed))
        answer = transport.broadcast_object(answer, leader, _Answer)
        if answer.failure is not None:
            raise answer.failure.error()
        specs.append(answer.spec)
        model.cut_rows(stage, answer.rows)
        if answer.logits:
            model.keep_logits(stage)
        if stage.has_backward:
            model.sum_partial(stage, answer.partial)
    return specs


def _own_line(error: Exception) -> str:
    """(file:line) of the innermost frame that is neither an installed package's nor mmlaunch's."""
    ours = str(Path(__file__).parents[1])
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith(ours)
    ]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _arguments(
    stage: Stage,
    program: Program,
    specs: list[Spec],
    data: StepData,
    prepare: Callable[[Tree], Tree],
    device: torch.device,
) -> list[Tree]:
    """Some samples as a stage's first block takes them."""
    start, stop = stage.microbatches[0][0]
    samples = min(_SAMPLES, stop - start)

    def zeros(leaf: LeafSpec) -> Tree:
        """One row for each sample, of ``Ragged`` too."""
        values = torch.zeros((samples, *leaf.tail), dtype=leaf.dtype, device=device)
        values.requires_grad_(leaf.differentiable)
        lengths = torch.ones(samples, dtype=torch.int64, device=device)
        return Ragged(values, lengths) if leaf.ragged else values

    def argument(source: Source) -> Tree:
        if source.field is not None:
            return prepare(data.get(source.field, start, start + samples))
        if source.edge is None:
            return None
        edge = program.edges[source.edge]
        producer = program.stages[edge.producer]
        return tree_of(element_of(specs[edge.producer], edge.element, producer.module), zeros)

    arguments = [argument(source) for source in stage.inputs]
    # Where nobody has a row, blocks may return what came, whose rows are of another shape.
    return [tree_of(spec_of(a), zeros) if lacks_rows(a) else a for a in arguments]


def _infer(
    stage: Stage,
    model: LocalModel,
    arguments: list[Tree],
    known: dict[object, TPStates],
    rows: bool,
    logits: bool,
    device: torch.device,
) -> _Answer:
    """A stage's answer.

    Args:
        stage: the stage.
        model: has its blocks.
        arguments: of the first block.
        known: states of blocks that were followed before.
        rows: whether tensor-parallel groups share out rows.
        logits: whether its losses can take each rank's own logits.
        device: of the arguments; blocks may still be on the host.
    """
    if stage.shards > 1:
        return _follow(stage, model, arguments, known, rows, logits)
    blocks = [model.blocks[stage.owner, b] for b in range(*stage.blocks)]
    try:
        return _Answer(spec=_run_fake(blocks, arguments, device))
    except Exception:
        # Some blocks look at values, which fake tensors do not have.
        return _Answer(spec=spec_of(_run_real(blocks, arguments, device)))


def _follow(
    stage: Stage,
    model: LocalModel,
    arguments: list[Tree],
    known: dict[object, TPStates],
    rows: bool,
    logits: bool,
) -> _Answer:
    """The answer of a stage that tensor-parallel groups run."""
    given: tuple[Any, ...] = tuple(arguments)
    partial: dict[int, tuple[str, ...]] = {}
    cuts: dict[int, RowCuts] = {}
    whole: dict[str, list[int]] = {}
    kept = False
    for index in range(*stage.blocks):
        where = f"{stage.owner}.{index}"
        block = model.blocks[stage.owner, index]
        full = {
            name: layout.full_shape
            for name, _ in block.named_parameters(remove_duplicate=False)
            if (layout := model.layouts.get(model.saved_name(stage.owner, index, name)))
        }
        # A rank that holds a block whole, for several groups, runs it without.
        plain = not model.tp_groups.has_several_shards(stage.owner, index)
        found = tp_states(
            block,
            given,
            stage.tp,
            where=where,
            full=full,
            known=known,
            rows=rows and plain,
            logits=logits and plain and index == stage.blocks[1] - 1,
        )
        kept = found.logits
        partial[index] = tuple(sorted(found.partial))
        if found.rows is not None:
            cuts[index] = found.rows
        if found.obstacle is not None:
            whole.setdefault(found.obstacle, []).append(index)
        given = (found.output,)
    model.notes += [
        f"modules.{stage.owner}: {counted(len(blocks), 'block')} from {blocks[0]} on: rows stay "
        f"whole on each rank of a tp group: {reason}"
        for reason, blocks in whole.items()
    ]
    return _Answer(spec=spec_of(given[0]), partial=partial, rows=cuts, logits=kept)


def _takes_own_logits(program: Program, stage: Stage, losses: Mapping[str, nn.Module]) -> bool:
    """Whether nobody needs all of a stage's first output: losses that take shards of it alone.

    Args:
        program: the whole program.
        stage: the stage.
        losses: those of its ranks, by name.
    """
    features = [item for i in stage.syncs for item in program.cross_sample(i).inputs]
    if any(e.producer == stage.index and not e.element for e in program.edges) or any(
        item.stage == stage.index and not item.element for item in features
    ):
        return False
    hosted = [program.per_sample(index) for index in stage.hosted]
    takers = [loss for loss in hosted if any(s.takes_first_output for s in loss.inputs)]
    return bool(takers) and all(
        as_vocabulary_loss(losses[loss.name]) is not None
        and loss.inputs[0].takes_first_output
        and not any(s.own or s.edge is not None for s in loss.inputs[1:])
        for loss in takers
    )


def _run_real(blocks: list[nn.Module], arguments: list[Tree], device: torch.device) -> Tree:
    """The output of blocks; one that is on the host comes to the device while it runs."""
    given: tuple[Tree, ...] = tuple(arguments)
    for block in blocks:
        comes = device.type == "cuda" and any(t.is_cpu for t in tensors_in(block))
        if comes:
            block.to(device)
        given = (call_blocks([block], given),)
        if comes:
            block.to("cpu")
    return given[0]


def _run_fake(blocks: list[nn.Module], arguments: list[Tree], device: torch.device) -> Spec:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # It logs a traceback of a failure that is tried again with real tensors, or worded by us.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # Weights are swapped for fake ones: a fake input never meets a real parameter.
    with FakeTensorMode(), torch.enable_grad():
        fake: dict[Tensor, Tensor] = {}

        def convert(tensor: Tensor, to: torch.device | None = None) -> Tensor:
            if tensor not in fake:
                like = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=to or tensor.device
                )
                fake[tensor] = like.requires_grad_(tensor.requires_grad)
            return fake[tensor]

        def weight(tensor: Tensor) -> Tensor:
            return convert(tensor, device)

        given: tuple[Any, ...] = tuple(map_tensors(argument, convert) for argument in arguments)
        for block in blocks:
            parameters = block.named_parameters(remove_duplicate=False)
            buffers = block.named_buffers(remove_duplicate=False)
            state = {name: weight(tensor) for name, tensor in chain(parameters, buffers)}
            given = (torch.func.functional_call(block, state, given, tie_weights=False),)
        return spec_of(given[0])
