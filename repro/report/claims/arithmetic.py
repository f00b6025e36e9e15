"""The exact claims that need neither a scheduler nor a workload: the sums behind them, written out.

Each sum gives a claim's value in the claim's own shape and unit. What a claim takes as given (a pool's size, say) is
passed on unchanged and marked as an input in the data file."""

from __future__ import annotations

from collections.abc import Callable

from repro.engine.config import GIB, MODELS
from repro.report.claims.rules import Tree

KIB, MIB = 2**10, 2**20
BLOCK_SIZE = 16
#: 36 layers, K and V, 8 heads of 128, 2 bytes: the model of the explainer and of the guide
EXPLAINER_TOKEN_BYTES = 36 * 2 * 8 * 128 * 2
LLAMA_TOKEN_BYTES = MODELS["llama-3.1-8b"].kv_bytes_per_token
POOL_TOKENS = 405_239
MAX_MODEL_LEN = 40_960
#: by block size: what is shared of a prefix of 1,000 tokens, whole blocks as in the manager
SHARED_OF_1000 = {f"block{size}": 1000 // size * size for size in (16, 256)}
LAST_BLOCK_MIB = (BLOCK_SIZE - 1) * EXPLAINER_TOKEN_BYTES / MIB


def blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


#: claim -> the sum
COMPUTE: dict[str, Callable[[], Tree]] = {
    "block-bytes-llama31-8b": lambda: {
        "per_token_kib": LLAMA_TOKEN_BYTES / KIB,
        "per_block_mib": BLOCK_SIZE * LLAMA_TOKEN_BYTES / MIB,
    },
    "quiz-blocks": lambda: {
        "short_request_blocks": blocks(256 + 100),
        "hundred_short": 100 * blocks(256 + 100),
        "long_prompt_blocks": blocks(8000),
        "total": 100 * blocks(256 + 100) + 5 * blocks(8000),
        "total_after_generation": 100 * blocks(256 + 100) + 5 * blocks(8000 + 100),
        "pool": 10_000,
        "static_unused_slots": 8192 - (256 + 100),
    },
    "kv-per-token-144kib": lambda: {
        "kib": EXPLAINER_TOKEN_BYTES / KIB,
        "pool_gib": POOL_TOKENS * EXPLAINER_TOKEN_BYTES / GIB,
        "pool_tokens": POOL_TOKENS,
    },
    "boot-line-concurrency": lambda: {
        "tokens": POOL_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "concurrency": POOL_TOKENS / MAX_MODEL_LEN,
    },
    "block-table-size": lambda: {f"block{size}_mib": 128 * blocks(MAX_MODEL_LEN, size) * 4 / MIB for size in (16, 1)},
    "block-table-share": lambda: 100 * 128 * blocks(MAX_MODEL_LEN) * 4 / (POOL_TOKENS * EXPLAINER_TOKEN_BYTES),
    "block-elements": lambda: BLOCK_SIZE * 128,
    "shared-prefix-whole-blocks": lambda: SHARED_OF_1000,
    "cow-of-shared-prefix": lambda: SHARED_OF_1000,
    "last-block-bytes": lambda: {"per_sequence_mib": LAST_BLOCK_MIB, "bound_95_mib": 95 * LAST_BLOCK_MIB},
    "request-32k": lambda: 32 * KIB * EXPLAINER_TOKEN_BYTES / GIB,
    "one-long-sequence": lambda: {
        "paged": blocks(32 * KIB) * BLOCK_SIZE * EXPLAINER_TOKEN_BYTES / GIB,
        "contiguous": 32 * KIB * EXPLAINER_TOKEN_BYTES / GIB,
    },
    "short-prefix-shares-nothing": lambda: 12 // BLOCK_SIZE,
    "idle-slots": lambda: 2048 - 280,
    "last-block-share": lambda: 100 * (BLOCK_SIZE - 1) / 512,
    "shared-system-prompt": lambda: 4000 // BLOCK_SIZE,
}
