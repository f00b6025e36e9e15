"""Probes of the server's memory, whose size nobody says: what happens when it is full, and what samples take of it.

Waves of requests ask for more and more tokens at once. One of them is more than the memory holds. What the streams of
that wave do tells how the server deals with it: tokens are compared with the tokens of other streams, so that a slow
iteration, which holds up all of them, is not taken for a request that was driven out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from repro.judge.claims import CLAIMS, CannotTell, Trial, Verdict
from repro.judge.client import Refused, Stream
from repro.judge.ground import Ground

_FIRST_WAVE, _LARGEST_WAVE = 8, 256
_FIRST_LENGTH = 256  # tokens of prompt and output together
_LEAST_OUTPUT = 24  # so that others can get well more than the threshold's tokens while one stands still
#: gaps of a stream that are looked at, the longest first
_GAPS = 3
_MOST_SAMPLES = 64
_SAMPLE_TOKENS = 24
#: Two tokens of a stream are made at least an iteration apart; closer than this share of it they were held back.
_BURST = 0.25


@dataclass(frozen=True)
class Wave:
    """Requests of `prompt` + `output` tokens that were sent together, and what their streams did.

    stood_still   most tokens that another stream got between two of a stream's
    stalled       streams that stood still for as many as the claim asks for
    at_once       most streams that were between their first and last token at the same time
    waited        whether one began when another had ended
    held          tokens of all that had begun, when the first of them stood still; else those of `at_once` whole ones
    complete      whether all outputs are as long as was asked for"""

    prompt: int
    output: int
    count: int
    stood_still: int
    stalled: int
    at_once: int
    waited: bool
    held: float
    complete: bool


async def send(ground: Ground, count: int, length: int) -> Wave:
    """Send one wave of requests of that length. CannotTell if it would take too long; Refused."""
    output = max(_LEAST_OUTPUT, length // 2)  # long ones: the last request begins before the first one ends
    prompt = length - output
    seconds = count * prompt * ground.longest_s / ground.longest + 2 * output * ground.token_s
    if seconds > ground.left_s():
        raise CannotTell(
            f"the pool was not filled in time: {count} requests of {length} tokens would take some {seconds:.0f} s"
        )
    streams = await _streams(ground, [ground.prompt(prompt) for _ in range(count)], output)
    stalls = [longest_stall(one, streams, ground.token_s) for one in streams]
    stood_still, _ = max(stalls)
    begun = [since for tokens, since in stalls if tokens >= CLAIMS["full_pool_preempts"].holds]
    at_once = most_at_once(streams)
    return Wave(
        prompt=prompt,
        output=output,
        count=len(streams),
        stood_still=stood_still,
        stalled=len(begun),
        at_once=at_once,
        waited=max(one.first_s for one in streams) > min(one.last_s for one in streams),
        held=_held(streams, min(begun), prompt) if begun else float(at_once * (prompt + output)),
        complete=not ground.client.ends_are_known or all(one.reason == "length" for one in streams),
    )


async def _streams(ground: Ground, prompts: list[str], output: int, n: int = 1) -> list[Stream]:
    """The streams of prompts that are sent together, when all have ended. CannotTell if their tokens come in bursts: a
    busy machine then passes on one stream after the other, whatever order they were made in."""
    streams = (await ground.client.begin(prompts, output, n).done()).streams
    gaps = [after - before for one in streams for before, after in zip(one.times, one.times[1:])]
    if 2 * sum(gap < _BURST * ground.token_s for gap in gaps) > len(gaps):
        raise CannotTell("tokens come in bursts: the server or this machine is too busy to tell when they are made")
    return streams


def longest_stall(stream: Stream, others: list[Stream], token_s: float) -> tuple[int, float]:
    """The most tokens that another one got between two of this stream's, and when that began.

    Those that it gets at once afterwards had only been held back on their way, and are taken off."""
    times = stream.times
    gaps = sorted((after - before, place) for place, (before, after) in enumerate(zip(times, times[1:])))
    found = [(0, 0.0)]
    for _, place in gaps[-_GAPS:]:
        before, after = times[place], times[place + 1]
        end = place + 1
        while end + 1 < len(times) and times[end + 1] - times[end] < _BURST * token_s:
            end += 1
        most = max(bisect_left(other.times, after) - bisect_right(other.times, before) for other in others)
        found.append((most - (end - place - 1), before))
    return max(found, key=lambda one: one[0])


def most_at_once(streams: list[Stream]) -> int:
    """Most streams between their first and last token at the same time."""
    firsts, lasts = sorted(one.first_s for one in streams), sorted(one.last_s for one in streams)
    return max(place + 1 - bisect_left(lasts, first) for place, first in enumerate(firsts))


def _held(streams: list[Stream], when_s: float, prompt: int) -> float:
    """Tokens of those that had begun and not ended."""
    running = [one for one in streams if one.first_s <= when_s < one.last_s]
    return float(sum(prompt + bisect_right(one.times, when_s) for one in running))


async def full_pool_preempts(ground: Ground, trial: Trial) -> None:
    """Larger and larger waves, until one makes streams stand still or wait."""
    count, length = _FIRST_WAVE, min(ground.room, _FIRST_LENGTH)
    while True:
        try:
            wave = await send(ground, count, length)
        except Refused as error:
            raise CannotTell(f"{count} requests of {length} tokens at once: {error}") from None
        if not wave.complete:
            _conclude(trial, wave, "outputs were cut off")
            trial.verdict = Verdict.FAILS
            return
        if wave.stalled:
            _conclude_stalled(ground, trial, wave)
            return
        if wave.waited:
            break
        if count < _LARGEST_WAVE and (count < 64 or length == ground.room):
            count *= 2
        elif length < ground.room:
            length = min(ground.room, 2 * length)
        else:
            raise CannotTell(f"{count} requests of {length} tokens at once do not fill the pool")
    await _tell_memory_from_cap(ground, trial, wave)


async def _tell_memory_from_cap(ground: Ground, trial: Trial, wave: Wave) -> None:
    """Requests waited, and none stood still: memory was promised to those that ran, or no more than so many may run.
    Of requests half as long memory would take more; no cap would."""
    length = wave.prompt + wave.output
    half = await send(ground, 2 * wave.at_once + 4, max(2 * _LEAST_OUTPUT, length // 2))
    if half.stalled:
        _conclude_stalled(ground, trial, half)
    elif half.at_once >= 1.5 * wave.at_once:
        ground.pool = wave.held
        said = f"requests wait outside until they fit whole: {wave.at_once} at once, {half.at_once} of half the length"
        _conclude(trial, wave, said)
    else:
        if length < ground.room:
            wave = await send(ground, wave.at_once + 4, ground.room)
        if wave.stalled:
            _conclude_stalled(ground, trial, wave)
        else:  # how large the pool is nobody can tell
            said = f"no more than {wave.at_once} run at once, and none of them stood still at the model's full length"
            _conclude(trial, wave, said)


def _conclude_stalled(ground: Ground, trial: Trial, wave: Wave) -> None:
    ground.pool = wave.held
    _conclude(trial, wave, f"{wave.stalled} of {wave.count} streams stood still and went on to their end")


def _conclude(trial: Trial, wave: Wave, said: str) -> None:
    trial.add(float(wave.stood_still))
    trial.note = said
    trial.numbers |= {
        "requests": float(wave.count),
        "tokens_each": float(wave.prompt + wave.output),
        "at_once": float(wave.at_once),
        "streams_stalled": float(wave.stalled),
        "tokens_held": wave.held,
    }


async def samples_stored_once(ground: Ground, trial: Trial) -> None:
    """So many prompts that they would need 2.5 pools: as samples of one prompt, and as different ones."""
    if ground.pool is None:
        raise CannotTell("the size of the pool was not found")
    tokens = int(min(ground.pool / 4, ground.room - _SAMPLE_TOKENS, ground.longest))
    count = math.ceil(2.5 * ground.pool / tokens)
    if count > _MOST_SAMPLES:
        raise CannotTell(f"the pool holds some {ground.pool:.0f} tokens: that would take {count} samples")
    output = min(_SAMPLE_TOKENS, ground.room - tokens)
    free = await _samples_of_a_short_one(ground, output, count)
    while not trial.is_over:
        apart = together(await _streams(ground, [ground.prompt(tokens) for _ in range(count)], output))
        if free < trial.claim.holds * apart:
            raise CannotTell(f"no more than {free} samples run at once, however short their prompt is")
        try:
            samples = together(await _streams(ground, [ground.prompt(tokens)], output, n=count))
        except Refused as error:
            samples, trial.note = 0, f"{count} samples of a long prompt are refused: {error}"
        trial.add(samples / apart, samples=float(samples), prompts=float(apart), prompt_tokens=float(tokens))


async def _samples_of_a_short_one(ground: Ground, output: int, count: int) -> int:
    """How many samples run at once where memory is no matter. CannotTell if so many are refused."""
    try:
        return together(await _streams(ground, ground.short_prompts(1), output, n=count))
    except Refused as error:
        raise CannotTell(f"{count} samples are refused, of a short prompt, too: {error}") from None


def together(streams: list[Stream]) -> int:
    """How many have begun before any has ended."""
    end = min(one.last_s for one in streams)
    return sum(one.first_s < end for one in streams)
