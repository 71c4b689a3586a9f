"""Save a run so that a kill at any moment leaves a whole checkpoint, under any later plan.

``checkpoints/step-N/`` holds one ``rank-R.safetensors`` per rank with the boxes of full
tensors that this rank owns, and ``manifest.json``. It is written as ``.step-N.tmp`` and
renamed, so a folder with the final name is always complete. Names beginning with a dot
are leftovers of a killed save: ``clean`` puts them right.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, cover, intersect, whole
from mmlaunch.checkpoint.folder import (
    FileDigest,
    clean,
    drop_old,
    file_of,
    latest,
    publish,
    sync_folder,
)
from mmlaunch.checkpoint.manifest import MANIFEST_VERSION, Manifest, StoredBox, StoredTensor
from mmlaunch.checkpoint.tensorfile import TensorSpec, dtype_code, storage_error, write_tensors
from mmlaunch.checkpoint.writer import temporary
from mmlaunch.comm.wire import Failure, caught
from mmplan.errors import NotFiniteError, RunFailedError


class Gather(Protocol):
    """Gathers one object of a type per rank."""

    def __call__(self, item: Any, kind: Any = ..., *, to: int | None = None) -> list[Any]:
        """See :meth:`mmlaunch.comm.transport.Transport.gather_objects`."""
        ...


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
class Report:
    """A rank's report to rank 0 after writing its file.

    Attributes:
        needed_bytes: of its tensors, also where they could not be written.
        file: what was written.
        tensors: the manifest's part for it.
    """

    needed_bytes: int = 0
    file: FileDigest | None = None
    tensors: tuple[StoredTensor, ...] = ()
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What all ranks of a checkpoint are told beside their tensors.

    Attributes:
        root: folder of the checkpoints, seen by all ranks.
        step: optimizer steps done.
        state: JSON: step counts, scheduler, sampler. Rank 0's is kept.
        meta: JSON that tells whose checkpoint this is: hashes of plan and workload.
        keep: how many of the newest checkpoints up to this one stay, at least 1.
        keep_every_s: beside them one of each so many seconds stays; None for none.
    """

    root: Path
    step: int
    state: dict[str, Any]
    meta: dict[str, Any]
    keep: int = 2
    keep_every_s: float | None = None

    @property
    def final(self) -> Path:
        """The folder."""
        return self.root / f"step-{self.step}"

    @property
    def temp(self) -> Path:
        """The folder until it is whole."""
        return temporary(self.root, self.step)

    def manifest(self, reports: Sequence[Report]) -> Manifest:
        """The table of contents.

        Raises:
            RunFailedError: the parts do not make up whole tensors.
        """
        return Manifest(
            version=MANIFEST_VERSION,
            step=self.step,
            meta=self.meta,
            state=self.state,
            files={file_of(i): r.file for i, r in enumerate(reports) if r.file},
            tensors=_merge([tensor for report in reports for tensor in report.tensors]),
        )


# Puts a rank's tensors (of those specs, by name) where they belong; what the file is.
Put = Callable[[Sequence[TensorSpec], dict[str, Tensor]], FileDigest]


def save(content: Content, entries: Sequence[Entry], *, rank: int, gather: Gather) -> Path:
    """Write ``root/step-N``, complete or not at all; every rank calls it.

    Args:
        content: of the checkpoint.
        entries: this rank's parts. Replicas may be given by several ranks: the lowest
            rank's copy is the one that is read again.
        rank: this rank.
        gather: takes one object per rank and its type, gives the list in rank order.

    Returns:
        The new folder.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
        NotFiniteError: something trained is not finite.
        RunFailedError: the parts do not make up whole tensors, or another rank failed.
    """

    def put(specs: Sequence[TensorSpec], values: dict[str, Tensor]) -> FileDigest:
        digest = write_tensors(content.temp / file_of(rank), specs, values.__getitem__)
        # The names must be on disk before the folder gets its final one.
        sync_folder(content.temp)
        return digest

    def finish(reports: Sequence[Report]) -> None:
        publish(content.temp, content.final, content.manifest(reports).model_dump())
        drop_old(content.root, content.step, content.keep, content.keep_every_s)

    together(content, entries, rank=rank, gather=gather, put=put, finish=finish)
    return content.final


