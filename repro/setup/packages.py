"""Installing into the environment with its own pip, and saying meanwhile how far that is.

pip's own settings decide about package indexes. Modules are compiled when they are first imported, not all 15,000 of
them here: that takes half of set-up's processor time. Standard library only, and good for Pythons that are too old for
the rest."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from repro.setup.environment import ROOT, is_writable

NO_NETWORK = re.compile(r"connection broken|ConnectionError|Timeout|ProxyError|name resolution")
STEP = re.compile(r"(Collecting|Processing|Downloading|Using cached|Requirement already) ")
SECONDS_BETWEEN_LINES = {True: 0.5, False: 15.0}  # by: is it a terminal, on which the line is redrawn in place


class SetupError(Exception):
    """Set-up cannot go on. The message is for the user: what is wrong and the remedy."""


@contextlib.contextmanager
def progress() -> "Iterator[Callable[[str], None]]":
    """Yield a function that takes what is being done; meanwhile stderr has a line about it every few seconds."""
    started, live, done = time.monotonic(), sys.stderr.isatty(), threading.Event()
    doing = ["starting"]

    def tell() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES[live]):
            line = f"  {time.monotonic() - started:4.0f} s  {doing[0]}"[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\033[K{line}" if live else f"{line}\n")
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda what: doing.__setitem__(0, what)
    finally:
        done.set()
        teller.join()
        if live:
            sys.stderr.write("\r\033[K")


def run_pip(python: Path, arguments: "list[str]", label: str, say: "Callable[[str], None]") -> "tuple[bool, list[str]]":
    """Run an environment's pip. Return whether it succeeded, and its last lines; setup.log gets them all."""
    command = [str(python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if not is_writable(Path(os.environ.get("PIP_CACHE_DIR") or os.path.expanduser("~/.cache/pip"))):
        command.append("--no-cache-dir")
    # A user's pip may be set to install elsewhere, which is right for him and wrong inside an environment.
    elsewhere = {"PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"}
    environ = {name: value for name, value in os.environ.items() if name not in elsewhere}
    environ["PIP_NO_COMPILE"] = "1"
    last: deque[str] = deque(maxlen=12)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    say(label)
    with open(python.parent.parent / "setup.log", "a", encoding="utf-8") as log:
        log.write(f"$ pip {' '.join(arguments)}\n")
        with subprocess.Popen(command + arguments, env=environ, cwd=str(ROOT), **output) as process:
            for line in process.stdout or ():
                log.write(line)
                if line.strip():
                    last.append(line.rstrip())
                if line.startswith("Installing collected packages"):
                    say(f"{label}: installing {line.count(',') + 1} of them")
                elif STEP.match(line):
                    say(f"{label}: {line.strip()}")
    return process.returncode == 0, list(last)


def explain(what: str, lines: "list[str]", log: Path) -> str:
    """Return the message for a failed pip: its last lines and the remedy that fits them."""
    text = "\n".join(lines)
    if "No space left" in text:
        remedy = "Free some disk (3 GB are needed, 8 GB with the CUDA build of torch, 1 GB with LIGHT=1)"
    elif NO_NETWORK.search(text):
        remedy = "Set-up needs pip's package index once: check the network and pip's settings"
    elif "No matching distribution" in text:
        remedy = "pip's index has no such release for this machine: Python 3.11 or 3.12 on Linux x86_64 is tested"
    else:
        remedy = f"The whole log is in {log}"
    shown = "\n".join(f"  {line[:150]}" for line in lines[-4:])
    return f"pip could not install {what}. Its last lines:\n{shown}\n{remedy}; then run the same command again."
