"""Two processes of a CPU hold a model's parts: the same schedules, the same tokens, on every system (section 4.6)."""

from __future__ import annotations

import dataclasses
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import llm

from repro.bench import end_to_end
from repro.bench.serving.warm_engine import Durations, WarmEngine
from repro.engine.clock import VirtualClock
from repro.engine.executor import Executor
from repro.engine.loop import Engine
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import Request
from repro.engine.systems import system
from repro.errors import UserError
from repro.llm import LLM, models, workers
from repro.llm.batch import Batch
from repro.llm.parallel import Tables
from repro.llm.parts import Source
from repro.llm.pool import PoolSize
from repro.llm.sequences import beam_search
from repro.sampling_params import SamplingParams
from repro.simulate.load import BLOCK_SIZE

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


@pytest.fixture(scope="module")
def pairs():
    """The same random models in one process and in two, which are kept over all cases."""
    sources = [Source(name, config, "float32") for name, config in CONFIGS.items()]
    with ThreadPoolExecutor() as pool:
        split = list(pool.map(lambda source: workers.split(source, 2), sources))
    found = {
        source.name: (models.from_config(source.config, source.name, by_name=True), two)
        for source, two in zip(sources, split)
    }
    yield found
    for two in split:
        two.workers.close()
    assert [process.poll() for two in split for process in two.workers.processes] == [0, 0]


@pytest.fixture(params=CONFIGS)
def both(request, pairs):
    return pairs[request.param]


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


@pytest.mark.parametrize("setting", ["vllm", "vllm-v1"])
def test_a_shared_prefix_and_a_cache_that_outlives_a_call(both, setting):
    found = []
    for loaded in both:
        engine = llm(loaded, **SETTINGS[setting])
        for _ in range(2):
            made = engine.generate(PROMPTS[:4], GREEDY, prefix=list(range(40, 51)), progress=False)
            found.append((made.events, [one.token_ids for one in made], made.statistics.prompt_tokens_found))
    assert found[:2] == found[2:]
    assert (found[3][2] > 0) == (setting == "vllm-v1")


def test_decoding_of_ones_own(both):
    found = []
    for loaded in both:
        with llm(loaded).decoding() as decoding:
            found.append(beam_search(decoding, PROMPTS[0], 3, 8))
    assert [one for one, _ in found[0]] == [one for one, _ in found[1]]
    assert [one for _, one in found[0]] == pytest.approx([one for _, one in found[1]], abs=1e-5)


class Ahead(Executor):
    """Four iterations at a time."""

    def __init__(self, real):
        self.execute = real.execute

    def execute(self, output):
        raise NotImplementedError

    def lookahead(self, output, now_s, until_s):
        return 4


def test_iterations_that_are_run_together_are_one_message_each(both):
    """A load, and several passes after it: each finds the lengths that the one before it left."""
    found = []
    for loaded in both:
        executor = llm(loaded).executor
        manager = executor.manager
        executor.reset(manager)
        scheduler = Scheduler(manager, SchedulerConfig())
        requests = [Request(index, 0.0, len(PROMPTS[index]), 20, GREEDY) for index in range(3)]
        for request in requests:
            executor.submit(request, PROMPTS[request.request_id])
        Engine(scheduler, Ahead(executor), VirtualClock()).run(requests)
        executor.flush()
        found.append([executor.finished[index].sequences[0].tokens for index in range(3)])
    assert found[0] == found[1] and all(len(tokens) == 20 for tokens in found[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_gpus": 0}, "num_gpus = 0 must be a whole number from 1 to 64"),
        (
            {"num_gpus": 5},
            "num_gpus = 5: the 12 K/V heads of opt-125m cannot be split evenly.*one of 1, 2, 3, 4, 6, 12",
        ),
        ({"num_gpus": 2, "hub": True}, "num_gpus = 2 reads files on this machine; fetch the model"),
        ({"num_gpus": 64, "device": "cuda"}, "torch finds no CUDA GPU here|torch finds . here; use num_gpus of 1 to"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(options, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UserError, match=message):
        LLM("opt-125m", quiet=True, **options)


def test_a_loaded_model_keeps_its_number_of_gpus(both):
    with pytest.raises(UserError, match="num_gpus = 3, but .* is loaded in 2; load it anew"):
        LLM(both[1], num_gpus=3)


def test_a_pool_that_does_not_fit_leaves_the_workers_as_they_are(both):
    with pytest.raises(UserError, match="does not fit into memory"):
        llm(both[1], pool=PoolSize(num_blocks=1 << 45))
    assert len(llm(both[1]).generate(PROMPTS[:1], GREEDY, progress=False)) == 1


def test_tables_are_followed_by_what_changes():
    random = np.random.default_rng(0)
    told, followed = Tables(9, 5), Tables(9, 5)
    for step in range(200):
        count, width = int(random.integers(1, 10)), int(random.integers(1, 6))
        source = random.integers(-1, 9, count).astype(np.int32) if random.random() < 0.5 else None
        tables = random.integers(0, 3 + step % 2, (count, width)).astype(np.int32)
        batch = Batch([], range(count), [], count, source, tables[:, 0], tables[:, 0], tables, tables, None, 1)
        changes = told.changes(batch)
        assert np.array_equal(followed.follow(batch, changes)[:, :width], tables)
        assert told.changes(dataclasses.replace(batch, source=None)).shape == (2, 0)


def test_a_measured_load_is_decided_alike(both):
    """What `bench end_to_end --num-gpus` runs, in a pool that is too small for all at once."""
    found = []
    for loaded in both:
        slots = 6 * BLOCK_SIZE
        warm = WarmEngine(loaded, slots, max_model_len=64)
        requests = [Request(index, 0.0, 4 + index, 40, GREEDY) for index in range(6)]
        durations = Durations()
        _, scheduler = end_to_end.run(warm, system("vllm"), requests, durations)
        found.append((durations.outputs, scheduler.num_preemptions))
        warm.give_back()
    assert found[0] == found[1] and found[0][1] > 0
