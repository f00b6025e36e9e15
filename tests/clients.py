"""Two benchmark clients that others publish, aiperf and guidellm, at this project's server: `make clients`.

Each is fetched by name into an environment of its own, since its pins are not this project's, and asks a tiny model on
the CPU for texts of a given length, as streams, at most 4 at a time. No answer may be an error or have another length,
of prompt or output, than was asked. What the client measures must be what the server's own log says: the medians of the
time to the first token and of the time between two tokens within 5 ms and 2 %. The 99th percentiles are only shown.

A token of the tiny model is a character, so that a client that counts tokens in a text counts those that were made.
Other work on the machine makes a client late, so it is to be run on one that has nothing else to do. Without a network
it says so, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from served_alone import served_alone

from repro.paths import folders
from repro.server.replay import Logged

PROMPT, OUTPUT = 100, 20  # tokens
MODEL = "tiny"


class NotFetched(Exception):
    """A client cannot be had here, in one line."""


@dataclass(frozen=True)
class Answered:
    """What a client says of a request, in tokens and ms; `characters` of the text that came, if it says so."""

    prompt: float
    output: float
    first_ms: float
    gap_ms: float
    characters: int = OUTPUT


def write_model(folder: Path) -> None:
    """A model with random weights, and a tokenizer each of whose tokens is one character; any other one is a ?."""
    import tokenizers
    import transformers

    vocabulary = {character: place for place, character in enumerate(string.printable[:95])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), max_position_embeddings=1024, initializer_range=0.3, **sizes, **no_tokens
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetched(name: str, version: str, folder: Path) -> Path:
    """The client's command. NotFetched if it cannot be had."""
    where = folder / f"{name}-{version}"
    command = where / "bin" / name
    if not (where / "done").exists():
        print(f"fetching {name} {version}", flush=True)
        venv.create(where, clear=True, with_pip=True)
        pip = [where / "bin" / "python", "-m", "pip", "install", "--quiet", "--retries", "1", f"{name}=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            reason = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip gave no reason"]
            raise NotFetched(f"{name} {version} cannot be fetched ({reason[-1].removeprefix('ERROR: ')})")
        (where / "done").touch()
    return command


def run(command: list[object], folder: Path) -> None:
    """A client to its end; what it says goes into a file. RuntimeError if it fails."""
    said = folder / "said.txt"
    with open(said, "w", encoding="utf-8") as file:
        code = subprocess.run([*map(str, command)], cwd=folder, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{command[0]} has ended with {code}; it says why in {said}")


def aiperf(command: Path, address: str, model: Path, count: int, streams: int, folder: Path) -> list[Answered]:
    """Chats. It counts the output's tokens in the text."""
    lengths = ["--isl", PROMPT, "--isl-stddev", 0, "--osl", OUTPUT, "--osl-stddev", 0]
    load = ["--concurrency", streams, "--request-count", count, "--random-seed", 0, "--streaming"]
    quiet = ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", folder / "artifacts"]
    asked = ["--model", MODEL, "--url", address, "--endpoint-type", "chat", "--extra-inputs", "ignore_eos:true"]
    run([command, "profile", *asked, "--tokenizer", model, *lengths, *load, *quiet], folder)
    found = []
    for line in (folder / "artifacts" / "profile_export.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("error"):
            raise RuntimeError(f"aiperf: a request failed: {row['error']}")
        of = {name: one["value"] for name, one in row["metrics"].items()}
        lengths = of["input_sequence_length"], of["output_sequence_length"]
        assert lengths == (of["usage_prompt_tokens"], of["usage_completion_tokens"]), (
            "what we say is not what it counts"
        )
        found.append(Answered(*lengths, of["time_to_first_token"], of["inter_token_latency"]))
    return found


def guidellm(command: Path, address: str, model: Path, count: int, streams: int, folder: Path) -> list[Answered]:
    """Completions."""
    asked = f"kind=openai_http,target={address},model={MODEL},request_format=/v1/completions"
    load = ["--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={count}"]
    data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"
    given = ["--backend", asked, "--tokenizer", f"kind=hf_auto,model={model}", "--data", data]
    report = folder / "report.json"
    run([command, "run", *given, *load, "--output", f"kind=json,path={report}", "--disable-console"], folder)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    if wrong := benchmark["requests"]["errored"]:
        raise RuntimeError(f"guidellm: {len(wrong)} requests failed, the first: {wrong[0]['info']['error']}")
    found = []
    for row in benchmark["requests"]["successful"]:
        times, output = row["info"]["timings"], row["output_metrics"]["text_tokens"]
        first, last = times["first_token_iteration"], times["last_token_iteration"]
        waited, gap = 1000 * (first - times["request_start"]), 1000 * (last - first) / (output - 1)
        found.append(Answered(row["input_metrics"]["text_tokens"], output, waited, gap, len(row["output"])))
    return found


Client = Callable[[Path, str, Path, int, int, Path], list[Answered]]
CLIENTS: dict[str, tuple[str, Client]] = {"aiperf": ("0.13.0", aiperf), "guidellm": ("0.8.1", guidellm)}


def ours(log: Path) -> tuple[list[float], list[float]]:
    """Times to the first token, and between two, by the server's own clock, in ms."""
    lines = Logged.read(str(log)).lines
    first = [line["first_token_ms"] - line["timestamp"] for line in lines]
    return first, [(line["end_ms"] - line["first_token_ms"]) / (line["output_length"] - 1) for line in lines]


def compared(name: str, answered: list[Answered], log: Path, count: int) -> bool:
    """Whether all have come as they were asked for, and in the times that the log says; said in lines."""
    lengths = (PROMPT, OUTPUT, OUTPUT)
    wrong = [one for one in answered if (one.prompt, one.output, one.characters) != lengths]
    print(f"{name}: {len(answered):,} of {count:,} requests, {len(wrong):,} of a wrong length")
    same = len(answered) == count and not wrong
    theirs = [one.first_ms for one in answered], [one.gap_ms for one in answered]
    for what, client, server in zip(("to the first token", "between two tokens"), theirs, ours(log)):
        apart, allowed = abs(median(client) - median(server)), 5 + 0.02 * median(server)
        same &= apart <= allowed
        print(
            f"  {what}: median {median(client):.2f} ms, the server's log {median(server):.2f}, {apart:.2f} apart of "
            f"{allowed:.2f} allowed; 99 %: {quantiles(client, n=100)[-1]:.2f}, log {quantiles(server, n=100)[-1]:.2f}"
        )
    return same


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="of each client (default 1,000)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="one of the two")
    parser.add_argument(
        "--folder", type=Path, default=folders().results / "clients", help="for environments and results"
    )
    options = parser.parse_args(arguments)
    folder, same = options.folder.resolve(), True
    (folder / MODEL).mkdir(parents=True, exist_ok=True)
    write_model(folder / MODEL)
    for name in options.only:
        version, client = CLIENTS[name]
        try:
            command = fetched(name, version, folder)
        except NotFetched as reason:
            print(f"skipped: {reason}")
            continue
        work = folder / f"{name}-results"
        work.mkdir(exist_ok=True)
        log = work / "server.log"
        with served_alone([MODEL, "--kv-slots", 65536, "--log", log], folder=folder) as server:
            answered = client(command, server.address, folder / MODEL, options.requests, options.streams, work)
        print(f"{os.cpu_count()} cores, load {' '.join(f'{one:.2f}' for one in os.getloadavg())}")
        same &= compared(f"{name} {version}", answered, log, options.requests)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
