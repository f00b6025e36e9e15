"""The kernels on this machine's GPU. Everything that results are divided by is measured in the same run: the
device-to-device copy and, for swaps, one large copy over the bus in each direction."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from repro.bench.benchmark import Benchmark, Step, require_gpu
from repro.bench.kernels import attention, memory
from repro.bench.kernels.timing import copy_gb_s, link_gb_s
from repro.bench.rows import Recording, Row


class Kernels(Benchmark):
    measures = (attention, memory)
    method = (
        "CUDA-graph replay (launch=graph) or Python launches (launch=eager) between CUDA events, median of 11 replays "
        "(5 for swaps) after a warm-up; the calls of one replay rotate over sub-pools of at least 320 MB together; "
        "physical blocks in random order; K and V counted once; outputs checked against float32 (data movers: for "
        "equality). copy = device-to-device copy of 4 GiB, bytes read plus written; link = one pinned copy of 1 GiB."
    )
    shown = ("us", "gb_s", "tflop_s", "error", "direction", "blocks", "contender", "remark")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        require_gpu("kernels")
        self.rivals = [attention.plug_in(name) for name in options.contender]
        self.setting = {"device": torch.cuda.get_device_name()}
        if self.rivals:
            self.setting["contenders"] = " ".join(options.contender)

    def start(self, recording: Recording) -> dict[str, Any]:
        self.ceilings = {"copy_gb_s": copy_gb_s(), "link_in_gb_s": link_gb_s(True), "link_out_gb_s": link_gb_s(False)}
        return {"cuda": torch.version.cuda, "ceilings": self.ceilings}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for make in (attention.decode, attention.block_sizes, attention.fig18a, attention.prefill, attention.plans):
            for step in make(self.rivals):
                yield Step(step.key, step.expected_s, partial(self._rows, step))
        for name, expected_s, move in (("write", 2, memory.write), ("copy", 2, memory.copy), ("swap", 10, memory.swap)):
            yield Step(name, expected_s, partial(self._rows, Step(name, expected_s, move)))

    def _rows(self, step: Step) -> Iterator[Row]:
        """The rows of a step with their rates and the shares of the ceilings, in five digits."""
        for row in step.measure():
            row = {"benchmark": step.kind} | row | {"evidence": "measured"} | _rates(row, self.ceilings)
            yield {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()}


def _rates(row: Row, ceilings: dict[str, float]) -> dict[str, float]:
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
