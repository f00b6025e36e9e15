"""Measurements of the paged kernels on a GPU: `python -m repro.bench.kernels --out DIR` (docs/performance.md)."""
