"""The real engine, set up for measuring, with a tiny model on the CPU: it decides as the simulator, counts as a
prediction, and its step times make a table."""

import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_load import MAX_LEN, OneByOne, constant

from repro.engine.clock import VirtualClock
from repro.engine.config import DEVICES, MODELS, Deployment
from repro.engine.loop import Engine, Observer
from repro.engine.systems import SYSTEMS
from repro.errors import UserError
from repro.simulate import load
from repro.simulate.load import Load, predict
from repro.simulate.metrics import PIECES
from repro.simulate.step_times import StepTimes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from repro.bench.serving import calibrate, client, generate, warm_engine  # noqa: E402
from repro.bench.serving.warm_engine import Durations, IdleClock, WarmEngine  # noqa: E402
from repro.llm import models  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.heavy(40)]


def tiny():
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )
    return models.from_config(config, "tiny")


@pytest.fixture(scope="module")
def warm():
    return WarmEngine(tiny(), 2048, "cpu", "float32", MAX_LEN)


def serve_all(engine, batch):
    outcomes = engine.run(batch)
    assert len(outcomes) == len(batch) and all(outcome.finish_s > 0 for outcome in outcomes)


class Saving(Observer):
    """Blocks of the pool that are used after each iteration, and those that its sequences refer to."""

    def __init__(self):
        self.seen = []

    def observe(self, engine, output, start_s):
        usage = engine.scheduler.manager.usage(engine.scheduler.stored_lengths(output.iteration))
        self.seen.append((usage.physical_blocks, usage.logical_blocks))


