"""Numbers of things in a sentence."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 device``, ``1,296 devices``.

    Args:
        count: how many.
        noun: what one is called.
        plural: what several are called, default with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
