"""Save a run so that a kill at any moment leaves a whole checkpoint, under any later plan.

``checkpoints/step-N/`` holds one ``rank-R.safetensors`` per rank with the boxes of full
tensors that this rank owns, and ``manifest.json``. It is written as ``.step-N.tmp`` and
renamed, so a folder with the final name is always complete. Names beginning with a dot
are leftovers of a killed save: ``clean`` puts them right.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, cover, intersect, whole
from mmlaunch.checkpoint.manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    Manifest,
    StoredBox,
    StoredTensor,
    encode,
    step_folders,
)
from mmlaunch.checkpoint.tensorfile import (
    FileDigest,
    TensorSpec,
    dtype_code,
    storage_error,
    sync_folder,
    write_synced,
    write_tensors,
)
from mmlaunch.comm.wire import Failure, caught
from mmplan.errors import NotFiniteError, RunFailedError, UnfitEnvironmentError

# One object of a type per rank, in rank order.
Gather = Callable[[Any, Any], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The boxes of one tensor that one rank saves.

    Attributes:
        name: full parameter name, as a single process would name it.
        kind: ``param``, ``optim.exp_avg``, ...; a tensor is known by name and kind.
        full_shape: shape of the unsharded tensor.
        boxes: (offsets in the full tensor, values) of every part owned here.
        trained: whether training changes it, so that it must be finite.
    """

    name: str
    kind: str
    full_shape: tuple[int, ...]
    boxes: Sequence[tuple[tuple[int, ...], Tensor]]
    trained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """A rank's report to rank 0 after writing its file."""

    needed_bytes: int = 0
    file: FileDigest | None = None
    tensors: tuple[StoredTensor, ...] = ()
    error: Failure | None = None


def save(
    *,
    root: Path,
    step: int,
    entries: Sequence[Entry],
    state: dict[str, Any],
    meta: dict[str, Any],
    rank: int,
    gather: Gather,
    keep: int = 2,
) -> Path:
    """Write ``root/step-N``, complete or not at all; every rank calls it.

    All ranks leave with the same verdict: a rank that fails still takes part in the
    exchange, so none is left waiting. On failure the earlier checkpoints stay.

    Args:
        root: folder of the checkpoints, seen by all ranks.
        step: optimizer steps done.
        entries: this rank's parts. Replicas may be given by several ranks: the lowest
            rank's copy is the one that is read again.
        state: JSON: step counts, scheduler, sampler. Rank 0's is kept.
        meta: JSON that tells whose checkpoint this is: hashes of plan and workload.
        rank: this rank.
        gather: takes one object per rank and its type, gives the list in rank order.
        keep: how many of the newest checkpoints up to this one stay, at least 1.

    Returns:
        The new folder.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
        NotFiniteError: something trained is not finite.
        RunFailedError: the parts do not make up whole tensors, or another rank failed.
    """
    final, temp = root / f"step-{step}", root / f".step-{step}.tmp"
    early = caught(lambda: _prepare(root, temp)) if rank == 0 else None
    gather(None, Any)
    report = _write_rank(temp, rank, entries)
    reports = gather(report, _Report)
    failure = early or next((r.error for r in reports if r.error), None)
    if rank == 0:
        failure = failure or caught(lambda: _publish(temp, final, reports, step, state, meta))
        if failure:
            shutil.rmtree(temp, ignore_errors=True)
            needed_bytes = sum(r.needed_bytes for r in reports)
            failure = Failure.of(_for_user(failure.error(), root, step, needed_bytes))
    verdict = gather(failure, Failure | None)[0]
    gather(None, Any)
    if verdict:
        raise verdict.error()
    if rank == 0:
        _drop_old(root, step, keep)
    return final


def latest(root: Path) -> Path | None:
    """Folder of the newest complete checkpoint; None when there is none.

    Call ``clean`` first where no save can be under way (at the start of a run).
    """
    found = step_folders(root)
    return found[-1][1] if found else None


def clean(root: Path) -> None:
    """Clean up after killed saves: temporary and dropped folders go.

    Only for one process, and only while nothing is being saved.
    """
    if not root.is_dir():
        return
    for path in root.iterdir():
        match = re.fullmatch(r"\.(step-\d+)\.(tmp|drop|replaced)", path.name)
        if match is None:
            continue
        home = root / match[1]
        if match[2] == "replaced" and not home.exists():
            path.rename(home)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _prepare(root: Path, temp: Path) -> None:
    if not root.exists():
        root.mkdir(parents=True)
        sync_folder(root.parent)
    clean(root)
    temp.mkdir()


def _write_rank(temp: Path, rank: int, entries: Sequence[Entry]) -> _Report:
    """Write this rank's file; a failure is reported, not raised."""
    name, needed_bytes = f"rank-{rank}.safetensors", 0
    try:
        _check_finite(entries)
        tensors, values = _describe(entries, name)
        specs = [
            TensorSpec(name=key, dtype=value.dtype, shape=tuple(value.shape))
            for key, value in values.items()
        ]
        needed_bytes = sum(spec.size_bytes for spec in specs)
        digest = write_tensors(temp / name, specs, values.__getitem__)
        # The names must be on disk before the folder gets its final one.
        sync_folder(temp)
        return _Report(needed_bytes=needed_bytes, file=digest, tensors=tuple(tensors))
    except Exception as exc:  # all ranks must reach the exchange, whatever happened
        with contextlib.suppress(OSError):
            (temp / name).unlink(missing_ok=True)
        return _Report(needed_bytes=needed_bytes, error=Failure.of(exc))


