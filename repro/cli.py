"""The command line: `repro COMMAND`, or `python -m repro COMMAND`.

It parses, hands over, and turns exceptions into one line and an exit code: 0 done, 1 something failed, 2 input that
cannot work, 130 interrupted. It knows no experiment by name."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from repro import __version__, paths
from repro.bench.catalogue import BENCHMARKS
from repro.errors import UserError, left_out
from repro.hashing import NO_SPACE, WriteError
from repro.judge.options import judge_options
from repro.server.options import serve_options
from repro.setup.environment import prepare_environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    prepare_environment(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a folder's name need not be text that this terminal can show
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "repro", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        with paths.environment({"REPRO_COMMAND": command}):
            code = options.command(options)
        sys.stdout.flush()  # a full disk below a log is found here, not by the interpreter as it ends
        return code
    except UserError as error:
        print(f"repro: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            return _output_is_closed(error)
        # The system refuses something of the user's, a name that is too long or a folder that is closed, say.
        print(f"repro: {os.fspath(error.filename)!r}: {error.strerror}; name another one", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nrepro: interrupted; finished points are kept, the same command goes on from there", file=sys.stderr)
        return 130


def _output_is_closed(error: OSError) -> int:
    """Where this program's output goes nothing more can be written; the exit code. Any other error is raised again."""
    if error.errno not in (*NO_SPACE, errno.EPIPE):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries, and complains, again
    if error.errno == errno.EPIPE:  # `| head` has seen enough
        return 0
    print(f"repro: the output cannot be written: {error.strerror}; free space on its disk", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="repro", description="A reproduction of PagedAttention (SOSP 2023).")
    parser.add_argument("--version", action="version", version=f"repro {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    reproduce = commands.add_parser("reproduce", help="run all experiments and build the page of figures and verdicts")
    only = reproduce.add_argument("--only", nargs="+", metavar="NAME", help="only these experiments")
    said = "with a GPU: time for measuring on it first, such as 30m (default: 2h; 0 for none)"
    reproduce.add_argument("--budget", default=os.environ.get("BUDGET") or "2h", metavar="TIME", help=said)
    reproduce.set_defaults(command=_reproduce)

    run = commands.add_parser("run", help="run one experiment's notebook")
    one = run.add_argument("experiment")
    for argument in (only, one):
        argument.completer = lambda **_: paths.folders().stems()  # type: ignore[attr-defined]
    said = "set a parameter; the value is YAML, for instance seeds=[0,1]"
    run.add_argument("-p", metavar="NAME=VALUE", dest="parameters", action="append", default=[], help=said)
    run.set_defaults(command=_run)
    for command in (reproduce, run):
        command.add_argument("--scale", default=os.environ.get("SCALE") or "paper", help="paper (default) or smoke")
        said = "pairs of prompt and output lengths to sample requests from, or hub for the data set itself"
        command.add_argument("--lengths", default=os.environ.get("LENGTHS") or None, metavar="FILE.csv", help=said)
        command.add_argument("--jobs", default=os.environ.get("JOBS") or "", metavar="N", help="workers (all cores)")
        said = "compute on the workers of a Dask scheduler (default: on this machine)"
        command.add_argument("--pool", default=os.environ.get("POOL") or "", metavar="dask://HOST:PORT", help=said)

    new = commands.add_parser("new", help="make an experiment of your own from a template (docs/extending.md)")
    new.add_argument("name", metavar="NAME")
    new.set_defaults(command=_new)
    commands.add_parser("list", help="name the experiments").set_defaults(command=_list)
    page = commands.add_parser("page", help="build the page of figures and verdicts again")
    page.add_argument("--variant", choices=paths.VARIANTS, default="paper", help="whose figures (default: paper)")
    page.set_defaults(command=lambda options: _page(options.variant))
    explore = commands.add_parser("explore", help="build the explorer again: figures/explorer.html")
    said = "the folder of npm's package pyodide (default: the interpreter in the explorer that is there)"
    explore.add_argument("--interpreter", type=Path, metavar="FOLDER", help=said)
    explore.set_defaults(command=_explore)
    verify = commands.add_parser("verify", help="check figures against results, parameters and code")
    verify.add_argument("figures", nargs="*", metavar="FIGURE", help="file or name; all if none is given")
    verify.add_argument("--recompute", action="store_true", help="compute all rows again, not only the cheap ones")
    verify.set_defaults(command=_verify)
    diff = commands.add_parser("diff", help="say which numbers moved between two runs, against the seeds' spread")
    diff.add_argument("a", metavar="A", help="a table's CSV file, a folder of results or figures, or a commit")
    diff.add_argument("b", metavar="B", help="the same for the other run")
    diff.add_argument("--lines", type=int, default=10, metavar="N", help="numbers shown an experiment (10; 0: all)")
    diff.set_defaults(command=_diff)
    trace = commands.add_parser("trace", help="say what a trace of yours asks of a server (docs/workloads.md)")
    trace.add_argument("file", metavar="FILE", help="Azure's, BurstGPT's or Mooncake's format, or a CSV of your own")
    trace.add_argument("--model", default="opt-13b", help="one of the paper's models on its GPUs (default: opt-13b)")
    said = "fit, budget, seqs, block, preemption (default: all)"
    trace.add_argument("--questions", nargs="+", metavar="NAME", help=said)
    trace.add_argument("--start", type=float, default=0.0, metavar="S", help="begin S seconds into the file")
    trace.add_argument("--duration", type=float, metavar="S", help="take S seconds (default: the rest of the file)")
    trace.add_argument("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)")
    said = "for a file of lengths only: Poisson arrivals of R requests/s, for 600 s unless --duration says otherwise"
    trace.add_argument("--rate", type=float, metavar="R", help=said)
    trace.add_argument("--jobs", default=os.environ.get("JOBS") or "", metavar="N", help="worker processes (all cores)")
    trace.set_defaults(command=_trace)
    serving = serve_options(
        commands.add_parser("serve", help="serve a model, or a simulated one, to clients of OpenAI's")
    )
    serving.set_defaults(command=_serve)
    replaying = commands.add_parser("replay", help="run a server's log through the simulator: does it decide the same?")
    replaying.add_argument("log", metavar="FILE", help="what serve --log has written")
    replaying.set_defaults(command=_replay)
    judging = judge_options(commands.add_parser("judge", help="find out how a server batches and shares memory"))
    judging.set_defaults(command=_judge)
    commands.add_parser("doctor", help="say what this machine can and cannot run").set_defaults(command=_doctor)
    calibrate = commands.add_parser("calibrate", help="solve the cost model's anchors again")
    said = "measure: the simulator and, on a GPU, kernels, end to end and serving; or only what is named"
    bench = commands.add_parser("bench", help=said, description=said)
    bench.set_defaults(command=_bench, benchmark=None)
    names = bench.add_subparsers(metavar="NAME", title="only one of them")
    for name, description in BENCHMARKS.items():
        one = names.add_parser(name, help=description.help, description=description.help)
        for command in (one, calibrate) if name == "anchors" else (one,):
            for flag, settings in description.all_options():
                command.add_argument(flag, **settings)
            command.set_defaults(command=_bench, benchmark=description)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow (docs/commands.md); this ends the process
        import argcomplete

        argcomplete.autocomplete(parser)
    return parser


def _reproduce(options: argparse.Namespace) -> int:
    from repro.bench.benchmark import seconds_of
    from repro.bench.processes import measure_first
    from repro.harness.notebook import execute_all
    from repro.harness.progress import duration

    where = paths.folders()
    named = " ".join(options.only or []).replace(",", " ").split()
    stems = [where.check_stem(stem) for stem in dict.fromkeys(named)] or where.stems()
    if not stems:
        raise UserError(f"there are no experiments in {where.experiments}")
    variant = "custom" if options.lengths else options.scale
    seconds_of(options.budget)
    with _settings(options), paths.environment({"REPRO_VARIANT": variant} if options.lengths else {}):
        todo = [_open(stem, options.scale, {}, options.lengths) for stem in stems]  # every check before any work
        outcomes = dict.fromkeys(stems, "")
        with _alone():
            if options.scale == "paper" and not named:
                measure_first(options.budget)
            for run, seconds, error in execute_all(todo):
                if isinstance(error, WriteError):  # nor could anything else be written
                    raise error
                if error:
                    print(f"repro: {error}", file=sys.stderr)
                outcomes[run.stem] = f"{'FAILED' if error else 'done'} in {duration(seconds)}"
            page = _page(variant)
    _summarise(outcomes, paths.folders(variant))
    return 1 if page or any("FAILED" in outcome for outcome in outcomes.values()) else 0


def _run(options: argparse.Namespace) -> int:
    from repro.harness import notebook
    from repro.harness.parameters import parse_yaml

    overrides = {}
    for text in options.parameters:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"-p {text!r} must have the form name=value, for instance -p seeds=[0,1]")
        overrides[name.strip()] = parse_yaml(value, f"-p {text}")
    with _settings(options):
        run, overrides = _open(options.experiment, options.scale, overrides, options.lengths)
        try:
            with _alone():
                executed = notebook.execute(run, overrides)
        except notebook.NotebookError as error:
            print(f"repro: {error}", file=sys.stderr)
            return 1
    print(f"{run.stem}: figures in {run.folders.figures}, executed notebook {executed}")
    return 0


