"""Build a module on the meta device, then materialise some of its tensors.

A factory runs once on the meta device while every operation on tensors is recorded. Values of
given tensors are then made by replaying, in order, only the operations that lead to them: they
are those of an ordinary build, bit for bit, buffers included. Random draws for tensors that
nobody wants are made and dropped one at a time, because the generator must come to the wanted
ones in the same state.

A factory that cannot be recorded (Python code looks at values, a generator is seeded on the way,
memory is left undefined) raises :class:`UndeferrableError`; an ordinary build is then the way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmlaunch.model.replay_init import (
    Operation,
    Replay,
    TensorView,
    UndeferrableError,
    name_of,
    view_of,
)

_ATEN = cast(Any, torch.ops.aten)
# Rejects and draws again until all values fit, so it looks at them.
_TRUNCATED = "_no_grad_trunc_normal_"
# In-place operations whose result does not depend on the earlier values.
_OVERWRITING = frozenset(
    {"zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"}
    | {"exponential_", "log_normal_", "cauchy_", "geometric_", _TRUNCATED}
)
_REFUSED = frozenset({"set_", "resize_", "resize_as_", "swap_"})
_SEEN: dict[Any, Any] = {
    cast(Any, Tensor).is_meta.__get__: False,
    cast(Any, Tensor).is_cpu.__get__: True,
    cast(Any, Tensor).device.__get__: torch.device("cpu"),
}
_LOOKS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})


@contextmanager
def recording() -> Generator[Recording]:
    """Record a factory: ``with recording() as record: module = build()``.

    Inside, new tensors are on the meta device, and say that they are on the CPU: initialisers
    do nothing on the meta device. Constants made of Python numbers are real.
    """
    record = Recording()
    draw: Any = getattr(torch.nn.init, _TRUNCATED)
    setattr(torch.nn.init, _TRUNCATED, record.truncated(draw))
    try:
        with _AsOnCPU(record.values), record:
            yield record
    finally:
        setattr(torch.nn.init, _TRUNCATED, draw)


class _AsOnCPU(TorchFunctionMode):
    """Tensors without values look like any others to Python code.

    Args:
        values: makes a tensor's values.
    """

    def __init__(self, values: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer for one call of torch."""
        if func in _SEEN and args[0].is_meta:
            return _SEEN[func]
        if func in _LOOKS and args[0].is_meta:
            args = (self._values(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """The operations of a factory; made by :func:`recording`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []
        # Kept so that an address stands for one storage.
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Generators that the factory drew from, as they were when it did.
        self._generators: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation on the meta device and record it."""
        with torch._C.DisableTorchFunction():  # see the real device here
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_meta = any(tensor.is_meta for tensor in tensors)
        if func is _ATEN._local_scalar_dense.default and on_meta:
            return self.values(tensors[0]).item()
        makes = any(argument.name == "device" for argument in func._schema.arguments)
        if func is _ATEN.lift_fresh.default or not (makes or on_meta):
            return self._run_real(func, args, kwargs, tensors)
        return self._note(func, leaves, spec, makes=makes)

    def _run_real(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if _is_random(func) and tensors:
            raise UndeferrableError("it draws random numbers into a constant")
        return func(*args, **kwargs)

    def _note(self, func: Any, leaves: list[Any], spec: Any, *, makes: bool) -> Any:
        if name_of(func) in _REFUSED:
            raise UndeferrableError(f"it changes a tensor's memory ({name_of(func)})")
        random = _is_random(func)
        if random:
            self._check_generator(leaves)
        noted = [self._view(leaf) if _is_meta(leaf) else _real_device(leaf) for leaf in leaves]
        given = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # The meta device has no generators.
        given = [None if isinstance(leaf, torch.Generator) else leaf for leaf in given]
        arguments, options = tree_unflatten(given, spec)
        if makes:
            options = {k: v for k, v in options.items() if k != "pin_memory"}
            options["device"] = "meta"
        changes = self._changes(func, leaves, spec)
        result = func(*arguments, **options)
        created = {
            index: view
            for index, view in enumerate(map(self._new_view, tree_flatten(result)[0]))
            if view is not None
        }
        if created or changes:
            self._append(func, noted, spec, created, changes, random=random)
        return result

    def _append(
        self,
        func: Any,
        leaves: list[Any],
        spec: Any,
        created: dict[int, TensorView],
        changes: set[int],
        *,
        random: bool,
    ) -> None:
        views = [leaf for leaf in leaves if isinstance(leaf, TensorView)]
        used = [view.storage for view in views]
        overwrites = {
            view.storage
            for view in views
            if view.storage in changes
            and name_of(func) in _OVERWRITING
            and used.count(view.storage) == 1
            and _covers(view, self._storages[view.storage].nbytes())
        }
        self._operations.append(
            Operation(
                function=func,
                leaves=leaves,
                spec=spec,
                created=created,
                reads=frozenset(used) - overwrites,
                changes=frozenset(changes),
                overwrites=frozenset(overwrites),
                random=random,
            )
        )

    def _changes(self, func: Any, leaves: list[Any], spec: Any) -> set[int]:
        """Storages that an operation writes into."""
        arguments, options = tree_unflatten(leaves, spec)
        found: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = arguments[position] if position < len(arguments) else options.get(argument.name)
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, Tensor):
                    if not tensor.is_meta:
                        raise UndeferrableError("it writes computed values into a constant")
                    found.add(tensor.untyped_storage()._cdata)
        return found

    def _view(self, tensor: Tensor) -> TensorView:
        view = view_of(tensor)
        if view.storage not in self._storages:
            raise UndeferrableError("it uses a tensor without values that was made elsewhere")
        return view

    def _new_view(self, value: Any) -> TensorView | None:
        """The view of a result in a storage of its own; None where the storage is known."""
        if not _is_meta(value):
            return None
        view = view_of(value)
        if view.storage in self._storages:
            return None
        self._storages[view.storage] = value.untyped_storage()
        return view

    def _check_generator(self, leaves: list[Any]) -> None:
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        generator = torch.default_generator if given is None else given
        state = generator.get_state()
        first = self._generators.setdefault(generator, state)
        # Nothing was drawn meanwhile, so only the factory can have changed it.
        if not torch.equal(first, state):
            raise UndeferrableError("it seeds a generator between two draws")

    def values(self, tensor: Tensor) -> Tensor:
        """The values that Python code asks for."""
        view, found = self._view(tensor), list[Tensor]()
        again = self._again()
        needed = again.needed({view.storage})
        if any(operation.random for operation, _ in needed):
            raise UndeferrableError("it looks at random numbers")

        def keep(_: int, storage: torch.UntypedStorage) -> None:
            found.append(view.on(storage).clone())

        with _disable_current_modes(), torch.no_grad():
            again.run(needed, {view.storage}, keep)
        return found[0]

    def truncated(self, draw: Any) -> Callable[..., Tensor]:
        """An initialiser that draws until all fits, recorded as one operation."""

        def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                leaves, spec = tree_flatten(((tensor, *args), kwargs))
                self._check_generator(leaves)
                views = [self._view(leaf) if _is_meta(leaf) else leaf for leaf in leaves]
                changes = {view.storage for view in views if isinstance(view, TensorView)}
                self._append(draw, views, spec, {}, changes, random=True)
            return tensor

        return note

    def replay(self, wanted: Iterable[Tensor], done: Callable[[int, Tensor], None]) -> None:
        """Make the values of tensors of the recorded module.

        Args:
            wanted: tensors on the meta device, none sharing memory with another.
            done: called for each with its position and its values, which it must not keep, as
                soon as they are final; a tensor needs memory up to that call at most.

        Raises:
            UndeferrableError: values were never defined, or two tensors share memory.
        """
        views = [self._view(tensor) for tensor in wanted]
        index_of = {view.storage: index for index, view in enumerate(views)}
        if len(index_of) < len(views):
            raise UndeferrableError("it makes two tensors that share memory")

        def finish(storage: int, values: torch.UntypedStorage) -> None:
            index = index_of[storage]
            done(index, views[index].on(values))

        again = self._again()
        needed = again.needed(set(index_of))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for generator, state in self._generators.items():
                generator.set_state(state)
            again.run(needed, set(index_of), finish)

    def _again(self) -> Replay:
        num_bytes = {key: storage.nbytes() for key, storage in self._storages.items()}
        return Replay(self._operations, num_bytes)

    def storages(self) -> list[StorageWeakRef]:
        """Weak references to all recorded memory, to see later whether any of it is still held."""
        return [StorageWeakRef(storage) for storage in self._storages.values()]


def _covers(view: TensorView, nbytes: int) -> bool:
    """Whether a tensor is all of its storage, without gaps."""
    expected = 1
    for size, stride in sorted(zip(view.size, view.stride, strict=True), key=lambda x: x[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return view.offset == 0 and expected * view.dtype.itemsize == nbytes


def _real_device(value: Any) -> Any:
    """An argument as an ordinary build has it: torch's own C++ asks a tensor for its device."""
    on_meta = isinstance(value, torch.device) and value.type == "meta"
    return torch.device("cpu") if on_meta else value


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
