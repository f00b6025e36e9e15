"""One small reproduction under the circumstances that break other projects: `python tests/environment_trials.py`.

A copy of the checkout in a folder with blanks, brackets and non-ASCII letters runs one experiment without
make, from `python -m repro`,
    no network     in a network namespace of its own that has a loopback device and nothing else
    closed home    with a home folder on a read-only file system
    one core       pinned to the first core
    odd locale     LC_ALL=C, TZ far away, a umask that gives others nothing
    old settings   with PIP_*, PYTHONSTARTUP, MPLBACKEND and IPython settings of a reader that would break it
    together       all of these at once
and its rows and figures are compared with those of an ordinary run. The environment is that of the Python
that runs this; another one is tried with another Python. What this machine does not allow (namespaces need a
kernel that gives them) is said.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = "fig05_block_tables"
READER = {
    "PIP_TARGET": "/nowhere",
    "PYTHONSTARTUP": "/nowhere.py",
    "MPLBACKEND": "module://nowhere",
    "MATPLOTLIBRC": "/nowhere",
    "JUPYTER_CONFIG_PATH": "/nowhere",
}
#: trial -> shell words before the command, in which {home} is a folder
NO_NETWORK = "ip link set lo up 2>/dev/null || true"
CLOSED_HOME = "mount -t tmpfs tmpfs {home} && mount -o remount,ro {home}"
TRIALS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "ordinary": ([], {}, ""),
    "no network": (["unshare", "-rn"], {}, NO_NETWORK),
    "closed home": (["unshare", "-rm"], {"HOME": "{home}"}, CLOSED_HOME),
    "one core": ([], {}, "taskset -cp 0 $$ >/dev/null"),
    "odd locale": ([], {"LC_ALL": "C", "TZ": "Pacific/Chatham"}, "umask 077"),
    "old settings": ([], READER, ""),
    "together": (
        ["unshare", "-rmn"],
        {**READER, "HOME": "{home}", "LC_ALL": "C", "TZ": "Pacific/Chatham"},
        f"{NO_NETWORK}; {CLOSED_HOME} && taskset -cp 0 $$ >/dev/null && umask 077",
    ),
}


def run_trial(name: str, folder: Path) -> tuple[str, dict[str, bytes]]:
    """ "" and what was made, or why not; "not here" where the machine does not allow the trial."""
    before, changes, shell = TRIALS[name]
    checkout, home = folder / "a checkout (ünï), № 1", folder / "home"
    for part in ("repro", "experiments", "notebooks"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    if before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        return "not here: this machine gives no namespaces", {}
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("REPRO_", "JUPYTER", "IPYTHON", "MPL", "PYTHONPATH"))
    }
    environ |= {key: value.format(home=home) for key, value in changes.items()}
    command = shlex.join([sys.executable, "-m", "repro", "reproduce", "--scale", "smoke", "--only", EXPERIMENT])
    script = f"{shell.format(home=shlex.quote(str(home)))}\ncd {shlex.quote(str(checkout))} && exec {command}"
    done = subprocess.run(
        [*before, "sh", "-c", script],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return f"ended with {done.returncode}: {done.stdout[-1500:]}", {}
    left = [path.name for path in home.iterdir() if path.name not in (".cache", ".config")]
    if left:
        return f"left in the home folder: {left}", {}
    figures = checkout / "results" / "smoke" / "figures"  # but for the page, which tells the time and the machine
    made = {
        path.name: path.read_bytes() for path in sorted(figures.iterdir()) if path.is_file() and path.suffix != ".html"
    }
    return "", made


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the trials; returns how many fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)}; all if none is named")
    named = parser.parse_args(arguments).trials or list(TRIALS)
    failed, first = 0, None
    print(f"Python {sys.version.split()[0]}, {EXPERIMENT} at smoke scale", flush=True)
    for name in named:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="repro trial ") as folder:
            problem, made = run_trial(name, Path(folder))
        if not problem and first is not None and made != first:
            others = sorted(key for key in made | first if made.get(key) != first.get(key))
            problem = f"other files or bytes than in the first trial: {others}"
        first = first or made or None
        skipped = problem.startswith("not here")
        failed += bool(problem) and not skipped
        print(
            f"{name}: {problem or f'{len(made)} files, as they should be'} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
