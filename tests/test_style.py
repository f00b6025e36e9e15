"""The formatter and the linter, with the settings of pyproject.toml, over all code and notebooks."""

import subprocess
import sys

import pytest
from committed import committed

FOLDERS = ("repro", "tests", "notebooks")


@pytest.mark.parametrize("command", [("format", "--check"), ("check",)], ids=("formatted", "linted"))
def test_code_and_notebooks_are(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", *FOLDERS],
        capture_output=True,
        text=True,
        cwd=committed(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
