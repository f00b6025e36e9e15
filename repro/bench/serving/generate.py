"""The other end of the scale: transformers' own `generate` with static batches, without a serving engine.

Prompts of a batch are padded to the longest, and a batch runs until its longest output is done; only tokens that were
asked for count. The batch is as large as surely fits the pool: every request takes the model's maximum length."""

import copy
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from repro.bench.rows import Row
from repro.bench.serving.warm_engine import WarmEngine
from repro.llm.executor import within_memory
from repro.simulate.load import Load
from repro.workloads import Trace

NUM_BATCHES = 2
#: of free GPU memory that a second copy of the weights must leave
SPARE_BYTES = 8 << 30


def fits(warm: WarmEngine) -> bool:
    """Whether the GPU has room for the weights once more, beside the engine."""
    weights = warm.loaded.model.num_parameters() * warm.loaded.dtype.itemsize
    return torch.cuda.mem_get_info()[0] > weights + SPARE_BYTES


def generate_row(warm: WarmEngine, workload: str) -> Row:
    """Useful output tokens/s over NUM_BATCHES static batches of the workload's first requests."""
    batch = max(1, warm.deployment.kv_slots // warm.loaded.config.max_model_len)
    trace = Load("vllm", workload, None, 0.0, 1.0).trace
    seconds = within_memory(lambda: _seconds(warm, trace, batch), "in transformers' generate")
    useful = int(trace.output_tokens[: NUM_BATCHES * batch].sum())
    row = {"kind": "generate", "system": "transformers generate", "workload": workload, "batch": batch}
    row |= {"num_finished": NUM_BATCHES * batch, "tokens_per_s": useful / seconds, "seconds": seconds}
    return row | {"trace_hash": trace.hash, "evidence": "measured", "device": warm.device_name}


def _seconds(warm: WarmEngine, trace: Trace, batch: int) -> float:
    """Of NUM_BATCHES batches, with a copy of the engine's model that lasts as long."""
    config, dtype = copy.deepcopy(warm.loaded.model.config), warm.loaded.dtype
    with torch.device(warm.loaded.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    try:
        _run(model, [32] * batch, 8)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for index in range(NUM_BATCHES):
            part = slice(index * batch, (index + 1) * batch)
            _run(model, trace.prompt_tokens[part].tolist(), int(trace.output_tokens[part].max()))
        torch.cuda.synchronize()
        return time.perf_counter() - started
    finally:
        del model
        torch.cuda.empty_cache()


@torch.no_grad()
def _run(model: Any, prompts: list[int], new_tokens: int) -> None:
    """One static batch of random prompts, padded on the left."""
    width = max(prompts)
    ids = torch.randint(4, model.config.vocab_size, (len(prompts), width), device=model.device)
    real = torch.arange(width, device=model.device) >= width - torch.tensor(prompts, device=model.device)[:, None]
    lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    model.generate(ids, attention_mask=real.long(), do_sample=False, **lengths, pad_token_id=1)
