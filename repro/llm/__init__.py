"""The real executor: a transformers model over the paged K/V store, on a CPU or a GPU.

    models      load a model and say what it needs
    acceptance  whether the engine computes what a model does
    attention   the one function that transformers' attention layers call
    kv_store    the pools, and CacheOps applied to them
    pool        how large a pool to make
    pace        how many threads to use on a CPU
    turns       who uses a model now
    detokenizer   tokens -> text as they come, and where a stop text ends it
    state       what is remembered of a request: its tokens
    batch       SchedulerOutput -> arrays
    model_runner   the forward pass; CUDA graphs for decoding
    fuse        decoder layers through torch.compile
    sampler     logits -> tokens
    beams       which beams go on, and which have finished
    requests    prompts as a user gives them -> requests
    results     what comes of them
    shards      which part of each weight a GPU holds
    parts       what a part is made from: random weights, files
    workers     the other GPUs' processes
    parallel    what they are told
    executor    ties them together behind Executor
    sequences   fork, append, free: decoding of one's own (section 5.2)
    recorder    what a run is watched for
    status      what an operator reads while it runs
    missed      why a prompt was not found in the prefix cache
    serving     an engine that is fed while it runs
    llm         LLM, the face of all this

Only this package, `repro.kernels` and `repro.bench` import torch."""

import os
import warnings

from repro.errors import left_out
from repro.setup.environment import wait_without_spinning

wait_without_spinning(os.environ)  # before torch: whoever starts the process, a script or another Jupyter

with warnings.catch_warnings():
    # In a notebook tqdm recommends a package of widgets, once, when transformers imports this. Nothing here needs that.
    warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto  # noqa: F401

try:
    from repro.llm.llm import LLM
    from repro.llm.results import Generation, RequestResult, Sample, Statistics
except ModuleNotFoundError as error:
    raise left_out(error) from None

__all__ = ["LLM", "Generation", "RequestResult", "Sample", "Statistics"]
