"""`python -m repro judge`: what it refuses, and what is kept when the server dies or the reader has seen enough."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=WHY)

import httpx
from served_alone import served_alone
from serving import served, simulated

from repro.cli import main
from repro.harness import progress
from repro.judge import ledger
from repro.simulate.cost_model import CostModel

pytestmark = pytest.mark.heavy(15)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("repro: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no server is named; give its address with --target"),
        (["--target", "localhost:8000"], "'localhost:8000' is no address; give one such as http://127.0.0.1:8000"),
        (["--target", "http://"], "'http://' is no address"),
        (["--target", "http://x:99999"], "'http://x:99999' is no address"),
        (["--target", "http://a b"], "'http://a b' is no address"),
        (["--target", "http://x/v1?y=1"], "is no address"),
        (["--target", "http://me:secret@x"], "is no address"),
        (["--target", "http://x", "http://x/v1/"], "the names 'x', 'x' do not tell the servers apart"),
        (["--target", "http://x", "--name", "a", "b"], "2 names for 1 targets"),
        (["--target", "http://x", "--name", " "], "do not tell the servers apart"),
        (["--target", "http://x", "--budget", "soon"], "budget 'soon' is no length of time"),
        (["--target", "http://x", "--budget", "1s"], "--budget, in seconds, = 1.0 must be"),
        (["--target", "http://x", "--seed", "-1"], "--seed = -1 must be a whole number"),
        (["--target", "http://x", "--api-key", "\udcff"], "the API key cannot be sent"),
        (["--target", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["--target", "http://nobody.invalid"], "http://nobody.invalid does not answer"),
    ],
)
def test_what_cannot_be_judged_is_one_line(options, said, capsys, tmp_path):
    assert main(["judge", "--out", str(tmp_path / "new"), *options]) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key", "wrong"], "refuses the key: the API key is missing or wrong"),
        ([], "give the right one with --api-key"),
        (["--api-key", "sesame", "--model", "gpt-5"], "has no model 'gpt-5'; it has opt-13b"),
        (["--api-key", "sesame", "--out", f"{__file__}/x"], "Not a directory"),
    ],
)
def test_a_server_that_refuses_is_one_line(options, said, capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("REPRO_API_KEY", raising=False)
    with served(simulated(), api_key="sesame") as address:
        assert main(["judge", "--target", address, "--out", str(tmp_path / "new"), *options]) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "/v1/models is no JSON; give a server of OpenAI's"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "/v1/models does not list models"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"data":[]}', "offers no model"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "answers 404: Not Found"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer"),
        (b"", "does not answer"),
    ],
)
def test_another_server_is_one_line(answer, said, capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))\n"
            "while True: c, _ = s.accept(); c.recv(4096); c.sendall(bytes.fromhex(sys.argv[2])); c.close()"
        )
        number = listening.fileno()
        os.set_inheritable(number, True)
        arguments = [sys.executable, "-c", command, str(number), answer.hex()]
        with subprocess.Popen(arguments, pass_fds=[number]) as process:
            try:
                address = f"http://127.0.0.1:{listening.getsockname()[1]}"
                assert main(["judge", "--target", address, "--out", str(tmp_path)]) == 2
            finally:
                process.kill()
    assert said in one_line(capsys)


def after_claims(count: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something done when so many claims have been judged."""
    finish = progress.Progress.finish

    def finished(self: progress.Progress, key: str, seconds: float | None = None) -> None:
        finish(self, key, seconds)
        if self._done == count:
            act()

    monkeypatch.setattr(progress.Progress, "finish", finished)


def test_an_interrupt_keeps_what_was_found(capsys, tmp_path, monkeypatch):
    after_claims(3, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        with served(simulated()) as address:
            assert main(["judge", "--target", address, "--name", "mine", "--out", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert said.err.strip() == "repro: interrupted; the claims judged so far are kept"
    assert list(ledger.read(tmp_path)["claim"]) == ["prefix_reuse", "samples_computed_once", "iteration_batching"]
    assert "mine" in said.out and f"ledger: {tmp_path / 'ledger.csv'}" in said.out
    assert main(["judge", "--show", "--out", str(tmp_path)]) == 0
    assert "mine" in capsys.readouterr().out


def test_a_server_that_is_killed_is_one_line_and_what_was_found_is_kept(capsys, tmp_path, monkeypatch):
    """And the next server is judged all the same."""
    with served_alone(["opt-13b", "--simulated", "datasheet"]) as alone, served(simulated()) as living:
        dying = alone.address
        after_claims(1, alone.process.kill, monkeypatch)
        options = ["--target", dying, living, "--name", "dying", "living", "--out", str(tmp_path)]
        assert main(["judge", *options, "--budget", "10s"]) == 1
    error = one_line(capsys)
    servers = list(ledger.read(tmp_path)["server"])
    kept = servers.count("dying")  # a claim that needs no further request may be among them
    assert f"dying: {dying} does not answer: " in error and f" {kept} of 8 claims were judged before" in error
    assert 1 <= kept < 8 and servers.count("living") == 8


def test_a_whole_run_over_a_socket(capsys, tmp_path):
    """Verdicts that hang on the machine's speed are not looked at."""
    with served(simulated(kv_slots=1024, cost_model=CostModel("slow", 0.005, 0.002, 0, 0, 0, 0, 0, 0))) as address:
        assert main(["judge", "--target", f"{address}/v1", "--out", str(tmp_path / "l.csv"), "--budget", "20s"]) == 0
        assert httpx.get(f"{address}/health").status_code == 200
    rows = ledger.read(tmp_path / "l.csv").set_index("claim")
    assert len(rows) == 8 and set(rows["server"]) == {address.removeprefix("http://")}
    assert rows.loc["iteration_batching", "verdict"] == "holds"
    assert "8/8 points" in capsys.readouterr().out
