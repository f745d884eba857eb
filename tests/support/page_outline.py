"""The outline of an HTML page, for tests that read what `octjepa report` wrote."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "image", "link", "img", "use", "path", "col", "line", "rect"}


class Outline(HTMLParser):
    """Sections, ids, links to ids, table rows, and whether every element is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.scripts = 0
        self.unlabelled: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.scripts += tag == "script"
        if given.get("id"):
            self.ids.append(str(given["id"]))
        href = given.get("href") or ""
        if href.startswith("#"):
            self.targets.append(href[1:])
        if tag == "svg" and not (given.get("aria-label") or given.get("aria-hidden")):
            self.unlabelled.append(str(given.get("class")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
