"""Measuring: `python -m repro bench NAME`.

catalogue   what can be measured, with its options
benchmark   what a benchmark is: steps that give rows
rows        the recording: one file of rows and one manifest in a folder
run         works through the steps within a budget, and goes on where an earlier call stopped
kept        which recording a study reads: this machine's own, or the one that comes with the project
processes   several benchmarks, each in a process of its own; what `make reproduce` measures first
simulator, kernels, end_to_end, serving, beams, anchors     the benchmarks"""
