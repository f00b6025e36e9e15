"""`python -m repro serve` in a process of its own, for tests and for the scripts beside them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from repro.setup.environment import ROOT


@dataclass(frozen=True)
class Served:
    """A server's process, what it says of itself, the model's name there, and its address."""

    process: subprocess.Popen[str]
    about: str
    name: str
    address: str


@contextmanager
def served_alone(
    arguments: Sequence[object],
    program: Sequence[str] = ("-m", "repro"),
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """A server on a free port. Where it still runs when all went well, it is told to end, and must end well."""
    command = [sys.executable, *program, "serve", *map(str, arguments), "--port", "0"]
    given = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    with subprocess.Popen(command, cwd=folder, env=given, stdout=subprocess.PIPE, text=True) as process:
        try:
            about, place = process.stdout.readline(), process.stdout.readline()
            said = re.search(r"^(.*) at (http://127\.0\.0\.1:\d+)", place)
            yield Served(process, about.strip(), said[1], said[2])
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0, "the server has not ended well"
        finally:
            process.kill()
