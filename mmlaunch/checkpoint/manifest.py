"""A checkpoint's table of contents: the tensors of every file, and the file's hash.

The manifest's first line holds the SHA-256 of all its other bytes, so that any changed
bit of it is seen; the whole is still one JSON document.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    ValidationError,
    field_validator,
    model_validator,
)

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.folder import FileDigest, checksum_line
from mmlaunch.checkpoint.tensorfile import dtype_of
from mmplan.errors import InvalidInputError
from mmplan.schema.base import Index, parse_json, read_bytes

MANIFEST_VERSION = 1
# A hundred thousand boxes have as much: shards of large models on many ranks.
_MOST_ENTRIES = 5_000_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredBox(_Strict):
    """One box of one tensor, under its own key of a rank's file."""

    offsets: tuple[Index, ...]
    sizes: tuple[Index, ...]
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
    shape: tuple[Index, ...]
    dtype: str
    boxes: Annotated[tuple[StoredBox, ...], FailFast()]

    @field_validator("dtype")
    @classmethod
    def _known_type(cls, value: str) -> str:
        try:
            dtype_of(value)
        except KeyError:
            raise ValueError(f"{value!r:.40} is no type that is saved") from None
        return value

    @model_validator(mode="after")
    def _boxes_lie_in_it(self) -> StoredTensor:
        for box in self.boxes:
            if not len(box.offsets) == len(box.sizes) == len(self.shape) or any(
                lo + n > whole
                for lo, n, whole in zip(box.offsets, box.sizes, self.shape, strict=True)
            ):
                raise ValueError(f"{self.name!r:.60}: a box is not inside of {self.shape}")
        return self


class Manifest(_Strict):
    """The whole table; ``state`` and ``meta`` are the caller's own JSON."""

    version: Index
    step: Index
    meta: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileDigest]
    tensors: Annotated[tuple[StoredTensor, ...], FailFast()]

    @model_validator(mode="after")
    def _files_are_listed(self) -> Manifest:
        named = {box.file for tensor in self.tensors for box in tensor.boxes}
        for name in sorted(named - self.files.keys()):
            raise ValueError(f"tensors are in {name!r:.60}, which is not among the files")
        return self


def decode(path: Path, *, mend: Callable[[], str]) -> Manifest:
    """Read a manifest.

    Args:
        path: the file.
        mend: gives the hint of an error.

    Raises:
        InvalidInputError: it is missing, changed, of a newer version or not a manifest.
    """
    try:
        data = read_bytes(path)
        line, newline, rest = data.partition(b"\n")
        if line + newline != checksum_line(rest):
            raise InvalidInputError(f"{path} is damaged: its checksum does not match")
        text = data.decode(errors="replace")
        # The checksum's line begins an object, so the whole is one.
        content = cast("dict[str, Any]", parse_json(text, path, most_entries=_MOST_ENTRIES))
        del content["sha256"]
    except InvalidInputError as error:
        raise InvalidInputError(error.message, hint=mend()) from None
    version = content.get("version")
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise InvalidInputError(
            f"{path} has version {version}, this mmlaunch reads up to {MANIFEST_VERSION}",
            hint="upgrade mmplan",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise InvalidInputError(
            ": ".join(filter(None, [str(path), where, said])), hint=mend()
        ) from exc
