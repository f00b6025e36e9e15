"""The paper's comparison on this machine, and V1's scheduler beside it: what is measured, in which order.

The most informative points come first; systems take turns within each kind of point, so that a clock that drifts hits
all of them alike. Rates are multiples of each system's own saturated throughput on this machine: in such relative axes
any GPU can be laid over the paper's curves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from repro.bench.benchmark import Benchmark, Step, require_gpu
from repro.bench.kernels.timing import copy_gb_s
from repro.bench.rows import Recording
from repro.bench.serving import calibrate, generate
from repro.bench.serving.warm_engine import WarmEngine, device_name
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import system
from repro.errors import UserError
from repro.simulate.beams import WIDTHS
from repro.simulate.load import PREEMPTIONS, TRANSLATION, Load

#: parallel completions of a request in the launch post's comparison
SAMPLES = 3
#: multiples of saturation at which latency is measured, the most telling first
MULTIPLES = (0.8, 0.5, 0.95)
RECOMPUTED = tuple(2**power for power in range(9))
#: block sizes (tokens) that serve a whole workload, the most telling first: each has a pool and graphs of its own
BLOCK_SIZES = (16, 64, 256, 8, 32, 128, 1)
#: tokens that all prompts of Fig. 16 begin with
PREFIXES = (80, 341)
ORCAS = ("orca-oracle", "orca-pow2", "orca-max")
#: today's scheduler, and its token budgets beside its own
V1, BUDGETS = "vllm-v1", (512, 8192)
#: who shares Fig. 16's prefix, and how: it is declared, or found by the prefix cache of the scheduler of 2023 or of V1
FINDERS = (("vllm", False), ("vllm", True), (V1, False))


@dataclass(frozen=True)
class Timing:
    """Windows (s): saturated from `warm_s` to `saturated_s` (FasterTransformer: `request_level_s`), latency to
    `latency_s`."""

    warm_s: float
    saturated_s: float
    latency_s: float
    request_level_s: float

    def latency_stop_s(self, rate: float) -> float:
        """Where requests are few, the window is longer, so that enough of them arrive to take a mean."""
        return max(self.latency_s, self.warm_s + min(60 / rate, 2 * self.latency_s))


GPU_TIMING = {"sharegpt": Timing(8.0, 28.0, 30.0, 52.0), "alpaca": Timing(3.0, 13.0, 14.0, 14.0)}
#: windows (s) of what comes after the latency curves
SHAREGPT_WINDOW, WINDOW = {"warm_s": 6.0, "stop_s": 20.0}, {"warm_s": 3.0, "stop_s": 11.0}
CPU_TIMING = {"alpaca": Timing(4.0, 14.0, 24.0, 24.0)}


def steps(warm: WarmEngine, recording: Recording, timing: dict[str, Timing], systems: Sequence[str]) -> Iterator[Step]:
    """Every point in order. Later ones look at the rows of earlier ones, so they are made as they come. A CPU, far too
    slow for the paper's model, has only what a prediction is checked against."""
    load_on = partial(Load, max_model_len=warm.loaded.config.max_model_len)

    def saturated(key: str, name: str, workload: str, **others: Any) -> Step:
        times = timing[workload]
        stop_s = times.request_level_s if name == "faster-transformer" else times.saturated_s
        return _step(warm, key, load_on(name, workload, None, times.warm_s, stop_s, **others), stop_s + 2)

    def latency(key: str, saturation: str, name: str, workload: str, multiple: float) -> Step:
        found, times = recording.find(saturation), timing[workload]
        rate = multiple * float(found["finished_rate"]) if found is not None else 0.0
        if not rate:  # without its saturation nobody knows its rate
            return Step(key, 1.2 * times.latency_s, None)
        load = load_on(name, workload, rate, times.warm_s, times.latency_stop_s(rate), seed=1)
        return _step(warm, key, load, 1.2 * load.stop_s, multiple=multiple)

    for workload in timing:
        yield from (saturated(f"saturated/{workload}/{name}", name, workload) for name in systems)
    if warm.on_gpu:
        for size in RECOMPUTED:
            yield Step(f"recompute/{size}", 3, lambda size=size: [calibrate.recompute_row(warm, size)])
        for name in ("vllm", "orca-max"):
            if name in systems:
                yield saturated(f"saturated/sharegpt/{name}/{SAMPLES}", name, "sharegpt", n=SAMPLES)
        if generate.fits(warm):
            yield Step("generate/sharegpt", 150, lambda: [generate.generate_row(warm, "sharegpt")])
    yield Step("steps", 60, lambda: calibrate.cells(warm))
    for multiple, workload, name in product(MULTIPLES, timing, systems):
        key = f"{workload}/{name}"
        yield latency(f"latency/{key}/{multiple:g}", f"saturated/{key}", name, workload, multiple)
    if warm.on_gpu:
        yield from (step for step, name in _sharing_and_blocks(warm, load_on) if name in systems)
        yield Step("prefill", 45, lambda: calibrate.prefill(warm))
    yield Step("chunks", 15, lambda: calibrate.chunks(warm))
    own = system(V1).scheduler.max_num_batched_tokens
    for workload in timing:
        yield saturated(f"v1/saturated/{workload}/{own}", V1, workload)
    for multiple, workload in product(MULTIPLES, timing):
        saturation = f"v1/saturated/{workload}/{own}"
        yield latency(f"v1/latency/{workload}/{multiple:g}", saturation, V1, workload, multiple)
    for budget, workload in product(BUDGETS, timing):
        yield saturated(f"v1/saturated/{workload}/{budget}", V1, workload, budget=budget)
    if warm.on_gpu:
        yield from sharing_beside_v1(warm, load_on)


