"""The real executor: a transformers model over the paged K/V store, on a CPU or a GPU.

    models      load a model and say what it needs        attention   the one function that transformers' layers call
    kv_store    the pools, and CacheOps applied to them   batch       SchedulerOutput -> arrays
    sampler     logits -> tokens                          runner      the forward pass, CUDA graphs for decoding
    executor    ties them together behind Executor        bench       end-to-end throughput on a GPU

Only this package and `repro.kernels` import torch.
"""
