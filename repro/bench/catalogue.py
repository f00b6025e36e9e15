"""What can be measured, with the options of each benchmark. Nothing heavy is imported until one is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from repro.bench.benchmark import Benchmark
from repro.engine.systems import OF_THE_PAPER, SYSTEMS

Option = tuple[str, dict[str, Any]]


def _option(flag: str, help: str, **settings: Any) -> Option:
    """An option as argparse's add_argument takes it."""
    return flag, {"help": help, **settings}


@dataclass(frozen=True)
class Description:
    """One benchmark: `place` is MODULE:CLASS, `kinds` are the first parts of its points' keys, `unasked` those that are
    measured only when they are named."""

    name: str
    help: str
    place: str
    kinds: tuple[str, ...]
    options: tuple[Option, ...] = ()
    unasked: tuple[str, ...] = ()
    budget: str = "2h"

    def open(self, options: Any) -> Benchmark:
        """The benchmark with these options. UserError for what cannot be measured here."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)(options)

    def all_options(self) -> Sequence[Option]:
        """Those that every benchmark has, and its own."""
        extra = f"; or, only when named, {', '.join(self.unasked)}" if self.unasked else ""
        kinds = {"nargs": "+", "choices": (*self.kinds, *self.unasked), "default": self.kinds, "metavar": "KIND"}
        return (
            _option(
                "--out", f"folder for {self.name}.csv and manifest.json (default: results/bench/{self.name})", type=Path
            ),
            _option("--budget", "time in all, such as 90s, 30m or 2h (default: %(default)s)", default=self.budget),
            _option("--only", f"kinds of points: {', '.join(self.kinds)}{extra}", **kinds),
            _option("--also-code", "let rows of this earlier code count, too", nargs="+", default=[], metavar="HASH"),
            _option("--commit", "the code's commit, where git cannot tell it"),
            *self.options,
        )


def _pool_and_system(text: str) -> tuple[float, str]:
    gib, _, name = text.partition(":")
    return float(gib), name


_MODEL, _DTYPE = "a name or a folder (default: %(default)s)", "of weights and K/V (default: %(default)s)"
_CONTENDER = {"action": "append", "default": [], "metavar": "MODULE:FUNCTION"}
_SYSTEMS = {"nargs": "+", "choices": sorted(SYSTEMS), "default": list(OF_THE_PAPER), "metavar": "SYSTEM"}
_RUNS = {"type": _pool_and_system, "nargs": "+", "metavar": "GIB:SYSTEM"}
_DESCRIPTIONS = (
    Description(
        "simulator",
        "simulated hours a second, by rate, system, batch and trace length",
        "repro.bench.simulator:Simulator",
        ("rate", "system", "batch", "trace-length"),
    ),
    Description(
        "kernels",
        "the paged kernels on a GPU, beside torch's own and the copy bandwidth",
        "repro.bench.kernels.plan:Kernels",
        ("decode", "block_sizes", "fig18a", "prefill", "write", "copy", "swap"),
        (_option("--contender", "another paged decode kernel to measure in the same run", **_CONTENDER),),
        unasked=("plans",),
    ),
    Description(
        "end_to_end",
        "throughput of the real engine on a GPU, and where its time goes",
        "repro.bench.end_to_end:EndToEnd",
        tuple(SYSTEMS),
        (
            _option("--model", "a name or a folder (default: llama-13b; opt-13b for a workload)"),
            _option("--dtype", "of weights and K/V (default: bfloat16; float16 for a workload)"),
            _option("--num-gpus", "split the model over so many (default: %(default)s)", type=int, default=1),
            _option("--runs", "pool and system, such as 12:vllm-v1; 0: all memory that is free", **_RUNS),
            _option("--passes", "timed runs per pool of vllm and vllm-v1", type=int, default=2),
            _option("--requests", "only the first so many", type=int),
            _option("--batched-tokens", "tokens of an iteration at most (default: each system's own)", type=int),
            _option(
                "--watermark", "share of the blocks that starts leave free (default: each system's own)", type=float
            ),
            _option("--lengths", "CSV file of prompt_tokens,output_tokens", type=Path),
            _option("--workload", "the first requests of a trace, and Table 1's pool", choices=("alpaca", "sharegpt")),
            _option("--plain", "neither CUDA graphs nor torch.compile", action="store_true"),
        ),
    ),
    Description(
        "serving",
        "the paper's comparison on this machine: five systems, sharing, block sizes, step times; V1's scheduler",
        "repro.bench.serving.plan:Serving",
        (
            *("saturated", "recompute", "generate", "steps", "latency", "sharing", "prefix", "blocks", "prefill"),
            *("chunks", "v1", "v1-prefix", "v1-samples"),
        ),
        (
            _option("--device", "cuda or cpu (default: %(default)s)", default="cuda", choices=("cuda", "cpu")),
            _option("--model", "default: opt-13b on a GPU, smollm2 on a CPU"),
            _option("--dtype", "default: float16 on a GPU, float32 on a CPU"),
            _option("--kv-slots", "pool in tokens (default: Table 1's for OPT-13B; 4096 on a CPU)", type=int),
            _option("--systems", "only these", **_SYSTEMS),
        ),
    ),
    Description(
        "mixed",
        "gaps and first tokens on a GPU where long prompts arrive among decoding sequences, by token budget",
        "repro.bench.mixed:Mixed",
        ("vllm-v1", "vllm"),
    ),
    Description(
        "beams",
        "which beams of a real model survive: the recording that simulations replay",
        "repro.bench.beams:Beams",
        ("instruction", "chat", "text"),
        (
            _option("--model", _MODEL, default="smollm2"),
            _option("--device", "cpu or cuda (default: %(default)s)", default="cpu"),
            _option("--dtype", _DTYPE, default="float32"),
            _option("--kv-gib", "memory of the K/V pool; more means larger batches", type=float, default=4.0),
            _option("--prompts", "only the first so many of each kind", type=int),
            _option("--steps", "record so many steps of each", type=int),
        ),
        budget="48h",
    ),
    Description(
        "anchors",
        "the cost model's anchors, solved again",
        "repro.bench.anchors:Anchors",
        ("opt-13b", "opt-66b", "opt-175b"),
        (_option("--lengths", "the authors' lengths (CSV), for FasterTransformer's extra on their trace", type=Path),),
    ),
)
BENCHMARKS = {description.name: description for description in _DESCRIPTIONS}
