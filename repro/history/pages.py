"""Pages of their own, without a network: a template of this room, filled in."""

from __future__ import annotations

import base64
import gzip
import html
import re
from pathlib import Path
from typing import Any

from repro.hashing import canonical_json

TEMPLATES = Path(__file__).with_name("templates")


def filled(name: str, **parts: object) -> str:
    """A template's text. In it `{{ name }}` stands for one of the parts, as text, and `{{ name.css }}` for the file of
    this name beside it, as it is."""

    def found(match: re.Match[str]) -> str:
        what = match[1]
        return (TEMPLATES / what).read_text(encoding="utf-8") if "." in what else html.escape(str(parts[what]))

    return re.sub(r"\{\{ ([\w.]+) \}\}", found, (TEMPLATES / name).read_text(encoding="utf-8"))


def packed(content: Any) -> str:
    """Bytes, or a value as JSON, for a page."""
    content = content if isinstance(content, bytes) else canonical_json(content).encode()
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def framed(page: str, title: str, height: int) -> str:
    """A page in a notebook's cell."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{html.escape(page)}" title="{title}" style="{style}"></iframe>'
