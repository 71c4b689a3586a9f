"""A workload tried on two samples, before devices and processes are asked for anything.

Data, modules, losses and their backward run once; the optimizer is made with its arguments. Small
models run on the CPU. Large ones run without memory, on torch's fake tensors: these have shapes and
types and no values.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.ragged import Ragged
from mmplan.schema.factories import (
    build_dataset,
    build_loss,
    build_module,
    compute_dtype,
    dtype_of,
    frozen_blocks,
)
from mmplan.schema.optimizers import check_optimizer
from mmplan.schema.protocols import trains
from mmplan.schema.workload import (
    DataSpec,
    InputSource,
    TaskView,
    Workload,
    input_sources,
    resolve_tasks,
    with_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import FakeTensorMode

PartT = TypeVar("PartT", bound="nn.Module")

# Some modules squeeze a batch of one away, and losses across samples need several.
SAMPLES = 2
# Ragged samples may have no row of a modality: the fullest of so many are tried.
_LOOKED_AT = 8
# Parameters that a core initialises and runs in about a second; more are tried without memory.
_MOST_REAL = 20_000_000
# Errors of code that runs on another device than the CPU only.
_ELSEWHERE = re.compile("cuda|triton|flash", re.IGNORECASE)
# Errors of code that looks at values, which fake tensors do not have.
_NO_VALUES = re.compile(
    r"fake ?tensor|\bmeta\b|register_meta|data pointer|numpy|unbacked|symbolic", re.IGNORECASE
)


class _CannotBeTriedError(Exception):
    """A part needs values or a device that a dry run does not have; the text says which part."""


def dry_run(
    workload: Workload,
    folder: Path,
    *,
    tasks: Collection[str] | None = None,
    sharded: bool = False,
    on_meta: bool = False,
    sizes: Mapping[str, float] | None = None,
) -> list[str]:
    """Try a workload; it imports the workload's code, whose output goes to stderr.

    Args:
        workload: what to try.
        folder: the workload file's folder.
        tasks: only these.
        sharded: whether a rank may hold a part of a parameter.
        on_meta: whether all factories must build on the meta device, as analytic profiles do.
        sizes: numbers of parameters, by module; of the others they are counted.

    Returns:
        What could not be tried, in words.

    Raises:
        InvalidInputError: a factory, the data, a block, a loss or the optimizer is wrong; names
            the field of the workload.
    """
    import torch

    check_optimizer(workload.train, sharded=sharded)
    views = [v for n, v in resolve_tasks(workload).items() if tasks is None or n in tasks]
    # Torch logs failures of fake tensors with a traceback; they are told here.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]), _one_thread():
        if on_meta:
            _check_meta(workload, folder, views)
        model = _Model(workload, folder, views, sizes or {})
        return [note for view in views for note in _Trial(workload, folder, view, model).notes()]


@contextmanager
def _one_thread() -> Generator[None]:
    """Two samples need no more, and threads that find no core spin instead of computing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_meta(workload: Workload, folder: Path, views: Sequence[TaskView]) -> None:
    """Refuse factories that need values.

    Raises:
        InvalidInputError: names the module or the loss.
    """
    names = dict.fromkeys(name for view in views for name in view.modules)
    losses = dict.fromkeys(name for view in views for name in view.loss_inputs)
    builds: dict[str, Callable[..., nn.Module]] = {
        **{f"modules.{n}": partial(build_module, workload, n, folder) for n in names},
        **{f"losses.{n}": partial(build_loss, workload, n, folder) for n in losses},
    }
    for field, build in builds.items():
        try:
            build(device="meta")
        except InvalidInputError as error:
            cause = error.__cause__
            loads = "from_pretrained" in "".join(traceback.format_exception(cause))
            if cause is None or not loads:
                build()  # fails in its own words where it fails anyway
            hint = "leave --analytic out, or build it of layers that torch has on the meta device"
            if loads:
                hint = (
                    "build it from a config (from_config, or the class itself), and name the "
                    f"weights with {field}.init"
                )
            raise InvalidInputError(
                f"{error.message}: --analytic builds models without values", hint=hint
            ) from error


