"""Checking that a figure, the rows it claims to show, and the code and parameters of today belong together.

A figure carries the hashes of its rows, parameters and computing code, and so does the sidecar beside it. Parameters
and code are hashed again from the checkout; the rows beside the figure, and those in results/ if they are there, are
compared with what it carries; the figure is drawn again from its rows and must come out byte for byte. What computes
for seconds only is computed again, too; the rest on request, but for experiments that measure wall-clock time: their
rows are never the same twice. What cannot be checked is said, never passed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.engine.errors import UserError
from repro.harness import experiment
from repro.harness.diff import first_difference
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
    tables = about.get("tables") or {}
    files = {name: path.with_name(table.get("file", f"{name}.csv")) for name, table in tables.items()}
    return files if all(file.is_file() for file in files.values()) else {}


def _hash_beside(path: Path, about: Mapping[str, Any]) -> str | None:
    files = _tables_beside(path, about)
    return tables_hash({name: sha256_file(file) for name, file in files.items()}) if files else None


def _read_beside(path: Path) -> Rows:
    about = read_json(path)
    study_keys = experiment.open(about["experiment"], about["scale"]).study.TABLES
    return Rows.read(_tables_beside(path, about), study_keys)


@dataclass(frozen=True)
class Again:
    """An experiment's rows and figures, made anew: `rows` is None where they were read and not computed."""

    rows: Rows | None
    figures: Mapping[str, Figure]


def problems_of_figure(path: Path) -> list[str]:
    """What does not match among a figure, its sidecar and rows, and the checkout, the first difference first."""
    embedded = read_embedded(path)
    stem, scale = embedded.get("experiment"), embedded.get("scale")
    run = experiment.open(stem, scale)
    variant = _variant(path, scale)
    folders = paths.folders(variant)
    problems = []
    sidecar = path.with_suffix(".json")
    beside = read_json(sidecar)
    if not beside:
        problems.append(f"there is no sidecar {sidecar}; draw the figure again")
    for name in embedded if beside else ():
        if beside.get(name) != embedded[name]:
            theirs, ours = _short(embedded[name]), _short(beside.get(name))
            problems.append(f"{name} is {theirs} in the figure and {ours} in {sidecar.name}")
    # Only its manifest knows the parameters of a run of one's own; all others come from the checkout.
    manifest = folders.of_results(stem) / "manifest.json"
    source = str(manifest) if variant == "custom" else "this checkout"
    now = read_json(manifest) if variant == "custom" else run.hashes()
    for name in ("parameters_hash", "code_hash"):
        theirs, ours = embedded.get(name), now.get(name)
        if theirs != ours:
            problems.append(f"{name} is {_short(theirs)} in the figure and {_short(ours)} in {source}")
    places = {sidecar: beside, manifest: read_json(manifest)}
    hashes = {place: found for place, about in places.items() if (found := _hash_beside(place, about))}
    if not hashes:
        problems.append(
            f"its rows cannot be checked: no tables are beside it; compute them: `python -m repro run {stem}`"
        )
    for place, found in hashes.items():
        if found != embedded.get("rows_hash"):
            problems.append(
                f"rows_hash is {_short(embedded.get('rows_hash'))} in the figure and {_short(found)} of the tables "
                f"that {place} names"
            )
    return problems


def _variant(path: Path, scale: str | None) -> str | None:
    variants = {paths.folders(variant).figures: variant for variant in paths.VARIANTS}
    return variants.get(path.resolve().parent, scale)


def made_again(path: Path, recompute: bool) -> Again | None:
    """The figure's experiment once more: computed in a temporary folder if that is cheap or asked for, else only drawn
    from the rows beside the figure, as are wall-clock measurements always. None for a run with parameters of its own,
    and without rows."""
    import matplotlib

    matplotlib.use("Agg")
    sidecar = path.with_suffix(".json")
    embedded, beside = read_embedded(path), read_json(sidecar)
    run = experiment.open(embedded["experiment"], embedded["scale"])
    has_tables = bool(_tables_beside(sidecar, beside))
    if _variant(path, embedded["scale"]) == "custom" or not (has_tables or recompute and not run.measures_time):
        return None
    if run.measures_time or not (recompute or beside.get("cheap")):
        return Again(None, run.study.draw(_read_beside(sidecar), run.params))
    with tempfile.TemporaryDirectory(prefix="repro-verify-") as folder:
        elsewhere = replace(run.folders, points=Path(folder), results=Path(folder), figures=Path(folder))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            computed = replace(run, folders=elsewhere).rows()
    return Again(computed, run.study.draw(computed, run.params))


def differences(path: Path, again: Again) -> list[str]:
    """Where a figure and its rows differ from what was made anew, the rows first."""
    problems = []
    sidecar = path.with_suffix(".json")
    files = _tables_beside(sidecar, read_json(sidecar))
    if again.rows is not None and files:
        computed = again.rows.written()
        for name in sorted({*files, *computed}):
            if name not in files or name not in computed:
                problems.append(f"computed again, it has {'no' if name in files else 'a'} table {name}")
            elif files[name].read_bytes() != computed[name]:
                where = first_difference(read_table(files[name]), again.rows[name])
                problems.append(f"computed again, its rows differ: table {name}: {where}")
    if path.stem not in again.figures:
        problems.append("it is no longer drawn by its experiment")
    elif figure_bytes(again.figures[path.stem], path.suffix[1:], read_embedded(path)) != path.read_bytes():
        problems.append("drawn again from these rows, it comes out differently")
    return problems


def main(figures: list[str], recompute: bool = False) -> int:
    """Check the named figures (files, or names of figures; none or "all" for every one) and print a line for each.

    Returns 0 if every figure matches, else 1."""
    folder = paths.folders().figures
    if figures in ([], ["all"]):
        found = sorted(path for path in folder.glob("*.*") if path.suffix[1:] in FIGURE_FORMATS)
    else:
        found = [
            Path(name) if Path(name).suffix else folder / f"{name}.{file_format}"
            for name in figures
            for file_format in (FIGURE_FORMATS if not Path(name).suffix else FIGURE_FORMATS[:1])
        ]
    if not found:
        raise UserError(f"there are no figures in {folder}; make them with `python -m repro reproduce`")
    failed = 0
    for paths_of_one in _by_experiment(found):
        problems = {path: problems_of_figure(path) for path in paths_of_one}
        # Made anew only where the rest is in order: other code or other rows would only be told twice.
        again = None if any(problems.values()) else made_again(paths_of_one[0], recompute)
        for path in paths_of_one:
            found_out = problems[path] or (differences(path, again) if again is not None else [])
            failed += bool(found_out)
            print(f"{path.name}: " + ("; ".join(found_out) or _praise(again)), flush=True)
    return 1 if failed else 0


def _by_experiment(found: Iterable[Path]) -> list[list[Path]]:
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for path in found:
        embedded = read_embedded(path)
        groups.setdefault((path.parent, embedded.get("experiment"), embedded.get("scale")), []).append(path)
    return list(groups.values())


def _praise(again: Again | None) -> str:
    checked = "rows, parameters and code match"
    if again is None:
        return f"{checked}; not made again"
    how = "drawn again from its rows" if again.rows is None else "computed and drawn again"
    return f"{checked}; {how}: the same"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else str(value) if value else ""
    return text[:12] or "not known"
