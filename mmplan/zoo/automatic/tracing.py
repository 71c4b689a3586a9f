"""A model's forward as a graph in which its submodules are calls.

torch.export reads the forward with a dynamic batch. The layers, and each other submodule that
holds no layer, are single nodes of the graph: what they do inside is not looked at. So only what
stands around them is traced, and modules are later called as they are.
"""

from __future__ import annotations

import importlib
import io
import logging
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, _guards, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from mmplan.errors import InvalidInputError
from mmplan.zoo.automatic.blocks import Uncut

_LIBRARY = torch.library.Library("mmplan_cut", "DEF")
_LIBRARY.define("call(Tensor[] tensors, SymInt[] ints, int number) -> Tensor[]")
CALL = cast(Any, torch.ops).mmplan_cut.call.default
# The model is traced in this type: where the graph names it, the model's own type is meant.
TRACED_TYPE = torch.float64
# Without an end, a tensor whose elements a 64-bit number must count limits the batch.
_MOST_SAMPLES = 2**24
BY_HAND = (
    "write the cut with mmplan.zoo.sequential:from_layers, or name the layers with --layers; see "
    "docs/your-hugging-face-model.md"
)


@dataclass(slots=True)
class TracedCall:
    """A submodule's call, or functional dropout, as one node of the graph.

    Attributes:
        name: the submodule's dotted name in the model; empty for functional dropout.
        is_layer: whether a block begins with it.
        leaves: arguments, flattened; tensors and symbolic numbers are None there.
        spec: their structure: (args, kwargs).
        tensors: places of tensors among the leaves; ``numbers`` those of symbolic numbers.
        outputs: how each tensor is found in what the call returns: ``[0]``, ``.hidden``.
    """

    name: str
    is_layer: bool
    leaves: list[Any]
    spec: Any
    tensors: list[int]
    numbers: list[int]
    outputs: list[str] = field(default_factory=lambda: [])
    run: Any = None
    returned: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model's forward.

    Attributes:
        graph: of operators and calls, without higher-order ones.
        calls: by their number, the third argument of their nodes.
        targets: placeholders to the parameters and buffers that they stand for.
        constants: placeholders to tensors that the forward makes of numbers.
        inputs: placeholders of the inputs, in order.
        sizes: of each input, for each dimension after the first: (least, most).
    """

    graph: fx.Graph
    calls: list[TracedCall]
    targets: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: list[str]
    sizes: list[list[tuple[int, int | None]]]


def trace(
    uncut: Uncut, inputs: Sequence[Tensor], layers: Sequence[str], *, is_free: bool
) -> Traced:
    """Read a model's forward.

    Args:
        uncut: the model, thrown away afterwards: it is in evaluation mode and another type.
        inputs: an example of at least two samples, batch first.
        layers: names of the submodules at which blocks begin.
        is_free: whether dimensions of whole-number inputs (lengths of texts) are left free.

    Raises:
        InvalidInputError: torch.export refuses the model, or freezes its batch.
    """
    try:
        with _quiet():
            return _trace(uncut, inputs, layers, is_free=is_free)
    except InvalidInputError:
        raise
    except Exception as error:  # of torch.export, or of the model
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        # A broken constraint stands below the line that says only that there is one.
        broken = [line.strip() for line in lines[1:] if line.strip().startswith("- ")]
        said = shorten(" ".join([*lines[:1], *broken[:1]]), 300, placeholder=" ...")
        if isinstance(error, GuardOnDataDependentSymNode):
            said = "its forward asks for values (an if, .item(), int(...) of a tensor)"
        raise InvalidInputError(
            f"{type(uncut.model).__name__} cannot be traced{_where(error)}: "
            f"{type(error).__name__}: {said}",
            hint=BY_HAND,
        ) from error


@contextmanager
def _quiet() -> Generator[None]:
    """torch prints the graph so far when a trace ends early; the error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _where(error: Exception) -> str:
    """Line of the model that raised, where one did."""
    own = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
    frames = traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if f.filename.startswith("/") and not f.filename.startswith(own)]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def _trace(
    uncut: Uncut, inputs: Sequence[Tensor], layers: Sequence[str], *, is_free: bool
) -> Traced:
    calls: list[TracedCall] = []
    batch = torch.export.Dim("batch", max=_MOST_SAMPLES)
    free = torch.export.Dim.AUTO
    given = tuple(x.to(TRACED_TYPE) if x.is_floating_point() else x for x in inputs)
    shapes = tuple(
        {0: batch}
        | (dict.fromkeys(range(1, x.ndim), free) if is_free and not x.is_floating_point() else {})
        for x in inputs
    )
    with _traceable(uncut.model, layers, calls):
        exported = torch.export.export(
            uncut, given, dynamic_shapes={"inputs": shapes}, strict=False
        )
    if any(_mutates(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = {
        name: cast(Tensor, exported.constants[target])
        for name, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    graph = _inlined(exported.graph_module)
    found = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    return Traced(
        graph=graph,
        calls=calls,
        targets={name: target.removeprefix("model.") for name, target in targets.items()},
        constants=constants,
        inputs=[str(name) for name in signature.user_inputs],
        sizes=[_sizes(found[str(name)].meta["val"], exported) for name in signature.user_inputs],
    )


def _sizes(value: Tensor, exported: Any) -> list[tuple[int, int | None]]:
    """Least and most of each dimension after the first."""
    ranges = exported.range_constraints
    sizes: list[tuple[int, int | None]] = []
    for size in value.shape[1:]:
        if isinstance(size, int):
            sizes.append((size, size))
        else:
            allowed = ranges.get(cast(Any, size).node.expr)
            most = None if allowed is None or allowed.upper > 10**9 else int(allowed.upper)
            sizes.append((0 if allowed is None else int(allowed.lower), most))
    return sizes


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextmanager
def _traceable(model: nn.Module, layers: Sequence[str], calls: list[TracedCall]) -> Generator[None]:
    """The model with its submodules as single nodes, in evaluation mode and one known type."""
    own = {model.get_submodule(name) for name in layers}
    with ExitStack() as stack:
        inside = _Inside()
        stack.enter_context(_running(calls))
        nn.Module.to(model.eval(), TRACED_TYPE)  # diffusers' own warns
        for name, module in _outermost(model, own):
            forward = _called(module, name, module in own, calls, inside)
            stack.enter_context(mock.patch.object(module, "forward", forward))
        dropout = _dropout(calls, inside)
        stack.enter_context(mock.patch.object(nn.functional, "dropout", dropout))
        _without_masks(stack)
        yield


def _outermost(
    model: nn.Module, layers: set[nn.Module], prefix: str = ""
) -> Generator[tuple[str, nn.Module]]:
    """The layers, and submodules with parameters or of torch that contain none."""
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        if child in layers or (
            layers.isdisjoint(child.modules())
            and (
                next(child.parameters(), None) is not None
                or type(child).__module__.startswith("torch")
            )
        ):
            yield full, child
        else:
            yield from _outermost(child, layers, f"{full}.")


class _Inside:
    """Whether a call's own forward runs, in which nothing is a node."""

    depth = 0


def _called(
    module: nn.Module, name: str, is_layer: bool, calls: list[TracedCall], inside: _Inside
) -> Callable[..., Any]:
    forward = module.forward
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(mode: Any, args: Any, kwargs: Any) -> Any:
        fake = {key: mode.from_tensor(value) for key, value in state.items()}
        return torch.func.functional_call(module, fake, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if inside.depth:
            return forward(*args, **kwargs)
        return _record(calls, inside, name, is_layer, run, args, kwargs)

    return call


def _dropout(calls: list[TracedCall], inside: _Inside) -> Callable[..., Any]:
    def run(_: Any, args: Any, kwargs: Any) -> Any:
        return args[0].clone()

    def dropout(input: Tensor, p: float = 0.5, *_: Any, **__: Any) -> Any:
        if inside.depth:
            return input
        return _record(calls, inside, "", False, run, (input, p), {})

    return dropout


def _record(
    calls: list[TracedCall],
    inside: _Inside,
    name: str,
    is_layer: bool,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    numbers = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.SymInt)]
    held = {*tensors, *numbers}
    leaves = [None if i in held else leaf for i, leaf in enumerate(flat)]
    call = TracedCall(name, is_layer, leaves, spec, tensors, numbers)

    def faked(given: Sequence[Tensor], ints: Sequence[int]) -> list[Tensor]:
        mode = _guards.detect_fake_mode(list(given))
        filled = list(flat)
        for places, values in ((tensors, given), (numbers, ints)):
            for place, value in zip(places, values, strict=True):
                filled[place] = value
        given_args, given_kwargs = pytree.tree_unflatten(filled, spec)
        inside.depth += 1
        try:
            # The module runs as it is later: what it asks of sizes limits nothing.
            with cast(Any, mode).shape_env.suppress_guards():
                returned = run(mode, given_args, given_kwargs)
        finally:
            inside.depth -= 1
        paths, structure = pytree.tree_flatten_with_path(returned)
        found = [(pytree.keystr(p), leaf) for p, leaf in paths if isinstance(leaf, Tensor)]
        call.outputs = [path for path, _ in found]
        others = [None if isinstance(leaf, Tensor) else leaf for _, leaf in paths]
        where = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, Tensor)]
        call.returned = others, where, structure
        # An operator must not return what it was given.
        return [t.clone() if any(t is g for g in given) else t for _, t in found]

    call.run = faked
    calls.append(call)
    out = CALL([flat[i] for i in tensors], [flat[i] for i in numbers], len(calls) - 1)
    others, where, structure = call.returned
    leaves_out = list(others)
    for place, value in zip(where, out, strict=True):
        leaves_out[place] = value
    return pytree.tree_unflatten(leaves_out, structure)


# The calls of the trace that runs: the operator itself takes tensors and numbers only.
_traces: list[list[TracedCall]] = []


@contextmanager
def _running(calls: list[TracedCall]) -> Generator[None]:
    _traces.append(calls)
    try:
        yield
    finally:
        _traces.pop()


@torch.library.register_fake("mmplan_cut::call", lib=_LIBRARY)
def _fake(tensors: list[Tensor], ints: list[int], number: int) -> list[Tensor]:
    return _traces[-1][number].run(tensors, ints)


def _without_masks(stack: ExitStack) -> None:
    """Let transformers leave out masks that its attention does not need, as it does untraced."""
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return
    for name, answer in (
        ("is_torchdynamo_exporting", lambda: False),
        # Positions that the model counts itself are of one sequence, never of several.
        ("find_packed_sequence_indices", lambda *_: None),
    ):
        if hasattr(masks, name):
            stack.enter_context(mock.patch.object(masks, name, answer))


def _inlined(module: fx.GraphModule) -> fx.Graph:
    """The graph with the bodies of higher-order operators in their places."""
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}

    def copy(source: fx.GraphModule, known: dict[fx.Node, Any]) -> Any:
        for node in source.graph.nodes:
            if node.op == "placeholder" and node in known:
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: known[n])
            if node.op == "get_attr" and isinstance(
                getattr(source, str(node.target), None), fx.GraphModule
            ):
                continue
            name = getattr(node.target, "__name__", "")
            if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
                at = next(i for i, a in enumerate(node.args) if _body(source, a) is not None)
                body = cast(fx.GraphModule, _body(source, node.args[at]))
                places = [n for n in body.graph.nodes if n.op == "placeholder"]
                given = [
                    fx.map_arg(a, lambda n: known[n]) if isinstance(a, fx.Node) else a
                    for a in node.args[at + 1 :]
                ]
                returned = copy(body, dict(zip(places, given, strict=True)))
                if name == "wrap_with_set_grad_enabled" and node.args[0] is False:
                    returned = [_detached(graph, value) for value in returned]
                known[node] = returned
            elif (
                node.op == "call_function"
                and name == "getitem"
                and not isinstance(known.get(cast(fx.Node, node.args[0])), fx.Node)
            ):
                known[node] = known[cast(fx.Node, node.args[0])][node.args[1]]
            else:
                known[node] = graph.node_copy(node, lambda n: known[n])
        return None

    result = copy(module, copied)
    graph.output(result)
    graph.eliminate_dead_code()
    return graph


def _body(source: fx.GraphModule, argument: Any) -> fx.GraphModule | None:
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    found = getattr(source, str(argument.target), None)
    return found if isinstance(found, fx.GraphModule) else None


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    node = graph.call_function(cast(Any, torch.ops.aten.detach.default), (value,))
    node.meta = dict(value.meta)
    return node
