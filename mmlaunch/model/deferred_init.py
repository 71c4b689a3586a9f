"""Build a module on the meta device, then materialise the blocks that a rank keeps.

A factory runs once on the meta device while every operation on tensors is recorded. Values of
given tensors are then made by replaying, in order, only the operations that lead to them: they
are those of an ordinary build, bit for bit, buffers included. Random draws for tensors that
nobody wants are made and dropped one at a time, because the generator must come to the wanted
ones in the same state.

A factory that cannot be recorded (Python code looks at values, a generator is seeded on the way,
memory is left undefined) raises :class:`UndeferrableError`; an ordinary build is then the way.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.exported_weights import InitialWeights
from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_module
from mmplan.schema.workload import Workload

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
_UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


class UndeferrableError(Exception):
    """A factory does something that cannot be recorded and replayed; the text says what."""


@dataclass(frozen=True, slots=True)
class _TensorView:
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
class _Operation:
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
    created: dict[int, _TensorView]
    reads: frozenset[int]
    changes: frozenset[int]
    overwrites: frozenset[int]
    random: bool

    @property
    def makes(self) -> frozenset[int]:
        """Storages that hold something else afterwards."""
        return self.changes | {view.storage for view in self.created.values()}


def _view_of(tensor: Tensor) -> _TensorView:
    return _TensorView(
        tensor.untyped_storage()._cdata,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def _name_of(func: Any) -> str:
    """An operation's name without its overload."""
    return str(getattr(func, "overloadpacket", func).__name__)


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
        self._operations: list[_Operation] = []
        # Kept so that an address stands for one storage.
        self.storages: dict[int, torch.UntypedStorage] = {}
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
            if _is_random(func) and tensors:
                raise UndeferrableError("it draws random numbers into a constant")
            return func(*args, **kwargs)
        return self._note(func, leaves, spec, makes=makes)

    def _note(self, func: Any, leaves: list[Any], spec: Any, *, makes: bool) -> Any:
        if _name_of(func) in _REFUSED:
            raise UndeferrableError(f"it changes a tensor's memory ({_name_of(func)})")
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
        created: dict[int, _TensorView],
        changes: set[int],
        *,
        random: bool,
    ) -> None:
        views = [leaf for leaf in leaves if isinstance(leaf, _TensorView)]
        used = [view.storage for view in views]
        overwrites = {
            view.storage
            for view in views
            if view.storage in changes
            and _name_of(func) in _OVERWRITING
            and used.count(view.storage) == 1
            and _covers(view, self.storages[view.storage].nbytes())
        }
        self._operations.append(
            _Operation(
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

    def _view(self, tensor: Tensor) -> _TensorView:
        view = _view_of(tensor)
        if view.storage not in self.storages:
            raise UndeferrableError("it uses a tensor without values that was made elsewhere")
        return view

    def _new_view(self, value: Any) -> _TensorView | None:
        """The view of a result in a storage of its own; None where the storage is known."""
        if not _is_meta(value):
            return None
        view = _view_of(value)
        if view.storage in self.storages:
            return None
        self.storages[view.storage] = value.untyped_storage()
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
        needed = self._needed({view.storage})
        if any(operation.random for operation, _ in needed):
            raise UndeferrableError("it looks at random numbers")

        def keep(_: int, storage: torch.UntypedStorage) -> None:
            found.append(view.on(storage).clone())

        with _disable_current_modes(), torch.no_grad():
            self._run(needed, {view.storage}, keep)
        return found[0]

    def truncated(self, draw: Any) -> Callable[..., Tensor]:
        """An initialiser that draws until all fits, recorded as one operation."""

        def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                leaves, spec = tree_flatten(((tensor, *args), kwargs))
                self._check_generator(leaves)
                views = [self._view(leaf) if _is_meta(leaf) else leaf for leaf in leaves]
                changes = {view.storage for view in views if isinstance(view, _TensorView)}
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

        needed = self._needed(set(index_of))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for generator, state in self._generators.items():
                generator.set_state(state)
            self._run(needed, set(index_of), finish)

    def _needed(self, wanted: set[int]) -> list[tuple[_Operation, bool]]:
        """Operations that lead to the values of storages, and whether their results are used.

        The others only move a generator on.
        """
        live, draws = set(wanted), False
        found: list[tuple[_Operation, bool]] = []
        for operation in reversed(self._operations):
            used = bool(operation.makes & live)
            # How much such an operation draws may depend on its inputs.
            used = used or (operation.random and draws and bool(operation.reads))
            made = {view.storage for view in operation.created.values()}
            empty = _name_of(operation.function) in _UNDEFINED
            if used and empty and any(self.storages[m].nbytes() for m in made):
                raise UndeferrableError("it leaves a tensor, or a part of one, undefined")
            if used:
                live -= operation.overwrites | made
                live |= operation.reads
            if used or (operation.random and draws):
                found.append((operation, used))
                draws = draws or operation.random
        return found[::-1]

    def _run(
        self,
        needed: list[tuple[_Operation, bool]],
        wanted: set[int],
        done: Callable[[int, torch.UntypedStorage], None],
    ) -> None:
        """Replay needed operations.

        Args:
            needed: from :meth:`_needed`.
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
            self._run_one(operation, values if used else {}, keep=used)
            for storage in operation.makes if used else ():
                if final.get(storage) == index:
                    done(storage, values[storage])
            for storage in ending.get(index, ()):
                values.pop(storage, None)

    def _run_one(
        self, operation: _Operation, values: dict[int, torch.UntypedStorage], *, keep: bool
    ) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, _TensorView):
                if leaf.storage not in values:
                    nbytes = self.storages[leaf.storage].nbytes()
                    values[leaf.storage] = torch.UntypedStorage(nbytes)
                return leaf.on(values[leaf.storage])
            # A constant may be changed in place: this run must not change the next one.
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        leaves = [real(leaf) for leaf in operation.leaves]
        arguments, options = tree_unflatten(leaves, operation.spec)
        try:
            result = tree_flatten(operation.function(*arguments, **options))[0]
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            name = _name_of(operation.function)
            raise UndeferrableError(f"{name} cannot be done again: {error}") from error
        for index, view in operation.created.items() if keep else ():
            made = result[index]
            if (tuple(made.stride()), made.storage_offset()) != (view.stride, view.offset):
                raise UndeferrableError(f"{_name_of(operation.function)} lays memory out otherwise")
            values[view.storage] = made.untyped_storage()


def _covers(view: _TensorView, nbytes: int) -> bool:
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


@dataclass(slots=True)
class _Slot:
    """One tensor of the kept blocks, with every attribute that holds it.

    Attributes:
        full: the tensor that the factory made.
        local: the meta tensor to replace; of a cut parameter, its shard.
        boxes: the kept parts of the full tensor; None keeps all.
        attributes: dictionaries of modules, and the key in each.
    """

    full: Tensor
    local: Tensor
    boxes: Sequence[Box] | None
    attributes: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def put(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """Replace the meta tensor in every attribute by its values."""
        value = parts[0].clone() if len(parts) == 1 else torch.cat(list(parts))
        # A part of a row is contiguous here as it is where a whole parameter was cut.
        value = (value if self.boxes is None else value.contiguous()).to(device)
        if isinstance(self.local, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.local.requires_grad)
        for attributes, key in self.attributes:
            attributes[key] = value


class MetaModule:
    """A module on the meta device, and the record from which its values can be made.

    Args:
        workload: gives the factory and the weights to start from.
        owner: the module's name.
        folder: the workload file's folder.

    Attributes:
        module: the whole module; blocks may be cut afterwards.

    Raises:
        UndeferrableError: the factory failed, or cannot be recorded.
        InvalidInputError: the weights to start from are wrong.
    """

    def __init__(self, workload: Workload, owner: str, folder: Path) -> None:
        try:
            with recording() as self._record:
                self.module = build_module(workload, owner, folder)
        except InvalidInputError as error:
            # The factory's own failure, if it is one, comes again from an ordinary build.
            raise UndeferrableError(str(error.__cause__ or error.message)) from None
        init = workload.modules[owner].init
        self._initial = None if init is None else InitialWeights(folder / init, self.module, owner)
        self._full = dict[str, Tensor](self.module.named_parameters(remove_duplicate=False))
        self._full |= self.module.named_buffers(remove_duplicate=False)

    def materialise(
        self,
        blocks: Mapping[int, nn.Module],
        cuts: Mapping[str, Sequence[Box]],
        device: torch.device,
    ) -> None:
        """Make the values of some blocks; those of others never exist all at once.

        Args:
            blocks: by their index in the module; they lose their meta tensors.
            cuts: kept parts of cut parameters, by name in the module.
            device: of the values.

        Raises:
            UndeferrableError: the factory's operations cannot be replayed.
        """
        slots = list(self._slots(blocks, cuts).values())
        computed: list[_Slot] = []
        for slot in slots:
            if self._initial is not None and self._initial.has(slot.full):
                slot.put(self._initial.read(slot.full, slot.boxes), device)
            else:
                computed.append(slot)

        def done(index: int, value: Tensor) -> None:
            boxes = computed[index].boxes
            parts = [value] if boxes is None else [value[box.slices] for box in boxes]
            computed[index].put(parts, device)

        self._record.replay([slot.full for slot in computed], done)
        for block in blocks.values():
            block.to(device)  # constants that were real all along

    def _slots(
        self, blocks: Mapping[int, nn.Module], cuts: Mapping[str, Sequence[Box]]
    ) -> dict[Tensor, _Slot]:
        slots: dict[Tensor, _Slot] = {}
        for name, attributes, key in _meta_tensors(blocks):
            local: Tensor = attributes[key]
            full = self._full.get(name, local)
            if local._backward_hooks:
                raise UndeferrableError(f"it registers a hook on {name}")
            slot = slots.setdefault(full, _Slot(full, local, cuts.get(name)))
            slot.attributes.append((attributes, key))
        return slots

    def storages(self) -> list[StorageWeakRef]:
        """Memory that must be free when this object and the module are."""
        return [StorageWeakRef(storage) for storage in self._record.storages.values()]


def check_gone(storages: Sequence[StorageWeakRef]) -> None:
    """Refuse a module of which a meta tensor is still held.

    Raises:
        UndeferrableError: a block reaches for a tensor outside itself, or keeps one in a list.
    """
    if not all(storage.expired() for storage in storages):
        gc.collect()
    if not all(storage.expired() for storage in storages):
        raise UndeferrableError("it keeps tensors that no module has as an attribute")


def _meta_tensors(blocks: Mapping[int, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of every meta tensor of blocks."""
    for index, block in blocks.items():
        for prefix, module in block.named_modules():
            start = f"{index}.{prefix}." if prefix else f"{index}."
            for attributes in (module._parameters, module._buffers, vars(module)):
                for key, value in list(attributes.items()):
                    if isinstance(value, Tensor) and value.is_meta:
                        yield start + key, attributes, key
