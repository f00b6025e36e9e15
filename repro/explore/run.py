"""Settings -> frames, log and counters, as one dictionary that is JSON: in a browser, on the page, in a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from repro.engine.events import Event
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager
from repro.engine.memory.contiguous import ChunkAllocator
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import SequenceGroup
from repro.errors import UserError
from repro.explore import queue as queues
from repro.explore import rules
from repro.explore.recording import PIECES, SAMPLE_EVERY, Recording
from repro.explore.settings import Settings, settings

#: (number of slots, whether a chunk is rounded up to a power of two) -> first fit. It belongs to a study, so it is
#: handed in (repro.studies.first_fit.FirstFitAllocator).
FirstFit = Callable[[int, bool], ChunkAllocator]


def run(chosen: Settings, first_fit: FirstFit, drawn: queues.Drawn | None = None) -> dict[str, Any]:
    """One run of the engine's scheduler, step by step.

    `counters` are those of a row of saturated_queue. `changes`, `sentences` and `head` are in order of their steps, of
    which there is one an entry of `sequences` and `waiting`; repro.explore.recording has their fields. UserError for
    settings or a rule that do not work; its message is one line."""
    queue = queues.queue(chosen, drawn or {})
    log: list[Event] = []
    try:
        scheduler = _scheduler(chosen, first_fit, log)
        recording = _steps(chosen, scheduler, queue, log)
    except UserError:
        raise
    except Exception as error:
        raise rules.explained(error) from error
    return {
        "settings": asdict(chosen),
        "trace_hash": queue.trace_hash,
        "drawn_by": queue.drawn_by,
        "counters": recording.counters(),
        "pieces": list(PIECES),
        "sample_every": SAMPLE_EVERY,
        "lengths": [[group.request.prompt_tokens, group.request.output_tokens] for group in recording.groups.values()],
        "preempted": recording.preempted,
        "sequences": recording.sequences,
        "waiting": recording.waiting if chosen.arrivals else [],
        "usage": recording.usage,
        "head": recording.head,
        "changes": recording.changes,
        "sentences": recording.sentences,
        "prefix": _prefix(scheduler.manager),
    }


def answer(question: str, first_fit: FirstFit, drawn: queues.Drawn) -> str:
    """`run` for a page: settings as JSON -> the result as JSON, or {"error": one line}."""
    try:
        values: Mapping[str, Any] = json.loads(question)
        return json.dumps(run(settings(values), first_fit, drawn), separators=(",", ":"))
    except UserError as error:
        return json.dumps({"error": " ".join(str(error).split())})


def _steps(chosen: Settings, scheduler: Scheduler, queue: queues.Queue, log: list[Event]) -> Recording:
    groups: dict[int, SequenceGroup] = {}
    recording, upcoming = Recording(chosen, scheduler, groups), iter(queue.requests)
    # A step starts max_num_seqs requests at most. So a queue that never empties need not hold all of its requests at
    # once: what is behind them decides nothing.
    most = len(queue.requests) if chosen.arrivals else chosen.max_num_seqs
    request = next(upcoming, None)
    for step in range(chosen.warmup_steps + chosen.steps):
        while request is not None and request.arrival_s <= step and len(scheduler.waiting) <= most:
            groups[request.request_id] = scheduler.add(request)
            request = next(upcoming, None)
        output = scheduler.schedule()
        if not chosen.arrivals and not scheduler.waiting:
            raise AssertionError("the queue has run dry")
        recording.step(output, log)
        log.clear()
        scheduler.update(output)
    return recording


def _scheduler(chosen: Settings, first_fit: FirstFit, log: list[Event]) -> Scheduler:
    config = SchedulerConfig(
        preemption=PreemptionMode.RECOMPUTE, max_num_seqs=chosen.max_num_seqs, max_num_batched_tokens=None
    )
    manager = _memory(chosen, first_fit)
    if chosen.policy == "yours" and chosen.rule == "preemption":
        return rules.RuledScheduler(manager, config, log, rules.function(chosen.code, chosen.rule))
    return Scheduler(manager, config, log)


def _memory(chosen: Settings, first_fit: FirstFit) -> KVCacheManager:
    """Paging keeps no watermark, as vLLM V1 and saturated_queue. Chunks are cut in single slots."""
    if chosen.is_paged:
        paged = PagedKVCacheManager(chosen.kv_slots // chosen.block_size, chosen.block_size, watermark=0.0)
        if chosen.system_prompt:
            paged.store_prefix(queues.PREFIX, chosen.system_prompt)
        return paged
    round_up = chosen.chunks == "explainer" and chosen.policy != "oracle"
    allocator = None if chosen.chunks == "buddy" else first_fit(chosen.kv_slots, round_up)
    reserved = {"reservation": rules.reservation(chosen), "max_model_len": chosen.max_model_len}
    return ContiguousKVCacheManager(chosen.kv_slots, 1, **reserved, allocator=allocator)


def _prefix(manager: KVCacheManager) -> list[int]:
    """The blocks of the stored system prompt."""
    is_stored = isinstance(manager, PagedKVCacheManager) and queues.PREFIX in manager._prefixes
    return list(manager.prefix_blocks(queues.PREFIX)) if is_stored else []
