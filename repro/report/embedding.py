"""A figure as a file that carries where it comes from: a PNG text chunk, the SVG's description.

Equal data gives equal bytes: no dates, no random ids, no version strings go into a figure."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.errors import UserError
from repro.hashing import canonical_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_FORMATS = ("png", "svg")
#: beside the figures: experiment -> the machines that computed its rows
MACHINES = "machines.json"


def figure_bytes(figure: Figure, file_format: str, embedded: Mapping[str, Any]) -> bytes:
    """The figure as a PNG or SVG file that carries `embedded`; equal figures give equal bytes.

    Its layout is settled once and then kept: laid out anew for each file, axes move by fractions of a pixel. And it is
    rounded: the solver's last digits depend on where objects lie in memory, and an SVG's names on all digits."""
    import matplotlib

    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            axes.set_position([round(value, 6) for value in axes.get_position(original=True).bounds])

    # These default to the Matplotlib version, the time of day and the like.
    unsaid = ("Software",) if file_format == "png" else ("Creator", "Date", "Format", "Type")
    notes = {"Description": canonical_json(embedded), **dict.fromkeys(unsaid)}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "repro", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=file_format, metadata=notes)
    return buffer.getvalue()


def read_embedded(path: Path) -> dict[str, Any]:
    """What a figure written by `figure_bytes` says about itself.

    Raises UserError if the file is absent, is no PNG or SVG, or carries nothing of ours."""
    try:
        if path.suffix == ".png":
            from PIL import Image

            with Image.open(path) as image:
                text = image.text.get("Description")
        else:
            found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
            text = unescape(found.group(1)) if found else None
        embedded = json.loads(text) if text else None
    except FileNotFoundError:
        raise UserError(f"there is no figure {path}") from None
    except (OSError, ValueError, AttributeError, SyntaxError) as error:
        raise UserError(f"{path} cannot be read as a figure of this project: {error}") from error
    if not isinstance(embedded, dict):
        raise UserError(f"{path} carries no provenance: it was not drawn by an experiment of this project")
    return embedded
