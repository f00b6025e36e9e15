"""Two processes of a CPU hold a model's parts: the same schedules, the same tokens, on every system (section 4.6)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import llm

from repro.engine.scheduler import PreemptionMode
from repro.llm import models, parallel
from repro.llm.pool import PoolSize
from repro.sampling_params import SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.heavy(40)]

#: learned positions, biases, its own plan; and grouped queries, rotary embeddings, transformers' plan
_SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=101, max_position_embeddings=64)
CONFIGS = {
    "opt": transformers.OPTConfig(**_SHAPE, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
    "llama": transformers.LlamaConfig(
        **_SHAPE, intermediate_size=48, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True
    ),
}
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(4, 101, size).tolist() for size in (5, 2, 20, 33, 1, 20, 9, 40)]
PROMPTS[5] = PROMPTS[2]  # found, where there is a cache
PROMPTS[7] = PROMPTS[3] + PROMPTS[7][:7]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ALL_KINDS = [
    GREEDY,
    SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, use_beam_search=True, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(n=2, temperature=1.2, top_k=20, top_p=0.9, seed=2, max_tokens=14, ignore_eos=True),
    dataclasses.replace(GREEDY, max_tokens=20),
    dataclasses.replace(GREEDY, frequency_penalty=0.5),
    SamplingParams(n=2, use_beam_search=True, max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module", params=CONFIGS)
def both(request):
    """The same random model in one process and in two."""
    source = models.Source(request.param, CONFIGS[request.param], "float32")
    two = parallel.on_gpus(source, 2)
    yield models.from_config(source.config, source.name, by_name=True), two
    two.workers.close()


SETTINGS = {
    "vllm": {},
    "vllm, swap": dict(preemption=PreemptionMode.SWAP, pool=PoolSize(num_blocks=24)),
    "vllm, recompute": dict(preemption=PreemptionMode.RECOMPUTE, pool=PoolSize(num_blocks=24)),
    "vllm-v1": dict(system="vllm-v1", max_num_batched_tokens=16, max_num_seqs=16),
    "vllm-v1, scarce": dict(system="vllm-v1", max_num_batched_tokens=16, max_num_seqs=16, pool=PoolSize(num_blocks=20)),
    "orca-oracle": dict(system="orca-oracle"),
    "orca-pow2": dict(system="orca-pow2"),
    "orca-max": dict(system="orca-max"),
    "faster-transformer": dict(system="faster-transformer", max_num_seqs=3),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_gpus_decide_and_write_what_one_does(both, setting):
    v1 = "v1" in setting
    asked = [one if not (v1 and one.use_beam_search) else GREEDY for one in ALL_KINDS]
    made = [llm(loaded, **SETTINGS[setting]).generate(PROMPTS, asked, progress=False, seed=3) for loaded in both]
    assert made[0].events == made[1].events
    assert [one.token_ids for one in made[0]] == [one.token_ids for one in made[1]]
    statistics = [one.statistics for one in made]
    assert statistics[0].num_iterations == statistics[1].num_iterations
    if PoolSize(num_blocks=200) != SETTINGS[setting].get("pool", PoolSize(num_blocks=200)):
        assert statistics[1].num_preemptions > 0
    assert statistics[1].blocks_swapped_in == statistics[0].blocks_swapped_in
    assert ("swap" in setting) == (statistics[1].blocks_swapped_in > 0)
