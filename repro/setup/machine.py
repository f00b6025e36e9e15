"""What a run ran on: versions, commit, processor, graphics processors, time and command."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from repro import __version__
from repro.setup.environment import ROOT

_LIBRARIES = ("numpy", "pandas", "matplotlib", "joblib", "torch", "triton", "transformers")


def output_of(*command: str) -> str | None:
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


def installed(package: str) -> str | None:
    """A package's version, or None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The code and machine of this process: versions, commit, processor, graphics processors, UTC time, command.

    `git` and `nvidia-smi` are asked if they are there; without them those entries are None."""
    status = output_of("git", "-C", str(ROOT), "status", "--porcelain")
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "version": __version__,
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
        "python": platform.python_version(),
        "libraries": {library: installed(library) for library in _LIBRARIES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpus": gpus.splitlines() if gpus else None,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get("REPRO_COMMAND") or shlex.join(sys.argv),
    }
