"""Where a number comes from: hashes, the machine and code of a run, and what a figure carries inside itself.

A figure holds in its own file (a PNG text chunk, the SVG's description) the hash of its rows, parameters and computing
code, its devices and its kinds of evidence; `repro verify` compares them with the results on disk. Equal data gives
equal bytes: no dates, no random ids, no version strings go into a figure. What differs from run to run - machine,
versions, commit, time - goes into results/<experiment>/manifest.json.

This module does not know experiments or studies, and never imports torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from html import unescape
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import repro
from repro.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FIGURE_FORMATS = ("png", "svg")
_LIBRARIES = ("numpy", "pandas", "matplotlib", "joblib", "torch", "triton", "transformers")


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII, shortest floats; NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def pretty_json(value: Any) -> bytes:
    """JSON for people: indented, in the given order (that of a row's entries is that of its columns)."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is absent or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_csv(rows: pd.DataFrame) -> bytes:
    """The rows as CSV text: column and row order as given, floats as their shortest exact form."""
    return rows.to_csv(index=False, lineterminator="\n").encode()


def rows_hash(rows: pd.DataFrame) -> str:
    """SHA-256 of the rows' CSV text, so that it equals the hash of a rows.csv that holds the same rows."""
    return hashlib.sha256(rows_csv(rows)).hexdigest()


def _output_of(*command: str) -> str | None:
    """What a helper program prints, or None if it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The code and machine of this process: versions, commit, processor, graphics processors, UTC time, command.

    `git` and `nvidia-smi` are asked if they are there; without them those entries are None.
    """
    checkout = str(Path(repro.__file__).resolve().parent.parent)
    status = _output_of("git", "-C", checkout, "status", "--porcelain")
    gpus = _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "version": repro.__version__,
        "commit": _output_of("git", "-C", checkout, "rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
        "python": platform.python_version(),
        "libraries": {library: _version(library) for library in _LIBRARIES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpus": gpus.splitlines() if gpus else None,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get("REPRO_COMMAND") or shlex.join(sys.argv),
    }


def figure_bytes(figure: Figure, file_format: str, embedded: Mapping[str, Any]) -> bytes:
    """The figure as a PNG or SVG file that carries `embedded`; equal figures give equal bytes.

    Its layout is settled once and then kept: laid out anew for each file, axes move by fractions of a pixel. And it is
    rounded: the solver's last digits depend on where objects lie in memory, and an SVG's names on all digits.
    """
    import matplotlib

    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            axes.set_position([round(value, 6) for value in axes.get_position(original=True).bounds])

    text = canonical_json(embedded)
    # "Software", "Creator" and "Date" default to the Matplotlib version and the time of day.
    notes = (
        {"Description": text, "Software": None}
        if file_format == "png"
        else {"Description": text, "Creator": None, "Date": None, "Format": None, "Type": None}
    )
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "repro", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=file_format, metadata=notes)
    return buffer.getvalue()


def read_embedded(path: Path) -> dict[str, Any]:
    """What a figure written by `figure_bytes` says about itself.

    Raises UserError if the file is absent, is no PNG or SVG, or carries nothing of ours.
    """
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
