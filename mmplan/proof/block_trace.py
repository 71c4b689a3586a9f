"""The operations of one block's forward, followed on tensors without values.

The block runs on fake tensors: shapes are computed, numbers are not, and nothing of its size
is allocated. Cut Linears, attention, norms and matrix products count as one operation each;
everything else is what torch's dispatcher sees, so Python code of any kind may be around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mmplan.errors import MMPlanError
from mmplan.proof.row_cuts import (
    ROW_GROUPS,
    BlockRows,
    RowCuts,
    RowGroup,
    first_tensor,
    has_rows,
    own_rows,
    with_first,
)

# Functions that are one operation: what they are made of differs between devices and sizes.
_FUNCTIONS: dict[Any, str] = {
    functional.linear: "linear",
    functional.scaled_dot_product_attention: "attention",
    functional.layer_norm: "norm",
    functional.rms_norm: "norm",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    torch.bmm: "matmul",
    Tensor.bmm: "matmul",
    torch.mm: "matmul",
    Tensor.mm: "matmul",
}
# An embedding that is cut along the vocabulary.
EMBEDDING = "embedding"
# The same values under another tensor: no operation of their own.
_SAME = frozenset(["aten.clone", "aten.alias", "aten.lift_fresh"])
# A reshape is the one or the other by strides, which kernels of a device choose.
_RESHAPED = {"aten._unsafe_view": "aten.view"}


class BlockError(Exception):
    """A block's forward failed; the message says in which submodule, the cause is kept."""


class TracedValue(NamedTuple):
    """A tensor among the arguments of an operation, by its number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a block.

    Attributes:
        name: ``aten.mul``, or ``linear``, ``attention``, ``norm``, ``matmul``, or the style of
            a cut Linear, or :data:`EMBEDDING`.
        arguments: by name (of functions: by position too), tensors as :class:`TracedValue`.
        inputs, outputs: numbers of tensors.
        pointwise: whether torch says that each output element depends on its own place alone.
        records: whether autograd was on; inside an ``autograd.Function`` it is off.
        where: the submodule in which it runs; "" for the block itself.
    """

    name: str
    arguments: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    pointwise: bool
    records: bool
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmoduleCall:
    """One call of a submodule.

    Attributes:
        first, end: of its operations.
        given, gave: shapes of its first argument and of its first output; None of what is no
            activations with rows.
    """

    name: str
    first: int
    end: int
    given: tuple[int, ...] | None
    gave: tuple[int, ...] | None


@dataclass(slots=True, kw_only=True)
class BlockTrace:
    """What a block did.

    Attributes:
        operations: in order.
        tensors: by number.
        inputs: numbers of the block's input tensors.
        parameters: numbers by name.
        results: the block's output tensors, by number.
        output: its output tree, on fake tensors.
        calls: of submodules, in the order in which they end.
        rows: of what is cut along its rows, if anything is: all of them.
    """

    operations: list[Operation] = field(default_factory=lambda: [])
    tensors: list[Tensor] = field(default_factory=lambda: [])
    inputs: list[int] = field(default_factory=lambda: [])
    parameters: dict[str, int] = field(default_factory=lambda: {})
    results: list[int] = field(default_factory=lambda: [])
    output: Any = None
    calls: list[SubmoduleCall] = field(default_factory=lambda: [])
    rows: int = 0


