"""Random runs of a model in one process and in four: equal schedules, equal tokens. The second part of `make fuzz`.

    python tests/fuzz_parallel.py --runs 20 --seed 0

A run's number is its seed: it decides the system, the pool, the block size, the caps, the way of preempting, and the
prompts with their ways of decoding. The processes are kept over all runs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from typing import Any

from repro.setup.environment import prepare_environment

prepare_environment(os.environ)

NUM_GPUS = 4
SYSTEMS = ("vllm", "vllm-v1", "orca-max", "orca-pow2", "orca-oracle", "faster-transformer")


def options(draw: random.Random) -> dict[str, Any]:
    """Settings of an LLM; a request that its pool can never hold is refused in all processes alike."""
    from repro.engine.scheduler import PreemptionMode
    from repro.llm.pool import PoolSize

    name = draw.choice(SYSTEMS)
    found = {"system": name, "block_size": draw.choice([1, 4, 16])}
    found["pool"] = PoolSize(kv_slots=draw.choice([260, 300, 400, 4000]))
    found["max_num_seqs"] = draw.randint(4, 24)
    if name == "vllm":
        found["preemption"] = draw.choice([*PreemptionMode])
    if name == "vllm-v1":
        found["max_num_batched_tokens"] = draw.randint(24, 80)
    return found


def sampling(draw: random.Random, system: str) -> Any:
    from repro.sampling_params import SamplingParams

    usual = {"max_tokens": draw.randint(1, 20), "ignore_eos": True}
    kind = draw.randrange(4)
    if kind == 0 or (kind == 1 and system == "vllm-v1"):  # which has no beams
        return SamplingParams(temperature=0, **usual)
    if kind == 1:
        return SamplingParams(n=draw.randint(2, 4), use_beam_search=True, **usual)
    cuts = {"top_k": draw.choice([0, 10]), "top_p": draw.choice([1.0, 0.9])}
    return SamplingParams(n=draw.randint(1, 4), temperature=0.9, seed=draw.randrange(100), **cuts, **usual)


def run(seed: int, models: list[Any]) -> tuple[bool, str]:
    """Whether all models of the same weights did the same, and what they were asked."""
    from repro.llm import LLM

    draw = random.Random(seed)
    chosen = options(draw)
    prompts = [[draw.randrange(101) for _ in range(draw.randint(1, 40))] for _ in range(draw.randint(1, 12))]
    if draw.random() < 0.5:
        prompts = [(prompts[0] + prompt[:20])[:40] for prompt in prompts]
    asked = [sampling(draw, chosen["system"]) for _ in prompts]
    found = []
    for loaded in models:
        llm = LLM(loaded, quiet=True, **chosen)
        for _ in range(2):  # the second call finds what the first one left in a cache
            made = llm.generate(prompts, asked, seed=seed, progress=False, errors="keep")
            manager = llm.executor.manager
            found.append(
                (
                    made.events,
                    [one.error or one.token_ids for one in made],
                    manager.num_free_blocks == manager.num_blocks,
                )
            )
    return found[:2] == found[2:] and all(is_whole for *_, is_whole in found), f"{chosen}, {len(prompts)} prompts"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="the first run's number")
    given = parser.parse_args(arguments)
    try:
        import torch
    except ModuleNotFoundError:
        print("several processes: left out, as torch is not installed")
        return 0
    from tiny import TINY

    from repro.llm import models, workers
    from repro.llm.parts import Source

    torch.set_num_threads(1)
    split = workers.split(Source("tiny", TINY, "float32"), NUM_GPUS)
    both = [models.from_config(TINY, "tiny", by_name=True), split]
    for seed in range(given.seed, given.seed + given.runs):
        is_equal, what = run(seed, both)
        if not is_equal:
            print(f"run {seed} differs in {NUM_GPUS} processes: {what}; again: --runs 1 --seed {seed}")
            return 1
    print(f"{given.runs} runs are equal in one process and in {NUM_GPUS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
