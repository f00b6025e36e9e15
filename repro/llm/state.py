"""What the executor remembers about a request: its prompt and what its sequences have produced so far.

The scheduler works without ever seeing a token; the tokens are here."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from repro.engine.memory.prefix_cache import block_hashes
from repro.engine.sequence import Request, Sequence
from repro.llm.detokenizer import Detokenizer


class Best(NamedTuple):
    """The best tokens of one step and their log-probabilities, best first."""

    values: list[float]
    tokens: list[int]

    @staticmethod
    def rows(values: Any, tokens: Any) -> list["Best"]:
        """One a row of two arrays or tensors [rows, count]."""
        return [Best(*row) for row in zip(values.tolist(), tokens.tolist())]

    def of(self, count: int, token: int, value: float) -> dict[int, float]:
        """The `count` best as token -> log-probability, and the chosen token's wherever it stands."""
        return dict(zip(self.tokens[:count], self.values[:count])) | {token: value}


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence's output. `logprobs` are the model's own (temperature 1), empty if they are not asked for.

    `best_logprobs` has, for each token, the best log-probabilities asked for. `stopped` says that a stop token, kept as
    the last one, or a stop text ended it, and `stop_reason` which; the text before it is `text_end` characters long.
    `detokenizer` is there if stop texts are looked for. `score` is that of a finished beam."""

    request: "RequestState"
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best_logprobs: list[dict[int, float]] = field(default_factory=list)
    stopped: bool = False
    stop_reason: int | str | None = None
    text_end: int | None = None
    detokenizer: Detokenizer | None = None
    score: float | None = None

    @property
    def cumulative_logprob(self) -> float:
        return float(sum(self.logprobs))

    def stops(self, tokenizer: Any) -> bool:
        """Whether the newest token ends the output; notes why. To be asked once a token: the text grows with it."""
        sampling, token = self.request.request.sampling, self.tokens[-1]
        if token in self.request.stops:
            self.stop_reason = token
        elif sampling.stop:
            if self.detokenizer is None:
                self.detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            self.detokenizer.add(token)
            self.stop_reason, self.text_end = self.detokenizer.stop_text, self.detokenizer.text_end
        return self.stop_reason is not None

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens at positions start .. stop-1 of prompt and output, int64."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return np.concatenate([prompt, np.asarray(self.tokens, np.int64)])[start:stop]


@dataclass(eq=False)
class RequestState:
    """A request with its prompt's token ids, int64 [prompt_tokens], and the tokens that end an output.

    `sequences` in the order of its samples. Beams: `beam_scores` are the sums of log-probabilities of those that go on;
    `finished_beams`, the best n that ended, best first. `prompt_logprobs` as in RequestResult. The samples count from
    `first_sample`: a request may be one of several that share a user's n samples."""

    request: Request
    prompt: np.ndarray
    stops: frozenset[int] = frozenset()
    sequences: list[SequenceState] = field(default_factory=list)
    by_seq: dict[Sequence, SequenceState] = field(default_factory=dict)
    beam_scores: np.ndarray | None = None
    finished_beams: list[SequenceState] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_unfinished: int = 0
    first_sample: int = 0

    def __post_init__(self) -> None:
        self._hashes: list[bytes] = []
        sampling = self.request.sampling
        self.num_unfinished = sampling.n
        self.sequences = [SequenceState(self, self.first_sample + index) for index in range(sampling.n)]
        self.is_adjusted = sampling.changes_logits and not sampling.use_beam_search
        self.can_stop = bool(self.stops or sampling.stop)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """What its full blocks hold (`repro.engine.memory.prefix_cache`): of the prompt and, if it has one sequence, of
        the output so far."""
        known = len(self.prompt) + (len(self.sequences[0].tokens) if len(self.sequences) == 1 else 0)
        hashed, full = len(self._hashes), known // block_size
        if full > hashed:
            token_ids = self.sequences[0].token_ids(hashed * block_size, full * block_size)
            before = self._hashes[-1] if self._hashes else None
            self._hashes += block_hashes(token_ids, block_size, before=before)
        return self._hashes

    @property
    def last_stored(self) -> int:
        """Tokens whose K/V is stored at the very end: the newest token's never is."""
        return self.request.prompt_tokens + self.request.output_tokens - 1

    @property
    def ranked(self) -> list[SequenceState]:
        """The samples, or the finished beams, best first."""
        return self.finished_beams if self.request.sampling.use_beam_search else self.sequences
