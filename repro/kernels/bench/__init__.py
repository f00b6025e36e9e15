"""Measurements of the paged kernels on a GPU: `python -m repro.kernels.bench --out DIR` (docs/performance.md)."""
