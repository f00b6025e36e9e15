"""The real engine on a GPU: the CPU's tokens, with CUDA graphs, torch.compile, swapping and steps queued ahead."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from test_executor import CONFIGS, SETTINGS, any_kind, assert_greedy, build, on, reference, trace

from repro.engine.clock import WallClock
from repro.engine.loop import Engine
from repro.engine.memory import OpKind
from repro.engine.scheduler import PreemptionMode
from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.kv_store import KVStore
from repro.llm.pool import PoolSize
from repro.llm.sequences import beam_search


def run_at_once(scheduler, executor, requests):
    for request, ids in requests:
        executor.submit(request, ids)
    Engine(scheduler, executor, WallClock()).run(
        [dataclasses.replace(request, arrival_s=0.0) for request, _ in requests]
    )
    executor.flush()
    return {index: [row.tokens for row in state.ranked] for index, state in executor.finished.items()}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate_on_the_cpu_with_and_without_graphs(name, setting):
    """Every system, and vLLM short of memory; `generate` runs on the CPU."""
    model = on("cuda", name)
    requests = trace(0, 8)
    more = [(1, False), (256, True)] if name == "llama" else []
    for block_size, graphs in [(1, True), (16, True), *more]:
        options = SETTINGS[setting] | ({"slots": 3 * block_size} if block_size == 256 else {})
        scheduler, executor = build(name, block_size=block_size, model=model, options={"graphs": graphs}, **options)
        tokens = run_at_once(scheduler, executor, requests)
        for request, ids in requests:
            assert_greedy(name, ids, tokens[request.request_id][0])
        assert bool(executor.runner._captured) is graphs
        if "," in setting and block_size == 1:
            assert scheduler.num_preemptions > 0
        assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "opt", "qwen2"])
def test_graphs_change_no_token(name, dtype):
    model = on("cuda", name, dtype)
    requests = trace(1, 40, longest=20)
    results = [
        run_at_once(*build(name, model=model, slots=4096, options={"graphs": graphs}), requests)
        for graphs in (True, False)
    ]
    assert results[0] == results[1]


def test_graphs_change_no_token_of_any_kind_of_request_where_memory_is_short():
    model = on("cuda", "llama")
    requests = trace(6, 40, any_kind)
    options = dict(model=model, slots=96, cpu_slots=1024, preemption=PreemptionMode.SWAP)
    results = []
    for graphs in (True, False):
        scheduler, executor = build("llama", options={"graphs": graphs}, **options)
        results.append(run_at_once(scheduler, executor, requests))
        assert scheduler.num_preemptions > 0 and executor.store.blocks_moved[OpKind.SWAP_IN] > 0
    on_the_cpu = run_at_once(*build("llama", slots=4096), requests)
    assert results[0] == results[1] == on_the_cpu


def test_compiled_layers_change_no_token():
    name = "qwen3"
    requests = trace(2, 12)
    scheduler, executor = build(name, model=on("cuda", name), options={"compiled": True})
    tokens = run_at_once(scheduler, executor, requests)
    for request, ids in requests:
        assert_greedy(name, ids, tokens[request.request_id][0])


@pytest.mark.parametrize("preemption", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preemption_changes_no_token_of_any_kind_of_request(preemption):
    model = on("cuda", "llama")
    requests = trace(3, 40, any_kind)
    plenty = run_at_once(*build("llama", model=model, slots=4096), requests)
    scheduler, executor = build("llama", model=model, slots=96, cpu_slots=1024, preemption=preemption)
    assert run_at_once(scheduler, executor, requests) == plenty
    assert scheduler.num_preemptions > 0


def test_beams_are_the_same_as_on_the_cpu():
    requests = trace(4, 8, lambda rng, output: SamplingParams(n=3, use_beam_search=True, max_tokens=output))
    assert run_at_once(*build("opt", model=on("cuda", "opt")), requests) == run_at_once(*build("opt"), requests)


def test_a_pool_that_does_not_fit_is_refused():
    model = on("cuda", "opt")
    with pytest.raises(UserError, match="does not fit"):
        KVStore(model.config, 1 << 38, 16, 0, torch.float32, torch.device("cuda"))
    assert run_at_once(*build("opt", model=model), trace(5, 2))


def test_running_out_of_memory_is_one_clear_message_and_the_engine_stays_usable():
    shape = CONFIGS["llama"].to_dict() | {"vocab_size": 200_000}  # logits of 64 prompts: 51 MB
    model = models.from_config(transformers.LlamaConfig(**shape), "wide", "cuda", "float32")
    llm = LLM(model, pool=PoolSize(kv_slots=4096), quiet=True)
    prompts, params = [[7, index] for index in range(64)], SamplingParams(temperature=0, max_tokens=4)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(UserError, match="out of GPU memory in an iteration of .* smaller K/V pool"):
            llm.generate(prompts, params, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = [one.token_ids for one in llm.generate(prompts, params, progress=False)]
    fresh = LLM(model, pool=PoolSize(kv_slots=4096), quiet=True)
    assert after == [one.token_ids for one in fresh.generate(prompts, params, progress=False)]


def test_a_model_larger_than_the_gpu_is_refused_before_it_is_made():
    with pytest.raises(UserError, match="'opt-175b' in float32 does not fit: it takes 6"):
        models.load("opt-175b", "cuda", "float32")


def test_penalties_log_probabilities_and_stops_are_those_of_the_cpu_with_and_without_graphs():
    """In one batch with plain requests, which keep their tokens; float32, so that the devices' tokens are equal."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=8, stop_token_ids=range(0, 101, 3), prompt_logprobs=2),
        SamplingParams(n=3, use_beam_search=True, max_tokens=12, stop_token_ids=range(1, 101, 4), logprobs=2),
        SamplingParams(temperature=0, max_tokens=12, presence_penalty=-1.0, prompt_logprobs=0),
    ]
    prompts = [[5, 6, 7, 8, 9 + place] for place in range(10)]
    found = []
    for device, graphs in (("cpu", False), ("cuda", False), ("cuda", True)):
        llm = LLM(on(device, "llama"), block_size=4, pool=PoolSize(num_blocks=300), graphs=graphs, quiet=True)
        made = llm.generate(prompts, kinds * 2, progress=False)
        plain = llm.generate(prompts[1::5], kinds[1], progress=False)
        assert [one.token_ids for one in plain] == [one.token_ids for one in made][1::5]
        found.append(made)
    for made in found[1:]:
        for ours, theirs in zip(made, found[0], strict=True):
            assert ours.token_ids == theirs.token_ids
            pairs = [(ours.prompt_logprobs or [], theirs.prompt_logprobs or [])]
            pairs += [(a.best_logprobs or [], b.best_logprobs or []) for a, b in zip(ours.samples, theirs.samples)]
            for one, other in (pair for both in pairs for pair in zip(*both, strict=True)):
                assert one == other or one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("graphs", [True, False])
def test_fork_append_and_free_give_the_cpus_log_probabilities(graphs):
    made = LLM(on("cuda", "qwen2"), block_size=4, pool=PoolSize(num_blocks=60), graphs=graphs, quiet=True)
    with made.decoding() as decoding:
        root = decoding.start([5, 6, 7, 8, 9, 10])
        decoding.step()
        others = [root.fork(), root.fork()]
        for one, token in zip(others, (11, 12)):
            one.append(token)
        late = decoding.start([1, 2, 3])
        decoding.step()  # two single tokens and a prompt
        for _ in range(3):
            for one in (*others, late):
                one.append(int(one.logprobs.argmax()))
            decoding.step()
        others.append(others[0].fork())
        others[0].free()
        others[2].append(40), others[2].append(41)
        decoding.step()
        for one in (root, *others[1:], late):
            with torch.no_grad():
                logits = reference("qwen2")(input_ids=torch.tensor([one.token_ids]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(one.logprobs.cpu(), logits.log_softmax(-1), atol=1e-3, rtol=1e-3)
        found = beam_search(decoding, [1, 2, 3], 3, 8)
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=8, ignore_eos=True)
    assert [ids for ids, _ in found] == made.generate([[1, 2, 3]], params, progress=False)[0].token_ids
