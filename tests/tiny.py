"""The smallest Llama that tests decode with: it has weights of its own and no special tokens."""

from __future__ import annotations

import transformers

TINY = transformers.LlamaConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=101,
    intermediate_size=48,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
