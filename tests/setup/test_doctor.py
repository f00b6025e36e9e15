"""The doctor's verdicts follow from the facts, and its own facts are true of this machine."""

import json
import sys
from copy import deepcopy
from importlib import metadata
from typing import Any

import pytest

from repro.setup import doctor


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return doctor.collect()


def machine(**changes: Any) -> dict[str, Any]:
    """Return the facts of a sound machine with a GPU, with changes."""
    facts: dict[str, Any] = {
        "packages": dict.fromkeys(doctor.PACKAGES, "1.0"),
        "project": {"folder": "/p", "writable": True},
        "driver": {"version": "580.1", "gpus": ["NVIDIA A100, 40960 MiB"]},
        "torch": {
            "version": "2.13.0",
            "build": "CUDA 13.0",
            "gpus": [{"name": "NVIDIA A100", "memory_gib": 39.4, "capability": "8.0"}],
        },
        "model": "/m.gguf",
        "hub": True,
    }
    return deepcopy(facts | changes)


def refusals(facts: dict[str, Any]) -> dict[str, str]:
    return {ability.what: ability.why for ability in doctor.abilities(facts) if not ability.can_run}


def test_a_sound_machine_can_do_everything() -> None:
    assert refusals(machine()) == {}


CPU_TORCH = {"version": "2.13.0+cpu", "build": "CPU", "gpus": []}
UNSEEN = {"version": "2.13.0", "build": "CUDA 13.0", "gpus": []}
OLD = {"version": "2.13.0", "build": "CUDA 13.0", "gpus": [{"name": "V100", "memory_gib": 16, "capability": "7.0"}]}


@pytest.mark.parametrize(
    ("changes", "refused", "reason"),
    [
        ({"driver": None, "torch": CPU_TORCH}, ["on a GPU"], "no NVIDIA driver"),
        ({"torch": CPU_TORCH}, ["on a GPU"], "torch is the CPU build"),
        ({"torch": UNSEEN}, ["on a GPU"], "580.1"),
        ({"torch": OLD}, ["on a GPU"], "V100 has compute capability 7.0, and Triton supports 8.0 and newer"),
        ({"model": None}, ["embedded model"], "make model"),
        ({"torch": {"error": "libfoo missing"}}, ["embedded model", "interpreter", "on a GPU"], "libfoo missing"),
        ({"hub": False}, ["from the hub"], "HUB=1"),
    ],
)
def test_each_lack_stops_only_what_needs_it(changes: dict[str, Any], refused: list[str], reason: str) -> None:
    found = refusals(machine(**changes))
    assert len(found) == len(refused)
    for part in refused:
        (why,) = [why for what, why in found.items() if part in what]
        assert reason in why


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packages": dict.fromkeys(doctor.PACKAGES)}, "make setup"),
        ({"project": {"folder": "/p", "writable": False}}, "/p cannot be written"),
    ],
)
def test_without_the_basis_nothing_runs(changes: dict[str, Any], reason: str) -> None:
    found = refusals(machine(hub=False, **changes))
    assert len(found) == len(doctor.abilities(machine()))
    assert sum(reason in why for why in found.values()) >= len(found) - 2


def test_a_set_up_that_is_not_complete_is_said_once(here: dict[str, Any]) -> None:
    facts = here | {"packages": dict.fromkeys(doctor.PACKAGES)}
    text = doctor.report(facts | {"abilities": [vars(ability) for ability in doctor.abilities(facts)]})
    assert text.count("set-up is not complete, or under way") == 1 and text.endswith("run `make setup`")


def test_the_facts_are_true_of_this_machine(here: dict[str, Any]) -> None:
    assert json.loads(json.dumps(here)) == here
    assert here["python"]["version"] == sys.version.split()[0].rstrip("+")
    assert here["packages"]["numpy"] == metadata.version("numpy")
    assert here["torch"]["version"].split("+")[0] == metadata.version("torch").split("+")[0]
    assert here["torch"]["build"] == "CPU" or here["torch"]["build"].startswith("CUDA")
    assert here["cpu_cores"] >= 1
    assert 2**28 < here["memory_bytes"] < 2**50


def test_the_report_says_every_fact_once(here: dict[str, Any]) -> None:
    text = doctor.report(here)
    for name in (*doctor.PACKAGES, "torch", "Python", "embedded model", "NVIDIA driver", "memory", "disk"):
        assert sum(line.startswith(name) for line in text.splitlines()) >= 1, name
    for ability in here["abilities"]:
        (line,) = [line for line in text.splitlines() if ability["what"] in line]
        assert line.split()[0] == ("yes" if ability["can_run"] else "no")
        assert ability["why"] in line


def test_a_torch_that_does_not_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_PROBE", "raise ImportError('wrong glibc')")
    assert doctor.probe_torch() == {"error": "ImportError: wrong glibc"}
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import os; os._exit(139)")
    assert doctor.probe_torch() == {"error": "ended with 139"}


def test_the_exit_status_says_whether_the_main_command_can_run(
    here: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for can_run, status in ((True, 0), (False, 1)):
        facts = deepcopy(here)
        facts["abilities"][0]["can_run"] = can_run
        monkeypatch.setattr(doctor, "collect", lambda facts=facts: facts)
        assert doctor.main() == status
    assert capsys.readouterr().out.count("What can run here:") == 2
