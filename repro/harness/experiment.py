"""An experiment as a notebook sees it: open it, compute its rows, draw them, judge them.

    run = repro.open("fig12_basic_sampling")
    rows = run.rows()          # computes what is missing; what was ever finished is read back
    figures = run.draw(rows)   # PNG and SVG with their provenance inside
    run.judge(rows)            # verdicts on the paper's claims

Parameters come from experiments/<stem>.yaml and are checked before any work. A study (repro.studies) says what to
compute, and how to draw it from rows alone; nothing is held in memory that is not also on disk."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.checks import instance, user_facing
from repro.errors import Brief, UserError
from repro.harness import keys
from repro.harness.parameters import ParameterFile, Parameters, make_parameters, read_parameter_file
from repro.harness.point import Point, spread
from repro.harness.sources import Sources
from repro.harness.store import PointStore, locked
from repro.harness.tables import Rows, show_whole_tables
from repro.hashing import canonical_json, pretty_json, read_json, sha256_json, write_atomically
from repro.report.embedding import FIGURE_FORMATS, MACHINES, figure_bytes
from repro.setup.machine import machine

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from repro.report.claims import Judgement

SCALES = ("paper", "smoke")
#: An experiment that computes for less than this is computed again whenever its figures are verified.
CHEAP_S = 5.0
_STUDY_NAMES = ("Params", "TABLES", "points", "draw", "judge")


@user_facing
def open(stem: str, scale: str = "paper", overrides: Mapping[str, Any] | None = None) -> Run:
    """The experiment `stem` with the parameters of its file, the scale's changes and the given overrides.

    Raises UserError for an unknown experiment or scale, and for an unknown, missing or mistyped parameter in any of the
    three, before any work."""
    if scale not in SCALES:
        raise UserError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    instance("overrides", overrides, (Mapping, NoneType), "a dict, parameter name -> value, or None")
    file, study = parameter_file(stem), _study(stem)
    show_whole_tables()
    given = overrides or {}
    params = make_parameters(study.Params, file, scale, given)
    variant = scale if not given or params == make_parameters(study.Params, file, scale, {}) else "custom"
    return Run(stem, file, scale, study, params, paths.folders(variant))


def _expect_rows(rows: Any, kind: type = Mapping) -> None:
    instance("rows", rows, kind, "the rows of the experiment, as run.rows() returns them")


def parameter_file(stem: str) -> ParameterFile:
    """The parameter file of an experiment. UserError if there is none, or it has a fault."""
    where = paths.folders()
    return read_parameter_file(where.experiments / f"{where.check_stem(stem)}.yaml")


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


def experiments() -> Styler:
    """Every experiment by its name, with its title, in the order of the paper; `.data` is the table."""
    import pandas as pd

    titles = {stem: parameter_file(stem).title for stem in paths.folders().stems()}
    table = pd.DataFrame({"experiment": titles.keys(), "title": titles.values()})
    return table.style.hide(axis="index").set_table_styles([{"selector": "th, td", "props": "text-align: left"}])


class Interrupted(Brief, KeyboardInterrupt):
    """A run was interrupted; the message says how to go on."""


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("finished points are kept; run the cell again to go on from there") from None


@dataclass(frozen=True, repr=False)
class Run:
    """One experiment with its checked parameters. Made by `open`."""

    stem: str
    file: ParameterFile
    scale: str
    study: ModuleType
    params: Parameters
    folders: paths.Folders

    @property
    def title(self) -> str:
        return self.file.title

    def __repr__(self) -> str:
        points = self.identified_points()
        kept = sum(self.store.path(key).is_file() for key in points)
        return f"{self.stem} ({self.scale} scale): {len(points)} points, {kept} of them kept"

    @property
    def measures_time(self) -> bool:
        """Whether some of its rows are wall-clock measurements of this machine, which never come out equal twice."""
        return any(point.alone for point in self.study.points(self.params))

    @_resumable()
    def rows(self) -> Rows:
        """Every point's rows in named tables, in the order of the study's points; computes and keeps what is missing.

        Also writes a CSV file for each table and manifest.json. Raises UserError or PointError naming the point that
        failed, after all others are finished and kept."""
        rows, contents = self._computed()
        rows.write(self.folders.of_results(self.stem))
        machines = {canonical_json(content["made"]): content["made"] for content in contents}
        manifest = {
            **self._about(rows),
            "parameters": self.described_parameters(),
            "title": self.title,
            "tables": rows.described(),
            "code_hash": sha256_json(sorted({content["code"] for content in contents})),
            "points": len(contents),
            "seconds_of_computing": round(sum(content["seconds"] for content in contents), 3),
            "computed_by": [machines[text] for text in sorted(machines)],
            "consolidated_by": machine(),
        }
        write_atomically(self.manifest_path, pretty_json(manifest))
        return rows

    def _computed(self) -> tuple[Rows, list[dict[str, Any]]]:
        from repro.harness.workers import Task, compute, left_in_flight

        store, points, made = self.store, self.identified_points(), machine()
        if killed := left_in_flight(store.folder):
            print(f"{self.stem}: an earlier run was killed while it computed {killed}", flush=True)
        kept: dict[str, dict[str, Any]] = {}
        for attempt in range(4):
            kept |= {key: found for key in points if key not in kept and (found := store.read(key)) is not None}
            tasks = [
                Task(key, f"{self.stem}: {point.label}", point, vars(identity) | {"made": made})
                for key, (identity, point) in points.items()
                if key not in kept
            ]
            if attempt and not tasks:
                break
            done = [(content["function"], content["seconds"], points[key][1].weight) for key, content in kept.items()]
            compute(tasks, store, self.stem, done)
        else:  # once is a hand that slipped, three times a program
            raise UserError(f"finished points vanish from {store.folder}; end what removes them, then run this again")
        contents = [kept[key] for key in points]
        return Rows.collect((content["tables"] for content in contents), self.study.TABLES), contents

    @_resumable()
    def sketch(self) -> dict[str, Figure]:
        """The study's figures of these parameters, for trying something: nothing is written but the points."""
        return self.study.draw(self._computed()[0], self.params)

    def plan(self) -> pd.DataFrame:
        """The study's points, a line each: its table, call, share of all the work (%), whether it is kept, and those
        arguments that are not the same in all."""
        import pandas as pd

        points = self.identified_points()
        total = sum(point.weight for _, point in points.values())
        table = pd.DataFrame(
            {
                "table": point.table,
                "function": point.function.__name__,
                "work (%)": round(100 * point.weight / total, 2),
                "kept": self.store.path(key).is_file(),
                **spread(point.arguments),
            }
            for key, (_, point) in points.items()
        )
        same = [name for name in table.columns[4:] if table[name].nunique(dropna=False) == 1]
        return table.drop(columns=same).fillna("")

    @property
    def store(self) -> PointStore:
        return PointStore(self.folders.of_points(self.stem))

    def identified_points(self) -> dict[str, tuple[keys.Identity, Point]]:
        """The study's points by key, in its order; equal points count once."""
        sources = Sources()
        points: dict[str, tuple[keys.Identity, Point]] = {}
        for point in self.study.points(self.params):
            identity = keys.identify(point.function, point.arguments, sources)
            points.setdefault(sha256_json([identity.key, point.table]), (identity, point))
        if not points:
            raise UserError(f"{self.stem} has nothing to compute with these parameters")
        return points

    def draw(self, rows: Rows) -> dict[str, Figure]:
        """The study's figures of these rows, each also saved as PNG and SVG that carry their provenance.

        Beside them go the rows themselves, <experiment>.<table>.csv, what the study shows as a table, <name>.html, and
        for each figure what it carries, with the parameters in words, as <figure>.json. Who computed the rows is kept
        in machines.json, by experiment."""
        import pandas as pd

        _expect_rows(rows, Rows)
        about, manifest = self._about(rows), read_json(self.manifest_path)
        same = manifest.get("rows_hash") == about["rows_hash"]  # of other rows we do not know the code that made them
        about |= {"traces": sha256_json(about["traces"]), "code_hash": manifest.get("code_hash") if same else None}
        figures, folder = self.study.draw(rows, self.params), self.folders.figures
        files = rows.write(folder, f"{self.stem}.")
        for name, table in self.tables(rows).items():
            comment = f"<!-- experiment {self.stem}, rows {about['rows_hash']} -->"
            with pd.option_context("display.max_colwidth", None):
                content = f"{comment}\n{table.to_html(index=False, border=0, justify='left')}\n"
            write_atomically(folder / f"{name}.html", content.encode())
        kept = {
            "tables": {name: {"file": files[name], **table} for name, table in rows.described().items()},
            "cheap": not self.measures_time and manifest.get("seconds_of_computing", math.inf) < CHEAP_S,
            "parameters": self.described_parameters(),
        }
        for name, figure in figures.items():
            carried = {**about, "figure": name}
            for file_format in FIGURE_FORMATS:
                write_atomically(folder / f"{name}.{file_format}", figure_bytes(figure, file_format, carried))
            write_atomically(folder / f"{name}.json", pretty_json({**carried, **kept}))
        if same:
            self._record_machines(manifest)
        drawn = {"figures": dict.fromkeys(sorted(figures), about["rows_hash"])}
        write_atomically(self.manifest_path, pretty_json({**manifest, **drawn}))
        return figures

    def _record_machines(self, manifest: Mapping[str, Any]) -> None:
        """Keep beside the figures who computed their rows: a clone has figures and no manifests."""
        path = self.folders.figures / MACHINES
        entry = {name: manifest.get(name) for name in ("points", "seconds_of_computing", "computed_by")}
        with locked(self.folders.points / ".cache" / "machines.lock", wait=True):
            write_atomically(path, pretty_json(dict(sorted({**read_json(path), self.stem: entry}.items()))))

    def tables(self, rows: Rows) -> dict[str, pd.DataFrame]:
        """The study's tables for readers, by name: what its optional function `tables(rows, params)` makes."""
        _expect_rows(rows)
        return self.study.tables(rows, self.params) if hasattr(self.study, "tables") else {}

    def judgements(self, rows: Rows) -> list[Judgement]:
        """What the rows say about the paper's claims, with the notes of the parameter file filled in; nothing where
        the parameters are not the paper's."""
        from repro.report import claims

        _expect_rows(rows)
        found = self.study.judge(rows, self.params) if self.params.as_in_paper else []
        notes = dict(self.file.notes)
        for one in found:
            if text := notes.pop(
                one.claim_id, None
            ):  # on a claim's first judgement; a second one is of another machine
                # Not `replace`: it would round the numbers a second time.
                object.__setattr__(one, "note", claims.filled(text.strip(), one.facts))
        return found

    def judge(self, rows: Rows) -> pd.DataFrame:
        """The study's verdicts on the paper's claims, merged into claims.json beside the figures.

        Says so if there are none because this is not the paper's run."""
        from repro.report import claims

        if self.params.no_verdicts:
            print(self.params.no_verdicts)
        judgements = self.judgements(rows)
        # The ledger is read, changed and written: two runs at once must take turns.
        with locked(self.folders.points / ".cache" / "claims.lock", wait=True):
            return claims.record(judgements, experiment=self.stem, directory=self.folders.figures)

    def compare(self, rows: Rows) -> Styler:
        """The paper's numbers beside ours, a line a key, with interval, deviation and verdict; `.data` is the table."""
        from repro.report import claims

        table = claims.style(claims.compare(found := self.judgements(rows)))
        return table if found else table.set_caption(self.params.no_verdicts or "No claim of the paper is judged here.")

    def _repr_html_(self) -> str:
        from repro.harness import card

        return card.html(self)

    @property
    def manifest_path(self) -> Path:
        return self.folders.of_results(self.stem) / "manifest.json"

    def hashes(self) -> dict[str, str]:
        """The hashes of the run's parameters and of the code that computes its points, from the checkout as it is."""
        code = sorted({identity.code for identity, _ in self.identified_points().values()})
        return {"parameters_hash": sha256_json(self.described_parameters()), "code_hash": sha256_json(code)}

    def described_parameters(self) -> dict[str, Any]:
        """The parameters as plain JSON values."""
        return {name: keys.describe(getattr(self.params, name)) for name in type(self.params).model_fields}

    def _about(self, rows: Rows) -> dict[str, Any]:
        """What these rows are, in hashes and words; the same on every machine that has the same rows."""
        return {
            "experiment": self.stem,
            "scale": self.scale,
            "parameters_hash": sha256_json(self.described_parameters()),
            "rows_hash": rows.hash(),
            "evidence": rows.distinct("evidence"),
            "devices": rows.distinct("device"),
            "traces": rows.distinct("trace_hash"),
        }
