"""HTML as tests look at it."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Seen(HTMLParser):
    """Collects tags, what they point to and what can be pointed at; what is not closed in order is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.metas: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        said = {name: value or "" for name, value in attrs}
        self.links += [value for name, value in said.items() if name in ("src", "href")]
        self.anchors += [said["id"]] if "id" in said else []
        self.metas |= {said["name"]: said["content"]} if tag == "meta" and "name" in said else {}
        assert not any(name.startswith("on") for name in said)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
