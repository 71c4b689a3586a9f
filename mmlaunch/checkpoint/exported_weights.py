"""Trained weights as users know them: unsharded, in safetensors, by full name.

Small models are one file. Larger ones are several with an index in Hugging Face's
format, which that library's loaders read as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box, check_no_hole, cover, whole
from mmlaunch.checkpoint.distributed import METADATA_NAME, DistributedWeights, no_such_weight
from mmlaunch.checkpoint.folder import FileDigest, sync_folder, write_synced
from mmlaunch.checkpoint.tensorfile import (
    TensorSpec,
    dtype_of,
    file_order,
    storage_error,
    write_tensors,
)
from mmplan.errors import InvalidInputError

# Hugging Face's usual size of a shard.
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
_INDEX_SUFFIX = ".safetensors.index.json"


def weights_order(
    specs: Sequence[TensorSpec], *, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
) -> list[list[TensorSpec]]:
    """The tensors of every file, in the order in which ``write_weights`` reads them.

    Ranks that hold parts of the tensors send them in this order.
    """
    files: list[list[TensorSpec]] = [[]]
    size_bytes = 0
    for spec in specs:
        if files[-1] and size_bytes + spec.size_bytes > max_file_bytes:
            files.append([])
            size_bytes = 0
        files[-1].append(spec)
        size_bytes += spec.size_bytes
    return [file_order(file) for file in files]


def write_weights(
    path: Path,
    specs: Sequence[TensorSpec],
    read: Callable[[str], Tensor],
    *,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    mend: str = "make room, then run again with --resume",
) -> list[Path]:
    """Write all weights; a kill leaves the old ones whole.

    One full tensor is held at a time: ``read`` assembles it from its boxes.

    Args:
        path: ``final.safetensors``; with several files these stand beside it, with
            ``final.safetensors.index.json``.
        specs: every weight once, by its full name.
        read: called once for each, in the order of ``weights_order``.
        max_file_bytes: above it the weights are shared out over several files.
        mend: what a user does after a failure.

    Returns:
        The files, index last.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
    """
    files = weights_order(specs, max_file_bytes=max_file_bytes)
    temps = [path.with_name(f".{path.name}.{k}.tmp") for k in range(len(files))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = [write_tensors(temp, file, read) for temp, file in zip(temps, files, strict=True)]
        names = _file_names(path, digests)
        for temp, name in zip(temps, names, strict=True):
            temp.rename(path.with_name(name))
        if len(files) > 1:
            names.append(_write_index(path, dict(zip(names, files, strict=True))))
        sync_folder(path.parent)
    except OSError as exc:
        for temp in temps:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
        raise storage_error(
            exc,
            what=path.name,
            folder=path.parent,
            needed_bytes=sum(spec.size_bytes for spec in specs),
            mend=mend,
        ) from exc
    _remove_stale(path, names)
    return [path.with_name(name) for name in names]


def _file_names(path: Path, digests: Sequence[FileDigest]) -> list[str]:
    """Names of the files; shards carry a hash, so that an old index never names new files."""
    if len(digests) == 1:
        return [path.name]
    tag = hashlib.sha256("".join(digest.sha256 for digest in digests).encode()).hexdigest()[:8]
    total = len(digests)
    return [f"{path.stem}-{tag}-{k:05}-of-{total:05}.safetensors" for k in range(1, total + 1)]


def _write_index(path: Path, files: Mapping[str, Sequence[TensorSpec]]) -> str:
    size_bytes = sum(spec.size_bytes for specs in files.values() for spec in specs)
    index = {
        "metadata": {"total_size": size_bytes},
        "weight_map": {spec.name: name for name, specs in files.items() for spec in specs},
    }
    name = path.stem + _INDEX_SUFFIX
    temp = path.with_name(f".{name}.tmp")
    write_synced(temp, [json.dumps(index, indent=2).encode()])
    temp.rename(path.with_name(name))
    return name


def _remove_stale(path: Path, current: Sequence[str]) -> None:
    """Remove an earlier run's files of the same stem, now that the new ones are whole."""
    # The index before its shards: it must never name a file that is gone.
    stale = [path.name, path.stem + _INDEX_SUFFIX]
    stale += [item.name for item in path.parent.glob(f"{path.stem}-*-of-*.safetensors")]
    stale += [item.name for item in path.parent.glob(f".{path.stem}.safetensors*.tmp")]
    for name in stale:
        if name not in current:
            path.with_name(name).unlink(missing_ok=True)


