"""Threads and nested calls: a model is used by one call at a time, and no call gets another one's tokens."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_executor import build, run, trace
from tiny import TINY

from repro.engine.loop import Observer
from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.executor import TorchExecutor
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def tokens(llm: LLM, first: int, **options) -> list:
    return [one.token_ids for one in llm.generate([[first, 6, 7]] * 4, GREEDY, progress=False, **options)]


def engine(loaded: models.LoadedModel) -> LLM:
    return LLM(loaded, block_size=4, pool=PoolSize(num_blocks=80), quiet=True)


@pytest.mark.parametrize("num_engines", [1, 2, 0])  # 0: each thread makes its own
def test_calls_from_several_threads_get_their_own_tokens(num_engines):
    loaded = models.from_config(TINY, "tiny")
    expected = {first: tokens(engine(loaded), first) for first in (5, 6, 8)}
    engines = [engine(loaded) for _ in range(num_engines)]
    found = {}

    def work(place: int, first: int) -> None:
        for _ in range(3):
            llm = engines[place % num_engines] if num_engines else engine(loaded)
            found.setdefault(first, []).append(tokens(llm, first))

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: [right] * 3 for first, right in expected.items()}


def test_an_observer_that_generates_is_refused_and_the_model_stays_usable():
    llm = engine(models.from_config(TINY, "tiny"))
    expected = tokens(llm, 5)

    class Nested(Observer):
        def observe(self, *unused: object) -> None:
            tokens(llm, 6)

    with pytest.raises(UserError, match="this model is generating"):
        tokens(llm, 5, observers=[Nested()])
    assert tokens(llm, 5) == expected


def test_an_executor_that_lost_the_model_to_another_is_refused_until_it_begins_again():
    scheduler, executor = build("llama")
    requests = trace(0, 3)
    expected = run(scheduler, executor, requests)
    TorchExecutor(executor.loaded, executor.manager, executor.store)
    with pytest.raises(UserError, match="another executor has begun"):
        run(scheduler, executor, requests)
    again, executor = build("llama")
    assert run(again, executor, requests) == expected
