"""Pages as a parser sees them: elements, ids, text, what they would load."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Elements with their attributes, ids, text, and whether every element is closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_self_contained(document: str) -> None:
    """Every element closed; nothing comes from elsewhere; references have exactly one target."""
    page = Page(document)
    assert page.open == []
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), f"<{tag} {name}={value!r}>"
    # A namespace is a name, a comment is none; any other double slash would be an address.
    code = document.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"(?m)^\s*//.*$|\s// .*$", "", code)
    assert not re.search(r"url\((?!#)|@import", document)
    policy = next(a["content"] for a in page.of("meta") if a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    uses = {a["href"] for a in (*page.of("use"), *page.of("a")) if a.get("href")}
    # Styles may be for pictures that this page does not have.
    drawn = re.sub(r"(?s)<style>.*?</style>", "", document)
    uses |= {f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", drawn)}
    assert uses
    assert uses <= {f"#{name}" for name in ids}
