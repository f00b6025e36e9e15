"""Benchmarks of decode and prefill attention, beside torch's SDPA on contiguous K and V, and plug-ins. Every output is
checked against float32 before it is timed.

A plug-in is any importable function(q, k_cache, v_cache, block_table, context_lens, scale, max_context_len) -> output,
in the layout of repro.kernels, named as MODULE:FUNCTION; it must be capturable in a CUDA graph, and is called once on
every input before that, so that it can plan on the host."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from repro import kernels
from repro.bench.benchmark import Step
from repro.bench.kernels.memory import BLOCK_SIZES
from repro.bench.kernels.timing import PagedInputs, eager_time_us, graph_time_us, in_order, paged_inputs
from repro.bench.rows import Row
from repro.errors import UserError
from repro.kernels import decode as decode_kernel
from repro.kernels import reference
from repro.kernels.decode import DecodePlan

HEADS = {"40 x 128": (40, 40, 128), "32/8 x 128": (32, 8, 128)}  # OPT-13B and LLaMA-3.1-8B
CONTEXTS, BATCHES = (64, 128, 256, 1024, 4096), (1, 8, 32, 128)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative to float32: a few roundings of the output
Call = Callable[[], Tensor]
#: the two backends of torch's attention that a GPU of today chooses from
SDPA = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Contender:
    """A name and a way to make, from one call's inputs, a function that launches it and returns [batch, heads, dim].

    `paged` contenders read the pool through the block table; the others get contiguous K and V of equal lengths."""

    name: str
    bind: Callable[[PagedInputs], Call]
    paged: bool = True


def ours(plan: DecodePlan | None = None) -> Contender:
    """Our kernel, with its own plan or a given one; all calls share the workspace, as one stream's calls may."""
    workspace = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")

    def bind(x: PagedInputs) -> Call:
        arguments = (*x.arguments(), torch.empty_like(x.q), workspace)
        if plan is None:
            return partial(kernels.paged_decode_attention, *arguments)
        return partial(decode_kernel.paged_decode_attention, *arguments, plan)

    return Contender("ours" if plan is None else f"ours, {plan.num_warps} warps, chunk {plan.chunk}", bind)


def attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, scale: float, **causal: bool) -> Tensor:
    """torch's own attention with one backend, over [batch, heads, tokens, dim]."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **causal)


def sdpa_contenders() -> list[Contender]:
    """Each of SDPA, on contiguous copies of the same K and V."""

    def bind(backend: SDPBackend, x: PagedInputs) -> Call:
        q, (k, v) = x.q.unsqueeze(2), x.contiguous()
        return lambda: attend(backend, q, k, v, x.scale).squeeze(2)

    return [Contender(name, partial(bind, backend), paged=False) for name, backend in SDPA.items()]


def plug_in(name: str) -> Contender:
    """The contender MODULE:FUNCTION. Raises UserError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        kernel = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"contender {name!r} cannot be imported ({error}); name one as MODULE:FUNCTION and install what it needs"
        ) from error

    return Contender(name, lambda x: partial(kernel, *x.arguments()))


def ragged_lens() -> list[int]:
    """64 contexts, log-normal (sigma 1), clipped to [1, 2048]; the mean is 619."""
    return [int(n) for n in np.clip(np.random.default_rng(0).lognormal(math.log(400), 1, 64), 1, 2048)]


def shapes() -> list[tuple[str, list[int]]]:
    """The 21 batches: (name of the context, its lengths)."""
    equal = [(str(context), [context] * batch) for context in CONTEXTS for batch in BATCHES]
    return [*equal, ("ragged", ragged_lens())]


def decode(rivals: Sequence[Contender]) -> Iterator[Step]:
    """Both head layouts, fp16 and bf16, 21 shapes, blocks of 16; ours also with its blocks in order, the same memory as
    contiguous K and V, which is what paging itself costs."""
    for heads, dtype, (context, lens) in product(HEADS, TOLERANCE, shapes()):
        others = (*rivals, *(sdpa_contenders() if context != "ragged" else ()))
        yield _step("decode", heads, dtype, context, lens, others=others, paging_cost=True)


