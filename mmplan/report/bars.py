"""Horizontal bars with a name before and a figure behind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.report import markup


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
    """Bars from 0 on one scale, as a list that reads well without them.

    Args:
        amounts: in order; none of them below 0.
        label: what assistive technology calls them.
    """
    most = max(amount.value for amount in amounts) or 1.0
    items = "".join(_bar(amount, most) for amount in amounts)
    return markup.element("ul", items, class_="bars", aria_label=label)


def _bar(amount: Amount, most: float) -> str:
    length = markup.element("span", "", style=f"width:{100 * amount.value / most:.1f}%")
    return markup.element(
        "li",
        markup.text("span", amount.name, class_="name")
        + markup.element("span", length, class_="track")
        + markup.text("span", amount.words, class_="words"),
        class_="marked" if amount.marked else None,
    )
