"""Faults planted into what keeps, checks and reports results: the suite's own tests notice each of them.

Every entry breaks one promise and names a test that must then fail. (Faults of memory and scheduling:
test_planted_faults.py.)
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_bad_input
import test_cli
import test_embedding
import test_environment
import test_experiment
import test_interruption
import test_parameters
import test_plotting
import yaml
from fake_project import FakeProject

from repro import cli, hashing
from repro.errors import UserError
from repro.harness import experiment, keys, notebook, parameters, store, verify
from repro.harness import workers as runner
from repro.report import plotting
from repro.setup import environment

Plant = Callable[[pytest.MonkeyPatch], None]
Test = Callable[[FakeProject, Path, pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[Plant, Test]] = {}


def planted(test: Test) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        PLANTED[plant.__name__.replace("_", " ")] = plant, test
        return plant

    return keep


@planted(
    lambda project, folder, patch: test_experiment.test_damaged_results_are_computed_again_and_never_used(
        project, "edited"
    )
)
def an_edited_result_file_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store.PointStore, "read", lambda self, key: hashing.read_json(self.path(key)) or None)


@planted(lambda project, folder, patch: test_experiment.test_a_full_disk_leaves_no_partial_file(folder, patch))
def files_are_written_in_place(patch: pytest.MonkeyPatch) -> None:
    def write(path: Path, content: bytes, durable: bool = True) -> None:
        with open(path, "wb") as file:
            file.write(content)
            try:
                hashing.os.fsync(file.fileno())
            except OSError as error:
                raise UserError(f"{error}") from error

    patch.setattr(hashing, "write_atomically", write)


@planted(
    lambda project, folder, patch: (
        test_experiment.test_editing_what_computes_recomputes_and_editing_what_draws_does_not(project)
    )
)
def keys_forget_the_code(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys.Sources, "_digest", lambda self, roots: "")


@planted(lambda project, folder, patch: test_experiment.test_a_data_file_counts_by_content_not_by_name(project, folder))
def a_data_file_counts_by_its_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "_file_or_value", lambda value: str(value) if isinstance(value, Path) else value)


@planted(
    lambda project, folder, patch: test_experiment.test_a_point_that_fails_is_named_and_the_others_are_kept(
        project, "bug", runner.PointError, "ZeroDivisionError"
    )
)
def the_first_fault_ends_the_run(patch: pytest.MonkeyPatch) -> None:
    def compute(tasks: list[runner.Task], kept: store.PointStore, *others: object) -> None:
        for task in tasks:
            try:
                kept.write(
                    task.key,
                    store.check_tables(task.point.function(**task.point.arguments), task.point.table),
                    task.about,
                )
            except ZeroDivisionError as error:
                raise runner.PointError(str(error)) from error

    patch.setattr(runner, "compute", compute)


@planted(lambda project, folder, patch: test_interruption.test_the_lock_goes_with_its_process(project, folder))
def the_lock_locks_nothing(patch: pytest.MonkeyPatch) -> None:
    import fcntl

    patch.setattr(fcntl, "flock", lambda *arguments: None)


@planted(
    lambda project, folder, patch: test_interruption.test_a_disk_that_is_full_when_the_notebook_is_written(
        project, patch
    )
)
def a_full_disk_passes_the_notebook_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(notebook, "WriteError", type("Other", (Exception,), {}))


@planted(
    lambda project, folder, patch: test_embedding.test_figures_have_equal_bytes_and_give_back_what_they_carry(
        "svg", folder
    )
)
def figures_carry_random_names(patch: pytest.MonkeyPatch) -> None:
    import matplotlib

    patch.setattr(matplotlib, "rc_context", lambda *arguments: contextlib.nullcontext())


def verified(test: Callable[..., None]) -> Test:
    def on_figures(project: FakeProject, folder: Path, patch: pytest.MonkeyPatch) -> None:
        run = project.open()
        run.draw(run.rows())
        project.calls()
        test(project, Captured())

    return on_figures


class Captured:
    """Stands in for capfd where the test is called and not collected: what verify prints is kept by `verify.print`."""

    lines: ClassVar[list[str]] = []

    def readouterr(self) -> Any:
        text, self.lines[:] = "\n".join(self.lines), []
        return type("Read", (), {"out": text, "err": ""})


@planted(verified(test_cli.test_verify_notices_rows_that_the_code_does_not_give))
def verify_does_not_compute_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "made_again", lambda path, recompute: None)


@planted(verified(test_cli.test_verify_names_the_first_thing_that_was_changed))
def verify_does_not_read_the_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "_hash_beside", lambda path, about: about.get("rows_hash"))


@planted(lambda project, folder, patch: modelled_and_measured())
def a_modelled_series_is_drawn_as_if_measured(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(plotting.LINE, "modelled", plotting.LINE["measured"])


def modelled_and_measured() -> None:
    with plotting.house():
        axis = plotting.panels(["one"])[1][0]
        test_plotting.test_the_rows_evidence_decides_the_line(axis)


@planted(
    lambda project, folder, patch: test_parameters.test_broken_yaml_is_refused_with_its_line(
        "a: !!python/x y", "line 1"
    )
)
def yaml_may_make_any_object(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parameters, "_Loader", yaml.BaseLoader)


@planted(lambda project, folder, patch: test_bad_input.is_handled(["verify", "x" * 5000], project))
def a_name_that_is_too_long_passes_the_command_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cli, "_verify", lambda options: Path(options.figures[0]).stat() and 0)
    patch.setattr(cli, "OSError", ZeroDivisionError, raising=False)


@planted(lambda project, folder, patch: test_bad_input.is_handled(["run", "tiny", "-p", "sedes=[1]"], project))
def unknown_parameters_are_let_through_with_a_file_left_behind(patch: pytest.MonkeyPatch) -> None:
    def make(cls: type[parameters.Parameters], file: object, scale: str, given: dict[str, object]) -> object:
        if "sedes" in given:
            experiment.paths.root().joinpath("half").touch()
            raise UserError("no")
        return parameters.make_parameters(cls, file, scale, given)

    patch.setattr(experiment, "make_parameters", make)


@planted(lambda project, folder, patch: test_environment.test_the_hub_is_asked_only_on_request(None, True))
def the_hub_is_asked_unasked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        test_environment, "prepare_environment", lambda environ: environment.prepare_environment(environ | {"HUB": "1"})
    )


@pytest.mark.parametrize("name", PLANTED)
def test_the_suite_notices_that(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, test = PLANTED[name]
    (tmp_path / "folder").mkdir()
    project = FakeProject(tmp_path / "checkout", monkeypatch)
    monkeypatch.setattr(verify, "print", lambda line, **options: Captured.lines.append(line), raising=False)
    plant(monkeypatch)
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with pytest.raises((Exception, pytest.fail.Exception)), quiet[0], quiet[1]:
        test(project, tmp_path / "folder", monkeypatch)


@pytest.mark.parametrize("name", PLANTED)
def test_without_the_fault_the_same_test_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    project = FakeProject(tmp_path / "checkout", monkeypatch)
    monkeypatch.setattr(verify, "print", lambda line, **options: Captured.lines.append(line), raising=False)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        PLANTED[name][1](project, tmp_path / "folder", monkeypatch)