def plans(rivals: Sequence[Contender]) -> Iterator[Step]:
    """What plan_decode's constants were read from: every division of the work for every shape, fp16."""
    for heads, (context, lens) in product(HEADS, shapes()):
        chunks = [chunk for chunk in (64, 128, 256, 512, 1024, 2048, 4096) if chunk < 2 * max(lens)]
        ways = product((1, 2, 4), chunks)
        divisions = [DecodePlan(True, 16 * warps, chunk, warps, merge=4 * warps) for warps, chunk in ways]
        yield _step("plans", heads, torch.float16, context, lens, divisions=divisions)


def block_sizes(rivals: Sequence[Contender]) -> Iterator[Step]:
    """Block sizes 1 to 256 (Fig. 18b's question put to the kernel alone)."""
    batches = (("256", [256] * 32), ("1024", [1024] * 32), ("256", [256] * 128), ("ragged", ragged_lens()))
    for heads, (context, lens), size in product(HEADS, batches, BLOCK_SIZES):
        yield _step("block_sizes", heads, torch.float16, context, lens, block_size=size)


def fig18a(rivals: Sequence[Contender]) -> Iterator[Step]:
    """Fig. 18a's set-up: batches of 8 and 32, contexts of 64, 128 and 256, launched by a graph and one by one."""
    others = (*rivals, *sdpa_contenders())
    for batch, context, launch in product((8, 32), (64, 128, 256), ("graph", "eager")):
        about = {"others": others, "paging_cost": True, "launch": launch}
        yield _step("fig18a", "40 x 128", torch.float16, str(context), [context] * batch, **about)


def _step(name: str, heads: str, dtype: torch.dtype, context: str, lens: Sequence[int], **how: Any) -> Step:
    how = {"block_size": 16, "launch": "graph", "divisions": (None,)} | how
    key = f"{name}/{heads}/{_name(dtype)}/{len(lens)} of {context}/blocks of {how['block_size']}/{how['launch']}"
    return Step(key, 0.4 * len(how["divisions"]), partial(_decode, heads, dtype, context, lens, **how))


def _decode(
    heads: str,
    dtype: torch.dtype,
    context: str,
    lens: Sequence[int],
    block_size: int,
    launch: str,
    divisions: Sequence[DecodePlan | None],
    others: Sequence[Contender] = (),
    paging_cost: bool = False,
) -> Iterator[Row]:
    """A row for ours with each plan and for every other contender; with paging_cost one more for ours, with the blocks
    of the same pool in order. The first sequences are checked against float32."""
    permuted, few = paged_inputs(lens, *HEADS[heads], block_size, dtype), min(4, len(lens))
    runs = [(contender, permuted, "permuted") for contender in (*map(ours, divisions), *others)]
    if paging_cost:
        runs.append((ours(), in_order(permuted), "in order"))
    time_us = graph_time_us if launch == "graph" else eager_time_us
    about = {"heads": heads, "dtype": _name(dtype), "batch": len(lens), "context": context}
    for contender, inputs, blocks in runs:
        row = {"contender": contender.name, **about, "block_size": block_size if contender.paged else None}
        row |= {"blocks": blocks if contender.paged else "contiguous K and V", "launch": launch}
        with _remarked(row | {"bytes": inputs[0].num_bytes}, RuntimeError) as row:
            calls = [contender.bind(x) for x in inputs]
            exact = torch.cat([_exact(inputs[0], index, inputs[0].q[index : index + 1]) for index in range(few)])
            row["error"] = _relative_error(calls[0]()[:few].float(), exact, dtype)
            row["us"] = time_us(calls if len(calls) > 1 else calls * 2)
        yield row