def trace_block(
    block: nn.Module,
    inputs: Sequence[Any],
    *,
    shapes: Mapping[str, Sequence[int]],
    styles: Mapping[str, str],
    cuts: RowCuts | None = None,
    group: RowGroup | None = None,
    logits: Mapping[str, int] | None = None,
) -> BlockTrace:
    """Run a block's forward without values.

    Args:
        block: stays as it is.
        inputs: trees of tensors; shapes, types and ``requires_grad`` are taken from them.
        shapes: of the parameters that are to have others than the block's own.
        styles: Linears that are cut by tensor parallelism, with their style.
        cuts: where its rows are cut, if they are.
        group: whose rank has the rows.
        logits: Linears that are cut along the vocabulary and whose output the group brings
            together, with the sizes of the whole one.

    Raises:
        BlockError: the forward failed.
    """
    trace, rows = BlockTrace(), BlockRows()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.enable_grad())
        state: dict[str, Tensor] = {}
        known: dict[Tensor, Tensor] = {}
        parameters = block.named_parameters(remove_duplicate=False)
        for name, tensor in chain(parameters, block.named_buffers(remove_duplicate=False)):
            if tensor not in known:
                known[tensor] = _fake(tensor, shapes.get(name))
            state[name] = known[tensor]
        given = pytree.tree_map_only(Tensor, _fake, tuple(inputs))
        if cuts is not None and group is not None:
            length = first_tensor(given[0]).shape[-2] if cuts.takes else 0
            given = _with_own_rows(given, cuts, group)
            ROW_GROUPS[_TRACED] = group
            rows.begin(cuts, _TRACED, length)
            for hook in rows.hook(block, cuts):
                stack.callback(hook.remove)
        tracer = _Tracer(trace)
        for name, parameter in block.named_parameters():
            trace.parameters[name] = tracer.number(known[parameter])
        trace.inputs = [tracer.number(tensor) for tensor in tensors_in(given)]
        stack.enter_context(_followed(block, tracer, styles, shapes, rows, logits or {}))
        stack.enter_context(_Functions(tracer))
        stack.enter_context(_EveryKernel(tracer))
        try:
            trace.output = torch.func.functional_call(block, state, given, tie_weights=False)
        except Exception as error:
            raise BlockError(tracer.described(error)) from error
        trace.results = [tracer.number(tensor) for tensor in tensors_in(trace.output)]
        trace.rows = rows.length
    return trace


# The group of a trace, whose operators need its sizes alone.
_TRACED = "traced"


