"""Measurements of the paged kernels on a GPU: `python -m repro bench kernels` (docs/performance.md)."""
