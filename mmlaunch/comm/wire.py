"""Objects that ranks exchange outside the steps, as bytes: JSON, and tensors as safetensors.

torch's own exchange of objects unpickles bytes from a socket, which runs any code that the
sender likes. Here data stay data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, cast

import safetensors.torch
import torch
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from pydantic_core import PydanticSerializationError
from torch import Tensor

from mmplan.errors import (
    InvalidInputError,
    MMPlanError,
    NotFiniteError,
    RunFailedError,
    UnfitEnvironmentError,
)

_TENSOR = "$tensor"
# What a user reads; one that is of two kinds is of the first.
_KNOWN = (InvalidInputError, UnfitEnvironmentError, NotFiniteError, RunFailedError)
_LENGTH_BYTES = 8

# A type of numbers in a dataclass that travels.
DType = Annotated[
    torch.dtype,
    PlainValidator(lambda given: given if isinstance(given, torch.dtype) else _dtype(given)),
    PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."), return_type=str),
]


def pack(item: Any, kind: Any = Any) -> bytes:
    """A value as bytes.

    Args:
        item: numbers, strings, None, lists and dicts with strings as keys, and tensors among
            them; or a value of ``kind``.
        kind: a type that pydantic knows, such as a dataclass.

    Raises:
        InvalidInputError: something else is in it.
    """
    tensors: dict[str, Tensor] = {}

    def keep(value: object) -> object:
        if not isinstance(value, Tensor):
            raise InvalidInputError(
                f"a {type(value).__name__} cannot travel between ranks",
                hint="use numbers, strings, lists, dicts with strings as keys, and tensors",
            )
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}

    try:
        tree = _adapter(kind).dump_python(item, mode="json", fallback=keep)
    except PydanticSerializationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, MMPlanError) else InvalidInputError(str(error)) from None
    text = json.dumps(tree).encode()
    stored = safetensors.torch.save(tensors) if tensors else b""
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + stored


def unpack(data: bytes, kind: Any = Any) -> Any:
    """The value that :func:`pack` was given; a tuple of no stated kind comes as a list.

    Raises:
        ValueError: the bytes are none of it.
    """
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    stored = safetensors.torch.load(data[end:]) if len(data) > end else {}

    def back(tree: dict[str, Any]) -> Any:
        return stored[tree[_TENSOR]] if tree.keys() == {_TENSOR} else tree

    tree = json.loads(data[_LENGTH_BYTES:end], object_hook=back if stored else None)
    return _adapter(kind).validate_python(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on its way to another rank."""

    kind: str
    message: str
    hint: str | None = None
    errno: int | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """An exception's class, message and hint."""
        if isinstance(error, OSError) and error.errno is not None:
            return cls(kind="OSError", message=error.strerror or str(error), errno=error.errno)
        hint = error.hint if isinstance(error, MMPlanError) else None
        kind = next((known for known in _KNOWN if isinstance(error, known)), type(error))
        return cls(kind=kind.__name__, message=str(error), hint=hint)

    def error(self) -> Exception:
        """The exception again; one that is not for the user becomes a failed run."""
        if self.errno is not None:
            return OSError(self.errno, self.message)
        for known in _KNOWN:
            if self.kind == known.__name__:
                return known(self.message, hint=self.hint)
        return RunFailedError(f"{self.kind}: {self.message}", hint=self.hint)


def caught(action: Callable[[], Any]) -> Failure | None:
    """The failure of an action, caught: all ranks must come to the next exchange."""
    try:
        action()
    except Exception as error:
        return Failure.of(error)
    return None


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return cast(torch.dtype, found)
