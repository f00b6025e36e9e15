"""Checking that a figure, the rows it claims to show, and the code and parameters of today belong together.

A figure carries the hashes of its rows, parameters and computing code, and so does the sidecar beside it. Parameters
and code are hashed again from the checkout; the rows beside the figure, and those in results/ if they are there, are
compared with what it carries; the figure is drawn again from its rows and must come out byte for byte. What computes
for seconds only is computed again, too; the rest on request, but for measurements of wall-clock time. With all figures
the page beside them is built again, and rendered notebooks must be of the same rows."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.errors import UserError
from repro.harness import experiment, page
from repro.harness.diff import SAME, first_difference
from repro.harness.runs import table_files
from repro.harness.tables import Rows, read_table, tables_hash
from repro.hashing import read_json, sha256_file
from repro.report.embedding import FIGURE_FORMATS, figure_bytes, read_embedded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def problems_of_run(stem: str, folders: paths.Folders) -> list[str]:
    """What is missing or does not match among a finished run's tables, manifest and figures."""
    folder = folders.of_results(stem)
    manifest = read_json(folder / "manifest.json")
    if not manifest.get("tables"):
        return [f"it left no tables and no manifest.json in {folder}"]
    if _hash_beside(folder / "manifest.json", manifest) != manifest.get("rows_hash"):
        return [f"the tables in {folder} are not what their manifest describes"]
    if not manifest.get("figures"):
        return ["it drew no figure"]
    problems = []
    for name, rows_hash in manifest["figures"].items():
        for file_format in FIGURE_FORMATS:
            path = folders.figures / f"{name}.{file_format}"
            try:
                if read_embedded(path).get("rows_hash") != rows_hash:
                    problems.append(f"{path} shows other rows")
            except UserError as error:
                problems.append(str(error))
    return problems


def _tables_beside(path: Path, about: Mapping[str, Any]) -> dict[str, Path]:
    """Table -> its file, as a manifest or sidecar at `path` says; empty if a file is missing."""
    files = {name: path.with_name(file) for name, file in table_files(about).items()}
    return files if all(file.is_file() for file in files.values()) else {}


def _hash_beside(path: Path, about: Mapping[str, Any]) -> str | None:
    files = _tables_beside(path, about)
    return tables_hash({name: sha256_file(file) for name, file in files.items()}) if files else None


class KeptFigure:
    """A figure's file, what it carries, and the sidecar and tables beside it. UserError if it is not one of ours."""

    def __init__(self, path: Path) -> None:
        self.path, self.carried = path, read_embedded(path)
        self.experiment, self.scale = self.carried.get("experiment"), self.carried.get("scale")
        self.sidecar = path.with_suffix(".json")
        self.beside = read_json(self.sidecar)
        self.tables = _tables_beside(self.sidecar, self.beside)
        variants = {paths.folders(variant).figures: variant for variant in paths.VARIANTS}
        self.variant = variants.get(path.resolve().parent, self.scale)

    @cached_property
    def run(self) -> experiment.Run:
        return experiment.open(self.experiment, self.scale)


@dataclass(frozen=True)
class Again:
    """An experiment made anew: its rows, None where they were not computed, and its figures of the kept rows."""

    rows: Rows | None
    figures: Mapping[str, Figure]
    rounded: bool = False  # rows that were computed differ from the kept ones in their last digits only


def problems_of_figure(figure: KeptFigure) -> list[str]:
    """What does not match among a figure, its sidecar and rows, and the checkout, the first difference first."""
    run, carried, sidecar, beside = figure.run, figure.carried, figure.sidecar, figure.beside
    manifest = paths.folders(figure.variant).of_results(run.stem) / "manifest.json"
    # Only its manifest knows the parameters of a run of one's own; all others come from the checkout.
    custom = figure.variant == "custom"
    now, source = (read_json(manifest), str(manifest)) if custom else (run.hashes(), "this checkout")
    places = {sidecar: beside, manifest: read_json(manifest)}
    hashes = {place: found for place, about in places.items() if (found := _hash_beside(place, about))}
    others = [
        *[(name, beside.get(name), f"in {sidecar.name}") for name in carried if beside],
        *[(name, now.get(name), f"in {source}") for name in ("parameters_hash", "code_hash")],
        *[("rows_hash", found, f"of the tables that {place} names") for place, found in hashes.items()],
    ]
    problems = [] if beside else [f"there is no sidecar {sidecar}; draw the figure again"]
    problems += [
        f"{name} is {_short(carried.get(name))} in the figure and {_short(other)} {where}"
        for name, other, where in others
        if other != carried.get(name)
    ]
    if not hashes:
        compute = f"compute them: `python -m repro run {run.stem}`"
        problems.append(f"its rows cannot be checked: no tables are beside it; {compute}")
    return problems


