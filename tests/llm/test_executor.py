"""The real engine on a CPU, token for token against transformers' own generate, on tiny random models."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from repro.engine.clock import VirtualClock
from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine
from repro.engine.scheduler import PreemptionMode, Scheduler
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import system
from repro.llm import models
from repro.llm.executor import TorchExecutor
from repro.llm.kv_store import KVStore
from repro.llm.state import SequenceState
from repro.simulate.executor import SimulatedExecutor

VOCABULARY = 101
MAX_LEN = 64
SHAPE = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=MAX_LEN,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
# Weights larger than usual, so that the tokens vary and the top two are far apart.
CONFIGS = {
    "opt": transformers.OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3),
    "opt-post-norm": transformers.OPTConfig(
        **SHAPE, ffn_dim=64, word_embed_proj_dim=16, init_std=0.3, do_layer_norm_before=False
    ),
    "llama": transformers.LlamaConfig(**SHAPE, intermediate_size=48, initializer_range=0.3),
    "qwen2": transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, intermediate_size=48, initializer_range=0.3),
    "qwen3": transformers.Qwen3Config(
        **SHAPE, num_key_value_heads=1, head_dim=16, intermediate_size=48, initializer_range=0.3
    ),
}
# Queries, keys and values from one projection, positions that are learned or rotary.
FUSED = {
    "gpt2": transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=MAX_LEN,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt-neox": transformers.GPTNeoXConfig(**SHAPE, intermediate_size=48, initializer_range=0.3),
    "phi3": transformers.Phi3Config(**SHAPE, intermediate_size=48, initializer_range=0.3),
}
GREEDY = dict(temperature=0.0, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def loaded(name: str) -> models.LoadedModel:
    return models.from_config((CONFIGS | FUSED)[name], name)


def on(device: str, name: str, dtype: torch.dtype = torch.float32) -> models.LoadedModel:
    """The same weights on another device."""
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[name]), dtype=dtype, attn_implementation=models.IMPLEMENTATION
    )
    model.load_state_dict(loaded(name).model.state_dict())
    return dataclasses.replace(loaded(name), model=model.eval().requires_grad_(False).to(device))


@functools.cache
def reference(name: str):
    """The same weights in an untouched transformers model."""
    model = transformers.AutoModelForCausalLM.from_config(
        (CONFIGS | FUSED)[name], dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(loaded(name).model.state_dict())
    return model.eval()


@functools.cache
def generated(name: str, prompt: tuple[int, ...], count: int, **options):
    ids = torch.tensor([prompt])
    return reference(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        return_dict_in_generate=True,
        output_logits=True,
        use_cache=True,
        **options,
    )


def assert_greedy(name: str, prompt: tuple[int, ...], tokens: list[int]) -> None:
    """Equal to generate, unless generate itself was undecided (its two best logits within 1e-4)."""
    result = generated(name, prompt, len(tokens))
    expected = result.sequences[0, len(prompt) :].tolist()
    if tokens != expected:
        step = next(i for i, (ours, theirs) in enumerate(zip(tokens, expected)) if ours != theirs)
        best = result.logits[step][0].topk(2).values
        print(f"{name}: undecided at step {step} after {prompt}")
        assert best[0] - best[1] < 1e-4, (step, tokens, expected)


class StepTimes:
    """Made-up step times that depend on the batch."""

    def step_times(self, output):
        context = output.context_tokens
        while True:
            yield 1.0 + 0.01 * output.num_decode_seqs + 0.002 * context + 0.01 * output.num_prefill_tokens
            context += output.num_decode_seqs


class Timed(Executor):
    """The real executor with the simulated one's step times, so that arrivals fall where they fall in simulation."""

    def __init__(self, real: TorchExecutor) -> None:
        self.real, self.simulated = real, SimulatedExecutor(StepTimes())

    def lookahead(self, output, now_s, until_s):
        return self.simulated.lookahead(output, now_s, until_s)

    def execute(self, output) -> StepResult:
        return dataclasses.replace(self.real.execute(output), durations_s=self.simulated.execute(output).durations_s)


class Stepwise(Timed):
    def lookahead(self, output, now_s, until_s):
        return 1


