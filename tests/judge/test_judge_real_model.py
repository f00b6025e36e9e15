"""A real tiny model on the CPU is judged: its tokenizer, its lengths, its real times."""

from __future__ import annotations

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=WHY)
pytest.importorskip("torch")
pytest.importorskip("transformers")

from serving import served
from talking import talking
from tiny import llm

from repro.cli import main
from repro.judge import ledger
from repro.server.backend import RealBackend

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.heavy(15)]


@pytest.mark.parametrize(("system", "driven_out"), [("vllm-v1", "holds"), ("orca-oracle", "does not hold")])
def test_a_real_server_is_judged(system, driven_out, tmp_path, capsys):
    """What follows from the order of tokens alone is as it must be, however fast this machine is."""
    with served(RealBackend(llm(talking(), system=system))) as address:
        assert main(["judge", "--target", address, "--name", system, "--out", str(tmp_path), "--budget", "40s"]) == 0
    rows = ledger.read(tmp_path).set_index("claim")
    assert len(rows) == 8
    assert rows.loc["full_pool_preempts", "verdict"] == driven_out
    assert rows.loc["iteration_batching", "verdict"] != "does not hold"