class WeightSource:
    """Weights in safetensors files.

    Args:
        path: a safetensors file, an index, or a folder with either.

    Raises:
        InvalidInputError: nothing there, a damaged file, or a format that unpickles.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._tied: dict[str, str] = {}
        for file in _weight_files(path):
            reader = self._readers[file] = _open(file)
            self._file_of.update(dict.fromkeys(reader.keys(), file))
            self._tied.update(reader.metadata() or {})
        # The metadata holds other texts too; an alias leads to a weight.
        self._tied = {k: v for k, v in self._tied.items() if v in self._file_of}

    def names(self) -> list[str]:
        """Names of all weights, aliases of tied ones included, in order."""
        return sorted({*self._file_of, *self._tied})

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        reader, key = self._find(name)
        return tuple(reader.get_slice(key).get_shape())

    def spec(self, name: str, kind: str = "param") -> TensorSpec:
        """Type and shape of a weight, as :meth:`mmlaunch.checkpoint.restore.Checkpoint.spec`."""
        reader, key = self._find(name)
        dtype = dtype_of(reader.get_slice(key).get_dtype())
        return TensorSpec(name=name, dtype=dtype, shape=self.shape(name))

    def kinds(self, name: str) -> list[str]:
        """Of a checkpoint's tensors there are weights alone."""
        return ["param"] if name in self._file_of else []

    def load_whole(self, name: str, kind: str = "param") -> Tensor:
        """All of a weight, as stored."""
        return self.get(name)[0]

    def get(
        self,
        name: str,
        boxes: Sequence[Box] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Boxes of a weight, read without the rest.

        Args:
            name: of the weight, or an alias.
            boxes: the wanted ones; None is one, all of it.
            dtype: of the results; None keeps the stored one.

        Raises:
            InvalidInputError: no such weight, or a box outside of it.
        """
        shape = self.shape(name)
        wanted = [whole(shape)] if boxes is None else boxes
        return [self._read(name, box, shape, dtype) for box in wanted]

    def _read(
        self, name: str, box: Box, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> Tensor:
        check_no_hole(f"{name} in {self.path}", cover(box, [whole(shape)]))
        reader, key = self._find(name)
        # A scalar has no slices.
        value = reader.get_slice(key)[box.slices] if shape else reader.get_tensor(key)
        return value if dtype is None else value.to(dtype)

    def _find(self, name: str) -> tuple[Any, str]:
        """The reader that has a weight, and its name there."""
        key = name if name in self._file_of else self._tied.get(name, name)
        if key not in self._file_of:
            raise no_such_weight(self.path, name, self.names())
        return self._readers[self._file_of[key]], key


def open_weights(path: Path) -> WeightSource | DistributedWeights:
    """Weights to start from: safetensors, or a folder of torch.distributed.checkpoint.

    Raises:
        InvalidInputError: nothing there, or nothing that can be read.
    """
    is_distributed = (path / METADATA_NAME).is_file()
    return DistributedWeights(path) if is_distributed else WeightSource(path)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise InvalidInputError(
            f"{file} is no readable safetensors file: {exc}", hint="restore it from its source"
        ) from exc


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files behind a path; an index is followed."""
    if path.is_dir():
        indexes = sorted(path.glob(f"*{_INDEX_SUFFIX}"))
        # Shards without an index are left of a killed write: some may be missing.
        shards = set(path.glob("*-?????-of-?????.safetensors"))
        files = sorted(set(path.glob("*.safetensors")) - shards)
        if len(indexes) == 1:
            return _indexed_files(indexes[0])
        if not indexes and len(files) == 1:
            return files
        raise InvalidInputError(
            f"{path} holds {len(files)} whole safetensors files and {len(indexes)} indexes",
            hint=f"name the file to start from, or the *{_INDEX_SUFFIX}",
        )
    if not path.is_file():
        raise InvalidInputError(f"{path} does not exist", hint="correct the workload's init:")
    if path.name.endswith(_INDEX_SUFFIX):
        return _indexed_files(path)
    if path.suffix != ".safetensors":
        raise InvalidInputError(
            f"{path.name}: weights are read from safetensors files only, nothing that unpickles",
            hint="convert it, for instance with safetensors.torch.save_file",
        )
    return [path]


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InvalidInputError(
            f"{index} is no index of safetensors files", hint="restore it from its source"
        ) from exc
    for name in names:
        if Path(name).name != name or not index.with_name(name).is_file():
            raise InvalidInputError(
                f"{index} names {name}, which is not beside it", hint="bring the missing file"
            )
    return [index.with_name(name) for name in names]


class InitialWeights:
    """The stored weight of each of a module's parameters and persistent buffers.

    A weight is looked for under the name that a run saves (``vision.0.weight``), then the
    module's own (``0.weight``), then the original one of a converted model
    (``source_names``), as it is or as another version of its library has it (``renamed``).

    Args:
        path: a safetensors file, an index, a folder with either, or one of
            torch.distributed.checkpoint.
        module: the whole module; its tensors need no values.
        owner: the module's name.

    Raises:
        InvalidInputError: a weight is missing, or has another shape.
    """

    def __init__(self, path: Path, module: nn.Sequential, owner: str) -> None:
        self._source = open_weights(path)
        known = set(self._source.names())
        original: dict[str, str] = getattr(module, "source_names", {})
        rename: Callable[[str], str] | None = getattr(module, "renamed", None)
        others = {rename(name): name for name in known} if rename else {}
        self._stored: dict[Tensor, str] = {}
        for name, target in targets(module):
            its = original.get(name, name)
            names = (f"{owner}.{name}", name, its, others.get(its, its))
            stored = next((n for n in names if n in known), names[0])
            shape = self._source.shape(stored)
            if shape != tuple(target.shape):
                raise InvalidInputError(
                    f"modules.{owner}.init: {stored} in {path} has shape {list(shape)}, "
                    f"the module's {name} has {list(target.shape)}",
                    hint="start from weights of the same sizes, or correct the factory's args",
                )
            self._stored[target] = stored

    def has(self, target: Tensor) -> bool:
        """Whether a tensor of the module is stored: all but buffers that are not persistent."""
        return target in self._stored

    def read(self, target: Tensor, boxes: Sequence[Box] | None = None) -> list[Tensor]:
        """Parts of one tensor of the module in its type, read without the rest; None is all."""
        return self._source.get(self._stored[target], boxes, target.dtype)


def load_initial(module: nn.Sequential, path: Path, owner: str) -> None:
    """Fill a whole module's parameters and buffers, one at a time.

    Raises:
        InvalidInputError: a weight is missing, or has another shape; nothing is filled then.
    """
    weights = InitialWeights(path, module, owner)
    with torch.no_grad():
        for _, target in targets(module):
            target.copy_(weights.read(target)[0])


def targets(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, by the first of its names."""
    kept = module.state_dict(keep_vars=True)
    seen: set[Tensor] = set()
    for name, value in kept.items():
        if value not in seen:
            seen.add(value)
            yield name, value
