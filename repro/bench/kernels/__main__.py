"""Measure the kernels on this machine's GPU: rows (CSV) and a manifest that says on what, with what and how.

Everything that results are divided by is measured in the same run: the device-to-device copy and, for swaps, one large
copy over the bus in each direction."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from pathlib import Path

from repro.engine.errors import UserError
from repro.setup.machine import machine

METHOD = (
    "CUDA-graph replay (launch=graph) or Python launches (launch=eager) between CUDA events, median of 11 replays (5 "
    "for swaps) after a warm-up; the calls of one replay rotate over sub-pools of at least 320 MB together; physical "
    "blocks in random order; K and V counted once; outputs checked against float32 (data movers: for equality). copy = "
    "device-to-device copy of 4 GiB, bytes read plus written; link = one pinned copy of 1 GiB."
)
COLUMNS = (
    "benchmark",
    "contender",
    "heads",
    "dtype",
    "batch",
    "context",
    "queries",
    "tokens",
    "pairs",
    "block_size",
    "blocks",
    "direction",
    "launch",
    "us",
    "bytes",
    "gb_s",
    "fraction_of_copy",
    "fraction_of_link",
    "flops",
    "tflop_s",
    "error",
    "remark",
    "evidence",
    "device",
)


def main() -> None:
    """Run the named benchmarks and write DIR/kernels.csv and DIR/manifest.json. Raises UserError without a GPU."""
    names = ("decode", "block_sizes", "fig18a", "prefill", "write", "copy", "swap")
    parser = argparse.ArgumentParser(prog="python -m repro.bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.csv and manifest.json")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*names, "plans"),
        default=list(names),
        metavar="NAME",
        help=f"only these: {', '.join(names)}; or plans, a sweep for tuning on another GPU",
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="another paged decode kernel to measure in the same run",
    )
    parser.add_argument("--commit", help="the code's commit, where git cannot tell it")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "no CUDA GPU here, and kernels are measured on one; the rows recorded on an H200 are in "
            "experiments/recorded/h200/kernels"
        )
    from repro.bench.kernels import attention, memory
    from repro.bench.kernels.contenders import plug_in
    from repro.bench.kernels.timing import copy_gb_s, link_gb_s

    started = time.monotonic()
    plug_ins = [plug_in(name) for name in options.contender]
    device = torch.cuda.get_device_name()
    ceilings = {"copy_gb_s": copy_gb_s(), "link_in_gb_s": link_gb_s(True), "link_out_gb_s": link_gb_s(False)}
    print(device, {name: round(value, 1) for name, value in ceilings.items()})
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in options.only:
            module = memory if hasattr(memory, name) else attention
            for row in getattr(module, name)(plug_ins):
                row |= {"benchmark": name, "evidence": "measured", "device": device, **_rates(row, ceilings)}
                writer.writerow({key: f"{x:.5g}" if isinstance(x, float) else x for key, x in row.items()})
                file.flush()
                print(" ".join(str(round(x, 4) if isinstance(x, float) else x) for x in row.values()))
            torch.cuda.empty_cache()
    manifest = {
        **machine(),
        "device": device,
        "cuda": torch.version.cuda,
        "ceilings": ceilings,
        "method": METHOD,
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.commit:
        manifest["commit"] = options.commit
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _rates(row: dict, ceilings: dict[str, float]) -> dict[str, float]:
    """GB/s and TFLOP/s of a row, and its share of the ceiling that bounds it."""
    if "us" not in row:
        return {}
    rates = {}
    if "bytes" in row:
        rates["gb_s"] = row["bytes"] / row["us"] / 1e3
        if "direction" in row:
            rates["fraction_of_link"] = rates["gb_s"] / ceilings[f"link_{row['direction']}_gb_s"]
        else:
            rates["fraction_of_copy"] = rates["gb_s"] / ceilings["copy_gb_s"]
    if "flops" in row:
        rates["tflop_s"] = row["flops"] / row["us"] / 1e6
    return rates


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
