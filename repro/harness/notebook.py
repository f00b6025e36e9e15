"""Executing an experiment's notebook with Papermill, in the running environment and nowhere else.

The kernel is this very Python, through a kernel specification made in a temporary folder: none need be installed.
Papermill takes `sys.exit(0)` in a cell and a stale result for success, so what a notebook should have left behind is
checked afterwards. Progress lines of the kernel are passed on as they come.

This module does not know what experiments compute.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from repro import paths
from repro.engine.errors import UserError
from repro.harness.experiment import Run
from repro.harness.verify import problems_of_run
from repro.harness.workers import left_in_flight
from repro.hashing import leftovers, temporary_name

_START_TIMEOUT_S = 180  # a kernel on a busy two-core machine


class NotebookError(RuntimeError):
    """A notebook could not be executed to its end; the message says why."""


def execute(run: Run, overrides: Mapping[str, Any]) -> Path:
    """Execute the run's notebook and return the executed copy, kept beside the run's results also when it fails.

    Raises UserError (as raised in the notebook, or for a notebook that is absent or not an experiment's),
    NotebookError, KeyboardInterrupt.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    source = run.folders.notebooks / f"{run.stem}.ipynb"
    read_notebook(source)
    folder = run.folders.of_results(run.stem)
    executed, partial = folder / f"{run.stem}.ipynb", temporary_name(folder / run.stem, ".ipynb")
    try:
        for place in (folder, Path(os.environ.get("IPYTHONDIR", folder))):
            place.mkdir(parents=True, exist_ok=True)
        for path in leftovers(folder):
            path.unlink(missing_ok=True)
        with _own_kernel():
            papermill.execute_notebook(
                _literal(source),
                _literal(partial),
                {"scale": run.scale, "overrides": dict(overrides)},
                kernel_name="python3",
                language="python",
                progress_bar=False,
                start_timeout=_START_TIMEOUT_S,
                stdout_file=_Echo(f"{run.stem}: ", sys.stderr),
            )
    except PapermillExecutionError as error:
        raise _translated(run.stem, error, executed) from None
    except DeadKernelError:
        busy = left_in_flight(run.folders.of_points(run.stem))
        doing = f" while it computed {'; '.join(busy)}" if busy else ""
        raise NotebookError(
            f"{run.stem}: the notebook's kernel was killed{doing}. Most likely the machine ran out of memory: run with "
            "fewer worker processes (JOBS=1). Finished points are kept."
        ) from None
    except KeyboardInterrupt:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would complain of the cell that was cut short
        raise
    except OSError as error:
        raise UserError(
            f"cannot execute {source} into {folder}: {error}; make that folder writable and free space there, or name "
            "another one with REPRO_RESULTS_DIR"
        ) from error
    finally:
        if partial.exists():
            os.replace(partial, executed)
    skipped = [cell for cell in read_notebook(executed) if cell.get("execution_count") is None]
    if skipped:
        raise NotebookError(f"{run.stem}: the notebook ended early, before {_first_line(skipped[0])!r}; see {executed}")
    problems = problems_of_run(run.stem, run.folders)
    if problems:
        raise NotebookError(f"{run.stem}: the notebook ran, but {problems[0]}")
    return executed


def read_notebook(path: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook that have any code; UserError if it is absent, damaged or takes no parameters."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
        tags = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    except FileNotFoundError:
        raise UserError(f"there is no notebook {path}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a notebook: {error!r}") from error
    if tags.count("parameters") != 1:
        raise UserError(f"{path}: one code cell must carry the tag 'parameters' and set scale and overrides")
    return cells


def faults_of_notebook(path: Path) -> list[str]:
    """What keeps a notebook from being thin: definitions, outputs, a parameters cell that is not the first."""
    cells = read_notebook(path)
    faults = []
    if "parameters" not in cells[0]["metadata"].get("tags", []):
        faults.append("its first code cell is not the one tagged 'parameters'")
    for cell in cells:
        if cell.get("outputs") or cell.get("execution_count") is not None:
            faults.append(f"outputs are kept at {_first_line(cell)!r}")
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if any(isinstance(node, definitions) for node in ast.walk(ast.parse("".join(cell["source"])))):
            faults.append(f"something is defined at {_first_line(cell)!r}")
    return faults


def _first_line(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"]).strip().splitlines()[0]


def _literal(path: Path) -> str:
    """Papermill takes braces in a path for a template."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _translated(stem: str, error: Any, executed: Path) -> BaseException:
    """The error of a cell as one of ours; `error` is Papermill's."""
    if error.ename == "UserError":
        return UserError(error.evalue)
    if error.ename == "KeyboardInterrupt":
        return KeyboardInterrupt()
    if error.ename == "PointError":
        return NotebookError(error.evalue)
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    return NotebookError(f"{stem}: {error.ename}: {error.evalue}; see {executed}\n{traceback}".rstrip())


@contextmanager
def _own_kernel() -> Iterator[None]:
    """Make "python3" the running interpreter, with this package, whatever kernels are installed."""
    with tempfile.TemporaryDirectory(prefix="repro-kernel-") as folder:
        spec = Path(folder, "kernels", "python3", "kernel.json")
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=CRITICAL"]
        content = {"argv": argv, "display_name": "Python 3", "language": "python"}
        spec.write_text(json.dumps(content), encoding="utf-8")
        package = str(Path(__file__).resolve().parent.parent.parent)
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with paths.environment({"JUPYTER_PATH": folder, "PYTHONPATH": search}):
            yield


class _Echo:
    """Passes on the kernel's progress lines: in place on a terminal, as lines anywhere else."""

    def __init__(self, prefix: str, stream: TextIO) -> None:
        self._prefix, self._stream, self._pending = prefix, stream, ""

    def write(self, text: str) -> None:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            if line.startswith(self._prefix):
                live = self._stream.isatty()
                running = live and line.endswith(("left", "yet"))  # overwritten by the next
                print(f"\r{line}\x1b[K" if live else line, end="" if running else "\n", file=self._stream, flush=True)

    def flush(self) -> None:
        self._stream.flush()
