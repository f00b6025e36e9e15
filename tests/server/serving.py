"""A server in this process on a free port, for tests; a simulated one that takes no time to speak of."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
from prometheus_client.parser import text_string_to_metric_families

from repro.engine.config import DEPLOYMENTS, Deployment
from repro.engine.systems import system
from repro.server.backend import Backend, SimulatedBackend
from repro.server.run import listen, server_of
from repro.simulate.cost_model import CostModel

#: milliseconds an iteration, whatever is in it
FAST = CostModel("fast", 0.0005, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

#: put over a usage that is compared: the second time more is found
CACHED = {"prompt_tokens_details": None}


def simulated(name: str = "vllm-v1", kv_slots: int = 4096, cost_model: CostModel = FAST, **options) -> SimulatedBackend:
    paper = DEPLOYMENTS["opt-13b"]
    deployment = Deployment(paper.model, paper.device, 1, kv_slots)
    return SimulatedBackend(deployment, system(name), cost_model, events=[], seed=0, **options)


@contextmanager
def served(backend: Backend, api_key: str | None = None, whole: bool = True, most: int = 1000) -> Iterator[str]:
    """The address of a server that runs meanwhile. Afterwards no block is held, and none was lost."""
    with listen("127.0.0.1", 0) as listening:
        server = server_of(backend, api_key, most)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            backend.feed.close()
    assert not whole or is_whole(backend)


def is_whole(backend: Backend) -> bool:
    """Whether no block is held and nothing is remembered of any request."""
    manager = backend.feed.engine.scheduler.manager
    metrics = backend.metrics
    receipts = backend.feed.receipts
    kept = metrics._scheduled_s, metrics._token_s, metrics._group, backend.feed.handles, receipts._lives, list(receipts)
    return manager.num_free_blocks == manager.num_blocks and not any(kept)


def until(condition, seconds: float = 20.0) -> None:
    """Wait for it; AssertionError if it takes too long."""
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "waited in vain"
        time.sleep(0.005)


def client_of(address: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options)


def streamed(stream) -> tuple[dict[int, str], dict[int, str], object]:
    """Texts and reasons by choice, and the usage, of a stream of completions or of a chat."""
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (said or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def samples_of(page: str) -> dict[str, float]:
    """What a page of metrics says: sample -> value; labels that are not the model's go into the name."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[":".join([sample.name, *labels])] = sample.value
    return found
