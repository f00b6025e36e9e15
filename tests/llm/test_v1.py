"""Today's scheduler on the real engine: chunks over paged context, a prefix cache, samples as requests of their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import llm, tokens

from repro.engine.loop import Observer
from repro.engine.memory import OpKind
from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.errors import UserError
from repro.llm.definition import generate
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=12)
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 101, size).tolist() for size in (5, 2, 20, 33, 1, 20, 9, 40)]
PROMPTS[5] = PROMPTS[2]  # found, where there is a cache
PROMPTS[7] = PROMPTS[3] + PROMPTS[7][:7]
PLAIN = system("vllm-v1").__class__("plain", "V1 without its cache", system("vllm-v1").scheduler, watermark=0.0)


class Cuts(Observer):
    """What was cut, and how many prompts were under way at once."""

    next_s = 0.0

    def __init__(self):
        self.chunks = self.most = self.driven_out = 0

    def observe(self, engine, output, start_s):
        self.chunks += len(output.chunks)
        self.most = max(self.most, len(engine.scheduler.prefilling))
        self.driven_out += sum(not victim.generated_before for victim in output.preempted)
        assert output.num_decode_seqs + output.num_prefill_tokens <= engine.scheduler.config.max_num_batched_tokens


@pytest.fixture(scope="module")
def expected(tiny):
    return reference(tiny, PROMPTS)


def reference(tiny, prompts):
    """Twelve greedy tokens for each prompt, from transformers' generate."""
    return [[ids] for ids in generate(tiny, prompts, 12)[0]]


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("budget", [4, 5, 16, 64, 512, 2048])
@pytest.mark.parametrize("num_blocks", [200, 14], ids=["roomy", "scarce"])
def test_greedy_tokens_are_those_of_generate_for_any_budget(tiny, expected, budget, caching, num_blocks):
    engine = llm(
        tiny,
        system="vllm-v1" if caching else PLAIN,
        pool=PoolSize(num_blocks=num_blocks),
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    )
    cuts = Cuts()
    made = engine.generate(PROMPTS, GREEDY, progress=False, observers=[cuts])
    assert [one.token_ids for one in made] == expected
    assert cuts.chunks > 0 if budget < 64 else budget == 64 or not cuts.chunks
    if num_blocks == 200 or budget > 5:  # on so small a budget few run at once
        assert (made.statistics.num_preemptions > 0) is (num_blocks == 14)
        assert (made.statistics.prompt_tokens_found > 0) is caching
    again = engine.generate(PROMPTS, GREEDY, progress=False)
    assert [one.token_ids for one in again] == expected
    if caching and num_blocks == 200:  # what the first call has computed is found
        assert again.statistics.prompt_tokens_found > made.statistics.prompt_tokens_found


def test_several_prompts_are_under_way_and_one_is_driven_out_in_its_midst(tiny, expected):
    options = {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 5, "max_num_seqs": 4}
    engine, cuts = llm(tiny, system=PLAIN, pool=PoolSize(num_blocks=14), **options), Cuts()
    assert tokens(engine, PROMPTS, GREEDY, observers=[cuts]) == expected
    assert cuts.most > 2 and cuts.driven_out > 0


def test_decisions_do_not_depend_on_what_was_cached_in_another_process(tiny):
    """Two engines of one model decide event for event alike."""
    first, second = (llm(tiny, system="vllm-v1", max_num_batched_tokens=16, max_num_seqs=4) for _ in range(2))
    logs = [engine.generate(PROMPTS, GREEDY, progress=False).events for engine in (first, second)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("budget", [8, 2048])
def test_n_samples_two_ways_give_the_same_tokens(tiny, budget):
    """2023's group with copy-on-write, and n requests over the prefix cache: other blocks, same samples."""
    several = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=12)
    engine = llm(tiny, system="vllm-v1", max_num_batched_tokens=budget, max_num_seqs=8)
    apart = [*PROMPTS[:5], PROMPTS[6]]  # nothing is alike but the samples of a prompt
    today, then = (one.generate(apart, several, progress=False) for one in (engine, llm(tiny)))
    assert [one.token_ids for one in today] == [one.token_ids for one in then]
    assert then.statistics.blocks_copied > 0 == today.statistics.blocks_copied
    prompts = sum(map(len, apart))
    assert then.statistics.prompt_tokens_computed == prompts
    twice = today.statistics.prompt_tokens_computed - prompts
    assert twice + today.statistics.prompt_tokens_found == 2 * prompts and twice > 0
    assert [len(one.samples) for one in today] == [3] * len(apart)
    outcome = today[3].outcome
    assert outcome.request.sampling.n == 3 and 0 < outcome.first_token_s <= outcome.finish_s


def test_settings_of_a_request_work_on_chunks(tiny):
    asked = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.7, top_k=7, top_p=0.9, seed=3, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[17, 40, 63], min_tokens=2),
    ] * 2
    results = [
        llm(tiny, **options).generate(PROMPTS, asked, progress=False)
        for options in ({}, {"system": "vllm-v1", "max_num_batched_tokens": 7, "max_num_seqs": 3})
    ]
    for one, other in zip(*results):
        assert one.token_ids == other.token_ids
        for sample, twin in zip(one.samples, other.samples):
            assert sample.logprobs == pytest.approx(twin.logprobs, abs=1e-4)
            assert sample.stop_reason == twin.stop_reason
        for found, wanted in zip(one.prompt_logprobs or [], other.prompt_logprobs or []):
            assert (found is None) is (wanted is None)
            assert found is None or found == pytest.approx(wanted, abs=1e-4)


