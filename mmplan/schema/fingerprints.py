"""What factories build, as fingerprints of profiles: made, and held against a profile.

Every part is built and traced on the meta device, where nothing takes memory. The operations that
torch runs say what blocks compute, whatever their source looks like.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.schema.agreement import check_built, fingerprints_of
from mmplan.schema.factories import build_loss, build_module, seeded_draws
from mmplan.schema.profile import BlockRun, BuiltPart, Profile
from mmplan.schema.task_shapes import TaskShapes
from mmplan.schema.workload import TaskView, Workload, resolve_tasks

T = TypeVar("T")

# Some modules squeeze a batch of one away.
_SAMPLES = 2
# Of all parts, whatever the workload's precision is: that belongs to the training.
_DTYPE = torch.float32
# Hex digits of a trace's digest: 64 bits.
_DIGITS = 16
# Attributes of every module, as they are when they say nothing.
_EMPTY = vars(nn.Module())
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_MEND = "profile this workload again: mmplan profile WORKLOAD -o PROFILE"


def built_parts(workload: Workload, folder: Path) -> dict[str, BuiltPart]:
    """What factories build, by ``modules.NAME`` and ``losses.NAME`` of those that tasks use.

    They are traced on two samples like sample 0 of a task's data set, of the first task that
    uses them, with one row for each sample in ragged fields.

    Raises:
        InvalidInputError: a factory cannot be used.
    """
    found: dict[str, BuiltPart] = {}
    for task in resolve_tasks(workload).values():
        traced = _TracedTask(workload, folder, task, found)
        for name in task.modules:
            traced.add(f"modules.{name}")
        for name in task.loss_inputs:
            traced.add(f"losses.{name}")
    return found


def check_model(
    profile: Profile, workload: Workload, folder: Path, *, parts: Iterable[str]
) -> None:
    """Refuse a model that is not the one of a profile.

    Args:
        profile: a part of which it does not say what its factory built is believed.
        workload: gives the factories.
        folder: the workload file's folder.
        parts: ``modules.NAME`` and ``losses.NAME``.

    Raises:
        InvalidInputError: a factory builds something else; says what differs.
    """
    known = fingerprints_of(profile)
    for where in parts:
        made = known.get(where)
        if made is None or made.built is None:
            continue
        # The profile's own inputs: other data is no other model.
        given = _inputs_of(made.built, f"profile {profile.name}: {where}")
        now, _ = _build_part(workload, folder, where, lambda given=given: given)
        check_built(profile, where, made.built, now)


class _TracedTask:
    """A task's parts, each traced on the outputs of those before it.

    Args:
        workload: the job.
        folder: the workload file's folder.
        task: one of its tasks.
        found: what the parts of earlier tasks are; this task's are added.
    """

    def __init__(
        self, workload: Workload, folder: Path, task: TaskView, found: dict[str, BuiltPart]
    ) -> None:
        self._workload, self._folder, self._task, self._found = workload, folder, task, found
        self._outputs: dict[str, Any] = {}
        self._shapes: TaskShapes | None = None

    def add(self, where: str) -> None:
        """Build and trace a part that no earlier task has."""
        if where not in self._found:
            self._found[where], self._outputs[where] = self._build(where)

    def _build(self, where: str) -> tuple[BuiltPart, Any]:
        return _build_part(self._workload, self._folder, where, lambda: self._arguments(where))

    def _arguments(self, where: str) -> list[Any]:
        kind, _, name = where.partition(".")
        if self._shapes is None:
            self._shapes = TaskShapes(
                self._workload,
                self._folder,
                self._task,
                samples=_SAMPLES,
                dtype=_DTYPE,
                output=self._output,
            )
        sources = (self._task.inputs if kind == "modules" else self._task.loss_inputs)[name]
        return self._shapes.inputs(where, sources, _SAMPLES)

    def _output(self, module: str) -> Any:
        where = f"modules.{module}"
        if where not in self._outputs:
            # An earlier task's, which this one may give other inputs.
            _, self._outputs[where] = self._build(where)
        if self._outputs[where] is None:
            raise InvalidInputError(f"{where} could not be traced")
        return self._outputs[where]


def _build_part(
    workload: Workload, folder: Path, where: str, arguments: Callable[[], list[Any]]
) -> tuple[BuiltPart, Any]:
    """A part, and its output for the arguments on the meta device; None without a trace."""
    kind, _, name = where.partition(".")
    build = build_module if kind == "modules" else build_loss
    try:
        built = build(workload, name, folder, device="meta")
    except InvalidInputError as error:
        # A factory that computes with its values cannot be built without them.
        built = build(workload, name, folder)
        return _part(_blocks(built, kind), untraced=error.message), None
    blocks = _blocks(built, kind)
    untraced = ""
    # Tensors that blocks make lie on the CPU, as they do in a run, or where that fails on meta.
    for context in (nullcontext(), torch.device("meta")):
        traces: list[_Trace] = []
        try:
            given = arguments()
            output = _trace(blocks, given, context, traces)
            inputs = tuple(map(_shape_of, given))
            return _part(blocks, traces, inputs), output
        except Exception as error:
            lines = str(error).strip().splitlines()
            untraced = untraced or f"{type(error).__name__}: {(lines or [''])[0]}"
    return _part(blocks, untraced=untraced), None


def _blocks(built: nn.Module, kind: str) -> nn.Sequential:
    blocks = cast("Iterable[nn.Module]", built) if kind == "modules" else [built]
    return nn.Sequential(*blocks).to(_DTYPE)


def _part(
    blocks: nn.Sequential,
    traces: Sequence[_Trace] = (),
    inputs: tuple[Any, ...] = (),
    untraced: str | None = None,
) -> BuiltPart:
    parameters: list[dict[str, str]] = []
    operations: list[dict[str, int]] = []
    runs: list[BlockRun] = []
    for index, block in enumerate(blocks):
        named = block.named_parameters(remove_duplicate=False)
        run: dict[str, Any] = {
            "parameters": _place(parameters, {n: _shape_of(p) for n, p in named})
        }
        if traces:
            run["operations"] = _place(operations, traces[index].operations)
            run["trace"] = traces[index].digest
        runs.append(BlockRun(**run))
    return BuiltPart(
        parameters=tuple(parameters),
        frozen=tuple(sorted(n for n, p in blocks.named_parameters() if not p.requires_grad)),
        operations=tuple(operations),
        blocks=tuple(
            run.model_copy(update={"count": len(list(alike))}) for run, alike in groupby(runs)
        ),
        ties=_ties(blocks),
        inputs=inputs,
        torch=str(torch.__version__).partition("+")[0] if traces else None,
        untraced=untraced,
    )


def _place(known: list[T], value: T) -> int:
    """Where a value stands in a list, at whose end it is put where it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _ties(blocks: nn.Sequential) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
    """Parameters that stand in several places: name in the block to the ranges of its blocks."""
    places: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for full, parameter in blocks.named_parameters(remove_duplicate=False):
        block, _, name = full.partition(".")
        places[id(parameter)].append((name, int(block)))
    several = (found for found in places.values() if len(found) > 1)
    return tuple(
        {name: _ranges({block for n, block in found if n == name}) for name, _ in found}
        for found in several
    )


