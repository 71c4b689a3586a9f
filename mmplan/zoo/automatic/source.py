"""The blocks of a model as Python source: what ``mmplan init`` writes into model.py."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mmplan.errors import InvalidInputError
from mmplan.zoo.automatic.blocks import Uncut, size_words
from mmplan.zoo.automatic.partition import Partition, Piece
from mmplan.zoo.automatic.tracing import BY_HAND, CALL, TRACED_TYPE, TracedCall, trace

_ATEN = cast(Any, torch.ops).aten
_SIZE = _ATEN.sym_size.int
# Constants with more numbers are no text that anyone reads.
_MOST_NUMBERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSource:
    """Text of a cut.

    Attributes:
        functions: definitions of the functions of the blocks.
        steps: the list of (function, layer, names), as text.
        sizes: what the inputs' dimensions may be, as text.
        ranges: the same of each input, for people.
        blocks: how many.
        unused: parameters that the forward does not use, which no block has.
    """

    functions: str
    steps: str
    sizes: str
    ranges: tuple[str, ...]
    blocks: int
    unused: tuple[str, ...]


def cut_source(uncut: Uncut, inputs: Sequence[Tensor], layers: Sequence[str]) -> CutSource:
    """Cut a model at its layers; it is changed on the way.

    Args:
        uncut: the model.
        inputs: an example of at least two samples.
        layers: names of the submodules at which blocks begin.

    Raises:
        InvalidInputError: the model cannot be cut by itself; the text says why.
    """
    try:
        return _cut_source(uncut, inputs, layers, is_free=True)
    except InvalidInputError:
        # With fixed lengths less has to be known in each block.
        return _cut_source(uncut, inputs, layers, is_free=False)


def _cut_source(
    uncut: Uncut, inputs: Sequence[Tensor], layers: Sequence[str], *, is_free: bool
) -> CutSource:
    partition = Partition(trace(uncut, inputs, layers, is_free=is_free))
    functions: dict[str, str] = {}
    steps: list[str] = []
    used: set[nn.Parameter] = set()
    for index, piece in enumerate(partition.pieces):
        block = _FoundBlock(partition, piece, is_last=index == len(partition.pieces) - 1)
        name = functions.setdefault(block.body, f"step_{len(functions)}")
        names = sorted(block.names)
        steps.append(f"    ({name}, {piece.layer.name!r}, {names!r}),")
        used |= _parameters(uncut.model, [piece.layer.name, *names])
    unused = tuple(n for n, p in uncut.model.named_parameters() if p not in used)
    return CutSource(
        functions="\n\n\n".join(f"def {name}{body}" for body, name in functions.items()),
        steps="[\n" + "\n".join(steps) + "\n]",
        sizes=repr(partition.traced.sizes),
        ranges=tuple(map(size_words, partition.traced.sizes)),
        blocks=len(steps),
        unused=unused,
    )


def _parameters(model: nn.Module, names: Sequence[str]) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for name in names:
        owner, _, leaf = name.rpartition(".")
        value = getattr(model.get_submodule(owner), leaf)
        if isinstance(value, nn.Module):
            found |= set(value.parameters())
        elif isinstance(value, nn.Parameter):
            found.add(value)
    return found


class _Expression(str):
    __slots__ = ()


class _FoundBlock:
    """Source of one block's function.

    Attributes:
        body: from its arguments on.
        names: what it uses of the model beside its layer.
    """

    def __init__(self, partition: Partition, piece: Piece, *, is_last: bool) -> None:
        self._partition, self._piece = partition, piece
        self.names: set[str] = set()
        self._lines: list[str] = []
        self._text: dict[fx.Node, str] = {}
        self._count = 0
        arguments = [f"s{i}" for i in range(len(piece.takes))]
        self._given = dict(zip(piece.takes, arguments, strict=True))
        is_first = piece.takes == tuple(
            n for n in partition.order if n.name in partition.traced.inputs
        )
        for node, argument in self._given.items():
            self._text[node] = argument if is_first else self._unpacked(node, argument)
        for node in piece.nodes:
            self._emit(node)
        packed = [self._value(n) if is_last else self._packed(n) for n in piece.gives]
        self._lines.append(f"return {', '.join(packed)}")
        head = f"(self, {', '.join(arguments)}):"
        self.body = "\n    ".join([head, *self._lines])

    def _emit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._text[node] = self._element(node)
        elif node.target is _SIZE:
            self._text[node] = self._size(node)
        elif node.target is CALL:
            call = cast(TracedCall, self._partition.call_of(node))
            self._assign(node, self._called(call, node), "layer_out" if call.is_layer else "x")
        elif isinstance(node.target, torch._ops.OpOverload):
            namespace, _, name = str(node.target).partition(".")
            name = f"{name.removesuffix('.default')}"
            function = f"aten.{name}" if namespace == "aten" else f"torch.ops.{namespace}.{name}"
            self._assign(node, self._applied(function, node), "x")
        else:
            target = cast(Any, node.target)
            owner = "operator" if target.__module__ in ("_operator", "operator") else "torch"
            self._assign(node, self._applied(f"{owner}.{target.__name__}", node), "n")

    def _assign(self, node: fx.Node, expression: str, kind: str) -> None:
        self._count += 1
        self._text[node] = name = f"{kind}{self._count}"
        self._lines.append(f"{name} = {expression}")

    def _applied(self, function: str, node: fx.Node) -> str:
        words = [self._print(value) for value in node.args]
        words += [
            f"{key}={self._print(value)}" for key, value in node.kwargs.items() if value is not None
        ]
        return f"{function}({', '.join(words)})"

    def _called(self, call: TracedCall, node: fx.Node) -> str:
        leaves = list(call.leaves)
        values = zip(
            [*call.tensors, *call.numbers],
            [*cast(Any, node.args[0]), *cast(Any, node.args[1])],
            strict=True,
        )
        for place, value in values:
            leaves[place] = _Expression(self._print(value))
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        what = call.name or "dropout"
        words = [self._constant(value, what) for value in args]
        words += [f"{key}={self._constant(value, what)}" for key, value in kwargs.items()]
        if not call.name:
            return f"nn.functional.dropout({', '.join(words)}, training=self.training)"
        if call.is_layer:
            return f"self.layer({', '.join(words)})"
        return f"{self._owned(call.name)}({', '.join(words)})"

    def _constant(self, value: Any, what: str) -> str:
        if isinstance(value, _Expression):
            return str(value)
        if type(value) in (tuple, list):
            inner = ", ".join(self._constant(item, what) for item in value)
            comma = "," if type(value) is tuple and len(value) == 1 else ""
            return f"({inner}{comma})" if type(value) is tuple else f"[{inner}]"
        if type(value) is dict:
            items = cast("dict[Any, Any]", value).items()
            return f"{{{', '.join(f'{k!r}: {self._constant(v, what)}' for k, v in items)}}}"
        if isinstance(value, torch.dtype | torch.device | bool | int | float | str | None):
            return self._print(value)
        raise InvalidInputError(
            f"{what} takes a {type(value).__name__}, which cannot travel between blocks",
            hint=BY_HAND,
        )

    def _owned(self, name: str) -> str:
        self.names.add(name)
        return (
            f"self.{name}"
            if all(p.isidentifier() for p in name.split("."))
            else (f"self.named({name!r})")
        )

    def _element(self, node: fx.Node) -> str:
        source, index = cast("tuple[fx.Node, int]", node.args)
        call = self._partition.call_of(source)
        path = f"[{index}]" if call is None else call.outputs[index]
        return f"{self._value(source)}{path}"

    def _value(self, node: fx.Node) -> str:
        if self._partition.is_stored(node):
            traced = self._partition.traced
            if node.name in traced.targets:
                return self._owned(traced.targets[node.name])
            return self._literal(traced.constants[node.name])
        return self._text[node]

    def _literal(self, value: Tensor) -> str:
        if value.numel() > _MOST_NUMBERS:
            raise InvalidInputError(
                f"its forward makes a constant of {value.numel()} numbers",
                hint="register it as a buffer of the model",
            )
        numbers = _number(value.tolist())
        return f"torch.tensor({numbers}, dtype={self._print(value.dtype)}, device=self.device)"

    def _size(self, node: fx.Node) -> str:
        """A dimension, of whatever tensor here has it."""
        source, dim = cast("tuple[fx.Node, int]", node.args)
        if source in self._text or self._partition.is_stored(source):
            return f"{self._value(source)}.shape[{dim}]"
        wanted = node.meta["val"].node.expr
        for other, text in self._text.items():
            value = other.meta.get("val")
            for place, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, torch.SymInt) and cast(Any, size).node.expr == wanted:
                    return f"{text}.shape[{place}]"
        raise InvalidInputError(
            f"no value that travels between blocks has the size {wanted}", hint=BY_HAND
        )

    def _print(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._value(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._print(item) for item in cast('list[Any]', value))}]"
        if isinstance(value, torch.device):
            return "self.device"
        if isinstance(value, torch.dtype):
            return "self.dtype" if value == TRACED_TYPE else str(value)
        if isinstance(value, float):
            info = torch.finfo(TRACED_TYPE)
            ends = {
                info.min: "torch.finfo(self.dtype).min",
                info.max: "torch.finfo(self.dtype).max",
            }
            return ends.get(value) or _number(value)
        return str(value) if isinstance(value, torch.layout | torch.memory_format) else repr(value)

    def _unpacked(self, node: fx.Node, argument: str) -> str:
        kind, _, number = self._partition.packing(node).partition(" ")
        if kind == "rows":
            return argument
        how = {"each": "[0]", "dim": f".movedim(0, {number})", "fold": ".flatten(0, 1)"}[kind]
        self._count += 1
        self._lines.append(f"x{self._count} = {argument}{how}")
        return f"x{self._count}"

    def _packed(self, node: fx.Node) -> str:
        if node in self._given:
            kind = self._partition.packing(node)
            if kind == "rows" or self._given[node] != self._text[node]:
                return self._given[node]
        text = self._value(node)
        kind, _, number = self._partition.packing(node).partition(" ")
        batch = next(f"{argument}.shape[0]" for argument in self._given.values())
        return {
            "rows": text,
            "each": f"{text}.expand({batch}, *{text}.shape)",
            "dim": f"{text}.movedim({number}, 0)",
            "fold": f"{text}.unflatten(0, (-1, {number}))",
        }[kind]


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_number(item) for item in cast('list[Any]', value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
