"""A checkpoint's table of contents: the tensors of every file, and the file's hash.

The manifest's first line holds the SHA-256 of all its other bytes, so that any changed
bit of it is seen; the whole is still one JSON document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.tensorfile import FileDigest
from mmplan.errors import InvalidInputError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredBox(_Strict):
    """One box of one tensor, under its own key of a rank's file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @field_validator("file")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if Path(value).name != value:
            raise ValueError(f"{value!r} is not the name of a file in the checkpoint's folder")
        return value

    @property
    def box(self) -> Box:
        """Its place in the full tensor."""
        return Box(offsets=self.offsets, sizes=self.sizes)


class StoredTensor(_Strict):
    """One full tensor; ``dtype`` as safetensors names it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class Manifest(_Strict):
    """The whole table; ``state`` and ``meta`` are the caller's own JSON."""

    version: int
    step: int
    meta: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileDigest]
    tensors: tuple[StoredTensor, ...]


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes, checksum line first.

    Raises:
        TypeError: ``state`` or ``meta`` is not JSON.
    """
    fields = manifest.model_dump().items()
    rest = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields) + "}\n"
    return _checksum_line(rest.encode()) + rest.encode()


def decode(path: Path, *, mend: Callable[[], str]) -> Manifest:
    """Read a manifest.

    Args:
        path: the file.
        mend: gives the hint of an error.

    Raises:
        InvalidInputError: it is missing, changed, of a newer version or not a manifest.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InvalidInputError(f"{path}: {exc.strerror}", hint=mend()) from exc
    line, newline, rest = data.partition(b"\n")
    if line + newline != _checksum_line(rest):
        raise InvalidInputError(f"{path} is damaged: its checksum does not match", hint=mend())
    content: dict[str, Any] = json.loads(data)
    del content["sha256"]
    version = content.get("version", 0)
    if version > MANIFEST_VERSION:
        raise InvalidInputError(
            f"{path} has version {version}, this mmlaunch reads up to {MANIFEST_VERSION}",
            hint="upgrade mmplan",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{path}: {where}: {first['msg']}", hint=mend()) from exc


def _checksum_line(rest: bytes) -> bytes:
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


_STEP_NAME = re.compile(r"step-(\d+)")


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint under a root, oldest first."""
    if not root.is_dir():
        return []
    found = ((_STEP_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())
