"""Benchmarks of decode and prefill attention. Every output is checked against float32 before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from repro import kernels
from repro.bench.kernels.contenders import Contender, ours, sdpa_contenders
from repro.bench.kernels.timing import PagedInputs, eager_time_us, graph_time_us, in_order, paged_inputs
from repro.kernels import reference
from repro.kernels.decode import DecodePlan

Row = dict[str, Any]
HEADS = {"40 x 128": (40, 40, 128), "32/8 x 128": (32, 8, 128)}  # OPT-13B and LLaMA-3.1-8B
CONTEXTS, BATCHES = (64, 128, 256, 1024, 4096), (1, 8, 32, 128)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative to float32: a few roundings of the output


def ragged_lens() -> list[int]:
    """64 contexts, log-normal (sigma 1), clipped to [1, 2048]; the mean is 619."""
    return [int(n) for n in np.clip(np.random.default_rng(0).lognormal(math.log(400), 1, 64), 1, 2048)]


def shapes() -> list[tuple[str, list[int]]]:
    """The 21 batches: (name of the context, its lengths)."""
    equal = [(str(context), [context] * batch) for context in CONTEXTS for batch in BATCHES]
    return [*equal, ("ragged", ragged_lens())]


def decode(plug_ins: Sequence[Contender]) -> Iterator[Row]:
    """Both head layouts, fp16 and bf16, 21 shapes, blocks of 16; ours also with its blocks in order, the same memory as
    contiguous K and V, which is what paging itself costs."""
    for heads in HEADS:
        for dtype in TOLERANCE:
            for context, lens in shapes():
                contenders = [ours(), *plug_ins]
                if context != "ragged":
                    contenders += sdpa_contenders()
                yield from _decode(heads, dtype, context, lens, 16, contenders, paging_cost=True)


def plans(plug_ins: Sequence[Contender]) -> Iterator[Row]:
    """What plan_decode's constants were read from: every division of the work for every shape, fp16."""
    for heads in HEADS:
        for context, lens in shapes():
            longest = max(lens)
            contenders = []
            for num_warps in (1, 2, 4):
                for chunk in (64, 128, 256, 512, 1024, 2048, 4096):
                    if chunk < 2 * longest:
                        plan = DecodePlan(True, 16 * num_warps, chunk, num_warps, merge=4 * num_warps)
                        contenders.append(ours(plan))
            yield from _decode(heads, torch.float16, context, lens, 16, contenders)


def block_sizes(plug_ins: Sequence[Contender]) -> Iterator[Row]:
    """Block sizes 1 to 256 (Fig. 18b's question put to the kernel alone)."""
    for heads in HEADS:
        for context, lens in (
            ("256", [256] * 32),
            ("1024", [1024] * 32),
            ("256", [256] * 128),
            ("ragged", ragged_lens()),
        ):
            for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                yield from _decode(heads, torch.float16, context, lens, block_size, [ours()])


def fig18a(plug_ins: Sequence[Contender]) -> Iterator[Row]:
    """Fig. 18a's set-up: batches of 8 and 32, contexts of 64, 128 and 256, launched by a graph and one by one."""
    for batch in (8, 32):
        for context in (64, 128, 256):
            for launch in ("graph", "eager"):
                contenders = [ours(), *plug_ins, *sdpa_contenders()]
                yield from _decode(
                    "40 x 128",
                    torch.float16,
                    str(context),
                    [context] * batch,
                    16,
                    contenders,
                    paging_cost=True,
                    launch=launch,
                )


def _decode(
    heads: str,
    dtype: torch.dtype,
    context: str,
    lens: Sequence[int],
    block_size: int,
    contenders: Sequence[Contender],
    paging_cost: bool = False,
    launch: str = "graph",
) -> Iterator[Row]:
    """A row for every contender; with paging_cost one more for ours, over the same pool, blocks in order."""
    permuted = paged_inputs(lens, *HEADS[heads], block_size, dtype)
    runs = [(contender, permuted, "permuted") for contender in contenders]
    if paging_cost:
        runs.append((ours(), in_order(permuted), "in order"))
    for contender, inputs, blocks in runs:
        row = {
            "contender": contender.name,
            "heads": heads,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": len(lens),
            "context": context,
            "block_size": block_size if contender.paged else None,
            "blocks": blocks if contender.paged else "contiguous K and V",
            "launch": launch,
            "bytes": inputs[0].num_bytes,
        }
        try:
            calls = [contender.bind(x) for x in inputs]
            row["error"] = _decode_error(inputs[0], calls[0])
            time_us = graph_time_us if launch == "graph" else eager_time_us
            row["us"] = time_us(calls if len(calls) > 1 else calls * 2)
        except RuntimeError as error:  # a backend that does not take this shape
            row["remark"] = str(error).splitlines()[0][:120]
        yield row