def _settings(options: argparse.Namespace) -> AbstractContextManager[None]:
    """The environment of the runs, with --jobs and --pool checked."""
    from repro.harness.cluster import check_pool
    from repro.harness.workers import number_of_workers

    number_of_workers(options.jobs)
    check_pool(options.pool)
    return paths.environment({"JOBS": options.jobs, "POOL": options.pool})


def _alone() -> AbstractContextManager[None]:
    """Of two commands that compute into one results folder the second is refused: both would write the same
    summaries."""
    from repro.harness.store import locked
    from repro.setup.environment import is_writable

    for variant in paths.VARIANTS:
        figures = paths.folders(variant).figures
        if not is_writable(figures):  # hours later would be too late
            raise UserError(
                f"figures cannot be written to {figures}; make it writable, or name another with REPRO_FIGURES_DIR"
            )
    holder = f"process {os.getpid()}, {os.environ.get('REPRO_COMMAND', '')}"
    return locked(paths.folders().points / ".cache" / "run.lock", wait=False, about=holder)


def _open(stem: str, scale: str, overrides: dict[str, Any], lengths: str | None) -> tuple[Any, dict[str, Any]]:
    """The run and its overrides; a lengths file goes to the studies that have such a parameter."""
    from repro.harness import experiment

    run = experiment.open(stem, scale, overrides)
    if lengths is None or not hasattr(run.params, "lengths") or "lengths" in overrides:
        return run, overrides
    if lengths != "hub" and not Path(lengths).is_file():
        raise UserError(f"there is no lengths file {lengths}")
    overrides = {**overrides, "lengths": lengths}
    return experiment.open(stem, scale, overrides), overrides