@pytest.mark.parametrize(
    "changes",
    [
        *({"system": name} for name in SYSTEMS),
        {"n": 3},
        {"n": 2, "beams": True},
        {"n": 6, "beams": True, "system": "orca-oracle"},
        {"n": 4, "beams": True, "preemption": "swap"},
        {"n": 4, "beams": True, "preemption": "recompute"},
        {"block_size": 64, "preemption": "swap"},
        {"block_size": 1, "preemption": "recompute"},
        {"workload": "translation", "prefix_tokens": 80},
        {"workload": "translation", "prefix_tokens": 80, "system": "orca-oracle"},
        *({"system": "vllm-v1", "budget": budget} for budget in (16, 64, 512, 2048)),
        {"system": "vllm-v1", "n": 3},
        {"system": "vllm-v1", "preemption": "recompute"},  # what was driven out finds its own blocks again
        {"prefix_cache": True, "preemption": "swap"},
        {"workload": "translation", "prefix_tokens": 80, "prefix_cache": True},
        {"system": "vllm-v1", "workload": "translation", "prefix_tokens": 80},
    ],
    ids=str,
)
def test_the_real_engine_decides_as_the_simulator_and_every_output_is_as_long_as_the_trace_says(warm, changes):
    """All requests are there at the start, so no decision depends on time: step for step the same batches and
    blocks."""
    asked = Load(
        **{"system": "vllm", "workload": "alpaca", "rate": None, "warm_s": 0.0, "stop_s": 1.0, "max_model_len": MAX_LEN}
        | changes
    )
    scarce = asked.preemption or (asked.budget or 0) > 16  # few run at once on 16 tokens an iteration
    few, seen = slice((160 if scarce else 40) // asked.n), []
    for real in (True, False):
        watched, blocks = Durations(), Saving()
        if real:
            manager, batch = warm.prepare(asked)
        else:
            manager, batch = asked.manager_on(warm.deployment), asked.requests
            if asked.stored_prefix_tokens:
                manager.store_prefix(load.PREFIX, asked.stored_prefix_tokens)
        log = []
        scheduler = asked.system_on(warm.deployment).decide(manager, log)
        executor = warm.executor if real else OneByOne(constant(0.01), asked.parents)
        serve_all(Engine(scheduler, executor, IdleClock() if real else VirtualClock(), [watched, blocks]), batch[few])
        warm.executor.flush()
        seen.append((watched.outputs, blocks.seen, scheduler.num_preemptions, log))
    assert seen[0] == seen[1] and len(seen[0][0]) > 40
    assert seen[0][2] > 0 or not scarce
    finished = warm.executor.finished
    assert {key: [len(one.tokens) for one in state.sequences] for key, state in finished.items()} == {
        request.request_id: [request.output_tokens] * (asked.n // asked.requests_a_prompt) for request in batch[few]
    }


@pytest.mark.parametrize("rate", [None, 40.0])
def test_a_measured_row_has_what_a_prediction_has_and_the_state_of_the_machine(warm, rate):
    asked = Load("vllm", "alpaca", rate, 0.1, 0.5, n=2 if rate is None else 1, max_model_len=MAX_LEN)
    found = warm.measure(asked)
    assert predict(asked, warm.deployment, constant(0.01)).keys() <= found.keys()
    assert found["evidence"] == "measured" and found["device"] == "CPU" and found["wrong_lengths"] == 0
    assert found["tokens_per_s"] > 0 and sum(found[piece] for piece in PIECES) == pytest.approx(1)
    assert found["seconds"] >= 0.4 and found["host_share"] == 0.0 and found["watts"] is None


def test_gaps_and_first_tokens_are_those_that_a_client_sees(warm, monkeypatch):
    """As on a GPU, a step is waited for while the next one is queued: what the host knows comes an iteration later."""
    asked = Load("vllm-v1", "alpaca", 6.0, 0.0, 1.0, max_model_len=MAX_LEN)
    slow, seen = warm.executor._settle, {}
    run = warm_engine.run
    monkeypatch.setattr(warm_engine, "run", lambda *arguments: dict(seen.setdefault("engine", run(*arguments))))
    monkeypatch.setattr(warm.executor, "queues_ahead", True)
    monkeypatch.setattr(warm.executor, "_settle", lambda *arguments: time.sleep(0.01) or slow(*arguments))
    found = warm.measure(asked)
    assert found["first_token_median_s"] > seen["engine"]["first_token_median_s"] + 0.009
    assert found["gap_median_s"] == pytest.approx(seen["engine"]["gap_median_s"], rel=0.3)
    assert found["gap_99_s"] >= found["gap_median_s"] >= 0.01 and found["wrong_lengths"] == 0


def test_tokens_of_finished_members_and_gaps_outside_the_window_do_not_count():
    def batch(*groups):
        rows = [
            SimpleNamespace(first=index, group=SimpleNamespace(request=one)) for index, (one, _) in enumerate(groups)
        ]
        return SimpleNamespace(groups=rows, live=[live for _, live in groups])

    first, second = (SimpleNamespace(request_id=number) for number in (3, 4))
    clock = SimpleNamespace(now=0.0)
    times = client.TokenTimes(clock)
    steps = [
        (1, batch((first, True))),
        (2, batch((first, True), (second, True))),
        (4, batch((first, False), (second, True))),
    ]
    for clock.now, step in steps:
        times.note(step)
    assert times.of_requests() == {3: [1, 2], 4: [2, 4]}
    assert client.gaps(times.of_requests().values(), 0, 9).tolist() == [1, 2]
    assert client.gaps(times.of_requests().values(), 3, 9).tolist() == [2]
    assert client.quantile([3, 1, 2], 0.5) == 2 and client.quantile([], 0.5) is None


def test_a_wrong_length_is_noticed(warm, monkeypatch):
    flush = warm.executor.flush

    def one_more():
        flush()
        next(iter(warm.executor.finished.values())).sequences[0].tokens.append(0)

    monkeypatch.setattr(warm.executor, "flush", one_more)
    assert warm.measure(Load("vllm", "alpaca", None, 0.0, 0.4, max_model_len=MAX_LEN))["wrong_lengths"] == 1


def test_a_host_that_hardly_ever_waits_for_the_gpu_is_the_limit_and_idle_time_is_waiting(warm, monkeypatch):
    monkeypatch.setattr(warm, "on_gpu", True)  # a CPU is never waited for
    monkeypatch.setattr(warm_engine, "subprocess", SimpleNamespace(run=missing, SubprocessError=OSError))
    busy = warm.measure(Load("vllm", "alpaca", None, 0.0, 0.2, max_model_len=MAX_LEN))
    assert busy["mark"] == "client-bound" and busy["host_share"] == 1.0 and busy["sm_mhz"] is None
    idle = warm.measure(Load("vllm", "alpaca", 2.0, 0.0, 1.0, max_model_len=MAX_LEN))
    assert idle["mark"] == "too short" and 0 < idle["host_share"] < 0.9


def missing(*arguments, **options):
    raise FileNotFoundError("nvidia-smi")


def test_the_clock_knows_how_long_there_was_nothing_to_do():
    clock = IdleClock()
    clock.wait_until(0.05)
    time.sleep(0.02)
    clock.wait_until(0.0)
    assert 0.03 < clock.idle_s <= clock.now - 0.02


def test_the_state_of_a_gpu_is_read_or_none(monkeypatch):
    said, asked = SimpleNamespace(stdout="1965, 3201, 59, 657.25\n"), []
    run = lambda command, **options: asked.append(command) or said  # noqa: E731
    monkeypatch.setattr(warm_engine, "subprocess", SimpleNamespace(run=run, SubprocessError=OSError))
    assert warm_engine.gpu_state("0a1b") == {"sm_mhz": 1965.0, "memory_mhz": 3201.0, "celsius": 59.0, "watts": 657.25}
    assert "--id=GPU-0a1b" in asked[0]  # of several GPUs the one that is measured
    said.stdout = "[N/A], 3201, 59, 657.25\n"
    assert set(warm_engine.gpu_state("0a1b").values()) == set(warm_engine.gpu_state(None).values()) == {None}


def test_recomputation_leaves_the_engine_as_it_was(warm):
    before = warm.executor
    found = calibrate.recompute_row(warm, 32)
    assert found["block_size"] == 32 and found["seconds"] > 0 and warm.executor is before
    assert warm.measure(Load("vllm", "alpaca", None, 0.0, 0.1, max_model_len=MAX_LEN))["wrong_lengths"] == 0


def test_the_grid_makes_a_table_and_keeps_to_the_pool(warm, monkeypatch):
    monkeypatch.setattr(calibrate, "CPU_GRID", calibrate.Grid((1, 8, 500), (0, 4, 300), (8, 600), steps=3, cycles=2))
    rows = list(calibrate.cells(warm))
    assert {(row["seqs"], row["prompt_tokens"]) for row in rows} == {(1, 0), (8, 0), (0, 8), (4, 8)}
    for row in rows[:4]:  # two contexts each; the mean over the steps that count
        assert row["seconds"] > 0 and row["context_tokens"] / row["seqs"] > calibrate.SHORT_CONTEXT
    steps = StepTimes.of("here", rows, False)
    assert steps.seqs == (1, 8) and steps.mixed_seqs == (0, 4) and steps.mixed_prompt == (8,)


def test_chunks_over_stored_tokens_are_measured_and_keep_to_the_pool(warm, monkeypatch):
    monkeypatch.setattr(
        calibrate,
        "CPU_GRID",
        calibrate.Grid((1, 8), (0, 4), (8,), 3, 2, chunks=(8, 64, 500), stored=(0, 64, 128, 2000)),
    )
    rows = list(calibrate.chunks(warm))
    expected = [(tokens, stored) for tokens in (8, 64) for stored in (0, 64, 128)]
    assert [(row["prompt_tokens"], row["stored"]) for row in rows] == expected
    assert {row["kind"] for row in rows} == {"chunk"} and all(row["seconds"] > 0 for row in rows)
    steps = StepTimes.of("here", [*calibrate.cells(warm), *rows], False)
    assert steps.per_read_s >= 0
    monkeypatch.setattr(calibrate, "CPU_GRID", replace(calibrate.CPU_GRID, chunks=(500,)))
    with pytest.raises(UserError, match="a chunk of 500 over 64 needs more; use a larger pool"):
        list(calibrate.chunks(warm))


@pytest.mark.parametrize("slots", [600, 900, 1152, 1280, 2048, 6000, 12000, 12500, 14000, 15728])
def test_a_pool_of_any_size_gives_a_table_without_holes(monkeypatch, slots):
    """Cells that a pool cannot hold are left out, but never a part of a row: the table could not be used then, nor
    mended."""
    cell = lambda warm, count, prompt, cycles: calibrate._row(count, prompt, 10.0, 0.01)  # noqa: E731
    monkeypatch.setattr(calibrate, "_mixed", cell)
    monkeypatch.setattr(
        calibrate, "_decode", lambda warm, count, context, steps: calibrate._row(count, 0, 10.0 * context, 0.01)
    )
    for on_gpu, limit in ((True, 2048), (False, MAX_LEN)):
        deployment = Deployment(MODELS["opt-125m"], DEVICES["a100-40gb"], 1, slots)
        fake = SimpleNamespace(
            on_gpu=on_gpu,
            deployment=deployment,
            use_blocks=lambda size: None,
            loaded=SimpleNamespace(config=SimpleNamespace(max_model_len=limit)),
        )
        steps = StepTimes.of("here", calibrate.cells(fake), padded=on_gpu)
        grid = calibrate.GPU_GRID if on_gpu else calibrate.CPU_GRID
        assert steps.mixed_seqs and steps.mixed_prompt
        if slots == 15728:
            assert steps.mixed_prompt == grid.mixed_prompt and steps.mixed_seqs == grid.mixed_seqs


def test_another_block_size_gives_the_first_pools_memory_back():
    """A card that holds the paper's pool once need not hold it twice."""
    warm = WarmEngine(tiny(), 512, "cpu", "float32", MAX_LEN)
    warm.measure(Load("vllm", "alpaca", None, 0.0, 0.1, max_model_len=MAX_LEN))
    first = [weakref.ref(warm.executor), weakref.ref(warm.executor.store), weakref.ref(warm.executor.store.caches[0])]
    assert (
        warm.measure(Load("vllm", "alpaca", None, 0.0, 0.1, max_model_len=MAX_LEN, block_size=32))["wrong_lengths"] == 0
    )
    assert [reference() for reference in first] == [None] * 3 and warm.executor.manager.block_size == 32


def test_a_pool_whose_graphs_could_not_be_made_is_not_taken_for_ready(monkeypatch):
    warm = WarmEngine(tiny(), 512, "cpu", "float32", MAX_LEN)
    monkeypatch.setattr(warm, "on_gpu", True)
    monkeypatch.setattr(warm_engine.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(warm, "_warm_up", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    for _ in range(2):  # not even at the second attempt
        with pytest.raises(UserError, match="out of GPU memory for graphs of a pool of blocks of 32"):
            warm.use_blocks(32)
    monkeypatch.setattr(warm, "_warm_up", lambda: None)
    warm.use_blocks(32)
    assert warm.executor.manager.block_size == 32


def test_generate_counts_only_the_tokens_that_were_asked_for(warm, monkeypatch):
    nothing = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: None, mem_get_info=lambda: (generate.SPARE_BYTES, 0)
    )
    monkeypatch.setattr(generate.torch, "cuda", nothing)
    made = []
    monkeypatch.setattr(generate, "_run", lambda model, prompts, new_tokens: made.append((list(prompts), new_tokens)))
    small = replace(warm.loaded.config, max_model_len=MAX_LEN)
    fake = SimpleNamespace(deployment=warm.deployment, loaded=replace(warm.loaded, config=small), device_name="GPU")
    assert not generate.fits(fake)
    found = generate.generate_row(fake, "alpaca")
    trace = Load("vllm", "alpaca", None, 0.0, 1.0).trace
    assert found["batch"] == 4 and found["num_finished"] == 8 and len(made) == 3  # one to warm up
    assert made[1] == (trace.prompt_tokens[:4].tolist(), trace.output_tokens[:4].max())
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(trace.output_tokens[:8].sum())