def _ranges(blocks: set[int]) -> tuple[tuple[int, int], ...]:
    starts = sorted(block for block in blocks if block - 1 not in blocks)
    ends = sorted(block + 1 for block in blocks if block + 1 not in blocks)
    return tuple(zip(starts, ends, strict=True))


# --- operations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """The operations of a block's forward.

    Attributes:
        operations: how many of each.
        digest: of all of them in order, with arguments and shapes, and whose results they take.
    """

    operations: dict[str, int]
    digest: str


def _trace(blocks: nn.Sequential, arguments: list[Any], context: Any, traces: list[_Trace]) -> Any:
    """Run blocks one after another, add the trace of each; returns the last one's output."""
    given = tuple(arguments)
    known: dict[object, tuple[_Trace, Any]] = {}
    with torch.no_grad(), _same_draws(), context:
        for block in blocks:
            kind = _state_of(block), repr([_shape_of(item) for item in given])
            if kind not in known:
                with _Operations(block, given) as record:
                    output = block(*given)
                known[kind] = record.trace(), output
            trace, output = known[kind]
            traces.append(trace)
            given = (output,)
    return given[0]


def _state_of(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that must do the same: same classes, settings and shapes throughout.

    An attribute that is no plain value is equal to itself alone.
    """
    state: list[Any] = []
    for name, part in cast("Iterator[tuple[str, nn.Module]]", block.named_modules()):
        settings = tuple(
            (key, repr(value) if _is_plain(value) else id(value))
            for key, value in vars(part).items()
            if key not in _STRUCTURE and (key not in _EMPTY or value != _EMPTY[key])
        )
        tensors = (*part._parameters.items(), *part._buffers.items())
        shapes = tuple((key, tensor is not None and _shape_of(tensor)) for key, tensor in tensors)
        state.append((name, type(part), settings, shapes))
    return (*state, tuple(name for name, _ in block.named_parameters()))


def _is_plain(value: Any) -> bool:
    """Whether a value's text says all of it."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *cast("dict[Any, Any]", value).values())))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


@contextmanager
def _same_draws() -> Generator[None]:
    """What a forward draws at random, to drop a layer, say, is the same each time."""
    state = random.getstate()
    random.seed(0)
    try:
        with seeded_draws(0, "trace"):
            yield
    finally:
        random.setstate(state)


class _Operations(TorchDispatchMode):
    """Writes down every operation; tensors are named by where they come from.

    Args:
        block: its parameters and buffers go by their names.
        arguments: of its forward.
    """

    def __init__(self, block: nn.Module, arguments: Sequence[Any]) -> None:
        cast(Any, super()).__init__()
        self._lines: list[str] = []
        self._counts: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        # An address stands for one tensor as long as it is kept.
        self._kept: list[Tensor] = []
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            self._name(tensor, name)
        for index, tensor in enumerate(_tensors(arguments)):
            self._name(tensor, f"input {index}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        given = self._text((args, kwargs or {}))
        for index, tensor in enumerate(_tensors(result)):
            self._name(tensor, f"{len(self._lines)}.{index}")
        self._counts[name.partition(".")[0]] += 1
        self._lines.append(f"{name} {given} -> {self._text(result)}")
        return result

    def trace(self) -> _Trace:
        digest = hashlib.sha256("\n".join(self._lines).encode()).hexdigest()
        return _Trace(operations=dict(sorted(self._counts.items())), digest=digest[:_DIGITS])

    def _name(self, tensor: Tensor, name: str) -> None:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name
            self._kept.append(tensor)

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{self._names.get(id(value), 'constant')}: {_shape_of(value)}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self._text, cast('Sequence[Any]', value)))})"
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            # Where something is computed is no part of it.
            return f"({', '.join(f'{k}={self._text(v)}' for k, v in items if k != 'device')})"
        if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
            return repr(value)
        return type(value).__name__


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# --- shapes -------------------------------------------------------------------------------------


