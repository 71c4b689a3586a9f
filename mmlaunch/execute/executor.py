"""Run one rank's program: one optimizer step.

The program decides the order; the executor never reorders or skips, and waits only for
what an instruction names. State lives for one call of ``run``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
    leaf_of,
    map_tensors,
    slice_samples,
)
from mmlaunch.comm.messages import BackwardReceive, Mailbox, Spec
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
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Step, Sync
from mmplan.program.model import MicroBatch, PerSampleLoss, Program, Source, Stage


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
    messages: list[tuple[Message, BackwardReceive]] = field(default_factory=list)


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
        self._sends = Counter(
            (i.op, i.stage, i.mb) for i in self._row if isinstance(i, Message) and i.is_send
        )
        self._mailbox = Mailbox(program, transport, specs, channels, self._output_of)
        self._sync = BatchSync(program, model, transport, specs, seeds, precision, self._field)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Compute: self._compute,
            Message: self._message,
            Sync: self._synchronise,
            Collective: self._collective,
            Step: self._finish,
        }
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
        if timed:
            marks.add()
        for position, instruction in enumerate(self._row):
            self._position = position
            self._heartbeat.beat(step, position, self._texts[position], self._units[position])
            if timed:
                marks.begin()
                marks.add()
            try:
                self._handlers[type(instruction)](instruction)
            except MMPlanError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                late = self._heartbeat.lateness(error)
                raise ExecutionError(f"{self._describe(position, late)}: {said}") from error
            if timed:
                marks.add()
        self._heartbeat.on_wait = None
        return marks

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

    def _compute(self, instruction: Compute) -> None:
        stage = self._program.stages[instruction.stage]
        self._model.tp_groups.running = stage.index
        if instruction.op == Op.FORWARD:
            self._forward(stage, instruction.mb)
        elif instruction.op == Op.WEIGHT:
            later = self._later.pop((stage.index, instruction.mb))
            with self._reductions.starting_inside(later.parameters()):
                later.compute()
        else:
            with self._reductions.starting_inside():
                self._backward(stage, instruction.mb)

    def _forward(self, stage: Stage, mb: int) -> None:
        key = stage.index, mb
        start, stop = stage.microbatches[self._places[stage.index][0]][mb]
        inputs = self._assemble(stage, mb)
        later = self._blocks.split.microbatch() if stage.split else None
        compute = self._precision.compute(keep_casts=stage.has_backward)
        with torch.set_grad_enabled(stage.has_backward), compute:
            arguments = [self._argument(s, stage, inputs, start, stop) for s in stage.inputs]
            output = self._blocks.run(stage, self._step, start, arguments, later)
            losses = [
                self._hosted_loss(
                    self._program.per_sample(index), output, inputs, stage, start, stop
                )
                for index in stage.hosted
            ]
        self._sync.keep(stage, mb, output)
        sends = self._sends[Op.SEND_F, stage.index, mb]
        if stage.has_backward:
            self._live[key] = _Live(inputs, output, losses, sends, later)
        elif sends:
            self._live[key] = _Live({}, output, [], sends)

    def _output_of(self, stage: int, mb: int) -> Tree:
        live = self._live.get((stage, mb))
        return None if live is None else live.output

    def _assemble(self, stage: Stage, mb: int) -> dict[int, Tree]:
        """The stage's inputs by edge, each joined from the messages of the edge."""
        messages = self._mailbox.take_forward(stage, mb)
        if not messages:
            return {}
        received = [receive.wait() for _, receive in messages]
        self._mailbox.release(self._position)
        by_edge: defaultdict[int, list[Tree]] = defaultdict(list)
        trees = self._gather_shares(stage, received)
        for (message, _), tree in zip(messages, trees, strict=True):
            by_edge[message.edge].append(tree)
        inputs: dict[int, Tree] = {}
        for edge, parts in by_edge.items():
            tree = cat_samples(parts)
            if self._program.edges[edge].carries_gradient:
                tree = map_tensors(tree, leaf_of)
            inputs[edge] = tree
        return inputs

    def _gather_shares(self, stage: Stage, trees: Sequence[TreeOfShares]) -> Sequence[Tree]:
        """Received trees with their shares gathered by the tensor-parallel group of a compute."""
        group = stage.ranks[self._places[stage.index][0]]
        if len(group) == 1:
            return cast("Sequence[Tree]", trees)
        return gather_shares(trees, self._transport, group)

    def _argument(
        self, source: Source, stage: Stage, inputs: Mapping[int, Tree], start: int, stop: int
    ) -> Tree:
        if source.edge is not None:
            return inputs[source.edge]
        return None if source.field is None else self._field(stage.task, source.field, start, stop)

    def _field(self, task: str, name: str, start: int, stop: int) -> Tree:
        return self._prepare(self._field_on_host(task, name, start, stop))

    def _field_on_host(self, task: str, name: str, start: int, stop: int) -> Tree:
        return self._data[task].get(name, start, stop)

    def _hosted_loss(
        self,
        loss: PerSampleLoss,
        output: Tree,
        inputs: Mapping[int, Tree],
        stage: Stage,
        start: int,
        stop: int,
    ) -> Tensor:
        """This micro-batch's weighted term of a per-sample loss."""
        arguments = [
            element_of(output, source.element, stage.module)
            if source.own
            else self._argument(source, stage, inputs, start, stop)
            for source in loss.inputs
        ]
        self._seeds.enter(self._step, f"losses.{loss.name}", 0, start)
        first = self._places[stage.index][1] == 0
        module = self._model.losses[loss.name]
        # Of a tensor-parallel group only the first rank counts for the loss's parameters.
        with frozen([] if first else list(module.parameters())):
            value = module(*arguments)
        term = widened(value) * self._reductions.scale(loss, stop - start)
        if first:
            self._terms[loss.index].add_(term.detach())
        return term

    def _backward(self, stage: Stage, mb: int) -> None:
        live = self._live[stage.index, mb]
        live.messages = self._mailbox.take_backward(stage, mb)
        scale = self._precision.gradient_scale
        grads = {t: torch.full_like(t, scale) for t in live.losses if t.requires_grad}
        grads |= self._output_gradients(stage, mb, live)
        with nullcontext() if live.later is None else live.later.collect():
            if grads:
                torch.autograd.backward(list(grads), list(grads.values()))
        if live.later is not None:
            self._later[stage.index, mb] = live.later
        live.output, live.losses, live.messages = None, [], []
        live.sends_left = self._sends[Op.SEND_B, stage.index, mb]
        if not live.sends_left:
            del self._live[stage.index, mb]

    def _output_gradients(self, stage: Stage, mb: int, live: _Live) -> dict[Tensor, Tensor]:
        """Floating outputs that need a gradient, each with the sum over its consumers."""
        start, _ = stage.microbatches[self._places[stage.index][0]][mb]
        sums: dict[Tensor, Tensor] = {}
        if live.messages:
            cuts: list[tuple[Tree, int, Tree]] = []
            for message, _ in live.messages:
                edge = self._program.edges[message.edge]
                tree = element_of(live.output, edge.element, stage.module)
                low, high = message.start - start, message.stop - start
                cuts.append((tree, low, slice_samples(tree, low, high)))
            waited = zip(live.messages, cuts, strict=True)
            received = [receive.wait(cut[2]) for (_, receive), cut in waited]
            self._mailbox.release(self._position)
            given = self._gather_shares(stage, received)
            for cut, gradients in zip(cuts, given, strict=True):
                _add_gradients(sums, *cut, cast("tuple[Tensor | None, ...]", gradients))
        for element, low, high, grad in self._sync.gradients(stage, mb):
            tree = element_of(live.output, element, stage.module)
            part = slice_samples(tree, low - start, high - start)
            _add_gradients(sums, tree, low - start, part, [grad])
        return sums

    def _message(self, message: Message) -> None:
        if not message.is_send:
            self._mailbox.post_receive(message)
            return
        live = self._live[message.stage, message.mb]
        after_backward = message.op == Op.SEND_B
        tree = live.inputs[message.edge] if after_backward else live.output
        self._mailbox.post_send(message, tree, self._position)
        live.sends_left -= 1
        has_backward = self._program.stages[message.stage].has_backward
        if not live.sends_left and (after_backward or not has_backward):
            del self._live[message.stage, message.mb]

    def _synchronise(self, instruction: Sync) -> None:
        if instruction.op == Op.SYNC_START:
            self._sync.start(instruction.loss, instruction.batch)
        else:
            self._sync.wait(instruction.loss, instruction.batch)

    def _collective(self, instruction: Collective) -> None:
        if instruction.op == Op.REDUCE:
            self._reductions.reduce(instruction.index)
        elif instruction.op == Op.REDUCE_START:
            self._reductions.start(instruction.index)
        else:
            self._reductions.count(instruction.index, self._field_on_host)

    def _finish(self, _: Step) -> None:
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
        leaves = [(tree, part, first)]
    else:
        leaves = zip(float_leaves(tree), float_leaves(part), float_rows(tree, first), strict=True)
    for (leaf, cut, first_row), given in zip(leaves, grads, strict=True):
        if given is None or not leaf.requires_grad:
            continue
        grad = given if given.dtype == leaf.dtype else given.to(leaf.dtype)
        if leaf not in sums:
            if cut.shape == leaf.shape:
                sums[leaf] = grad
                continue
            sums[leaf] = torch.zeros_like(leaf)
        whole = sums[leaf]
        rows = whole if cut.shape == leaf.shape else whole[first_row : first_row + len(cut)]
        rows += grad
