"""Settings -> frames, log and counters as one dictionary that is JSON: in a browser, on the page, in a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from repro.engine.events import Event
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager
from repro.engine.memory.contiguous import ChunkAllocator
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SequenceGroup
from repro.errors import UserError
from repro.explore import queue as queues
from repro.explore import rules
from repro.explore.recording import PIECES, SAMPLE_EVERY, Recording
from repro.explore.settings import Settings

#: (number of slots, whether a chunk is rounded up to a power of two) -> first fit. It belongs to a study, so it is
#: handed in (repro.studies.first_fit.FirstFitAllocator).
FirstFit = Callable[[int, bool], ChunkAllocator]


def run(
    settings: Settings, first_fit: FirstFit, drawn: queues.Drawn | None = None, policies: rules.Policies | None = None
) -> dict[str, Any]:
    """One run of the engine's scheduler, step by step: `counters`, which are those of a row of saturated_queue, and the
    fields of a Recording. `policies` are functions that the settings' code may stand for.

    UserError, with a message of one line, for settings or a rule that do not work."""
    log: list[Event] = []
    policies = policies or {}
    requests, trace_hash, drawn_by = queues.queue(settings, drawn or {})
    try:
        manager = _memory(settings, first_fit, policies)
        recording = _steps(settings, _scheduler(settings, manager, policies, log), requests, log)
    except UserError:
        raise
    except Exception as error:
        raise rules.explained(error, policies) from error
    fields = ("sequences", "waiting", "usage", "preempted", "changes", "sentences")
    return {
        "settings": asdict(settings),
        "trace_hash": trace_hash,
        "drawn_by": drawn_by,
        "counters": recording.counters(),
        "pieces": PIECES,
        "sample_every": SAMPLE_EVERY,
        "lengths": [[group.request.prompt_tokens, group.request.output_tokens] for group in recording.groups.values()],
        "prefix": list(manager.prefix_blocks(queues.PREFIX)) if settings.is_paged and settings.system_prompt else [],
        **{name: getattr(recording, name) for name in fields},
    }


def answer(question: str, first_fit: FirstFit, drawn: queues.Drawn, policies: rules.Policies | None = None) -> str:
    """`run` for a page: settings as JSON -> the result as JSON, or {"error": one line}."""
    try:
        return json.dumps(run(Settings(**json.loads(question)), first_fit, drawn, policies), separators=(",", ":"))
    except UserError as error:
        return json.dumps({"error": " ".join(str(error).split())})


def _steps(settings: Settings, scheduler: Scheduler, requests: list[Request], log: list[Event]) -> Recording:
    groups: dict[int, SequenceGroup] = {}
    recording, upcoming = Recording(settings, scheduler, groups), iter(requests)
    # A step starts max_num_seqs requests at most. So a queue that never empties need not hold all of its requests at
    # once: what is behind them decides nothing.
    most = len(requests) if settings.arrivals else settings.max_num_seqs
    request = next(upcoming, None)
    for step in range(settings.warmup_steps + settings.steps):
        while request is not None and request.arrival_s <= step and len(scheduler.waiting) <= most:
            groups[request.request_id] = scheduler.add(request)
            request = next(upcoming, None)
        output = scheduler.schedule()
        if not settings.arrivals and not scheduler.waiting:
            raise AssertionError("the queue has run dry")
        recording.step(output, log)
        log.clear()
        scheduler.update(output)
    return recording


def _scheduler(settings: Settings, manager: KVCacheManager, policies: rules.Policies, log: list[Event]) -> Scheduler:
    most = {"max_num_seqs": settings.max_num_seqs, "max_num_batched_tokens": None}
    chosen = {"victim": rules.victim(settings, policies)} if settings.is_paged else {}
    return Scheduler(manager, SchedulerConfig(preemption=PreemptionMode.RECOMPUTE, **most, **chosen), log)


def _memory(settings: Settings, first_fit: FirstFit, policies: rules.Policies) -> KVCacheManager:
    """Paging keeps no watermark, as vLLM V1 and saturated_queue. Chunks are cut in single slots."""
    slots, size = settings.kv_slots, settings.block_size
    if settings.is_paged:
        paged = PagedKVCacheManager(slots // size, size, watermark=0.0)
        if settings.system_prompt:
            paged.store_prefix(queues.PREFIX, settings.system_prompt)
        return paged
    round_up = settings.chunks == "explainer" and settings.policy != "oracle"
    allocator = None if settings.chunks == "buddy" else first_fit(slots, round_up)
    reserved = {"reservation": rules.reservation(settings, policies), "max_model_len": settings.max_model_len}
    return ContiguousKVCacheManager(slots, 1, **reserved, allocator=allocator)
