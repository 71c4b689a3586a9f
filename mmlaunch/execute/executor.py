"""Run one rank's program: one optimizer step.

The program decides the order; the executor never reorders or skips, and waits only for
what an instruction names. State lives for one call of ``run``; what an instruction means on this
rank is found when it is first met, and the same in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from mmlaunch.comm.batches import (
    Tree,
    cat_samples,
    element_of,
    float_leaves,
    float_rows,
    map_tensors,
    slice_samples,
)
from mmlaunch.comm.messages import BackwardReceive, Mailbox, Spec, Way
from mmlaunch.comm.scatter_gather import TreeOfShares, gather_shares
from mmlaunch.comm.transport import Transport
from mmlaunch.data.loader import StepData
from mmlaunch.execute.batch_sync import BatchSync, no_terms
from mmlaunch.execute.blocks import ExecutionError, StageBlocks, frozen
from mmlaunch.execute.reductions import Reductions
from mmlaunch.execute.weight_gradients import WeightGradients
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.precision import TrainingPrecision, widened
from mmlaunch.model.seeds import Seeds
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.errors import MMPlanError
from mmplan.program.communicators import Channels
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import MicroBatch, PerSampleLoss, Program, Source, Stage
from mmplan.schema.protocols import as_vocabulary_loss


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ComputePart:
    """A compute instruction with its stage and its samples; the same in every step.

    Attributes:
        key: of what is kept for the micro-batch.
        start, stop: its samples.
        receives: messages that it takes.
        sends: later sends of what it gives.
    """

    op: Op
    stage: Stage
    mb: int
    key: MicroBatch
    start: int
    stop: int
    receives: int
    sends: int


@dataclass(slots=True)
class _Live:
    """A micro-batch between its forward and its backward, or until its last send.

    Attributes:
        inputs: assembled inputs by edge; their floating leaves collect gradients.
        output: the stage's output tree, with its graph.
        losses: weighted terms of hosted losses, with their graphs.
        sends_left: sends of its output, then of its inputs' gradients, that are still to come.
        later: weight gradients that ``W`` will compute; None with a fused backward.
        messages: receives of the output's gradients.
    """

    inputs: dict[int, Tree]
    output: Tree
    losses: list[Tensor]
    sends_left: int
    later: WeightGradients | None = None
    messages: list[BackwardReceive] = field(default_factory=list[BackwardReceive])


@dataclass(frozen=True, slots=True)
class InstructionSpan:
    """When an instruction ran, seconds since the step began.

    Attributes:
        own_s: of that time, without waits for other ranks.
    """

    index: int
    start_s: float
    end_s: float
    own_s: float


class StepMarks:
    """Moments of a step: the begin, and of each instruction begin, ends of waits, and end.

    Args:
        transport: marks them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._marks: list[Any] = []
        self._begins: list[int] = []

    def add(self) -> None:
        """Mark this moment."""
        self._marks.append(self._transport.mark())

    def begin(self) -> None:
        """The next mark is an instruction's begin."""
        self._begins.append(len(self._marks))

    def spans(self) -> list[InstructionSpan]:
        """When each instruction ran; waits for the device."""
        if not self._begins:
            return []
        times = self._transport.seconds_of(self._marks)
        spans: list[InstructionSpan] = []
        for index, (first, end) in enumerate(pairwise([*self._begins, len(times)])):
            # From the begin to the first wait, from that to the next one, and so on.
            starts, ends = times[first:end:2], times[first + 1 : end : 2]
            own_s = sum(b - a for a, b in zip(starts, ends, strict=True))
            spans.append(InstructionSpan(index, starts[0], ends[-1], own_s))
        return spans


