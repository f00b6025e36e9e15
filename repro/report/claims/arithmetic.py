"""The exact claims that need neither a scheduler nor a workload: the sums behind them, written out.

Each function returns a claim's value in the claim's own shape and unit, from a model's architecture and the lengths
that the claim states. What a claim takes as given (a pool's size, say) is passed on unchanged and marked as an input in
the data file. Claims about Table 1 and Fig. 1 and 3 are computed from rows in `repro.studies.fig01_memory`.
"""

from __future__ import annotations

from collections.abc import Callable

from repro.engine.config import GIB, MODELS
from repro.report.claims.rules import Tree

KIB, MIB = 2**10, 2**20
BLOCK_SIZE = 16
#: 36 layers, K and V, 8 heads of 128, 2 bytes: the model of the explainer and of the guide
EXPLAINER_TOKEN_BYTES = 36 * 2 * 8 * 128 * 2
POOL_TOKENS = 405_239
MAX_MODEL_LEN = 40_960


def blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def block_bytes_llama31_8b() -> Tree:
    per_token = MODELS["llama-3.1-8b"].kv_bytes_per_token
    return {"per_token_kib": per_token / KIB, "per_block_mib": BLOCK_SIZE * per_token / MIB}


def quiz_blocks() -> Tree:
    short = blocks(256 + 100)
    long_prompt = blocks(8000)
    return {
        "short_request_blocks": short,
        "hundred_short": 100 * short,
        "long_prompt_blocks": long_prompt,
        "total": 100 * short + 5 * long_prompt,
        "total_after_generation": 100 * short + 5 * blocks(8000 + 100),
        "pool": 10_000,
        "static_unused_slots": 8192 - (256 + 100),
    }


def kv_per_token_144kib() -> Tree:
    return {
        "kib": EXPLAINER_TOKEN_BYTES / KIB,
        "pool_gib": POOL_TOKENS * EXPLAINER_TOKEN_BYTES / GIB,
        "pool_tokens": POOL_TOKENS,
    }


def boot_line_concurrency() -> Tree:
    return {"tokens": POOL_TOKENS, "max_model_len": MAX_MODEL_LEN, "concurrency": POOL_TOKENS / MAX_MODEL_LEN}


def block_table_size() -> Tree:
    return {f"block{size}_mib": 128 * blocks(MAX_MODEL_LEN, size) * 4 / MIB for size in (16, 1)}


def shared_prefix_whole_blocks() -> Tree:
    return {f"block{size}": 1000 // size * size for size in (16, 256)}


def last_block_bytes() -> Tree:
    per_sequence = (BLOCK_SIZE - 1) * EXPLAINER_TOKEN_BYTES / MIB
    return {"per_sequence_mib": per_sequence, "bound_95_mib": 95 * per_sequence}


def request_32k() -> Tree:
    return 32 * KIB * EXPLAINER_TOKEN_BYTES / GIB


def short_prefix_shares_nothing() -> Tree:
    return 12 // BLOCK_SIZE


def idle_slots() -> Tree:
    return 2048 - 280


def last_block_share() -> Tree:
    return 100 * (BLOCK_SIZE - 1) / 512


def shared_system_prompt() -> Tree:
    return 4000 // BLOCK_SIZE


COMPUTE: dict[str, Callable[[], Tree]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        block_bytes_llama31_8b,
        quiz_blocks,
        kv_per_token_144kib,
        boot_line_concurrency,
        block_table_size,
        shared_prefix_whole_blocks,
        last_block_bytes,
        request_32k,
        short_prefix_shares_nothing,
        idle_slots,
        last_block_share,
        shared_system_prompt,
    )
}