def _decode_error(x: PagedInputs, call: Callable[[], Tensor]) -> float:
    """Relative error of the first sequences against float32. Raises AssertionError beyond rounding."""
    few = min(4, len(x.q))
    exact = torch.cat([_exact(x, row, x.q[row : row + 1]) for row in range(few)])
    return _relative_error(call()[:few].float(), exact, x.q.dtype)


def _exact(x: PagedInputs, sequence: int, q: Tensor) -> Tensor:
    """Attention of the last len(q) positions of one sequence, in float32 over its gathered K and V."""
    lens = x.context_lens[sequence : sequence + 1]
    blocks = x.block_table[sequence, : -(-int(lens) // x.k_cache.shape[1])].long()
    k, v = (cache[blocks].float() for cache in (x.k_cache, x.v_cache))
    table = torch.arange(len(blocks), dtype=torch.int32, device=k.device)[None]
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    return reference.paged_prefill_attention(q.float(), k, v, table, lens, starts, x.scale, len(q))


def _relative_error(out: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    error = ((out - exact).norm() / exact.norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e} against float32"
    return error


def prefill(plug_ins: Sequence[Contender]) -> Iterator[Row]:
    """Whole prompts, and chunks after a prefix; beside SDPA and varlen on contiguous K and V of the same lengths."""
    for heads in HEADS:
        for dtype in TOLERANCE:
            for batch, length, context in ((32, 128, 128), (8, 1024, 1024), (1, 4096, 4096), (8, 512, 4096)):
                yield from _prefill(heads, dtype, batch, length, context)


def _prefill(heads: str, dtype: torch.dtype, batch: int, length: int, context: int) -> Iterator[Row]:
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    inputs = paged_inputs([context] * batch, *HEADS[heads], 16, dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    queries = [torch.randn(batch * length, num_heads, head_dim, dtype=dtype, device="cuda") for _ in inputs]
    pairs = length * (context - length) + length * (length + 1) // 2  # (query, key) pairs of a sequence and head
    flops = 4 * batch * num_heads * head_dim * pairs

    def ours_call(x: PagedInputs, q: Tensor) -> Callable[[], Tensor]:
        out = torch.empty_like(q)
        return lambda: kernels.paged_prefill_attention(
            q, x.k_cache, x.v_cache, x.block_table, x.context_lens, starts, x.scale, length, out
        )

    def sdpa_call(backend: SDPBackend) -> Callable[[PagedInputs, Tensor], Callable[[], Tensor]]:
        def bind(x: PagedInputs, q: Tensor) -> Callable[[], Tensor]:
            k, v = (cache.contiguous() for cache in x.contiguous())
            q = q.view(batch, length, num_heads, head_dim).transpose(1, 2).contiguous()

            def call() -> Tensor:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(
                        q, k, v, is_causal=True, scale=x.scale, enable_gqa=num_heads != num_kv_heads
                    )

            return call

        return bind

    def varlen_call(x: PagedInputs, q: Tensor) -> Callable[[], Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        k, v = (
            cache.transpose(1, 2).flatten(0, 1).repeat_interleave(num_heads // num_kv_heads, 1)
            for cache in x.contiguous()
        )
        return lambda: varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0))

    contenders = {"ours": ours_call}
    if length == context:
        contenders |= {
            "SDPA flash": sdpa_call(SDPBackend.FLASH_ATTENTION),
            "SDPA cuDNN": sdpa_call(SDPBackend.CUDNN_ATTENTION),
            "varlen": varlen_call,
        }
    exact = _exact(inputs[0], 0, queries[0][:length])
    for name, bind in contenders.items():
        row = {
            "contender": name,
            "heads": heads,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "context": str(context),
            "queries": length,
            "block_size": 16 if name == "ours" else None,
            "launch": "graph",
            "flops": flops,
        }
        try:
            calls = [bind(x, q) for x, q in zip(inputs, queries, strict=True)]
            out = calls[0]()
            first = out[0].transpose(0, 1) if out.ndim == 4 else out[:length]  # SDPA: [batch, heads, queries, dim]
            row["error"] = _relative_error(first.float(), exact, dtype)
            row["us"] = graph_time_us(calls if len(calls) > 1 else calls * 2)
        except (ImportError, RuntimeError, TypeError) as error:
            row["remark"] = str(error).splitlines()[0][:120]
        yield row
