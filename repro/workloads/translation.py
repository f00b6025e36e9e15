"""Translation requests that share a prefix (section 6.4, Fig. 16): instruction and examples, then a sentence.

What: a prompt is the shared prefix (80 tokens with one example, 341 with five) and one English sentence; the output is
its German translation. The paper takes the sentences of WMT16's test set with LLaMA's tokenizer. On request they come
from the hub or a file; otherwise from a distribution whose numbers are derived here, so that no network is needed.
Nothing in it is fitted to a result of the paper.

The default lengths:
- The test set's card gives 735,508 bytes for 2,999 pairs; without Arrow's two offsets of 4 bytes a pair that is
  237.3 bytes of text. German news takes about 1.13 times the bytes of English: 125.9 and 111.4 bytes.
- LLaMA's tokenizer makes a token of 4.12 bytes of English (counted on 32 sentences of WMT16's test sets) and of 3.52
  bytes of German (27 sentences of news), and puts one token before each text: means of 28 and 37 tokens.
- Sentence lengths are about lognormal, here with a standard deviation of half the mean (0.47 in either sample);
  a translation's has a factor of its own, with 0.15 (the six pairs at hand).

The pairs behind Fig. 16 are not known, nor how exact this is: `scale` stretches both lengths, to show what depends on
it."""

from dataclasses import dataclass, replace

import numpy as np

from repro.errors import UserError
from repro.workloads import length_source
from repro.workloads.lengths import LENGTHS_STREAM, LengthSource, SourceFacts
from repro.workloads.trace import Trace, build_trace

LLAMA_TOKENIZER = "huggyllama/llama-13b"
MEAN_TOKENS = np.array([28.0, 37.0])  # English, German
SENTENCE_VARIATION, TRANSLATION_VARIATION = 0.5, 0.15  # standard deviation over mean


def _lognormal(normal: np.ndarray, variation: float) -> np.ndarray:
    """Mean 1 and the given standard deviation, from standard normal numbers."""
    variance = np.log1p(variation**2)
    return np.exp(np.sqrt(variance) * normal - variance / 2)


@dataclass(frozen=True)
class SentenceLengths:
    """The default: lengths of English sentences and of their German translations, in tokens, without a prefix."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.scale <= 10:
            raise UserError(f"scale = {self.scale}: sentences can be stretched by a factor from 0.1 to 10")

    @property
    def facts(self) -> SourceFacts:
        source, target = self.scale * MEAN_TOKENS
        return SourceFacts(
            source="sentences like those of WMT16 English to German, from published sizes; not the pairs themselves",
            recipe=f"independent lognormal draws, stretched by {self.scale:g}",
            filter="none",
            mean_prompt_tokens=float(source),
            mean_output_tokens=float(target),
        )

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2] (source, target) tokens, at least 2 each (the tokenizer's own one and a word). A seed's draws
        of any length begin alike."""
        normal = np.random.default_rng([seed, LENGTHS_STREAM]).standard_normal((num_pairs, 2))
        sentence = _lognormal(normal[:, :1], SENTENCE_VARIATION) * MEAN_TOKENS
        sentence[:, 1] *= _lognormal(normal[:, 1], TRANSLATION_VARIATION)
        return np.maximum(np.rint(self.scale * sentence), 2).astype(np.int64)


@dataclass(frozen=True, eq=False)
class WithPrefix:
    """Lengths of another source, `prefix_tokens` tokens before each prompt."""

    sentences: LengthSource
    prefix_tokens: int

    @property
    def facts(self) -> SourceFacts:
        facts = self.sentences.facts
        return replace(
            facts,
            recipe=f"{self.prefix_tokens} tokens of a shared prefix and a sentence: {facts.recipe}",
            mean_prompt_tokens=facts.mean_prompt_tokens + self.prefix_tokens,
        )

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        return self.sentences.draw(num_pairs, seed) + np.array([self.prefix_tokens, 0])


def translation_trace(
    prefix_tokens: int,
    rate: float,
    duration_s: float,
    seed: int,
    lengths: str | None = None,
    scale: float = 1.0,
    max_model_len: int = 2048,
    tokenizer: str = LLAMA_TOKENIZER,
) -> Trace:
    """A trace whose prompts all begin with the same `prefix_tokens` tokens, which their lengths include.

    `lengths` of sentences without prefix are None (the default distribution, stretched by `scale`), a CSV file of
    pairs, the data set's own .json, .jsonl or .parquet file, or "hub". UserError for impossible numbers."""
    if not 0 <= prefix_tokens < max_model_len:
        raise UserError(f"prefix_tokens = {prefix_tokens} must be from 0 to {max_model_len - 1}")
    if lengths is not None and scale != 1:
        raise UserError(f"scale = {scale} stretches the default lengths only; leave it at 1 with lengths = {lengths!r}")
    sentences: LengthSource = SentenceLengths(scale)
    if lengths is not None:
        sentences = length_source("translation", lengths, max_model_len - prefix_tokens, tokenizer)
    return build_trace("translation", WithPrefix(sentences, prefix_tokens), rate, duration_s, seed)
