"""Checks of the sizes that factories are given."""

from __future__ import annotations

from mmplan.errors import InvalidInputError


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        InvalidInputError: names the first of them.
    """
    for name, size in sizes.items():
        if size < 1:
            raise InvalidInputError(f"{name} is {size}", hint=f"give {name} a size of 1 or more")


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Refuse a part that does not divide its whole.

    Raises:
        InvalidInputError: names both.
    """
    if whole % part:
        raise InvalidInputError(
            f"{part_name} {part} does not divide {whole_name} {whole}",
            hint=f"choose a {whole_name} that is a multiple of {part}",
        )
