"""Checks a built site: every link leads to a page and a heading of it, and no page loads anything from another host.

Usage: python scripts/site/check.py build/site. Prints every fault, and ends with 1 where there is one.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Ids, links and loaded files of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loads.append(values[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """A line for each link or loaded file of the site that is not there, or that is on another host."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if name.name == "404.html":
            continue
        for target in page.loads:
            parts = urlsplit(target)
            if parts.scheme in {"http", "https"} or target.startswith("//"):
                found.append(f"{name} loads {target}")
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            if not aim.is_file():
                found.append(f"{name} links to {target}: no such file")
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].ids | {"__top"}:
                found.append(f"{name} links to {target}: no such heading")
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every link leads somewhere; nothing is loaded from elsewhere")
    sys.exit(bool(lines))