def _summarise(outcomes: Mapping[str, str], where: paths.Folders) -> None:
    width = max(map(len, outcomes))
    for stem, outcome in outcomes.items():
        print(f"{stem:{width}}  {outcome}")
    try:
        claims = json.loads((where.figures / "claims.json").read_text(encoding="utf-8"))
        counts = Counter(claim["verdict"] for claim in claims)
        print("claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    except FileNotFoundError:
        print("claims: none judged")
    print(f"look at {where.figures / 'index.html'}")


def _new(options: argparse.Namespace) -> int:
    from repro.harness.new import new

    for path in new(options.name):
        print(f"wrote {path}")
    print(f"try it with: python -m repro run {options.name} --scale smoke")
    return 0


def _list(options: argparse.Namespace) -> int:
    from repro.harness.experiment import parameter_file

    stems = paths.folders().stems()
    width = max(map(len, stems), default=0)
    for stem in stems:
        print(f"{stem:{width}}  {parameter_file(stem).title}")
    return 0


def _page(variant: str) -> int:
    from repro.harness import page

    page.build(variant)
    return 0


def _explore(options: argparse.Namespace) -> int:
    """Build the explorer."""
    from repro.explore import page
    from repro.studies import explorer

    print(f"wrote {page.build(paths.folders().figures / page.FILE_NAME, *explorer.given(), options.interpreter)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from repro.harness import verify

    return verify.main(options.figures, options.recompute)


def _diff(options: argparse.Namespace) -> int:
    from repro.harness import diff

    if options.lines < 0:
        raise UserError(f"--lines {options.lines} must be a number of lines, or 0 for all")
    return diff.main(options.a, options.b, options.lines)


def _doctor(options: argparse.Namespace) -> int:
    from repro.setup import doctor

    return doctor.main() or 0


def _trace(options: argparse.Namespace) -> int:
    from repro.checks import lookup
    from repro.engine.config import DEPLOYMENTS
    from repro.harness.progress import Progress
    from repro.harness.workers import number_of_workers
    from repro.simulate import trace_doctor
    from repro.workloads.public import read_trace, with_arrivals

    deployment, jobs = lookup("model", DEPLOYMENTS, options.model), number_of_workers(options.jobs)
    longest, questions = deployment.model.max_model_len, trace_doctor.QUESTIONS
    asked = {name: lookup("question", questions, name) for name in options.questions or questions}
    if options.rate is None:
        trace = read_trace(options.file, longest, options.start, options.duration, options.speed)
    elif options.start or options.speed != 1:
        raise UserError("--rate draws arrivals, so --start and --speed have nothing to act on; leave them out")
    else:
        trace = with_arrivals(options.file, options.rate, options.duration or 600.0, longest)
    print(f"{trace.card}\n", flush=True)
    settings = {(name, called): one for name, (_, many) in asked.items() for called, one in many.items()}
    try:
        table = trace_doctor.compare(trace, settings, deployment, jobs, partial(Progress, "trace", workers=jobs))
    except KeyboardInterrupt:
        print("\nrepro: interrupted; nothing is kept", file=sys.stderr)
        return 130
    for name, (question, _) in asked.items():
        shown = trace_doctor.in_short(table.loc[name]).to_string()
        print(f"\n{question} {trace_doctor.answer(name, table.loc[name])}\n{shown}")
    print(f"\nModelled, not measured: {deployment.model.name} on {deployment.num_gpus} x {deployment.device.name}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    try:
        from repro.server import run
    except ModuleNotFoundError as error:
        raise left_out(error) from None

    return run.main(options)


def _replay(options: argparse.Namespace) -> int:
    from repro.server import replay

    return replay.main(options.log)


def _judge(options: argparse.Namespace) -> int:
    from repro.bench.benchmark import seconds_of
    from repro.harness.progress import Progress
    from repro.judge import run

    return run.main(options, seconds_of(options.budget), paths.folders().results / "judge", Progress)


def _bench(options: argparse.Namespace) -> int:
    """Measure one benchmark, or all. What bench must not know comes from here: the hash of the code that measures, the
    lock on the folder, the line of progress, and the paper's points."""
    from repro.bench import processes, run
    from repro.harness import keys
    from repro.harness.progress import Progress
    from repro.harness.store import locked
    from repro.report import paper

    if options.benchmark is None:
        return processes.measure_all(paths.folders().results / "bench")
    name = options.benchmark.name
    options.printed = {panel: paper.points("fig12", panel, "vllm")[0] for panel in paper.figure("fig12")}
    sharegpt = [panel for panel in options.printed if panel.endswith("/sharegpt")]
    lowest = {panel.split("/")[0]: paper.points("fig12", panel, "faster-transformer")[0] for panel in sharegpt}
    options.printed_extra = lowest
    benchmark = options.benchmark.open(options)  # every check before any work
    folder = (options.out or paths.folders().results / "bench" / name).resolve()
    code = keys.identify(list(benchmark.measures), {}).code
    with locked(folder / ".lock", wait=False, about=os.environ["REPRO_COMMAND"]):
        run.measure(name, benchmark, folder, code, partial(Progress, name))
    return 0
