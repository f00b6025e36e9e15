"""Probes of who runs when: what joins, in which order the queue is served, and how much is served at all."""

from __future__ import annotations

import asyncio
import itertools
import random

from repro.judge.claims import CannotTell, Trial
from repro.judge.client import Refused
from repro.judge.ground import Ground, tokens_for

_NEWCOMERS, _MOST_NEWCOMERS = 10, 40
#: Two first tokens are told apart if they are further apart than this share of an iteration.
_APART = 0.5
#: so few of all pairs must be told apart
_LEAST_PAIRS = 1 / 3
_TOKENS_A_CLIENT = 12
_MOST_CLIENTS = 256


async def iteration_batching(ground: Ground, trial: Trial) -> None:
    """A short request comes while a long one runs alone."""
    tokens = min(ground.room // 2, max(64, tokens_for(10 * ground.short_s, ground.token_s)))
    while not trial.is_over:
        running = ground.client.begin(ground.short_prompts(1), tokens)
        await running.until(lambda one=running: len(one.streams[0].times) >= 4)
        before = tokens - len(running.streams[0].times)
        if running.task.done():
            raise CannotTell("outputs end too early for another request to come meanwhile")
        newcomer = await ground.client.begin(ground.short_prompts(1), 2).done()
        after = 0 if running.task.done() else tokens - len(running.streams[0].times)
        await running.stop()
        trial.add(after / before, newcomer_s=newcomer.streams[0].last_s - newcomer.sent_s)


async def first_come_order(ground: Ground, trial: Trial) -> None:
    """Prompts of mixed lengths come one after the other, faster than they can be computed. An order that looks at
    lengths differs from that of arrival in about half of the pairs."""
    ground.need_long()
    count = _NEWCOMERS
    while not trial.is_over:
        firsts = await _first_tokens(ground, mixed(ground.rng, count, ground.longest))
        apart_s = _APART * ground.token_s
        pairs = [(early, late) for early, late in itertools.combinations(firsts, 2) if abs(early - late) > apart_s]
        if len(pairs) >= _LEAST_PAIRS * count * (count - 1) / 2:
            trial.add(sum(early > late for early, late in pairs) / len(pairs), pairs_told_apart=float(len(pairs)))
        elif count == _MOST_NEWCOMERS:
            raise CannotTell("too many first tokens come at the same time: no queue could be built")
        else:
            count *= 2


async def _first_tokens(ground: Ground, lengths: list[int]) -> list[float]:
    """When prompts of these lengths, which come in this order behind a long one, have their first tokens."""
    asked = [ground.client.begin([ground.prompt(ground.longest)], 1)]
    for tokens in lengths:
        await asyncio.sleep(min(ground.token_s, ground.longest_s / 20))
        asked.append(ground.client.begin([ground.prompt(tokens)], 1))
    return [(await one.done()).streams[0].first_s for one in asked[1:]]


def mixed(rng: random.Random, count: int, longest: int) -> list[int]:
    """Lengths from a quarter of the longest up to it, in an order that is neither rising nor falling."""
    lengths = [int(longest * (0.25 + 0.75 * place / (count - 1))) for place in range(count)]
    while True:
        rng.shuffle(lengths)
        falling = sum(early > late for early, late in itertools.combinations(lengths, 2))
        if 0.4 <= falling / (count * (count - 1) / 2) <= 0.6:
            return lengths


async def throughput(ground: Ground, trial: Trial) -> None:
    """1, 2, 4, ... clients ask at once, until that gives no more or the time is up. The knee is the least number of
    clients with nine tenths of the best."""
    tokens = min(_TOKENS_A_CLIENT, ground.room // 3)
    rates: dict[int, float] = {}
    count, seconds = 1, 0.0
    while count <= _MOST_CLIENTS and 3 * seconds < ground.left_s():
        asked = [ground.client.begin([one], tokens) for one in ground.short_prompts(count)]
        try:
            ended = [await one.done() for one in asked]
        except Refused as error:
            trial.note = f"{count} clients at once: {error}"
            break
        streams = [one.streams[0] for one in ended]
        seconds = max(one.last_s for one in streams) - asked[0].sent_s
        rates[count] = sum(len(one.times) for one in streams) / seconds
        if count >= 4 and rates[count] < 1.05 * max(rates[count // 2], rates[count // 4]):
            break
        count *= 2
    if not rates:
        raise CannotTell("nothing was served")
    best = max(rates.values())
    knee = min(count for count, rate in rates.items() if rate >= 0.9 * best)
    trial.add(best)
    trial.numbers |= {"knee_clients": float(knee)} | {f"at_{count}": rate for count, rate in rates.items()}
    if not trial.note and knee == max(rates):
        trial.note = "it still grew with the last number of clients"
