"""Who is measured beside our decode kernel, in the same run: torch's SDPA on contiguous K and V, and plug-ins.

A plug-in is any importable function(q, k_cache, v_cache, block_table, context_lens, scale, max_context_len)
-> output, in this package's layout, named as MODULE:FUNCTION; it must be capturable in a CUDA graph, and is
called once on every input before that, so that it can plan on the host. This module deliberately knows no
shapes and no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from repro import kernels
from repro.bench.kernels.timing import PagedInputs
from repro.engine.errors import UserError
from repro.kernels import decode
from repro.kernels.decode import DecodePlan

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
        about = (x.block_table, x.context_lens, x.scale, x.max_context_len)
        arguments = (x.q, x.k_cache, x.v_cache, *about, torch.empty_like(x.q), workspace)
        if plan is None:
            return partial(kernels.paged_decode_attention, *arguments)
        return partial(decode.paged_decode_attention, *arguments, plan)

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

    def bind(x: PagedInputs) -> Call:
        return partial(kernel, x.q, x.k_cache, x.v_cache, x.block_table, x.context_lens, x.scale, x.max_context_len)

    return Contender(name, bind)
