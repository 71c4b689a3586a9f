"""The reference: a step as one process takes it, from the workload and plain autograd alone.

What is computed stands in the workload: modules and their inputs, frozen blocks, losses and their
weights, the order of the data. Of the program only the samples at which micro-batches begin are
read, since dropout is seeded by them, and the names of the tasks.

The helpers below repeat in a few lines what the executor has elsewhere: the order of the data,
the seeds, the cuts of a batch, the training type, the frozen parameters, the update. Shared ones
would be wrong alike on both sides of a comparison.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmlaunch.checkpoint.exported_weights import load_initial
from mmplan.program.model import PerSampleLoss, Program
from mmplan.program.samples import SampleRange
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.workload import InputSource, TaskView, TrainSpec, Workload, resolve_tasks

Value: TypeAlias = "Tensor | Ragged | tuple[Value, ...] | None"
# (task, module, block), and (task, "losses.NAME", 0), to the samples of each micro-batch.
Spans = Mapping[tuple[str, str, int], Sequence[SampleRange]]

_BITS = (1 << 64) - 1
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def microbatch_spans(program: Program) -> Spans:
    """The micro-batches of every block, and of every loss that a stage computes."""
    found: dict[tuple[str, str, int], Sequence[SampleRange]] = {}
    of_stage = [
        sorted(s for replica in stage.microbatches for s in replica) for stage in program.stages
    ]
    for stage, spans in zip(program.stages, of_stage, strict=True):
        for block in range(*stage.blocks):
            found[stage.task, stage.module, block] = spans
    for loss in program.losses:
        if isinstance(loss, PerSampleLoss):
            found[loss.task, f"losses.{loss.name}", 0] = of_stage[loss.host]
    return found


class Reference:
    """All modules of some tasks in one process, on the CPU.

    Args:
        workload: says all that is computed.
        folder: the workload file's folder.
        program: gives the samples of micro-batches, and which tasks there are.

    Attributes:
        modules: whole, by the module that owns the parameters.
        losses: by name.
        tasks: of the program, as the workload has them.
        values: of the last step's losses, unweighted, by task and name.
    """

    def __init__(self, *, workload: Workload, folder: Path, program: Program) -> None:
        self._train = workload.train
        self.tasks = {n: v for n, v in resolve_tasks(workload).items() if n in program.batches}
        self._owner = {n: spec.share or n for n, spec in workload.modules.items()}
        used = dict.fromkeys(m for view in self.tasks.values() for m in view.modules)
        owners = dict.fromkeys(self._owner[name] for name in used)
        self.modules = {name: build_module(workload, name, folder) for name in owners}
        for name, module in self.modules.items():
            init = workload.modules[name].init
            if init is not None:
                load_initial(module, folder / init, name)
        self._freeze()
        self._weights = {n: spec.weight for n, spec in workload.losses.items()}
        names = dict.fromkeys(n for view in self.tasks.values() for n in view.loss_inputs)
        self.losses = {name: build_loss(workload, name, folder) for name in names}
        self._data = {n: _Samples(workload, v, folder) for n, v in self.tasks.items()}
        self.take_microbatches(program)
        # Blocks that drew random numbers: their masks belong to the plan's micro-batches.
        self._random: set[tuple[str, str, int]] = set()
        self._cut_otherwise = False
        self._batch: dict[str, dict[str, Value]] = {}
        self._step = 0
        self.values: dict[tuple[str, str], float] = {}

    @property
    def draws(self) -> bool:
        """Whether any block drew random numbers so far."""
        return bool(self._random)

    def take_microbatches(self, program: Program) -> None:
        """Go on with another program's micro-batches, of the same tasks."""
        self._spans = microbatch_spans(program)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by the name under which it is saved: the first it has."""
        found: dict[str, nn.Parameter] = {}
        for owner, module in self.modules.items():
            found.update({f"{owner}.{name}": p for name, p in module.named_parameters()})
        for name, loss in self.losses.items():
            found.update({f"losses.{name}.{n}": p for n, p in loss.named_parameters()})
        return found

    def indices(self, task: str, step: int) -> list[int]:
        """The dataset indices of a step's batch, in the documented order."""
        return self._data[task].indices(step)

    def may_reorder(self, task: str) -> bool:
        """Whether a plan may order the samples of a sync batch by their work."""
        return self._train.reorder and callable(getattr(self._data[task].dataset, "work", None))

    def step(self, step: int = 0, order: Mapping[str, Sequence[int]] | None = None) -> float:
        """Loss of a step; gradients are added to ``.grad``.

        Args:
            step: its number.
            order: by task the dataset indices of its batch; default: the documented ones.
        """
        self._step = step
        self._batch = {
            task: data.load(step, (order or {}).get(task) or data.indices(step))
            for task, data in self._data.items()
        }
        return self._run()

    @contextmanager
    def rounded_otherwise(self, draws: torch.Generator) -> Generator[None]:
        """Context in which :meth:`again` rounds otherwise, by as much as any order of sums does.

        Every weight moves by one unit in its last place at most, of the type of the blocks, and
        blocks without random numbers take half micro-batches, so that gradients add up in
        another order.
        """
        kept = {name: p.detach().clone() for name, p in self.named_parameters().items()}
        narrow = _NARROW.get(self._train.precision)
        with torch.no_grad():
            for p in self.named_parameters().values():
                half_unit = torch.finfo(narrow or p.dtype).eps / (4 if narrow else 1)
                draw = torch.rand(p.shape, generator=draws, dtype=p.dtype)
                p.mul_(1 + half_unit * (2 * draw - 1 if narrow else (3 * draw).floor() - 1))
        self._cut_otherwise = True
        try:
            yield
        finally:
            self._cut_otherwise = False
            with torch.no_grad():
                for name, p in self.named_parameters().items():
                    p.copy_(kept[name])

    def again(self) -> float:
        """The last step's batch once more; gradients are added to ``.grad``."""
        return self._run()

    def _run(self) -> float:
        total: Any = torch.zeros((), dtype=torch.float64)
        for task in self.tasks.values():
            total = total + task.weight * self._task_loss(task)
        if total.requires_grad and self._train.precision == "fp16":
            self._scaled_backward(total)
        elif total.requires_grad:
            total.backward()
        return float(total.detach())

    def _scaled_backward(self, total: Tensor) -> None:
        """Gradients of the loss times a scale, over it; a smaller scale until none overflows."""
        trained = [p for p in self.named_parameters().values() if p.requires_grad]
        spec, scale = self._train.loss_scale, self._train.loss_scale.initial
        while True:
            found = torch.autograd.grad(
                total * scale, trained, retain_graph=True, allow_unused=True
            )
            if scale == 1.0 or all(g is None or g.isfinite().all() for g in found):
                break
            scale = max(1.0, scale / spec.factor)
        for parameter, grad in zip(trained, found, strict=True):
            if grad is not None:
                before = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = before + grad / scale

    def _freeze(self) -> None:
        """Turn off the gradients of blocks that no task trains."""
        trains: set[tuple[str, int]] = set()
        for view in self.tasks.values():
            for module in view.modules:
                owner = self._owner[module]
                trains |= {
                    (owner, block)
                    for block in range(len(self.modules[owner]))
                    if not _is_frozen(view, module, block)
                }
        for owner, module in self.modules.items():
            for block, child in enumerate(module):
                if (owner, block) not in trains:
                    child.requires_grad_(False)

    def _task_loss(self, task: TaskView) -> Any:
        values: dict[str, Value] = {}
        for module, sources in task.inputs.items():
            values[module] = self._module(
                task, module, [self._value(task, s, values) for s in sources]
            )
        total: Any = torch.zeros((), dtype=torch.float64)
        for name, sources in task.loss_inputs.items():
            arguments = [self._value(task, source, values) for source in sources]
            if name in task.sync_batches:
                value = self._cross_sample(task, name, arguments)
            else:
                value = self._per_sample(task, name, sources, arguments)
            self.values[task.name, name] = float(value.detach())
            total = total + self._weights[name] * value
        return total

    def fields(self, task: str) -> Mapping[str, Value]:
        """The last step's data of a task."""
        return self._batch[task]

    def inputs_of(self, task: str, module: str) -> list[Value]:
        """A module's inputs for the batch of the last step, without their graph."""
        view, values = self.tasks[task], dict[str, Value]()
        with torch.no_grad():
            for name, sources in view.inputs.items():
                arguments = [self._value(view, source, values) for source in sources]
                if name == module:
                    return arguments
                values[name] = self._module(view, name, arguments)
        raise KeyError(module)

    def _value(self, task: TaskView, source: InputSource, values: Mapping[str, Value]) -> Value:
        if source.field is not None:
            return self._batch[task.name][source.field]
        if source.module is None:
            return None
        value: Any = values[source.module]
        return value if source.element is None else value[source.element]

    def _module(self, task: TaskView, module: str, arguments: Sequence[Value]) -> Value:
        """The output for the whole batch, joined from micro-batches."""
        given = tuple(arguments)
        blocks = self.modules[self._owner[module]]
        for spans, run in groupby(
            range(len(blocks)), lambda block: self._spans_of(task, module, block)
        ):
            same, parts = list(run), list[Value]()
            for start, stop in spans:
                part = tuple(_samples(item, start, stop) for item in given)
                for block in same:
                    part = (self._block(task, module, block, part, start),)
                parts.append(part[0])
            given = (_joined(parts),)
        return given[0]

    def _spans_of(self, task: TaskView, module: str, block: int) -> list[SampleRange]:
        key = task.name, module, block
        spans = list(self._spans.get(key, [(0, task.batch)]))
        if not self._cut_otherwise or key in self._random:
            return spans
        halves = [((a, (a + b) // 2), ((a + b) // 2, b)) for a, b in spans]
        return [span for pair in halves for span in pair if span[0] < span[1]]

    def _block(
        self, task: TaskView, module: str, index: int, arguments: Sequence[Value], first: int
    ) -> Value:
        block = self.modules[self._owner[module]][index]
        before = self._seed(module, index, first)
        with self._compute():
            if _is_frozen(task, module, index):
                # Another task may train it, or another block that shares a parameter.
                constants = {name: p.detach() for name, p in block.named_parameters()}
                value = functional_call(block, constants, tuple(arguments))
            else:
                value = block(*arguments)
        if not torch.equal(before, torch.get_rng_state()):
            self._random.add((task.name, module, index))
        return value

    def _cross_sample(self, task: TaskView, name: str, arguments: Sequence[Value]) -> Tensor:
        """Mean over the sync batches."""
        size, values = task.sync_batches[name], list[Tensor]()
        for start in range(0, task.batch, size):
            self._seed(f"losses.{name}", 0, start)
            parts = [_mapped(_samples(item, start, start + size), _wide) for item in arguments]
            values.append(self.losses[name](*parts))
        return torch.stack(values).mean()

    def _per_sample(
        self, task: TaskView, name: str, sources: Sequence[InputSource], arguments: Sequence[Value]
    ) -> Tensor:
        """Mean over the samples, or the sum over them by the count of targets.

        On the whole batch at once; a loss that draws random numbers, on the micro-batches.
        """
        counts = getattr(self.losses[name], "count", None)
        value, is_random = self._loss_of(name, arguments, 0)
        if is_random:
            value = torch.zeros((), dtype=torch.float64)
            for start, stop in self._spans.get((task.name, f"losses.{name}", 0), [(0, task.batch)]):
                part = [_samples(item, start, stop) for item in arguments]
                share = 1.0 if counts is not None else (stop - start) / task.batch
                value = value + share * self._loss_of(name, part, start)[0]
        if counts is None:
            return value
        fields = {
            s.field: a for s, a in zip(sources, arguments, strict=True) if s.field is not None
        }
        return value / max(float(counts(fields).sum()), 1.0)

    def _loss_of(self, name: str, arguments: Sequence[Value], first: int) -> tuple[Tensor, bool]:
        """The loss on some samples, and whether it drew random numbers."""
        before = self._seed(f"losses.{name}", 0, first)
        with self._compute():
            value = _wide(self.losses[name](*arguments))
        return value, not torch.equal(before, torch.get_rng_state())

    def _compute(self) -> AbstractContextManager[Any]:
        narrow = _NARROW.get(self._train.precision)
        if narrow is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=narrow, cache_enabled=False)

    def _seed(self, name: str, index: int, first_sample: int) -> Tensor:
        """Seed the generator for one block on one micro-batch; returns its state."""
        digest = hashlib.sha256(f"{self._train.seed}:{name}:{index}".encode()).digest()
        seed = _mixed(_mixed(int.from_bytes(digest[:8], "big") + self._step) + first_sample)
        torch.default_generator.manual_seed(seed >> 1)
        return torch.get_rng_state()


class ReferenceUpdate:
    """The update of whole parameters in one process: clipping, schedule, the optimizer.

    Args:
        train: the workload's.
        parameters: by name.
    """

    def __init__(self, train: TrainSpec, parameters: Mapping[str, nn.Parameter]) -> None:
        self._train = train
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            groups.setdefault(self._group(name), []).append(parameter)
        extra = [*(group.optimizer_args for group in train.groups), {}]
        kind: Any = getattr(torch.optim, train.optimizer)
        self._optimizer: Any = kind(
            [{"params": own, **extra[group]} for group, own in groups.items()],
            **train.optimizer_args,
        )
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def _group(self, name: str) -> int:
        """Index of the first group that takes a parameter; -1 for none."""
        found = (i for i, group in enumerate(self._train.groups) if fnmatchcase(name, group.match))
        return next(found, -1)

    def apply(self, step: int) -> float:
        """Update by the gradients in ``.grad``, which are gone afterwards.

        Returns:
            The norm of all gradients together, before they were clipped.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        largest = self._train.clip_grad_norm
        if largest is not None and norm + 1e-6 > largest:
            for gradient in gradients:
                gradient.mul_(largest / (norm + 1e-6))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._factor(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _factor(self, step: int) -> float:
        plan = self._train.schedule
        if step < plan.warmup_steps:
            return (step + 1) / plan.warmup_steps
        if plan.kind == "constant":
            return 1.0
        length = (plan.total_steps or self._train.steps) - plan.warmup_steps
        done = min(1.0, (step - plan.warmup_steps) / length) if length > 0 else 1.0
        fallen = done if plan.kind == "linear" else (1.0 - math.cos(math.pi * done)) / 2
        return 1.0 - (1.0 - plan.final_ratio) * fallen

    def state(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter."""
        parameter = self._parameters.get(name)
        return {} if parameter is None else self._optimizer.state.get(parameter, {})


class _Samples:
    """The batches of one task, loaded as the data's documentation says."""

    def __init__(self, workload: Workload, task: TaskView, folder: Path) -> None:
        self._batch, self._seed = task.batch, workload.train.seed
        self._dtype = torch.float64 if workload.train.precision == "fp64" else torch.float32
        sources = [s for own in (*task.inputs.values(), *task.loss_inputs.values()) for s in own]
        self._fields = list(dict.fromkeys(s.field for s in sources if s.field is not None))
        field = "data" if task.data == workload.data else f"tasks.{task.name}.data"
        # A session refuses a task without data.
        self.dataset: Any = task.data and build_dataset(
            task.data, folder, seed=self._seed, field=field
        )

    def indices(self, step: int) -> list[int]:
        """Batch s mod n of epoch s div n, whose order is its own or drawn from seed + epoch."""
        epoch, index = self._place(step)
        if hasattr(self.dataset, "epoch_order"):
            order = self.dataset.epoch_order(self._seed, epoch).tolist()
        else:
            draws = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(len(self.dataset), generator=draws).tolist()
        return order[index * self._batch : (index + 1) * self._batch]

    def _place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the number of its batch there."""
        samples = getattr(self.dataset, "epoch_length", None) or len(self.dataset)
        return divmod(step, samples // self._batch)

    def load(self, step: int, indices: Sequence[int]) -> dict[str, Value]:
        """The fields of a batch."""
        if not self._fields:
            return {}
        epoch, _ = self._place(step)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        samples: list[Any] = []
        for index in indices:
            self._seed_sample(epoch, index)
            samples.append(self.dataset[index])
        self._seed_sample(epoch, indices[0])
        if hasattr(self.dataset, "collate"):
            batched = self.dataset.collate(samples)
        else:
            batched = {name: _stacked([s[name] for s in samples]) for name in self._fields}
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
        return {name: _mapped(batched[name], self._cast) for name in self._fields}

    def _seed_sample(self, epoch: int, index: int) -> None:
        """A sample's random numbers follow from seed, epoch and index."""
        text = f"{self._seed}/{epoch}/{index}".encode()
        value = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        random.seed(value)
        np.random.seed(value % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(value)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _is_frozen(task: TaskView, module: str, block: int) -> bool:
    frozen = task.frozen[module]
    return frozen if isinstance(frozen, bool) else any(a <= block < b for a, b in frozen)


def _mixed(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)


def _stacked(values: Sequence[Any]) -> Value:
    if isinstance(values[0], Ragged):
        rows, lengths = zip(*values, strict=True)
        return Ragged(torch.cat(rows), torch.cat(lengths))
    return torch.stack(list(values))


def _samples(value: Value, start: int, stop: int) -> Value:
    """Samples [start, stop)."""
    if isinstance(value, Ragged):
        ends = [0, *value.lengths.cumsum(0).tolist()]
        return Ragged(value.values[ends[start] : ends[stop]], value.lengths[start:stop])
    if isinstance(value, tuple):
        return tuple(_samples(item, start, stop) for item in value)
    return None if value is None else value[start:stop]


def _joined(parts: Sequence[Value]) -> Value:
    """One batch of several in order."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(cast("list[Tensor]", list(parts)))
    columns = [_joined(column) for column in zip(*cast("Any", parts), strict=True)]
    return Ragged(*cast("Any", columns)) if isinstance(parts[0], Ragged) else tuple(columns)


def _mapped(value: Value, change: Any) -> Value:
    """The value with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if value is None:
        return None
    items = [_mapped(item, change) for item in value]
    return Ragged(*cast("Any", items)) if isinstance(value, Ragged) else tuple(items)


def _wide(tensor: Tensor) -> Tensor:
    """Losses are summed in no narrower type than float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
