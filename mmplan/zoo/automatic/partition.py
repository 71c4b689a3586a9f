"""A traced forward as a sequence of blocks, each of which is a function of the one before.

A value that follows from sizes, constants, buffers and whole-number inputs alone (masks, positions)
is computed anew in each block that uses it. All others are computed once, and travel through the
blocks in between. What travels has the samples first: a value without a batch (T5's position
bias) is repeated for each sample, and the sum of the rows' gradients is its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from mmplan.errors import InvalidInputError
from mmplan.zoo.automatic.tracing import BY_HAND, CALL, Traced, TracedCall

_SIZE = cast(Any, torch.ops).aten.sym_size.int
_CHECKS = ("_assert", "sym_constrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block.

    Attributes:
        layer: number of the call of its layer.
        takes: values that come from the block before; of the first one the inputs.
        nodes: computed in it, in order.
        gives: values that later blocks take; of the last one the output.
    """

    layer: TracedCall
    takes: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


class Partition:
    """The blocks of a traced forward.

    Raises:
        InvalidInputError: no layer is called, or a value cannot travel.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.order = list(traced.graph.nodes)
        self._rank = {node: i for i, node in enumerate(self.order)}
        self._inputs = [n for n in self.order if n.name in traced.inputs]
        self._inputs.sort(key=lambda node: traced.inputs.index(node.name))
        self.batch = self._inputs[0].meta["val"].shape[0]
        self._layers = [n for n in self.order if self.is_layer(n)]
        if not self._layers:
            raise InvalidInputError("the model's forward calls none of its layers", hint=BY_HAND)
        self._check_calls()
        self._free: dict[fx.Node, bool] = {}
        self._block = self._blocks()
        self.pieces = self._pieces()

    def _check_calls(self) -> None:
        """Refuse a submodule that mixes the samples, or took their number for a constant."""
        for node in self.order:
            call = self.call_of(node)
            if call is None or not call.name:
                continue
            # Of whole numbers a module may take the shape alone, as learned positions do.
            takes = any(
                self._has_batch(value) and value.meta["val"].is_floating_point()
                for value in node.all_input_nodes
            )
            if takes and not any(map(self._has_batch, node.meta["val"])):
                raise InvalidInputError(
                    f"{call.name} takes the samples, and what it returns has no dimension of them",
                    hint=BY_HAND,
                )

    def _has_batch(self, value: fx.Node | Tensor) -> bool:
        tensor: Any = value.meta.get("val") if isinstance(value, fx.Node) else value
        return isinstance(tensor, Tensor) and bool(self._batch_dims(tensor))

    def _batch_dims(self, tensor: Tensor) -> list[int]:
        """Dimensions whose size depends on the number of samples."""
        batch = cast(Any, self.batch).node.expr
        sizes = [cast(Any, s).node.expr for s in tensor.shape if isinstance(s, torch.SymInt)]
        places = [d for d, s in enumerate(tensor.shape) if isinstance(s, torch.SymInt)]
        return [d for d, size in zip(places, sizes, strict=True) if batch in size.free_symbols]

    def call_of(self, node: fx.Node) -> TracedCall | None:
        """The call that a node is."""
        return self.traced.calls[cast(int, node.args[2])] if node.target is CALL else None

    def is_layer(self, node: fx.Node) -> bool:
        """Whether the node calls a layer."""
        call = self.call_of(node)
        return call is not None and call.is_layer

    def is_stored(self, node: fx.Node) -> bool:
        """Whether it is a parameter, a buffer or a constant, which blocks own."""
        return node.op == "placeholder" and node not in self._inputs

    def is_free(self, node: fx.Node) -> bool:
        """Whether it may be computed anew in each block that uses it."""
        if node not in self._free:
            self._free[node] = self._find_free(node)
        return self._free[node]

    def _find_free(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            value = node.meta["val"]
            return not (isinstance(value, Tensor) and value.is_floating_point()) or (
                self.is_stored(node) and not value.requires_grad
            )
        if node.target is _SIZE:
            return True
        if node.target is CALL or torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            return False
        return all(self.is_free(source) for source in node.all_input_nodes)

    def _blocks(self) -> dict[fx.Node, int]:
        """The block in which each value that is not free is computed; -1 of inputs."""
        found: dict[fx.Node, int] = {}
        begun = 0
        for node in self.order:
            if node.op == "placeholder":
                found[node] = -1
            elif node.target is operator.getitem:
                found[node] = found[cast(fx.Node, node.args[0])]
            else:
                found[node] = min(begun, len(self._layers) - 1)
            begun += self.is_layer(node)
        return found

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a node is computed of: itself a value, or through free ones."""
        if node.target is _SIZE:
            return
        for source in node.all_input_nodes:
            if self.is_free(source) and source.op != "placeholder":
                yield from self._sources(source)
            elif not self.is_stored(source):
                yield source

    def _pieces(self) -> list[Piece]:
        output = self.order[-1]
        last = len(self._layers) - 1
        results = _nodes(output.args[0])
        used: dict[fx.Node, set[int]] = {}
        todo = [(source, last) for node in results for source in self._of(node)]
        while todo:
            node, block = todo.pop()
            known = used.setdefault(node, set())
            if block in known:
                continue
            known.add(block)
            if node.op != "placeholder" and len(known) == 1:
                todo += [(source, self._block[node]) for source in self._sources(node)]
        pieces: list[Piece] = []
        takes = tuple(self._inputs)
        for block, layer in enumerate(self._layers):
            later = [n for n, blocks in used.items() if max(blocks) > block >= self._block[n]]
            gives = tuple(sorted(later, key=self._rank.__getitem__)) if block < last else results
            own = [n for n in used if n.op != "placeholder" and self._block[n] == block]
            pieces.append(
                Piece(
                    layer=cast(TracedCall, self.call_of(layer)),
                    takes=takes,
                    nodes=self._with_free([*own, *(gives if block == last else ())], takes),
                    gives=gives,
                )
            )
            takes = gives
        return pieces

    def _of(self, node: fx.Node) -> list[fx.Node]:
        return [*self._sources(node)] if self.is_free(node) else [node]

    def _with_free(self, own: Iterable[fx.Node], takes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """A block's nodes, and the free ones that they need, in order."""
        found = {node for node in own if node not in takes}
        todo = list(found)
        while todo:
            node = todo.pop()
            if node.target is _SIZE:
                continue
            for source in node.all_input_nodes:
                if self.is_free(source) and source.op != "placeholder" and source not in found:
                    found.add(source)
                    todo.append(source)
        ordered = sorted(found, key=self._rank.__getitem__)
        return tuple(
            n for n in ordered if not getattr(n.target, "__name__", "").startswith(_CHECKS)
        )

    def packing(self, value: fx.Node) -> str:
        """How a value travels: ``rows`` as it is, ``each`` repeated, ``fold K`` or ``dim D``.

        Raises:
            InvalidInputError: its batch is in several dimensions, or it is no tensor.
        """
        tensor = value.meta.get("val")
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(
                f"{value.name}, which is no tensor, would have to travel between blocks",
                hint=BY_HAND,
            )
        batch = cast(Any, self.batch).node.expr
        sizes = [s.node.expr if isinstance(s, torch.SymInt) else s for s in tensor.shape]
        with_batch = self._batch_dims(tensor)
        if not with_batch:
            return "each"
        place = with_batch[0]
        if len(with_batch) == 1 and sizes[place] == batch:
            return "rows" if place == 0 else f"dim {place}"
        times = sizes[0] / batch if with_batch == [0] else None
        if times is not None and getattr(times, "is_integer", False) and times.is_number:
            return f"fold {int(times)}"
        raise InvalidInputError(
            f"{value.name}, of shape {list(tensor.shape)}, has no dimension of samples",
            hint=BY_HAND,
        )


def _nodes(value: Any) -> tuple[fx.Node, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
