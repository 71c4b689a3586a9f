"""Read a checkpoint: any boxes of any tensor, from files that are proved unchanged first."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, check_no_hole, cover, whole
from mmlaunch.checkpoint.folder import MANIFEST_NAME, step_folders
from mmlaunch.checkpoint.manifest import Manifest, StoredBox, StoredTensor, decode
from mmlaunch.checkpoint.save import Gather
from mmlaunch.checkpoint.tensorfile import TensorSpec, dtype_of
from mmlaunch.comm.wire import Failure, caught
from mmplan.errors import InvalidInputError, MMPlanError


def prove(path: Path, *, rank: int, num_ranks: int, gather: Gather) -> None:
    """Read and hash every file of a checkpoint, each on one rank in turn; every rank calls it.

    Args:
        path: the checkpoint's folder.
        rank: this rank.
        num_ranks: in all.
        gather: takes one object per rank and its type, gives the list in rank order.

    Raises:
        InvalidInputError: on all ranks; it is damaged.
    """

    def prove_mine() -> None:
        checkpoint = open_checkpoint(path)
        checkpoint.verify(sorted(checkpoint.manifest.files)[rank::num_ranks])

    for failure in gather(caught(prove_mine), Failure | None):
        if failure is not None:
            raise failure.error()


def open_checkpoint(path: Path, *, proven: bool = False) -> Checkpoint:
    """Open ``step-N``: the manifest's checksum and every file's size are checked.

    Args:
        path: the checkpoint's folder.
        proven: :func:`prove` has found its files whole; they are not hashed again.

    Raises:
        InvalidInputError: damaged, incomplete or of a newer version; the hint names the
            checkpoint to go back to.
    """
    manifest = decode(path / MANIFEST_NAME, mend=lambda: _mend(path))
    for name, stored in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise InvalidInputError(f"{file} is missing", hint=_mend(path))
        if file.stat().st_size != stored.size_bytes:
            raise InvalidInputError(
                f"{file} has {file.stat().st_size:,} bytes, the manifest says "
                f"{stored.size_bytes:,}",
                hint=_mend(path),
            )
    return Checkpoint(path, manifest, proven=proven)


class Checkpoint:
    """An opened checkpoint; reads only the files and parts asked for.

    Args:
        path: its folder.
        manifest: its checked table of contents.
        proven: whether the files' hashes were compared.
    """

    def __init__(self, path: Path, manifest: Manifest, *, proven: bool = False) -> None:
        self.path = path
        self._proven = proven
        self.manifest = manifest
        self._tensors = {(tensor.kind, tensor.name): tensor for tensor in manifest.tensors}
        self._kinds: dict[str, list[str]] = {}
        for tensor in manifest.tensors:
            self._kinds.setdefault(tensor.name, []).append(tensor.kind)
        self._files: dict[str, Any] = {}
        self._boxes: dict[str, list[tuple[StoredTensor, StoredBox]]] = {}
        for tensor in manifest.tensors:
            for box in tensor.boxes:
                self._boxes.setdefault(box.file, []).append((tensor, box))

    def names(self, kind: str = "param") -> list[str]:
        """Full names of the tensors of one kind."""
        return [name for its_kind, name in self._tensors if its_kind == kind]

    def kinds(self, name: str) -> list[str]:
        """Kinds that are stored of one name, empty when there are none."""
        return self._kinds.get(name, [])

    def full_shape(self, name: str, kind: str = "param") -> tuple[int, ...]:
        """Shape of the unsharded tensor; InvalidInputError when it is not stored."""
        return self._find(name, kind).shape

    def spec(self, name: str, kind: str = "param") -> TensorSpec:
        """Type and shape of the unsharded tensor; InvalidInputError when it is not stored."""
        stored = self._find(name, kind)
        return TensorSpec(name=name, dtype=dtype_of(stored.dtype), shape=stored.shape)

    def load(
        self,
        name: str,
        kind: str,
        boxes: Sequence[Box],
        dtype: torch.dtype | None = None,
        *,
        full_shape: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Read parts of one tensor.

        Args:
            name: full parameter name.
            kind: as given to ``save``.
            boxes: the wanted parts of the full tensor.
            dtype: of the results; None keeps the stored one.
            full_shape: the model's; another stored shape is refused.

        Returns:
            One new CPU tensor [*box.sizes] per box.

        Raises:
            InvalidInputError: no such tensor, another shape, a hole, or a damaged file.
        """
        stored = self._find(name, kind)
        if full_shape is not None and tuple(full_shape) != stored.shape:
            raise InvalidInputError(
                f"{name} ({kind}) has shape {tuple(full_shape)}, {self.path} holds {stored.shape}",
                hint="resume with the workload that the checkpoint was saved with",
            )
        return [self._load_box(stored, box, dtype or dtype_of(stored.dtype)) for box in boxes]

    def load_whole(self, name: str, kind: str = "param") -> Tensor:
        """Read one full tensor, as stored."""
        return self.load(name, kind, [whole(self.full_shape(name, kind))])[0]

    def verify(self, files: Sequence[str] | None = None) -> None:
        """Read and hash some files; None: every one.

        Raises:
            InvalidInputError: one is damaged.
        """
        for name in self.manifest.files if files is None else files:
            self._open(name)

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()

    def _find(self, name: str, kind: str) -> StoredTensor:
        if (kind, name) not in self._tensors:
            near = difflib.get_close_matches(name, self.names(kind), n=1)
            raise InvalidInputError(
                f"{self.path} holds no {name} ({kind})" + (f", but {near[0]}" if near else ""),
                hint="resume with the workload that the checkpoint was saved with",
            )
        return self._tensors[kind, name]

    def _load_box(self, stored: StoredTensor, wanted: Box, dtype: torch.dtype) -> Tensor:
        filled = cover(wanted, [item.box for item in stored.boxes])
        check_no_hole(f"{stored.name} ({stored.kind}) in {self.path}", filled)
        out = torch.empty(wanted.sizes, dtype=dtype)
        for index, part in filled.pieces:
            item = stored.boxes[index]
            file = self._open(item.file)
            if part == item.box:
                value = file.get_tensor(item.key)
            else:
                value = file.get_slice(item.key)[part.slices_in(item.box)]
            out[part.slices_in(wanted)] = value.to(dtype)
        return out

    def _open(self, name: str) -> Any:
        """A file's reader; its hash is checked before the first byte is used."""
        if name not in self._files:
            path, stored = self.path / name, self.manifest.files[name]
            if not self._proven and _sha256(path) != stored.sha256:
                raise InvalidInputError(
                    f"{path} is damaged: its SHA-256 does not match", hint=_mend(self.path)
                )
            self._files[name] = self._reader(path)
        return self._files[name]

    def _reader(self, path: Path) -> Any:
        """A reader of a file that holds what the manifest says."""
        try:
            reader = safe_open(path, framework="pt")
            for tensor, box in self._boxes.get(path.name, ()):
                found = reader.get_slice(box.key)
                if (found.get_dtype(), tuple(found.get_shape())) != (tensor.dtype, box.sizes):
                    raise InvalidInputError(
                        f"{path}: {box.key} is not the {tensor.dtype} {box.sizes} of the manifest",
                        hint=_mend(self.path),
                    )
        except SafetensorError as error:
            raise InvalidInputError(f"{path}: {error}", hint=_mend(self.path)) from None
        return reader


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mend(path: Path) -> str:
    """The hint for a damaged checkpoint: the newest older one that opens."""
    found = step_folders(path.parent)
    number = next((number for number, folder in found if folder == path), 0)
    for _, folder in reversed([item for item in found if item[0] < number]):
        try:
            open_checkpoint(folder)
        except MMPlanError:
            continue
        return f"move {path} away and resume from the one before, {folder}"
    return f"no earlier checkpoint is whole: move {path} away and start anew, or restore a copy"
