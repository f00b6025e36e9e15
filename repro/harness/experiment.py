"""An experiment as a notebook sees it: open it, compute its rows, draw them, judge them.

    run = experiment.open("fig12_basic_sampling")
    rows = run.rows()          # computes what is missing; what was ever finished is read back
    figures = run.draw(rows)   # PNG and SVG with their provenance inside
    run.judge(rows)            # verdicts on the paper's claims

Parameters come from experiments/<stem>.yaml and are checked before any work. Measuring and drawing are separate:
drawing sees rows only and never computes. A study (repro.studies) says what to compute and how to draw it; this module
does not know what that is, and holds nothing in memory that is not also on disk.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from repro import hashing, paths
from repro.engine.errors import UserError
from repro.harness import keys
from repro.harness.parameters import check_parameters, read_parameter_file
from repro.harness.sources import Sources
from repro.harness.store import PointStore, locked
from repro.hashing import write_atomically
from repro.report import embedding
from repro.setup import machine

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCALES = ("paper", "smoke")
#: An experiment that computes for less than this is computed again whenever its figures are verified.
CHEAP_S = 5.0
_STUDY_NAMES = ("Params", "points", "draw", "judge")


@dataclass(frozen=True)
class Point:
    """One independent piece of work: the call `function(**arguments)`, which returns one row or a list of rows.

    `weight` is its cost relative to the other points. A point marked `alone` measures wall-clock time: nothing else of
    the experiment runs beside it, and its threads are not limited.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    weight: float = 1.0
    alone: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a point needs a function, not {self.function!r}")
        if not self.weight > 0:
            raise ValueError(f"a point's weight must be positive, not {self.weight!r}")

    @property
    def label(self) -> str:
        """The point in one line, for messages."""
        inner = ", ".join(f"{name}={_in_short(value)}" for name, value in self.arguments.items())
        return f"{getattr(self.function, '__name__', 'call')}({inner})"


def open(stem: str, scale: str = "paper", overrides: Mapping[str, Any] | None = None) -> Run:
    """The experiment `stem` with the parameters of its file, the scale's changes and the given overrides.

    Raises UserError for an unknown experiment or scale, and for an unknown or mistyped parameter in any of the three,
    before any work.
    """
    if scale not in SCALES:
        raise UserError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    where = paths.folders()
    path = where.experiments / f"{where.check_stem(stem)}.yaml"
    title, params, smoke = read_parameter_file(path)
    study = _study(stem)
    params = check_parameters(study.Params, params, f"{path}, params")
    smoke = check_parameters(study.Params, smoke, f"{path}, smoke")
    given = check_parameters(study.Params, overrides or {}, "overrides")
    usual = params | smoke if scale == "smoke" else params
    variant = scale if usual | given == usual else "custom"
    return Run(stem, title, scale, study, study.Params(**usual | given), paths.folders(variant))


def _study(stem: str) -> ModuleType:
    package = paths.studies_package()
    try:
        study = importlib.import_module(f"{package}.{stem}")
    except ModuleNotFoundError as error:
        if not f"{package}.{stem}.".startswith(f"{error.name}."):  # something that the study imports
            raise
        raise UserError(f"experiment {stem!r} has a parameter file but no module {package}.{stem}") from None
    missing = [name for name in _STUDY_NAMES if not hasattr(study, name)]
    if missing:
        raise UserError(f"{study.__file__} must define {', '.join(_STUDY_NAMES)}; missing: {', '.join(missing)}")
    return study


