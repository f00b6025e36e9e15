"""Long prompts among decoding sequences, on a GPU: what a token budget does for those that wait for their next token.

32 sequences decode, with prompts of 64 tokens and outputs that last. A prompt of 2,048 tokens with 8 output tokens
arrives every 0.25 s. 7 s are counted after a warm-up: the gaps between a decoding sequence's tokens, and the time from
a long prompt's arrival to its first token, both as a client sees them. LLaMA-13B's shapes with random bf16 weights, all
memory that is free, greedy, lengths forced. V1's scheduler cuts the prompts at three token budgets; the scheduler of
2023 runs them whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from repro.bench.benchmark import Benchmark, Step, require_gpu
from repro.bench.rows import Recording, Row
from repro.bench.serving.client import TokenTimes, gaps, quantile
from repro.bench.serving.warm_engine import WarmEngine
from repro.engine.clock import WallClock
from repro.engine.loop import Engine
from repro.engine.sequence import Request
from repro.engine.systems import System, of_today, system
from repro.errors import UserError
from repro.llm import models
from repro.simulate.load import GREEDY

MODEL, DTYPE = "llama-13b", "bfloat16"
#: systems and their token budgets, None for the system's own, which no long prompt exceeds
RUNS = (("vllm-v1", 512), ("vllm-v1", 2048), ("vllm-v1", 8192), ("vllm", None))
#: column -> share of all gaps, or of all first tokens, that it does not exceed
GAPS = {"gap_median_ms": 0.5, "gap_90_ms": 0.9, "gap_99_ms": 0.99, "gap_largest_ms": 1.0}
FIRST = {"first_token_median_ms": 0.5, "first_token_99_ms": 0.99}


@dataclass(frozen=True)
class Mix:
    """The load: lengths in tokens, times in s. What happens in `counted_s` after `warm_s` counts; the run goes on for
    `after_s`, so that the last long prompts get their first token."""

    decoding: int = 32
    prompt: int = 64
    long_prompt: int = 2048
    long_output: int = 8
    every_s: float = 0.25
    warm_s: float = 3.0
    counted_s: float = 7.0
    after_s: float = 1.0
    max_model_len: int = 2560

    @property
    def stop_s(self) -> float:
        return self.warm_s + self.counted_s

    @property
    def requests(self) -> list[Request]:
        """First those that decode, which would last until the model's limit; then the long ones as they arrive."""
        count, output = self.decoding, self.max_model_len - self.prompt
        arrivals = [self.every_s * index for index in range(1, int(self.stop_s / self.every_s))]
        return [Request(index, 0.0, self.prompt, output, GREEDY) for index in range(count)] + [
            Request(index, arrival, self.long_prompt, self.long_output, GREEDY)
            for index, arrival in enumerate(arrivals, start=count)
        ]


def measure(warm: WarmEngine, chosen: System, mix: Mix) -> Row:
    """One run of the mix: gaps and first tokens in ms. UserError if a decoding sequence ends before the count does."""
    requests = mix.requests
    scheduler = warm.ready(chosen, requests)
    clock = WallClock()
    seen = TokenTimes(clock)
    warm.executor.on_settled = seen.note
    Engine(scheduler, warm.executor, clock).run(requests, mix.stop_s + mix.after_s)
    warm.executor.flush()
    times = seen.of_requests()
    decoding = [times[one.request_id] for one in requests[: mix.decoding]]
    if (first := min(own[-1] for own in decoding)) < mix.stop_s:
        raise UserError(
            f"a sequence of {mix.max_model_len} tokens ended after {first:.1f} s, and {mix.stop_s:g} s are to be "
            "measured; count fewer seconds, or take a longer max_model_len"
        )
    long = [one for one in requests[mix.decoding :] if one.arrival_s >= mix.warm_s]
    answered = [one for one in long if one.request_id in times]
    waited = [times[one.request_id][0] - one.arrival_s for one in answered]
    between = gaps(decoding, mix.warm_s, mix.stop_s)
    row = {"system": chosen.name, "budget": chosen.scheduler.max_num_batched_tokens}
    for values, columns in ((between, GAPS), (waited, FIRST)):
        found = {name: quantile(values, share) for name, share in columns.items()}
        row |= {name: None if seconds is None else 1e3 * seconds for name, seconds in found.items()}
    row |= {"num_gaps": len(between), "num_prompts": len(long), "num_unanswered": len(long) - len(answered)}
    return row | {"preemptions": scheduler.num_preemptions, "boot_s": warm.boot_s, "evidence": "measured"}


class Mixed(Benchmark):
    measures = (measure, Mix)
    method = __doc__
    shown = (*GAPS, *FIRST, "num_gaps", "num_prompts", "num_unanswered")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        require_gpu("mixed")
        self.mix = Mix()
        self.setting = {"model": MODEL, "dtype": DTYPE, "device": torch.cuda.get_device_name()}

    def start(self, recording: Recording) -> dict[str, Any]:
        loaded = models.load(MODEL, "cuda", DTYPE)
        # Its own limit is one of training; positions are turned, not looked up, and so go on.
        longer = replace(loaded, config=replace(loaded.config, max_model_len=self.mix.max_model_len))
        self.warm = WarmEngine.in_memory(longer, 0)
        return {"cuda": torch.version.cuda, "pool_tokens": self.warm.deployment.kv_slots}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for name, budget in RUNS:
            yield Step(f"{name}/{budget or 'whole'}", self.mix.stop_s + 4, partial(self._rows, name, budget))

    def _rows(self, name: str, budget: int | None) -> list[Row]:
        chosen = of_today(system(name))
        if budget is not None:
            chosen = chosen.with_scheduler(max_num_batched_tokens=budget)
        return [measure(self.warm, chosen, self.mix)]
