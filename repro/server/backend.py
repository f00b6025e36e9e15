"""What the endpoints ask of an engine: a real model's, or a simulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from repro.engine.config import Deployment
from repro.engine.systems import System
from repro.feed.feed import Feed, Watchers
from repro.server import words
from repro.server.log import Held, RequestLog
from repro.server.metrics import Metrics
from repro.server.simulated import SimulatedServing
from repro.simulate.cost_model import CostModel

if TYPE_CHECKING:
    from repro.llm import LLM


class Backend(Protocol):
    """`about` says in a line what runs. `max_model_len` bounds prompt and output together, in tokens."""

    name: str
    about: str
    max_model_len: int
    feed: Feed
    metrics: Metrics

    def encode(self, prompt: object, name: str) -> list[int]:
        """A text, or a list of token ids, as token ids. UserError for anything else."""

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as a prompt. UserError if that cannot be."""

    def room(self, prompt_tokens: int, n: int) -> int:
        """How many tokens each of n outputs of a prompt may have; below 1 if none."""

    def token_text(self, token_id: int) -> str:
        """One token as text."""


def room(feed: Feed, system: System, max_model_len: int, prompt_tokens: int, n: int) -> int:
    """How many tokens each of n outputs may have at most, by the model's length and by the pool; below 1 if none."""
    manager, copies = feed.engine.scheduler.manager, 1 if system.splits_samples else n
    size, shared = manager.block_size, prompt_tokens // manager.block_size
    own = (manager.num_blocks - getattr(manager, "watermark_blocks", 0) - shared) // copies
    return min(max_model_len - prompt_tokens, (shared + own) * size - prompt_tokens + 1)


def _watching(metrics: Metrics, log: RequestLog | None) -> dict[str, Any]:
    """How a feed is told of who watches it."""
    watching = (metrics,) if log is None else (metrics, log)
    return {"observers": watching, "watcher": Watchers(watching)}


def _begin(backend: Backend, log: RequestLog | None, system: System, cost_model: CostModel | None, held: Held) -> None:
    """The feed is there, and nothing has run."""
    backend.metrics.begin(backend.feed.engine)
    if log is not None:
        head = {"model": backend.name, "max_model_len": backend.max_model_len, "about": backend.about}
        log.begin(backend.feed, system, head, cost_model, held)


class RealBackend:
    """`LLM.serving`, from now until its feed is closed."""

    def __init__(
        self, llm: LLM, *, max_waiting: int | None = None, with_events: bool = False, log: RequestLog | None = None
    ) -> None:
        from repro.llm.serving import Serving

        self.name, self.max_model_len = llm.loaded.config.name, llm.loaded.config.max_model_len
        self.about = llm.boot_line
        self._llm, self.metrics = llm, Metrics(self.name)
        keeping = {"with_events": with_events or log is not None, "max_waiting": max_waiting}
        self.feed = Serving(llm, **keeping, **_watching(self.metrics, log))
        _begin(self, log, llm.system, None, lambda answer, output: [*answer.asked.ids.tolist(), *output])

    def encode(self, prompt: object, name: str) -> list[int]:
        return self.feed.encode(prompt, name)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return self._llm.chat_prompts(messages)[0][1]

    def room(self, prompt_tokens: int, n: int) -> int:
        return room(self.feed, self._llm.system, self.max_model_len, prompt_tokens, n)

    def token_text(self, token_id: int) -> str:
        return "" if self._llm.tokenizer is None else self._llm.tokenizer.decode([token_id])


class SimulatedBackend:
    """A deployment that is not there: see `repro.server.simulated`."""

    def __init__(
        self,
        deployment: Deployment,
        system: System,
        cost_model: CostModel,
        block_size: int = 16,
        *,
        seed: int | None = None,
        max_waiting: int | None = None,
        events: list | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.name, self.max_model_len = deployment.model.name, deployment.model.max_model_len
        self.metrics = Metrics(self.name)
        events = [] if log is not None and events is None else events
        keeping = {"events": events, "max_waiting": max_waiting, "seed": seed}
        watching = _watching(self.metrics, log)
        self.feed = SimulatedServing(deployment, system, cost_model, block_size, **keeping, **watching)
        blocks = self.feed.manager.num_blocks
        self.about = (
            f"{self.name} on {deployment.num_gpus} x {deployment.device.name}, simulated ({cost_model.name}): "
            f"{system.label}, {blocks:,} blocks of {block_size} tokens. Words are made up; times are modelled"
        )
        _begin(self, log, self.feed.system, cost_model, lambda answer, output: answer.prompt_ids)

    def encode(self, prompt: object, name: str) -> list[int]:
        return words.encode(prompt) if isinstance(prompt, str) else words.checked_ids(prompt, name)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return words.encode("".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant:")

    def room(self, prompt_tokens: int, n: int) -> int:
        return room(self.feed, self.feed.system, self.max_model_len, prompt_tokens, n)

    def token_text(self, token_id: int) -> str:
        return words.text_of(token_id)
