"""An accelerator without hardware, which shows where code would fail or wait on a real one.

Its tensors have a device, a shape and a type, but no values and no memory: operations on them run
on torch's meta device. Tensors of the CPU are real as ever. Three things are found, each with its
place: a CPU tensor beside one of the device, a shape that only values tell, and a *host
synchronisation*: the host waits until the device has done all that it was given, to read values
or to copy memory that is not pinned.

Values of small tensors of whole numbers that came from the host are known: tokens, lengths, masks.
Any other value that the host reads is 1.

A process cannot give the device back: use one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE_TYPE = "fake_accelerator"
_ATEN = cast(Any, torch.ops.aten)
_READ = _ATEN._local_scalar_dense.default
_TO_COPY = _ATEN._to_copy.default
_COPY = _ATEN.copy_.default
# Take indices of the CPU as well. A mask is looked through for its places.
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
_MASKS = (torch.bool, torch.uint8)
# Whole numbers of tensors up to this size are known.
_MOST_KNOWN = 1 << 16
# Registrations, which end with their library.
_KEPT: list[torch.library.Library] = []
# Frames in which no fault is: files, and functions that stand in for torch's.
_NOT_PLACES = (str(Path(torch.__file__).parent), __file__)
_HANDLERS = frozenset(["__torch_dispatch__", "__torch_function__"])
FaultKind = Literal["mixed devices", "host synchronisation", "unknown shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """Something that a real accelerator would refuse, or wait for.

    Attributes:
        kind: of fault.
        detail: the operation and its tensors.
        place: file:line of the innermost code that is not torch's.
        rank: the first one on which it was found.
        instruction: that ran; "" outside of a step.
    """

    kind: FaultKind
    detail: str
    place: str
    rank: int
    instruction: str


class _Generator:
    """Random numbers have no values either."""

    def manual_seed(self, seed: int) -> None:
        """Nothing to seed."""

    def get_state(self) -> None:
        """Nothing to keep."""

    def set_state(self, state: None) -> None:
        """Nothing to put back."""


class _DeviceModule(ModuleType):
    """Answers for the device as ``torch.cuda`` does for CUDA."""

    default_generators = (_Generator(),)

    def init(self) -> None:
        """Nothing needs to be started."""

    def is_initialized(self) -> bool:
        """It is."""
        return True

    def is_available(self) -> bool:
        """It is."""
        return True

    def current_device(self) -> int:
        """The only one."""
        return 0

    def device_count(self) -> int:
        """One."""
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to seed."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types of autocast."""
        return [torch.bfloat16, torch.float16]


def register() -> torch.device:
    """Give this process the device, for good."""
    if not hasattr(torch, DEVICE_TYPE):
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, _DeviceModule(DEVICE_TYPE))
        # Autocast changes no types here.
        _KEPT.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
        _KEPT[0].fallback(torch.library.fallthrough_kernel)
        nn.Module.to = _moves_here(nn.Module.to)
    return torch.device(DEVICE_TYPE, 0)


class DeviceMismatchError(RuntimeError):
    """An operation was given tensors of the CPU and of the device."""


class DeviceTensor(Tensor):
    """A tensor of the device.

    Attributes:
        meta: the same on the meta device.
        known: its values on the CPU, where they are known.
    """

    meta: Tensor
    known: Tensor | None

    @staticmethod
    def of(meta: Tensor, known: Tensor | None = None) -> DeviceTensor:
        """The tensor of the device that is like one on the meta device."""
        made: Any = Tensor._make_wrapper_subclass(
            DeviceTensor,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device(DEVICE_TYPE, 0),
        )
        made.meta, made.known = meta, known
        return made

    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        """Outside of :class:`FakeAccelerator` there is nothing to do with it."""
        raise RuntimeError(f"{func} outside of the fake accelerator")

    def tolist(self) -> Any:
        """By one copy to the host, as of any device."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({_shown([self])})"


def _moves_here(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``nn.Module.to`` that can move to the device.

    A real tensor cannot become one of the device in place: torch would part tied parameters.
    """

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not (args and _is_ours(args[0])):
            return to(module, *args, **kwargs)
        new: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, old in list(tensors.items()):
                    if old is None or isinstance(old, DeviceTensor):
                        continue
                    if old not in new:
                        value = old.detach().to(args[0])
                        is_parameter = isinstance(old, nn.Parameter)
                        new[old] = nn.Parameter(value, old.requires_grad) if is_parameter else value
                    tensors[name] = cast(Any, new[old])
        return module

    return moved