def made_again(figure: KeptFigure, recompute: bool) -> Again | None:
    """The figure's experiment once more: computed in a temporary folder if that is cheap or asked for, else only drawn
    from the rows beside the figure, as are wall-clock measurements always. None for a run with parameters of its own,
    and without rows."""
    import matplotlib

    matplotlib.use("Agg")
    run = figure.run
    if figure.variant == "custom" or not (figure.tables or recompute and not run.measures_time):
        return None
    kept = Rows.read(figure.tables, run.study.TABLES) if figure.tables else None
    if run.measures_time or not (recompute or figure.beside.get("cheap")):
        return Again(None, run.study.draw(kept, run.params))
    with tempfile.TemporaryDirectory(prefix="repro-verify-") as folder:
        elsewhere = replace(run.folders, points=Path(folder), results=Path(folder), figures=Path(folder))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            computed = replace(run, folders=elsewhere).rows()
    rounded = kept is not None and computed.written() != kept.written()
    return Again(computed, run.study.draw(computed if kept is None else kept, run.params), rounded)


def differences(figure: KeptFigure, again: Again) -> list[str]:
    """Where a figure and its rows differ from what was made anew, the rows first. A rounding is no difference."""
    problems = []
    path, files = figure.path, figure.tables
    if again.rows is not None and files:
        computed = again.rows.written()
        for name in sorted({*files, *computed}):
            if name not in files or name not in computed:
                problems.append(f"computed again, it has {'no' if name in files else 'a'} table {name}")
            elif where := first_difference(read_table(files[name]), read_table(computed[name])):
                problems.append(f"computed again, its rows differ: table {name}: {where}")
    if path.stem not in again.figures:
        problems.append("it is no longer drawn by its experiment")
    elif figure_bytes(again.figures[path.stem], path.suffix[1:], figure.carried) != path.read_bytes():
        problems.append("drawn again from these rows, it comes out differently")
    return problems


def main(figures: list[str], recompute: bool = False) -> int:
    """Check the named figures (files, or names of figures; none or "all" for every one) and print a line for each.

    With all of them also the page. Returns 0 if everything matches, else 1."""
    folder = paths.folders().figures
    found: list[Path] = []
    if figures in ([], ["all"]):
        found = sorted(path for path in folder.glob("*.*") if path.suffix[1:] in FIGURE_FORMATS)
    else:
        for name in figures:
            found += [Path(name)] if Path(name).suffix else [folder / f"{name}.{ending}" for ending in FIGURE_FORMATS]
    if not found:
        raise UserError(f"there are no figures in {folder}; make them with `python -m repro reproduce`")
    groups: dict[tuple[Any, ...], list[KeptFigure]] = {}
    for figure in map(KeptFigure, found):
        groups.setdefault((figure.path.parent, figure.experiment, figure.scale), []).append(figure)
    failed = 0
    for group in groups.values():
        problems = [problems_of_figure(figure) for figure in group]
        # Made anew only where the rest is in order: other code or other rows would only be told twice.
        again = None if any(problems) else made_again(group[0], recompute)
        for figure, found_out in zip(group, problems, strict=True):
            found_out += differences(figure, again) if again is not None else []
            failed += bool(found_out)
            print(f"{figure.path.name}: " + ("; ".join(found_out) or _praise(again)), flush=True)
    if figures in ([], ["all"]):
        for path, problem in page.problems(paths.folders()).items():
            failed += bool(problem)
            print(f"{path.relative_to(folder)}: {problem or 'of these figures'}", flush=True)
    return 1 if failed else 0


def _praise(again: Again | None) -> str:
    made = "not made again"
    if again is not None:
        made = f"{'drawn again from its rows' if again.rows is None else 'computed and drawn again'}: the same"
        made += f", but for roundings (less than {SAME:g} of a number)" if again.rounded else ""
    return f"rows, parameters and code match; {made}"


def _short(value: Any) -> str:
    return str(value)[:12] if value else "not known"
