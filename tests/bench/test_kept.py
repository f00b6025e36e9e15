"""Budgets, the rows that are kept, and what `make reproduce` measures first."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro.bench import kept, processes
from repro.bench.benchmark import seconds_of
from repro.errors import UserError

# Budgets


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90s", 90.0),
        ("30m", 1800.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        (" 5m ", 300.0),
        ("0", 0.0),
        ("0s", 0.0),
        ("0m", 0.0),
    ],
)
def test_a_budget_is_a_length_of_time(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "m", "-5m", "1e3s", "5 m", "5min", "inf", "infs", "nan", "5m\n3", "٣m", "9" * 400 + "h"]
)
def test_anything_else_is_refused_with_the_way_out(text):
    with pytest.raises(UserError, match="write a number and s, m or h, such as 30m"):
        seconds_of(text)


# Kept rows


@pytest.fixture
def own(tmp_path, monkeypatch):
    """This machine's own rows: a function that writes them."""
    for name in ("REPRO_ROOT", "REPRO_VARIANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(tmp_path))

    def write(*rows):
        path = tmp_path / "measured" / "serving" / "serving.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def row(key, code="one", **others):
    return {
        "key": key,
        "code": code,
        "kind": key.split("/")[0],
        "device": "GPU",
        "model": "opt-13b",
        "kv_slots": 1000,
    } | others


def test_own_rows_go_before_recorded_ones(own):
    path, evidence = kept.find("auto", kept.SERVING)
    assert (
        evidence == "recorded" and path.parts[-4:] == ("recorded", "h200", "serving", "serving.csv") and path.is_file()
    )
    mine = own(row("saturated/a"))
    assert kept.find("auto", kept.SERVING) == kept.find("auto", kept.SERVING, needs="saturated") == (mine, "measured")
    assert kept.find("auto", kept.SERVING, needs="step") == kept.find("h200", kept.SERVING) == (path, "recorded")
    assert kept.find("auto", kept.KERNELS)[1] == "recorded"
    assert kept.given("auto", kept.SERVING, "saturated") == {"path": mine, "evidence": "measured"}
    assert kept.given("none", kept.SERVING) is None


def test_a_gpu_that_nobody_recorded_is_named_with_those_that_are(own):
    with pytest.raises(UserError, match="gpu = 'a100' is not recorded; known: auto, h200"):
        kept.find("a100", kept.SERVING)


def test_recorded_rows_that_are_missing_are_none_or_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    monkeypatch.delenv("REPRO_RESULTS_DIR", raising=False)
    (tmp_path / "experiments" / "recorded" / "h200").mkdir(parents=True)
    assert kept.given("auto", kept.SERVING) is None
    path, evidence = kept.find("auto", kept.SERVING)
    with pytest.raises(
        UserError, match="serving.csv is missing; restore it, or measure on a GPU: python -m repro bench serving"
    ):
        kept.read(path, evidence)


def test_values_are_read_as_numbers_and_what_is_not_defined_as_none(own):
    path = own(
        row("saturated/a", seed=0, rate=None, tokens_per_s=2802.0, latency_s_per_token="nan", free=1e-3, mark="steady")
    )
    (found,) = kept.read(path, "measured")
    expected = row(
        "saturated/a", seed=0, rate=None, tokens_per_s=2802.0, latency_s_per_token=None, free=1e-3, mark="steady"
    )
    assert found == expected | {"evidence": "measured"}
    assert type(found["seed"]) is int and type(found["tokens_per_s"]) is float


@pytest.mark.parametrize("text", ["key,code,seed\na,b,zero\n", "key,code,seed\na,b,0,1,2\n"])
def test_a_damaged_file_is_named(own, text):
    path = own(row("a"))
    path.write_text(text)
    with pytest.raises(UserError, match="serving.csv is damaged"):
        kept.read(path, "measured")


def test_of_each_point_the_newest_measurement_is_read(own):
    path = own(
        row("steps", seconds=1.0),
        row("steps", seconds=2.0),
        row("saturated/a", seconds=3.0),
        row("steps", "two", seconds=4.0),
        row("steps", "two", seconds=5.0),
    )
    assert [(found["key"], found["seconds"]) for found in kept.read(path, "measured")] == [
        ("saturated/a", 3),
        ("steps", 4),
        ("steps", 5),
    ]


@pytest.mark.parametrize("other", [{"device": "another GPU"}, {"model": "opt-1.3b"}, {"kv_slots": 500}])
def test_rows_of_another_setting_are_not_mixed_in(own, other):
    path = own(row("saturated/a", **other), row("saturated/b"))
    assert [found["key"] for found in kept.read(path, "measured")] == ["saturated/b"]


# Measuring first


@pytest.fixture
def first(own, monkeypatch):
    """repro.bench.processes with a driver and without processes: (module, commands, exit codes by name)."""

    commands, codes = [], {}

    def run(command, **options):
        _, *module, name, out, folder = command[:7]
        assert module == ["-m", "repro", "bench"] and out == "--out"
        commands.append(command[4:])
        if name == "kernels" and not codes.get(name):
            Path(folder).mkdir(parents=True)
            (Path(folder) / "manifest.json").write_text("{}")
        return SimpleNamespace(returncode=codes.get(name, 0))

    monkeypatch.setattr(processes, "nvidia_driver", lambda: True)
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(run=run))
    return processes, commands, codes


def test_kernels_once_and_serving_with_what_is_left_of_the_budget(first, monkeypatch):
    module, commands, _ = first
    now = iter([0.0, 130.0, 0.0, 0.4])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    module.measure_first("30m")
    module.measure_first("30m")
    folder = str(kept.own_folder())
    assert commands == [
        ["kernels", "--out", f"{folder}/kernels"],
        ["serving", "--out", f"{folder}/serving", "--budget", "1670s"],
        ["serving", "--out", f"{folder}/serving", "--budget", "1800s"],
    ]


@pytest.mark.parametrize("left_out, again", [(0, False), (3, True), (None, True)])
def test_kernels_go_on_if_an_earlier_call_did_not_measure_all_of_them(first, left_out, again):
    module, commands, codes = first
    folder = kept.own_folder() / kept.KERNELS
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"points_left_out": left_out}))
    codes["kernels"] = 1  # so that the stand-in writes nothing
    module.measure_first("30m")
    assert [command[0] for command in commands] == (["kernels", "serving"] if again else ["serving"])


def test_kernels_that_take_the_whole_budget_leave_none(first, monkeypatch):
    module, commands, _ = first
    now = iter([0.0, 130.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    module.measure_first("2m")
    assert [command[0] for command in commands] == ["kernels"]


def test_without_a_driver_or_a_budget_nothing_is_started(first, monkeypatch):
    module, commands, _ = first
    module.measure_first("0")
    monkeypatch.setattr(module, "nvidia_driver", lambda: False)
    module.measure_first("2h")
    assert commands == []
    with pytest.raises(UserError, match="budget 'soon'"):
        module.measure_first("soon")


def test_a_part_that_fails_is_said_and_the_other_one_goes_on(first, capsys):
    module, commands, codes = first
    codes |= {"kernels": 2, "serving": -9}
    module.measure_first("30m")
    module.measure_first("30m")
    said = capsys.readouterr().err
    assert [command[0] for command in commands] == ["kernels", "serving"] * 2  # what has failed is tried again
    assert "bench kernels ended with code 2, see above; figures are drawn from the rows that there are" in said
    assert "bench serving ended with code -9; figures" in said
