"""Evaluation while training: the plan's forward passes on held-out data, on all ranks.

Nothing of training changes by it: weights, gradients, random numbers and the stream of samples are
the same with and without it, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from mmlaunch.comm.batches import Tree
from mmlaunch.comm.transport import Transport
from mmlaunch.data.task_data import TaskData
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.execute.executor import Executor
from mmlaunch.execute.gathered_blocks import GatheredBlocks
from mmlaunch.execute.reductions import Reductions
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.precision import TrainingPrecision
from mmlaunch.model.seeds import Seeds
from mmlaunch.model.shape_inference import infer_shapes
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.errors import InvalidInputError
from mmplan.program.communicators import Channels, communicators
from mmplan.program.evaluation import evaluation_program
from mmplan.program.model import Loss
from mmplan.schema.evaluation import TOTAL
from mmplan.schema.factories import build_loss
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, exact, resolve_tasks, value_name, with_metrics
from mmplan.sources.orders import epoch_length
from mmplan.wording import counted


class Evaluation:
    """Runs the forward passes of a plan on held-out data.

    Args:
        plan: of the training.
        workload: with ``train.eval``.
        folder: the workload file's folder.
        model: this rank's, as it is trained.
        transport: moves tensors between ranks.
        seeds: of the training; its generators draw on as if nothing had been evaluated.
        precision: the type in which blocks compute.
        gathered: of the training.
        prepare: moves a data field to the device and its training type.
        heartbeat: told of every instruction.
        num_workers: data loading processes of this rank.

    Attributes:
        program: forward passes, losses and metrics.
        batches: of each task, that an evaluation takes.

    Raises:
        InvalidInputError: a metric or the data cannot be made, or there is less than one batch.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        workload: Workload,
        folder: Path,
        model: LocalModel,
        transport: Transport,
        seeds: Seeds,
        precision: TrainingPrecision,
        gathered: GatheredBlocks,
        prepare: Callable[[Tree], Tree],
        heartbeat: Heartbeat,
        num_workers: int = 0,
    ) -> None:
        spec = workload.train.eval
        if spec is None:
            raise InvalidInputError("the workload has no train.eval")
        self._transport, self._seeds, self._heartbeat = transport, seeds, heartbeat
        self.program = evaluation_program(plan, spec.metrics)
        self._names = [value_name(workload, x.task, x.name) for x in self.program.losses]
        # Of the losses, as training adds them up.
        self._weights = {
            value_name(workload, name, loss): float(
                exact(task.weight) * exact(task.losses[loss].weight)
            )
            for name, task in plan.tasks.items()
            for loss in task.losses
        }
        workload = with_metrics(workload, spec)
        channels = Channels(self.program)
        heartbeat.phase("joining")
        transport.prepare(communicators(self.program), channels.links)
        self._model = _with_losses(model, workload, folder, self.program.losses, transport)
        heartbeat.phase("loading data")
        tasks = resolve_tasks(workload)
        self._data = TaskData(
            program=self.program,
            workload=workload,
            folder=folder,
            tasks={name: view for name, view in tasks.items() if name in plan.tasks},
            rank=transport.rank,
            num_workers=num_workers,
            pin_memory=transport.device.type == "cuda",
            field="train.eval.data",
        )
        self.batches = self._number_of_batches(spec.batches)
        specs = infer_shapes(
            self.program,
            self._model,
            transport,
            data=lambda task: self._data.of_task(task, 0),
            prepare=prepare,
            precision=precision,
            sequence_parallel=plan.training.sequence_parallel,
        )
        self._data.close()
        self._executor = Executor(
            program=self.program,
            model=self._model,
            transport=transport,
            specs=specs,
            channels=channels,
            blocks=StageBlocks(self._model, seeds, frozenset(), gathered=gathered),
            seeds=seeds,
            precision=precision,
            reductions=Reductions(self.program, self._model, transport),
            prepare=prepare,
            heartbeat=heartbeat,
        )

    def _number_of_batches(self, asked: int | None) -> int:
        """As many as asked for, but no more than the shortest data have; alike on all ranks."""
        own = {n: epoch_length(d) for n, d in self._data.datasets.items()}
        self._lengths = {n: x for of in self._transport.gather_objects(own) for n, x in of.items()}
        least = min(self._lengths[n] // self.program.batches[n] for n in self._lengths)
        return least if asked is None else min(asked, least)

    @property
    def left_out(self) -> str | None:
        """Which samples no evaluation takes, in words; None where it takes all."""
        taken = {n: self.batches * self.program.batches[n] for n in self._lengths}
        words = [
            f"{taken[name]:,} of {counted(length, 'sample')}"
            + (f" of task {name}" if len(taken) > 1 else "")
            for name, length in self._lengths.items()
            if taken[name] < length
        ]
        return f"each evaluation takes {', '.join(words)}" if words else None

    def run(self, step: int) -> dict[str, float]:
        """Losses and metrics by name, means over the batches; the same on all ranks.

        Args:
            step: of training, for messages.
        """
        total = torch.zeros(len(self.program.losses), dtype=torch.float64)
        total = total.to(self._transport.device)
        with torch.no_grad(), self._seeds.kept(), _evaluating(self._modules()):
            for batch in range(self.batches):
                self._heartbeat.phase("evaluating", step)
                # Random numbers are those of this batch in every evaluation.
                terms, _ = self._executor.run(batch, self._data.step(batch))
                total += terms
        self._data.close()
        self._heartbeat.phase("evaluating", step)
        self._transport.all_reduce(total, tuple(range(self._transport.world_size)))
        means = (total / self.batches).tolist()
        values = dict(zip(self._names, means, strict=True))
        return {TOTAL: sum(w * values[name] for name, w in self._weights.items()), **values}

    def _modules(self) -> list[nn.Module]:
        return [*self._model.blocks.values(), *self._model.losses.values()]

    def close(self) -> None:
        """End the loading of data."""
        self._data.close()


def _with_losses(
    model: LocalModel,
    workload: Workload,
    folder: Path,
    losses: Iterable[Loss],
    transport: Transport,
) -> LocalModel:
    """The model with the metrics beside its losses; its parameters are the same ones."""
    found = copy.copy(model)
    found.losses = dict(model.losses)
    # In evaluation mode other blocks may share out their rows, and metrics take whole logits.
    found.row_cuts, found.row_groups, found.own_logits = {}, {}, {}
    for loss in losses:
        if transport.rank in loss.ranks and loss.name not in found.losses:
            made = build_loss(workload, loss.name, folder, field=f"train.eval.metrics.{loss.name}")
            found.losses[loss.name] = made.to(transport.device)
    return found


@contextmanager
def _evaluating(modules: Iterable[nn.Module]) -> Generator[None]:
    """Context in which modules are in evaluation mode; each goes back to its own after it."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
