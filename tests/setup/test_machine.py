"""What is recorded of the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repro.setup.machine import machine


def test_a_machine_is_described_without_importing_torch() -> None:
    program = (
        "import json, sys; from repro.setup.machine import machine; text = json.dumps(machine());assert not {'torch', "
        "'pandas', 'matplotlib'} & set(sys.modules); print(text)"
    )
    made = json.loads(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )
    assert made["cores"] >= 1 and made["cpu"] and made["libraries"]["numpy"] and made["utc"].endswith("+00:00")


def test_a_machine_without_git_and_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    made = machine()
    assert made["commit"] is None and made["uncommitted_changes"] is None and made["gpus"] is None