class _Model:
    """The modules, losses and samples of some tasks; the model all with values or all without.

    Args:
        workload: gives the factories.
        folder: the workload file's folder.
        views: the tasks.
        sizes: numbers of parameters, by module.

    Attributes:
        modules: by name; those that share parameters are one object.
        losses: by name.
        mode: of tensors without values; None where all have some.
    """

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        views: Sequence[TaskView],
        sizes: Mapping[str, float],
    ) -> None:
        self._folder, self._seed = folder, workload.train.seed
        self._batches: list[tuple[DataSpec, Mapping[str, Any]]] = []
        names = dict.fromkeys(name for view in views for name in view.modules)
        owner = {name: workload.modules[name].share or name for name in names}
        losses = dict.fromkeys(name for view in views for name in view.loss_inputs)
        modules = {
            n: partial(build_module, workload, n, folder) for n in dict.fromkeys(owner.values())
        }
        terms = {n: partial(build_loss, workload, n, folder) for n in losses}
        self.mode: FakeTensorMode | None = None
        # Only what nobody knows is built to be counted: on the meta device too torch may load its
        # compiler, which takes a second.
        empty = {n: _on_meta(make) for n, make in modules.items() if n not in sizes}
        empty_terms = {n: _on_meta(make) for n, make in terms.items()}
        counted = [
            p.numel()
            for part in (*empty.values(), *empty_terms.values())
            for p in part.parameters()
        ]
        if sum(counted) + sum(sizes.get(name, 0) for name in modules) <= _MOST_REAL:
            made = {name: make() for name, make in modules.items()}
            self.losses = {name: make() for name, make in terms.items()}
        else:
            from torch._subclasses.fake_tensor import FakeTensorMode

            self.mode = FakeTensorMode()
            made = {n: empty[n] if n in empty else _on_meta(modules[n]) for n in modules}
            self.losses = empty_terms
            for part in (*made.values(), *empty_terms.values()):
                _without_values(part, self.mode)
        self.modules = {name: made[owner[name]] for name in names}

    def batch(self, data: DataSpec, field: str) -> Mapping[str, Any]:
        """A few samples of a data set; tasks with the same data have the same ones.

        Args:
            data: the factory and its arguments.
            field: the place in the workload file.

        Raises:
            InvalidInputError: the data set is wrong.
        """
        known = next((batch for spec, batch in self._batches if spec == data), None)
        if known is not None:
            return known
        dataset = build_dataset(data, self._folder, seed=self._seed, field=field)
        try:
            batch = _batch(dataset)
        except Exception as error:
            _tell(error, f"{field}: reading {SAMPLES} samples", {}, "mend the data set")
        if not isinstance(batch, Mapping):
            raise InvalidInputError(
                f"{field}: collate returned a {type(batch).__name__}, not a dict of tensors",
                hint='return {"field": tensor, ...}, batch first',
            )
        self._batches.append((data, batch))
        return batch

    def emptied(self, tree: Any) -> Any:
        """Data as the model takes them."""
        from torch import Tensor
        from torch.utils import _pytree as pytree

        if self.mode is None:
            return tree
        return pytree.tree_map_only(Tensor, self.mode.from_tensor, tree)


def _on_meta(build: Callable[..., PartT]) -> PartT:
    """A part of the model without memory; with values where its factory needs some."""
    try:
        return build(device="meta")
    except InvalidInputError:
        return build()


def _without_values(part: nn.Module, mode: FakeTensorMode) -> None:
    """Put fake tensors in the place of a part's own."""
    import torch
    from torch import Tensor, nn

    empty: dict[Tensor, Tensor] = {}
    for child in part.modules():
        for held in (child._parameters, child._buffers, vars(child)):
            for key, tensor in held.items():
                if not isinstance(tensor, Tensor):
                    continue
                if tensor not in empty:
                    with mode:
                        made = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        empty[tensor] = nn.Parameter(made) if is_parameter else made
                held[key] = empty[tensor]  # pyright: ignore[reportArgumentType]


