"""What a server is like, as far as probes must know it to be of the right size: found out with a few requests."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from dataclasses import dataclass, field

from repro.judge.claims import CannotTell
from repro.judge.client import Client, Refused

#: Words of four letters, so that tokenizers of words and of letters alike make about as many tokens of each.
_LIST = """
able also away back ball band bank base bear best bird blue boat body bold bone book both bowl bulk burn
busy cake call calm camp card care case cash city club coal coat cold come cook cool copy corn cost dark data date dawn
days deal dear deep deer desk door down draw drop dust duty each earn east easy edge even ever face fact fair
fall farm"""
_WORDS = _LIST.split()
#: The length of a model that does not say its own, in tokens.
_USUAL_LEN = 2048
#: Of a model's length so much is used: how many tokens a text has is known only about.
_SURE = 0.85
#: A long prompt takes at least this many times as long as a short one, if any does; below the second it tells nothing.
_LONG, _LEAST_LONG = 5.0, 3.0


@dataclass
class Ground:
    """What probes stand on. Times in seconds, lengths in tokens.

    short_s      time to first token of a short prompt, when nothing else runs
    token_s      between two tokens of a stream that is alone
    long         a prompt whose time to first token, `long_s`, is at least 5 times `short_s`
    longest      the longest prompt that is computed within a hundredth of the budget, `longest_s`
    pool         tokens that fit into the server's memory, about; None until a probe has found it out"""

    client: Client
    rng: random.Random
    budget_s: float
    end_s: float
    max_len: int = _USUAL_LEN
    tokens_a_word: float = 1.0
    tokens_before: float = 0.0
    short_s: float = 0.0
    token_s: float = 0.0
    long: int = 0
    long_s: float = 0.0
    longest: int = 0
    longest_s: float = 0.0
    pool: float | None = None
    said: list[str] = field(default_factory=list)  # notes on the server, for all findings

    @property
    def room(self) -> int:
        """Tokens of prompt and output together that a request may have."""
        return int(self.max_len * _SURE)

    def left_s(self) -> float:
        """Until the present probe's time is up."""
        return self.end_s - asyncio.get_running_loop().time()

    def words(self, tokens: float) -> list[str]:
        """A fresh prompt of about so many tokens, as words."""
        count = max(1, int((tokens - self.tokens_before) / self.tokens_a_word))
        return [self.rng.choice(_WORDS) for _ in range(count)]

    def prompt(self, tokens: float) -> str:
        return " ".join(self.words(tokens))

    def short_prompts(self, count: int) -> list[str]:
        """Fresh ones, of eight words or so."""
        return [self.prompt(min(8 * self.tokens_a_word + self.tokens_before, self.room / 4)) for _ in range(count)]

    async def first_s(self, prompt: str) -> float:
        """Time to first token of a prompt that is alone."""
        return (await self.client.begin([prompt], 1).done()).first_wait_s

    def need_long(self) -> None:
        """CannotTell where prompts cost next to nothing."""
        if self.long_s < _LEAST_LONG * self.short_s:
            raise CannotTell(
                f"a prompt of {self.long} tokens takes {self.long_s * 1e3:.0f} ms and one of a few "
                f"{self.short_s * 1e3:.0f} ms: too near to tell whether it is computed"
            )


async def survey(ground: Ground) -> None:
    """Fill in what is to be known, from short prompts to long ones."""
    client = ground.client
    if client.max_model_len is None:
        ground.said.append(f"the server does not say how long its model is; {_USUAL_LEN} is taken")
    if not client.ends_are_known:
        ground.said.append("the server takes no ignore_eos, so outputs may end early")
    if not client.counts_exactly:
        ground.said.append("a chunk counts as a token")
    ground.max_len = client.max_model_len or _USUAL_LEN
    few, more = [(await _tokens(ground, count)) for count in (4, 8)]
    if few is not None and more is not None and more > few:
        ground.tokens_a_word = (more - few) / 4
        ground.tokens_before = max(0.0, few - 4 * ground.tokens_a_word)
    waits, gaps = [], []
    for _ in range(3):
        answer = await client.begin(ground.short_prompts(1), min(12, ground.room // 3)).done()
        waits.append(answer.first_wait_s)
        times = answer.streams[0].times
        gaps += [after - before for before, after in zip(times, times[1:])]
    ground.short_s = statistics.median(waits)
    ground.token_s = statistics.median(gaps) if gaps else ground.short_s
    await _lengthen(ground)


async def _tokens(ground: Ground, words: int) -> int | None:
    """How many tokens the server counts in so many words."""
    prompt = " ".join(ground.rng.choice(_WORDS) for _ in range(words))
    return (await ground.client.begin([prompt], 1).done()).prompt_tokens


async def _lengthen(ground: Ground) -> None:
    """Double a prompt until it is as long as it may be, or takes as much time as it may."""
    limit = ground.room - 16 if ground.room > 64 else ground.room // 2
    most_s, tokens = ground.budget_s / 100, min(64, limit)
    ground.long, ground.long_s = tokens, 0.0
    while True:
        try:
            seconds = min([await ground.first_s(ground.prompt(tokens)) for _ in range(2)])
        except Refused:  # the pool may hold less than the model takes
            break
        if ground.long_s < _LONG * ground.short_s:
            ground.long, ground.long_s = tokens, seconds
        ground.longest, ground.longest_s = tokens, seconds
        if tokens == limit or 2 * seconds > most_s:
            break
        tokens = min(limit, 2 * tokens)
    if not ground.longest:
        raise CannotTell("the server takes no prompt of 64 tokens")


def tokens_for(seconds: float, token_s: float) -> int:
    """Tokens that a stream gets in that time, at most."""
    return math.ceil(seconds / max(token_s, 1e-6))
