"""The real engine on a GPU: the CPU's tokens, with CUDA graphs, torch.compile, swapping and steps queued
ahead."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from test_executor_torch import CONFIGS, SETTINGS, any_kind, assert_greedy, build, on, trace

from repro.engine import Engine, WallClock
from repro.scheduler import PreemptionMode
from repro.sequence import SamplingParams


def run_at_once(scheduler, executor, requests):
    for request, ids in requests:
        executor.submit(request, ids)
    Engine(scheduler, executor, WallClock()).run(
        [dataclasses.replace(request, arrival_s=0.0) for request, _ in requests]
    )
    executor.flush()
    return {index: [row.tokens for row in state.ranked] for index, state in executor.finished.items()}


@pytest.mark.parametrize(
    "name, setting", [(name, "vllm") for name in CONFIGS] + [("llama", setting) for setting in SETTINGS]
)
def test_greedy_tokens_are_those_of_generate(name, setting):
    model = on("cuda", name)
    for block_size in (1, 16):
        scheduler, executor = build(name, block_size=block_size, model=model, **SETTINGS[setting])
        requests = trace(0, 8)
        tokens = run_at_once(scheduler, executor, requests)
        for request, ids in requests:
            assert_greedy(name, ids, tokens[request.request_id][0])
        assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_graphs_change_no_token(dtype):
    model = on("cuda", "llama", dtype)
    requests = trace(1, 40, longest=20)
    results = [
        run_at_once(*build("llama", model=model, slots=4096, options={"graphs": graphs}), requests)
        for graphs in (True, False)
    ]
    assert results[0] == results[1]


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
    assert run_at_once(*build("opt", model=on("cuda", "opt")), requests) == run_at_once(
        *build("opt"), requests
    )


def test_running_out_of_memory_is_one_clear_message():
    from repro.errors import UserError
    from repro.executor.torch.kv_store import KVStore

    model = on("cuda", "opt")
    with pytest.raises(UserError, match="does not fit"):
        KVStore(model.config, 1 << 38, 16, 0, torch.float32, torch.device("cuda"))
    assert run_at_once(*build("opt", model=model), trace(5, 2))
