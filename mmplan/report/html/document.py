"""A page around its sections: style, script, links to the sections. It loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from mmplan.report.html import markup

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Section(NamedTuple):
    """A section of a page: its id for links, its heading, the markup below."""

    anchor: str
    title: str
    content: str


def document(name: str, kind: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        name: its heading.
        kind: of page, below the heading.
        sections: in order.
    """
    main = markup.element("main", "".join(map(_section, sections)), id="main", tabindex=-1)
    skip = markup.text("a", "Skip to the content", href="#main", class_="skip")
    script = f"<script>{_asset('timeline.js')}</script>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{markup.text('title', f'{name}: {kind}')}"
        f"<style>{_asset('page.css')}</style></head>"
        f"<body>{skip}{_header(name, kind, sections)}{main}{script}</body></html>\n"
    )


def _section(section: Section) -> str:
    title_id = f"{section.anchor}-title"
    content = markup.text("h2", section.title, id=title_id) + section.content
    return markup.element("section", content, id=section.anchor, aria_labelledby=title_id)


def _header(name: str, kind: str, sections: Sequence[Section]) -> str:
    links = "".join(
        markup.element("li", markup.text("a", p.title.partition(",")[0], href=f"#{p.anchor}"))
        for p in sections
    )
    return markup.element(
        "header",
        markup.text("h1", name)
        + markup.text("p", kind, class_="kind")
        + markup.element("nav", markup.element("ul", links), aria_label="Sections"),
    )


def _asset(name: str) -> str:
    return files("mmplan.report.html").joinpath(name).read_text(encoding="utf-8")
