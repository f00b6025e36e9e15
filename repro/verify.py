"""Checking that a figure, the rows it claims to show, and the code and parameters of today belong together.

A figure carries the hashes of its rows, parameters and computing code. Parameters and code are recomputed
from the checkout; the rows are compared with the results on disk if they are there. What cannot be checked is
said, never passed. A figure whose pixels were altered while its text was kept is not noticed: for that, draw
it again and compare the files.
"""

from __future__ import annotations

from pathlib import Path

from repro import experiment, paths
from repro.errors import UserError
from repro.provenance import FIGURE_FORMATS, read_embedded, read_json, sha256_file


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


def problems_of_figure(path: Path) -> list[str]:
    """The differences between a figure and the checkout, the first one first; empty if everything matches."""
    embedded = read_embedded(path)
    stem, scale = embedded.get("experiment"), embedded.get("scale")
    run = experiment.open(stem, scale)
    variants = {paths.folders(variant).figures: variant for variant in paths.VARIANTS}
    variant = variants.get(path.resolve().parent, scale)
    folders = paths.folders(variant)
    # Only its manifest knows the parameters of a run of one's own; all others come from the checkout.
    manifest = folders.of_results(stem) / "manifest.json"
    source = str(manifest) if variant == "custom" else "this checkout"
    now = read_json(manifest) if variant == "custom" else run.hashes()
    problems = []
    for name in ("parameters_hash", "code_hash"):
        theirs, ours = embedded.get(name), now.get(name)
        if theirs != ours:
            problems.append(f"{name} is {_short(theirs)} in the figure and {_short(ours)} in {source}")
    rows = folders.of_results(stem) / "rows.csv"
    if not rows.is_file():
        problems.append(
            f"its rows cannot be checked: there is no {rows}; compute them with `python -m repro run {stem}`"
        )
    elif sha256_file(rows) != embedded.get("rows_hash"):
        problems.append(
            f"rows_hash is {_short(embedded.get('rows_hash'))} in the figure "
            f"and {_short(sha256_file(rows))} of {rows}"
        )
    return problems


def main(figures: list[str]) -> int:
    """Check the named figures (files, or names of figures; none or "all" for every one) and print a line for
    each.

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
    for path in found:
        problems = problems_of_figure(path)
        failed += bool(problems)
        print(f"{path.name}: " + ("; ".join(problems) or "rows, parameters and code match"))
    return 1 if failed else 0


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "not known"
