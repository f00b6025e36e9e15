"""Probes of what a prompt costs: seen before, for several samples, and beside running streams."""

from __future__ import annotations

import statistics

from repro.judge.claims import CannotTell, Trial, Verdict
from repro.judge.client import Answer
from repro.judge.ground import Ground, tokens_for

_SAMPLES = 4
_STREAMS = 3


async def prefix_reuse(ground: Ground, trial: Trial) -> None:
    """A fresh prompt, the same once more, and one of which only the second half is new; one after the other."""
    ground.need_long()
    while not trial.is_over:
        words = ground.words(ground.long)
        half = words[: len(words) // 2] + ground.words(ground.long)[len(words) // 2 :]
        fresh_s, seen_s, half_s = [await ground.first_s(" ".join(one)) for one in (words, words, half)]
        trial.add(seen_s / fresh_s, fresh_s=fresh_s, seen_s=seen_s, second_half_new_s=half_s)


async def samples_computed_once(ground: Ground, trial: Trial) -> None:
    """Four samples of one prompt, and four prompts; every prompt is fresh. None ends before all have begun: a prompt
    that can be found once its request has ended would be found by the other samples."""
    ground.need_long()
    output = min(ground.room - ground.long, 16 + 2 * _SAMPLES * tokens_for(ground.long_s, ground.token_s))
    while not trial.is_over:
        samples_s = await _all_begun_s(ground.client.begin([ground.prompt(ground.long)], output, n=_SAMPLES))
        prompts = [ground.prompt(ground.long) for _ in range(_SAMPLES)]
        prompts_s = await _all_begun_s(ground.client.begin(prompts, output))
        trial.add(samples_s / prompts_s, samples_s=samples_s, prompts_s=prompts_s)


async def _all_begun_s(answer: Answer) -> float:
    """Until all streams have their first token; then they are stopped."""
    await answer.until(lambda: all(one.times for one in answer.streams))
    await answer.stop()
    return answer.first_wait_s


async def chunked_prefill(ground: Ground, trial: Trial) -> None:
    """A long prompt comes while three streams run. Where it waits until they have ended, it is sent together with
    them."""
    ground.need_long()
    alone_s = statistics.median([await ground.first_s(ground.prompt(ground.longest)) for _ in range(3)])
    while not trial.is_over:
        waited_s = await _wait_beside(ground, alone_s)
        how = "came later"
        if waited_s is None:
            waited_s, how = await _wait_together(ground, alone_s), "came together"
        trial.note = f"a prompt of {ground.longest} tokens {how}"
        trial.add(waited_s / alone_s, alone_s=alone_s, waited_s=waited_s)
    if trial.claim.decide(trial.values) is Verdict.FAILS:
        trial.note += "; a token budget of more than that would cut none"


def _outputs(ground: Ground, alone_s: float) -> int:
    """Tokens of streams that run until a long prompt is computed, however that is done."""
    return min(ground.room // 2, 16 + 2 * tokens_for(alone_s, ground.token_s), 512)


async def _wait_beside(ground: Ground, alone_s: float) -> float | None:
    """The longest gap of a running stream until the long prompt has its first token; None if that came when they had
    all ended."""
    streams = ground.client.begin(ground.short_prompts(_STREAMS), _outputs(ground, alone_s))
    await streams.until(lambda: all(len(one.times) >= 3 for one in streams.streams))
    late = ground.client.begin([ground.prompt(ground.longest)], 1)
    await late.done()
    counts = [len(one.times) for one in streams.streams]
    if streams.task.done():
        return None
    await streams.until(lambda: all(len(one.times) >= seen + 2 for one, seen in zip(streams.streams, counts)))
    await streams.stop()
    return max(_gaps(streams, late.sent_s))


def _gaps(answer: Answer, since_s: float) -> list[float]:
    """Between two tokens of a stream, of which the second came after that moment."""
    return [
        after - before
        for stream in answer.streams
        for before, after in zip(stream.times, stream.times[1:])
        if after > since_s
    ]


async def _wait_together(ground: Ground, alone_s: float) -> float:
    """The longest time that a short prompt, sent with the long one behind it, is without a token."""
    prompts = [*ground.short_prompts(_STREAMS), ground.prompt(ground.longest)]
    if not ground.client.takes_lists:
        raise CannotTell(
            "a long prompt waits until running streams have ended, and the server takes no lists of prompts"
        )
    answer = ground.client.begin(prompts, min(_outputs(ground, alone_s), ground.max_len - ground.room))
    long = answer.streams[-1]
    await answer.until(lambda: bool(long.times) and all(len(one.times) >= 2 for one in answer.streams))
    await answer.stop()
    until_s, waits = long.first_s, []
    if any(one.last_s < until_s and one.reason for one in answer.streams[:-1]):
        raise CannotTell("a long prompt waits until streams beside it have ended, also if it came together with them")
    for stream in answer.streams[:-1]:
        times = [answer.sent_s, *stream.times]
        waits += [after - before for before, after in zip(times, times[1:]) if before < until_s]
    return max(waits)
