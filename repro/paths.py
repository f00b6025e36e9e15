"""Where things lie: parameter files, notebooks, results and figures.

One checkout has one set of folders, and three environment variables can move them: REPRO_ROOT (the folder that holds
experiments/ and notebooks/), REPRO_RESULTS_DIR and REPRO_FIGURES_DIR. Only a paper-scale run with the committed
parameters writes to figures/; every other run has its own folder below results/, so that trying something can never
replace the committed evidence (REPRO_VARIANT=custom sends a run there whatever its parameters). Result files of points
are shared by all runs: they are keyed by content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from repro.errors import UserError

#: Runs with the committed parameters at full size, with those of SCALE=smoke, and with any other parameters.
VARIANTS = ("paper", "smoke", "custom")


@dataclass(frozen=True)
class Folders:
    """The folders of one checkout as one run sees them."""

    experiments: Path
    notebooks: Path
    points: Path  # results/: one folder per experiment, one small file per point below it
    results: Path  # tables, manifest.json and the executed notebook, one folder per experiment
    figures: Path

    def of_points(self, stem: str) -> Path:
        return self.points / stem / "points"

    def of_results(self, stem: str) -> Path:
        return self.results / stem

    def stems(self) -> list[str]:
        """The experiments that have a parameter file, in the order in which they run and are shown."""
        return sorted((path.stem for path in self.experiments.glob("*.yaml")), key=reading_order)

    def check_stem(self, stem: str) -> str:
        """Return `stem` if it is an experiment; UserError with the known ones otherwise."""
        known = self.stems()
        if stem not in known:
            listing = ", ".join(known) or f"none: {self.experiments} holds no parameter file"
            raise UserError(f"unknown experiment {stem!r}; known: {listing}")
        return stem


def reading_order(stem: str) -> tuple[bool, str]:
    """Sorts experiments as a reader wants them: the paper's figures by number, then what explains them."""
    return not stem.startswith("fig"), stem


def root() -> Path:
    """The checkout: REPRO_ROOT, else the folder that holds the package, else the current folder."""
    named = os.environ.get("REPRO_ROOT")
    if named:
        return Path(named).resolve()
    beside_package = Path(__file__).resolve().parent.parent
    return beside_package if (beside_package / "experiments").is_dir() else Path.cwd()


def studies_package() -> str:
    """The package of the studies: REPRO_STUDIES, else ours."""
    named = os.environ.get("REPRO_STUDIES") or "repro.studies"
    if not all(part.isidentifier() for part in named.split(".")):
        raise UserError(f"REPRO_STUDIES={named!r} must be the name of a package, for instance my_studies")
    return named


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for what is started inside, and put them back afterwards."""
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update(before)


def folders(variant: str = "paper") -> Folders:
    """The folders for a run of the given variant (one of VARIANTS), unless REPRO_VARIANT names another."""
    variant = os.environ.get("REPRO_VARIANT") or variant
    if variant not in VARIANTS:
        raise UserError(f"unknown variant {variant!r}; known: {', '.join(VARIANTS)}")
    base = root()
    results = Path(os.environ.get("REPRO_RESULTS_DIR") or base / "results").resolve()
    figures = Path(os.environ.get("REPRO_FIGURES_DIR") or base / "figures").resolve()
    paper = variant == "paper"
    return Folders(
        experiments=base / "experiments",
        notebooks=base / "notebooks",
        points=results,
        results=results if paper else results / variant,
        figures=figures if paper else results / variant / "figures",
    )