@dataclass(frozen=True)
class Run:
    """One experiment with its checked parameters. Made by `open`."""

    stem: str
    title: str
    scale: str
    study: ModuleType = field(repr=False)
    params: Any
    folders: paths.Folders = field(repr=False)

    @property
    def measures_time(self) -> bool:
        """Whether some of its rows are wall-clock measurements of this machine, which never come out equal twice."""
        return any(point.alone for point in self.study.points(self.params))

    def rows(self) -> pd.DataFrame:
        """Every point's rows, in the order of the study's points; computes and keeps those that are missing.

        Also writes rows.csv and manifest.json. Raises UserError or PointError naming the point that failed, after all
        others are finished and kept.
        """
        import pandas as pd

        from repro.harness.progress import Progress
        from repro.harness.workers import Task, compute, left_in_flight

        store = PointStore(self.folders.of_points(self.stem))
        for label in left_in_flight(store.folder):
            print(f"{self.stem}: an earlier run was killed while it computed {label}", flush=True)
        points = self._identified_points()
        kept = {key: content for key in points if (content := store.read(key)) is not None}
        made = machine.machine()
        tasks = [
            Task(
                key,
                f"{self.stem}: {point.label}",
                point.function,
                dict(point.arguments),
                point.weight,
                point.alone,
                {"function": identity.function, "arguments": identity.arguments, "code": identity.code, "made": made},
            )
            for key, (identity, point) in points.items()
            if key not in kept
        ]
        compute(tasks, store, Progress(self.stem, len(points), len(kept), sum(task.weight for task in tasks)))
        kept |= {task.key: store.read(task.key) for task in tasks}
        contents = [kept[key] for key in points]
        rows = pd.DataFrame([row for content in contents for row in content["rows"]])
        self._write_results(rows, contents, made)
        return rows

    def _identified_points(self) -> dict[str, tuple[keys.Identity, Point]]:
        """The study's points by key, in its order; equal points count once."""
        sources = Sources()
        points: dict[str, tuple[keys.Identity, Point]] = {}
        for point in self.study.points(self.params):
            identity = keys.identify(point.function, point.arguments, sources)
            points.setdefault(identity.key, (identity, point))
        if not points:
            raise UserError(f"{self.stem} has nothing to compute with these parameters")
        return points

    def draw(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """The study's figures of these rows, each also saved as PNG and SVG that carry their provenance.

        Beside them go the rows themselves, <experiment>.csv, and for each figure what it carries, with the parameters
        in words, as <figure>.json: so figures that are kept can be checked and compared anywhere.
        """
        about = self._embedded(rows)
        figures = self.study.draw(rows, self.params)
        rows_file = f"{self.stem}.csv"
        write_atomically(self.folders.figures / rows_file, rows.rows_csv(rows))
        for name, figure in figures.items():
            carried = {**about, "figure": name}
            for file_format in embedding.FIGURE_FORMATS:
                content = embedding.figure_bytes(figure, file_format, carried)
                write_atomically(self.folders.figures / f"{name}.{file_format}", content)
            kept = {"rows": rows_file, "cheap": self._is_cheap(), "parameters": self._parameters()}
            write_atomically(self.folders.figures / f"{name}.json", hashing.pretty_json({**carried, **kept}))
        self._update_manifest(figures=dict.fromkeys(sorted(figures), about["rows_hash"]))
        return figures

    def _is_cheap(self) -> bool:
        """Whether checking a figure can begin with computing all points: it takes little, and gives the same rows
        again."""
        return (
            not self.measures_time
            and hashing.read_json(self.manifest_path).get("seconds_of_computing", math.inf) < CHEAP_S
        )

    def judge(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The study's verdicts on the paper's claims, merged into claims.json beside the figures."""
        from repro.report import claims

        judgements = self.study.judge(rows, self.params)
        # The ledger is read, changed and written: two runs at once must take turns.
        with locked(self.folders.points / ".cache" / "claims.lock", wait=True):
            return claims.record(judgements, experiment=self.stem, directory=self.folders.figures)

    @property
    def manifest_path(self) -> Path:
        return self.folders.of_results(self.stem) / "manifest.json"

    def hashes(self) -> dict[str, str]:
        """The hashes of the run's parameters and of the code that computes its points, from the checkout as it is
        now."""
        code = sorted({identity.code for identity, _ in self._identified_points().values()})
        return {"parameters_hash": _hash(self._parameters()), "code_hash": _hash(code)}

    def _parameters(self) -> dict[str, Any]:
        return {entry.name: keys.describe(getattr(self.params, entry.name)) for entry in fields(self.params)}

    def _about(self, rows: pd.DataFrame) -> dict[str, Any]:
        """What these rows are, in words and hashes; the same on every machine that has the same rows."""
        return {
            "experiment": self.stem,
            "scale": self.scale,
            "parameters": self._parameters(),
            "parameters_hash": _hash(self._parameters()),
            "rows_hash": rows.rows_hash(rows),
            **{name: _distinct(rows, column) for name, column in _COLUMNS.items()},
        }

    def _embedded(self, rows: pd.DataFrame) -> dict[str, Any]:
        """What a figure of these rows carries: the hashes, devices and kinds of evidence."""
        about = self._about(rows)
        del about["parameters"]
        about["traces"] = _hash(about["traces"])
        manifest = hashing.read_json(self.manifest_path)  # of other rows we do not know the code that made them
        about["code_hash"] = manifest.get("code_hash") if manifest.get("rows_hash") == about["rows_hash"] else None
        return about

    def _write_results(self, rows: pd.DataFrame, contents: list[dict[str, Any]], made: dict[str, Any]) -> None:
        write_atomically(self.folders.of_results(self.stem) / "rows.csv", rows.rows_csv(rows))
        machines = {hashing.canonical_json(content["made"]): content["made"] for content in contents}
        code = sorted({content["code"] for content in contents})
        self._write_manifest(
            {
                **self._about(rows),
                "title": self.title,
                "code_hash": _hash(code),
                "points": len(contents),
                "seconds_of_computing": round(sum(content["seconds"] for content in contents), 3),
                "computed_by": [machines[text] for text in sorted(machines)],
                "consolidated_by": made,
            }
        )

    def _update_manifest(self, **changes: Any) -> None:
        self._write_manifest({**hashing.read_json(self.manifest_path), **changes})

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_atomically(self.manifest_path, hashing.pretty_json(manifest))


#: Entry of a manifest or figure -> the column of the rows whose distinct values it lists.
_COLUMNS = {"evidence": "evidence", "devices": "device", "traces": "trace_hash"}


def _distinct(rows: pd.DataFrame, column: str) -> list[str]:
    return sorted({str(value) for value in rows[column].dropna()}) if column in rows else []


def _in_short(value: Any) -> str:
    named = getattr(value, "name", None) or getattr(value, "__name__", None)
    text = named if isinstance(named, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hash(value: Any) -> str:
    return hashing.sha256_text(hashing.canonical_json(value))
