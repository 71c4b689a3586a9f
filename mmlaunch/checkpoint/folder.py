"""A checkpoint's folder: written whole or not at all, found again, dropped when it is old.

Without torch, for the process that writes while training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.errors import UnfitEnvironmentError

MANIFEST_NAME = "manifest.json"
_STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and hash of a file, checked when it is read again."""

    size_bytes: int
    sha256: str


def file_of(rank: int) -> str:
    """The file with a rank's tensors."""
    return f"rank-{rank}.safetensors"


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a file chunk by chunk and sync it."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size_bytes=size_bytes, sha256=digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder (new files, renames) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_bytes(fields: Mapping[str, Any]) -> bytes:
    """A manifest's bytes: its first line has the hash of the rest.

    Raises:
        TypeError: a field is not JSON.
    """
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    rest = (",\n".join(lines) + "}\n").encode()
    return checksum_line(rest) + rest


def checksum_line(rest: bytes) -> bytes:
    """The first line of a manifest, which begins an object."""
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


def publish(temp: Path, final: Path, fields: Mapping[str, Any]) -> None:
    """Write the manifest and give a folder with all ranks' files its final name.

    Args:
        temp: the folder.
        final: its name from now on.
        fields: the manifest's.

    Raises:
        UnfitEnvironmentError: another rank's file is not in the folder.
        OSError: the file system failed.
    """
    for name, file in fields["files"].items():
        path = temp / name
        if not path.exists() or path.stat().st_size != file["size_bytes"]:
            raise UnfitEnvironmentError(
                f"{temp} is not one folder for all ranks: {name} was written elsewhere",
                hint="give --run-dir a file system that all nodes share",
            )
    write_synced(temp / MANIFEST_NAME, [manifest_bytes(fields)])
    sync_folder(temp)
    if final.exists():
        # The same step again, after going on from an earlier checkpoint. Two renames:
        # ``clean`` undoes the first one if a kill falls between them.
        final.rename(final.with_name(f".{final.name}.replaced"))
    temp.rename(final)
    sync_folder(final.parent)


def drop_old(root: Path, step: int, keep: int, keep_every_s: float | None = None) -> None:
    """Remove checkpoints up to this step but for some; renamed first, so never half.

    Failing to remove is no reason to end a run: the next save tries again.

    Args:
        root: of the checkpoints.
        step: of the newest; later ones, of steps that are done again, stay.
        keep: how many of the newest stay; always the newest one.
        keep_every_s: of the others those stay that were written so many seconds after the one
            before that stays for its age, from the oldest on; None: none does.
    """
    up_to_now = [path for number, path in step_folders(root) if number <= step]
    with contextlib.suppress(OSError):
        stays_s = -math.inf
        for path in up_to_now[: -max(keep, 1)]:
            if keep_every_s is not None:
                written = written_s(path)
                if written is not None and written >= stays_s + keep_every_s:
                    stays_s = written
                    continue
            path.rename(root / f".{path.name}.drop")
        clean(root)


def written_s(folder: Path) -> float | None:
    """When a checkpoint became whole, seconds of ``time.time``; None without its manifest."""
    try:
        return (folder / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return None


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint under a root, oldest first."""
    if not root.is_dir():
        return []
    found = ((_STEP_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


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
