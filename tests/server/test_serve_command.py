"""`python -m repro serve` in a process of its own: it begins, drains and ends; and what it refuses."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import openai
from served_alone import Served, served_alone
from serving import client_of

from repro.cli import main
from repro.setup.environment import ROOT

# No torch, and what would come from the network or from anywhere else is refused.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from repro.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def server() -> Iterator[Served]:
    """A simulated one."""
    arguments, environment = ["opt-13b", "--simulated", "a100-2023"], {"REPRO_API_KEY": "sesame"}
    with served_alone(arguments, ("-c", WITHOUT_TORCH), environment=environment) as served:
        assert "simulated (a100-2023): vLLM V1, 983 blocks of 16 tokens" in served.about
        yield served


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_it(server, ends):
    """What runs comes to its end; nothing new is taken; the exit code is 0."""
    process, client = server.process, client_of(server.address, api_key="sesame")
    asked = {"model": "opt-13b", "prompt": "x", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    chunks, begun = [], threading.Event()

    def listen() -> None:
        for chunk in client.completions.create(**asked, stream=True):
            chunks.append(chunk)
            begun.set()

    thread = threading.Thread(target=listen)
    thread.start()
    assert begun.wait(20)
    process.send_signal(ends)
    thread.join(20)
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) == 40
    assert process.wait(20) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["gpt-5", "--simulated", "a100-2023"], "unknown deployment 'gpt-5'; known: llama-13b"),
        (["opt-13b", "--simulated", "tpu"], "unknown cost profile 'tpu'; known: a100-2023, datasheet"),
        (["opt-13b", "--simulated", "datasheet", "--system", "sglang"], "unknown system 'sglang'; known:"),
        (["opt-13b", "--simulated", "datasheet", "--block-size", "3"], "block_size = 3 is not supported"),
        (["opt-13b", "--simulated", "datasheet", "--kv-slots", "4"], "--kv-slots = 4 must be a whole number"),
        (["opt-13b", "--simulated", "datasheet", "--max-waiting", "0"], "--max-waiting = 0 must be a whole number"),
        (["opt-13b", "--simulated", "datasheet", "--device", "cuda"], "--device cuda is for a real model"),
        (["opt-13b", "--simulated", "datasheet", "--num-gpus", "2"], "--num-gpus 2 is for a real model"),
        (["opt-13b", "--simulated", "datasheet", "--port", "99999"], "--port = 99999 must be a whole number"),
        (["opt-13b", "--simulated", "datasheet", "--host", "x" * 70], "cannot listen on xxx"),
        (["opt-13b", "--simulated", "datasheet", "--host", "256.1.1.1"], "cannot listen on 256.1.1.1:0"),
    ],
)
def test_what_cannot_be_served_is_one_line(options, said, capsys):
    assert main(["serve", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("repro: ") and said in error and error.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "opt-13b", "--simulated", "datasheet", "--port", port]) == 2
    assert "Address already in use; give another --host or --port" in capsys.readouterr().err


def test_without_its_libraries_the_remedy_is_said():
    command = [sys.executable, "-c", WITHOUT_TORCH.replace("torch", "uvicorn"), "serve", "opt-13b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "repro: the server needs uvicorn, which is not installed; run `make setup`, which adds it\n"
