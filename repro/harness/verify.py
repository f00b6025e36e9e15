"""Checking that a figure, the rows it claims to show, and the code and parameters of today belong together.

A figure carries the hashes of its rows, parameters and computing code, and so does the sidecar beside it. Parameters
and code are hashed again from the checkout; the rows beside the figure, and those in results/ if they are there, are
compared with what it carries; the figure is drawn again from its rows and must come out byte for byte. What computes
for seconds only is computed again, too; the rest on request, but for experiments that measure wall-clock time: their
rows are never the same twice. What cannot be checked is said, never passed.
"""

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
from repro.harness.tables import csv_of as rows_csv
from repro.harness.tables import read_table as read_rows
from repro.hashing import read_json, sha256_file
from repro.report.embedding import FIGURE_FORMATS, figure_bytes, read_embedded

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def problems_of_run(stem: str, folders: paths.Folders) -> list[str]:
    """What is missing or does not match among a finished run's rows, manifest and figures."""
    folder = folders.of_results(stem)
    manifest, rows = read_json(folder / "manifest.json"), folder / "rows.csv"
    if not rows.is_file() or not manifest:
        return [f"it left no rows.csv and manifest.json in {folder}"]
    if sha256_file(rows) != manifest.get("rows_hash"):
        return [f"{rows} is not what its manifest describes"]
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


@dataclass(frozen=True)
class Again:
    """An experiment's rows and figures, made anew: `rows` is None where they were read and not computed."""

    rows: pd.DataFrame | None
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
    kept = [path.with_name(f"{stem}.csv"), folders.of_results(stem) / "rows.csv"]
    if not any(rows.is_file() for rows in kept):
        problems.append(
            f"its rows cannot be checked: there is no {kept[0].name} beside it; compute them with `python -m repro run "
            f"{stem}`"
        )
    for rows in kept:
        if rows.is_file() and sha256_file(rows) != embedded.get("rows_hash"):
            problems.append(
                f"rows_hash is {_short(embedded.get('rows_hash'))} in the figure and {_short(sha256_file(rows))} of "
                f"{rows}"
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
    embedded, beside = read_embedded(path), read_json(path.with_suffix(".json"))
    stem, scale = embedded["experiment"], embedded["scale"]
    rows = path.with_name(f"{stem}.csv")
    run = experiment.open(stem, scale)
    if _variant(path, scale) == "custom" or not (rows.is_file() or recompute and not run.measures_time):
        return None
    if run.measures_time or not (recompute or beside.get("cheap")):
        return Again(None, run.study.draw(read_rows(rows), run.params))
    with tempfile.TemporaryDirectory(prefix="repro-verify-") as folder:
        elsewhere = replace(run.folders, points=Path(folder), results=Path(folder), figures=Path(folder))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            computed = replace(run, folders=elsewhere).rows()
    return Again(computed, run.study.draw(computed, run.params))


def differences(path: Path, again: Again) -> list[str]:
    """Where a figure and its rows differ from what was made anew, the rows first."""
    problems = []
    embedded, kept = read_embedded(path), path.with_name(f"{read_embedded(path)['experiment']}.csv")
    if again.rows is not None and kept.is_file() and kept.read_bytes() != rows_csv(again.rows):
        problems.append(f"computed again, its rows differ: {first_difference(read_rows(kept), again.rows)}")
    if path.stem not in again.figures:
        problems.append("it is no longer drawn by its experiment")
    elif figure_bytes(again.figures[path.stem], path.suffix[1:], embedded) != path.read_bytes():
        problems.append("drawn again from these rows, it comes out differently")
    return problems


def main(figures: list[str], recompute: bool = False) -> int:
    """Check the named figures (files, or names of figures; none or "all" for every one) and print a line for each.

    Returns 0 if every figure matches, else 1.
    """
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
