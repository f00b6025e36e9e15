"""JupyterLab as `make lab` opens it: on working copies of the notebooks, with its address said once.

JupyterLab saves outputs by itself, so a notebook that is opened changes. The notebooks that the project keeps are
therefore copied to work/, which git ignores. A copy remembers which cells it was made of. When the project's notebook
changes, a copy whose cells are still those is replaced; one with cells of the reader's is kept, and that is said.

The settings in jupyter/ beside this file hold for this JupyterLab only. Standard library only."""

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from repro.setup.environment import ROOT, prepare_environment, user_name
from repro.setup.packages import SetupError

NOTEBOOKS = ROOT / "notebooks"
COPIES = ROOT / "work"
COPIED_FROM = "copied_from"  # in a copy's metadata: what `cells_of` said of the original


def read(path: Path) -> "dict | None":
    """Return a notebook, or None for what is none."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        return notebook if cells_of(notebook) and isinstance(notebook["metadata"], dict) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def cells_of(notebook: dict) -> str:
    """Return a hash of what a person writes in a notebook: cells that hold something, and their tags."""
    written = [
        [cell["cell_type"], "".join(cell["source"]).strip(), cell.get("metadata", {}).get("tags", [])]
        for cell in notebook["cells"]
        if "".join(cell["source"]).strip()
    ]
    return hashlib.sha256(json.dumps(written).encode("utf-8")).hexdigest()[:16]


def refresh_copies(originals: Path = NOTEBOOKS, copies: Path = COPIES) -> "list[str]":
    """Copy new notebooks, and those that have changed where the copy has not. Return a line for each copy that stays
    as it is though the original has changed; OSError where nothing can be written."""
    copies.mkdir(exist_ok=True)
    kept = []
    for original in sorted(originals.rglob("*.ipynb")):
        name = original.relative_to(originals)
        if any(part.startswith(".") for part in name.parts):  # JupyterLab's own copies
            continue
        notebook, copy = read(original), copies / name
        if notebook is None:
            continue
        made_of = cells_of(notebook)
        if copy.exists():
            mine = read(copy)
            source = mine["metadata"].get(COPIED_FROM) if mine else None
            if source == made_of:
                continue
            if mine is None or cells_of(mine) != source:
                kept.append(
                    f"work/{name.as_posix()} has changes of yours and is kept; notebooks/{name.as_posix()} is newer"
                )
                continue
        notebook["metadata"][COPIED_FROM] = made_of
        copy.parent.mkdir(parents=True, exist_ok=True)
        whole = copy.with_name(f".{copy.name}.new")
        whole.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(str(whole), str(copy))
    return kept


def run(python: Path, arguments: "list[str]") -> int:
    """Run JupyterLab of an environment with options of its own, until it is stopped. Return its exit status."""
    environ: dict[str, str] = dict(os.environ)
    prepare_environment(environ, private=False)
    environ["PATH"] = os.pathsep.join([str(python.parent), environ.get("PATH", os.defpath)])  # `repro` in its terminals
    ours, others = Path(__file__).resolve().parent / "jupyter", environ.get("JUPYTER_CONFIG_PATH")
    environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(ours), others]))
    runtime = Path(environ.get("REPRO_RESULTS_DIR") or ROOT / "results").resolve() / ".cache" / "lab"
    environ["JUPYTER_RUNTIME_DIR"] = str(runtime)
    try:
        for line in refresh_copies():
            sys.stderr.write(f"{line}\n")
    except OSError as error:
        raise SetupError(f"no working copies of the notebooks can be made in {COPIES}: {error.strerror}") from None
    environ.setdefault("JUPYTER_TOKEN", secrets.token_hex(24))  # one that it makes itself it prints amid a screenful
    root = ["--allow-root"] if os.geteuid() == 0 else []  # a container's only user
    command = [str(python), "-m", "jupyterlab", "--log-level=WARN", *root, *arguments]
    with subprocess.Popen(command, env=environ, cwd=str(ROOT)) as process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is JupyterLab's, which asks before it stops
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        told = runtime / f"jpserver-{process.pid}.json"
        with contextlib.suppress(FileNotFoundError):
            told.unlink()  # of an earlier process with this number
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there yet, or not whole
                sys.stderr.write(address(json.loads(told.read_text(encoding="utf-8"))))
                break
            time.sleep(0.1)
        return process.wait()


def address(server: dict) -> str:
    """Return what a reader must know of a running server, from what Jupyter says of it."""
    url, port = server["url"], server["port"]
    key = f"?token={server['token']}" if server["token"] else ""
    here = f"{user_name(os.geteuid())}@{socket.gethostname()}"
    return (
        f"JupyterLab: {url}{key}\nFrom another machine, first: ssh -N -L {port}:localhost:{port} {here}\n"
        "Ctrl+C, twice, stops it.\n"
    )