def _check_finite(entries: Sequence[Entry]) -> None:
    """A checkpoint that nobody can go on from is worse than none: it takes a good one's place."""
    for entry in entries:
        for _, value in entry.boxes if entry.trained else ():
            if not value.isfinite().all():
                raise NotFiniteError(
                    f"{entry.name} ({entry.kind}) is not finite and is not saved",
                    hint="lower the learning rate; earlier checkpoints stay",
                )


def _describe(entries: Sequence[Entry], file: str) -> tuple[list[StoredTensor], dict[str, Tensor]]:
    """The manifest's part for one rank, and its file's tensors by key."""
    tensors: list[StoredTensor] = []
    values: dict[str, Tensor] = {}
    num_boxes: Counter[str] = Counter()
    for entry in entries:
        label, boxes = f"{entry.kind}/{entry.name}", []
        for offsets, value in entry.boxes:
            key = f"{label}#{num_boxes[label]}"
            num_boxes[label] += 1
            values[key] = value
            boxes.append(StoredBox(offsets=offsets, sizes=tuple(value.shape), file=file, key=key))
        if boxes:
            dtype = dtype_code(entry.boxes[0][1].dtype)
            tensors.append(_stored(entry, dtype, boxes))
    return tensors, values


def _stored(entry: Entry, dtype: str, boxes: Sequence[StoredBox]) -> StoredTensor:
    """The manifest's record of an entry, checked against its own full shape."""
    full = whole(entry.full_shape)
    for stored in boxes:
        same_rank = len(stored.offsets) == len(stored.sizes) == len(entry.full_shape)
        inside = intersect(full, stored.box) if same_rank else None
        if not same_rank or (inside != stored.box and stored.box.num_elements):
            raise RunFailedError(
                f"{entry.name} ({entry.kind}): a part of {stored.sizes} at {stored.offsets} "
                f"is not inside the full shape {entry.full_shape}"
            )
    return StoredTensor(
        name=entry.name,
        kind=entry.kind,
        shape=entry.full_shape,
        dtype=dtype,
        boxes=tuple(boxes),
    )


def _publish(
    temp: Path,
    final: Path,
    reports: Sequence[_Report],
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
) -> None:
    """Rank 0: write the manifest and give the folder its final name."""
    files = {f"rank-{i}.safetensors": r.file for i, r in enumerate(reports) if r.file}
    _check_all_here(temp, files)
    manifest = Manifest(
        version=MANIFEST_VERSION,
        step=step,
        meta=meta,
        state=state,
        files=files,
        tensors=_merge([tensor for report in reports for tensor in report.tensors]),
    )
    write_synced(temp / MANIFEST_NAME, [encode(manifest)])
    sync_folder(temp)
    if final.exists():
        # The same step again, after going on from an earlier checkpoint. Two renames:
        # ``clean`` undoes the first one if a kill falls between them.
        final.rename(final.with_name(f".{final.name}.replaced"))
    temp.rename(final)
    sync_folder(final.parent)


def _check_all_here(temp: Path, files: dict[str, FileDigest]) -> None:
    for name, file in files.items():
        path = temp / name
        if not path.exists() or path.stat().st_size != file.size_bytes:
            raise UnfitEnvironmentError(
                f"{temp} is not one folder for all ranks: {name} was written elsewhere",
                hint="give --run-dir a file system that all nodes share",
            )


def _merge(tensors: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """One record per tensor, replicas dropped; together they must be whole."""
    merged: dict[tuple[str, str], StoredTensor] = {}
    for tensor in tensors:
        first = merged.setdefault((tensor.kind, tensor.name), tensor)
        if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
            raise RunFailedError(
                f"{tensor.name} ({tensor.kind}): ranks disagree, {first.dtype} {first.shape} "
                f"and {tensor.dtype} {tensor.shape}"
            )
        if first is not tensor:
            boxes = (*first.boxes, *tensor.boxes)
            merged[tensor.kind, tensor.name] = first.model_copy(update={"boxes": boxes})
    return tuple(_without_replicas(tensor) for tensor in merged.values())


def _without_replicas(tensor: StoredTensor) -> StoredTensor:
    first_of: dict[Box, StoredBox] = {}
    for stored in tensor.boxes:
        first_of.setdefault(stored.box, stored)
    holes = cover(whole(tensor.shape), list(first_of)).holes
    if holes:
        raise RunFailedError(
            f"{tensor.name} ({tensor.kind}): no rank saves its part {holes[0]} of {tensor.shape}"
        )
    return tensor.model_copy(update={"boxes": tuple(first_of.values())})


def _drop_old(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest checkpoints up to this step; renamed first, so never half.

    Failing to remove is no reason to end a run: the next save tries again.
    """
    up_to_now = [path for number, path in step_folders(root) if number <= step]
    with contextlib.suppress(OSError):
        for path in up_to_now[: -max(keep, 1)]:
            path.rename(root / f".{path.name}.drop")
        clean(root)


def _for_user(failure: Exception, root: Path, step: int, needed_bytes: int) -> Exception:
    """An error of the file system in the user's terms; others stay as they are."""
    if not isinstance(failure, OSError):
        return failure
    kept = latest(root)
    goes_on = f"goes on from {kept.name}" if kept else "no earlier checkpoint was kept"
    return storage_error(
        failure,
        what=f"the checkpoint of step {step}",
        folder=root,
        needed_bytes=needed_bytes,
        mend=f"make room, then run again with --resume ({goes_on}), or choose another --run-dir",
    )
