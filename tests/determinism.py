"""The same experiments computed and drawn in several ways: rows, figures, sidecars and verdicts must be the same bytes.

    python tests/determinism.py [--scale paper] [--only NAME ...]

The ways differ in worker processes, hash seed, locale, time zone and the order of experiments and of points; on the way
back the same workers do all experiments, so that what one leaves in a process would show in the next. One more way
stands for another type of processor: NumPy and OpenBLAS are kept from using the newer instructions that this one has;
there values may differ by 1e-9. Experiments that measure wall-clock time are left out, as their rows are never the same
twice. `make determinism` does all others at SCALE=smoke; the suite does them in the first two ways, of which it takes
the first as a user does, with the notebooks (tests/harness/test_smoke.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from repro.setup.environment import ROOT, prepare_environment

WAYS: dict[str, dict[str, str]] = {
    "one worker": {"JOBS": "1", "PYTHONHASHSEED": "0", "LC_ALL": "C", "TZ": "UTC"},
    "two workers, backwards": {
        "JOBS": "2",
        "PYTHONHASHSEED": "4242",
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "de",
        "TZ": "Asia/Kathmandu",
        "BACKWARDS": "1",
    },
    "an older processor": {
        "JOBS": "1",
        "PYTHONHASHSEED": "7",
        "OPENBLAS_CORETYPE": "Nehalem",
        "OPENBLAS_NUM_THREADS": "1",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    },
}
#: the way that only has to agree to 1e-9
CLOSE = "an older processor"


def work(stems: Sequence[str], scale: str) -> None:
    """In a process of its own: every experiment, in the order that BACKWARDS asks for."""
    import matplotlib

    from repro.harness import experiment
    from repro.harness import workers as runner

    matplotlib.use("Agg")
    backwards = bool(os.environ.get("BACKWARDS"))
    compute = runner.compute

    def reordered(tasks: list[runner.Task], *others: object) -> None:
        compute(
            [replace(task, point=replace(task.point, weight=1 / task.point.weight)) for task in reversed(tasks)],
            *others,
        )

    with contextlib.ExitStack() as stack:
        if backwards:
            pool = stack.enter_context(runner.fresh_processes(int(os.environ["JOBS"]), runner._ONE_THREAD))
            runner.fresh_processes = lambda workers, env: contextlib.nullcontext(pool)
            runner.compute = reordered
        for stem in reversed(stems) if backwards else stems:
            run = experiment.open(stem, scale)
            rows = run.rows()
            run.draw(rows)
            run.judge(rows)


def files(folder: Path, without: Collection[str] = ()) -> dict[str, bytes]:
    """What must be equal: rows, figures, sidecars (without what is told about time) but for those of the experiments
    `without`, and the ledger. Manifests, executed notebooks and the page tell times and the machine."""
    found, left_out = {}, set(without)  # the latter by name: experiments and their figures
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or {"points", ".cache"} & set(path.parts) or path.name in ("manifest.json", "machines.json"):
            continue
        if path.suffix in (".ipynb", ".html", ".css"):
            continue
        content = path.read_bytes()
        if path.suffix == ".json" and path.name != "claims.json":
            told = json.loads(content)
            if told.get("experiment") in without:
                left_out.add(path.stem)
            content = json.dumps({name: value for name, value in told.items() if name != "cheap"}).encode()
        found[path.relative_to(folder)] = content
    return {
        str(path): content
        for path, content in found.items()
        if not {path.parent.name, path.name.partition(".")[0]} & left_out
    }


def run_way(name: str, folder: Path, stems: Sequence[str], scale: str) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "REPRO_VARIANT"))}
    prepare_environment(environ)
    search = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    environ |= {"REPRO_RESULTS_DIR": str(folder), "REPRO_FIGURES_DIR": str(folder / "figures"), "PYTHONPATH": search}
    arguments = [sys.executable, __file__, "--scale", scale, "--only", *stems, "--work"]
    done = subprocess.run(
        arguments,
        env=environ | WAYS[name],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{name}: ended with {done.returncode}\n{done.stdout[-3000:]}")


def differences(one: Path, other: Path, close: bool, without: Collection[str] = ()) -> list[str]:
    """The files that differ; with `close` the numbers that do by more than 1e-9."""
    from repro.harness import diff, runs

    if close:
        apart = []
        for manifest in sorted(one.rglob("manifest.json")):
            ((stem, run),) = runs.kept_runs(str(manifest.parent)).items()
            (again,) = runs.kept_runs(str(other / manifest.parent.relative_to(one))).values()
            for name, found in diff.compare_tables(run.rows, again.rows).items():
                apart += [f"{stem}, {name}: {text}" for text in [*found.unmatched, *map(str, found.moved)]]
        return apart
    a, b = files(one, without), files(other, without)
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def main(arguments: Sequence[str] | None = None, ways: Sequence[str] = tuple(WAYS)) -> int:
    """Compute in each of the ways and compare with the first; returns how many differ from it."""
    from repro import paths
    from repro.harness import experiment

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="smoke")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    stems = options.only or paths.folders().stems()
    if options.work:
        work(stems, options.scale)
        return 0
    timed = [stem for stem in stems if experiment.open(stem, options.scale).measures_time]
    if timed:
        print(f"left out, as they measure time: {', '.join(timed)}", flush=True)
    stems = [stem for stem in stems if stem not in timed]
    if not stems:
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="repro-ways-") as folder:
        for number, name in enumerate(ways):
            mine = Path(folder, str(number))
            mine.mkdir()
            start = time.monotonic()
            run_way(name, mine, stems, options.scale)
            found = differences(Path(folder, "0"), mine, name == CLOSE) if number else []
            equal = "equal to 1e-9" if name == CLOSE else f"{len(files(mine))} files, equal bytes"
            said = ("different: " + "; ".join(found[:8])) if found else equal if number else f"{len(files(mine))} files"
            print(f"{name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
            wrong += bool(found)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
