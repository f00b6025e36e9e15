"""A client of OpenAI's interface that notes when each token comes. It knows nothing else of the server.

All times are those of the event loop, in seconds. A chunk of a stream counts as one token unless it says otherwise: the
client asks for log-probabilities where the server gives them, since these list the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from repro.checks import shown
from repro.errors import UserError

#: What a request asks for beyond OpenAI's least, tried from the left: what a server refuses is left out.
_WISHES: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "logprobs": 0, "stream_options": {"include_usage": True}},
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
)
_LONGEST_WAIT_S = 10.0  # for a connection, and for what no model has to compute
#: vLLM's names of what a server may say of itself
COUNTERS = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")


class Refused(UserError):
    """The server has answered, and will not do it. `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Gone(UserError):
    """The server does not answer any more, or never did."""


@dataclass(eq=False)
class Stream:
    """One output: when its tokens came, and why it ended (None: it has not, or was cut off)."""

    times: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def first_s(self) -> float:
        return self.times[0]

    @property
    def last_s(self) -> float:
        return self.times[-1]


class Answer:
    """What comes of prompts that were sent together: `streams`, one a sample of each prompt, as they grow."""

    def __init__(self, sent_s: float, count: int) -> None:
        self.sent_s = sent_s
        self.streams = [Stream() for _ in range(count)]
        self.prompt_tokens: int | None = None  # of all prompts, if the server says it
        self.task: asyncio.Task[None]
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Something has come."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, or nothing more comes. Raises as `done`."""
        while not condition():
            if self.task.done():
                await self.task
                return
            self._changed.clear()
            await self._changed.wait()

    async def done(self) -> Answer:
        """All of it. Refused or Gone, if it came to no good end."""
        await self.task
        return self

    async def stop(self) -> None:
        """Want no more of it; the server is told by a closed connection."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, UserError):
            await self.task

    @property
    def first_wait_s(self) -> float:
        """From sending to the first token of the stream that got it last."""
        return max(stream.first_s for stream in self.streams) - self.sent_s


class Client:
    """Of one model of a server. `open` comes before anything else."""

    def __init__(self, http: httpx.AsyncClient, model: str | None = None) -> None:
        self.url, self._http = str(http.base_url).rstrip("/"), http
        self.model = model or ""
        self.max_model_len: int | None = None
        self.takes_lists = True
        self._wishes: dict[str, Any] = {}
        self._answers: set[Answer] = set()

    @property
    def ends_are_known(self) -> bool:
        """Whether an output is as long as it was asked to be."""
        return "ignore_eos" in self._wishes

    @property
    def counts_exactly(self) -> bool:
        """Whether the server lists the tokens of each chunk."""
        return "logprobs" in self._wishes

    async def open(self) -> None:
        """Look who is there, and what requests it takes. Gone or Refused, as one line for the user."""
        cards = await self._get_json("/v1/models")
        try:
            known = {str(card["id"]): card for card in cards["data"]}
        except (KeyError, TypeError):
            raise UserError(f"{self.url}/v1/models does not list models; give a server of OpenAI's interface") from None
        if not known:
            raise UserError(f"{self.url} offers no model; load one")
        self.model = self.model or next(iter(known))
        if self.model not in known:
            raise UserError(f"{self.url} has no model {shown(self.model)}; it has {', '.join(known)}")
        longest = known[self.model].get("max_model_len")
        self.max_model_len = longest if isinstance(longest, int) and longest > 0 else None
        for wishes in _WISHES:
            self._wishes = wishes
            try:
                await self.begin(["time"], 2).done()
                break
            except Refused as error:
                if wishes is _WISHES[-1] or error.status not in (400, 422):
                    raise
        try:
            await self.begin(["time", "have"], 2).done()
        except Refused:
            self.takes_lists = False

    def begin(self, prompts: Sequence[str], max_tokens: int, n: int = 1) -> Answer:
        """Send prompts at the same moment, as one request if the server takes that."""
        answer = Answer(asyncio.get_running_loop().time(), len(prompts) * n)
        if len(prompts) == 1 or self.takes_lists:
            work = self._ask(answer, prompts if len(prompts) > 1 else prompts[0], max_tokens, n, 0)
        else:
            work = self._ask_each(answer, prompts, max_tokens, n)
        answer.task = asyncio.get_running_loop().create_task(work)
        self._answers.add(answer)
        answer.task.add_done_callback(lambda task: self._ended(answer))
        return answer

    def _ended(self, answer: Answer) -> None:
        if not answer.task.cancelled():
            answer.task.exception()  # asyncio complains of errors that nobody looks at
        self._answers.discard(answer)
        answer.note()

    async def quiet(self) -> None:
        """Stop whatever is under way."""
        for answer in list(self._answers):
            await answer.stop()

    async def counters(self) -> dict[str, float]:
        """COUNTERS as the server's own page has them; empty without such a page."""
        try:
            page = (await self._http.get("/metrics", timeout=_LONGEST_WAIT_S)).text
        except httpx.HTTPError:
            return {}
        found: dict[str, float] = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in COUNTERS:
                with contextlib.suppress(ValueError):
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    async def _get_json(self, path: str) -> Any:
        with _in_words(self.url):
            response = await self._http.get(path, timeout=_LONGEST_WAIT_S)
        if response.status_code != 200:
            raise _refusal(self.url, response)
        try:
            return response.json()
        except ValueError:
            raise UserError(f"{self.url}{path} is no JSON; give a server of OpenAI's interface") from None

    async def _ask_each(self, answer: Answer, prompts: Sequence[str], max_tokens: int, n: int) -> None:
        asking = [
            asyncio.ensure_future(self._ask(answer, one, max_tokens, n, place * n)) for place, one in enumerate(prompts)
        ]
        try:
            await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()

    async def _ask(self, answer: Answer, prompt: str | Sequence[str], max_tokens: int, n: int, first: int) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 1.0}
        body |= self._wishes | ({"n": n} if n > 1 else {})
        now = asyncio.get_running_loop().time
        with _in_words(self.url):
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(self.url, response)
                async for chunk in _events(response):
                    if "error" in chunk:
                        raise Refused(f"{self.url} broke off a stream: {_said(chunk)}", 500)
                    for choice in chunk.get("choices") or ():
                        stream = answer.streams[first + choice.get("index", 0)]
                        stream.times += [now()] * _tokens_of(choice)
                        stream.reason = choice.get("finish_reason") or stream.reason
                    if usage := chunk.get("usage"):
                        answer.prompt_tokens = (answer.prompt_tokens or 0) + usage["prompt_tokens"]
                    answer.note()
        if not all(stream.times for stream in answer.streams[first : first + n]):
            raise Refused(f"{self.url} ended a stream that had no token", 500)


def _tokens_of(choice: dict[str, Any]) -> int:
    """Tokens in one chunk of one output."""
    listed = (choice.get("logprobs") or {}).get("tokens")
    if listed is not None:
        return len(listed)
    return 1 if choice.get("text") else 0


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            try:
                yield json.loads(data)
            except ValueError:
                raise Refused(f"{response.url} streams what is no JSON: {shown(data)}", 500) from None


def _said(content: object) -> str:
    """The message of an error in OpenAI's form, or whatever there is, in short."""
    inner = content.get("error", content) if isinstance(content, dict) else content
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(message).split())[:200]


def _refusal(url: str, response: httpx.Response) -> UserError:
    try:
        said = _said(response.json())
    except ValueError:
        said = _said(response.text) or response.reason_phrase
    if response.status_code in (401, 403):
        return Refused(f"{url} refuses the key: {said}; give the right one with --api-key", response.status_code)
    return Refused(f"{url} answers {response.status_code}: {said}", response.status_code)


@contextlib.contextmanager
def _in_words(url: str):
    """What goes wrong on the way, as Gone."""
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise Gone(f"{url} does not answer: {why}; is a server running there?") from None
