"""The scheduler of V1 on a GPU: chunks in CUDA graphs, a step queued ahead, a prefix cache; the CPU's tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from test_executor import CONFIGS, assert_greedy, on

from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.llm import LLM
from repro.llm.pool import PoolSize

RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(3, 100, size).tolist() for size in (5, 2, 20, 33, 1, 20, 9, 40, 28, 13)]
PROMPTS[5] = PROMPTS[2]
PROMPTS[7] = PROMPTS[3] + PROMPTS[7][:7]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(model, budget: int, **options) -> LLM:
    small = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 6), "quiet": True, "block_size": 4}
    return LLM(model, **{"system": "vllm-v1", "pool": PoolSize(num_blocks=200)} | small | options)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate_for_any_budget(name, caching):
    model, chosen = on("cuda", name), dataclasses.replace(system("vllm-v1"), prefix_caching=caching)
    for budget in (4, 16, 64, 512, 2048):
        for num_blocks, graphs in ((200, True), (14, True), (14, False)):
            made = engine(model, budget, system=chosen, pool=PoolSize(num_blocks=num_blocks), graphs=graphs)
            for _ in range(1 + caching):
                found = made.generate(PROMPTS, GREEDY, progress=False)
                for prompt, result in zip(PROMPTS, found):
                    assert_greedy(name, tuple(prompt), result.token_ids[0])
            if num_blocks == 200 or budget > 4:  # on so small a budget few run at once
                assert (found.statistics.num_preemptions > 0) is (num_blocks == 14)


def test_samples_and_settings_are_those_of_the_scheduler_of_2023():
    model = on("cuda", "llama")
    asked = [
        SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=7, seed=3, max_tokens=9, stop_token_ids=[17, 40, 63]),
    ]
    prompts = PROMPTS[1:4]
    results = [
        made.generate(prompts, asked, progress=False)
        for made in (engine(model, 9), engine(model, 2048), LLM(model, block_size=4, quiet=True, max_num_seqs=8))
    ]
    assert len({str([one.token_ids for one in result]) for result in results}) == 1


def test_an_engine_that_is_fed_gives_the_same_tokens_and_takes_back():
    made = engine(on("cuda", "llama"), 24)
    expected = [one.token_ids for one in made.generate(PROMPTS, GREEDY, progress=False)]
    with made.serving() as serving:
        answers = [serving.add(prompt, GREEDY) for prompt in PROMPTS]
        answers[3].abort()
        kept = [place for place in range(len(PROMPTS)) if place != 3]
        assert [answers[place].result(60).token_ids for place in kept] == [expected[place] for place in kept]
        pieces = [piece.token_id for piece in serving.add(PROMPTS[3], GREEDY)]
    assert [pieces] == expected[3]
    assert made.executor.manager.num_free_blocks == made.num_blocks
