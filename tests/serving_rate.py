"""Output tokens a second over HTTP, beside the same requests given to `LLM.generate` in this process.

    python tests/serving_rate.py MODEL --device cuda --requests 512 --prompt-tokens 128 --output-tokens 128

A server is begun in a process of its own. It gets all requests at once, each on a connection of its own, first as whole
answers, then as streams; a first few, not counted, warm it up. It needs nothing but the server's own libraries. With
`--simulated PROFILE` there is no model, and nothing beside. The last column is the share of the server's processor time
in the time that it took: near or above 1, a core that does nothing but Python is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from served_alone import served_alone
from wire import Reply, Wire

from repro.setup.environment import prepare_environment

SEED = 0


def arguments_of(options: argparse.Namespace) -> list[object]:
    """Those of `repro serve`."""
    given = ["--simulated", options.simulated] if options.simulated else ["--device", options.device]
    given += ["--system", options.system, "--block-size", options.block_size]
    return [options.model, *given, *(["--kv-slots", options.kv_slots] if options.kv_slots else [])]


def cpu_s(process: subprocess.Popen[str]) -> float:
    """Processor time that a process has taken, of all its threads (Linux)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def asked(address: str, name: str, prompts: list[list[int]], output_tokens: int, stream: bool) -> list[Reply]:
    """All at once."""
    body = {"model": name, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    async def one(prompt: list[int]) -> Reply:
        async with Wire(address) as wire:
            return await wire.ask("/v1/completions", body | {"prompt": prompt})

    return await asyncio.gather(*map(one, prompts))


def checked(replies: list[Reply], output_tokens: int, stream: bool) -> int:
    """Tokens of all outputs. AssertionError if one is not as it was asked for."""
    for reply in replies:
        assert reply.status == 200, reply.body
        usage = (reply.events()[-1] if stream else reply.json())["usage"]
        assert usage["completion_tokens"] == output_tokens, usage
    return output_tokens * len(replies)


def prompts_of(options: argparse.Namespace, what: object) -> list[list[int]]:
    """Others for each `what`: none is to be found in a prefix cache."""
    dice, tokens = random.Random(f"{SEED}/{what}"), range(options.vocabulary)
    return [dice.choices(tokens, k=options.prompt_tokens) for _ in range(options.requests)]


def over_http(options: argparse.Namespace) -> None:
    count = options.output_tokens
    with served_alone(arguments_of(options), folder=Path.cwd()) as server:
        print(server.about)
        process, address, name = server.process, server.address, server.name
        for stream in (False, True):
            asyncio.run(asked(address, name, prompts_of(options, f"warm {stream}")[:8], count, stream))
            before, start = cpu_s(process), time.perf_counter()
            replies = asyncio.run(asked(address, name, prompts_of(options, stream), count, stream))
            seconds = time.perf_counter() - start
            taken, tokens = cpu_s(process) - before, checked(replies, count, stream)
            said(f"HTTP, {'streams' if stream else 'whole answers'}", tokens, seconds, taken)


def offline(options: argparse.Namespace) -> None:
    from repro import LLM, SamplingParams
    from repro.llm.pool import PoolSize

    pool = PoolSize(kv_slots=options.kv_slots)
    given = {"device": options.device, "block_size": options.block_size, "pool": pool, "quiet": True}
    engine = LLM(options.model, system=options.system, **given)
    sampling = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True, temperature=0)
    engine.generate(prompts_of(options, "warm")[:8], sampling, progress=False)
    start, before = time.perf_counter(), time.process_time()
    made = engine.generate(prompts_of(options, True), sampling, progress=False)
    seconds, taken = time.perf_counter() - start, time.process_time() - before
    said("LLM.generate", sum(len(ids) for one in made for ids in one.token_ids), seconds, taken)


def said(what: str, tokens: int, seconds: float, cpu: float) -> None:
    rate = f"{tokens / seconds:10,.0f} tokens/s, {cpu / seconds:.2f}"
    print(f"{what:<22}{tokens:>9,} tokens in {seconds:8.2f} s: {rate}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for `repro serve`")
    parser.add_argument("--simulated", metavar="PROFILE", help="no model: see `repro serve`")
    parser.add_argument("--system", default="vllm-v1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-slots", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=90, help="prompts are of token ids below it (default 90)")
    options = parser.parse_args(arguments)
    prepare_environment(os.environ)
    print(f"{options.requests} requests of {options.prompt_tokens} + {options.output_tokens} tokens")
    over_http(options)
    if not options.simulated:
        offline(options)
    print(f"{os.cpu_count()} cores, load {' '.join(f'{one:.2f}' for one in os.getloadavg())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