def together(
    content: Content,
    entries: Sequence[Entry],
    *,
    rank: int,
    gather: Gather,
    put: Put,
    finish: Callable[[Sequence[Report]], None],
) -> None:
    """Have all ranks put their parts of a checkpoint, and rank 0 finish; see :func:`save`.

    All ranks leave with the same verdict: a rank that fails still takes part in the
    exchange, so none is left waiting. On failure the earlier checkpoints stay.

    Args:
        content: of the checkpoint.
        entries: this rank's parts.
        rank: this rank.
        gather: see :func:`save`.
        put: of this rank.
        finish: called on rank 0, with all ranks' reports.
    """
    early = caught(lambda: _prepare(content)) if rank == 0 else None
    gather(None, Any)
    # Thousands of ranks have a list of tensors each: only who writes the manifest reads them.
    reports = gather(_report(entries, file_of(rank), put), Report, to=0)
    failure = early or next((r.error for r in reports if r.error), None)
    if rank == 0:
        failure = failure or caught(lambda: finish(reports))
        if failure:
            shutil.rmtree(content.temp, ignore_errors=True)
            needed_bytes = sum(r.needed_bytes for r in reports)
            failure = Failure.of(for_user(failure.error(), content, needed_bytes))
    verdict = gather(failure, Failure | None)[0]
    gather(None, Any)
    if verdict:
        raise verdict.error()


def _prepare(content: Content) -> None:
    root = content.root
    if not root.exists():
        root.mkdir(parents=True)
        sync_folder(root.parent)
    clean(root)
    content.temp.mkdir()


def _report(entries: Sequence[Entry], name: str, put: Put) -> Report:
    """Put this rank's tensors; a failure is reported, not raised."""
    needed_bytes = 0
    try:
        _check_finite(entries)
        tensors, values = _describe(entries, name)
        specs = [
            TensorSpec(name=key, dtype=value.dtype, shape=tuple(value.shape))
            for key, value in values.items()
        ]
        needed_bytes = sum(spec.size_bytes for spec in specs)
        file = put(specs, values)
        return Report(needed_bytes=needed_bytes, file=file, tensors=tuple(tensors))
    except Exception as exc:  # all ranks must reach the exchange, whatever happened
        return Report(needed_bytes=needed_bytes, error=Failure.of(exc))


def _check_finite(entries: Sequence[Entry]) -> None:
    """A checkpoint that nobody can go on from is worse than none: it takes a good one's place."""
    for entry in entries:
        for _, value in entry.boxes if entry.trained else ():
            if not _is_finite(value):
                raise NotFiniteError(
                    f"{entry.name} ({entry.kind}) is not finite and is not saved",
                    hint="lower the learning rate; earlier checkpoints stay",
                )


def _is_finite(value: Tensor) -> bool:
    """In one pass, without a tensor of answers: NaN is least and largest of all."""
    return not value.numel() or bool(torch.stack(value.aminmax()).isfinite().all())


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


def for_user(failure: Exception, content: Content, needed_bytes: int) -> Exception:
    """An error of the file system in the user's terms; others stay as they are."""
    if not isinstance(failure, OSError):
        return failure
    kept = latest(content.root)
    goes_on = f"goes on from {kept.name}" if kept else "no earlier checkpoint was kept"
    return storage_error(
        failure,
        what=f"the checkpoint of step {content.step}",
        folder=content.root,
        needed_bytes=needed_bytes,
        mend=f"make room, then run again with --resume ({goes_on}), or choose another --run-dir",
    )
