"""Output tokens a second of processor time: `LLM.generate` on a CPU, beside transformers' `generate` of the same model.

    python tests/cpu_rate.py smollm2 --threads 1

All prompts are equally long, so that neither pads them. The two take turns, and the best of each counts, because other
work on the machine costs time. transformers has the attention that it chooses by itself (SDPA) and its own cache; both
decode greedily, and their tokens are compared.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
from collections.abc import Callable

from repro.setup.environment import prepare_environment

SEED = 0
Tokens = list[list[int]]


def timed(generate: Callable[[], Tokens]) -> tuple[float, float, Tokens]:
    """Seconds of processor time, seconds, and what comes of it."""
    start, before = time.perf_counter(), time.process_time()
    made = generate()
    return time.process_time() - before, time.perf_counter() - start, made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for `LLM`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1000, help="prompts are of token ids below it")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args(arguments)
    prepare_environment(os.environ)
    import torch

    from repro import LLM, SamplingParams

    engine = LLM(options.model, device="cpu", quiet=True)
    torch.set_num_threads(options.threads)  # the engine has chosen one that is fast, not one to compare
    paged = engine.loaded.model
    config = copy.deepcopy(paged.config)
    config._attn_implementation = "sdpa"
    plain = type(paged)(config).eval()
    plain.load_state_dict(paged.state_dict())
    dice, count = random.Random(SEED), options.output_tokens
    prompts = [dice.choices(range(options.vocabulary), k=options.prompt_tokens) for _ in range(options.requests)]
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    lengths = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

    def ours() -> Tokens:
        return [ids[0] for ids in (one.token_ids for one in engine.generate(prompts, sampling, progress=False))]

    @torch.no_grad()
    def theirs() -> Tokens:
        given = torch.tensor(prompts)
        made = plain.generate(given, attention_mask=torch.ones_like(given), **lengths)
        return made[:, options.prompt_tokens :].tolist()

    runs = [(timed(theirs), timed(ours)) for _ in range(options.passes)]
    print(f"{options.requests} prompts of {options.prompt_tokens} + {count} tokens, {options.threads} threads")
    rates = []
    for name, made in zip(("transformers' generate", "LLM.generate"), zip(*runs)):
        taken, seconds, _ = min(made, key=lambda one: one[0])
        rates.append(options.requests * count / taken)
        print(f"{name:<23}{rates[-1]:8.1f} tokens/s of processor time ({taken:.2f} s in {seconds:.2f} s)")
    same = sum(list(one) == list(other) for one, other in zip(runs[0][0][2], runs[0][1][2]))
    print(f"{rates[1] / rates[0]:.2f} times; {same} of {len(prompts)} prompts have equal tokens")
    print(f"{os.cpu_count()} cores, load {' '.join(f'{one:.2f}' for one in os.getloadavg())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
