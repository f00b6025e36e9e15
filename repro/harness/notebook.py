"""Executing an experiment's notebook with Papermill, in the running environment and nowhere else.

The kernel is this very Python, through a kernel specification made in a temporary folder: none need be installed.
Papermill takes `sys.exit(0)` in a cell and a stale result for success, so what a notebook should have left behind is
checked afterwards. What the kernel says of the experiment's progress is passed on as it comes."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from joblib import cpu_count

from repro import paths
from repro.errors import UserError, left_out
from repro.harness import experiment
from repro.harness.experiment import Run
from repro.harness.verify import problems_of_run
from repro.harness.workers import fresh_processes, left_in_flight
from repro.hashing import NO_SPACE, WriteError, leftovers, temporary_name
from repro.report.notebooks import quick_imports

_SECONDS_BETWEEN_LINES = 60.0  # of a line that is redrawn, in a log


class NotebookError(RuntimeError):
    """A notebook could not be executed to its end; the message says why."""


def execute_all(todo: Sequence[tuple[Run, Mapping[str, Any]]]) -> Iterator[tuple[Run, float, Exception | None]]:
    """Execute the notebooks of many runs with their overrides: each run, as it ends, with the seconds that it took and
    what went wrong (UserError, NotebookError).

    Two are at work at a time, as one draws while the other computes; those that measure time come last, alone."""
    timed = {run.stem for run, _ in todo if run.measures_time}
    for alone in (False, True):
        some = [(run, overrides) for run, overrides in todo if (run.stem in timed) is alone]
        together = 1 if alone else min(2, cpu_count(), len(some))
        if together <= 1:
            yield from ((run, *_execute(run.stem, run.scale, overrides)) for run, overrides in some)
            continue
        with fresh_processes(together, {}) as pool:
            futures = {pool.submit(_execute, run.stem, run.scale, overrides): run for run, overrides in some}
            for future in as_completed(futures):
                yield futures[future], *future.result()


def _execute(stem: str, scale: str, overrides: Mapping[str, Any]) -> tuple[float, Exception | None]:
    start, error = time.monotonic(), None
    try:
        execute(experiment.open(stem, scale, overrides), overrides)
    except (UserError, NotebookError) as raised:
        error = raised
    return time.monotonic() - start, error


def execute(run: Run, overrides: Mapping[str, Any]) -> Path:
    """Execute the run's notebook and return the executed copy, kept beside the run's results also when it fails.

    Raises UserError (as raised in the notebook, or for a notebook that is absent or not an experiment's),
    NotebookError, KeyboardInterrupt."""
    with quick_imports():
        import papermill
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError

    print(f"{run.stem}: {run.title}", file=sys.stderr, flush=True)
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
                *[str(path).replace("{", "{{").replace("}", "}}") for path in (source, partial)],  # not a template's
                {"scale": run.scale, "overrides": dict(overrides)},
                kernel_name="python3",
                language="python",
                progress_bar=False,
                coalesce_streams=True,  # of a line that is redrawn, the executed notebook keeps the last state
                start_timeout=180,  # seconds: a kernel on a busy two-core machine
                stdout_file=_Echo(f"{run.stem}: ", sys.stderr),
            )
    except PapermillExecutionError as error:
        raise _translated(run.stem, error, executed) from None
    except DeadKernelError:
        busy = left_in_flight(run.folders.of_points(run.stem))
        doing = f" while it computed {busy}" if busy else ""
        why = "Most likely the machine ran out of memory: run with fewer worker processes (JOBS=1)"
        killed = f"{run.stem}: the notebook's kernel was killed{doing}"
        raise NotebookError(f"{killed}. {why}. Finished points are kept.") from None
    except KeyboardInterrupt:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would complain of the cell that was cut short
        raise
    except OSError as error:
        remedy = "make that folder writable and free space there, or name another one with REPRO_RESULTS_DIR"
        raise WriteError(f"cannot execute {source} into {folder}: {error}; {remedy}") from error
    finally:
        if partial.exists():
            os.replace(partial, executed)
    if skipped := [cell for cell in read_notebook(executed) if cell.get("execution_count") is None]:
        first_line = "".join(skipped[0]["source"]).strip().splitlines()[0]
        raise NotebookError(f"{run.stem}: the notebook ended early, before {first_line!r}; see {executed}")
    if problems := problems_of_run(run.stem, run.folders):
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


def _translated(stem: str, error: Any, executed: Path) -> BaseException:
    """The error of a cell as one of ours; `error` is Papermill's."""
    kinds = {"UserError": UserError, "WriteError": WriteError, "PointError": NotebookError}
    kinds |= dict.fromkeys(("KeyboardInterrupt", "Interrupted"), KeyboardInterrupt)
    if error.ename in kinds:
        return kinds[error.ename](error.evalue)
    if error.ename == "OSError" and any(f"[Errno {number}]" in error.evalue for number in NO_SPACE):
        return WriteError(f"{stem}: {error.evalue}; free space on that disk")
    if error.ename == "ModuleNotFoundError" and (named := re.match(r"No module named '(\w+)", error.evalue)):
        missing = left_out(ModuleNotFoundError(error.evalue, name=named[1]))
        if isinstance(missing, UserError):
            return UserError(f"{stem}: {missing}")
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    return NotebookError(f"{stem}: {error.ename}: {error.evalue}; see {executed}\n{traceback}".rstrip())


@contextmanager
def _own_kernel() -> Iterator[None]:
    """Make "python3" the running interpreter, with this package, whatever kernels are installed."""
    from ipykernel.kernelspec import write_kernel_spec

    with tempfile.TemporaryDirectory(prefix="repro-kernel-") as folder:
        write_kernel_spec(Path(folder, "kernels", "python3"), extra_arguments=["--log-level=CRITICAL"])
        package = str(Path(__file__).resolve().parent.parent.parent)
        search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        quiet = {"TQDM_DISABLE": "1"}  # bars of libraries: the run has one line of progress of its own
        with paths.environment({"JUPYTER_PATH": folder, "PYTHONPATH": search, **quiet}):
            yield


class _Echo:
    """Passes on what the kernel says of its experiment: on a terminal at once, anywhere else whole lines and, of one
    that is redrawn, what it says once a minute."""

    def __init__(self, prefix: str, stream: TextIO) -> None:
        self._prefix, self._stream = prefix, stream
        self._line, self._printed = "", time.monotonic()

    def write(self, text: str) -> None:
        for piece in re.findall(r"[^\r\n]+|\n", text):
            live, ended = self._stream.isatty(), piece == "\n"
            if not ended:
                self._line = piece.rstrip() if piece.startswith(self._prefix) else ""
            old = time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES
            if self._line and (live or ended or old):
                line = f"\r{self._line}\x1b[K" if live else self._line
                print(line, end="" if live and not ended else "\n", file=self._stream, flush=True)
                self._printed = time.monotonic()
            self._line = "" if ended else self._line

    def flush(self) -> None:
        self._stream.flush()
