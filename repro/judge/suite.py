"""One server, all claims: within the budget, one after the other, and what was found so far is never lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from repro.judge.claims import CLAIMS, CannotTell, Finding, Trial
from repro.judge.client import Client, Refused
from repro.judge.ground import Ground, survey
from repro.judge.pool import full_pool_preempts, samples_stored_once
from repro.judge.prompts import chunked_prefill, prefix_reuse, samples_computed_once
from repro.judge.queues import first_come_order, iteration_batching, throughput

Probe = Callable[[Ground, Trial], Awaitable[None]]
#: in the order in which they are made: what learns the pool's size comes before what needs it
PROBES: dict[str, Probe] = {
    one.__name__: one
    for one in (
        prefix_reuse,
        samples_computed_once,
        iteration_batching,
        chunked_prefill,
        first_come_order,
        throughput,
        full_pool_preempts,
        samples_stored_once,
    )
}
#: the part of the budget in which the server is surveyed
_SURVEY_SHARE = 0.15


async def judge(
    client: Client,
    name: str,
    budget_s: float,
    seed: int,
    found: Callable[[Finding], None],
    begun: Callable[[str], None] = lambda claim: None,
) -> None:
    """Judge one server, which the ledger calls `name`. `begun` hears of each claim when its probe begins, `found` of
    what has come of it.

    Gone when the server does not answer any more: what was found before has been handed over."""
    await client.open()
    now = asyncio.get_running_loop().time
    end_s = now() + budget_s
    ground = Ground(client, random.Random(f"{seed}/{name}"), budget_s, now() + _SURVEY_SHARE * budget_s)
    unfit = await _within(ground, survey(ground))
    shares = {claim: CLAIMS[claim].share for claim in PROBES}
    for claim, probe in PROBES.items():
        begun(claim)
        trial = Trial(CLAIMS[claim])
        ground.end_s = now() + (end_s - now()) * shares[claim] / sum(shares.values())
        del shares[claim]
        before = await client.counters()
        why = unfit or await _within(ground, probe(ground, trial))
        trial.note = "; ".join(filter(None, (trial.note, why, *ground.said)))
        after = await client.counters()
        trial.numbers |= {f"server_says:{one}": after[one] - before[one] for one in after if one in before}
        found(trial.finding(name, client.model, client.url, seed))


async def _within(ground: Ground, work: Awaitable[None]) -> str:
    """Do it until its time is up; why it did not come to its end, or "". Nothing of it runs any more afterwards."""
    try:
        async with asyncio.timeout(max(0.0, ground.left_s())):
            await work
    except TimeoutError:
        return "its part of the time was up; give a larger --budget"
    except (CannotTell, Refused) as error:
        return str(error)
    finally:
        await ground.client.quiet()
    return ""