def _shape_of(tree: Any) -> Any:
    """A tree of tensors as :class:`BuiltPart` writes it: ``float32 (2, 16)`` for a tensor."""
    if isinstance(tree, Tensor):
        sizes = ", ".join(map(str, tree.shape))
        return f"{str(tree.dtype).removeprefix('torch.')} ({sizes})"
    if isinstance(tree, Ragged):
        return {"values": _shape_of(tree.values), "lengths": _shape_of(tree.lengths)}
    if isinstance(tree, tuple):
        return [_shape_of(item) for item in cast("tuple[Any, ...]", tree)]
    if tree is None:
        return None
    raise TypeError(f"a {type(tree).__name__} is none of what modules give each other")


def _inputs_of(part: BuiltPart, where: str) -> list[Any]:
    """The tensors of :func:`_shape_of`, without values.

    Raises:
        InvalidInputError: somebody edited them.
    """
    try:
        return [_tensors_like(item) for item in part.inputs]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        raise InvalidInputError(
            f"{where}: fingerprint.built.inputs cannot be read", hint=_MEND
        ) from None


def _tensors_like(shape: Any) -> Any:
    if isinstance(shape, str):
        name, _, sizes = shape.partition(" ")
        size = [int(part) for part in sizes.strip("()").split(",") if part.strip()]
        return torch.empty(size, dtype=getattr(torch, name), device="meta")
    if isinstance(shape, dict):
        given = cast("dict[str, Any]", shape)
        return Ragged(_tensors_like(given["values"]), _tensors_like(given["lengths"]))
    return None if shape is None else tuple(_tensors_like(item) for item in shape)
