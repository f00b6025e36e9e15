"""What a monitoring system reads at /metrics: vLLM V1's names and meanings, two of 2023's, and two of this project's.

All numbers are kept by the engine's thread, in an observer, and written out by that thread between two iterations: one
page is one moment. Times are in seconds, by the engine's clock. A request here is one of the engine's: V1 runs n
samples as n requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory.interface import KVCacheManager
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup

_WAITS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_SPANS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: name -> (its upper bounds, what it is)
_HISTOGRAMS = {
    "time_to_first_token_seconds": (_WAITS_S, "From arrival to the first token."),
    "inter_token_latency_seconds": (_GAPS_S, "Between two tokens of a request."),
    "e2e_request_latency_seconds": (_SPANS_S, "From arrival to the last token."),
    "request_queue_time_seconds": (_SPANS_S, "From arrival until it is scheduled first."),
    "request_prefill_time_seconds": (_SPANS_S, "From being scheduled to the first token."),
    "request_decode_time_seconds": (_SPANS_S, "From the first token to the last one."),
    "iteration_tokens_total": (_TOKENS, "Tokens computed in an iteration, of prompts and outputs."),
}
REASONS = ("stop", "length", "abort")


class Histogram:
    """Counts of values by upper bound, which a value may equal, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, values up to it), as the format wants them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts):
            total += count
            found.append((str(float(bound)) if bound < math.inf else "+Inf", total))
        return found


class Metrics(Observer):
    """Give it to an engine as an observer, and to its feed as the watcher. `page` is what is to be sent."""

    def __init__(self, model_name: str) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.success = Counter(dict.fromkeys(REASONS, 0))
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._labels = {"model_name": model_name}
        self._scheduled_s: dict[int, float] = {}  # by request, until it ends
        self._token_s: dict[SequenceGroup, float] = {}  # the last token of each that has one
        self._group: dict[int, SequenceGroup] = {}
        self._engine: Engine | None = None
        self._before = 0, 0  # asked and found, when the engine began: a cache may be older
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # In the engine's thread

    def begin(self, engine: Engine) -> None:
        """This is the engine; nothing has run."""
        self._engine = engine
        self._before = engine.scheduler.manager.num_asked, engine.scheduler.manager.num_hit

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = engine.clock.now
        for prefill in (*output.chunks, *output.prefills):
            self._scheduled_s.setdefault(prefill.group.request.request_id, start_s)
        for prefill in output.prefills:
            group = prefill.group
            self.generation_tokens += len(group.seqs)
            if group in self._token_s:  # it was driven out, and has been computed again
                self._gap(now - self._token_s[group])
            else:
                self.prompt_tokens += group.request.prompt_tokens
                self.histograms["time_to_first_token_seconds"].add(now - group.request.arrival_s)
                self._group[group.request.request_id] = group
            self._token_s[group] = now
        for group in output.decodes:
            if group in self._token_s:  # a static batch computes those along that have ended
                self._gap(now - self._token_s[group])
                self._token_s[group] = now
        self.generation_tokens += output.num_decode_seqs
        if tokens := output.num_prefill_tokens + output.num_decode_seqs:
            self.histograms["iteration_tokens_total"].add(tokens)

    def _gap(self, seconds: float) -> None:
        self.histograms["inter_token_latency_seconds"].add(seconds)

    def ended(self, request: Request, outcome: Outcome, reason: str) -> None:
        self.success[reason] += 1
        scheduled = self._scheduled_s.pop(request.request_id, None)
        group = self._group.pop(request.request_id, None)
        last = self._token_s.pop(group, None)
        if reason == "abort" or last is None:
            return
        if not math.isnan(outcome.finish_s):  # else its static batch goes on without it
            last = outcome.finish_s
        for name, seconds in (
            ("e2e_request_latency_seconds", last - request.arrival_s),
            ("request_queue_time_seconds", scheduled - request.arrival_s),
            ("request_prefill_time_seconds", outcome.first_token_s - scheduled),
            ("request_decode_time_seconds", last - outcome.first_token_s),
        ):
            self.histograms[name].add(seconds)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families, for the registry."""
        if self._engine is None:
            return
        scheduler = self._engine.scheduler
        manager = scheduler.manager
        usage = manager.usage(scheduler.stored_lengths(scheduler.iteration - 1))
        cpu = getattr(manager, "cpu", None)
        swapped = 1 - cpu.num_free / cpu.num_blocks if cpu is not None and cpu.num_blocks else 0.0
        asked, found = self._before
        gauges = {
            "vllm:num_requests_running": (len(scheduler.holders()), "Requests that hold memory of the GPU."),
            "vllm:num_requests_waiting": (len(scheduler.waiting), "Requests in the queue, also those driven out."),
            "vllm:num_requests_swapped": (len(scheduler.swapped), "Requests swapped to the CPU."),
            "vllm:kv_cache_usage_perc": (1 - manager.num_free_blocks / manager.num_blocks, "Share of blocks in use."),
            "vllm:cpu_cache_usage_perc": (swapped, "Share of the CPU's blocks in use."),
            "repro:kv_slots_token_perc": (usage.token_states / usage.total, "Share of slots that hold a token."),
            "repro:kv_blocks_of_nobody": (blocks_of_nobody(self._engine), "Blocks in use that no request holds."),
        }
        for name, (value, text) in gauges.items():
            yield self._one(GaugeMetricFamily, name, text, value)
        counters = {
            "vllm:num_preemptions": (scheduler.num_preemptions, "Preemptions."),
            "vllm:prefix_cache_queries": (manager.num_asked - asked, "Prompt tokens looked for in the prefix cache."),
            "vllm:prefix_cache_hits": (manager.num_hit - found, "Prompt tokens found in the prefix cache."),
            "vllm:prompt_tokens": (self.prompt_tokens, "Prompt tokens of requests that have a first token."),
            "vllm:generation_tokens": (self.generation_tokens, "Tokens generated."),
        }
        for name, (value, text) in counters.items():
            yield self._one(CounterMetricFamily, name, text, value)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.success.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success
        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][1], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets, histogram.sum)
            yield family

    def _one(self, kind: type, name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def blocks_of_nobody(engine: Engine) -> int:
    """Blocks that are not free and that no request holds: 0, or memory is lost."""
    scheduler = engine.scheduler
    manager: KVCacheManager = scheduler.manager
    held: set[int] = set()
    for group in scheduler.holders():
        for seq in group.seqs:
            held.update(manager.block_table(seq))
    return manager.num_blocks - manager.num_free_blocks - len(held)
