"""Replay recorded operations, as far as they lead to wanted values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


class UndeferrableError(Exception):
    """A factory does something that cannot be recorded and replayed; the text says what."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in its storage, as it was when it was used."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same tensor on a storage with values."""
        empty = torch.empty(0, dtype=self.dtype)
        return cast(Any, empty).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the factory.

    Attributes:
        leaves: flattened arguments; tensors on the meta device as views, real ones as they were.
        created: views of results in storages of their own, by position.
        reads: storages whose values it uses.
        changes: storages that it writes into.
        overwrites: those of them whose earlier values it makes irrelevant.
        random: whether it draws from a generator.
    """

    function: Any
    leaves: list[Any]
    spec: Any
    created: dict[int, TensorView]
    reads: frozenset[int]
    changes: frozenset[int]
    overwrites: frozenset[int]
    random: bool

    @property
    def makes(self) -> frozenset[int]:
        """Storages that hold something else afterwards."""
        return self.changes | {view.storage for view in self.created.values()}

    @property
    def is_undefined(self) -> bool:
        """Whether its result is uninitialised memory."""
        return name_of(self.function) in _UNDEFINED


def view_of(tensor: Tensor) -> TensorView:
    """A tensor's place in its storage."""
    return TensorView(
        tensor.untyped_storage()._cdata,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def name_of(func: Any) -> str:
    """An operation's name without its overload."""
    return str(getattr(func, "overloadpacket", func).__name__)


class Replay:
    """The recorded operations, ready to be replayed.

    Args:
        operations: in the order in which the factory did them.
        num_bytes: of every storage.
    """

    def __init__(self, operations: Sequence[Operation], num_bytes: Mapping[int, int]) -> None:
        self._operations, self._num_bytes = operations, num_bytes

    def needed(self, wanted: set[int]) -> list[tuple[Operation, bool]]:
        """Operations that lead to the values of storages, and whether their results are used.

        The others only move a generator on.
        """
        live, draws = set(wanted), False
        found: list[tuple[Operation, bool]] = []
        for operation in reversed(self._operations):
            used = bool(operation.makes & live)
            # How much such an operation draws may depend on its inputs.
            used = used or (operation.random and draws and bool(operation.reads))
            made = {view.storage for view in operation.created.values()}
            if used and operation.is_undefined and any(self._num_bytes[m] for m in made):
                raise UndeferrableError("it leaves a tensor, or a part of one, undefined")
            if used:
                live -= operation.overwrites | made
                live |= operation.reads
            if used or (operation.random and draws):
                found.append((operation, used))
                draws = draws or operation.random
        return found[::-1]

    def run(
        self,
        needed: list[tuple[Operation, bool]],
        wanted: set[int],
        done: Callable[[int, torch.UntypedStorage], None],
    ) -> None:
        """Replay needed operations.

        Args:
            needed: from :meth:`needed`.
            wanted: the storages that it was asked for.
            done: called with each of these and its values as soon as they are final; memory is
                freed after its last use.
        """
        last: dict[int, int] = {}
        final: dict[int, int] = {}
        for index, (operation, used) in enumerate(needed):
            if used:
                last.update(dict.fromkeys(operation.reads | operation.makes, index))
                final.update(dict.fromkeys(operation.makes & wanted, index))
        if len(final) < len(wanted):
            raise UndeferrableError("it leaves a tensor undefined")
        ending: dict[int, list[int]] = {}
        for storage, index in last.items():
            ending.setdefault(index, []).append(storage)
        values: dict[int, torch.UntypedStorage] = {}
        for index, (operation, used) in enumerate(needed):
            self._run(operation, values if used else {}, keep=used)
            for storage in operation.makes if used else ():
                if final.get(storage) == index:
                    done(storage, values[storage])
            for storage in ending.get(index, ()):
                values.pop(storage, None)

    def _run(
        self, operation: Operation, values: dict[int, torch.UntypedStorage], *, keep: bool
    ) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, TensorView):
                if leaf.storage not in values:
                    nbytes = self._num_bytes[leaf.storage]
                    values[leaf.storage] = torch.UntypedStorage(nbytes)
                return leaf.on(values[leaf.storage])
            # A constant may be changed in place: this run must not change the next one.
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        leaves = [real(leaf) for leaf in operation.leaves]
        arguments, options = tree_unflatten(leaves, operation.spec)
        try:
            result = tree_flatten(operation.function(*arguments, **options))[0]
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            name = name_of(operation.function)
            raise UndeferrableError(f"{name} cannot be done again: {error}") from error
        for index, view in operation.created.items() if keep else ():
            made = result[index]
            if (tuple(made.stride()), made.storage_offset()) != (view.stride, view.offset):
                raise UndeferrableError(f"{name_of(operation.function)} lays memory out otherwise")
            values[view.storage] = made.untyped_storage()
