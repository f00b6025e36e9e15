"""The Makefile: its help, its variables, and what it says where no Python will do."""

import os
import re
import shutil
import subprocess

import pytest

from repro.setup.environment import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)


def test_help_is_the_default_and_lists_every_target() -> None:
    listing = make().stdout
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert f"make {target} " in listing


def test_the_variables_reach_the_command() -> None:
    run = make("-n", "reproduce", "SCALE=smoke", "LENGTHS=my é.csv", "ONLY=a b", "JOBS=3")
    command = " ".join(run.stdout.replace("\\\n", " ").split())
    assert command.endswith('-m repro reproduce --scale "smoke" --lengths "my é.csv" --only a b --jobs "3"')


def test_without_a_python_one_line_says_what_to_do() -> None:
    run = make("setup", "PYTHON=/no/such python")
    assert run.returncode == 2
    assert run.stderr.startswith("error: Python 3.11 or newer is needed, and /no/such python is not; ")
