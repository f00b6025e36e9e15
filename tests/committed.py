"""The project's files as git keeps them, so that what a reader makes or changes in the checkout fails no test.

Tests of the project's own notebooks, experiments and style look here. What is staged counts as kept. Where there is no
git, or no repository, they look at the files as they lie.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from repro.setup.environment import ROOT

PARTS = ("README.md", "pyproject.toml", "docs", "experiments", "notebooks", "repro", "tests")
#: Notebooks that are no experiments; tests/test_quickstart.py and tests/simulate/test_trace_doctor.py run them.
TOURS = {"quickstart", "trace_doctor"}


@functools.cache
def _copy(root: Path) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="repro committed ")
    git = ["git", "-C", str(root)]
    try:
        listed = subprocess.run([*git, "ls-files", "-z", "--", *PARTS], capture_output=True, check=True).stdout
        checkout = [*git, "checkout-index", "-q", "-z", "--stdin", f"--prefix={folder.name}/"]
        subprocess.run(checkout, input=listed, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        listed = b""
    if not listed:
        for part in filter(Path.exists, (root / name for name in PARTS)):
            copy = shutil.copytree if part.is_dir() else shutil.copy
            copy(part, Path(folder.name, part.name))
    return folder


def committed(root: Path = ROOT) -> Path:
    """A folder with the kept files of a checkout, those of PARTS; it goes when the tests end."""
    return Path(_copy(root).name)