class Executor:
    """Interprets the instructions of one rank.

    Args:
        program: the whole program.
        model: this rank's blocks and losses.
        transport: moves tensors between ranks.
        specs: output spec of every stage (:func:`mmlaunch.model.shape_inference.infer_shapes`).
        channels: of the program's messages.
        blocks: run the model's blocks.
        seeds: makes random numbers independent of the schedule.
        precision: the type in which blocks compute.
        reductions: COUNT, REDUCE_START and REDUCE.
        prepare: moves a data field to the device and its training type.
        heartbeat: told of every instruction.
    """

    def __init__(
        self,
        *,
        program: Program,
        model: LocalModel,
        transport: Transport,
        specs: Sequence[Spec],
        channels: Channels,
        blocks: StageBlocks,
        seeds: Seeds,
        precision: TrainingPrecision,
        reductions: Reductions,
        prepare: Callable[[Tree], Tree],
        heartbeat: Heartbeat,
    ) -> None:
        self._program = program
        self._row = program.instructions[transport.rank]
        self._texts = [str(instruction) for instruction in self._row]
        self._units = [self._unit(instruction) for instruction in self._row]
        self._calls: list[Callable[[], None] | None] = [None] * len(self._row)
        self._model = model
        self._transport = transport
        self._blocks = blocks
        self._seeds = seeds
        self._precision = precision
        self._reductions = reductions
        self._prepare = prepare
        self._heartbeat = heartbeat
        self._places = {
            stage.index: stage.place(transport.rank) for stage in program.stages_of(transport.rank)
        }
        self._messages = Counter((i.op, i.stage, i.mb) for i in self._row if isinstance(i, Message))
        self._mailbox = Mailbox(program, transport, specs, channels, self._output_of)
        self._sync = BatchSync(program, model, transport, specs, seeds, precision, self._field)
        self._data: Mapping[str, StepData] = {}
        self._step = 0

    def run(
        self, step: int, data: Mapping[str, StepData], *, timed: bool = False
    ) -> tuple[Tensor, StepMarks]:
        """Run forward, backward and reductions of one step; gradients end up in ``.grad``.

        Args:
            step: number of the step, which seeds dropout.
            data: this rank's samples by task.
            timed: note when each instruction ran.

        Returns:
            This rank's part of each loss's term, [losses] (float64, on its device; the parts of
            all ranks and losses add up to the step's loss), and the times, none unless asked for.

        Raises:
            ExecutionError: an instruction failed; the cause is kept.
        """
        self._begin(step, data)
        with self._precision.step():
            marks = self._run_row(step, timed=timed)
        return self._terms + self._sync.terms, marks

    def _run_row(self, step: int, *, timed: bool) -> StepMarks:
        marks = StepMarks(self._transport)
        self._heartbeat.on_wait = marks.add if timed else None
        beat = self._heartbeat.beat
        if timed:
            marks.add()
        try:
            for position, call in enumerate(self._calls):
                self._position = position
                beat(step, position, self._texts[position], self._units[position])
                if timed:
                    marks.begin()
                    marks.add()
                if call is None:
                    call = self._calls[position] = self._call_of(self._row[position])
                call()
                if timed:
                    marks.add()
        except MMPlanError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            late = self._heartbeat.lateness(error)
            raise ExecutionError(f"{self._describe(self._position, late)}: {said}") from error
        self._heartbeat.on_wait = None
        return marks

    def _call_of(self, instruction: Instruction) -> Callable[[], None]:
        """What an instruction does on this rank."""
        if isinstance(instruction, Compute):
            return partial(self._compute, self._part_of(instruction))
        if isinstance(instruction, Message):
            return partial(self._message, self._mailbox.way(instruction))
        if isinstance(instruction, Sync):
            starts = instruction.op == Op.SYNC_START
            return partial(
                self._sync.start if starts else self._sync.wait, instruction.loss, instruction.batch
            )
        if isinstance(instruction, Collective):
            return partial(self._collective, instruction)
        return self._finish

    def _part_of(self, instruction: Compute) -> ComputePart:
        stage, mb = self._program.stages[instruction.stage], instruction.mb
        start, stop = stage.microbatches[self._places[stage.index][0]][mb]
        forward = instruction.op == Op.FORWARD
        received, sent = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)
        return ComputePart(
            op=instruction.op,
            stage=stage,
            mb=mb,
            key=(stage.index, mb),
            start=start,
            stop=stop,
            receives=self._messages[received, stage.index, mb],
            sends=self._messages[sent, stage.index, mb],
        )

    def _begin(self, step: int, data: Mapping[str, StepData]) -> None:
        self._step = step
        self._data = data
        self._terms = no_terms(self._program, self._transport.device)
        self._live: dict[MicroBatch, _Live] = {}
        self._later: dict[MicroBatch, WeightGradients] = {}
        self._mailbox.begin()
        self._blocks.split.forget()
        self._reductions.begin()
        self._sync.begin(step)

    def _compute(self, part: ComputePart) -> None:
        self._model.tp_groups.running = part.stage.index
        if part.op == Op.FORWARD:
            self._forward(part)
        elif part.op == Op.WEIGHT:
            later = self._later.pop(part.key)
            with self._reductions.starting_inside(later.parameters()):
                later.compute()
        elif part.stage.gathers:
            with self._reductions.gathering(part.stage):
                self._backward(part)
        elif self._reductions.are_starting:
            with self._reductions.starting_inside():
                self._backward(part)
        else:
            self._backward(part)

    def _forward(self, part: ComputePart) -> None:
        stage = part.stage
        inputs = self._assemble(part) if part.receives else {}
        later = self._blocks.split.microbatch() if stage.split else None
        # Contexts cost more than a whole instruction does without them.
        plain = stage.has_backward == torch.is_grad_enabled() and not self._precision.is_narrow
        if plain:
            output, losses = self._computed(part, inputs, later)
        else:
            compute = self._precision.compute(keep_casts=stage.has_backward)
            with torch.set_grad_enabled(stage.has_backward), compute:
                output, losses = self._computed(part, inputs, later)
        self._sync.keep(stage, part.key, output)
        if stage.has_backward:
            self._live[part.key] = _Live(inputs, output, losses, part.sends, later)
        elif part.sends:
            self._live[part.key] = _Live({}, output, [], part.sends)

    def _computed(
        self, part: ComputePart, inputs: Mapping[int, Tree], later: WeightGradients | None
    ) -> tuple[Tree, list[Tensor]]:
        """The output of a micro-batch, and its terms of hosted losses."""
        stage = part.stage
        arguments = [self._argument(source, part, inputs) for source in stage.inputs]
        output = self._blocks.run(stage, self._step, part.start, arguments, later)
        losses = [
            self._hosted_loss(self._program.per_sample(index), output, inputs, part)
            for index in stage.hosted
        ]
        return output, losses

    def _output_of(self, stage: int, mb: int) -> Tree:
        live = self._live.get((stage, mb))
        return None if live is None else live.output

    def _assemble(self, part: ComputePart) -> dict[int, Tree]:
        """The stage's inputs by edge, each joined from the messages of the edge."""
        messages = self._mailbox.take_forward(part.key)
        received = [receive.wait() for receive in messages]
        self._mailbox.release(self._position)
        trees = self._gather_shares(part.stage, received)
        by_edge: dict[int, list[Tree]] = {}
        for receive, tree in zip(messages, trees, strict=True):
            by_edge.setdefault(receive.way.edge.index, []).append(tree)
        inputs: dict[int, Tree] = {}
        for index, parts in by_edge.items():
            tree = cat_samples(parts)
            if self._program.edges[index].carries_gradient:
                tree = map_tensors(tree, _wanting_gradient)
            inputs[index] = tree
        return inputs

    def _gather_shares(self, stage: Stage, trees: Sequence[TreeOfShares]) -> Sequence[Tree]:
        """Received trees with their shares gathered by the tensor-parallel group of a compute."""
        group = stage.ranks[self._places[stage.index][0]]
        if len(group) == 1:
            return cast("Sequence[Tree]", trees)
        return gather_shares(trees, self._transport, group)

    def _argument(self, source: Source, part: ComputePart, inputs: Mapping[int, Tree]) -> Tree:
        if source.edge is not None:
            return inputs[source.edge]
        if source.field is None:
            return None
        return self._field(part.stage.task, source.field, part.start, part.stop)

    def _field(self, task: str, name: str, start: int, stop: int) -> Tree:
        return self._prepare(self._field_on_host(task, name, start, stop))

    def _field_on_host(self, task: str, name: str, start: int, stop: int) -> Tree:
        return self._data[task].get(name, start, stop)

    def _hosted_loss(
        self, loss: PerSampleLoss, output: Tree, inputs: Mapping[int, Tree], part: ComputePart
    ) -> Tensor:
        """This micro-batch's weighted term of a per-sample loss."""
        stage = part.stage
        arguments = [
            element_of(output, source.element, stage.module)
            if source.own
            else self._argument(source, part, inputs)
            for source in loss.inputs
        ]
        self._seeds.enter(self._step, f"losses.{loss.name}", 0, part.start)
        first = self._places[stage.index][1] == 0
        module = self._model.losses[loss.name]
        # Of a tensor-parallel group only the first rank counts for the loss's parameters.
        with frozen([] if first else list(module.parameters())):
            own = self._model.own_logits.get(stage.index)
            sharded = as_vocabulary_loss(module)
            if own is None or sharded is None or not loss.inputs[0].takes_first_output:
                value = module(*arguments)
            else:
                value = sharded.of_shard(own.tokens, own.gather, *cast(Any, arguments))
        term = widened(value) * self._reductions.scale(loss, part.stop - part.start)
        if first:
            self._terms[loss.index].add_(term.detach())
        return term

    def _backward(self, part: ComputePart) -> None:
        live = self._live[part.key]
        if part.receives:
            live.messages = self._mailbox.take_backward(part.key)
        scale = self._precision.gradient_scale
        gradients = {t: torch.full_like(t, scale) for t in live.losses if t.requires_grad}
        gradients |= self._output_gradients(part, live)
        if live.later is not None:
            with live.later.collect():
                _backward(gradients)
            self._later[part.key] = live.later
        else:
            _backward(gradients)
        if not part.sends:
            del self._live[part.key]
            return
        live.output, live.losses, live.messages = None, [], []
        live.sends_left = part.sends

    def _output_gradients(self, part: ComputePart, live: _Live) -> dict[Tensor, Tensor]:
        """Floating outputs that need a gradient, each with the sum over its consumers."""
        stage = part.stage
        sums: dict[Tensor, Tensor] = {}
        if live.messages:
            cuts: list[tuple[Tree, int, Tree]] = []
            for receive in live.messages:
                low, high = receive.way.samples
                tree = element_of(live.output, receive.way.edge.element, stage.module)
                cuts.append((tree, low, slice_samples(tree, low, high)))
            received = [
                receive.wait(cut[2]) for receive, cut in zip(live.messages, cuts, strict=True)
            ]
            self._mailbox.release(self._position)
            given = self._gather_shares(stage, received)
            for cut, gradients in zip(cuts, given, strict=True):
                _add_gradients(sums, *cut, cast("tuple[Tensor | None, ...]", gradients))
        for element, low, high, grad in self._sync.gradients(part.key):
            tree = element_of(live.output, element, stage.module)
            _add_gradients(sums, tree, low, slice_samples(tree, low, high), [grad])
        return sums

    def _message(self, way: Way) -> None:
        message = way.message
        if not message.is_send:
            self._mailbox.post_receive(way)
            return
        live = self._live[message.stage, message.mb]
        after_backward = message.op == Op.SEND_B
        tree = live.inputs[message.edge] if after_backward else live.output
        self._mailbox.post_send(way, tree, self._position)
        live.sends_left -= 1
        if not live.sends_left and (after_backward or not way.has_backward):
            del self._live[message.stage, message.mb]

    def _collective(self, instruction: Collective) -> None:
        if instruction.op == Op.REDUCE:
            self._reductions.reduce(instruction.index)
        elif instruction.op == Op.REDUCE_START:
            self._reductions.start(instruction.index)
        else:
            self._reductions.count(instruction.index, self._field_on_host)

    def _finish(self) -> None:
        """Gradients are complete after this; the caller updates the parameters."""
        self._blocks.split.forget()
        self._mailbox.finish()
        self._reductions.finish()

    def _unit(self, instruction: Instruction) -> str | None:
        if isinstance(instruction, Compute | Message):
            return self._program.stages[instruction.stage].unit
        return None

    def _describe(self, position: int, late: str) -> str:
        near = range(max(0, position - 2), min(len(self._row), position + 3))
        shown = " ".join(f">{self._texts[k]}<" if k == position else self._texts[k] for k in near)
        return (
            f"rank {self._transport.rank}, step {self._step}, {'at or before ' if late else ''}"
            f"instruction {position} of {len(self._row)}{f' ({late})' if late else ''}: {shown}"
        )


