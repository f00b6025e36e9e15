"""The real executor: a transformers model over the paged K/V store, on a CPU or a GPU.

    models      load a model and say what it needs
    attention   the one function that transformers' attention layers call
    kv_store    the pools, and CacheOps applied to them
    pool        how large a pool to make
    state       what is remembered of a request: its tokens
    batch       SchedulerOutput -> arrays
    runner      the forward pass; CUDA graphs for decoding
    fuse        decoder layers through torch.compile
    sampler     logits -> tokens
    executor    ties them together behind Executor
    bench       end-to-end throughput on a GPU

Only this package and `repro.kernels` import torch.
"""
