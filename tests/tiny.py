"""The smallest Llama that tests decode with, which has weights of its own and no special tokens; a tokenizer for it."""

from __future__ import annotations

import dataclasses
import functools

import tokenizers
import transformers

from repro.llm import LLM, models
from repro.llm.pool import PoolSize

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


def letters() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of 101 tokens: <s>, which it puts before a text, </s>, 95 printable characters and three pairs."""
    characters = [chr(code) for code in range(32, 127)]
    pairs = ["ab", "lo", "an"]
    vocabulary = {token: place for place, token in enumerate(["<s>", "</s>", "<pad>", *characters, *pairs])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in pairs], unk_token="<pad>")
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Fuse()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


@functools.cache
def tiny() -> models.LoadedModel:
    return models.from_config(TINY, "tiny")


@functools.cache
def spoken() -> models.LoadedModel:
    """The same model with a tokenizer that puts a begin-of-text token before each text."""
    return dataclasses.replace(tiny(), tokenizer=letters())


def llm(loaded, **options) -> LLM:
    return LLM(loaded, quiet=True, **{"block_size": 4, "pool": PoolSize(num_blocks=200)} | options)


def tokens(engine: LLM, prompts, sampling=None, **options) -> list[list[list[int]]]:
    return [one.token_ids for one in engine.generate(prompts, sampling, progress=False, **options)]