class FakeAccelerator(TorchDispatchMode):
    """The device of one rank, inside ``with`` in the rank's thread.

    Args:
        rank: for messages.

    Attributes:
        faults: the first of each kind and place.
        instruction: that runs, for messages.
        in_step: whether a host synchronisation is a fault now.
        num_synchronisations: of the host, faults or not.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank
        self.faults: dict[tuple[FaultKind, str], DeviceFault] = {}
        self.instruction = ""
        self.in_step = False
        self.num_synchronisations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the detour costs more than an operation.
        return False

    def __enter__(self) -> Self:
        # Constants are made on the CPU and then copied: torch has no memory of the device.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation: on the CPU as it is, on the device without values."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = any(type(tensor) is DeviceTensor for tensor in tensors)
        if not (here or _is_ours(kwargs.get("device"))):
            return func(*args, **kwargs)
        if func is _READ:
            self._synchronises(f"reads a value of {_shown(tensors)}")
            return func(_values(args[0]))
        if func is _TO_COPY and self._goes_to_host(args[0], kwargs.get("device"), kwargs):
            return func(_values(args[0]), **kwargs)
        if func is _COPY and self._goes_to_host(args[1], args[0].device, kwargs, *args[2:]):
            return func(args[0], _values(args[1]))
        if func not in (_TO_COPY, _COPY):
            self._check_devices(func, tensors)
        if _reads_shape(func, args, kwargs):
            return self._shape_from_values(func, tensors, args, kwargs)
        return self._run(func, tensors, args, kwargs)

    def _goes_to_host(
        self, source: Tensor, target: Any, options: dict[str, Any], non_blocking: bool = False
    ) -> bool:
        """Whether a copy goes to the host; one that the host waits for is noted."""
        was_here = isinstance(source, DeviceTensor)
        is_here = was_here if target is None else _is_ours(target)
        if was_here != is_here and not (non_blocking or options.get("non_blocking")):
            way = "to the host" if was_here else "to the device"
            self._synchronises(f"copies {_shown([source])} {way}")
        return was_here and not is_here

    def _check_devices(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors of the CPU, but for numbers that are read and for indices."""
        written = tensors[0] if tensors and func._schema.is_mutable else None
        others = [
            tensor
            for tensor in tensors
            if not isinstance(tensor, DeviceTensor) and (tensor.dim() or tensor is written)
        ]
        indices = func in _INDEXING and others and others[0] is not tensors[0]
        if others and not (indices and all(map(_can_be_known, others))):
            self._note("mixed devices", f"{func} of {_shown(tensors)}")
            raise DeviceMismatchError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{others[0].device.type} and {DEVICE_TYPE}: {func} of {_shown(tensors)}"
            )

    def _shape_from_values(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation whose shape the host must read, where it can be known."""
        values = [_known(tensor) for tensor in tensors]
        if any(value is None for value in values):
            self._note("unknown shape", f"{func} of {_shown(tensors)}")
        self._synchronises(f"{func} of {_shown(tensors)}")
        given, options = tree_map_only(Tensor, _values, (args, kwargs))
        return tree_map_only(Tensor, _with_values, func(*given, **options))

    def _run(
        self, func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given, options = tree_map_only(Tensor, _on_meta, (args, kwargs))
        if "device" in options:
            options["device"] = "meta"
        same = {id(tensor.meta): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}

        def here(found: Tensor) -> Tensor:
            return same[id(found)] if id(found) in same else DeviceTensor.of(found)

        result = tree_map_only(Tensor, here, func(*given, **options))
        self._follow_values(func, tensors, args, kwargs, result)
        return result

    def _follow_values(
        self,
        func: Any,
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Compute the values of results as well, where those of all tensors are known."""
        results = tree_leaves(result)
        found = [tensor for tensor in results if isinstance(tensor, DeviceTensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        known = all(_known(tensor) is not None for tensor in tensors)
        if not found or random or not known or not all(map(_can_be_known, found)):
            if func._schema.is_mutable and isinstance(args[0], DeviceTensor):
                args[0].known = None
            return
        given, options = tree_map_only(Tensor, _known, (args, kwargs))
        if "device" in options:
            options["device"] = "cpu"
        for tensor, value in zip(results, tree_leaves(func(*given, **options)), strict=True):
            if isinstance(tensor, DeviceTensor):
                tensor.known = value

    def _synchronises(self, detail: str) -> None:
        self.num_synchronisations += 1
        if self.in_step:
            self._note("host synchronisation", detail)

    def _note(self, kind: FaultKind, detail: str) -> None:
        fault = DeviceFault(
            kind=kind,
            detail=detail,
            place=_place(),
            rank=self._rank,
            instruction=self.instruction,
        )
        self.faults.setdefault((kind, fault.place), fault)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE_TYPE


def _reads_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host reads values to know an operation's shape; of indexing where masks are."""
    if func in _INDEXING:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    return dynamic and kwargs.get("output_size") is None


def _can_be_known(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.numel() <= _MOST_KNOWN


def _known(tensor: Tensor) -> Tensor | None:
    """The values of a tensor on the CPU, where they are known."""
    if isinstance(tensor, DeviceTensor):
        return tensor.known
    return tensor if _can_be_known(tensor) else None


def _values(tensor: Tensor) -> Tensor:
    """What the host reads."""
    known = _known(tensor)
    return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known


def _with_values(values: Tensor) -> Tensor:
    known = values if _can_be_known(values) else None
    return DeviceTensor.of(values.to("meta"), known)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, DeviceTensor) else tensor.to("meta")


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_PLACES) or frame.f_code.co_name in _HANDLERS
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _shown(tensors: Sequence[Tensor]) -> str:
    shown = [
        f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device.type}" for t in tensors
    ]
    return ", ".join(shown)
