"""Horizontal bars with a name before and a figure behind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.report import markup

_WIDTH, _HEIGHT, _BEHIND = 760.0, 24, 170.0
# Pixels of a letter, about.
_LETTER = 6.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """One bar.

    Attributes:
        words: behind it; they say the value.
        marked: drawn in grey: what the others are held against.
    """

    name: str
    value: float
    words: str
    marked: bool = False


def bars(amounts: Sequence[Amount], *, label: str) -> str:
    """Bars from 0 on one scale.

    Args:
        amounts: in order; none of them below 0.
        label: what assistive technology calls them; it also hears the figures.
    """
    left = min(260.0, 16 + _LETTER * max(len(amount.name) for amount in amounts))
    most = max(amount.value for amount in amounts) or 1.0
    drawn: list[str] = []
    for i, amount in enumerate(amounts):
        y, length = i * _HEIGHT, (_WIDTH - left - _BEHIND) * amount.value / most
        drawn += [
            markup.text("text", amount.name, x=left - 8, y=y + 16, text_anchor="end"),
            markup.element(
                "rect",
                x=left,
                y=y + 3,
                width=f"{max(1.0, length):.1f}",
                height=_HEIGHT - 7,
                class_="bar baseline" if amount.marked else "bar",
            ),
            markup.text("text", amount.words, x=f"{left + length + 6:.1f}", y=y + 16),
        ]
    said = "; ".join(f"{amount.name}: {amount.words}" for amount in amounts)
    picture = markup.svg(
        "".join(drawn), width=_WIDTH, height=len(amounts) * _HEIGHT, label=f"{label}: {said}"
    )
    return markup.figure(picture, label=label)
