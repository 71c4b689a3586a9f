"""HTML and SVG elements, and the page around them, which loads nothing.

Every text that comes from a file passes through :func:`esc`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from mmplan.wording import counted

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def esc(value: object) -> str:
    """Text that is safe between tags and inside quoted attributes."""
    return escape(str(value), quote=True)


def element(tag: str, content: str = "", **attributes: object) -> str:
    """One element; ``content`` is markup, attributes are text and are escaped.

    A trailing underscore is dropped from names and the others become hyphens
    (``class_``, ``aria_label``); None leaves an attribute out.
    """
    parts = [
        f' {name.rstrip("_").replace("_", "-")}="{esc(value)}"'
        for name, value in attributes.items()
        if value is not None
    ]
    return f"<{tag}{''.join(parts)}>{content}</{tag}>"


def text(tag: str, content: object, **attributes: object) -> str:
    """One element around plain text."""
    return element(tag, esc(content), **attributes)


def note(content: object) -> str:
    """A sentence of explanation."""
    return text("p", content, class_="note")


def left_out(count: int, noun: str) -> str:
    """How many are left out: ``3 more modules are left out.``; nothing where none is."""
    return note(f"{counted(count, f'{noun} is', f'{noun}s are')} left out.") if count > 0 else ""


def warning(title: str, content: object) -> str:
    """A paragraph that qualifies the figures around it."""
    heading = text("strong", f"{title}. ")
    return element("p", heading + esc(content), class_="warning", role="note")


def bullets(lines: Iterable[object], class_: str = "notes") -> str:
    """A list of sentences."""
    return element("ul", "".join(text("li", line) for line in lines), class_=class_)


def details(summary: str, content: str, class_: str | None = None) -> str:
    """Markup that a click on the summary shows."""
    return element("details", text("summary", summary) + content, class_=class_)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, label: str, head: bool = True
) -> str:
    """A table of plain text that scrolls sideways by itself.

    Args:
        columns: headings; one that starts with ``>`` is right-aligned.
        rows: cells; a cell that is :class:`Markup` is taken as it is.
        label: name for assistive technology.
        head: without it the headings are only for assistive technology.
    """
    right = [column.startswith(">") for column in columns]
    cells = "".join(
        text("th", column.lstrip(">"), scope="col", class_="r" if is_right else None)
        for column, is_right in zip(columns, right, strict=True)
    )
    body = "".join(element("tr", _cells(row, right)) for row in rows)
    header = element("thead", element("tr", cells), class_=None if head else "unseen")
    content = element("table", header + element("tbody", body), class_=None if head else "facts")
    return scroller(content, label=label, class_="table")


class Markup(str):
    """A table cell that is already markup."""

    __slots__ = ()


def _cells(row: Sequence[object], right: Sequence[bool]) -> str:
    return "".join(
        element(
            "td", cell if isinstance(cell, Markup) else esc(cell), class_=_class(cell, is_right)
        )
        for cell, is_right in zip(row, right, strict=True)
    )


def _class(cell: object, is_right: bool) -> str | None:
    if is_right:
        return "r"
    return "long" if not isinstance(cell, Markup) and len(str(cell)) > 60 else None


def scroller(content: str, *, label: str, class_: str = "figure") -> str:
    """A focusable region in which wide content scrolls sideways, so that the page need not."""
    return element(
        "div", content, class_=f"scroll {class_}", tabindex=0, role="region", aria_label=label
    )


def panel(picture: str, *, label: str, title: str, beside: str) -> str:
    """One of several small pictures: a title, markup beside it, the picture below."""
    caption = element("figcaption", text("strong", title) + beside)
    return element("figure", caption + scroller(picture, label=label))


def figure(content: str, *, label: str, caption: str = "", class_: str = "") -> str:
    """A picture with its caption (markup)."""
    below = element("figcaption", caption) if caption else ""
    return element("figure", scroller(content, label=label) + below, class_=class_ or None)


def svg(content: str, *, width: float, height: float, label: str, class_: str = "") -> str:
    """An inline picture of a natural size in CSS pixels; ``label`` is its text alternative."""
    return element(
        "svg",
        content,
        class_=class_ or None,
        width=f"{width:g}",
        height=f"{height:g}",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Keys of a picture: (markup of the sign, text)."""
    items = (element("li", sign + esc(name)) for sign, name in entries)
    return element("ul", "".join(items), class_="legend")


def json_script(data: Any, *, id_: str) -> str:
    """Data for the page's own script; a name in it cannot end the element."""
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    safe = packed.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{esc(id_)}">{safe}</script>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """One bar.

    Attributes:
        words: text behind the bar, with the value.
        marked: drawn in grey, as the reference of the others.
    """

    name: str
    value: float
    words: str
    marked: bool = False


def bars(amounts: Sequence[Amount], *, label: str) -> str:
    """Bars from 0 on one scale, as a list that reads well without them."""
    most = max(amount.value for amount in amounts) or 1.0
    items = "".join(_bar(amount, most) for amount in amounts)
    return element("ul", items, class_="bars", aria_label=label)


def _bar(amount: Amount, most: float) -> str:
    length = element("span", "", style=f"width:{100 * amount.value / most:.1f}%")
    return element(
        "li",
        text("span", amount.name, class_="name")
        + element("span", length, class_="track")
        + text("span", amount.words, class_="words"),
        class_="marked" if amount.marked else None,
    )


class Section(NamedTuple):
    """A section of a page: its id for links, its heading, the markup below."""

    anchor: str
    title: str
    content: str


def document(name: str, kind: str, sections: Sequence[Section]) -> str:
    """The page with its heading, the kind of page below it, and its sections in order."""
    main = element("main", "".join(map(_section, sections)), id="main", tabindex=-1)
    skip = text("a", "Skip to the content", href="#main", class_="skip")
    script = f"<script>{_asset('timeline.js')}</script>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{text('title', f'{name}: {kind}')}"
        f"<style>{style()}</style></head>"
        f"<body>{skip}{_header(name, kind, sections)}{main}{script}</body></html>\n"
    )


def fragment(content: str) -> str:
    """A part of a page for a notebook, whose own style it leaves alone."""
    rules = style().replace(":root", "&").replace("body {", "& {")
    return element("div", f"<style>.mmplan {{ {rules} }}</style>{content}", class_="mmplan")


def _section(section: Section) -> str:
    title_id = f"{section.anchor}-title"
    content = text("h2", section.title, id=title_id) + section.content
    return element("section", content, id=section.anchor, aria_labelledby=title_id)


def _header(name: str, kind: str, sections: Sequence[Section]) -> str:
    links = "".join(
        element("li", text("a", p.title.partition(",")[0], href=f"#{p.anchor}")) for p in sections
    )
    return element(
        "header",
        text("h1", name)
        + text("p", kind, class_="kind")
        + element("nav", element("ul", links), aria_label="Sections"),
    )


def style() -> str:
    """The pages' style sheet."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return files("mmplan.reporting.html").joinpath(name).read_text(encoding="utf-8")