def build(name: str, *, setting="vllm", block_size=4, slots=256, cpu_slots=0, model=None, options=None, **scheduler):
    """(scheduler, executor) with NaN in every slot of the pools: reading one that was not written shows."""
    chosen = system(setting).with_scheduler(**scheduler)
    manager = chosen.manager(slots // block_size, block_size, MAX_LEN, cpu_slots // block_size)
    model = model or loaded(name)
    store = KVStore(model.config, manager.num_blocks, block_size, cpu_slots // block_size, model.dtype, model.device)
    for cache in store.caches + store.cpu_caches:
        cache.fill_(float("nan"))
    return Scheduler(manager, chosen.scheduler, log=[]), TorchExecutor(model, manager, store, **options or {})


def trace(
    seed: int, count: int, params=lambda rng, output: SamplingParams(max_tokens=output, **GREEDY), longest=12, pace=1.5
) -> list[tuple[Request, tuple[int, ...]]]:
    rng = np.random.default_rng(seed)
    arrival, requests = 0.0, []
    for index in range(count):
        prompt, output = int(rng.integers(1, longest)), int(rng.integers(1, longest))
        ids = tuple(rng.integers(0, VOCABULARY, prompt).tolist())
        requests.append((Request(index, arrival, prompt, output, params(rng, output)), ids))
        arrival += float(rng.exponential(pace))
    return requests


def run(scheduler: Scheduler, executor: TorchExecutor, requests, wrap=Timed) -> dict[int, list[list[int]]]:
    for request, ids in requests:
        executor.submit(request, ids)
    Engine(scheduler, wrap(executor), VirtualClock()).run([request for request, _ in requests])
    executor.flush()
    return {index: [row.tokens for row in state.ranked] for index, state in executor.finished.items()}


SETTINGS = {
    "vllm": dict(setting="vllm"),
    "vllm, swap": dict(setting="vllm", slots=32, cpu_slots=512, preemption=PreemptionMode.SWAP),
    "vllm, recompute": dict(setting="vllm", slots=32, preemption=PreemptionMode.RECOMPUTE),
    "orca-oracle": dict(setting="orca-oracle"),
    "orca-pow2": dict(setting="orca-pow2"),
    "orca-max": dict(setting="orca-max"),
    "faster-transformer": dict(setting="faster-transformer", max_num_seqs=3),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name, block_size, setting):
    options = SETTINGS[setting] | ({"slots": 3 * block_size} if block_size == 256 else {})
    for seed in (0, 1):  # two orders of arrival
        scheduler, executor = build(name, block_size=block_size, **options)
        requests = trace(seed, 8)
        tokens = run(scheduler, executor, requests)
        for request, ids in requests:
            assert_greedy(name, ids, tokens[request.request_id][0])
        if "," in setting and block_size < 16:
            assert scheduler.num_preemptions > 0
        assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


@pytest.mark.parametrize("name", FUSED)
def test_models_with_fused_projections_run_too(name):
    requests = trace(0, 8)
    tokens = run(*build(name), requests)
    for request, ids in requests:
        assert_greedy(name, ids, tokens[request.request_id][0])


@pytest.mark.parametrize("setting", ["vllm", "vllm, swap", "orca-oracle"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_beam_search_is_that_of_transformers(name, width, setting):
    options = SETTINGS[setting] | {"slots": 512 if setting != "vllm, swap" else 28 * width}
    scheduler, executor = build(name, **options)
    requests = trace(
        2, 10, lambda rng, output: SamplingParams(n=width, use_beam_search=True, max_tokens=output), pace=0.1
    )
    tokens = run(scheduler, executor, requests)
    forks = sum(event.kind == "fork" for event in scheduler._log)
    assert forks > 0 and (setting != "vllm, swap" or scheduler.num_preemptions > 0)
    for request, ids in requests:
        result = generated(
            name, ids, request.output_tokens, num_beams=width, num_return_sequences=width, output_scores=True
        )
        assert tokens[request.request_id] == result.sequences[:, len(ids) :].tolist()
        state = executor.finished[request.request_id]
        scores = [row.cumulative_logprob / len(row.tokens) for row in state.ranked]
        assert scores == pytest.approx(result.sequences_scores.tolist(), abs=1e-5)


def any_kind(rng, output: int) -> SamplingParams:
    kind = rng.integers(5)
    if kind == 0:
        return SamplingParams(max_tokens=output, **GREEDY)
    if kind == 1:
        return SamplingParams(n=int(rng.integers(2, 5)), use_beam_search=True, max_tokens=output)
    return SamplingParams(
        n=int(rng.integers(1, 4)),
        temperature=float(rng.uniform(0.5, 1.5)),
        seed=int(rng.integers(100)),
        top_k=int(rng.integers(0, 20)),
        top_p=float(rng.uniform(0.5, 1)),
        max_tokens=output,
        ignore_eos=True,
    )


@pytest.mark.parametrize("setting", ["vllm", "vllm, swap", "orca-max"])
def test_tokens_of_a_mixed_batch_are_those_that_each_request_gets_alone(setting):
    options = SETTINGS[setting] | {"slots": 1024 if setting != "vllm, swap" else 80}
    requests = trace(3, 16, any_kind)
    scheduler, executor = build("llama", **options)
    together = run(scheduler, executor, requests)
    assert max(len(state.sequences) for state in executor.finished.values()) > 1
    assert setting != "vllm, swap" or scheduler.num_preemptions > 0
    for request, ids in requests:
        alone = run(*build("llama", **options), [(dataclasses.replace(request, arrival_s=0.0), ids)])
        assert alone[request.request_id] == together[request.request_id]


def test_recomputed_samples_that_have_diverged_keep_their_tokens():
    requests = trace(4, 10, lambda rng, output: SamplingParams(n=3, seed=7, max_tokens=output, ignore_eos=True))
    plenty = run(*build("llama", slots=1024), requests)
    scheduler, executor = build("llama", slots=72, preemption=PreemptionMode.RECOMPUTE)
    assert run(scheduler, executor, requests) == plenty
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_simulated_and_real_executor_make_the_same_decisions(setting):
    requests = trace(
        5,
        24,
        lambda rng, output: SamplingParams(
            n=int(rng.integers(1, 3)), temperature=0.7, seed=1, max_tokens=output, ignore_eos=True
        ),
    )
    options = SETTINGS[setting] | ({"slots": 64} if "," in setting else {})
    scheduler, executor = build("opt", **options)
    run(scheduler, executor, requests)
    simulated, _ = build("opt", **options)
    Engine(simulated, SimulatedExecutor(StepTimes()), VirtualClock()).run([request for request, _ in requests])
    assert scheduler._log == simulated._log
    assert {event.kind for event in simulated._log} >= {"arrive", "admit", "finish"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_queueing_a_step_ahead_changes_no_token(setting):
    requests = trace(6, 16, pace=0.2)
    scheduler, executor = build("llama", **SETTINGS[setting])
    expected = run(scheduler, executor, requests, wrap=Stepwise)
    for wrap in (Timed, Stepwise):
        scheduler, executor = build("llama", **SETTINGS[setting])
        executor.queues_ahead = True
        assert run(scheduler, executor, requests, wrap) == expected


def test_iterations_run_together_are_those_run_one_by_one():
    requests = trace(6, 6)
    assert run(*build("llama"), requests) == run(*build("llama"), requests, wrap=Stepwise)


@pytest.mark.parametrize("setting", ["vllm", "orca-pow2", "faster-transformer"])
def test_a_stop_token_ends_a_sequence_where_generate_ends_it(setting):
    model = dataclasses.replace(loaded("qwen2"), eos=frozenset(range(7, VOCABULARY, 10)))
    requests = [
        (dataclasses.replace(request, output_tokens=20, sampling=SamplingParams(temperature=0.0, max_tokens=20)), ids)
        for request, ids in trace(7, 30)
    ]
    scheduler, executor = build("qwen2", model=model, slots=2048, setting=setting)
    tokens = run(scheduler, executor, requests, wrap=Stepwise)
    stopped = 0
    for request, ids in requests:
        full = generated("qwen2", ids, 20).sequences[0, len(ids) :].tolist()
        expected = full[: next((i for i, token in enumerate(full) if token in model.eos), len(full)) + 1]
        assert tokens[request.request_id] == [expected]
        stopped += executor.finished[request.request_id].sequences[0].stopped
    assert 0 < stopped < 30
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


def test_parallel_samples_stop_one_by_one():
    model = dataclasses.replace(loaded("llama"), eos=frozenset(range(0, VOCABULARY, 8)))
    request = Request(0, 0.0, 3, 30, SamplingParams(n=6, seed=5, max_tokens=30))
    scheduler, executor = build("llama", model=model)
    [samples] = run(scheduler, executor, [(request, (5, 6, 7))], wrap=Stepwise).values()
    assert len({len(sample) for sample in samples}) > 1
    for sample in samples:
        assert all(token % 8 for token in sample[:-1]) and (sample[-1] % 8 == 0 or len(sample) == 30)
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


def test_a_shared_prefix_is_computed_once_and_changes_no_token():
    prefix = tuple(range(40, 51))
    requests = [
        (dataclasses.replace(request, prompt_tokens=len(ids) + 11, prefix_id="p"), prefix + ids)
        for request, ids in trace(8, 6)
    ]
    scheduler, executor = build("qwen2")
    assert executor.store_prefix("p", prefix) == 8  # whole blocks of 4
    tokens = run(scheduler, executor, requests)
    for request, ids in requests:
        assert_greedy("qwen2", ids, tokens[request.request_id][0])
    computed = [event.detail["tokens"] for event in scheduler._log if event.kind == "admit"]
    assert computed == [request.prompt_tokens - 8 for request, _ in requests]


def test_nothing_leaks_over_10000_requests_of_all_kinds():
    def things() -> int:
        scheduler._log.clear()
        executor.finished.clear()
        gc.collect()
        return len(gc.get_objects())

    def sequences() -> int:
        gc.collect()
        return sum(type(thing) is SequenceState for thing in gc.get_objects())

    before = sequences()  # other tests of this process may hold some of their own
    # What is remembered of a request does not depend on the layers; a full pool makes batches large and still preempts.
    shallow = copy.deepcopy(CONFIGS["opt"])
    shallow.num_hidden_layers = 1
    model = models.from_config(shallow, "one layer")
    scheduler, executor = build("opt", slots=240, cpu_slots=512, model=model)
    counts = []
    for seed, count in ((10, 1000), (9, 9000)):
        requests = trace(seed, count, any_kind, longest=8, pace=0.1)
        assert len(run(scheduler, executor, requests)) == count
        del requests
        counts.append(things())
        assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks
        assert scheduler.manager.cpu.num_free == scheduler.manager.cpu.num_blocks
    assert scheduler.num_preemptions > 1000
    assert counts[1] - counts[0] < 300, counts  # nine times the requests, and nothing more is remembered
    # What is left of requests belongs to the last iterations.
    assert sequences() - before <= 8
