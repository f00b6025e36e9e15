"""What an event log says of the rules of scheduling: how often each was put to the test, and how often it was broken.

The log is replayed from the requests and the configuration alone: whoever decided is not asked. Rules are those of §4.5
and of iteration-level and static batching; what the counts mean for a claim is stated with the claim."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from repro.engine.events import Event
from repro.engine.memory import KVCacheManager, PagedKVCacheManager
from repro.engine.scheduler import Batching, SchedulerConfig
from repro.engine.sequence import Request

#: later ahead: requests that ran more iterations than an earlier one that still wants to run; swapped ahead: the same,
#: by requests that had been swapped out, which return before all that wait to be recomputed. parts lost: swapped groups
#: that did something while they were out, or came back with other blocks. kept waiting: iterations in which
#: something ended and the first in the queue would have fitted (paged memory, requests of one sequence). idle: sequence
#: iterations of members that had ended in a static batch. padded: prompt slots up to the longest prompt of the batch.
COUNTS = (
    "later_ahead",
    "swapped_ahead",
    "returned_first",
    "preemptions",
    "other_victims",
    "groups_swapped",
    "parts_lost",
)
COUNTS += ("recomputations", "not_one_pass", "ended_then_started", "kept_waiting")
COUNTS += ("sequence_iterations", "idle", "prompt_slots", "padded", "swapped_percent")


class Replay:
    """One log, event by event; `counts` holds COUNTS."""

    def __init__(self, requests: Iterable[Request], manager: KVCacheManager, config: SchedulerConfig) -> None:
        ordered = sorted(requests, key=lambda one: (one.arrival_s, one.request_id))
        self.requests = {request.request_id: request for request in ordered}
        self.place = {request_id: place for place, request_id in enumerate(self.requests)}
        self.manager, self.config = manager, config
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.waiting: set[int] = set()
        self.entered: dict[int, int] = {}  # of running requests: since which iteration
        self.swapped: dict[int, int] = {}  # blocks
        self.recomputed: dict[int, int] = {}  # tokens that were stored
        self.ran: Counter[int] = Counter()  # iterations before the present run
        self.live: set[int] = set()
        self.again: set[int] = set()  # were recomputed
        self.was_swapped: set[int] = set()
        self.returned = -1  # iteration in which the last static batch did
        # Whether a request's blocks follow from its length: nothing shared, nothing reserved.
        one_each = all(request.sampling.n == 1 and request.prefix_id is None for request in ordered)
        self.counts_blocks = isinstance(manager, PagedKVCacheManager) and one_each

    def run(self, events: Iterable[Event]) -> Counter[str]:
        by_iteration: dict[int, list[Event]] = {}
        for event in events:
            by_iteration.setdefault(event.iteration, []).append(event)
        for iteration, group in by_iteration.items():
            self._order(iteration)
            for event in group:
                if event.request_id in self.swapped and event.kind != "resume":
                    self.counts["parts_lost"] += 1
                getattr(self, f"_{event.kind}", self._nothing)(event)
            if self.counts_blocks:
                self._queue(iteration, group)
        return self.counts

    def iterations(self, request_id: int, now: int) -> int:
        since = self.entered.get(request_id)
        return self.ran[request_id] + (0 if since is None else now - since)

    def _order(self, now: int) -> None:
        """First come, first served: no later request is ahead of an earlier one."""
        live = sorted(self.live, key=self.place.__getitem__)
        counts = [self.iterations(request_id, now) for request_id in live]
        for request_id, count, fewest in zip(live[1:], counts[1:], accumulate(counts, min)):
            if count > fewest:
                self.counts["swapped_ahead" if request_id in self.was_swapped else "later_ahead"] += 1

    def _queue(self, now: int, group: list[Event]) -> None:
        """After an ending the first in the queue starts, if its blocks are free and the caps allow it."""
        kinds = {event.kind for event in group}
        if "finish" not in kinds or "preempt" in kinds or self.swapped:
            return
        self.counts["ended_then_started"] += "admit" in kinds
        if not self.waiting:
            return
        request = self.requests[min(self.waiting, key=self.place.__getitem__)]
        needed, size = request.prompt_tokens + self.ran[request.request_id], self.manager.block_size
        stored = (self.requests[one].prompt_tokens + self.iterations(one, now) for one in self.entered)
        free = self.manager.num_blocks - self.manager.watermark_blocks - sum(-(-tokens // size) for tokens in stored)
        limit, started = (
            self.config.max_num_batched_tokens,
            [one.detail["tokens"] for one in group if one.kind == "admit"],
        )
        decoding = len(self.entered) - len(started)
        in_budget = limit is None or needed + sum(started) + decoding <= limit
        may_start = len(self.entered) < self.config.max_num_seqs and in_budget
        self.counts["kept_waiting"] += may_start and -(-needed // size) <= free

    def _nothing(self, event: Event) -> None:
        pass

    def _arrive(self, event: Event) -> None:
        self.waiting.add(event.request_id)
        self.live.add(event.request_id)

    def _admit(self, event: Event) -> None:
        request = self.requests[event.request_id]
        self.waiting.discard(event.request_id)
        self.entered[event.request_id] = event.iteration
        stored = self.recomputed.pop(event.request_id, None)
        if stored is not None:
            total, n = stored + 1, request.sampling.n
            # Samples and beams share their prompt, at least its full blocks.
            common = total if n == 1 or total == request.prompt_tokens else request.prompt_tokens
            full = common if common == total else common // self.manager.block_size * self.manager.block_size
            self.counts["not_one_pass"] += event.detail["tokens"] != full + (total - full) * n

    def _resume(self, event: Event) -> None:
        self.entered[event.request_id] = event.iteration
        self.counts["parts_lost"] += self.swapped.pop(event.request_id) != event.detail["blocks"]

    def _preempt(self, event: Event) -> None:
        number = event.request_id
        self.counts["preemptions"] += 1
        self.counts["other_victims"] += number != max(self.entered, key=self.place.__getitem__)
        self.ran[number] += event.iteration - self.entered.pop(number)
        if event.detail["mode"] == "swap":
            self.swapped[number] = event.detail["blocks"]
            self.was_swapped.add(number)
            self.counts["groups_swapped"] += self.requests[number].sampling.n > 1
            share = 100 * sum(self.swapped.values()) / self.manager.num_blocks
            self.counts["swapped_percent"] = max(self.counts["swapped_percent"], share)
        else:
            self.waiting.add(number)
            self.recomputed[number] = event.detail["tokens"]
            self.again.add(number)
            self.counts["recomputations"] += 1

    def _finish(self, event: Event) -> None:
        number, static = event.request_id, self.config.batching is Batching.REQUEST
        request = self.requests[number]
        if static and event.iteration != self.returned:  # the first of a batch, which returns as a whole
            self.returned = event.iteration
            prompts = [self.requests[one].prompt_tokens for one in self.entered]
            self.counts["prompt_slots"] += max(prompts) * len(prompts)
            self.counts["padded"] += max(prompts) * len(prompts) - sum(prompts)
        self.ran[number] += event.iteration - self.entered.pop(number)
        self.live.discard(number)
        self.counts["sequence_iterations"] += self.ran[number]
        self.counts["idle"] += self.ran[number] - request.output_tokens
        self.counts["not_one_pass"] += number in self.again and self.ran[number] != request.output_tokens
        self.counts["returned_first"] += any(self.place[other] < self.place[number] for other in self.live)
