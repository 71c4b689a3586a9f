"""The reference: one process's step, which every plan must equal, without instructions.

Whole modules run on the whole batch in one autograd graph. Only the cut into micro-batches
is the plan's, so that dropout, which is seeded by micro-batch, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree, cat_samples, element_of, map_tensors, slice_samples
from mmlaunch.data.loader import Field, StepLoader
from mmlaunch.data.task_data import open_dataset, step_order
from mmlaunch.execute.blocks import frozen
from mmlaunch.model.precision import TrainingPrecision, widened
from mmlaunch.model.seeds import Seeds
from mmlaunch.model.whole_modules import build_owner, trainable_blocks
from mmplan.program.model import CrossSampleLoss, PerSampleLoss, Program, Source, Stage
from mmplan.schema.factories import build_loss, dtype_of, tied_parameters
from mmplan.schema.protocols import as_counting
from mmplan.schema.workload import Workload, resolve_tasks


class Reference:
    """All modules of a program in one process, on the CPU.

    Args:
        workload: gives factories, data and training type.
        folder: the workload file's folder.
        program: gives the graph of modules and the micro-batches' sample ranges.
    """

    def __init__(self, *, workload: Workload, folder: Path, program: Program) -> None:
        self._workload, self._folder, self._program = workload, folder, program
        trains = trainable_blocks(program)
        owners = dict.fromkeys(stage.owner for stage in program.stages)
        self.modules = {o: build_owner(workload, o, folder, trains) for o in owners}
        self.losses = {
            name: build_loss(workload, name, folder)
            for name in dict.fromkeys(loss.name for loss in program.losses)
        }
        self._dtype = dtype_of(workload.train.precision)
        self._seeds = Seeds(workload.train.seed, torch.device("cpu"))
        self._precision = TrainingPrecision(workload.train.precision, torch.device("cpu"))
        self._loaders = {
            name: self._loader(name) for name in dict.fromkeys(s.task for s in program.stages)
        }

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by the name under which it is saved."""
        found: dict[str, nn.Parameter] = {}
        for owner, module in self.modules.items():
            aliases = tied_parameters(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name not in aliases:
                    found[f"{owner}.{name}"] = parameter
        for name, loss in self.losses.items():
            found.update({f"losses.{name}.{n}": p for n, p in loss.named_parameters()})
        return found

    def step(self, step: int = 0) -> float:
        """Loss of the next batch of every task; gradients are added to ``.grad``."""
        total: Any = torch.zeros((), dtype=torch.float64)
        for task, loader in self._loaders.items():
            fields = next(loader).fields
            data = {name: map_tensors(value, self._cast) for name, value in fields.items()}
            total = total + self._task_loss(task, data, step)
        if total.requires_grad:
            total.backward()
        return float(total.detach())

    def _task_loss(self, task: str, data: Mapping[str, Tree], step: int) -> Tensor:
        outputs: dict[int, Tree] = {}
        for stage in self._program.stages:
            if stage.task == task:
                outputs[stage.index] = self._run_stage(stage, data, outputs, step)
        total = torch.zeros((), dtype=torch.float64)
        for loss in self._program.losses:
            if loss.task == task:
                if isinstance(loss, CrossSampleLoss):
                    value = self._cross(loss, data, outputs, step)
                else:
                    value = self._per_sample(loss, data, outputs, step)
                total = total + float(loss.weight) * value
        return total

    def _run_stage(
        self, stage: Stage, data: Mapping[str, Tree], outputs: Mapping[int, Tree], step: int
    ) -> Tree:
        arguments = [self._argument(source, data, outputs) for source in stage.inputs]
        spans = sorted(span for replica in stage.microbatches for span in replica)
        parts: list[Tree] = []
        off = [
            p
            for b in range(*stage.blocks)
            if not any(low <= b < high for low, high in stage.trainable)
            for p in self.modules[stage.owner][b].parameters()
            if p.requires_grad
        ]
        for start, stop in spans:
            given = tuple(slice_samples(argument, start, stop) for argument in arguments)
            for block in range(*stage.blocks):
                self._seeds.enter(step, stage.module, block, start)
                with frozen(off), self._precision.compute(keep_casts=False):
                    given = (self.modules[stage.owner][block](*given),)
            parts.append(given[0])
        return cat_samples(parts)

    def _argument(
        self, source: Source, data: Mapping[str, Tree], outputs: Mapping[int, Tree]
    ) -> Tree:
        if source.edge is not None:
            edge = self._program.edges[source.edge]
            return element_of(outputs[edge.producer], edge.element, "module")
        return None if source.field is None else data[source.field]

    def _cross(
        self,
        loss: CrossSampleLoss,
        data: Mapping[str, Tree],
        outputs: Mapping[int, Tree],
        step: int,
    ) -> Tensor:
        """Mean over the sync batches."""
        size = loss.sync_batch
        batch = self._program.batches[loss.task]
        values: list[Tensor] = []
        for start in range(0, batch, size):
            arguments: list[Tree] = []
            for item in loss.inputs:
                tree = None if item.field is None else data[item.field]
                if item.stage is not None:
                    tree = element_of(outputs[item.stage], item.element, "module")
                part = slice_samples(tree, start, start + size)
                arguments.append(map_tensors(part, widened))
            self._seeds.enter(step, f"losses.{loss.name}", 0, start)
            values.append(self.losses[loss.name](*arguments))
        return torch.stack(values).mean()

    def _per_sample(
        self, loss: PerSampleLoss, data: Mapping[str, Tree], outputs: Mapping[int, Tree], step: int
    ) -> Tensor:
        """Mean over the batch, or the sum over the batch by its count.

        Computed on the whole batch at once; only a loss that draws random numbers is computed
        on the plan's micro-batches, each under its seed.
        """
        arguments = [
            element_of(outputs[loss.host], source.element, "module")
            if source.own
            else self._argument(source, data, outputs)
            for source in loss.inputs
        ]
        counting = as_counting(self.losses[loss.name])
        batch = self._program.batches[loss.task]
        value, random = self._loss_of(loss, arguments, (0, batch), step)
        if random:
            spans = [s for r in self._program.stages[loss.host].microbatches for s in r]
            value = torch.zeros((), dtype=torch.float64)
            for start, stop in sorted(spans):
                part = [slice_samples(argument, start, stop) for argument in arguments]
                share = (stop - start) / batch if counting is None else 1.0
                value = value + share * self._loss_of(loss, part, (start, stop), step)[0]
        if counting is None:
            return value
        fields = {s.field: data[s.field] for s in loss.inputs if s.field is not None}
        return value / max(float(counting.count(cast("dict[str, Field]", fields)).sum()), 1.0)

    def _loss_of(
        self, loss: PerSampleLoss, arguments: list[Tree], samples: tuple[int, int], step: int
    ) -> tuple[Tensor, bool]:
        """Value of a per-sample loss on some samples, and whether it drew random numbers."""
        self._seeds.enter(step, f"losses.{loss.name}", 0, samples[0])
        seeded = torch.get_rng_state()
        with self._precision.compute(keep_casts=False):
            value = widened(cast(Tensor, self.losses[loss.name](*arguments)))
        return value, not torch.equal(seeded, torch.get_rng_state())

    def _loader(self, task: str) -> StepLoader:
        view = resolve_tasks(self._workload)[task]
        dataset = open_dataset(self._workload, view, self._folder)
        fields = {
            source.field
            for stage in self._program.stages
            if stage.task == task
            for source in stage.inputs
        }
        for loss in self._program.losses:
            if loss.task == task:
                fields |= {source.field for source in loss.inputs}
        return StepLoader(
            dataset,
            batch=view.batch,
            seed=self._workload.train.seed,
            ranges=[(0, view.batch)],
            fields={name for name in fields if name is not None},
            order=step_order(self._program, task, dataset, self._workload),
        )

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