def _step(warm: WarmEngine, key: str, load: Load, expected_s: float, **more: Any) -> Step:
    """A run of the load as a point of the key's kind; `more` columns."""
    step = Step(key, expected_s, lambda: [warm.measure(load) | {"kind": step.kind, **more}])
    return step


def sharing_beside_v1(warm: WarmEngine, load_on: Callable[..., Load]) -> Iterator[Step]:
    """Saturated runs of a shared prefix, declared or found, and of samples, as a group with copy on write or as
    requests over the prefix cache."""
    few = partial(load_on, rate=None, **WINDOW)
    for prefix, (name, cache) in product(PREFIXES, FINDERS):
        load = few(name, TRANSLATION, prefix_tokens=prefix, prefix_cache=cache)
        yield _step(warm, f"v1-prefix/{prefix}/{name}{'-cached' * cache}", load, load.stop_s + 2)
    for n, name in product(WIDTHS, ("vllm", V1)):
        load = few(name, "alpaca", n=n)
        yield _step(warm, f"v1-samples/{n}/{name}", load, load.stop_s + 2)


def _sharing_and_blocks(warm: WarmEngine, load_on: Callable[..., Load]) -> Iterator[tuple[Step, str]]:
    """Saturated runs of what else vLLM shares and how else it may be set (Fig. 14 to 16, 18b, 19b); each's system."""

    def point(key: str, load: Load, more_s: float = 2) -> tuple[Step, str]:
        return _step(warm, key, load, load.stop_s + more_s), load.system

    few = partial(load_on, rate=None, **WINDOW)
    for method, width, name in product(("parallel", "beam"), WIDTHS, ("vllm", *ORCAS)):
        yield point(f"sharing/{method}/{width}/{name}", few(name, "alpaca", n=width, beams=method == "beam"))
    for prefix, name in product(PREFIXES, ("vllm", "orca-oracle")):
        yield point(f"prefix/{prefix}/{name}", few(name, TRANSLATION, prefix_tokens=prefix))
    sharegpt = partial(load_on, rate=None, **SHAREGPT_WINDOW)
    for size in BLOCK_SIZES:
        for way in PREEMPTIONS:
            load = sharegpt("vllm", "sharegpt", block_size=size, preemption=way)
            # The first one of a size has its pool to set up.
            yield point(f"blocks/{size}/sharegpt/{way}", load, 20 if way == PREEMPTIONS[0] else 2)
        yield point(f"blocks/{size}/alpaca", few("vllm", "alpaca", block_size=size))


class Serving(Benchmark):
    measures = (calibrate.cells, calibrate.chunks, calibrate.prefill, calibrate.recompute_row, generate.generate_row)
    method = (
        "Random weights, greedy or random samples, output lengths forced to the trace's, the K/V pool of Table 1. "
        "Beams are searched at every step and continue where a recorded model's did. Saturated runs: all requests at "
        "the start, useful output tokens/s within the window, interval from five equal parts of it. Latency runs: "
        "Poisson arrivals at multiples of the system's own saturated rate; those that arrive in the window, served to "
        "their end. Steps: medians of decoding alone, means of 8 steps that prompts join. Systems take turns within "
        "each kind of point. Gaps and first tokens are those that a client sees: when the host has the token."
    )
    shown = ("tokens_per_s", "latency_s_per_token", "gap_median_s", "first_token_median_s", "mean_batch", "mark")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.on_gpu = options.device == "cuda"
        if options.kv_slots is not None and options.kv_slots < 1:
            raise UserError(f"--kv-slots {options.kv_slots} must be at least 1")
        if self.on_gpu:
            require_gpu("serving", "--device cpu measures a small model")
        self.setting = {
            "device": device_name(self.on_gpu),
            "model": options.model or ("opt-13b" if self.on_gpu else "smollm2"),
            "dtype": options.dtype or ("float16" if self.on_gpu else "float32"),
            "kv_slots": options.kv_slots or (DEPLOYMENTS["opt-13b"].kv_slots if self.on_gpu else 4096),
        }

    def start(self, recording: Recording) -> dict[str, Any]:
        only, rows = self.options.only, recording.rows
        if "latency" in only and "saturated" not in only and not any(row["kind"] == "saturated" for row in rows):
            none = f"rates follow from saturated runs, and {recording.folder} has none"
            raise UserError(f"--only {' '.join(only)}: {none}; add saturated")
        _, model, dtype, kv_slots = self.setting.values()
        self.warm = WarmEngine(model, kv_slots, self.options.device, dtype)
        return {"cuda": torch.version.cuda, "boot_s": round(self.warm.boot_s, 1), **self._ceilings()}

    def steps(self, recording: Recording) -> Iterator[Step]:
        timing = GPU_TIMING if self.on_gpu else CPU_TIMING
        return steps(self.warm, recording, timing, self.options.systems)

    def finish(self, recording: Recording) -> dict[str, Any]:
        return {"at_the_end": self._ceilings()}

    def _ceilings(self) -> dict[str, float]:
        """Memory bandwidth as it is now (GB/s read plus written)."""
        return {"copy_gb_s": copy_gb_s()} if self.on_gpu else {}
