"""The lock files are exact and hold what the project asks for, and nothing says where packages come from."""

import re
import tomllib
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

from packaging.requirements import Requirement

from repro.setup import bootstrap
from repro.setup.environment import ROOT


def pins(lock: Path) -> dict[str, str]:
    """Package -> version; each line of a lock is exact."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith(("#", "-"))]
    exact = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)( ; sys_platform == \"linux\")?")
    locked = {match[1]: match[2] for match in map(exact.fullmatch, lines) if match}
    assert len(locked) == len(lines)
    return locked


def test_the_locks_are_exact_and_hold_what_the_project_asks_for() -> None:
    base, models = pins(bootstrap.LOCK), pins(bootstrap.MODELS_LOCK)
    assert not set(base) & set(models)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    light = project["dependencies"] + extras["notebook"] + extras["server"] + extras["test"]
    for wanted, locked in ((light, base), (extras["models"], models)):
        for asked in wanted:
            name, _, version = asked.split(";")[0].partition("==")
            assert version in ("", locked[name])
    assert all(
        f"-r {lock.name}" in (ROOT / "environment.yml").read_text() for lock in (bootstrap.LOCK, bootstrap.MODELS_LOCK)
    )


def test_the_light_lock_needs_nothing_of_the_other() -> None:
    """By what the installed packages say of themselves."""
    base, models = pins(bootstrap.LOCK), set(pins(bootstrap.MODELS_LOCK))
    for package in base:
        for requirement in metadata.requires(package) or []:
            asked = Requirement(requirement)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                assert re.sub(r"[-_.]+", "-", asked.name).lower() not in models, (package, requirement)


def test_an_installed_package_has_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert callable(EntryPoint("repro", project["scripts"]["repro"], "console_scripts").load())


def test_no_package_index_is_named() -> None:
    files = (
        "Makefile",
        "requirements.lock",
        "requirements-models.lock",
        "environment.yml",
        "pyproject.toml",
        "Dockerfile",
    )
    for name in (*files, *(f"repro/setup/{one}.py" for one in ("bootstrap", "lab", "packages"))):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name