@contextmanager
def _remarked(row: Row, *errors: type[Exception]) -> Iterator[Row]:
    """The row, with a remark in place of a time from a backend that does not take its shape, or is not there."""
    try:
        yield row
    except errors as error:
        row["remark"] = str(error).splitlines()[0][:120]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _exact(x: PagedInputs, sequence: int, q: Tensor) -> Tensor:
    """Attention of the last len(q) positions of one sequence, in float32 over its gathered K and V."""
    lens = x.context_lens[sequence : sequence + 1]
    blocks = x.block_table[sequence, : -(-int(lens) // x.k_cache.shape[1])].long()
    k, v = (cache[blocks].float() for cache in (x.k_cache, x.v_cache))
    table = torch.arange(len(blocks), dtype=torch.int32, device=k.device)[None]
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    return reference.paged_prefill_attention(q.float(), k, v, table, lens, starts, x.scale, len(q))


def _relative_error(out: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """AssertionError beyond rounding."""
    error = ((out - exact).norm() / exact.norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e} against float32"
    return error


def prefill(rivals: Sequence[Contender]) -> Iterator[Step]:
    """Whole prompts, and chunks after a prefix; beside SDPA and varlen on contiguous K and V of the same lengths."""
    sizes = ((32, 128, 128), (8, 1024, 1024), (1, 4096, 4096), (8, 512, 4096))
    for heads, dtype, (batch, length, context) in product(HEADS, TOLERANCE, sizes):
        key = f"prefill/{heads}/{_name(dtype)}/{batch} of {context}/{length} queries"
        yield Step(key, 0.5, partial(_prefill, heads, dtype, batch, length, context))


def _prefill(heads: str, dtype: torch.dtype, batch: int, length: int, context: int) -> Iterator[Row]:
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    inputs = paged_inputs([context] * batch, *HEADS[heads], 16, dtype)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    queries = [torch.randn(batch * length, num_heads, head_dim, dtype=dtype, device="cuda") for _ in inputs]
    pairs = length * (context - length) + length * (length + 1) // 2  # (query, key) pairs of a sequence and head

    def ours_call(x: PagedInputs, q: Tensor) -> Call:
        out = torch.empty_like(q)
        arguments = (q, x.k_cache, x.v_cache, x.block_table, x.context_lens, starts, x.scale, length, out)
        return partial(kernels.paged_prefill_attention, *arguments)

    def sdpa_call(backend: SDPBackend, x: PagedInputs, q: Tensor) -> Call:
        q = q.view(batch, length, num_heads, head_dim).transpose(1, 2).contiguous()
        return partial(attend, backend, q, *x.contiguous(), x.scale, is_causal=True)

    def varlen_call(x: PagedInputs, q: Tensor) -> Call:
        from torch.nn.attention.varlen import varlen_attn

        flat = (cache.transpose(1, 2).flatten(0, 1) for cache in x.contiguous())
        k, v = (cache.repeat_interleave(num_heads // num_kv_heads, 1) for cache in flat)
        return lambda: varlen_attn(q, k, v, starts, starts, length, length, window_size=(-1, 0))

    contenders: dict[str, Callable[[PagedInputs, Tensor], Call]] = {"ours": ours_call}
    if length == context:
        contenders |= {name: partial(sdpa_call, backend) for name, backend in SDPA.items()} | {"varlen": varlen_call}
    exact = _exact(inputs[0], 0, queries[0][:length])
    about = {"heads": heads, "dtype": _name(dtype), "batch": batch, "context": str(context), "queries": length}
    for name, bind in contenders.items():
        row = {"contender": name, **about, "block_size": 16 if name == "ours" else None, "launch": "graph"}
        row["flops"] = 4 * batch * num_heads * head_dim * pairs
        with _remarked(row, ImportError, RuntimeError, TypeError):
            calls = [bind(x, q) for x, q in zip(inputs, queries, strict=True)]
            out = calls[0]()
            first = out[0].transpose(0, 1) if out.ndim == 4 else out[:length]  # SDPA: [batch, heads, queries, dim]
            row["error"] = _relative_error(first.float(), exact, dtype)
            row["us"] = graph_time_us(calls if len(calls) > 1 else calls * 2)
        yield row