def _wanting_gradient(tensor: Tensor) -> Tensor:
    """A received tensor, which has no history; a floating one collects its gradient."""
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _backward(gradients: Mapping[Tensor, Tensor]) -> None:
    """The backward from some tensors with their gradients."""
    if gradients:
        torch.autograd.backward([*gradients], [*gradients.values()])


def _add_gradients(
    sums: dict[Tensor, Tensor],
    tree: Tree,
    first: int,
    part: Tree,
    grads: Sequence[Tensor | None],
) -> None:
    """Add the gradients that one consumer gives back to the sums of an output's leaves.

    Args:
        sums: over the consumers, for the floating leaves that need a gradient.
        tree: the output.
        first: its first sample that the consumer took.
        part: the samples that the consumer took.
        grads: a gradient for each floating leaf of the part; None where it was not used.
    """
    if isinstance(tree, Tensor) and isinstance(part, Tensor) and grads:
        leaves = ((tree, part, first),)
    else:
        leaves = zip(float_leaves(tree), float_leaves(part), float_rows(tree, first), strict=True)
    for (leaf, cut, first_row), given in zip(leaves, grads, strict=True):
        if given is None or not leaf.requires_grad:
            continue
        grad = given if given.dtype == leaf.dtype else given.to(leaf.dtype)
        is_whole = cut is leaf or cut.shape == leaf.shape
        if leaf not in sums:
            if is_whole:
                sums[leaf] = grad
                continue
            sums[leaf] = torch.zeros_like(leaf)
        whole = sums[leaf]
        rows = whole if is_whole else whole[first_row : first_row + len(cut)]
        rows += grad
