"""Measure the paper's comparison on this machine: rows (CSV) and a manifest that says on what, with what and how.

    python -m repro.bench.serving --out DIR [--budget 30m]

Call it again with the same folder to go on where it stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro.bench.budget import seconds_of
from repro.engine.config import DEPLOYMENTS
from repro.engine.errors import UserError
from repro.engine.systems import SYSTEMS
from repro.harness.store import locked
from repro.hashing import pretty_json, read_json, write_atomically
from repro.setup.machine import machine
from repro.simulate.load import POINTS

METHOD = (
    "Random weights, greedy or random samples, output lengths forced to the trace's, the K/V pool of Table 1. Beams "
    "are searched at every step and continue where a recorded model's did. Saturated runs: all requests at the start, "
    "useful output tokens/s within the window, interval from five equal parts of it. Latency runs: Poisson arrivals at "
    "multiples of the system's own saturated rate; those that arrive in the window, served to their end. Steps: "
    "medians of decoding alone, means of 8 steps that prompts join. Systems take turns within each kind of point."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m repro.bench.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for serving.csv and manifest.json")
    parser.add_argument("--budget", default="2h", help="time in all, such as 90s, 30m or 2h (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", help="default: opt-13b on a GPU, smollm2 on a CPU")
    parser.add_argument("--dtype", help="default: float16 on a GPU, float32 on a CPU")
    parser.add_argument("--kv-slots", type=int, help="pool in tokens (default: Table 1's for OPT-13B; 4096 on a CPU)")
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=POINTS,
        default=POINTS,
        metavar="KIND",
        help=f"kinds of points: {', '.join(POINTS)}",
    )
    parser.add_argument(
        "--also-code",
        nargs="+",
        default=[],
        metavar="HASH",
        help="let rows measured by earlier code count, too (the column `code` says by which)",
    )
    parser.add_argument("--commit", help="the code's commit, where git cannot tell it")
    options = parser.parse_args(arguments)
    budget_s, on_gpu = seconds_of(options.budget), options.device == "cuda"
    if options.kv_slots is not None and options.kv_slots < 1:
        raise UserError(f"--kv-slots {options.kv_slots} must be at least 1")
    model = options.model or ("opt-13b" if on_gpu else "smollm2")
    dtype = options.dtype or ("float16" if on_gpu else "float32")
    kv_slots = options.kv_slots or (DEPLOYMENTS["opt-13b"].kv_slots if on_gpu else 4096)
    import torch

    if on_gpu and not torch.cuda.is_available():
        raise UserError(
            "no CUDA GPU here; rows recorded on an H200 are in experiments/recorded/h200/serving, and --device cpu "
            "measures a small model"
        )
    setting = {"model": model, "dtype": dtype, "kv_slots": kv_slots}
    with locked(options.out / ".lock", wait=False, about="python -m repro.bench.serving"):
        return measure_into(options, setting, budget_s, on_gpu)


def measure_into(options: argparse.Namespace, setting: dict[str, Any], budget_s: float, on_gpu: bool) -> int:
    """What main does once it knows what to measure. The budget counts from here: the engine's start is part of it."""
    import torch

    from repro.bench.serving import plan
    from repro.bench.serving.warm_engine import Bench, device_name

    code = plan.code_hash(device=device_name(on_gpu), **setting)
    rows = plan.Rows(options.out / plan.ROWS, code, options.also_code)
    if (
        "latency" in options.only
        and "saturated" not in options.only
        and not any(row["kind"] == "saturated" for row in rows.rows)
    ):
        raise UserError(
            f"--only {' '.join(options.only)}: rates follow from saturated runs, and {options.out} has none; add "
            "saturated"
        )
    model, dtype, kv_slots = setting.values()
    bench = Bench(model, kv_slots, options.device, dtype)
    print(
        f"{bench.device_name}, {model} in {dtype}: {bench.executor.manager.num_blocks} blocks; ready after "
        f"{bench.boot_s:.0f} s",
        flush=True,
    )
    manifest = {
        **machine(),
        "device": bench.device_name,
        "cuda": torch.version.cuda,
        **setting,
        "boot_s": round(bench.boot_s, 1),
        "method": METHOD,
        **ceilings(on_gpu),
    }
    if options.commit:
        manifest["commit"] = options.commit
    earlier = read_json(options.out / "manifest.json")
    if rows.all:  # this call goes on with what another one began
        manifest["earlier_parts"] = [*earlier.pop("earlier_parts", []), earlier]
    write_atomically(options.out / "manifest.json", pretty_json(manifest))
    timing = plan.GPU_TIMING if on_gpu else plan.CPU_TIMING
    points = (step for step in plan.steps(bench, rows, timing, tuple(options.systems)) if step.kind in options.only)
    later, never = plan.work_through(points, rows, budget_s - bench.boot_s, device=bench.device_name, **setting)
    write_atomically(
        options.out / "manifest.json",
        pretty_json(manifest | {"at_the_end": ceilings(on_gpu), "points_left_out": later + never}),
    )
    print(
        f"{len(rows.rows)} rows in {options.out / plan.ROWS}"
        + (f"; {never} points cannot be measured, see above" if never else "")
        + (
            f"; {later} points left out, as the budget of {options.budget} would be overrun: call again to go on"
            if later
            else ""
        )
    )
    return 0


def ceilings(on_gpu: bool) -> dict[str, float]:
    """Memory bandwidth as it is now (GB/s read plus written)."""
    if not on_gpu:
        return {}
    from repro.bench.kernels.timing import copy_gb_s

    return {"copy_gb_s": copy_gb_s()}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
