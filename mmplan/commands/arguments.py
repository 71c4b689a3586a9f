"""Lists and files on the command line."""

from __future__ import annotations

import os
from pathlib import Path

from mmplan.errors import InvalidInputError, UnfitEnvironmentError


def names(option: str, text: str | None) -> tuple[str, ...] | None:
    """Names between commas, None where nothing was given.

    Raises:
        InvalidInputError: no name between the commas.
    """
    if text is None:
        return None
    listed = tuple(name.strip() for name in text.split(",") if name.strip())
    if not listed:
        raise InvalidInputError(f"{option} {text!r} names nothing", hint="separate names by commas")
    return listed


def counts(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers from 1 on between commas, none where nothing was given.

    Raises:
        InvalidInputError: an item that is no such number.
    """
    parts = names(option, text) or ()
    if not all(name.isdecimal() and int(name) > 0 for name in parts):
        raise InvalidInputError(
            f"{option} {text}: numbers from 1 on, separated by commas", hint=f"{option} 8,16"
        )
    return tuple(map(int, parts))


def check_output(option: str, path: Path | None) -> None:
    """Check before the work that its file can be written.

    Raises:
        InvalidInputError: it is a folder.
        UnfitEnvironmentError: its folder is none, or is read-only.
    """
    if path is None:
        return
    if path.is_dir():
        raise InvalidInputError(f"{option} {path}: is a folder", hint="name a file")
    # Missing folders are created later.
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UnfitEnvironmentError(
            f"{path}: cannot be written: "
            + (f"{above} is read-only" if above.is_dir() else f"{above} is no folder"),
            hint="choose another folder",
        )
