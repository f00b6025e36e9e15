"""Measuring: kernels, the real engine, serving, and the simulator's own speed."""