def test_a_prefix_is_found_and_forgotten(tiny):
    engine, prefix = llm(tiny, system="vllm-v1"), list(range(10, 31))
    shared = engine.generate(PROMPTS[:3], GREEDY, prefix=prefix, progress=False)
    assert shared.statistics.prompt_tokens_found == 2 * 20
    assert [one.token_ids for one in shared] == reference(tiny, [prefix + prompt for prompt in PROMPTS[:3]])
    assert engine.generate([prefix], GREEDY, progress=False).statistics.prompt_tokens_found == 20
    engine.reset_prefix_cache()
    assert engine.generate([prefix], GREEDY, progress=False).statistics.prompt_tokens_found == 0


def test_a_call_that_fails_leaves_no_block_behind(tiny):
    class Stops(Observer):
        def observe(self, engine, output, start_s):
            raise KeyboardInterrupt

    engine = llm(tiny, system="vllm-v1")
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, progress=False, observers=[Stops()])
    made = engine.generate(PROMPTS, GREEDY, progress=False)
    assert made.statistics.prompt_tokens_found == 16 + 32 and engine._cache.num_free_blocks == 200


def test_a_full_hit_still_computes_the_last_token(tiny):
    engine = llm(tiny, system="vllm-v1")
    prompt = PROMPTS[2]  # five whole blocks
    for found in (0, 16, 16):
        made = engine.generate([prompt], GREEDY, progress=False)
        assert made.statistics.prompt_tokens_found == found
        assert made.statistics.prompt_tokens_computed == 20 - found
        assert [made[0].token_ids] == reference(tiny, [prompt])


def test_priorities_order_the_queue(tiny):
    engine = llm(tiny, order="priority", max_num_seqs=1)
    made = engine.generate(PROMPTS[:4], GREEDY, priority=[3, 1, 2, 0], progress=False)
    assert [event.request_id for event in made.events if event.kind == "admit"] == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: e.generate([[1]], SamplingParams(n=2, use_beam_search=True)), "chunked prefill does not know"),
        (lambda e: e.generate([[1]], priority=[1, 2]), "1 sampling parameters, 1 arrival times and 2 priorities"),
        (lambda e: e.generate([[1]], priority=["high"]), "one of priority = 'high' must be a whole number"),
        (lambda e: e.generate([[1]], status_every_s=0), "status_every_s = 0 must be a finite number above 0"),
        (lambda e: e.generate([[1] * 60], GREEDY), "60 + 12 tokens exceed the 64"),
    ],
)
def test_what_cannot_be_is_refused(tiny, call, said):
    with pytest.raises(UserError) as error:
        call(llm(tiny, system="vllm-v1"))
    assert said in str(error.value)


def test_swapping_and_a_prefix_cache_together(tiny, expected):
    """The paper's scheduler over a prefix cache: groups of several sequences swap all of their blocks."""
    cached = system("vllm").__class__("cached", "cached", system("vllm").scheduler, prefix_caching=True)
    engine = llm(tiny, system=cached, pool=PoolSize(num_blocks=20), preemption="swap", max_num_seqs=6)
    made = engine.generate(PROMPTS, GREEDY, progress=False)
    assert [one.token_ids for one in made] == expected
    assert made.statistics.blocks_swapped_out > 0 < made.statistics.prompt_tokens_found
    assert engine.executor.store.blocks_moved[OpKind.SWAP_IN] == made.statistics.blocks_swapped_out


def test_what_an_operator_reads(tiny, capsys):
    engine = llm(tiny, system="vllm-v1", pool=PoolSize(num_blocks=14), max_num_seqs=4)
    engine.generate(PROMPTS, GREEDY, progress=False, status_every_s=1e-6)
    lines = capsys.readouterr().out.splitlines()
    (first,) = [line for line in lines if "is driven out" in line]
    after = list(itertools.dropwhile(lambda line: line is not first, lines))[1:]
    assert "since the K/V cache is full" in first and all("Preemptions: 0" not in line for line in after)
    for part in ("Running: ", "Waiting: ", "KV cache usage: ", "% of slots hold a token", "Prefix cache hit rate: "):
        assert part in after[-1]


def test_why_a_prompt_was_not_found(tiny):
    """The demo: a time stamp in front of the prompt defeats the cache, behind it nothing is lost."""
    engine, system_prompt = llm(tiny, system="vllm-v1"), list(range(20, 44))
    asked = [[*system_prompt, 1, 2], [*system_prompt, 3, 4], [7, *system_prompt], [8, *system_prompt], system_prompt]
    missed = [one.missed for one in engine.generate(asked, GREEDY, progress=False)]
    assert [(one.found, one.parted_at) for one in missed] == [(0, 0), (24, 24), (0, 0), (0, 0), (20, None)]
    assert str(missed[3]) == "0 of 25 prompt tokens found; token 0 is the first that no earlier prompt had there"
    later = engine.generate([asked[1], [9, *system_prompt]], GREEDY, progress=False)
    assert [(one.missed.found, one.missed.parted_at) for one in later] == [(24, None), (0, 0)]
    assert llm(tiny).generate(asked[:1], GREEDY, progress=False)[0].missed is None


def test_what_evicted_the_rest_is_named(tiny):
    engine = llm(tiny, system="vllm-v1", pool=PoolSize(num_blocks=14), max_num_seqs=1)
    first, other = list(range(24)), [50, *range(24, 60)]
    made = engine.generate([first, other, first], GREEDY, progress=False)
    missed = made[2].missed
    assert missed.evicted_by == (1,) and missed.evicted > 0 and missed.found + missed.evicted == 24
    assert missed.parted_at is None and "more had been there and were evicted for request 1" in str(missed)
    again = engine.generate([other], GREEDY, progress=False)[0].missed
    assert set(again.evicted_by) <= {None} and again.found + again.evicted <= 36
