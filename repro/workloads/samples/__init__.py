"""A small trace in Azure's columns, to try the trace tools on. It is nobody's data: `make_sample` made it.

    write_trace(make_sample(), SAMPLE)

A package of its own, because data beside a module counts as that module's source (repro.harness.sources)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from repro.workloads import Trace, make_trace

SAMPLE = Path(__file__).with_name("bursts.csv")
_WAVE_S = 50.0


def make_sample() -> Trace:
    """About 300 ShareGPT-like requests in 150 s, whose rate swings between 1.1 and 10 requests/s, three times."""
    even = make_trace("sharegpt", rate=2.0, duration_s=150.0, seed=0)
    swing = 0.8 * _WAVE_S / (2 * np.pi) * np.sin(2 * np.pi * even.arrival_s / _WAVE_S)
    return replace(even, arrival_s=np.round(even.arrival_s + swing, 2))
