"""Pages of their own, without a network: a template of this room, filled in."""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro.hashing import canonical_json

TEMPLATES = Path(__file__).with_name("templates")


class Html(str):
    """Text that is put into a page as it is."""


def table(rows: Iterable[Iterable[str]], head: Iterable[str]) -> Html:
    """Of texts."""

    def line(texts: Iterable[str], name: str) -> str:
        first, *others = map(html.escape, texts)
        return f"<tr><th>{first}</th>{''.join(f'<{name}>{text}</{name}>' for text in others)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return Html(f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>")


def filled(name: str, **parts: object) -> str:
    """A template's text. In it `{{ name }}` stands for one of the parts, as text, and `{{ name.css }}` for the file of
    this name beside it, as it is."""

    def found(match: re.Match[str]) -> str:
        what = match[1]
        if "." in what:
            return (TEMPLATES / what).read_text(encoding="utf-8")
        return parts[what] if isinstance(parts[what], Html) else html.escape(str(parts[what]))

    return re.sub(r"\{\{ ([\w.]+) \}\}", found, (TEMPLATES / name).read_text(encoding="utf-8"))


def packed(content: Any) -> str:
    """Bytes, or a value as JSON, for a page."""
    content = content if isinstance(content, bytes) else canonical_json(content).encode()
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def framed(page: str, title: str, height: int) -> str:
    """A page in a notebook's cell."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{html.escape(page)}" title="{title}" style="{style}"></iframe>'