class _Trial:
    """One task's forward and backward on a few samples.

    Args:
        workload: whose task it is.
        folder: the workload file's folder.
        task: the task.
        model: has its modules and losses.
    """

    def __init__(self, workload: Workload, folder: Path, task: TaskView, model: _Model) -> None:
        self._workload, self._folder = workload, folder
        self._task, self._model = task, model
        self._where = f"task {task.name}: " if workload.tasks else ""
        self._outputs: dict[str, Any] = {}
        # Modules whose output depends on a parameter that trains.
        self._training: set[str] = set()

    def notes(self) -> list[str]:
        """Try all of it; a note where it had to end before.

        Raises:
            InvalidInputError: something is wrong.
        """
        fields = self._fields(*self._training_data(), self._consumers())
        try:
            with self._context():
                for name in self._task.modules:
                    self._outputs[name] = self._run_module(name, fields)
                losses = {name: self._run_loss(name, fields) for name in self._task.loss_inputs}
                self._run_backward([loss for loss in losses.values() if loss.requires_grad])
            self._run_evaluation()
        except _CannotBeTriedError as error:
            return [f"{self._where}{error}"]
        return []

    @contextmanager
    def _context(self) -> Generator[None]:
        import torch

        with ExitStack() as stack:
            if self._model.mode is not None:
                stack.enter_context(self._model.mode)
            dtype = compute_dtype(self._workload.train.precision)
            if dtype.itemsize < 4:
                stack.enter_context(torch.autocast("cpu", dtype=dtype))
            yield

    # --- data ---

    def _training_data(self) -> tuple[DataSpec, str]:
        """The task's data, and their place in the workload file."""
        data = self._task.data
        if data is None:
            raise InvalidInputError(
                f"task {self._task.name} has no data",
                hint="add data: {factory: ...} to the workload",
            )
        return data, "data" if data == self._workload.data else f"tasks.{self._task.name}.data"

    def _fields(
        self, data: DataSpec, field: str, consumers: Iterable[tuple[str, tuple[InputSource, ...]]]
    ) -> dict[str, Any]:
        """A batch of data, with the fields that are taken."""
        from torch import Tensor
        from torch.utils import _pytree as pytree

        batch = self._model.batch(data, field)
        for consumer, sources in consumers:
            for source in sources:
                if source.field is not None and source.field not in batch:
                    self._refuse_field(consumer, source.field, field, [*batch])
        dtype = dtype_of(self._workload.train.precision)
        moved = pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, dict(batch)
        )
        return self._model.emptied(moved)

    def _consumers(self) -> Iterator[tuple[str, tuple[InputSource, ...]]]:
        for name, sources in self._task.inputs.items():
            yield f"modules.{name}", sources
        for name, sources in self._task.loss_inputs.items():
            yield f"losses.{name}", sources

    def _refuse_field(self, consumer: str, name: str, data: str, known: list[str]) -> NoReturn:
        similar = get_close_matches(name, [*known, *self._task.modules], n=1)
        meant = f"did you mean {similar[0]}? " if similar else ""
        raise InvalidInputError(
            f"{self._where}{consumer}.inputs: {name!r} is no module of the task and no field that "
            f"{data} gives",
            hint=f"{meant}a sample has {', '.join(sorted(known))}",
        )

    # --- modules and losses ---

    def _arguments(
        self, consumer: str, sources: Sequence[InputSource], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a module or loss takes, by the names of its inputs."""
        found: dict[str, Any] = {}
        for index, source in enumerate(sources):
            value = None
            name = source.field or source.module or f"input {index}"
            if source.field is not None:
                value = fields[source.field]
            elif source.module is not None:
                value = self._outputs[source.module]
                if source.element is not None:
                    name = f"{name}.{source.element}"
                    value = self._element(consumer, name, value, source.element)
            found[name if name not in found else f"{name} again"] = value
        return found

    def _element(self, consumer: str, name: str, output: Any, element: int) -> Any:
        if not isinstance(output, tuple) or isinstance(output, Ragged) or element >= len(output):
            raise InvalidInputError(
                f"{self._where}{consumer}.inputs: {name} is asked for, and its module returns "
                f"{_shown(output)}",
                hint="correct the element's number, or return a tuple",
            )
        return output[element]

    def _run_module(self, name: str, fields: Mapping[str, Any]) -> Any:
        sources = self._task.inputs[name]
        blocks = self._model.modules[name]
        given = self._arguments(f"modules.{name}", sources, fields)
        frozen = frozen_blocks(self._task.frozen[name], len(blocks), field=f"modules.{name}.frozen")
        if not all(frozen) or any(source.module in self._training for source in sources):
            self._training.add(name)
        for index, (block, still) in enumerate(zip(blocks, frozen, strict=True)):
            block.requires_grad_(not still)
            where = f"{self._where}modules.{name}: block {index} ({type(block).__name__})"
            out = self._called(block, where, given)
            if not _is_tree(out) or _num_samples(out) is None:
                raise InvalidInputError(
                    f"{where} returned {_shown(out)}",
                    hint="return a tensor, or a tuple of tensors, batch first",
                )
            given = {"": out}
        return given[""]

    def _run_evaluation(self) -> None:
        """Try the metrics on what they are evaluated on."""
        import torch

        spec = self._workload.train.eval
        if spec is None:
            return
        data, field = spec.data_by_task.get(self._task.name), "train.eval.data"
        if data is not None:
            field = f"train.eval.data_by_task.{self._task.name}"
        metrics = {
            f"train.eval.metrics.{name}": (name, input_sources(self._workload, metric.inputs))
            for name, metric in spec.metrics.items()
            if metric.task in (None, self._task.name)
        }
        named = [(where, sources) for where, (_, sources) in metrics.items()]
        data = data or spec.data
        assert data is not None  # the workload's own check
        fields = self._fields(data, field, [*self._consumers(), *named])
        if not metrics:
            return
        with self._context(), torch.no_grad():
            for name in self._task.modules:
                self._outputs[name] = self._run_module(name, fields)
            workload = with_metrics(self._workload, spec)
            for where, (name, sources) in metrics.items():
                part = build_loss(workload, name, self._folder, field=where)
                self._run_scalar(where, part, sources, fields)

    def _run_loss(self, name: str, fields: Mapping[str, Any]) -> Tensor:
        sources = self._task.loss_inputs[name]
        loss = self._model.losses[name]
        where = f"{self._where}losses.{name} ({type(loss).__name__})"
        value = self._run_scalar(f"losses.{name}", loss, sources, fields)
        expects = trains(loss) or any(source.module in self._training for source in sources)
        if expects and not value.requires_grad:
            raise InvalidInputError(
                f"{where} returned a number that no gradient leads back from",
                hint="compute it from its inputs by differentiable operations, without detach(), "
                "item(), argmax() and no_grad()",
            )
        return value

    def _run_scalar(
        self,
        consumer: str,
        part: nn.Module,
        sources: Sequence[InputSource],
        fields: Mapping[str, Any],
    ) -> Tensor:
        from torch import Tensor

        where = f"{self._where}{consumer} ({type(part).__name__})"
        value = self._called(part, where, self._arguments(consumer, sources, fields))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise InvalidInputError(
                f"{where} returned {_shown(value)}, not a scalar",
                hint="return a tensor of one number alone: the mean over the samples",
            )
        return value

    def _called(self, part: nn.Module, where: str, given: Mapping[str, Any]) -> Any:
        import torch

        try:
            return part(*given.values())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._pass_by(error, where)
            _tell(
                error,
                where,
                given,
                "a block takes what the one before it returns, the first the module's inputs"
                if "modules." in where
                else "correct the loss, or its inputs in the workload",
            )

    def _run_backward(self, losses: Sequence[Tensor]) -> None:
        where = f"{self._where}backward"
        try:
            for loss in losses[:1]:
                sum((other.sum() for other in losses[1:]), loss.sum()).backward()
        except Exception as error:
            self._pass_by(error, where)
            _tell(error, where, {}, "change no tensor in place that a gradient needs")

    def _pass_by(self, error: Exception, where: str) -> None:
        """Leave it at a note where the failure says nothing of a real run.

        Raises:
            _CannotBeTriedError: it does not.
        """
        no_values = self._model.mode is not None and looks_at_values(error)
        if no_values or _ELSEWHERE.search(str(error)):
            reason = "looks at values" if no_values else "does not run on the CPU"
            raise _CannotBeTriedError(
                f"{where} {reason}, so it and what follows it was not tried"
            ) from error


def looks_at_values(error: Exception) -> bool:
    """Whether code failed for want of values, on the meta device or on fake tensors."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    return isinstance(error, kinds) or _NO_VALUES.search(str(error)) is not None


def _batch(dataset: Any) -> Any:
    """A few samples, as a batch."""
    import torch

    length = len(dataset)
    samples = [dataset[i % length] for i in range(SAMPLES)]
    if any(isinstance(value, Ragged) for value in samples[0].values()):
        looked_at = [dataset[i * length // _LOOKED_AT] for i in range(min(_LOOKED_AT, length))]
        samples = sorted([*samples, *looked_at], key=_num_rows, reverse=True)[:SAMPLES]
    collate = getattr(dataset, "collate", None)
    if collate is not None:
        return collate(samples)
    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if isinstance(first, Ragged):
            batch[name] = Ragged(*(torch.cat(column) for column in zip(*values, strict=True)))
        else:
            batch[name] = torch.stack(values)
    return batch


def _num_rows(sample: Mapping[str, Any]) -> int:
    return sum(len(value.values) for value in sample.values() if isinstance(value, Ragged))


def _is_tree(value: Any) -> bool:
    from torch import Tensor

    if isinstance(value, tuple):
        return all(map(_is_tree, value))
    return value is None or isinstance(value, Tensor)


def _num_samples(tree: Any) -> int | None:
    """Samples of the first tensor; None where there is no tensor with samples."""
    if isinstance(tree, Ragged):
        return len(tree.lengths)
    if isinstance(tree, tuple):
        return next((n for n in map(_num_samples, tree) if n is not None), None)
    return tree.shape[0] if tree is not None and tree.dim() else None


def _shown(value: Any) -> str:
    """Shapes and types of a tree of tensors."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Ragged):
        return f"Ragged rows of {_shown(value.values)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_shown, value))})"
    return f"a {type(value).__name__}"


def _tell(error: Exception, where: str, given: Mapping[str, Any], hint: str) -> NoReturn:
    """A failure in the user's code: its type, message, line and inputs."""
    if isinstance(error, MMPlanError):
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    lines = str(error).strip().splitlines()
    problem = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and frame.filename != __file__
    ]
    line = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    inputs = ", ".join(f"{name} {_shown(value)}".strip() for name, value in given.items())
    took = f" for {inputs}" if inputs else ""
    raise InvalidInputError(f"{where} raised {problem}{line}{took}", hint=hint) from error
