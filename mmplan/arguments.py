"""Lists on the command line."""

from __future__ import annotations

from mmplan.errors import InvalidInputError


def names(text: str | None) -> tuple[str, ...] | None:
    """Names between commas, None where nothing was given.

    Raises:
        InvalidInputError: there is none in it.
    """
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidInputError(f"{text!r} names nothing", hint="separate names by commas")
    return found


def counts(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers from 1 on between commas, none where nothing was given.

    Raises:
        InvalidInputError: something else is in it.
    """
    parts = names(text) or ()
    if not all(name.isdecimal() and int(name) > 0 for name in parts):
        raise InvalidInputError(
            f"{option} {text}: numbers from 1 on, separated by commas", hint=f"{option} 8,16"
        )
    return tuple(map(int, parts))
