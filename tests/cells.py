"""The texts in a table that a notebook shows, for tests of what displays as HTML."""

from __future__ import annotations

from html.parser import HTMLParser


class Cells(HTMLParser):
    """The texts of a table, line by line; AssertionError for a tag that no table has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "p", "br", "table", "thead", "tbody", "tr", "th", "td"), tag
        assert all(name in ("style", "colspan") for name, _ in attrs)
        if tag == "tr":
            self.lines.append([])
        elif tag in ("th", "td"):
            self.lines[-1].append("")
        self._open += [tag] if tag != "br" else []

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] in ("th", "td"):
            self.lines[-1][-1] += data
