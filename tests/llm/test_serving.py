"""An engine that is fed while it runs: what comes in pieces is what `generate` gives, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import llm, tokens

from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.feed.receipts import Receipts
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 101, size).tolist() for size in (4, 17, 9, 1, 22, 12)]
SYSTEMS = ["vllm", "vllm-v1", "orca-oracle"]
LONG = SamplingParams(temperature=0, max_tokens=40)


def engine_of(spoken, system="vllm", **options):
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 8} if system == "vllm-v1" else {}
    return llm(spoken, system=system, **small | options)


def is_whole(engine) -> bool:
    return engine.executor.manager.num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("system", SYSTEMS)
def test_pieces_join_to_what_generate_gives(spoken, system):
    """Also with stop texts that span tokens, several samples, and beams, which come at the end."""
    asked = [
        SamplingParams(temperature=0, max_tokens=15),
        SamplingParams(n=3, seed=1, max_tokens=15),
        SamplingParams(seed=2, max_tokens=20, stop=("ab", "z", "lo an")),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(n=2, seed=4, max_tokens=12, stop_token_ids=[40, 41, 42, 43, 44]),
        SamplingParams(n=1 if system == "vllm-v1" else 2, use_beam_search=system != "vllm-v1", max_tokens=8),
    ]
    engine = engine_of(spoken, system)
    expected = engine.generate(PROMPTS, asked, progress=False, seed=0)
    with engine.serving(seed=0) as serving:
        answers = [serving.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, asked)]
        pieces = [list(answer) for answer in answers]
        results = [answer.result() for answer in answers]
    for want, got, came, sampling in zip(expected, results, pieces, asked):
        assert got.token_ids == want.token_ids and got.texts == want.texts
        assert [one.finish_reason for one in got.samples] == [one.finish_reason for one in want.samples]
        for sample, output in enumerate(want.samples):
            own = [piece for piece in came if piece.sample == sample]
            assert "".join(piece.text for piece in own) == output.text
            assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
            assert (own[-1].finish_reason, own[-1].stop_reason) == (output.finish_reason, output.stop_reason)
            if not sampling.use_beam_search:
                assert [piece.token_id for piece in own] == output.token_ids
    assert is_whole(engine) and not engine.executor.finished
    assert tokens(engine, PROMPTS, asked, seed=0) == [one.token_ids for one in expected]


@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_join_while_others_run_and_leave_in_every_state(spoken, system):
    """Waiting, prompt under way, running, swapped, and after the end: the pool is whole, the others are undisturbed."""
    engine = engine_of(spoken, system, pool=PoolSize(num_blocks=40), max_num_seqs=4)
    expected = tokens(engine, PROMPTS, LONG)
    for turn in range(6):
        with engine.serving() as serving:
            ran, answers = threading.Event(), []

            def seen(piece, ran=ran):
                ran.set()

            answers.append(serving.add(PROMPTS[0], LONG, on_piece=seen))
            answers += [serving.add(prompt, LONG) for prompt in PROMPTS[1:]]
            assert ran.wait(20)
            answers[turn].abort()
            kept = [place for place in range(6) if place != turn]
            assert [answers[place].result(20).token_ids for place in kept] == [expected[place] for place in kept]
            with pytest.raises(UserError, match="was taken back"):
                answers[turn].result(20)
            answers[turn].abort()  # once more does nothing
            answers[kept[0]].abort()  # nor does it after the end
        assert is_whole(engine) and not engine.executor._states and not engine.executor.finished
        assert [event.kind for event in serving.events].count("abort") == 1


def test_an_abort_frees_memory_before_the_next_iteration(spoken):
    engine = engine_of(spoken, pool=PoolSize(num_blocks=17), max_num_seqs=2)
    with engine.serving() as serving:
        first = serving.add([5] * 20, LONG)
        next(iter(first))
        free = serving.driver.call(lambda: engine.executor.manager.num_free_blocks)
        first.abort()
        assert free < 17 and serving.driver.call(lambda: engine.executor.manager.num_free_blocks) == 17
        assert len(serving.add([6] * 20, LONG).result(20).token_ids[0]) == 40


def test_streams_of_one_event_loop_and_one_that_is_given_up(spoken):
    engine = engine_of(spoken, "vllm-v1")
    expected = engine.generate(PROMPTS, LONG, progress=False)

    async def main():
        async def text_of(answer):
            return "".join([piece.text async for piece in answer])

        async def give_up(answer):
            async for _ in answer:
                return

        answers = [serving.add(prompt, LONG) for prompt in PROMPTS]
        lost = serving.add(PROMPTS[1], LONG)
        return lost, await asyncio.gather(*map(text_of, answers), give_up(lost))

    with engine.serving() as serving:
        lost, found = asyncio.run(main())
        assert found[:-1] == [one.texts[0] for one in expected]
        with pytest.raises(UserError, match="was given up"):
            lost.result(20)
    assert is_whole(engine)


def test_threads_feed_one_engine(spoken):
    engine, found = engine_of(spoken, "vllm-v1"), {}
    expected = tokens(engine, PROMPTS, LONG)

    def ask(place):
        found[place] = [serving.add(PROMPTS[place], LONG).result(60).token_ids for _ in range(3)]

    with engine.serving() as serving:
        threads = [threading.Thread(target=ask, args=(place,)) for place in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert found == {place: [expected[place]] * 3 for place in range(6)}


def test_what_cannot_be_is_refused_and_the_engine_goes_on(spoken):
    engine = engine_of(spoken, "vllm-v1", pool=PoolSize(num_blocks=5))
    with engine.serving() as serving:
        for prompt, sampling, said in (
            ([1] * 60, LONG, "exceed the 64"),
            ([500], LONG, "token ids must be from 0 to 100"),
            ([1] * 10, SamplingParams(n=3, max_tokens=30), "does not fit into an empty pool"),
            (5, LONG, "cannot be used"),
        ):
            with pytest.raises(UserError, match=said):
                serving.add(prompt, sampling)
        assert len(serving.add([4], SamplingParams(temperature=0, max_tokens=3)).result(20).token_ids[0]) == 3
        with pytest.raises(UserError, match="ask afterwards"):
            serving.driver.call(lambda: engine.generate([[1]], LONG))
    with pytest.raises(UserError, match="this engine has ended; begin another one"):
        serving.add([4])
    assert is_whole(engine)


def test_a_callback_that_raises_ends_its_own_request_only(spoken):
    engine = engine_of(spoken)
    with engine.serving() as serving:
        bad = serving.add(PROMPTS[0], LONG, on_piece=lambda piece: 1 / 0)
        good = serving.add(PROMPTS[1], LONG)
        with pytest.raises(UserError, match="its on_piece raised ZeroDivisionError"):
            bad.result(20)
        assert len(good.result(20).token_ids[0]) == 40


def test_what_is_unfinished_at_the_end_is_taken_back_and_drain_waits(spoken):
    engine = engine_of(spoken)
    with engine.serving() as serving:
        left = serving.add(PROMPTS[0], LONG)
    with pytest.raises(UserError, match="the serving has ended"):
        left.result(20)
    with engine.serving() as serving:
        done = serving.add(PROMPTS[0], LONG)
        serving.drain()
        assert done.is_done
    assert is_whole(engine)


def test_an_engine_that_fails_tells_all_that_wait(spoken, monkeypatch):
    engine = engine_of(spoken)
    with engine.serving() as serving:
        monkeypatch.setattr(engine.executor.runner, "decode", lambda batch: 1 / 0)
        for answer in serving.add_all(PROMPTS, [LONG] * 6, 0, 0.0).result():  # all of them before the next iteration
            with pytest.raises(ZeroDivisionError):
                answer.result(20)
        with pytest.raises(UserError, match="has ended"):
            serving.add([1], LONG)
    monkeypatch.undo()
    assert tokens(engine, PROMPTS[:1], LONG)


def test_work_that_is_taken_back_before_it_is_done_harms_nobody(spoken):
    """As an event loop does with what a task waits for when the task is cancelled."""
    engine = engine_of(spoken)
    with engine.serving() as serving:
        begun, go_on = threading.Event(), threading.Event()
        first = serving.driver.later(lambda: (begun.set(), go_on.wait(20)))
        assert begun.wait(20)
        lost = serving.driver.later(lambda: 1 / 0)
        assert lost.cancel() and not first.cancel()
        go_on.set()
        assert len(serving.add(PROMPTS[0], LONG).result(20).token_ids[0]) == 40


def test_the_cache_is_kept_from_serving_to_serving_and_to_generate(spoken):
    engine = engine_of(spoken, "vllm-v1")
    with engine.serving() as serving:
        serving.add(PROMPTS[4], LONG).result(20)
    assert engine.generate([PROMPTS[4]], LONG, progress=False).statistics.prompt_tokens_found == 20


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_an_answers_receipts_add_up(spoken, system, ahead):
    """One for each of the engine's requests, also where tokens are known an iteration late, as on a GPU; those of a run
    of `generate` come by an observer."""
    engine, sampling = engine_of(spoken, system), SamplingParams(n=2, seed=1, max_tokens=15)
    engine.executor.queues_ahead = ahead
    with engine.serving() as serving:
        answers = [serving.add(prompt, sampling) for prompt in PROMPTS]
        for answer in answers:
            answer.result()
            assert sorted(answer.receipts) == [request.request_id for request in answer.requests]
            for receipt, outcome in ((answer.receipts[one.request.request_id], one) for one in answer.outcomes):
                latency_s = outcome.finish_s - outcome.request.arrival_s
                assert receipt.latency_s == pytest.approx(latency_s, rel=0, abs=1e-9)
                assert sum(receipt.causes.values()) == pytest.approx(latency_s, rel=0, abs=1e-9)
    receipts = Receipts()
    engine.generate(PROMPTS, sampling, progress=False, observers=(receipts,))
    assert len(receipts) == sum(len(answer.requests) for answer in answers)
    for receipt in receipts:
        assert sum(receipt.causes.values()) == pytest.approx(receipt.latency_s, rel=0, abs=1e-9)
        assert receipt.causes["prompt"] > 0 and receipt.causes["own_steps"] > 0