def _with_own_rows(given: Any, cuts: RowCuts, group: RowGroup) -> Any:
    """A block's arguments, the first tensor with one rank's rows where the block takes these."""
    if not cuts.takes:
        return given

    def own(full: Tensor) -> Tensor:
        first, end = own_rows(full.shape[-2], group.index, group.count)
        shape = (*full.shape[:-2], end - first, full.shape[-1])
        return full.new_empty(shape).requires_grad_(full.requires_grad)

    return with_first(given[0], own), *given[1:]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Same:
    """An attribute that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


# Numbers that layers give themselves and that change nothing of what they compute, and
# what says in which group a cut Linear runs.
_SERIAL_NAMES = frozenset(
    [
        *("layer_idx", "tp_sums", "tp_window", "tp_tokens", "tp_name", "lookup"),
        *("in_features", "out_features", "num_embeddings", "padding_idx"),
    ]
)
_PLAIN = (bool, int, float, complex, str, tuple, list, dict, set, torch.dtype, type(None))


def block_kind(block: nn.Module, inputs: Sequence[Any]) -> object:
    """Equal for blocks that do the same on inputs of the same shapes."""
    ours = set(vars(nn.Module()))
    parts = [
        (
            name,
            type(part),
            tuple(
                (key, repr(value) if isinstance(value, _PLAIN) else _Same(value))
                for key, value in sorted(vars(part).items())
                if key not in ours and key not in _SERIAL_NAMES
            ),
            part.training,
        )
        for name, part in block.named_modules()
    ]
    named = (*block.named_parameters(remove_duplicate=False), *block.named_buffers())
    first: dict[Tensor, str] = {}
    tensors = [(name, first.setdefault(t, name), _shape(t)) for name, t in named]
    given = [_shape(tensor) for tensor in tensors_in(inputs)]
    return tuple(parts), tuple(tensors), tuple(given), str(pytree.tree_structure(inputs))


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _fake(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    size = tuple(tensor.shape) if shape is None else tuple(shape)
    fresh = torch.empty(size, dtype=tensor.dtype, device=device)
    return fresh.requires_grad_(tensor.requires_grad)


@contextmanager
def _followed(
    block: nn.Module,
    tracer: _Tracer,
    styles: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    rows: BlockRows,
    logits: Mapping[str, int],
) -> Generator[None]:
    """Around a forward: submodules say that they run, cut layers are one operation each."""
    hooks = [
        hook
        for name, module in block.named_modules()
        if name
        for hook in (
            module.register_forward_pre_hook(partial(tracer.enter, name), with_kwargs=True),
            module.register_forward_hook(partial(tracer.leave, name)),
        )
    ]
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    for name, style in styles.items():
        linear = cast(Any, block.get_submodule(name))
        kept.append((linear, dict(vars(linear))))
        # Past nn.Module's __setattr__; a forward of an instance hides its class's.
        if isinstance(linear, nn.Embedding):
            linear.__dict__["forward"] = partial(_cut_embedding, linear, name, tracer, rows)
            continue
        run = partial(_cut_linear, linear, tracer, style, rows, logits.get(name, 0))
        linear.__dict__["forward"] = run
        outputs, inputs = shapes.get(f"{name}.weight", linear.weight.shape)
        linear.__dict__ |= {"out_features": outputs, "in_features": inputs}
    try:
        yield
    finally:
        for linear, attributes in kept:
            for name in ("forward", "out_features", "in_features"):
                linear.__dict__.pop(name, None)
                if name in attributes:
                    linear.__dict__[name] = attributes[name]
        for hook in hooks:
            hook.remove()


def _cut_linear(
    linear: Any, tracer: _Tracer, style: str, rows: BlockRows, vocab: int, input: Tensor
) -> Tensor:
    arguments = {"input": input, "weight": linear.weight, "bias": linear.bias}

    def run() -> Tensor:
        out = functional.linear(**arguments)
        if vocab:
            return functional.pad(out, (0, vocab - out.shape[-1]))
        return rows.sum(out) if style == "rowwise" and rows.cuts is not None else out

    return tracer.whole(style, arguments, run)


def _cut_embedding(
    table: Any, name: str, tracer: _Tracer, rows: BlockRows, input: Tensor
) -> Tensor:
    arguments = {"input": input, "weight": table.weight}

    def run() -> Tensor:
        out = functional.embedding(input, table.weight)
        own = rows.sum_of_table(name, out)
        return out if own is None else own

    return tracer.whole(EMBEDDING, arguments, run)


class _Tracer:
    """Gives numbers to tensors, and writes operations down."""

    def __init__(self, trace: BlockTrace) -> None:
        self._trace = trace
        self._numbers: dict[int, int] = {}
        # Tensors on each storage: writing to one changes all of them.
        self._views: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._where: list[str] = []
        # Of the submodules that run: the first operation, and the first argument's shape.
        self._begun: list[tuple[int, tuple[int, ...] | None]] = []
        self.paused = False

    def enter(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values(), None)[0]
        self._where.append(name)
        self._begun.append((len(self._trace.operations), _rows_shape(given)))

    def leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        # Of those that failed, and whose failure was caught, too.
        first, given = self._begun.pop()
        while self._where.pop() != name:
            first, given = self._begun.pop()
        end, gave = len(self._trace.operations), _rows_shape(output)
        call = SubmoduleCall(name=name, first=first, end=end, given=given, gave=gave)
        self._trace.calls.append(call)

    def described(self, error: Exception) -> str:
        """What failed, and in which submodule."""
        lines = str(error).strip().splitlines()
        place = f"{self._where[-1]}: " if self._where else ""
        kind = "" if isinstance(error, MMPlanError) else f"{type(error).__name__}: "
        return f"{place}{kind}{(lines or [''])[0]}"

    def number(self, tensor: Tensor) -> int:
        """A tensor's number; of an unknown one that of its storage, or a new one."""
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        for other in reversed(self._views[_storage(tensor)]):
            if other.shape == tensor.shape:
                return self._keep(tensor, self._numbers[id(other)])
        return self._new(tensor)

    def _new(self, tensor: Tensor) -> int:
        self._trace.tensors.append(tensor)
        return self._keep(tensor, len(self._trace.tensors) - 1)

    def _keep(self, tensor: Tensor, number: int) -> int:
        if id(tensor) not in self._numbers:
            # Kept alive, so that no other tensor gets its id.
            self._views[_storage(tensor)].append(tensor)
        self._numbers[id(tensor)] = number
        return number

    def whole(self, name: str, arguments: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run a function as one operation."""
        if self.paused:
            return call()
        self.paused = True
        try:
            out = call()
        finally:
            self.paused = False
        self._write(name, arguments, out)
        return out

    def kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Write one kernel down."""
        name = str(func._overloadpacket)
        name = _RESHAPED.get(name, name)
        given = tensors_in((args, kwargs))
        if self.paused or not tensors_in(out):
            return
        if name in _SAME and torch.is_grad_enabled():
            self._keep(out, self.number(given[0]))
            return
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        changed = [
            arguments[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name in arguments
        ]
        pointwise = torch.Tag.pointwise in func.tags
        self._write(name, arguments, out, pointwise=pointwise, changed=tensors_in(changed))

    def _write(
        self,
        name: str,
        arguments: Mapping[str, Any],
        out: Any,
        *,
        pointwise: bool = False,
        changed: Sequence[Tensor] = (),
    ) -> None:
        inputs = tuple(self.number(tensor) for tensor in tensors_in(arguments))
        values = {k: self._as_values(v) for k, v in arguments.items()}
        written = {id(tensor): tensor for tensor in (*changed, *tensors_in(out))}
        outputs = tuple(self._new(tensor) for tensor in written.values())
        self._add(name, values, inputs, outputs, pointwise=pointwise)
        for tensor in changed:
            for other in list(self._views[_storage(tensor)]):
                if id(other) not in written:
                    inputs = self._numbers[id(other)], self._numbers[id(tensor)]
                    self._add("written", {}, inputs, (self._new(other),))

    def _as_values(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: TracedValue(self.number(tensor)), tree)

    def _add(
        self,
        name: str,
        arguments: dict[str, Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        pointwise: bool = False,
    ) -> None:
        self._trace.operations.append(
            Operation(
                name=name,
                arguments=arguments,
                inputs=inputs,
                outputs=outputs,
                pointwise=pointwise,
                records=torch.is_grad_enabled(),
                where=self._where[-1] if self._where else "",
            )
        )


class _Functions(TorchFunctionMode):
    """Writes the functions of ``_FUNCTIONS`` down."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FUNCTIONS:
            return func(*args, **kwargs)
        arguments = {str(i): argument for i, argument in enumerate(args)} | kwargs
        return self._tracer.whole(_FUNCTIONS[func], arguments, lambda: func(*args, **kwargs))


class _EveryKernel(TorchDispatchMode):
    """Writes every kernel down."""

    def __init__(self, tracer: _Tracer) -> None:
        cast(Any, super()).__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._tracer.kernel(func, args, kwargs, out)
        return out


def _rows_shape(tree: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor of a tree, where it is activations with rows."""
    first = first_tensor(tree)
    return tuple(first.shape) if has_rows(first) else None


def _storage(tensor: Tensor) -> int:
    return cast(Any, tensor.untyped_storage())._cdata


def arguments_of(operation: Operation, names: Sequence[str]) -> Iterator[Any]:
    """Arguments of a function, given by position or by name; None where there is none."""
    for index, name in enumerate(names):
        yield operation.arguments.get(str(index), operation.arguments.get(name))
